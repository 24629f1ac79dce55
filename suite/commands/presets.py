"""`suite presets` and `suite presets show`: the published algorithms, slot by slot."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from suite.commands.catalogue import console
from suite.config import RunConfig, apply, differences, flatten

if TYPE_CHECKING:
    from ablations.preset import Origin, Preset

_SLOTS = ("rollout.", "reward.", "objective.", "critic.")
"""Where the slots of an algorithm are; of other sections only what a preset sets is shown."""


def presets() -> int:
    """Print the presets: title, parent, what each sets in its parent."""
    from ablations.load import load_preset
    from ablations.load import presets as known

    table = Table("preset", "algorithm", "changes", "sets", title="suite presets show NAME")
    for name in known():
        preset = load_preset(name)
        sets = [f"{option.partition('.')[2]} = {value.value}" for option, value in preset.slots.items()]
        sets += [f"without {option.partition('.')[2]}" for option in preset.without]
        table.add_row(name, preset.title, preset.parent or "", escape(", ".join(sets)))
    console().print(table)
    return 0


def show(name: str, diff: str) -> int:
    """Print every slot of a preset, its value and where it comes from; with `diff` where it differs from another."""
    from ablations.load import load_preset
    from ablations.preset import chain, check

    preset = load_preset(name)
    check(preset)
    screen = console()
    screen.print(f"[bold]{preset.name}[/]  {preset.title}\n{preset.paper}", highlight=False, soft_wrap=True)
    screen.print(f"line   {' > '.join(['defaults', *(elder.name for elder in chain(preset))])}", highlight=False)
    if preset.note:
        screen.print(f"note   {preset.note}", highlight=False, soft_wrap=True)
    if diff:
        other = load_preset(diff)
        check(other)
        screen.print(_difference(preset, other))
        return 0
    screen.print(_slots(preset))
    screen.print(f"train  {command(preset)}", highlight=False, soft_wrap=True)
    return 0


def command(preset: Preset) -> str:
    """The command that trains the preset in the miniature."""
    words = ["suite", "train"]
    for option, (_, value) in differences(_config(preset), RunConfig()).items():
        section, _, flag = option.replace("_", "-").partition(".")
        if isinstance(value, bool):
            words.append(f"--{section}.{'' if value else 'no-'}{flag}")
        else:
            words += [f"--{section}.{flag}", str(value)]
    return shlex.join(words)


def _config(preset: Preset, *, published: bool = False) -> RunConfig:
    from ablations.preset import overrides

    return apply(RunConfig(), overrides(preset, published=published))


def _shown(*presets: Preset) -> list[str]:
    """The options of the slots that something reads, and all that the presets set, in the order of declaration."""
    from ablations.preset import origins
    from suite.options import reads

    wanted = {option for preset in presets for option in origins(preset, published=True)}
    for preset in presets:
        wanted |= {option for option in reads(_config(preset)) if option.startswith(_SLOTS)}
    return [option for option in flatten(RunConfig()) if option in wanted]


def _from(origin: Origin | None, preset: Preset) -> str:
    if origin is None:
        return "default"
    return origin.value.words if origin.preset is preset else f"{origin.preset.name}: {origin.value.words}"


def _slots(preset: Preset) -> Table:
    from ablations.preset import origins

    table = Table("option", "value", "from", "published", "from")
    small, large = origins(preset), origins(preset, published=True)
    here, there = flatten(_config(preset)), flatten(_config(preset, published=True))
    for option in _shown(preset):
        row: list[Any] = [option, here[option], _from(small.get(option), preset), "", ""]
        if large.get(option) != small.get(option):
            row[3:] = [there[option], _from(large.get(option), preset)]
        table.add_row(*(escape(str(cell)) for cell in row))
    return table


def _difference(preset: Preset, other: Preset) -> Table:
    columns = [f"{p.name}{words}" for words in ("", ", published") for p in (preset, other)]
    table = Table("option", *columns)
    layers = [[flatten(_config(p, published=published)) for p in (preset, other)] for published in (False, True)]
    for option in _shown(preset, other):
        values = [values[option] for layer in layers for values in layer]
        if values[0] != values[1] or values[2] != values[3]:
            table.add_row(option, *(escape(str(value)) for value in values))
    return table

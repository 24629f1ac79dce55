"""The command line: parses, calls, prints.

Everything heavy is imported inside the commands, so that `suite --help` answers at once.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Literal

import tyro

from suite.config import RunConfig, apply, flatten
from suite.foreign_names import hint
from suite.reward_config import RewardModelConfig

app = tyro.extras.SubcommandApp()
axes_app = tyro.extras.SubcommandApp()
new_app = tyro.extras.SubcommandApp()
presets_app = tyro.extras.SubcommandApp()
reward_app = tyro.extras.SubcommandApp()

Word = tyro.conf.Positional[str]
Words = tyro.conf.UseAppendAction[tuple[str, ...]]
Files = tyro.conf.UseAppendAction[tuple[Path, ...]]
Place = Annotated[Path | None, tyro.conf.arg(metavar="PATH")]
Url = Annotated[str | None, tyro.conf.arg(metavar="URL")]
Seeds = Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="INT [INT ...]")]
Flag = tyro.conf.FlagCreatePairsOff[bool]
Format = Literal["html", "md", "csv", "latex", "json"]


@app.command
def train(
    config: Annotated[RunConfig, tyro.conf.arg(name="")] = RunConfig(),  # noqa: B008  frozen
    name: str = "run",
    preset: str = "",
    folder: Place = None,
    plugin: Files = (),
    nproc: int = 1,
) -> int:
    """Train one run and write its folder.

    Args:
        config: The run.
        name: Names the run in its folder and in W&B.
        preset: A published algorithm (see `suite presets`), whose values hold where no option is given.
        folder: Where its results go; by default runs/train/NAME-IDENTITY below the current folder.
        plugin: A Python file that is imported first; what it registers can be chosen. May be given again.
        nproc: Processes that share the work, on a GPU each where there are any; changes results by rounding alone.
    """
    from suite.commands.single import train as command

    if preset:
        from ablations.preset import preset as values

        given = flatten(config)
        explicit = {option: given[option] for option in map(_option, _given.get()) if option in given}
        config = apply(apply(RunConfig(), values(preset)), explicit)
    return command(config, name, folder, plugin, nproc)


@app.command
def run(
    study: Word,
    workers: int | Literal["auto"] = 2,
    seeds: Seeds = None,
    arm: Words = (),
    axis: Words = (),
    dry_run: Flag = False,
    folder: Place = None,
    storage: Url = None,
    rerun_stale: Flag = False,
    allow_mixed: Flag = False,
    tuned: Place = None,
    leave_within: float = 25.0,
    gpus_per_cell: int = 0,
) -> int:
    """Run what is missing of a study; interrupted, run it again.

    Args:
        study: A study's name (see `suite studies`) or the path of a file that defines STUDY.
        workers: Processes that run cells side by side; auto: one a core, as far as memory goes; 0: only declare.
        seeds: Only these seeds, of the study's own.
        arm: Only this arm. May be given again.
        axis: Vary this axis (a name or a path) around the study's base, instead of its own arms. May be given again.
        dry_run: Show cells, differences, inert arms and cost, and run nothing.
        folder: The study's folder; by default runs/STUDY below the current folder.
        storage: URL of the Optuna storage; by default an SQLite file in the study's folder.
        rerun_stale: Run finished cells again whose arm or code has changed.
        allow_mixed: Record other library versions or code, instead of refusing them.
        tuned: Of a study with a search: the folder whose winners are run; by default the study's folder.
        leave_within: Seconds that workers have, after SIGTERM or Ctrl-C, to end their step and write a checkpoint.
        gpus_per_cell: GPUs that a worker has to itself; a cell runs on as many ranks. 0: one, shared if they are few.
    """
    from suite.commands.study import run as command

    options = (folder, storage, rerun_stale, allow_mixed, tuned, leave_within, gpus_per_cell)
    return command(study, workers, seeds, arm, axis, dry_run, *options)


@app.command
def tune(
    study: Word,
    workers: int | Literal["auto"] = 2,
    dry_run: Flag = False,
    folder: Place = None,
    storage: Url = None,
    rerun_stale: Flag = False,
    allow_mixed: Flag = False,
    gpus_per_cell: int = 0,
) -> int:
    """Search each arm of a study, then run the winners under fresh seeds; interrupted, run it again.

    Args:
        study: A study's name or the path of a file that defines STUDY, with a search.
        workers: Processes that run cells side by side; auto: one a core, as far as memory goes.
        dry_run: Show ranges and budget, and run nothing.
        folder: The study's folder; by default runs/STUDY below the current folder. Trials lie beside it.
        storage: URL of the Optuna storage; by default an SQLite file in each folder.
        rerun_stale: Run finished cells of the comparison again whose winner or code has changed.
        allow_mixed: Record other library versions or code, instead of refusing them.
        gpus_per_cell: GPUs that a worker has to itself; a cell runs on as many ranks. 0: one, shared if they are few.
    """
    from suite.commands.tune import tune as command

    return command(study, workers, dry_run, folder, storage, rerun_stale, allow_mixed, gpus_per_cell)


@app.command
def status(study: Word, folder: Place = None, storage: Url = None) -> int:
    """How far a study is: cells done, running, waiting and failed.

    Args:
        study: A study's name, the path of its file, or its folder.
        folder: The study's folder; by default runs/STUDY below the current folder.
        storage: As given to `suite run`.
    """
    from suite.commands.study import status as command

    return command(study, folder, storage)


@app.command
def retry(study: Word, arm: Words = (), seeds: Seeds = None, folder: Place = None, storage: Url = None) -> int:
    """Queue a study's failed cells again, for the next `suite run`.

    Args:
        study: A study's name, the path of its file, or its folder.
        arm: Only this arm. May be given again.
        seeds: Only these seeds.
        folder: The study's folder; by default runs/STUDY below the current folder.
        storage: As given to `suite run`.
    """
    from suite.commands.study import retry as command

    return command(study, arm, seeds, folder, storage)


@app.command
def report(study: Word, folder: Place = None, out: Place = None, format: tuple[Format, ...] = ()) -> int:
    """Write a study's report from its W&B files and print the verdicts.

    Args:
        study: A study's name, the path of its file, or its folder.
        folder: The study's folder; by default runs/STUDY below the current folder.
        out: Where the report goes; by default the folder `report` in the study's folder.
        format: Which files to write; all by default.
    """
    from suite.commands.study import report as command

    return command(study, folder, out, format)


@app.command
def plan(
    study: Word,
    workers: int = 2,
    seeds: Seeds = None,
    arm: Words = (),
    axis: Words = (),
    folder: Place = None,
    storage: Url = None,
    sd: float | None = None,
    pilot_seeds: int = 0,
    pilot_steps: int = 0,
) -> int:
    """What a study costs, measured, and which of its claims the seeds can decide.

    Args:
        study: A study's name or the path of a file that defines STUDY.
        workers: Processes that would run cells side by side.
        seeds: Only these seeds, of the study's own.
        arm: Only this arm. May be given again.
        axis: Vary this axis around the study's base, instead of its own arms. May be given again.
        folder: The study's folder; its finished cells, if there are any, tell times and spread.
        storage: As given to `suite run`.
        sd: Standard deviation over seeds of a claim's paired difference, in the metric's unit, for all claims.
        pilot_seeds: Measure that on so many seeds, at least 2, that the study does not use.
        pilot_steps: Optimizer steps of those runs; by default all of the study's; fewer understate the spread.
    """
    from suite.commands.power import plan as command

    return command(study, workers, seeds, arm, axis, folder, storage, sd, pilot_seeds, pilot_steps)


@app.command
def studies() -> int:
    """The studies that come with the project."""
    from suite.commands.catalogue import studies as command

    return command()


@axes_app.command(name="list", is_default=True)
def axes_list() -> int:
    """The axes that come with the project."""
    from suite.commands.catalogue import axes as command

    return command()


@axes_app.command(name="show")
def axes_show(name: Word) -> int:
    """What each arm of an axis changes, and where that comes from.

    Args:
        name: The axis' name or the path of its file.
    """
    from suite.commands.catalogue import show_axis as command

    return command(name)


@presets_app.command(name="list", is_default=True)
def presets_list() -> int:
    """The published algorithms that come with the project."""
    from suite.commands.presets import presets as command

    return command()


@presets_app.command(name="show")
def presets_show(name: Word, diff: str = "") -> int:
    """Every slot of an algorithm: its value, the value published, and where each comes from.

    Args:
        name: The preset's name or the path of its file.
        diff: Another preset: show only where the two differ.
    """
    from suite.commands.presets import show as command

    return command(name, diff)


@new_app.command(name="axis")
def new_axis(name: Word, folder: Place = None) -> int:
    """Write the file of a new axis, a working example to be changed.

    Args:
        name: A Python name, such as length_penalty.
        folder: Where the file goes; by default the project's own axes.
    """
    from suite.commands.catalogue import new_axis as command

    return command(name, folder)


@reward_app.command(name="train")
def reward_model_train(
    folder: Path,
    config: Annotated[RewardModelConfig, tyro.conf.arg(name="")] = RewardModelConfig(),  # noqa: B008  frozen
) -> int:
    """Train a reward model on preferences.

    Args:
        folder: Where it goes, a plain Hugging Face folder.
        config: The reward model.
    """
    from suite.commands.reward_model import train as command

    return command(config, folder)


@reward_app.command(name="eval")
def reward_model_eval(
    config: Annotated[RewardModelConfig, tyro.conf.arg(name="")] = RewardModelConfig(),  # noqa: B008  frozen
) -> int:
    """How well a reward model predicts preferences: accuracy, margin, calibration, beside length alone.

    Args:
        config: The reward model (`--model`) and the preferences; what only training reads is not looked at.
    """
    from suite.commands.reward_model import evaluate as command

    return command(config)


@app.command
def serve(
    model: Word,
    host: str = "127.0.0.1",
    port: int = 8000,
    dtype: Literal["float32", "bfloat16"] = "float32",
    max_model_len: int = 0,
    tensor_parallel_size: int = 1,
    memory_share: float = 0.0,
    transfer: Literal["auto", "file", "nccl"] = "auto",
    trust_remote_code: Flag = False,
) -> int:
    """A vLLM engine for a run elsewhere (`rollout.engine = vllm_server`), until it is stopped.

    Whoever can reach the port can change the weights: use it on a trusted network only.

    Args:
        model: A Hugging Face id, a folder, or seed:NAME: the architecture of the runs to come, and the first weights.
        host: Address to listen at; 0.0.0.0 lets other machines in.
        port: Port to listen at.
        dtype: Precision of the weights.
        max_model_len: Longest prompt and completion together, tokens; 0: what the model goes to.
        tensor_parallel_size: GPUs that share the engine.
        memory_share: Share of a GPU's memory, weights included (0: vLLM's default); on a CPU, of the machine's memory
            for the key-value cache (0: 0.03).
        transfer: How weights come: through a file, or from GPU to GPU; auto: nccl on GPUs, file elsewhere.
        trust_remote_code: Run code that comes with the model.
    """
    from suite.commands.serve import serve as command

    options = (dtype, max_model_len, tensor_parallel_size, memory_share, transfer, trust_remote_code)
    return command(model, host, port, *options)


@app.command
def doctor(folder: Path = Path("runs")) -> int:
    """What this machine can run, and what to install for the rest.

    Args:
        folder: Where runs would lie.
    """
    from suite.commands.catalogue import doctor as command

    return command(folder)


app.command(axes_app, name="axes", help="The axes: what can be varied, and what each arm changes.")
app.command(presets_app, name="presets", help="The published algorithms as bundles of options, each with its source.")
app.command(new_app, name="new", help="Start a file of your own.")
app.command(reward_app, name="reward-model", help="Reward models: train one on preferences, evaluate one.")


_given: ContextVar[tuple[str, ...]] = ContextVar("given", default=())
"""The words of the command line."""


def _option(word: str) -> str:
    """The option that a word of the command line names, as the configuration writes it; empty if none."""
    return word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else ""


def _check_names(args: Sequence[str]) -> None:
    """Raises ValueError, with our name, for an option of `suite train` that is TRL's or verl's."""
    known = {*flatten(RunConfig()), *inspect.signature(train).parameters, "help"}
    for word in args[1:] if args[:1] == ["train"] else []:
        if (name := _option(word)) and name not in known and (words := hint(name)):
            raise ValueError(f"unknown option {word.partition('=')[0]}; {words}")


def main(args: list[str] | None = None) -> int:
    """The console script. Exit codes: 0; 1 for failed cells; 2 for a mistake, said in one line; 130 for Ctrl-C.

    SUITE_TRACEBACK=1 shows where a mistake was found.
    """
    description = "Ablation studies of reinforcement learning for language models, from grid to table."
    given = sys.argv[1:] if args is None else args
    _given.set(tuple(given))
    try:
        _check_names(given)
        names = (tyro.conf.PositionalMetavarFromFieldName,)
        return int(app.cli(prog="suite", description=description, args=args, config=names))
    except ValueError as error:
        if os.environ.get("SUITE_TRACEBACK") == "1":
            raise
        print(f"suite: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130

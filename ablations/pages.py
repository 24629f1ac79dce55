"""What the presets say of themselves, as pages: docs/algorithms.md, and the presets' part of SOURCES.md.

After a preset has changed: `python -c "from ablations.pages import write; write()"`; a test fails until then.
"""

from __future__ import annotations

from pathlib import Path

from ablations.load import load_preset, presets
from ablations.preset import Preset, Value, overrides
from suite.config import RunConfig, apply, flatten

ROOT = Path(__file__).resolve().parent.parent
MARK = "## Presets\n"
"""Where the generated part of SOURCES.md begins; it goes to the end."""

_SLOTS = (
    ("family of the loss", "objective.name"),
    ("advantage", "objective.advantage"),
    ("std of the advantage", "objective.scale_rewards"),
    ("trust region", "objective.trust_region"),
    ("aggregation", "objective.loss_agg_mode"),
    ("KL to the reference", "objective.kl"),
    ("KL estimator", "objective.kl_estimator"),
    ("sampler against learner", "objective.importance_sampling_mode"),
    ("pairs", "objective.pair_rule"),
    ("supervised rows", "objective.sft_rows"),
    ("entropy covers (DPO)", "objective.entropy_over"),
    ("where rollouts come from", "rollout.source"),
    ("reward shaping", "reward.shaping"),
    ("task", "task.name"),
)

_HEAD = """# Algorithms

A published algorithm is a *preset*: a named bundle of slot values, each with its source. The slots compose freely; a
preset is no more than a place in their space, and `suite presets show NAME --diff OTHER` says how far two are apart.
This page is generated from `ablations/presets/`.

## The slots

| slot | option | values |
|---|---|---|
"""

_MORE = """
Beside them stand numbers and switches: `objective.epsilon_low` and `epsilon_high`, `kl_coef`, `entropy_coef` (fixed,
or adapting to `entropy_target`), `positive_nll_coef`, `nll_coef`, `grpo_coef`, `label_smoothing`,
`whiten_advantages`, `length_adaptive_alpha`, `importance_sampling_clip_max` and `importance_sampling_clip_min`;
`critic.*` for estimators with a critic; `rollout.dynamic_sampling`, `mask_truncated_completions`, `num_generations`
and `sync_period` for what is sampled and when. `suite train --help` lists every option with its unit and source; one
that nothing reads under a configuration is refused.

## When the sampler is not quite the learner

An engine samples from slightly other probabilities than the learner computes under the same weights. `kl/sampler`,
`mismatch/ratio_mean` and `mismatch/ratio_max` measure it in every run, before anything is bounded.
`objective.importance_sampling_mode` corrects for it: the policy loss of a token (no other term of the loss) is
multiplied by w, which carries no gradient and changes no denominator.

| mode | w, with r_t = exp(learner_logprobs - sampler_logprobs) |
|---|---|
| `token_truncate` | r_t, clipped to [`importance_sampling_clip_min`, `importance_sampling_clip_max`] |
| `token_mask` | r_t, and 0 outside of the bounds |
| `sequence_truncate` | the product of r_t over the sequence, clipped, for each of its tokens |
| `sequence_mask` | the product, and 0 for the whole sequence outside of the bounds |

By token w is biased and varies little, by sequence it is unbiased (but for the bounds) and varies much. The names are
TRL's; in verl they are `rollout_is` and, for masking alone, `rollout_rs`. It is refused

- where sampler and learner are not of the same weights, that is unless `rollout.sync_period` is the number of
  optimizer steps per rollout batch: learner_logprobs would hold the staleness too;
- with `objective.ratio_reference = generator`, whose ratio is already taken against the sampler: the same factor would
  enter twice;
- with top-p or top-k, whose sampler log-probs are of a part of the vocabulary;
- by objectives that do not read it: preference losses without a GRPO part, and supervised ones.

With the in-process sampler in float32, sampler and learner agree to rounding, and the correction is reported as inert.

## The presets

At any scale; rates, batches and lengths of the authors' experiments are a second layer (`published`), which studies
at their scale use.

| preset | advantage | std | trust region | aggregation | KL | changes | what it sets there |
|---|---|---|---|---|---|---|---|
"""

_NOTES = """
- `grpo` is GRPO as first published; `grpo_text` and `grpo_code` are the two that arXiv 2506.21495 describes and runs.
- Length-adaptive GAE is VAPO's (2504.05118, section 4.2), not VC-PPO's, as some surveys have it.
- Rewards of verified tasks are 1 and 0 here, 1 and -1 in DAPO, VC-PPO and VAPO: the soft overlong punishment is halved
  with them.
- `best_of_n` trains nothing: it says how many samples an evaluation takes.

In a study: `Arm("dapo", preset("dapo"))` with `from ablations.preset import preset`. `preset("dapo", published=True)`
adds the published layer, and `preset("grpo", objective={"num_minibatches": 4})` changes single options. An arm that a
preset makes replaces the whole objective.
"""


def all_presets() -> list[Preset]:
    """Every preset of the project, by name."""
    return [load_preset(name) for name in presets()]


def algorithms() -> str:
    """docs/algorithms.md: the slots, the presets as rows, what each changes in its parent."""
    from suite.options import choices

    known = choices()
    slots = [f"| {words} | `{option}` | {_ticked(known[option])} |" for words, option in _SLOTS]
    rows = [_algorithm(preset) for preset in all_presets()]
    return _HEAD + "\n".join(slots) + "\n" + _MORE + "\n".join(rows) + "\n" + _NOTES


def _ticked(values: tuple[object, ...]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _algorithm(preset: Preset) -> str:
    from suite.options import reads

    config = apply(RunConfig(), overrides(preset))
    read, objective = reads(config), config.objective
    clip = f"clip {objective.epsilon_low:g}, {objective.epsilon_high:g}"
    region = clip if objective.trust_region == "clip" else objective.trust_region
    place = (
        objective.kl if objective.kl == "none" else f"{objective.kl}, {objective.kl_estimator}, {objective.kl_coef:g}"
    )
    cells = {
        "objective.advantage": objective.advantage,
        "objective.scale_rewards": objective.scale_rewards,
        "objective.trust_region": region,
        "objective.loss_agg_mode": objective.loss_agg_mode,
        "objective.kl": place,
    }
    shown = [value if option in read and not preset.evaluates else "" for option, value in cells.items()]
    sets = [f"{option.removeprefix('objective.')} {value.value}" for option, value in preset.slots.items()]
    words = ", ".join(sets) if preset.parent or preset.evaluates else ""
    return f"| `{preset.name}` | {' | '.join(shown)} | {preset.parent or ''} | {words} |"


def sources() -> str:
    """The presets' part of SOURCES.md: every value that a preset sets, and where it stands."""
    lines = [
        MARK,
        "Values that a source leaves open are marked *ours*. A *published* value is that of the authors' experiments;",
        "the others hold at any scale. Length-adaptive GAE is VAPO's, not VC-PPO's, as some surveys have it. This part",
        "is generated from `ablations/presets/`.",
    ]
    for preset in all_presets():
        lines += ["", f"### {preset.name}: {preset.title}", "", f"{preset.paper}.{_line(preset)}", ""]
        lines += ["| option | value | source |", "|---|---|---|"]
        lines += [_source(option, value, "") for option, value in preset.slots.items()]
        lines += [_source(option, value, ", published") for option, value in preset.published.items()]
    return "\n".join(lines) + "\n"


def _line(preset: Preset) -> str:
    default = flatten(RunConfig())
    words = f" Changes `{preset.parent}`." if preset.parent else ""
    words += "".join(f" Without `{option}` (back at {default[option]})." for option in preset.without)
    return words + (f" {preset.note}" if preset.note else "")


def _source(option: str, value: Value, layer: str) -> str:
    where = f"*ours*: {value.source}" if value.ours else value.source
    return f"| `{option}` | {value.value}{layer} | {where.replace('|', chr(92) + '|')} |"


def write(root: Path = ROOT) -> None:
    """Bring docs/algorithms.md and SOURCES.md up to the presets."""
    (root / "docs" / "algorithms.md").write_text(algorithms(), encoding="utf-8")
    path = root / "SOURCES.md"
    before = path.read_text(encoding="utf-8").partition(MARK)[0].rstrip("\n")
    path.write_text(f"{before}\n\n{sources()}", encoding="utf-8")

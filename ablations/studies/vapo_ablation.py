"""VAPO's own table at its own scale: PPO, VAPO, and VAPO without one of its parts at a time.

Every number is the preset's published one. Ours: the model (Qwen2.5-32B there), the data and its prompt (those of
DAPO), where the critic starts (a reward model there), the number of steps, the seeds, and what is held out (AIME 2024
there).
"""

from ablations.parts import Ablation, Part
from ablations.preset import preset
from ablations.studies.dapo_ablation import STUDY as DAPO
from suite.config import RunConfig, apply
from suite.study import Claim, Study

PARTS = (
    Part("value_pretraining", "value pretraining", ("critic.pretrain_steps",)),
    Part("decoupled_gae", "decoupled GAE", ("critic.gae_lambda_value",)),
    Part("length_adaptive_gae", "length-adaptive GAE", ("objective.length_adaptive_alpha",)),
    Part("clip_higher", "clip-higher", ("objective.epsilon_high",)),
    Part("token_loss", "token-level loss", ("objective.loss_agg_mode",)),
    Part("positive_nll", "positive-example NLL", ("objective.positive_nll_coef",)),
    Part("group_sampling", "group sampling", ("rollout.num_prompts", "rollout.num_generations")),
)
"""Table 1 (2504.05118), in its order: PPO 5; without each part 11, 33, 45, 46, 53, 54, 55; VAPO 60 (AIME 2024)."""


def taken_apart(overrides: dict[str, object], plain: dict[str, object], *, published: bool) -> Ablation:
    """VAPO and its parts under further overrides, those of `plain` in PPO only."""
    before = {"critic.pretrain_steps": 0, **plain}
    ppo = apply(RunConfig(), {**preset("ppo", published=published), **overrides, **before})
    vapo = apply(RunConfig(), {**preset("vapo", published=published), **overrides})
    return Ablation(vapo, ppo, PARTS, "PPO", "VAPO")


_BASE = DAPO.base
_TABLE = taken_apart(
    {
        "model": _BASE.model,
        "task": _BASE.task,
        "train": _BASE.train,
        "rollout.max_completion_length": 20480,  # ours: DAPO's
        "eval.every": 480,
        "eval.validation_problems": 100,
        "eval.test_problems": 0,
    },
    {},
    published=True,
)
_METRIC = "eval/test/avg@32"

STUDY = Study(
    name="vapo_ablation",
    question="What does VAPO lose without each of its parts?",
    base=_TABLE.base,
    arms=(_TABLE.cumulative()[0], _TABLE.cumulative()[-1], *_TABLE.leave_one_out()),
    seeds=(0, 1, 2),
    claims=(
        Claim("VAPO beats PPO", "better", "full", "plain", smallest_effect=0.05, metric=_METRIC),
        *(
            Claim(f"VAPO needs {part.label}", "better", "full", f"no_{part.name}", smallest_effect=0.03, metric=_METRIC)
            for part in PARTS
        ),
    ),
    metric=_METRIC,
)

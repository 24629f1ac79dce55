"""The choices inside GRPO, one at a time: std normalisation, clip-higher, aggregation, entropy bonus.

Four updates a rollout batch, so that clipping acts. The other numbers are ours.
"""

from ablations.axis import one_at_a_time
from ablations.load import load_axis
from ablations.preset import preset
from suite.config import RunConfig, apply
from suite.study import Claim, Study

_AXES = [load_axis(name) for name in ("scale_rewards", "clip_higher", "loss_aggregation", "entropy_coef")]

BASE = apply(
    RunConfig(),
    {
        **preset("grpo", objective={"num_minibatches": 4}, rollout={"sync_period": 4}),
        "model.path": "seed:addition/{seed}",
        "train.steps": 120,
        "eval.every": 20,
        "eval.num_samples": 1,
    },
)

STUDY = Study(
    name="mini_grpo_axes",
    question="Which choice inside GRPO matters: std normalisation, clip-higher, aggregation, or an entropy bonus?",
    base=BASE,
    arms=one_at_a_time(_AXES, BASE),
    seeds=(0, 1, 2, 3, 4),
    claims=(
        Claim("dividing by the group's std matters", "different", "std_none", "control", smallest_effect=0.03),
        Claim("clip-higher helps", "better", "clip_higher", "control", smallest_effect=0.03),
        Claim("token means equal sequence means", "equivalent", "token_mean", "control", smallest_effect=0.03),
        Claim("token sums differ from means", "different", "token_sum", "control", smallest_effect=0.03),
        Claim(
            "an entropy bonus of 0.01 keeps entropy", "better", "entropy_1e-2", "control",
            smallest_effect=0.02, metric="policy/entropy",
        ),
    ),
)  # fmt: skip

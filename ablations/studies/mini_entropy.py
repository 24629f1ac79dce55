"""An entropy bonus in online and semi-online DPO: Figure 6 of arXiv 2506.21495 in miniature.

Over the chosen answers and their means, as in the paper's code. Ours: beta 0.7 (see LOG.md), s = 30, and coefficients
of 0.01 and 0.1, as those of the paper hardly move a model of this size.
"""

from ablations.axis import cross
from ablations.preset import preset
from suite.config import RunConfig, apply
from suite.study import Arm, Axis, Claim, Study

_CODE = {"objective.entropy_over": "chosen", "objective.entropy_mean": "sequence"}
_PAPERS = {"1e-4": 0.0001, "2e-4": 0.0002, "3e-4": 0.0003, "5e-4": 0.0005}
_OURS = {"1e-2": 0.01, "1e-1": 0.1}

_ENTROPY = Axis(
    "entropy",
    "Does an entropy bonus keep the policy from collapsing?",
    (
        Arm("control", label="no bonus"),
        *(
            Arm(f"entropy_{name}", {"objective.entropy_coef": coef, **_CODE}, f"entropy {coef}")
            for name, coef in (_PAPERS | _OURS).items()
        ),
    ),
    needs={"objective.entropy_coef": 0.0},
)
_SYNC = Axis(
    "sync",
    "Does it do so when the generator lags?",
    (
        Arm("control", label="s=1"),
        Arm("s10", {"rollout.sync_period": 10}, "s=10"),
        Arm("s30", {"rollout.sync_period": 30}, "s=30"),
    ),
)

BASE = apply(
    RunConfig(),
    {
        **preset("dpo_online", objective={"beta": 0.7}),
        "model.path": "seed:addition/{seed}",
        "train.steps": 120,
        "eval.every": 20,
        "eval.num_samples": 1,
    },
)

STUDY = Study(
    name="mini_entropy",
    question="Does an entropy bonus keep the policy from collapsing, at every sync period?",
    base=BASE,
    arms=cross([_SYNC, _ENTROPY], BASE),
    seeds=(0, 1, 2, 3, 4),
    claims=tuple(
        claim
        for lag, bonus in (("control", "entropy_1e-2"), ("s10", "s10-entropy_1e-2"))
        for claim in (
            Claim(f"0.01 keeps entropy, {lag}", "better", bonus, lag, smallest_effect=0.02, metric="policy/entropy"),
            Claim(f"0.01 costs no accuracy, {lag}", "equivalent", bonus, lag, smallest_effect=0.03),
        )
    ),
)

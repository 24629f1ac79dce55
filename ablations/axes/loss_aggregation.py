"""How token losses become one number: what a long completion weighs."""

from suite.study import Arm, Axis

AXIS = Axis(
    name="loss_aggregation",
    question="Does it matter whether a token, a sequence, or a constant is the unit of the loss?",
    arms=(
        Arm("control", label="mean over sequences of token means"),
        Arm("token_mean", {"objective.loss_agg_mode": "token-mean"}, "token mean"),
        Arm("token_sum", {"objective.loss_agg_mode": "seq-mean-token-sum"}, "mean over sequences of token sums"),
        Arm("token_sum_norm", {"objective.loss_agg_mode": "seq-mean-token-sum-norm"}, "token sums over the budget"),
    ),
    sources=(
        "Shao et al. 2024, arXiv 2402.03300, eq. 3 (mean of token means)",
        "Yu et al. 2025 (DAPO), arXiv 2503.14476, section 3.3 (token mean)",
        "Liu et al. 2025 (Dr. GRPO), arXiv 2503.20783 (token sums over a constant)",
        "Lanchantin et al. 2025, arXiv 2506.21495, eq. 1 (token sums)",
    ),
    needs={"objective.name": "policy_gradient", "objective.loss_agg_mode": "seq-mean-token-mean"},
)

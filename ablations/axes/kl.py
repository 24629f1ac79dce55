"""Where the KL to the reference enters, and how it is estimated."""

from suite.study import Arm, Axis

AXIS = Axis(
    name="kl",
    question="Does a KL to the reference help, in the reward or in the loss, and does its estimator matter?",
    arms=(
        Arm("control", label="no KL"),
        Arm("kl_reward_k1", {"objective.kl": "reward", "objective.kl_estimator": "k1"}, "KL in the reward (k1)"),
        Arm("kl_loss_k3", {"objective.kl": "loss", "objective.kl_estimator": "k3"}, "KL in the loss (k3)"),
        Arm("kl_loss_k2", {"objective.kl": "loss", "objective.kl_estimator": "k2"}, "KL in the loss (k2)"),
    ),
    sources=(
        "Shao et al. 2024, arXiv 2402.03300, eq. 4 (k3 in the loss)",
        "Ouyang et al. 2022, arXiv 2203.02155, eq. 2 (in the reward)",
        "Schulman 2020, joschu.net/blog/kl-approx.html (k1, k2, k3)",
        "Lanchantin et al. 2025, arXiv 2506.21495, Table 4 (coefficient 0.001)",
    ),
    needs={"objective.name": "policy_gradient", "objective.kl": "none"},
)

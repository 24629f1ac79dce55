"""How often the generator takes the learner's weights: the paper's main axis."""

from suite.study import Arm, Axis

AXIS = Axis(
    name="sync_period",
    question="How many optimizer steps may the generator lag behind the learner before the result suffers?",
    arms=(
        Arm("control", label="as in the base"),
        Arm("s5", {"rollout.sync_period": 5}, "semi-online, s=5"),
        Arm("s10", {"rollout.sync_period": 10}, "semi-online, s=10"),
        # the paper's s=100 is about a tenth of its run; 30 steps are a quarter of the miniature's
        Arm("s30", {"rollout.sync_period": 30}, "semi-online, s=30"),
        # three things are called offline: the paper's code samples afresh from the seed model,
        # its text reuses one set of responses, and DPO as published takes pairs from elsewhere
        Arm("offline_fresh", {"rollout.sync_period": "inf"}, "offline, fresh samples"),
        Arm("offline_fixed", {"rollout.sync_period": "inf", "rollout.source": "fixed"}, "offline, one fixed set"),
        Arm("offline_external", {"rollout.sync_period": "inf", "rollout.source": "external"}, "offline, given pairs"),
    ),
    sources=(
        "Lanchantin et al. 2025, arXiv 2506.21495, Table 1 (s = 1, 10, 100, inf) and Table 2 (s = 1, 5, 10, inf)",
        "Rafailov et al. 2023, arXiv 2305.18290 (a given set of preference pairs)",
    ),
)

"""Whether the loss corrects for an engine whose log-probs are not the learner's; live only with such an engine."""

from suite.study import Arm, Axis

MODE = "objective.importance_sampling_mode"

AXIS = Axis(
    name="importance_sampling",
    question="Does it help to correct for the mismatch between sampler and learner, and by token or by sequence?",
    arms=(
        Arm("control", label="no correction"),
        Arm("is_token_truncate", {MODE: "token_truncate"}, "token ratios, truncated at 2"),
        Arm("is_token_mask", {MODE: "token_mask"}, "token ratios, masked above 2"),
        Arm("is_sequence_truncate", {MODE: "sequence_truncate"}, "sequence ratios, truncated at 2"),
        Arm("is_sequence_mask", {MODE: "sequence_mask"}, "sequence ratios, masked above 2"),
    ),
    sources=(
        "Yao et al. 2025, On the Rollout-Training Mismatch in Modern RL Systems, fengyao.notion.site/off-policy-rl",
        "Liu et al. 2025, When Speed Kills Stability, richardli.xyz/rl-collapse (masking; sequences)",
        "TRL 1.16, vllm_importance_sampling_mode; verl, rollout_correction",
        "fairseq2, online_training: tis_imp_ratio_cap 2.0 (code of Lanchantin et al. 2025, arXiv 2506.21495)",
    ),
    needs={"objective.name": "policy_gradient", MODE: "none"},
)

"""VC-PPO with length-adaptive GAE, clip-higher, token-level loss, positive-example NLL and group sampling."""

from ablations.preset import Preset, Value, ours

PRESET = Preset(
    name="vapo",
    title="VAPO",
    paper="Yue et al. 2025, arXiv 2504.05118",
    parent="vc_ppo",
    slots={
        "objective.length_adaptive_alpha": ours(1.0, "0.05 needs 20 tokens; 1 suits completions of any length"),
        "objective.epsilon_high": Value(0.28, "section 4.3: clip-higher"),
        "objective.loss_agg_mode": Value("token-mean", "section 4.2"),
        "objective.positive_nll_coef": Value(0.1, "section 5.1, mu"),
    },
    published={
        "objective.length_adaptive_alpha": Value(0.05, "section 5.1"),
        "critic.pretrain_steps": ours(
            64, "section 5.1 has 50; the nearest whole number of batches of 16 updates above"
        ),
        "rollout.num_prompts": Value(512, "section 5.1: group sampling, 512 x 16"),
        "rollout.num_generations": Value(16, "section 5.1: group sampling, 512 x 16"),
        "eval.temperature": Value(1.0, "section 5.1"),
        "eval.top_p": Value(0.7, "section 5.1"),
        "eval.num_samples": Value(32, "section 5.1: avg@32"),
    },
)

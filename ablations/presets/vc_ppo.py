"""PPO with a pretrained critic whose targets have a lambda of their own."""

from ablations.preset import Preset, Value, ours

PRESET = Preset(
    name="vc_ppo",
    title="VC-PPO",
    paper="Yuan et al. 2025, arXiv 2503.01491",
    parent="ppo",
    slots={
        "critic.pretrain_steps": ours(10, "a tenth of the published 100; the miniature has 120 steps in all"),
        "critic.gae_lambda_value": Value(1.0, "decoupled GAE: lambda of the critic"),
        "objective.gae_lambda_policy": Value(0.95, "decoupled GAE: lambda of the policy, of [0.95, 1)"),
    },
    published={
        "critic.pretrain_steps": ours(
            112, "100 is best there; the nearest whole number of batches of 16 updates above"
        ),
    },
    note="Length-adaptive GAE, which surveys credit to VC-PPO, is VAPO's.",
)

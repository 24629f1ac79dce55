"""What people call our options when they come from TRL and verl (docs: the libraries' own configuration classes)."""

from __future__ import annotations

HINTS = {
    "learning_rate": "optim.lr",
    "lr": "optim.lr",
    "num_generations": "rollout.num_generations",
    "n": "rollout.num_generations",
    "beta": "objective.beta for DPO, objective.kl_coef for policy gradients",
    "kl_loss_coef": "objective.kl_coef with objective.kl = 'loss'",
    "epsilon": "objective.epsilon_low and objective.epsilon_high",
    "epsilon_high": "objective.epsilon_high",
    "clip_ratio": "objective.epsilon_low and objective.epsilon_high",
    "clip_ratio_high": "objective.epsilon_high",
    "clip_ratio_low": "objective.epsilon_low",
    "loss_type": "objective.loss_agg_mode, or objective.name",
    "loss_agg_mode": "objective.loss_agg_mode",
    "scale_rewards": "objective.scale_rewards",
    "norm_adv_by_std_in_grpo": "objective.scale_rewards",
    "num_iterations": "objective.num_epochs",
    "ppo_epochs": "objective.num_epochs",
    "num_ppo_epochs": "objective.num_epochs",
    "ppo_mini_batch_size": "objective.num_minibatches, how many, not how large",
    "per_device_train_batch_size": "optim.micro_batch_size, sequences",
    "ppo_micro_batch_size_per_gpu": "optim.micro_batch_size, sequences",
    "train_batch_size": "rollout.num_prompts",
    "max_completion_length": "rollout.max_completion_length",
    "max_response_length": "rollout.max_completion_length",
    "max_new_tokens": "rollout.max_completion_length",
    "max_prompt_length": "task.max_prompt_length",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "max_steps": "train.steps",
    "total_training_steps": "train.steps",
    "save_steps": "train.checkpoint_every",
    "save_freq": "train.checkpoint_every",
    "eval_steps": "eval.every",
    "test_freq": "eval.every",
    "max_grad_norm": "optim.max_grad_norm",
    "grad_clip": "optim.max_grad_norm",
    "weight_decay": "optim.weight_decay",
    "warmup_steps": "optim.warmup_steps",
    "lr_warmup_steps": "optim.warmup_steps",
    "lr_scheduler_type": "optim.schedule",
    "adv_estimator": "objective.advantage",
    "entropy_coeff": "objective.entropy_coef",
    "entropy_coef": "objective.entropy_coef",
    "model_name_or_path": "model.path",
    "model": "model.path",
    "dataset_name": "task.source with task.name = 'hub'",
    "train_files": "task.source with task.name = 'file'",
    "ref_model_sync_steps": "rollout.reference_sync and rollout.sync_period",
    "mask_truncated_completions": "rollout.mask_truncated_completions",
    "gamma": "objective.gamma",
    "lam": "objective.gae_lambda_policy and critic.gae_lambda_value",
    "gradient_checkpointing": "learner.activation_checkpointing",
    "bf16": "learner.compute_dtype = 'bfloat16'",
    "use_vllm": "rollout.engine = 'vllm'",
    "vllm_gpu_memory_utilization": "rollout.memory_share",
    "gpu_memory_utilization": "rollout.memory_share",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel_size",
}
"""The last part of a name elsewhere -> ours, with what differs."""


def hint(name: str) -> str:
    """What an option of TRL or verl is called here, as a clause; empty if it is none that is known."""
    plain = name.lstrip("-").replace("-", "_")
    ours = HINTS.get(plain) or HINTS.get(plain.rpartition(".")[2])
    return f"what TRL or verl call {plain} is {ours} here" if ours and ours != plain else ""

"""A run's configuration, section by section: every option with its default, its unit and its source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

FROM_ARM, FROM_SEED = "arm:", "seed:"
"""Begin a `model.path` that names another arm, and one that names an embedded seed model."""

SyncPeriod = int | Literal["inf"]


def _execution(default: Any) -> Any:
    """A field that says how a run is carried out, not what it computes: left out of its identity."""
    return field(default=default, metadata={"identity": False})


def _filled_in() -> Any:
    """A field of a run's identity that the harness fills in: it follows from others, and no arm is told by it."""
    return field(default="", metadata={"filled_in": True})


@dataclass(frozen=True)
class ModelConfig:
    path: str = "seed:addition"
    """The model to start from: a hub id, a folder, `seed:NAME`, an embedded tiny model, or `arm:NAME`, the final model
    of another arm of the study under the same seed. `{seed}` in it is the run's own seed: `seed:addition/{seed}`."""
    revision: str = ""
    """For a hub id: its branch, tag or commit. Empty = main."""
    weights: str = _filled_in()
    """Filled in when a run is declared: which weights it starts from. For a hub id the commit, for a folder or an
    embedded model a hash of its files. A run whose weights are others is refused."""
    parent: str = _filled_in()
    """For `arm:NAME`, filled in by the study: the fingerprint of the run that it stands for."""
    folder: str = _execution("")
    """For `arm:NAME`, filled in by the sweep: where that run's final model lies."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights in memory."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = _execution("auto")
    """Attention kernel; `auto` = eager for the embedded models (faster at their size), else FlashAttention 2 where it
    is installed, for bfloat16 weights on a GPU, else transformers' choice (SDPA)."""
    trust_remote_code: bool = False
    """Whether code shipped with a hub model may run here."""

    @property
    def name(self) -> str:
        """The model as a user names it: its path and, if one is given, its revision."""
        return f"{self.path}@{self.revision}" if self.revision else self.path


@dataclass(frozen=True)
class TaskConfig:
    name: str = "addition"
    """Where prompts and rewards come from: `addition`, `sums`, `replies`, `file`, `hub`, `numina_math`, `wildchat`, or
    several of them as a `mixture`."""
    numina_source: str = "AI-MO/NuminaMath-CoT"
    """For `numina_math`: a data set id, or a JSONL or Parquet file with its columns."""
    wildchat_source: str = "allenai/WildChat-1M"
    """For `wildchat`: a data set id, or a JSONL or Parquet file with its columns."""
    wildchat_prompts: int = 1000
    """For `wildchat`: training prompts (paper: 1,000; 50,000 in the mixture with NuminaMath)."""
    reward_model: str = ""
    """For `wildchat` and `replies`: the reward model, a hub id or folder (paper: Nexusflow/Athene-RM-8B). Empty = for
    `replies` the embedded one, for `wildchat` none: a judge must then choose the pairs."""
    mixture: str = "addition=1,replies=1"
    """For `mixture`: its tasks and their proportions in a batch. A task of proportion 0 is evaluated, not trained."""
    lengths: str = ""
    """For `mixture`: completion budgets, tokens, as `addition=5,replies=12`; a task left out keeps its own."""
    pair_rules: str = ""
    """For `mixture`: pair rules by task, as `addition=random,replies=best_worst`; a task left out has that of
    `objective.pair_rule`."""
    source: str = ""
    """For `file`: a JSONL or Parquet file. For `hub`: a data set id."""
    split: str = "train"
    """For `hub`: the split that is read."""
    problem_column: str = "problem"
    """For `file` and `hub`: the column with the problem's text."""
    answer_column: str = "answer"
    """For `file` and `hub`: the column with the gold answer."""
    chosen_column: str = ""
    """For `file` and `hub`: the column with a preferred completion, read when `rollout.source = external`."""
    rejected_column: str = ""
    """For `file` and `hub`: the column with a rejected completion, read when `rollout.source = external`."""
    template: str = "{problem}"
    """For `file` and `hub`: the prompt; `{problem}` is replaced."""
    chat: bool = False
    """For `file` and `hub`: wrap the prompt as a user turn of the tokenizer's chat template."""
    max_prompt_length: int = 1024
    """Longest prompt, tokens; a longer one is refused by name."""


@dataclass(frozen=True)
class RolloutConfig:
    engine: Literal["in_process", "vllm", "vllm_server"] = "in_process"
    """What samples: a second copy of the weights in the learner's process; a vLLM engine in a process of its own that
    shares the learner's devices; or one that `suite serve` runs elsewhere."""
    server_url: str = _execution("")
    """For `vllm_server`: where `suite serve` listens, as `http://node7:8000`."""
    engine_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """For `vllm` and `vllm_server`: precision of the engine's weights; `auto` = that in which the learner computes."""
    transfer: Literal["auto", "file", "ipc", "nccl"] = _execution("auto")
    """How an engine is given weights: through a safetensors file, or between GPUs through vLLM's weight transfer, `ipc`
    for `vllm` and `nccl` for `vllm_server`. `auto` = the latter on GPUs, `file` elsewhere and for a `vllm` that spans
    more GPUs than there are ranks."""
    transfer_folder: str = _execution("")
    """For `transfer = file`: where the file lies, which engine and learner must both see; empty = in shared memory."""
    sleep: bool = _execution(False)
    """For `vllm` on a GPU: free the engine's memory while the learner learns. A window is then generated as a whole."""
    tensor_parallel_size: int = _execution(1)
    """For `vllm`: devices that share one engine; with several ranks, an engine spans the GPUs of so many of them."""
    memory_share: float = _execution(0.0)
    """For `vllm`: share of a GPU's memory that the engine may use, weights included; on a CPU, of the machine's memory
    for its key-value cache. 0 = 0.4 of a GPU, 0.03 of a machine."""
    prefix_caching: bool = _execution(True)
    """For `vllm`: keep the keys and values of prompts that are met again; forgotten at each sync."""
    max_model_len: int = _execution(0)
    """For `vllm`: longest prompt and completion together, tokens; 0 = `task.max_prompt_length` and the completion
    budget, as far as the model goes."""
    window_rollouts: int = _execution(0)
    """Most rollouts generated in one call where several batches come from the same weights (s > U); 0 = 4096 for
    `vllm` and `vllm_server`, and batch by batch in process, where a call for more saves nothing."""
    num_prompts: int = 32
    """Prompts per rollout batch, P."""
    num_generations: int = 8
    """Rollouts per prompt, G (the group)."""
    temperature: float = 1.0
    """Sampling temperature in training; the paper samples at 1.0 (section on set-up)."""
    top_p: float = 1.0
    """Nucleus mass in training; 1 = off (paper: 1.0)."""
    top_k: int = 0
    """Number of tokens kept in sampling; 0 = off."""
    max_completion_length: int = 0
    """Completion budget, tokens; 0 = the task's own."""
    sync_period: SyncPeriod = 1
    """s: optimizer steps between loads of the generator with the learner's weights; a multiple of U, or `inf`."""
    source: Literal["generator", "fixed", "external"] = "generator"
    """`generator` samples afresh; `fixed` reuses one set of seed-model rollouts; `external` takes given pairs."""
    fixed_batches: int = 30
    """For `source = fixed`: rollout batches in the fixed set, reused over epochs."""
    reference_sync: Literal["none", "with_generator"] = "none"
    """Whether the reference takes the learner's weights whenever the generator does (paper, Table 4)."""
    precompute_ref_log_probs: bool = _execution(False)
    """For `source = fixed` and `external`: keep the reference's log-probs of an answer for the next time it is met.
    Saves the reference's forward pass from the second pass over the set on."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal and sample further prompts until the batch is full (DAPO, sec. 3.2)."""
    max_gen_batches: int = 10
    """With dynamic sampling: most rounds of sampling for one batch (verl's `max_num_gen_batches`)."""
    mask_truncated_completions: bool = False
    """Overlong filtering (DAPO, section 3.4): truncated completions carry no loss and leave every denominator."""
    chunk_size: int = _execution(256)
    """Most sequences in one forward pass of the in-process sampler."""


@dataclass(frozen=True)
class RewardConfig:
    shaping: str = "none"
    """A registered function that changes the rewards of a rollout batch before the objective sees them."""
    shaping_coef: float = 0.0
    """Strength of the shaping."""
    soft_punish_max: float = 1.0
    """For `soft_overlong`: L_max, as a share of the task's completion budget (DAPO: 20,480 tokens, the budget)."""
    soft_punish_cache: float = 0.2
    """For `soft_overlong`: L_cache, the part of L_max in which the punishment grows, as a share of the budget (DAPO:
    4,096 of 20,480 tokens)."""


@dataclass(frozen=True)
class ObjectiveConfig:
    name: str = "dpo"
    """The family of losses: `dpo` (preference pairs), `policy_gradient` (GRPO and its kin) or `sft` (supervised)."""
    # preference losses
    beta: float = 0.1
    """DPO's inverse temperature (Rafailov et al. 2023, eq. 7; the paper's Table 4)."""
    pair_rule: str = "random"
    """How a group becomes a pair: `random` correct against random incorrect (paper, section 3), `group` all correct
    against all incorrect (GroupDPO, eq. 4), `best_worst` by reward, `judge` by a pairwise judge, `given` as it is."""
    label_smoothing: float = 0.0
    """Share of the preferences taken to be the wrong way round (conservative DPO); below 0.5."""
    nll_coef: float = 0.0
    """Coefficient of the negative log-likelihood of the chosen answers, added to the loss (paper: 1.0)."""
    nll_length_normalized: bool = True
    """Its mean is over the chosen tokens of the step (the paper's code), else over pairs of sums over tokens."""
    grpo_coef: float = 0.0
    """Coefficient of the policy-gradient loss on the same rows, with the slots below (paper: 0.01 and 0.001)."""
    # supervised
    sft_rows: Literal["correct", "best"] = "correct"
    """For `sft`: every correct rollout (a given chosen answer is one), or the best of each group (RAFT)."""
    # policy-gradient losses
    advantage: str = "group"
    """Advantage estimator: `group` (GRPO), `rloo`, `rloo_token`, `reinforce`, `reinforce_pp`, `reinforce_pp_baseline`,
    `remax`, or `gae`, which needs a critic."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Which standard deviation divides the advantage: the group's, the batch's, or none (the paper's text)."""
    advantage_eps: float = 1e-6
    """Added to every standard deviation that divides advantages, reward units."""
    advantage_ddof: Literal[0, 1] = 1
    """Delta degrees of freedom of those standard deviations: 1 divides by n - 1, 0 by n."""
    baseline_decay: float = 1.0
    """For `reinforce`: weight of a batch's mean reward in the moving baseline, per batch of age; 1 = plain mean of all
    batches so far (Ahmadian et al. 2024)."""
    gamma: float = 1.0
    """Discount per token of returns that are summed token by token, and of GAE (VAPO, section 5.1: 1.0)."""
    gae_lambda_policy: float = 0.95
    """For `advantage = gae`: lambda of the advantages (VC-PPO: 0.95)."""
    length_adaptive_alpha: float = 0.0
    """For `advantage = gae`: above 0, lambda is 1 - 1 / (alpha l) for a completion of l tokens (VAPO, section 4.2:
    0.05, for thousands of tokens). It scales with the lengths: alpha l must be at least 1; 1 suits any length."""
    whiten_advantages: bool = False
    """Advantages to mean 0 and deviation 1 over the trained tokens of the rollout batch (verl and TRL do so with GAE);
    REINFORCE++ always does."""
    trust_region: str = "clip"
    """`clip`: PPO's clipped surrogate. `kl_penalty`: PPO's penalty on the KL to the policy at sampling time. `none`:
    the plain importance-weighted surrogate."""
    epsilon_low: float = 0.2
    """The ratio is clipped below 1 - epsilon_low."""
    epsilon_high: float = 0.2
    """The ratio is clipped above 1 + epsilon_high; DAPO's clip-higher takes 0.28."""
    kl_penalty_coef: float = 1.0
    """For `kl_penalty`: its coefficient, the first one where it adapts (Schulman et al. 2017, section 4)."""
    kl_penalty_target: float = 0.0
    """For `kl_penalty`: nats per token; after a rollout batch the coefficient doubles above 1.5 x target and halves
    below target / 1.5. 0 = a fixed coefficient."""
    positive_nll_coef: float = 0.0
    """Coefficient of the negative log-likelihood of correct rollouts, per token (VAPO's mu: 0.1)."""
    loss_agg_mode: str = "seq-mean-token-mean"
    """Aggregation over tokens: `token-mean`, `seq-mean-token-mean`, `seq-mean-token-sum`, `seq-mean-token-sum-norm`."""
    ratio_reference: Literal["auto", "learner", "generator"] = "auto"
    """Denominator of the importance ratio; `auto` = `generator` when s > U, else `learner`."""
    importance_sampling_mode: str = "none"
    """Correction for a sampler that is not quite the learner: each token's loss times learner over sampler, under the
    same weights. `token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask` (TRL's names), or `none`."""
    importance_sampling_clip_max: float = 2.0
    """The ratio is truncated to this, or masked above it (the paper's code: 2.0; verl: 2.0; TRL: 3.0)."""
    importance_sampling_clip_min: float = 0.0
    """The ratio is truncated to this, or masked below it; 0 = no lower bound (as in TRL)."""
    kl: Literal["none", "reward", "loss"] = "none"
    """Where the KL to the reference enters."""
    kl_coef: float = 0.001
    """Its coefficient (paper: 0.001 for GRPO), read when `kl` is not `none`."""
    kl_estimator: str = "auto"
    """`k1`, `k2`, `k3` or `k3+`; `auto` = k1 in the reward, k3 in the loss."""
    # both
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus, per nat."""
    entropy_target: float = 0.0
    """Nats; above 0 the coefficient starts at entropy_coef, rises by entropy_coef_delta after an optimizer step of
    lower entropy, falls after another, and counts only while entropy is below (Skywork-OR1, 2505.22312). 0 = fixed."""
    entropy_coef_delta: float = 1e-4
    """With a target: the change per optimizer step (Skywork-OR1's scripts: 1e-4; TRL: 0.005)."""
    entropy_coef_max: float = 0.005
    """With a target: the coefficient stays within 0 and this (Skywork-OR1's scripts: 0.005)."""
    entropy_over: Literal["all", "chosen"] = "all"
    """For preference losses: which sequences the entropy term covers (the paper's code: chosen)."""
    entropy_mean: Literal["token", "sequence"] = "token"
    """Mean over the trained tokens of the step, or over per-sequence means (the paper's code: sequence)."""
    num_minibatches: int = 1
    """Optimizer steps per pass over a rollout batch."""
    num_epochs: int = 1
    """Passes over a rollout batch; updates per batch U = num_minibatches x num_epochs."""


@dataclass(frozen=True)
class JudgeConfig:
    name: str = "openai"
    """Who judges pairs: a registered function, such as `openai`, a model behind an OpenAI-compatible endpoint."""
    url: str = _execution("")
    """For `openai`: the endpoint's base URL, such as http://localhost:8000/v1."""
    model: str = ""
    """For `openai`: the judge's name there."""
    template: str = ""
    """For `openai`: what is asked, with {prompt}, {first} and {second}; answers are [[A]] or [[B]]. Empty = our own."""
    api_key_env: str = _execution("OPENAI_API_KEY")
    """For `openai`: the environment variable that holds the API key; none is sent where it is not set."""
    max_tokens: int = 512
    """For `openai`: longest reply, tokens."""
    timeout_s: float = 60.0
    """For `openai`: seconds until a request is given up."""
    retries: int = 4
    """For `openai`: how often a request that failed is repeated, after 0.5, 1, 2, ... seconds."""
    concurrency: int = _execution(8)
    """For `openai`: requests at a time."""


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 3e-5
    """Peak learning rate of AdamW."""
    beta1: float = 0.9
    """AdamW's first-moment decay."""
    beta2: float = 0.95
    """AdamW's second-moment decay (fairseq2's default)."""
    eps: float = 1e-8
    """AdamW's epsilon; the paper uses 1e-4 on verifiable tasks (Table 4)."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 = never (paper: 0.1)."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or down to 0 at the last step."""
    micro_batch_size: int = _execution(0)
    """Most sequences in one forward and backward pass; 0 = all. Changes no gradient beyond rounding."""


@dataclass(frozen=True)
class CriticConfig:
    init: str = ""
    """Where the critic of `objective.advantage = gae` starts: `policy` (its backbone, with values of 0), or a reward
    model (hub id or folder) with its head; empty = no critic."""
    lr: float = 1e-4
    """Peak learning rate of the critic's own AdamW, constant after the warm-up; the other settings are `optim`'s."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0, pretraining counted."""
    max_grad_norm: float = 1.0
    """The critic's gradients are scaled down to this global norm; 0 = never."""
    cliprange_value: float = 0.5
    """How far an update may carry a value from where it was when the batch was prepared, reward units (verl: 0.5); 0 =
    as far as it likes."""
    gae_lambda_value: float = 0.95
    """lambda of the critic's targets; 1 = the Monte-Carlo return (VC-PPO and VAPO: 1.0)."""
    pretrain_steps: int = 0
    """First optimizer steps in which the policy stays as it is and the critic learns from Monte-Carlo returns; counted
    in `train.steps`, while sync period and learning rate of the policy count from their end. VAPO, section 5.1: 50."""


@dataclass(frozen=True)
class EvalConfig:
    every: int = 10
    """Optimizer steps between evaluations on validation problems; also before step 1 and after the last."""
    validation_problems: int = 500
    """Held-out problems of the curves; 0 = all there are."""
    test_problems: int = 2000
    """Held-out problems of the table, evaluated before step 1 and after the last; 0 = all there are."""
    num_samples: int = 4
    """k of avg@k: sampled completions per problem; 0 = greedy only."""
    temperature: float = 1.0
    """Temperature of the sampled evaluation."""
    top_p: float = 1.0
    """Nucleus mass of the sampled evaluation."""
    probe_prompts: int = 64
    """Fixed prompts on which entropy and length are measured with fresh samples, for every method alike."""
    probe_samples: int = 4
    """Fresh samples per probe prompt."""
    reward_model: str = ""
    """A reward model (hub id or folder) that picks one of the sampled completions of a problem: best_of@k."""


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 120
    """Optimizer steps, N."""
    on_divergence: Literal["fail", "score"] = "fail"
    """A policy has diverged when its entropy on the probe prompts is no number, though the loss may be one. `fail` ends
    the run there as failed, as for a loss that is no number; `score` lets it end, and what it scores counts."""
    checkpoint_every: int = _execution(50)
    """Optimizer steps between checkpoints (written at the end of a rollout batch); 0 = only the last."""
    keep_checkpoints: int = _execution(2)
    """Checkpoints kept."""
    export_model: bool = _execution(False)
    """Write the final model as a plain Hugging Face folder, `model` in the run's folder. On where an arm needs it."""


@dataclass(frozen=True)
class LearnerConfig:
    compute_dtype: Literal["model", "bfloat16"] = "model"
    """Precision of the learner's forward and backward passes and of the weights that are sampled from; `model` = that
    of the weights. Weights, reductions over ranks and the optimizer keep `model.dtype`, float32 here."""
    activation_checkpointing: bool = _execution(False)
    """Keep only the inputs of each decoder layer for the backward pass, and compute the rest again: less memory for
    about a third more time. Changes no number."""
    compile: bool = _execution(False)
    """Compile the decoder layers of policy and critic (`torch.compile`). Changes results by rounding."""


@dataclass(frozen=True)
class RunConfig:
    """One run: everything that decides its result."""

    seed: int = 0
    """Keys all randomness of the run; equal seeds mean equal prompts in every arm."""
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    judge: JudgeConfig = JudgeConfig()
    optim: OptimConfig = OptimConfig()
    critic: CriticConfig = CriticConfig()
    eval: EvalConfig = EvalConfig()
    train: TrainConfig = TrainConfig()
    learner: LearnerConfig = LearnerConfig()

    @property
    def updates_per_batch(self) -> int:
        """U: optimizer steps per rollout batch."""
        return self.objective.num_minibatches * self.objective.num_epochs

    @property
    def learner_dtype(self) -> str:
        """Precision in which the learner computes, and samples in its own process."""
        return self.model.dtype if self.learner.compute_dtype == "model" else self.learner.compute_dtype

    def syncs_at(self, step: int) -> bool:
        """Whether the generator takes the learner's weights before the rollout batch that begins at `step`."""
        moved, period = self.policy_steps(step), self.rollout.sync_period
        return moved > 0 and period != "inf" and moved % period == 0

    def policy_steps(self, step: int) -> int:
        """Optimizer steps of the policy among the first `step`: all but those that pretrain the critic."""
        return max(step - self.critic.pretrain_steps, 0)

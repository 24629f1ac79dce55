"""The metrics that a run may log, one by one: `suite.metrics` looks them up and writes them down."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One row of docs/metrics.md."""

    name: str
    """The name it is logged under, or a pattern such as `eval/<benchmark>/avg@k`."""
    formula: str
    """What one value is, in symbols or one sentence."""
    unit: str
    """`nats`, `tokens`, `seconds`, `share` (0 to 1), ..."""
    reduction: str
    """What the value is a mean, a sum or an extreme over."""
    trl: str = ""
    """TRL's name of the same quantity, empty where it has none."""
    verl: str = ""
    """verl's name of the same quantity, empty where it has none."""


_BATCH = "mean over all rollouts of the step's batch"
_GROUPS = "share of the groups of the step's batch"
_TRAINED = "over the trained tokens of an optimizer step; mean over the updates of the row"
_PAIRS = "mean over the pairs of an optimizer step; mean over the updates of the row"
_PROBE = "mean over the tokens of fresh samples on the fixed probe prompts, at temperature 1"
_ONCE = "one value per step"
_WALL = "wall clock of this process, one value per step"
_RUN = "running sum since step 0; resuming does not count a step twice"
_PROBLEMS = "mean over the benchmark's problems, one greedy completion each"
_SAMPLES = "mean over problems of the mean over the samples of a problem"

_SCORED_PROBLEMS = "mean over the benchmark's scored problems, one greedy completion each"
_TASK = "mean over the task's rollouts of the step's batch"
_SCORED = "mean over the task's scored rollouts of the step's batch"
_TASK_GROUPS = "mean over the task's groups of the step's batch"

DESCRIBED = (
    Metric("reward/mean", "R, the scalar reward of a rollout", "reward", _BATCH, "reward", "critic/score/mean"),
    Metric(
        "reward/std",
        "standard deviation (ddof 1) of the rewards within a group",
        "reward",
        "mean over the groups of the step's batch",
        "reward_std",
    ),
    Metric(
        "reward/frac_groups_zero_std",
        "groups whose rewards have a spread below the tolerance of the advantages: they carry no gradient",
        "share",
        _GROUPS,
        "frac_reward_zero_std",
    ),
    Metric(
        "reward/baseline",
        "what the advantages subtract: the moving mean of earlier batches' returns, or the greedy completion's reward",
        "reward",
        "mean over the trained rollouts of the step's batch",
    ),
    Metric("reward/scored_frac", "rollouts whose reward did not abstain: the others are in no mean", "share", _BATCH),
    Metric("reward/right_frac", "rollouts graded right", "share", _BATCH),
    Metric("reward/no_answer_frac", "rollouts in which no answer was found (never counted as wrong)", "share", _BATCH),
    Metric("reward/timeout_frac", "rollouts whose grading hit the time bound", "share", _BATCH),
    Metric(
        "loss/total",
        "loss/policy + loss/preference + kl coefficient × loss/kl − entropy coefficient × loss/entropy, and what else "
        "is configured times its coefficient",
        "loss",
        "mean over the updates of the row",
    ),
    Metric(
        "loss/policy",
        "−min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), with r = exp(logprobs − denominator of the ratio reference)",
        "loss",
        "by the configured loss aggregation over an optimizer step; mean over the updates of the row",
        "",
        "actor/pg_loss",
    ),
    Metric(
        "loss/preference",
        "−(1 − ε) log σ(m) − ε log σ(−m), with m = β (Δ_chosen − Δ_rejected), Δ = Σ_t (logprobs − ref_logprobs) of a "
        "completion and ε the label smoothing",
        "loss",
        _PAIRS,
    ),
    Metric(
        "loss/kl",
        "the configured estimate (k2, k3, k3+) of the KL to the reference, before its coefficient",
        "nats",
        "by the configured loss aggregation over an optimizer step; mean over the updates of the row",
        "kl",
        "actor/kl_loss",
    ),
    Metric(
        "loss/entropy",
        "H_t = logsumexp(z) − Σ_v softmax(z)_v z_v over the full vocabulary, before its coefficient",
        "nats",
        f"mean {_TRAINED}",
        "entropy",
        "actor/entropy",
    ),
    Metric(
        "loss/entropy_coef",
        "the adaptive coefficient of the entropy bonus as it was applied, 0 while the entropy is above its target",
        "1",
        "largest over the updates of the row",
        "entropy_coef",
    ),
    Metric(
        "loss/nll",
        "−logprobs of the chosen answers (beside a preference loss) or of the selected ones (`sft`), before its "
        "coefficient",
        "nats",
        "mean over those tokens of an optimizer step, or over pairs of sums where not length-normalised",
    ),
    Metric(
        "loss/positive_nll",
        "−logprobs of the tokens of rollouts graded right, before its coefficient",
        "nats",
        "mean over those tokens in an optimizer step; mean over the updates of the row",
    ),
    Metric(
        "loss/kl_old",
        "r − 1 − log r, an estimate of KL(policy at sampling time, policy), before the penalty's coefficient",
        "nats",
        f"mean {_TRAINED}",
        "",
        "actor/ppo_kl",
    ),
    Metric(
        "loss/kl_penalty_coef",
        "the coefficient of that penalty, constant within a rollout batch",
        "1",
        "largest over the updates of the row",
    ),
    Metric(
        "loss/clip_frac",
        "tokens at which the clipped branch is taken: r > 1 + ε_high and A > 0, or r < 1 − ε_low and A < 0",
        "share",
        f"mean {_TRAINED}",
        "clip_ratio/region_mean",
        "actor/pg_clipfrac",
    ),
    Metric(
        "loss/clip_frac_low", "tokens with r < 1 − ε_low and A < 0", "share", f"mean {_TRAINED}", "clip_ratio/low_mean"
    ),
    Metric(
        "loss/clip_frac_high",
        "tokens with r > 1 + ε_high and A > 0",
        "share",
        f"mean {_TRAINED}",
        "clip_ratio/high_mean",
    ),
    Metric("loss/ratio_mean", "r, the importance ratio of a token", "ratio", f"mean {_TRAINED}"),
    Metric(
        "loss/ratio_max",
        "r, the importance ratio of a token",
        "ratio",
        "largest over the trained tokens of all updates of the row",
    ),
    Metric(
        "loss/grad_norm",
        "L2 norm of the gradient of all parameters, before clipping",
        "loss per parameter unit",
        "mean over the updates of the row",
        "grad_norm",
        "actor/grad_norm",
    ),
    Metric("loss/trained_tokens", "completion tokens with a loss", "tokens", "sum over the updates of the row"),
    Metric(
        "loss/trained_sequences",
        "completions with at least one trained token",
        "sequences",
        "sum over the updates of the row",
    ),
    Metric("dpo/pairs", "(chosen, rejected) pairs made of the step's groups", "pairs", "sum over the step's batch"),
    Metric(
        "dpo/judge_unanswered",
        "groups of whose two answers the judge named neither as the better one",
        "groups",
        "sum over the step's batch",
    ),
    Metric("sft/rows", "answers that supervised training selected", "sequences", "sum over the step's batch"),
    Metric(
        "sft/skipped_groups", "groups of which supervised training selected none", "groups", "sum over the step's batch"
    ),
    Metric(
        "dpo/skipped_groups",
        "groups without both a right and a wrong rollout: they make no pair",
        "groups",
        "sum over the step's batch",
    ),
    Metric(
        "dpo/accuracy",
        "pairs whose implicit reward margin β (Δ_chosen − Δ_rejected) is above 0",
        "share",
        _PAIRS,
        "rewards/accuracies",
    ),
    Metric(
        "dpo/margin", "implicit reward margin β (Δ_chosen − Δ_rejected)", "implicit reward", _PAIRS, "rewards/margins"
    ),
    Metric("dpo/chosen_logprob", "Σ_t logprobs of the chosen completion", "nats", _PAIRS, "logps/chosen"),
    Metric("dpo/rejected_logprob", "Σ_t logprobs of the rejected completion", "nats", _PAIRS, "logps/rejected"),
    Metric(
        "critic/loss",
        "½ max((V − R)², (clip(V, V_old ± cliprange_value) − R)²), R the critic's target",
        "reward²",
        f"mean {_TRAINED}",
        "",
        "critic/vf_loss",
    ),
    Metric(
        "critic/clip_frac",
        "tokens at which the clipped error is the larger one: they have no gradient",
        "share",
        f"mean {_TRAINED}",
        "",
        "critic/vf_clipfrac",
    ),
    Metric(
        "critic/grad_norm",
        "L2 norm of the gradient of the critic's parameters, before clipping",
        "loss per parameter unit",
        "mean over the updates of the row",
        "",
        "critic/grad_norm",
    ),
    Metric("critic/lr", "the critic's learning rate", "1", _ONCE, "", "critic/lr"),
    Metric(
        "critic/value_mean",
        "V, the value of the state in which a token was chosen, before the row's updates",
        "reward",
        "mean over the trained tokens of the step's batch",
        "",
        "critic/values/mean",
    ),
    Metric(
        "critic/explained_variance",
        "1 − Var(G − V) / Var(G), G the Monte-Carlo return from a token on, V as above; absent where G does not vary",
        "share",
        "over the trained tokens of the step's batch",
        "",
        "critic/vf_explained_var",
    ),
    Metric("critic/trained_tokens", "tokens that the critic learned from", "tokens", "sum over the updates of the row"),
    Metric("critic/pretrain_steps", "optimizer steps so far in which only the critic moved", "optimizer steps", _RUN),
    Metric(
        "kl/ref",
        "k1 estimate of KL(policy, reference): learner_logprobs − ref_logprobs; may be negative",
        "nats",
        "mean over the trained tokens of a rollout batch's first update, before the weights move",
    ),
    Metric(
        "kl/sampler",
        "k1 estimate of KL(sampler, learner): sampler_logprobs − learner_logprobs; staleness and mismatch together",
        "nats",
        "mean over the trained tokens of a rollout batch's first update, before the weights move",
        "",
        "rollout_corr/kl",
    ),
    Metric("policy/entropy", "H_t over the full vocabulary, computed in fp32", "nats", _PROBE),
    Metric(
        "policy/probe_length",
        "tokens of a fresh sample on a probe prompt, the end token counted",
        "tokens",
        "mean over the probe samples",
    ),
    Metric(
        "policy/entropy_sampled",
        "−sampler_logprobs: an unbiased entropy only on-policy at temperature 1 and top-p 1",
        "nats",
        "mean over the rollout tokens of the step's batch",
    ),
    Metric(
        "length/mean_tokens",
        "tokens of a rollout, the end token counted",
        "tokens",
        _BATCH,
        "completions/mean_length",
        "response_length/mean",
    ),
    Metric(
        "length/min_tokens",
        "tokens of a rollout, the end token counted",
        "tokens",
        "smallest over all rollouts of the step's batch",
        "completions/min_length",
        "response_length/min",
    ),
    Metric(
        "length/max_tokens",
        "tokens of a rollout, the end token counted",
        "tokens",
        "largest over all rollouts of the step's batch",
        "completions/max_length",
        "response_length/max",
    ),
    Metric(
        "length/truncated_frac",
        "rollouts stopped by the completion budget, not by the end token",
        "share",
        _BATCH,
        "completions/clipped_ratio",
        "response_length/clip_ratio",
    ),
    Metric(
        "sync/loads",
        "loads of weights into the generator, the one before step 0 counted; syncs = loads − 1",
        "loads",
        _RUN,
    ),
    Metric("sync/version", "step of the weights that sampled this step's rollouts", "optimizer steps", _ONCE),
    Metric(
        "sync/staleness",
        "optimizer steps of the policy since sync/version: step − sync/version but for the critic's pretraining",
        "optimizer steps",
        _ONCE,
    ),
    Metric("optim/lr", "learning rate of the last update of the row", "1", _ONCE, "learning_rate", "actor/lr"),
    Metric("time/sample_s", "sampling of the rollouts", "seconds", _WALL, "", "timing_s/gen"),
    Metric("time/reward_s", "grading of the rollouts", "seconds", _WALL, "", "timing_s/reward"),
    Metric("time/train_s", "forward, backward and optimizer", "seconds", _WALL, "", "timing_s/update_actor"),
    Metric("time/eval_s", "evaluation and probe", "seconds", _WALL, "", "timing_s/testing"),
    Metric("time/step_s", "the whole step", "seconds", _WALL, "", "timing_s/step"),
    Metric(
        "cost/generated_tokens", "tokens sampled for training (evaluation and probe are not counted)", "tokens", _RUN
    ),
    Metric("cost/trained_tokens", "completion tokens with a loss, once per update", "tokens", _RUN),
    Metric("cost/prompts", "prompts drawn for training, a repeated one counted again", "prompts", _RUN),
    Metric("rollout/gen_batches", "rounds of sampling for the step's batch, with dynamic sampling", "rounds", _ONCE),
    Metric(
        "rollout/dropped_groups",
        "groups sampled and thrown away: rewards all equal, or more than the batch had room for; they count as cost",
        "groups",
        "sum over the rounds of the step's batch",
    ),
    Metric("rollout/unfilled_groups", "groups missing from the batch after the last round", "groups", _ONCE),
    Metric("measure/<measure>", "what the task measures beside its reward, never trained on", "measure", _BATCH),
    Metric("task/<task>/reward_mean", "reward/mean of one task of a mixture", "reward", _SCORED),
    Metric("task/<task>/reward_std", "reward/std of one task of a mixture", "reward", _TASK_GROUPS),
    Metric("task/<task>/frac_groups_zero_std", "groups of the task whose rewards are all equal", "share", _TASK_GROUPS),
    Metric("task/<task>/scored_frac", "rollouts of the task whose reward did not abstain", "share", _TASK),
    Metric("task/<task>/mean_tokens", "tokens of a rollout of the task, the end token counted", "tokens", _TASK),
    Metric("task/<task>/truncated_frac", "rollouts of the task stopped by its completion budget", "share", _TASK),
    Metric("task/<task>/groups", "groups of the task in the step's batch", "groups", _ONCE),
    Metric("task/<task>/entropy", "policy/entropy on the probe prompts of one task of a mixture", "nats", _PROBE),
    Metric(
        "task/<task>/probe_length", "policy/probe_length of one task of a mixture", "tokens", "mean over its samples"
    ),
    Metric("eval/<benchmark>/reward", "score of the greedy completion (scored tasks)", "reward", _SCORED_PROBLEMS),
    Metric("eval/<benchmark>/reward@k", "score of a sample, k samples a problem (scored tasks)", "reward", _SAMPLES),
    Metric("eval/<benchmark>/scored_frac", "greedy completions whose score did not abstain", "share", _PROBLEMS),
    Metric(
        "eval/<benchmark>/hidden_reward",
        "the preference that the task `replies` hides, which its reward model only approximates",
        "reward",
        _PROBLEMS,
    ),
    Metric("eval/<benchmark>/accuracy", "greedy completions graded right", "share", _PROBLEMS),
    Metric("eval/<benchmark>/avg@k", "samples graded right, k samples a problem", "share", _SAMPLES),
    Metric(
        "eval/<benchmark>/pass@k",
        "1 if any of k samples is right, for verified tasks",
        "share",
        "mean over the benchmark's problems",
    ),
    Metric(
        "eval/<benchmark>/best_of@k",
        "the reward of that of k samples which `eval.reward_model` scores highest (for a verified task, 1 if the "
        "selected one is right); without one, the highest reward, for scored tasks",
        "share, or reward",
        "mean over the benchmark's problems",
    ),
    Metric(
        "eval/<benchmark>/truncated_frac",
        "completions stopped by the completion budget",
        "share",
        "mean over the greedy completions",
    ),
    Metric(
        "eval/<benchmark>/no_answer_frac",
        "completions in which no answer was found",
        "share",
        "mean over the greedy completions",
    ),
    Metric(
        "eval/<benchmark>/mean_tokens",
        "tokens of a completion, the end token counted",
        "tokens",
        "mean over the greedy completions",
    ),
)

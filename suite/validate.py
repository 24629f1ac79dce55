"""Refuses a configuration that cannot mean what it says: an option out of range, unknown, clashing, or read by nothing.

What is read but provably changes nothing is no error: `suite.inert` finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from suite.config import FROM_ARM, FROM_SEED, RunConfig, check_types, flatten
from suite.masking import masked
from suite.options import RANGES, choices, reads, who_reads
from suite.registry import unknown
from suite.seed_model import recipe
from suite.starts import SEED_OF_RUN


def validate(config: RunConfig) -> None:
    """Raises ValueError with one sentence (option, value, what would be right) unless the configuration can run.

    Checked in this order: types, ranges, names of slots, options that nothing reads, clashes. Imports torch.
    """
    check_types(config)
    values = flatten(config)
    for option, allowed in RANGES.items():
        if values[option] != "inf" and values[option] not in allowed:
            raise ValueError(f"{option} is {values[option]} and must be {allowed}")
    for option, names in choices().items():
        if values[option] not in names:
            found = unknown(option, values[option], names)
            whole = "; a whole algorithm is a preset: suite train --preset NAME" if option == "objective.name" else ""
            raise ValueError(f"{found}{whole}")
    defaults, read = flatten(RunConfig()), reads(config)
    for option, value in values.items():
        if option not in read and value != defaults[option]:
            raise ValueError(f"{option} is {value!r}, but nothing reads it here; {who_reads(config, option)}")
    for clash in _CLASHES:
        for sentence in clash(config):
            raise ValueError(sentence)


def _check_steps(config: RunConfig) -> Iterator[str]:
    period, updates = config.rollout.sync_period, config.updates_per_batch
    if period != "inf" and period % updates:
        near = max(round(period / updates), 1) * updates
        yield (
            f"rollout.sync_period is {period} and must be a multiple of the {updates} optimizer steps per rollout "
            f"batch (objective.num_minibatches x objective.num_epochs), such as {near}, or inf"
        )
    if config.train.steps % updates:
        yield f"train.steps is {config.train.steps} and must be a multiple of the {updates} steps per rollout batch"
    if config.objective.num_minibatches > config.rollout.num_prompts:
        yield (
            f"objective.num_minibatches is {config.objective.num_minibatches} and must be at most "
            f"rollout.num_prompts, {config.rollout.num_prompts}"
        )
    if config.optim.micro_batch_size == 1 and "objective.pair_rule" in reads(config):
        yield "optim.micro_batch_size is 1, but the two sequences of a pair stay together; it must be 0 or at least 2"


def _check_source(config: RunConfig) -> Iterator[str]:
    source, period = config.rollout.source, config.rollout.sync_period
    if source != "generator" and period != "inf":
        yield (
            f"rollout.source is {source!r}, so the generator is never loaded again; "
            f"rollout.sync_period is {period} and must be inf"
        )
    from suite.objectives import OBJECTIVES

    objective, read = config.objective, reads(config)
    if objective.pair_rule == "given" and "objective.pair_rule" in read and source != "external":
        yield f"objective.pair_rule is 'given' and rollout.source is {source!r}; pairs are given by 'external' alone"
    if source != "external":
        return
    if not OBJECTIVES[objective.name].takes_given:
        able = " or ".join(repr(name) for name in OBJECTIVES if OBJECTIVES[name].takes_given)
        yield (
            f"rollout.source = 'external' gives answers that no weights of the run sampled, which objective.name = "
            f"{objective.name!r} cannot train on; take {able}"
        )
    if "objective.grpo_coef" in read and objective.grpo_coef > 0:
        yield (
            f"objective.grpo_coef is {objective.grpo_coef}, but rollout.source = 'external' gives pairs without the "
            "log-probs and rewards that a policy gradient needs; take objective.grpo_coef = 0"
        )
    if "objective.sft_rows" in read and objective.sft_rows == "best":
        yield "objective.sft_rows is 'best', which picks among sampled answers; rollout.source = 'external' gives one"
    needed = ["task.chosen_column"] + ["task.rejected_column"] * ("objective.pair_rule" in read)
    for option in needed:
        if option in read and not flatten(config)[option]:
            yield f"{option} is empty; rollout.source = 'external' needs the name of the column"


def _check_reward(config: RunConfig) -> Iterator[str]:
    reward = config.reward
    if "reward.soft_punish_cache" in reads(config) and reward.soft_punish_cache > reward.soft_punish_max:
        yield (
            f"reward.soft_punish_cache is {reward.soft_punish_cache} and must be at most reward.soft_punish_max, "
            f"{reward.soft_punish_max}"
        )


def _check_mixture(config: RunConfig) -> Iterator[str]:
    from suite.objectives import PAIR_RULES
    from suite.tasks import mixture

    read, mixed = reads(config), config.task.name == mixture.NAME
    rules = mixture.pair_rules(config) if mixed else {config.task.name: ""}
    for name, rule in rules.items():
        judged = "objective.pair_rule" in read and (rule or config.objective.pair_rule) == "judge"
        if name == "wildchat" and not config.task.reward_model and not judged:
            yield "task.reward_model is empty; task 'wildchat' needs one, or the pair rule 'judge'"
        if rule and rule not in PAIR_RULES:
            yield str(unknown("pair rule", rule, PAIR_RULES, "task.pair_rules"))
    if not mixed:
        return
    shares, size = mixture.proportions(config), config.rollout.num_prompts
    mixture.lengths(config)
    for name, count in mixture.counts(shares, size).items():
        if shares[name] and not count:
            yield f"rollout.num_prompts is {size}, of which task {name!r} of task.mixture gets none; raise either"


def _check_scored(config: RunConfig) -> Iterator[str]:
    from suite.objectives.pairs import TELLS_CORRECT
    from suite.tasks import is_scored, mixture

    objective, read = config.objective, reads(config)
    if config.rollout.source == "external":
        return
    mixed = config.task.name == mixture.NAME
    rules = mixture.pair_rules(config) if mixed else {config.task.name: ""}
    shares = mixture.proportions(config) if mixed else {config.task.name: 1.0}
    for name in filter(is_scored, (name for name, share in shares.items() if share)):
        rule = rules[name] or objective.pair_rule
        if "objective.pair_rule" in read and rule in TELLS_CORRECT:
            option = f"task.pair_rules has {name}={rule}" if rules[name] else f"objective.pair_rule is {rule!r}"
            best = f"task.pair_rules = '{name}=best_worst'" if mixed else "objective.pair_rule = 'best_worst'"
            yield f"{option}, which sets right answers against wrong ones, but task {name!r} gives scores; take {best}"
        if "objective.sft_rows" in read and objective.sft_rows == "correct":
            yield f"objective.sft_rows is 'correct', but task {name!r} gives scores; take objective.sft_rows = 'best'"


def _check_judge(config: RunConfig) -> Iterator[str]:
    from suite.judges import FIELDS

    read = reads(config)
    for option in ("judge.url", "judge.model"):
        if option in read and not flatten(config)[option]:
            yield f"{option} is empty; judge.name = {config.judge.name!r} needs it"
    if "judge.url" in read and not config.judge.url.startswith(("http://", "https://")):
        yield f"judge.url is {masked(config.judge.url)!r} and must begin with http:// or https://"
    if config.eval.reward_model and config.eval.num_samples < 2:
        yield f"eval.num_samples is {config.eval.num_samples} and must be at least 2: eval.reward_model picks one"
    missing = [name for name in FIELDS if name not in config.judge.template]
    if "judge.template" in read and config.judge.template and missing:
        yield f"judge.template lacks {' and '.join(missing)}; it must contain {', '.join(FIELDS)}"


def _check_task(config: RunConfig) -> Iterator[str]:
    values, read = flatten(config), reads(config)
    for option in ("task.source", "task.problem_column", "task.answer_column"):
        if option in read and not values[option]:
            yield f"{option} is empty; task.name = {config.task.name!r} needs it"
    if "task.template" in read and "{problem}" not in config.task.template:
        yield f"task.template is {config.task.template!r} and must contain {{problem}}"
    path = config.model.path
    if not path:
        yield "model.path is empty; it must be a hub id, a folder, seed:NAME or arm:NAME"
    elif path.startswith(FROM_ARM):
        if not config.model.parent:
            yield f"model.path is {path!r}, the final model of another arm: only an arm of a study can start from it"
    elif path.startswith(FROM_SEED):
        recipe(path.removeprefix(FROM_SEED).replace(SEED_OF_RUN, "0"))
    elif SEED_OF_RUN not in path and (Path(path).is_dir() or path.startswith(("/", ".", "~"))):
        from suite.starts import resolve_path

        resolve_path(path)


def _check_group(config: RunConfig) -> Iterator[str]:
    from suite.objectives import ADVANTAGES

    size, objective = config.rollout.num_generations, config.objective
    if config.rollout.dynamic_sampling and config.rollout.source == "external":
        yield "rollout.dynamic_sampling is on, but rollout.source = 'external' samples nothing; turn it off"
    if size >= 2 or config.rollout.source == "external":
        return
    if config.rollout.dynamic_sampling:
        yield f"rollout.num_generations is {size} and must be at least 2: dynamic sampling compares a group's rewards"
    read = reads(config)
    if "objective.pair_rule" in read:
        yield f"rollout.num_generations is {size} and must be at least 2: a pair is two rollouts of one prompt"
    if "objective.advantage" in read and ADVANTAGES[objective.advantage].within_group:
        yield (
            f"rollout.num_generations is {size} and must be at least 2: objective.advantage = {objective.advantage!r} "
            "compares a rollout with others of its prompt"
        )
    if "objective.scale_rewards" in read and objective.scale_rewards == "group":
        yield f"rollout.num_generations is {size} and must be at least 2 for objective.scale_rewards = 'group'"


def _check_objective(config: RunConfig) -> Iterator[str]:
    from suite.objectives import resolve_ratio_reference

    objective, read = config.objective, reads(config)
    if objective.kl == "loss" and objective.kl_estimator == "k1":
        yield (
            "objective.kl_estimator is 'k1', whose gradient in the loss is zero in expectation; "
            "with objective.kl = 'loss' take k2, k3 or k3+"
        )
    if objective.entropy_target > 0 and objective.entropy_coef > objective.entropy_coef_max:
        yield (
            f"objective.entropy_coef is {objective.entropy_coef} and must be at most objective.entropy_coef_max, "
            f"{objective.entropy_coef_max}, within which it adapts to objective.entropy_target"
        )
    truncated = config.rollout.top_p < 1 or config.rollout.top_k > 0
    if truncated and "objective.ratio_reference" in read and resolve_ratio_reference(config) == "generator":
        yield (
            f"rollout.top_p is {config.rollout.top_p} and rollout.top_k is {config.rollout.top_k}, but the ratio to "
            "the generator needs log-probs over the whole vocabulary; take top_p = 1 and top_k = 0, "
            "or objective.ratio_reference = 'learner'"
        )


def _check_learner(config: RunConfig) -> Iterator[str]:
    if config.learner.compute_dtype == config.model.dtype:
        yield (
            f"learner.compute_dtype is {config.learner.compute_dtype!r}, and so is model.dtype: no weight is kept in "
            "more; take model.dtype = 'float32', or learner.compute_dtype = 'model'"
        )


def _check_engine(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.engine == "vllm_server" and rollout.source != "external" and not rollout.server_url:
        yield "rollout.server_url is empty; rollout.engine = 'vllm_server' needs the address of a `suite serve`"
    asked = rollout.engine_dtype if "rollout.engine_dtype" in reads(config) else "auto"
    if (config.learner_dtype, asked) == ("bfloat16", "float32"):
        yield (
            "rollout.engine_dtype is 'float32', and the learner computes in bfloat16, to which the engine's log-probs "
            "could not be compared in float32; it must be 'auto' or 'bfloat16'"
        )
    fitting = {"ipc": "vllm", "nccl": "vllm_server"}.get(rollout.transfer, rollout.engine)
    if "rollout.transfer" in reads(config) and fitting != rollout.engine:
        yield (
            f"rollout.transfer is {rollout.transfer!r}, which is for rollout.engine = {fitting!r}; with "
            f"{rollout.engine!r} it must be 'auto', 'file' or {'nccl' if fitting == 'vllm' else 'ipc'!r}"
        )


def _check_importance_sampling(config: RunConfig) -> Iterator[str]:
    from suite.objectives import resolve_ratio_reference

    rollout, updates = config.rollout, config.updates_per_batch
    mode = config.objective.importance_sampling_mode
    if mode == "none" or "objective.importance_sampling_mode" not in reads(config):
        return
    start = f"objective.importance_sampling_mode is {mode!r}"
    if rollout.sync_period != updates:
        yield (
            f"{start}, which compares sampler and learner under the same weights, and rollout.sync_period is "
            f"{rollout.sync_period}; take rollout.sync_period = {updates}, the optimizer steps per rollout batch, or "
            "objective.importance_sampling_mode = 'none'"
        )
    elif resolve_ratio_reference(config) == "generator":
        yield (
            f"{start}, but objective.ratio_reference is 'generator', whose ratio is taken against the sampler already; "
            "take objective.ratio_reference = 'learner', or objective.importance_sampling_mode = 'none'"
        )
    if rollout.top_p < 1 or rollout.top_k > 0:
        yield (
            f"{start}, but rollout.top_p is {rollout.top_p} and rollout.top_k is {rollout.top_k}, and the correction "
            "needs the sampler's log-probs over the whole vocabulary; take top_p = 1 and top_k = 0"
        )


def _check_critic(config: RunConfig) -> Iterator[str]:
    critic, updates = config.critic, config.updates_per_batch
    if "critic.init" not in reads(config):
        return
    if not critic.init:
        yield (
            f"objective.advantage = {config.objective.advantage!r} needs a critic, and critic.init is empty; "
            "take 'policy', or the hub id or folder of a reward model"
        )
    elif critic.init != "policy":
        from suite.starts import resolve_path

        resolve_path(critic.init, "critic.init")
    if critic.pretrain_steps % updates:
        yield (
            f"critic.pretrain_steps is {critic.pretrain_steps} and must be a multiple of the {updates} steps per "
            "rollout batch"
        )
    if critic.pretrain_steps >= config.train.steps:
        yield (
            f"critic.pretrain_steps is {critic.pretrain_steps} of train.steps = {config.train.steps}, so the policy "
            "would never move; it must be less"
        )


_CLASHES: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    _check_steps,
    _check_source,
    _check_judge,
    _check_reward,
    _check_mixture,
    _check_scored,
    _check_task,
    _check_group,
    _check_objective,
    _check_engine,
    _check_importance_sampling,
    _check_critic,
    _check_learner,
)

"""The metrics of how far the sampler and the learner are apart: a part of `suite.metric_list` in a file of its own."""

from __future__ import annotations

from suite.metric_list import Metric

_CORRECTED = "over trained tokens, or over sequences with one, as the mode says; mean over the updates of the row"
_FIRST = "the trained tokens of a rollout batch's first update, before the weights move"

SAMPLER = (
    Metric(
        "mismatch/ratio_mean",
        "exp(learner_logprobs − sampler_logprobs), before any bound; 1 in expectation over "
        "all rollouts, less where top-p or top-k left tokens out of the sampling",
        "ratio",
        f"mean over {_FIRST}",
    ),
    Metric(
        "mismatch/ratio_max",
        "exp(learner_logprobs − sampler_logprobs), before any bound",
        "ratio",
        f"largest over {_FIRST}",
    ),
    Metric(
        "mismatch/seq_ratio_mean",
        "for the sequence modes: exp Σ_t (learner_logprobs − sampler_logprobs), before any bound",
        "ratio",
        "mean over the sequences with a trained token of an optimizer step; mean over the updates of the row",
    ),
    Metric(
        "mismatch/seq_ratio_max",
        "for the sequence modes: exp Σ_t (learner_logprobs − sampler_logprobs), before any bound",
        "ratio",
        "largest over the sequences with a trained token of all updates of the row",
    ),
    Metric(
        "mismatch/touched_frac",
        "tokens or sequences whose ratio is outside of importance_sampling_clip_min and importance_sampling_clip_max",
        "share",
        f"mean {_CORRECTED}",
    ),
    Metric(
        "mismatch/weight_mean",
        "what multiplies the loss: the ratio of a token or sequence, truncated or masked",
        "ratio",
        f"mean {_CORRECTED}",
        "sampling/importance_sampling_ratio/mean",
        "rollout_corr/rollout_is_mean",
    ),
)

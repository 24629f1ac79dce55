"""The metrics of weight hand-overs to an engine: a part of `suite.metric_list` in a file of its own."""

from __future__ import annotations

from suite.metric_list import Metric

_SYNC = "one value at a step with a sync, the initial load counted; vLLM only"

SYNC = (
    Metric(
        "sync/logprob_gap",
        "distance between the log-prob in the engine and under the weights that were handed over",
        "nats",
        f"mean over the probes' tokens, or over tokens after a cached prefix where that is larger; {_SYNC}",
    ),
    Metric("sync/seconds", "hand-over of the weights and its verification", "seconds", _SYNC),
    Metric("sync/bytes", "size of the weights handed over, in the engine's dtype", "bytes", _SYNC),
)

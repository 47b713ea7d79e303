"""VllmCollector: an engine's numbers under the names that vLLM gives them, which routers and dashboards read."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpage.observe.histogram import Histogram
from kvpage.server.metrics.latencies import Latencies
from kvpage.serving import AsyncEngine, EngineStats

GAUGES = {
    "num_requests_running": "Requests that run.",
    "num_requests_waiting": "Requests that wait.",
    "kv_cache_usage_perc": "The part of the blocks that running requests hold, 0 to 1.",
}
COUNTERS = {
    "prompt_tokens": "Tokens of prompts that were admitted.",
    "generation_tokens": "Tokens that were generated.",
    "prefix_cache_queries": "Tokens of prompts that were looked up in the cache.",
    "prefix_cache_hits": "Tokens of these that were found.",
    "num_preemptions": "Requests that gave their blocks back.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", "first_token"),
    "inter_token_latency_seconds": ("Between two outputs of a stream.", "between_tokens"),
    "time_per_output_token_seconds": ("Between the tokens of a request, its mean.", "per_token"),
    "request_time_per_output_token_seconds": ("Between the tokens of a request, its mean.", "per_token"),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", "whole"),
}


class VllmCollector(Collector):
    """The metrics of one engine, named `vllm:...`.

    Args:
        engine: The engine.
        latencies: The times of its requests.
        model_name: A label of every metric.
    """

    def __init__(self, engine: AsyncEngine, latencies: Latencies, model_name: str) -> None:
        self._engine, self._latencies = engine, latencies
        self._labels = {"model_name": model_name, "engine": "0"}

    def describe(self) -> list[Metric]:
        """Return nothing: a check of names for conflicts would ask the engine while it is being registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, with the numbers of now."""
        stats = self._engine.stats()
        values = _values(stats.engine) | {"num_requests_waiting": stats.num_waiting}
        for name, text in GAUGES.items():
            yield self._filled(GaugeMetricFamily(f"vllm:{name}", text, labels=[*self._labels]), {(): values[name]})
        for name, text in COUNTERS.items():
            yield self._filled(CounterMetricFamily(f"vllm:{name}", text, labels=[*self._labels]), {(): values[name]})
        reasons = {(reason,): count for reason, count in sorted(self._latencies.finish_reasons.items())}
        labels = [*self._labels, "finished_reason"]
        text = "Samples that have ended, by reason."
        yield self._filled(CounterMetricFamily("vllm:request_success", text, labels=labels), reasons)
        for name, (text, field) in HISTOGRAMS.items():
            yield self._histogram(name, text, getattr(self._latencies, field))
        yield self._config()

    def _config(self) -> Metric:
        engine = self._engine.engine
        cache = engine.config.cache_config
        fields = {
            **self._labels,
            "block_size": cache.block_size,
            "cache_dtype": cache.cache_dtype,
            "enable_prefix_caching": engine.config.enable_prefix_caching,
            "num_gpu_blocks": engine.cache.num_gpu_blocks,
            "num_cpu_blocks": cache.num_cpu_blocks,
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "The configuration of the cache.", labels=list(fields))
        family.add_metric([str(value) for value in fields.values()], 1)
        return family

    def _filled(self, family: Any, values: Mapping[Any, float]) -> Metric:
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *key], value)
        metric: Metric = family
        return metric

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        stats, below, buckets = histogram.stats(), 0, []
        for bound, count in zip((*stats.bounds, float("inf")), stats.counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), below))
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], buckets, stats.total)
        return family


def _values(stats: EngineStats) -> dict[str, float]:
    space = stats.blocks.space
    return {
        "num_requests_running": stats.num_running,
        "kv_cache_usage_perc": stats.num_used_blocks / stats.num_blocks,
        "prompt_tokens": stats.num_prompt_tokens,
        "generation_tokens": stats.num_generated_tokens,
        "prefix_cache_queries": space.query_tokens,
        "prefix_cache_hits": space.device_hit_tokens + space.host_hit_tokens + space.part_hit_tokens,
        "num_preemptions": stats.num_preemptions,
    }

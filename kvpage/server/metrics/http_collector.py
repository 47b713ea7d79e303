"""HttpCollector: the HTTP requests of a server, for Prometheus."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpage.server.access.request_log import HttpCounts


class HttpCollector(Collector):
    """The metrics of one server's HTTP requests, named `kvpage_http_...`.

    Args:
        counts: The requests that have ended.
        hints: How often hints on the cache were followed or refused, by kind and outcome.
        model_name: A label of every metric.
    """

    def __init__(self, counts: HttpCounts, hints: Counter[tuple[str, str]], model_name: str) -> None:
        self._counts, self._hints, self._model_name = counts, hints, model_name

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, with the numbers of now."""
        text = "HTTP requests that have ended. Status 499: the client went before the end of its answer."
        requests = CounterMetricFamily("kvpage_http_requests", text, labels=["model_name", "path", "status"])
        for (path, status), count in sorted(self._counts.requests.copy().items()):
            requests.add_metric([self._model_name, path, str(status)], count)
        yield requests
        text = "Fields of bodies that are not served, and were left aside."
        fields = CounterMetricFamily("kvpage_http_ignored_fields", text, labels=["model_name", "field"])
        for name, count in sorted(self._counts.ignored_fields.copy().items()):
            fields.add_metric([self._model_name, name], count)
        yield fields
        text = "Hints on the cache, by what became of them. Those that are not known are ignored fields."
        hints = CounterMetricFamily("kvpage_hints", text, labels=["model_name", "hint", "outcome"])
        for (kind, outcome), count in sorted(self._hints.copy().items()):
            hints.add_metric([self._model_name, kind, outcome], count)
        yield hints

"""HttpCollector: the HTTP requests of a server, for Prometheus."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpage.server.access.request_log import HttpCounts


class HttpCollector(Collector):
    """The metrics of one server's HTTP requests, named `kvpage_http_...`.

    Args:
        counts: The requests that have ended.
        model_name: A label of every metric.
    """

    def __init__(self, counts: HttpCounts, model_name: str) -> None:
        self._counts, self._model_name = counts, model_name

    def collect(self) -> Iterator[Metric]:
        """Yield both metrics, with the numbers of now."""
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

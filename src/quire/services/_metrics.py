"""Prometheus metrics of a gRPC server.

A server without metrics uses `NO_METRICS`, whose methods do nothing, so that servers need no second path.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from typing_extensions import Self

from quire._optional import require
from quire.errors import OptionError, ServiceError
from quire.services._errors import Status

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ROWS = tuple(2**power for power in range(13))
_PURPOSE = "metrics of a service"
MULTIPROCESS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
"""The variable with the folder into which prometheus_client writes the metrics of several processes."""
OK = Status("OK", "", "")
GONE = Status("CANCELLED", "", "")
"""The status of a call whose caller is gone."""


class CallMetrics:
    """The metrics of one call, which is counted when it ends; this class counts nothing."""

    def receive(self, messages: Iterable[bytes]) -> Iterable[bytes]:
        """Return the messages of the caller, so that their bytes are counted."""
        return messages

    def sent(self, nbytes: int) -> None:
        """Count bytes that are sent to the caller."""

    def end(self, status: Status = OK) -> None:
        """Count the call, with its status; only the first time."""


_UNCOUNTED = CallMetrics()


class Metrics:
    """The metrics of a server; this class counts nothing."""

    url: str | None = None
    """Where the metrics are served."""

    def begin(self, endpoint: str, nbytes: int = 0) -> CallMetrics:  # noqa: ARG002
        """Return the metrics of a call that begins with a request of this size."""
        return _UNCOUNTED

    def refuse(self, endpoint: str, status: Status) -> None:
        """Count a call that is refused before it begins."""

    def batch(self, endpoint: str, rows: int, waits: Sequence[float]) -> None:
        """Count a batch, with the seconds that each of its calls has waited."""

    def close(self) -> None:
        """Stop to serve the metrics."""


NO_METRICS = Metrics()


def open_metrics(option: Any, host: str) -> Metrics:
    """Serve the metrics of a server on a free port (True) or on the port that is passed."""
    if option is False:
        return NO_METRICS
    port = check_metrics_port(option)
    metrics = PrometheusMetrics()
    metrics.serve_page(host, port)
    return metrics


def check_metrics_port(option: Any) -> int:
    """Return the port of the option `metrics`, 0 for a free one."""
    if not isinstance(option, int) or not 0 <= option < 1 << 16:
        raise OptionError(f"metrics={option!r}: use True for a free port, or the number of a port.")
    return 0 if option is True else option


class MetricsPage:
    """The metrics of a registry of prometheus_client, served over HTTP."""

    def __init__(self, registry: Any, host: str, port: int) -> None:
        client: Any = _import_client()
        try:
            self._server, self._thread = client.start_http_server(port, host, registry)
        except OSError as error:
            raise ServiceError(f"metrics: {host}:{port} cannot be opened: {error}.") from error
        bracketed = f"[{host}]" if ":" in host else host
        self.url = f"http://{bracketed}:{self._server.server_port}/metrics"
        self._folder: str | None = None

    @classmethod
    def of_workers(cls, folder: str, host: str, port: int) -> Self:
        """Serve the sums of the metrics that processes write into a folder, by the multiprocess mode."""
        registry = _import_client().CollectorRegistry()
        multiprocess: Any = require("prometheus_client.multiprocess", extra="metrics", needed_for=_PURPOSE)
        multiprocess.MultiProcessCollector(registry, folder)
        page = cls(registry, host, port)
        page._folder = folder
        return page

    def forget_worker(self, pid: int) -> None:
        """Count no calls in flight of a process that has ended; its other metrics remain in the sums."""
        multiprocess: Any = require("prometheus_client.multiprocess", extra="metrics", needed_for=_PURPOSE)
        multiprocess.mark_process_dead(pid, self._folder)

    def close(self) -> None:
        """Stop to serve the metrics."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _import_client() -> Any:
    return require("prometheus_client", extra="metrics", needed_for=_PURPOSE)


class PrometheusMetrics(Metrics):
    """Counts calls with prometheus_client, in a registry of their own."""

    def __init__(self) -> None:
        client: Any = _import_client()
        self._page: MetricsPage | None = None
        self._registry = registry = client.CollectorRegistry()

        def make(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            return kind(f"quire_{name}", text, ("endpoint", *labels), registry=registry, **options)

        self.requests = make(client.Counter, "requests_total", "Calls that have ended, by gRPC code.", "code")
        self.errors = make(client.Counter, "errors_total", "Calls that have failed, by class of the error.", "error")
        self.seconds = make(client.Histogram, "request_seconds", "Duration of calls.", buckets=_SECONDS)
        self.in_flight = make(
            client.Gauge, "requests_in_flight", "Calls that run or wait.", multiprocess_mode="livesum"
        )
        self.request_bytes = make(client.Counter, "request_bytes_total", "Bytes of requests.")
        self.response_bytes = make(client.Counter, "response_bytes_total", "Bytes of responses.")
        self.batch_rows = make(client.Histogram, "batch_rows", "Rows of batches.", buckets=_ROWS)
        self.queue_seconds = make(
            client.Histogram, "queue_seconds", "Time that calls have waited for their batch.", buckets=_SECONDS
        )

        self._endpoints: dict[str, _EndpointMetrics] = {}

    def serve_page(self, host: str, port: int) -> None:
        """Serve the metrics over HTTP, at `url`."""
        self._page = MetricsPage(self._registry, host, port)
        self.url = self._page.url

    def begin(self, endpoint: str, nbytes: int = 0) -> CallMetrics:
        metrics = self._endpoints.get(endpoint)
        if metrics is None:
            metrics = self._endpoints[endpoint] = _EndpointMetrics(self, endpoint)
        metrics.in_flight.inc()
        if nbytes:
            metrics.request_bytes.inc(nbytes)
        return _CountedCall(metrics)

    def refuse(self, endpoint: str, status: Status) -> None:
        self.requests.labels(endpoint, status.code).inc()
        self.errors.labels(endpoint, status.error_name).inc()

    def batch(self, endpoint: str, rows: int, waits: Sequence[float]) -> None:
        self.batch_rows.labels(endpoint).observe(rows)
        for wait in waits:
            self.queue_seconds.labels(endpoint).observe(wait)

    def close(self) -> None:
        if self._page is not None:
            self._page.close()


class _EndpointMetrics:
    """The metrics of one endpoint. Finding them by its label takes longer than counting a call."""

    def __init__(self, metrics: PrometheusMetrics, endpoint: str) -> None:
        self._metrics, self._endpoint = metrics, endpoint
        self.in_flight = metrics.in_flight.labels(endpoint)
        self.seconds = metrics.seconds.labels(endpoint)
        self.request_bytes = metrics.request_bytes.labels(endpoint)
        self.response_bytes = metrics.response_bytes.labels(endpoint)
        self.answered = metrics.requests.labels(endpoint, OK.code)

    def count_failure(self, status: Status) -> None:
        """Count a call that has failed."""
        self._metrics.requests.labels(self._endpoint, status.code).inc()
        if status.error_name:
            self._metrics.errors.labels(self._endpoint, status.error_name).inc()


class _CountedCall(CallMetrics):
    __slots__ = ("_ended", "_metrics", "_started")

    def __init__(self, metrics: _EndpointMetrics) -> None:
        self._metrics = metrics
        self._started = time.perf_counter()
        self._ended = False

    def receive(self, messages: Iterable[bytes]) -> Iterator[bytes]:
        counter = self._metrics.request_bytes
        for message in messages:
            counter.inc(len(message))
            yield message

    def sent(self, nbytes: int) -> None:
        self._metrics.response_bytes.inc(nbytes)

    def end(self, status: Status = OK) -> None:
        with _ending:
            was_ended, self._ended = self._ended, True
        if was_ended:
            return
        metrics = self._metrics
        metrics.in_flight.dec()
        metrics.seconds.observe(time.perf_counter() - self._started)
        if status is OK:
            metrics.answered.inc()
        else:
            metrics.count_failure(status)


_ending = threading.Lock()
"""Held for a moment by each call that ends, so that it is counted once."""

"""Prometheus metrics of servers."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from urllib.request import urlopen

import pytest

from quire import DocumentArray
from quire.errors import FunctionError, OptionError, ServiceError, ServiceLimitError
from quire.services import AsyncClient, Client, Limits, endpoint, serve, serve_async
from tests.services.sample_service import Picture, Score, embed, fail, pictures, running

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection", "prometheus_client")


def read_metrics(url: str) -> dict[str, float]:
    """Return the samples of a page, by name and labels."""
    with urlopen(url, timeout=60) as page:
        lines = page.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def wait_for_sample(url: str, name: str, value: float) -> dict[str, float]:
    """Read the metrics until a sample has a value: a call is counted a moment after its caller has the answer."""
    deadline = time.monotonic() + 60
    while (samples := read_metrics(url)).get(name) != value:
        assert time.monotonic() < deadline, samples
        time.sleep(0.02)
    return samples


@endpoint(max_batch_size=8, max_wait=0)
def batched(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    if docs[0].label == "7":
        raise ValueError("seven")
    return docs


SERVICE = [embed, fail, running, batched]


def check_samples(url: str) -> None:
    samples = wait_for_sample(url, 'quire_requests_total{code="OK",endpoint="running"}', 1)
    assert samples['quire_requests_total{code="OK",endpoint="embed"}'] == 2
    assert samples['quire_requests_total{code="OK",endpoint="batched"}'] == 1
    for name in ("fail", "batched"):
        assert samples[f'quire_requests_total{{code="INTERNAL",endpoint="{name}"}}'] == 1
        assert samples[f'quire_errors_total{{endpoint="{name}",error="FunctionError"}}'] == 1
    assert samples['quire_request_seconds_count{endpoint="embed"}'] == 2
    assert samples['quire_batch_rows_sum{endpoint="batched"}'] == 4
    assert samples['quire_queue_seconds_count{endpoint="batched"}'] == 2
    for name in ("embed", "running", "batched"):
        assert samples[f'quire_requests_in_flight{{endpoint="{name}"}}'] == 0
        for kind in ("request", "response"):
            assert samples[f'quire_{kind}_bytes_total{{endpoint="{name}"}}'] > 50


def test_calls_are_counted_by_endpoint_and_code() -> None:
    with serve(SERVICE, metrics=True) as server, Client(server.address) as client:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", server.metrics_url)
        client.embed(pictures(1))
        client.embed(pictures(2))
        with pytest.raises(FunctionError):
            client.fail(pictures(1))
        client.batched(pictures(3))
        with pytest.raises(FunctionError):
            client.batched(pictures(1, start=7))
        assert len(list(client.running(iter(pictures(3))))) == 3
        check_samples(server.metrics_url)
        url = server.metrics_url
    with pytest.raises(OSError, match="refused"):
        urlopen(url, timeout=60)


def test_async_server_counts_the_same() -> None:
    async def main() -> None:
        async with serve_async(SERVICE, metrics=True) as server, AsyncClient(server.address) as client:
            await client.embed(pictures(1))
            await client.embed(pictures(2))
            with pytest.raises(FunctionError):
                await client.fail(pictures(1))
            await client.batched(pictures(3))
            with pytest.raises(FunctionError):
                await client.batched(pictures(1, start=7))
            assert len([score async for score in await client.running(iter(pictures(3)))]) == 3
            await asyncio.to_thread(check_samples, server.metrics_url)

    asyncio.run(main())


def test_running_refused_and_abandoned_calls_are_counted() -> None:
    begun, gate = threading.Event(), threading.Event()

    def hold(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        begun.set()
        gate.wait(60)
        return docs

    def endless(doc: Picture) -> Iterator[Score]:
        while True:
            yield Score(value=1.0, of=doc.label)

    limits = Limits(max_concurrency=1, max_queue=0)
    with serve([hold, endless], limits=limits, metrics=True) as server, Client(server.address) as client:
        client.contract()
        call = client.hold.future(pictures(1))
        assert begun.wait(60)
        assert read_metrics(server.metrics_url)['quire_requests_in_flight{endpoint="hold"}'] == 1
        with pytest.raises(ServiceLimitError):
            client.hold(pictures(1))
        samples = read_metrics(server.metrics_url)
        assert samples['quire_requests_total{code="RESOURCE_EXHAUSTED",endpoint="hold"}'] == 1
        assert samples['quire_errors_total{endpoint="hold",error="ServiceLimitError"}'] == 1
        gate.set()
        call.result()
        wait_for_sample(server.metrics_url, 'quire_requests_in_flight{endpoint="hold"}', 0)
        answers = client.endless(pictures(1)[0])
        next(answers)
        answers.close()
        wait_for_sample(server.metrics_url, 'quire_requests_total{code="CANCELLED",endpoint="endless"}', 1)


def test_metrics_use_the_port_that_is_passed() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    with serve(embed, metrics=port) as server:
        assert server.metrics_url == f"http://127.0.0.1:{port}/metrics"
        with pytest.raises(ServiceError, match=f"metrics: 127.0.0.1:{port} cannot be opened"):
            serve(embed, metrics=port)


def test_servers_without_metrics_say_so() -> None:
    with serve(embed) as server, pytest.raises(OptionError, match="pass metrics=True"):
        _ = server.metrics_url
    for option in (-1, 70_000, "yes", 1.5):
        with pytest.raises(OptionError, match="metrics="):
            serve(embed, metrics=option)  # type: ignore[arg-type]


def test_metrics_stop_when_the_port_of_the_server_is_taken() -> None:
    def count_threads() -> int:
        return sum("serve_forever" in thread.name for thread in threading.enumerate())

    with serve(embed) as server:
        before = count_threads()
        with pytest.raises(ServiceError, match="cannot be opened"):
            serve(embed, port=server.port, metrics=True)
        assert count_threads() == before


def test_metrics_name_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"quire-ml\[metrics\]"):
        serve(embed, metrics=True)

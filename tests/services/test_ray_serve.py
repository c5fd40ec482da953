"""Services on Ray Serve, on a real Ray."""

import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from quire import BaseDocument, DocumentArray
from quire.errors import (
    FunctionError,
    OptionError,
    PathError,
    SchemaError,
    ServiceError,
    ServiceLimitError,
    ServiceTimeoutError,
    ServiceUnavailableError,
)
from quire.services import RayServeClient, endpoint, ray_serve

pytestmark = [
    pytest.mark.needs("ray", "grpc", "fastapi", "cloudpickle"),
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray Serve: its models, its use of asyncio
]


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


OPTIONS: dict[str, Any] = {"num_cpus": 0}


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    import ray
    from ray import serve

    ray.shutdown()  # another file of tests may have started Ray in this process, without GPUs
    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
    OPTIONS.update(port=free_port())
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def make_service() -> Any:
    """Return a class that is sent by value, as one of a notebook."""

    class Row(BaseDocument):
        number: int
        pid: int = 0
        batch: int = 0

    class Model:
        @endpoint(idempotent=True)
        def who(self, rows: DocumentArray[Row]) -> DocumentArray[Row]:
            time.sleep(0.05)  # so that calls run when their replica is killed
            for row in rows:
                row.pid = os.getpid()
            return rows

        @endpoint(max_batch_size=8, max_wait=0.5)
        async def batch(self, rows: DocumentArray[Row]) -> DocumentArray[Row]:
            for row in rows:
                row.batch = len(rows)
            return rows

        def fail(self, rows: DocumentArray[Row]) -> DocumentArray[Row]:
            raise ValueError(f"no good: {rows[0].number}")

    Model.row = Row  # type: ignore[attr-defined]
    return Model


def post(url: str, rows: Any) -> Any:
    request = Request(url, json.dumps(rows).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as response:
        return json.load(response)


def test_calls_are_typed_and_batched_and_survive_a_killed_replica() -> None:
    model = make_service()
    row = model.row

    def rows(*numbers: int) -> Any:
        return DocumentArray[row](row(number=number) for number in numbers)

    with ray_serve(model, name="model", num_replicas=2, **OPTIONS) as service:
        with service.client(model) as client:
            answer = client.who(rows(1, 2))
            assert type(answer) is DocumentArray[row]
            assert answer.number == [1, 2]
            with pytest.raises(FunctionError, match="ValueError: no good: 3"):
                client.fail(rows(3))
            with pytest.raises(PathError, match="no endpoint 'other'"):
                client.other(rows(1))
            assert client.who(rows(*range(200_000))).number[-1] == 199_999  # larger than a message of gRPC
            with pytest.raises(OptionError, match="no streams"):
                next(client.who.stream([rows(1)]))
            with pytest.raises(OptionError, match="no .future"):
                client.who.future(rows(1))
            with pytest.raises(ServiceTimeoutError):
                client.who(rows(1), timeout=0.01)
            with service.client(model, max_response_bytes=50) as small, pytest.raises(ServiceLimitError):
                small.who(rows(1, 2))

            # Calls of clients and over HTTP share batches.
            url = f"{service.url}/batch"
            with ThreadPoolExecutor(16) as pool:
                calls = [pool.submit(client.batch, rows(number)) for number in range(8)]
                posts = [pool.submit(post, url, [{"number": number}]) for number in range(8)]
                assert [call.result()[0].number for call in calls] == list(range(8))
                assert [call.result()[0]["number"] for call in posts] == list(range(8))
                sizes = [call.result()[0].batch for call in calls] + [call.result()[0]["batch"] for call in posts]
                assert max(sizes) > 2
            with pytest.raises(HTTPError) as caught:
                post(f"{service.url}/fail", [{"number": 3}])
            assert caught.value.code == 500
            assert b"no good: 3" in caught.value.read()

        # A replica is killed under load: every idempotent call is answered, by the other one or its successor.
        pids: Counter[int] = Counter()
        done, lock = threading.Event(), threading.Lock()

        def load(number: int) -> None:
            with service.client(model) as client:
                while not done.is_set():
                    number += 1
                    [answer] = client.who(rows(number))
                    assert answer.number == number
                    with lock:
                        pids[answer.pid] += 1

        def wait_for_pids(number: int) -> None:
            deadline = time.monotonic() + 120
            while len(pids) < number and not any(each.done() for each in running):
                assert time.monotonic() < deadline, pids
                time.sleep(0.05)

        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(load, number * 1_000_000) for number in range(4)]
            try:
                wait_for_pids(2)
                os.kill(next(iter(pids)), signal.SIGKILL)
                wait_for_pids(3)  # with the successor
            finally:
                done.set()
            for each in running:
                each.result(60)

    with pytest.raises(ServiceUnavailableError, match="no application 'model'"):
        RayServeClient("model")


def test_services_are_routed_apart_and_scale_by_load() -> None:
    class Number(BaseDocument):
        value: int
        pid: int = 0

    def negate(number: Number) -> Number:
        time.sleep(0.2)
        return Number(value=-number.value, pid=os.getpid())

    def read_gpu(number: Number) -> Number:
        return Number(value=number.value + int(os.environ["CUDA_VISIBLE_DEVICES"]))

    autoscaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, "upscale_delay_s": 0}
    with (
        ray_serve(negate, autoscaling=autoscaling, **OPTIONS) as first,
        ray_serve(read_gpu, num_gpus=1, deployment={"health_check_period_s": 5}, **OPTIONS) as second,
        first.client(negate) as negates,
        second.client(read_gpu) as reads,
        ThreadPoolExecutor(6) as pool,
    ):
        assert (first.name, second.name) == ("Negate", "ReadGpu")
        assert reads.read_gpu(Number(value=100)).value in (100, 101)
        assert post(f"{first.url}/negate", {"value": 4})["value"] == -4
        pids, deadline = set[int](), time.monotonic() + 120
        while len(pids) < 2:
            assert time.monotonic() < deadline
            pids |= {answer.pid for answer in pool.map(negates.negate, [Number(value=1)] * 12)}


def test_services_that_cannot_be_deployed_are_errors() -> None:
    class Number(BaseDocument):
        value: int

    def count(number: Number) -> Iterator[Number]:
        yield number

    def same(number: Number) -> Number:
        return number

    @endpoint(max_batch_size=2, max_batch_bytes=100)
    def limited(numbers: DocumentArray[Number]) -> DocumentArray[Number]:
        return numbers

    class Broken:
        def __init__(self) -> None:
            raise ValueError("no weights")

        def run(self, number: Number) -> Number:
            return number

    with pytest.raises(ServiceError, match="(?s)Broken cannot be deployed on Ray Serve.*no weights"):
        ray_serve(Broken, deployment={"max_constructor_retry_count": 1}, **OPTIONS)
    with pytest.raises(OptionError, match="max_batch_bytes is not supported"):
        ray_serve(limited)
    with pytest.raises(SchemaError, match="no streams"):
        ray_serve(count)
    with pytest.raises(OptionError, match="exclude each other"):
        ray_serve(same, num_replicas=2, autoscaling={})
    with pytest.raises(OptionError, match="cannot be sent"):
        ray_serve([same, threading.Lock()])

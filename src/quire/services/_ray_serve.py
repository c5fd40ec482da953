"""Services on a Ray cluster, with Ray Serve: `ray_serve(f, num_replicas=4)`.

The replicas decode, batch and encode as the other servers do. Clients inside of the cluster call them by a handle of
Ray Serve, others over HTTP. The gRPC proxies of Ray Serve are not used: they listen on all addresses of every node, and
know only methods that were named when they were started.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from typing_extensions import Self

from quire._optional import require
from quire.errors import (
    OptionError,
    PathError,
    SchemaError,
    ServiceError,
    ServiceUnavailableError,
    reject_unknown_options,
)
from quire.parallel import summary_of
from quire.services._calls import Calls, LoopThread
from quire.services._client import Client
from quire.services._description import contract_fingerprint
from quire.services._endpoints import Endpoint, collect_endpoints, service_name
from quire.services._errors import CONTRACT_METADATA, error_to_status
from quire.services._http_mount import mount
from quire.services._limits import RESPONSE_BYTES, Limits, response_too_large
from quire.services._metrics import NO_METRICS, OK
from quire.services._service_pickle import dump_service, load_service
from quire.services._service_spec import DESCRIBE, ServiceSpec

_PURPOSE = "a service on Ray Serve"
_CALLS_PER_REPLICA = 64
grpc: Any = require("grpc", extra="grpc", needed_for=_PURPOSE)


@reject_unknown_options
def ray_serve(  # noqa: PLR0913 - the options of a deployment
    service: object,
    *,
    name: str | None = None,
    num_replicas: int = 1,
    autoscaling: Mapping[str, Any] | None = None,
    num_cpus: float = 1,
    num_gpus: float = 0,
    max_ongoing_requests: int | None = None,
    limits: Limits | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    deployment: Mapping[str, Any] | None = None,
) -> RayService:
    """Deploy a service on the Ray cluster to which this process is connected, and wait until its replicas are ready.

    The service is what `serve` takes, with endpoints that take and return one value; each replica creates an object of
    a class. A service of the same name is replaced. It runs until `stop()` or the end of its `with` block, also after
    this process has ended.

    name: the name of the application, by default that of the class, as `Model`, or of the function, as `Embed`.
    num_replicas: the number of replicas, unless `autoscaling` is passed.
    autoscaling: the `autoscaling_config` of Ray Serve, as `{'min_replicas': 1, 'max_replicas': 8}`.
    num_cpus, num_gpus: what each replica reserves.
    max_ongoing_requests: how many calls Ray Serve sends to a replica at the same time. By default 64, or twice the
        largest `max_batch_size`, so that batches fill.
    limits: `max_request_bytes`, `max_pending_bytes` and `max_concurrency` of each replica.
    host, port: where the HTTP proxies of Ray Serve listen, if Ray Serve does not run yet.
    deployment: further options of `ray.serve.deployment`, as `{'health_check_period_s': 5}`.
    """
    ray: Any = require("ray", extra="ray", needed_for=_PURPOSE)
    serve: Any = require("ray.serve", extra="ray", needed_for=_PURPOSE)
    if not ray.is_initialized():
        raise OptionError("ray_serve: this process is not connected to a Ray cluster. Call ray.init(...) first.")
    if autoscaling is not None and num_replicas != 1:
        raise OptionError("num_replicas and autoscaling exclude each other: pass min_replicas and max_replicas there.")
    endpoints = collect_endpoints(service, construct=False)
    for endpoint in endpoints.values():
        if not endpoint.is_unary:
            raise SchemaError(f"{endpoint}: Ray Serve has no streams of quire; serve it with `serve`.")
        if endpoint.options.max_batch_bytes:
            raise OptionError(f"{endpoint.name}: max_batch_bytes is not supported on Ray Serve. Use max_batch_size.")
    limits = limits or Limits()
    limits = replace(limits, max_message_bytes=limits.max_request_bytes)  # requests of any size are one message
    largest_batch = max(endpoint.options.max_batch_size for endpoint in endpoints.values())
    name = name or service_name(service)
    options: dict[str, Any] = {
        "name": name,
        "ray_actor_options": {"num_cpus": num_cpus, "num_gpus": num_gpus},
        "max_ongoing_requests": max_ongoing_requests or max(_CALLS_PER_REPLICA, 2 * largest_batch),
        **({"num_replicas": num_replicas} if autoscaling is None else {"autoscaling_config": dict(autoscaling)}),
        **(deployment or {}),
    }
    replicas = serve.deployment(**options)(_Replica).bind(dump_service(service), limits)
    serve.start(http_options={"host": host, "port": port})
    try:
        serve.run(replicas, name=name, route_prefix=f"/{name}")
    except RuntimeError as error:
        reason = serve.status().applications[name].deployments[name].message
        serve.delete(name)
        raise ServiceError(f"{name} cannot be deployed on Ray Serve: {reason or error}") from error
    return RayService(name, f"http://{host}:{port}/{name}")


class RayService:
    """A service that runs on Ray Serve; `ray_serve` returns it."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url

    def client(self, service: object = None, **options: Any) -> RayServeClient:
        """Return a client; the arguments are those of `RayServeClient`."""
        return RayServeClient(self.name, service, **options)

    def stop(self) -> None:
        """Remove the service from the cluster; Ray Serve goes on with others."""
        require("ray.serve", extra="ray", needed_for=_PURPOSE).delete(self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, tp: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


class RayServeClient(Client):
    """A client of a service on Ray Serve, in any process that is connected to the cluster.

    Endpoints are called as with `Client`, but without `.stream()` and `.future()`. Idempotent calls are sent again when
    their replica has died.
    """

    def __init__(
        self,
        application: str,
        service: object = None,
        *,
        timeout: float | None = 60.0,
        retries: int | None = None,
        max_response_bytes: int = RESPONSE_BYTES,
    ) -> None:
        """Connect to the application of this name; the other arguments are those of `Client`."""
        super().__init__(application, service, timeout=timeout, retries=retries, max_response_bytes=max_response_bytes)
        serve: Any = require("ray.serve", extra="ray", needed_for=_PURPOSE)
        try:
            self._handle = serve.get_app_handle(application)
        except serve.exceptions.RayServeException as error:
            raise ServiceUnavailableError(f"Ray Serve has no application {application!r}: {error}") from error

    def _method(self, name: str, *, stream: bool = False) -> Any:
        if stream:
            raise OptionError(f"{self.target} {name}: services on Ray Serve have no streams.")
        return _HandleMethod(self._handle, name, self.max_response_bytes)

    def _is_connected(self) -> bool:
        return True  # the channel of gRPC is not used


class _HandleMethod:
    """Calls a method of the replicas, in the place of a callable of gRPC."""

    def __init__(self, handle: Any, name: str, max_response_bytes: int) -> None:
        self._handle, self._name, self._max_response_bytes = handle, name, max_response_bytes

    def __call__(self, data: bytes, **arguments: Any) -> bytes:
        return self.with_call(data, **arguments)[0]

    def with_call(self, data: bytes, timeout: float | None = None, **_: Any) -> tuple[bytes, _Reply]:
        """Return the response and its status; raise `_FailedReply` if the call fails."""
        errors: Any = require("ray.exceptions", extra="ray", needed_for=_PURPOSE)
        serve_errors: Any = require("ray.serve.exceptions", extra="ray", needed_for=_PURPOSE)
        response = self._handle.answer.remote(self._name, data)
        try:
            answer, reply = response.result(timeout_s=timeout)
        except TimeoutError:
            response.cancel()
            raise _FailedReply(_Reply("DEADLINE_EXCEEDED")) from None
        except serve_errors.BackPressureError as error:
            raise _FailedReply(_Reply("RESOURCE_EXHAUSTED", str(error))) from None
        except (errors.RayError, serve_errors.RayServeException) as error:  # the replica has died
            raise _FailedReply(_Reply("UNAVAILABLE", summary_of(error))) from None
        if reply.code != OK.code:
            raise _FailedReply(reply)
        if len(answer) > self._max_response_bytes:
            raise response_too_large(self._max_response_bytes)
        return answer, reply

    def future(self, *_: Any, **__: Any) -> NoReturn:
        raise OptionError(f"{self._name}: clients of Ray Serve have no .future(); call the endpoint in a thread.")


class _Reply(NamedTuple):
    """The status of a call, as a replica returns it."""

    code: str
    message: str = ""
    metadata: tuple[tuple[str, str], ...] = ()

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata, as a call of gRPC does."""
        return self.metadata


class _FailedReply(grpc.RpcError):  # type: ignore[misc]
    """A failed call, with the methods of an error of gRPC, which the client translates."""

    def __init__(self, reply: _Reply) -> None:
        super().__init__(reply)
        self._reply = reply
        self.trailing_metadata = reply.trailing_metadata

    def code(self) -> Any:
        return grpc.StatusCode[self._reply.code]

    def details(self) -> str:
        return self._reply.message


# --- in a replica


class _Replica:
    """The class of the deployment."""

    def __init__(self, service: bytes, limits: Limits) -> None:
        fastapi: Any = require("fastapi", extra="fastapi", needed_for="HTTP routes on Ray Serve")
        self._spec = ServiceSpec.build(load_service(service), limits, None, None)
        self._loop = LoopThread()
        self._calls = Calls(self._spec.endpoints, limits, self._loop.run, NO_METRICS)
        self._threads = ThreadPoolExecutor(limits.max_concurrency, "quire unary")
        self._contract: tuple[tuple[str, str], ...] = (
            (CONTRACT_METADATA, contract_fingerprint(self._spec.description)),
        )
        self._app = fastapi.FastAPI()
        mount(self._app, [self._make_route(endpoint) for endpoint in self._spec.endpoints.values()], limits=limits)

    async def answer(self, name: str, data: bytes) -> tuple[bytes, _Reply]:
        """Answer a call by a handle; the errors of a call are a part of the reply."""
        try:
            answer = self._spec.description if name == DESCRIBE else await self._answer(name, data)
        except Exception as error:  # noqa: BLE001 - the caller gets it, and the replica goes on
            status = error_to_status(error)
            return b"", _Reply(status.code, status.message, self._contract + status.metadata)
        return answer, _Reply(OK.code, metadata=self._contract)

    async def _answer(self, name: str, data: bytes) -> bytes:
        endpoint = self._spec.endpoints.get(name)
        if endpoint is None:
            raise PathError(f"the service has no endpoint {name!r}.")
        run = partial(asyncio.get_running_loop().run_in_executor, self._threads)
        with self._calls.budget.account() as account:
            account.take(len(data))
            if not endpoint.batched:
                return bytes(await run(self._calls.answer, endpoint, data))
            # Read in a thread, because the request may be large; it then waits for its batch without one.
            value = await asyncio.wrap_future(await run(self._calls.submit, endpoint, data))
            return bytes(await run(self._calls.encode, endpoint, value))

    def _make_route(self, endpoint: Endpoint) -> Callable[..., Any]:
        """Return the function of an HTTP route; calls over HTTP and gRPC share the batches of an endpoint."""
        if not endpoint.batched:
            return endpoint.function
        batcher = self._calls.batcher(endpoint)

        async def call(docs: Any) -> Any:
            return await asyncio.wrap_future(await asyncio.to_thread(batcher.submit, partial(copy.deepcopy, docs)))

        call.__annotations__ = {"docs": endpoint.input.python_type, "return": endpoint.output.python_type}
        call.__name__ = call.__qualname__ = endpoint.name
        call.__doc__ = endpoint.summary
        return call

    async def __call__(self, request: Any) -> Any:
        """Answer a call over HTTP."""
        responses: Any = require("starlette.responses", extra="fastapi", needed_for="HTTP routes on Ray Serve")
        response = responses.Response()
        response.raw_headers = []
        parts: list[bytes] = []

        async def send(message: Mapping[str, Any]) -> None:
            await asyncio.sleep(0)
            if message["type"] == "http.response.start":
                response.status_code, response.raw_headers = message["status"], list(message["headers"])
            else:
                parts.append(bytes(message.get("body", b"")))

        await self._app(request.scope, request.receive, send)
        response.body = b"".join(parts)
        return response

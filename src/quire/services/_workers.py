"""Several processes that serve one port: `serve(f, workers=4)`.

A supervisor in the process of the caller starts the workers, replaces those that end, and restarts them one after the
other. Each worker opens the port with SO_REUSEPORT, so the system distributes new connections among them, and no
process in between has to forward calls.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NoReturn

from typing_extensions import Self

from quire.errors import OptionError, QuireError, ServiceError
from quire.parallel import WorkerTraceback, dump_value, load_value, summary_of
from quire.services._endpoints import Endpoint, collect_endpoints
from quire.services._errors import log
from quire.services._metrics import MULTIPROCESS_DIRECTORY, MetricsPage, PrometheusMetrics, check_metrics_port
from quire.services._server import UNWIND_SECONDS, ServeOptions, Server, join_address, on_signals
from quire.services._service_pickle import dump_service, load_service

_REUSE_PORT = "grpc.so_reuseport"
_POLL_SECONDS = 0.05
_EXIT_SECONDS = 5.0
"""How long a worker has to exit after its server has stopped; then it is killed."""
_STABLE_SECONDS = 10.0
"""A worker that ends earlier after its start is replaced after a pause, which doubles each time."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0


class WorkerServer:
    """A service in several processes that share a port; `serve(..., workers=4)` returns it.

    It has the methods of a `Server`, and stops in the same ways. Connections are distributed among the workers, so all
    calls of one client run in the same worker until it connects again.
    """

    abandoned_calls = 0
    """The number of calls that had not returned when their workers were ended, after `stop()`."""

    def __init__(self, service: object, host: str, port: int, workers: Any, options: ServeOptions) -> None:
        """Start the workers, and wait until all of them serve."""
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise OptionError(f"workers={workers!r}: use the number of processes, 1 or more.")
        if not hasattr(socket, "SO_REUSEPORT"):
            raise OptionError(f"workers={workers}: processes cannot share a port on this system ({sys.platform}).")
        if any(name == _REUSE_PORT for name, _ in options.options):
            raise OptionError(f"options: {_REUSE_PORT} cannot be changed with workers={workers}, which share a port.")
        self.host, self._options = host, options
        # Signatures are checked here, where the error has a short traceback; a class is only called in the workers.
        self._endpoints = collect_endpoints(service, construct=False)
        self._lock, self._restart_lock, self._stop_lock = (threading.Lock() for _ in range(3))
        self._wake, self._stop_requested, self._restart_requested = (threading.Event() for _ in range(3))
        self._stopped = False
        self._processes: set[_Worker] = set()  # all that run, also those that are not ready or no longer needed
        self._reservation = _reserve_port(host, port)
        self.port = int(self._reservation.getsockname()[1])
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._reservation.close)
            self._page, self._metrics_folder = None, None
            if options.metrics is not False:
                self._metrics_folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="quire-metrics-"))
                self._page = MetricsPage.of_workers(self._metrics_folder, host, check_metrics_port(options.metrics))
                cleanup.callback(self._page.close)
            worker_options = replace(options, options=(*options.options, (_REUSE_PORT, 1)))
            try:
                arguments = dump_value((host, self.port, worker_options), to_own=False)[0]
            except Exception as error:
                raise OptionError(
                    f"workers={workers}: an option cannot be sent to other processes: {summary_of(error)}. Define "
                    "`authorize` and interceptors at the top level of a module, without open files or locks."
                ) from error
            self._payload = (dump_service(service), arguments)
            cleanup.callback(self._end_all, 0.0)
            self._slots = [self._start_worker() for _ in range(workers)]
            for worker in self._slots:
                worker.wait_until_ready()
            self._cleanup = cleanup.pop_all()
        for number in range(workers):
            threading.Thread(target=self._supervise, args=(number,), name="quire supervisor", daemon=True).start()

    @property
    def address(self) -> str:
        """Host and port, as clients take them."""
        return join_address(self.host, self.port)

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """The endpoints, by name. Those of a class have no object; the workers have."""
        return self._endpoints

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers."""
        with self._lock:
            return [worker.pid for worker in self._slots]

    @property
    def metrics_url(self) -> str:
        """The address of the Prometheus metrics of all workers together, with `metrics=`."""
        if self._page is None:
            raise OptionError("the server has no metrics: pass metrics=True, or the number of a port.")
        return self._page.url

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server has stopped, by `stop()` or SIGTERM; return False if the timeout passes before.

        SIGHUP restarts the workers meanwhile, as `restart()` does. If the new ones cannot start, the error is logged
        and the old ones go on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout

        def request(event: threading.Event) -> None:
            event.set()
            self._wake.set()

        handlers = {signal.SIGTERM: self._stop_requested, signal.SIGHUP: self._restart_requested}
        with on_signals({number: partial(request, event) for number, event in handlers.items()}):
            while not self._stop_requested.is_set():
                if not self._wake.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    return False
                self._wake.clear()
                if self._restart_requested.is_set():
                    self._restart_requested.clear()
                    try:
                        self.restart()
                    except ServiceError as error:
                        log.error("the workers were not restarted: %s", error)
        self.stop()
        return True

    def restart(self) -> None:
        """Replace the workers one after the other, without a gap: an old one stops when its successor serves.

        New workers import the service anew, so this also deploys new code, unless the service was sent by value
        (functions of a script or a notebook, local functions, objects). If a new worker cannot start, ServiceError is
        raised, and the workers that were not replaced yet go on.
        """
        with self._restart_lock:
            for number in range(len(self._slots)):
                if self._stop_requested.is_set():
                    return
                new = self._start_worker()
                try:
                    new.wait_until_ready()
                except BaseException:
                    self._end([new], 0.0)
                    if self._stop_requested.is_set():  # which has killed it
                        return
                    raise
                with self._lock:
                    old, self._slots[number] = self._slots[number], new
                self._end([old], self._options.grace)

    def stop(self, grace: float | None = None) -> None:
        """Accept no new calls, let running calls finish within `grace` seconds, and stop all workers."""
        self._stop_requested.set()
        self._wake.set()
        with self._stop_lock:
            if self._stopped:
                return
            self.abandoned_calls = self._end_all(self._options.grace if grace is None else grace)
            self._cleanup.close()
            self._stopped = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, tp: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    # --- processes

    def _start_worker(self) -> _Worker:
        with self._lock:
            if self._stop_requested.is_set():
                raise ServiceError("the server is stopping.")
            worker = _Worker(self._payload, self._metrics_folder)
            self._processes.add(worker)
        return worker

    def _supervise(self, number: int) -> None:
        """Replace the worker of a number whenever it ends, until the server stops; runs in a thread."""
        failures = 0
        while not self._stop_requested.is_set():
            worker = self._slots[number]
            reason = worker.wait()
            with self._lock:
                if self._stop_requested.is_set() or self._slots[number] is not worker:
                    continue  # it was asked to end
            failures = failures + 1 if worker.seconds_since_start < _STABLE_SECONDS else 0
            log.warning("worker %d ended, and is replaced: %s", worker.pid, reason)
            self._forget(worker)
            while not self._replace(number, worker, failures):
                failures += 1

    def _replace(self, number: int, worker: _Worker, failures: int) -> bool:
        """Start the successor of a worker that has ended; return False if it cannot start."""
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(failures - 1, 10)) if failures else 0.0
        if self._stop_requested.wait(pause) or self._slots[number] is not worker:
            return True  # a restart has replaced it meanwhile
        new: _Worker | None = None
        try:
            new = self._start_worker()
            new.wait_until_ready()
        except (ServiceError, OSError) as error:  # OSError: the system cannot start a process now
            if new is not None:
                self._end([new], 0.0)
            if self._stop_requested.is_set():
                return True
            log.error("a worker cannot start, and is tried again: %s", error)
            return False
        with self._lock:
            is_needed = self._slots[number] is worker
            if is_needed:
                self._slots[number] = new
        if not is_needed:
            self._end([new], 0.0)
        return True

    def _end_all(self, grace: float) -> int:
        """Stop all workers, also those that start; return the number of abandoned calls."""
        with self._lock:
            self._stop_requested.set()  # under the lock: no more workers are started
            workers = list(self._processes)
        return self._end(workers, grace)

    def _end(self, workers: Sequence[_Worker], grace: float) -> int:
        """Stop workers at the same time, and wait until they are gone; return the number of abandoned calls."""
        deadline = time.monotonic() + grace + UNWIND_SECONDS + _EXIT_SECONDS
        for worker in workers:
            worker.request_stop(grace)
        abandoned_calls = 0
        for worker in workers:
            abandoned_calls += worker.join(max(0.0, deadline - time.monotonic()))
            self._forget(worker)
        return abandoned_calls

    def _forget(self, worker: _Worker) -> None:
        with self._lock:
            is_known = worker in self._processes
            self._processes.discard(worker)
        if is_known and self._page is not None:
            self._page.forget_worker(worker.pid)


class _Worker:
    """A worker process, seen by the supervisor."""

    def __init__(self, payload: Sequence[bytes], metrics_folder: str | None) -> None:
        self._channel, channel_of_worker = Pipe()
        number = channel_of_worker.fileno()
        # Not multiprocessing, which would import the main script again, so that each script needed
        # `if __name__ == "__main__"`.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from quire.services._workers import run_worker; run_worker({number})"
        )
        environment = dict(os.environ)
        if metrics_folder is not None:
            environment[MULTIPROCESS_DIRECTORY] = metrics_folder  # which prometheus_client reads when it is imported
        # A session of its own, so that Ctrl-C and SIGHUP of a terminal only reach the supervisor.
        self._process = subprocess.Popen(  # noqa: S603 - this Python
            [sys.executable, "-c", code],
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        channel_of_worker.close()
        self._started = time.monotonic()
        self._is_ready = False
        self._payload = payload
        self.pid = self._process.pid

    @property
    def seconds_since_start(self) -> float:
        return time.monotonic() - self._started

    def wait_until_ready(self) -> None:
        """Wait until the worker serves; raise ServiceError if it cannot."""
        with contextlib.suppress(OSError):  # it has ended already
            for part in self._payload:
                self._channel.send_bytes(part)
        # Not only for the end of the channel: processes that the service has forked would keep it open.
        while not self._channel.poll(_POLL_SECONDS):
            if self._process.poll() is not None:
                raise ServiceError(f"a worker ended before it could serve: {self.wait()}")
        try:
            message, worker_traceback = self._channel.recv()
        except (EOFError, OSError):
            raise ServiceError(f"a worker ended before it could serve: {self.wait()}") from None
        if message is not None:
            raise ServiceError(f"a worker cannot serve: {message}") from WorkerTraceback(worker_traceback)
        self._is_ready, self._started = True, time.monotonic()

    def wait(self) -> str:
        """Wait until the process has ended; return the reason."""
        code = self._process.wait()
        if code >= 0:
            return f"exit code {code}. Its own message, if any, is on the standard error stream."
        with contextlib.suppress(ValueError):
            return f"it was killed by {signal.Signals(-code).name}. Is there enough memory for all workers?"
        return f"it was killed by signal {-code}."

    def request_stop(self, grace: float) -> None:
        """Let the worker finish its calls and end; one that does not serve yet is killed."""
        if not self._is_ready:
            self._process.kill()
            return
        with contextlib.suppress(OSError):  # it has ended already
            self._channel.send(grace)

    def join(self, timeout: float) -> int:
        """Wait until the process is gone, kill it after a timeout, and return the number of its abandoned calls."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            log.warning("worker %d did not end in time, and was killed", self.pid)
            self._process.kill()
            self._process.wait()
        try:
            return int(self._channel.recv()) if self._is_ready and self._channel.poll() else 0
        except (EOFError, OSError):
            return 0
        finally:
            self._channel.close()


def _reserve_port(host: str, port: int) -> socket.socket:
    """Bind a socket to the port, which the workers can share as long as it is open; it does not listen.

    The port stays reserved while no worker runs, and the system chooses a free one for port 0.
    """
    address = join_address(host, port)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if port:
            # SO_REUSEPORT alone would also share the port of another server of this user.
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
        reservation = socket.socket(family, kind, protocol)
        try:
            if port:  # connections of an earlier server may remain in TIME_WAIT
                reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reservation.bind(target)
        except BaseException:
            reservation.close()
            raise
    except OSError as error:
        raise ServiceError(
            f"{address} cannot be opened: it is in use, or not an address of this machine ({error})."
        ) from error
    return reservation


# --- in a worker process


def run_worker(channel_number: int) -> NoReturn:
    """Serve in a process of a `WorkerServer`, until it asks to stop, is gone, or this process receives SIGTERM."""
    channel = Connection(channel_number)
    try:
        service = load_service(channel.recv_bytes())
        host, port, options = load_value(channel.recv_bytes())
        metrics = None if options.metrics is False else PrometheusMetrics()
        server = Server(service, host, port, options, metrics)
    except EOFError:  # the supervisor is gone
        os._exit(1)
    except BaseException as error:  # noqa: BLE001 - the supervisor raises it
        message = str(error) if isinstance(error, QuireError) else summary_of(error)
        with contextlib.suppress(OSError):
            channel.send((message, traceback.format_exc()))
        _exit(1)

    def follow_supervisor() -> None:
        grace = None
        with contextlib.suppress(EOFError, OSError):  # the supervisor was killed: nobody would end this process
            grace = channel.recv()
        server.stop(grace)

    threading.Thread(target=follow_supervisor, name="quire supervisor", daemon=True).start()
    with on_signals({signal.SIGTERM: server._stop_requested.set}):
        with contextlib.suppress(OSError):
            channel.send((None, ""))
        server.wait()
    with contextlib.suppress(OSError):
        channel.send(server.abandoned_calls)
    if server.abandoned_calls:
        _exit(1)  # the interpreter would wait for the threads of these calls, perhaps for ever
    sys.exit(0)


def _exit(code: int) -> NoReturn:
    """End the process without waiting for its threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

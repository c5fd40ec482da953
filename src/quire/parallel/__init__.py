"""Parallel map over threads and processes: results in order, with a bounded number of items in flight."""

from quire.parallel._map import MapOptions, mapped, ordered_map, run_map
from quire.parallel._pickling import dump_value, load_value
from quire.parallel._pools import backend_of
from quire.parallel._tasks import WorkerTraceback, summary_of
from quire.parallel._workers import Backend, Workers, cpu_count

__all__ = [
    "Backend",
    "MapOptions",
    "WorkerTraceback",
    "Workers",
    "backend_of",
    "cpu_count",
    "dump_value",
    "load_value",
    "mapped",
    "ordered_map",
    "run_map",
    "summary_of",
]

"""Parallel map over threads and processes: results in order, with a bounded number of items in flight.

Names without an entry in `__all__` are for other packages of quire.
"""

from quire.parallel._map import MapOptions as MapOptions
from quire.parallel._map import ordered_map as ordered_map
from quire.parallel._map import parallel_map
from quire.parallel._map import run_map as run_map
from quire.parallel._pickling import dump_value as dump_value
from quire.parallel._pickling import load_value as load_value
from quire.parallel._pools import backend_of as backend_of
from quire.parallel._tasks import WorkerTraceback as WorkerTraceback
from quire.parallel._tasks import summary_of as summary_of
from quire.parallel._workers import Backend as Backend
from quire.parallel._workers import Workers
from quire.parallel._workers import cpu_count as cpu_count

__all__ = [
    "Workers",
    "parallel_map",
]

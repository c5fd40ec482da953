"""Work on several cores: results in order, and never more of it under way than was asked for."""

from quire.parallel._mapped import MapOptions, mapped, run_map
from quire.parallel._ordered import cpu_count, ordered_map
from quire.parallel._pools import backend_of
from quire.parallel._tasks import WorkerTraceback, summary_of
from quire.parallel._workers import Backend, Workers

__all__ = [
    "Backend",
    "MapOptions",
    "WorkerTraceback",
    "Workers",
    "backend_of",
    "cpu_count",
    "mapped",
    "ordered_map",
    "run_map",
    "summary_of",
]

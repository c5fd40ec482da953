"""Jobs on their way to ranks: as one file, whose large arrays are mapped and not read.

A rank touches the rows that it is given, so however large the arrays of a dataset are, no rank holds them all.
"""

from __future__ import annotations

import io
import json
import mmap
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

from quire._optional import is_loaded, require
from quire.errors import PickleError, StorageNotFoundError

_HEAD = struct.Struct("<QQ")
_ALIGN = 64
_LARGE = 1 << 12
"""Tensors of fewer bytes are not worth a buffer of their own."""


def write_job(job: Any, path: Path) -> None:
    """Write a job; functions and classes that cannot be imported go along by value."""
    cloudpickle: Any = require("cloudpickle", extra="process", needed_for="sending a training to other processes")
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    try:
        _pickler(cloudpickle)(file, 5, buffer_callback=buffers.append).dump(job)
    except (TypeError, pickle.PicklingError, AttributeError) as error:
        raise PickleError(
            f"the model or the data cannot be sent to other processes: {error}. Pass a function that makes it there: "
            "model=lambda config: Net(), data=lambda config: DataLoader(...)."
        ) from error
    paths_of(path).write_text(json.dumps([entry or str(Path.cwd()) for entry in sys.path]))
    with path.open("wb") as target:
        _write(target, file.getvalue())
        for buffer in buffers:
            _write(target, buffer.raw())


def paths_of(job: Path) -> Path:
    """The file beside a job that tells where the driver imports from."""
    return job.with_suffix(".paths")


def _pickler(cloudpickle: Any) -> Any:
    """Cloudpickle, with torch's tensors as buffers."""

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            found = _tensor(value)
            return super().reducer_override(value) if found is None else found

    return Pickler


def _tensor(value: Any) -> Any:
    if not is_loaded("torch"):
        return None
    torch: Any = require("torch", extra="torch", needed_for="a tensor")
    plain = type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu"
    if not plain or value.requires_grad or value.nbytes < _LARGE or value.is_conj() or value.is_neg():
        return None
    try:
        return torch.from_numpy, (value.contiguous().numpy(),)
    except TypeError:  # numpy has no such type
        return None


def _write(target: Any, data: Any) -> None:
    target.write(_HEAD.pack(memoryview(data).nbytes, 0))
    target.write(b"\0" * (-target.tell() % _ALIGN))
    target.write(data)


def read_job(path: Path) -> Any:
    """The job again. Its arrays can be written to: what is written stays in this process."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise StorageNotFoundError(
            f"{path}: the job cannot be seen from here. Pass model_dir, a folder that all machines of the cluster see."
        ) from error
    first, *buffers = _parts(memoryview(mapped))
    return pickle.loads(first, buffers=buffers)  # noqa: S301 - written by this very program


def _parts(whole: memoryview) -> list[memoryview]:
    found, at = [], 0
    while at < len(whole):
        size, _ = _HEAD.unpack_from(whole, at)
        at += _HEAD.size
        at += -at % _ALIGN
        found.append(whole[at : at + size])
        at += size
    return found

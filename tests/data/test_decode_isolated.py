"""`isolate=True`: rows are decoded in child processes, and a crash of a decoder is an error of its row."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.data import DecodeWarning, MultiModalDataset, decode_audio, decode_image, decode_video
from quire.data import _decoder_process as isolation
from quire.errors import DecodeError, FunctionError
from quire.media import to_audio_bytes, to_video_bytes
from tests.data.crashing_step import CrashingStep
from tests.data.sample_pictures import MaybePhoto, Photo, photos
from tests.media.sample_media import numbered_frames, tone


@pytest.fixture(autouse=True)
def end_children(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PARENT", str(os.getpid()))
    yield
    isolation.close_processes()
    assert not isolation._processes


def documents(*contents: bytes) -> list[MaybePhoto]:
    return [MaybePhoto(id=f"d{n}", number=n, image=content) for n, content in enumerate(contents)]


def dataset_of(contents: Sequence[bytes], **options: Any) -> MultiModalDataset[Any]:
    step = CrashingStep(isolate=True, **options)
    return MultiModalDataset[MaybePhoto](documents(*contents), {"image": step}, framework="numpy", missing="mask")


@pytest.mark.parametrize(
    ("content", "reason"), [(b"segfault", "SIGSEGV"), (b"abort", "SIGABRT"), (b"exit", "exit code 3")]
)
def test_crash_is_an_error_with_row_and_field(content: bytes, reason: str) -> None:
    dataset = dataset_of([b"0", b"1", content, b"3"])
    message = rf"^MaybePhoto.image: document 2 \(id d2\): the decoder has crashed \({reason}\)"
    with pytest.raises(DecodeError, match=message):
        dataset.__getitems__(range(4))
    assert dataset.__getitems__([0, 1, 3]).image.tolist() == [[0, 1], [1, 1], [3, 1]]  # by another child


@pytest.mark.parametrize(
    ("on_error", "numbers"), [("skip", [0, 2, 4]), ("replace", [0, 2, 2, 4, 4]), ("null", [0, 1, 2, 3, 4])]
)
def test_on_error_applies_to_crashes(on_error: Any, numbers: list[int]) -> None:
    dataset = dataset_of([b"0", b"segfault", b"2", b"abort", b"4"], on_error=on_error)
    with pytest.warns(DecodeWarning, match="has crashed"):
        batch = dataset.__getitems__(range(5))
    assert batch.number.tolist() == numbers
    if on_error == "null":
        assert batch.validity("image").tolist() == [True, False, True, False, True]
    else:
        assert batch.image[:, 0].tolist() == numbers


def test_children_are_kept_and_errors_are_not_crashes() -> None:
    dataset = dataset_of([b"print", b"bad", b"fault", b"8"], threads=1)
    with pytest.raises(DecodeError, match=r"document 1 \(id d1\): no number"):
        dataset.__getitems__([0, 1])
    [child] = isolation._processes
    with pytest.raises(FunctionError, match="KeyError"):
        dataset.__getitems__([2])
    assert dataset.__getitems__([0, 3]).image[:, 0].tolist() == [7, 8]
    assert isolation._processes == {child}
    assert child.is_alive


def test_each_thread_has_a_child() -> None:
    dataset = dataset_of([b"%d" % n for n in range(40)], threads=2)
    threads = [threading.Thread(target=dataset.__getitems__, args=(range(40),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= len(isolation._processes) <= 4
    assert len(isolation._idle) == len(isolation._processes)


@pytest.mark.needs("PIL", "av")
def test_rows_equal_those_of_this_process() -> None:
    images, options = photos(6), {"crop": "random", "flip": True, "normalize": ((0.5,), (0.5,))}
    batches = [
        MultiModalDataset[Photo](images, {"image": decode_image(20, isolate=isolate, **options)}, framework="numpy")
        for isolate in (False, True)
    ]
    assert np.array_equal(*(dataset.__getitems__(range(6)).image for dataset in batches))
    sound = [to_audio_bytes(tone(0.2), 8000, "flac")]
    film = [to_video_bytes(numbered_frames(6), 10)]
    for step, contents in ((decode_audio, sound), (decode_video, film)):
        arguments: Any = {"rate": 4000, "samples": 900} if step is decode_audio else {"frames": 3, "size": 16}
        here, there = (step(**arguments, isolate=isolate)(contents, "numpy") for isolate in (False, True))
        assert np.array_equal(here, there)


@pytest.mark.needs("torch", "PIL")
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_report_crashes(start_method: str) -> None:
    """Workers of a DataLoader are daemons, which may have no children of multiprocessing."""
    from torch.utils.data import DataLoader

    dataset = dataset_of([b"0", b"1", b"segfault", b"3"])
    assert dataset.__getitems__([0, 1]).image[:, 0].tolist() == [0, 1]  # a fork inherits the pipes of this child
    options: Any = {"num_workers": 1, "multiprocessing_context": start_method, "collate_fn": dataset.collate_fn}
    batches = iter(DataLoader(dataset, 2, **options))
    assert next(batches).image[:, 0].tolist() == [0, 1]
    with pytest.raises(DecodeError, match=r"document 2 \(id d2\): the decoder has crashed \(SIGSEGV\)"):
        next(batches)
    del batches
    assert dataset.__getitems__([3]).image[:, 0].tolist() == [3]


PARENT = """
import os, sys
from quire.data import decode_image
from quire.data import _decoder_process as isolation
from tests.data.crashing_step import CrashingStep
from tests.data.sample_pictures import picture

decode_image(8, isolate=True)([picture(0)], "numpy")
[child] = isolation._processes
print(child._process.pid, flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.needs("PIL")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("end", ["exit", "kill"])
def test_children_end_with_their_parent(end: str) -> None:
    ended = subprocess.run([sys.executable, "-c", PARENT, end], capture_output=True, text=True, check=False)
    assert ended.stdout.strip().isdigit(), ended.stderr
    deadline = time.monotonic() + 60
    while _is_running(ended.stdout.strip()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

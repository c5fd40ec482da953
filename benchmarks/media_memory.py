"""Measure the memory of video streaming by the length of the video.

    python benchmarks/media.py --rows memory

Each length runs in a fresh process, which reads all frames of a video of 480 x 360 pixels and keeps none. The result
is the peak growth of resident memory since before the file was opened. It should not depend on the length.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from media_data import film
from results import Section

from quire.media import save_video
from quire.typing import VideoUrl

FRAMES = (250, 1000, 4000)


def measure_stream(path: str) -> tuple[int, float]:
    """Return the number of frames and the peak growth in MiB, after ten frames that load libraries and tables."""
    for _ in zip(range(10), VideoUrl(path).frames(), strict=False):
        pass
    before = peak_memory()
    count = sum(1 for _ in VideoUrl(path).frames())
    return count, peak_memory() - before


def peak_memory() -> float:
    """Return the peak resident MiB of this process; getrusage would include those of the parent before the fork."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def section(_: int) -> Section:
    """Measure every length in a process of its own."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for count in FRAMES:
            path = Path(folder) / f"{count}.mp4"
            save_video(film(count), path, 25)
            command = [sys.executable, __file__, str(path)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            frames, grown = json.loads(done.stdout)
            lines.append([f"{frames:,}", f"{path.stat().st_size / 1e6:.1f}", f"{grown:.1f}"])
    return Section(
        "memory",
        "Memory of video streaming",
        "All frames are read and none is kept. The growth is that of the peak resident memory of a fresh process since "
        "before the file was opened; it should not depend on the length.",
        ["frames of 480 x 360", "file size, MB", "growth, MiB"],
        lines,
    )


if __name__ == "__main__":
    print(json.dumps(measure_stream(sys.argv[1])))

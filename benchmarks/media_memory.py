"""What streaming a video takes in memory, by its length.

    python benchmarks/media.py --rows memory

Each length runs in a fresh process, which reads all frames of a video of 480 x 360 pixels and keeps none. Told is how
much the resident memory has grown at its highest since before the file was opened. It should not depend on the length.
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


def watched(path: str) -> tuple[int, float]:
    """How many frames there are, and how many MiB streaming them took; the first time, to load what is loaded once."""
    for _ in zip(range(10), VideoUrl(path).frames(), strict=False):
        pass
    before = highest()
    count = sum(1 for _ in VideoUrl(path).frames())
    return count, highest() - before


def highest() -> float:
    """The most MiB that this program has held; getrusage would count those of the one that started it, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def section(_: int) -> Section:
    """Every length in a process of its own."""
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
        "Memory of a video that is streamed",
        "All frames are read and none is kept. Told is how much the resident memory of a fresh process has grown at "
        "its highest since before the file was opened; it should not depend on the length.",
        ["frames of 480 x 360", "MB in the file", "MiB more"],
        lines,
    )


if __name__ == "__main__":
    print(json.dumps(watched(sys.argv[1])))

"""What streaming a video takes in memory, by its length.

    python benchmarks/media_memory.py --frames 250 1000 4000

Each length runs in a fresh process, which reads all frames of a video of 480 x 360 pixels and keeps none. Told is how
much the resident memory has grown at its highest since before the file was opened. It should not depend on the length.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from media import film

from quire.media import save_video
from quire.typing import VideoUrl


def watch(path: str) -> None:
    """Stream a video twice, the first time to load what is loaded once, and tell what the second time took."""
    for _ in zip(range(10), VideoUrl(path).frames(), strict=False):
        pass
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = sum(1 for _ in VideoUrl(path).frames())
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{count:6} frames, {Path(path).stat().st_size / 1e6:6.1f} MB in the file: {grown / 1024:6.1f} MiB more")


def main() -> None:
    """Measure every length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, nargs="+", default=[250, 1000, 4000])
    parser.add_argument("--watch", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watch:
        watch(options.watch)
        return
    with tempfile.TemporaryDirectory() as folder:
        for count in options.frames:
            path = str(Path(folder) / f"{count}.mp4")
            save_video(film(count), path, 25)
            subprocess.run([sys.executable, __file__, "--watch", path], check=True)


if __name__ == "__main__":
    main()

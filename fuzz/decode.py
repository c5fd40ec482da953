"""Coverage-guided fuzzing of one decoder: python fuzz/decode.py --decoder=batch --runs=1000000.

An error that is no DecodeError, a value that cannot be looked at or written again, ten seconds over one input, or two
GiB of memory end the run, and the input is kept. The last line of a run is its summary.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

import atheris

if any(name.split(".")[0] == "quire" for name in sys.modules):
    raise SystemExit("quire was imported before it could be instrumented: the run would be blind.")
BELOW = ("columns", "display", "parallel", "tensors._numpy")
for part in BELOW:  # by name: a linter takes an import that is not used away
    importlib.import_module(f"quire.{part}")
with atheris.instrument_imports(include=["quire"]):  # the decoders alone: coverage of the rest costs, and tells little
    importlib.import_module("quire.codec")

from fuzz.seeds import MOST, write_seeds  # noqa: E402 - these import quire
from quire.codec import _blocks  # noqa: E402
from tests.codec.hostile import DECODERS, attempt  # noqa: E402

HERE = Path(__file__).parent
_PROGRESS = 10_000  # inputs from one line of numbers to the next, so that a run that is stopped has its numbers
# The same code without threads, which would be started anew for each input.
_blocks.ordered_map = lambda function, items, *_, **__: map(function, items)


class Run:
    """One run: how many inputs came, and how many of them were read."""

    def __init__(self, decoder: str, limit: int, seconds: float) -> None:
        self.decoder, self.limit, self.seconds = decoder, limit, seconds
        self.inputs = self.read = self.crashes = 0
        self.start = time.monotonic()

    def one_input(self, data: bytes) -> None:
        """Decode one input."""
        self.inputs += 1
        try:
            self.read += attempt(DECODERS[self.decoder], data)
        except BaseException:
            self.crashes += 1
            self.summary()
            raise
        if not self.inputs % _PROGRESS:
            self.summary("PROGRESS")
        if self.inputs >= self.limit or time.monotonic() - self.start > self.seconds:
            self.summary()
            os._exit(0)  # as libFuzzer itself ends, which runs nothing at exit

    def summary(self, title: str = "SUMMARY") -> None:
        """Print the numbers."""
        seconds = time.monotonic() - self.start
        print(
            f"{title} {self.decoder}: {self.inputs} inputs, {self.read} read, {seconds:.0f} s, "
            f"{self.inputs / max(seconds, 1e-9):.0f}/s, {self.crashes} crashes",
            flush=True,
        )


def main() -> None:
    """Fuzz one decoder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decoder", choices=DECODERS, required=True)
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many seconds")
    parser.add_argument("--timeout", type=int, default=10, help="seconds for one input; more where the machine is busy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="keep what is found here; a folder that is thrown away otherwise")
    asked = parser.parse_args()
    warnings.simplefilter("error")
    corpus = asked.corpus or Path(tempfile.mkdtemp())
    write_seeds(asked.decoder, corpus)
    run = Run(asked.decoder, asked.runs, asked.seconds)
    limits = [f"-timeout={asked.timeout}", "-rss_limit_mb=2048"]
    kept = HERE / "crashes"
    kept.mkdir(exist_ok=True)
    shown = [f"-artifact_prefix={kept}/{asked.decoder}-", "-print_final_stats=0", "-verbosity=0", f"-max_len={MOST}"]
    gc.freeze()
    atheris.Setup([sys.argv[0], str(corpus), f"-seed={asked.seed}", *limits, *shown], run.one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

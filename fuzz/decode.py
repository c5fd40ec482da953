"""Coverage-guided fuzzing of one decoder: python fuzz/decode.py --decoder=batch --runs=1000000.

An error other than a DecodeError, a value that cannot be displayed or encoded again, more than ten seconds for an
input, or more than two GiB of memory end the run, and the input is kept. The last line of the output is a summary.
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
    raise SystemExit("quire was imported before it could be instrumented: the run would have no coverage.")
BELOW = ("columns", "display", "parallel", "tensors._numpy")
for part in BELOW:  # by name, because a linter removes unused imports
    importlib.import_module(f"quire.{part}")
with atheris.instrument_imports(include=["quire"]):  # only the decoders: more coverage costs time and adds little
    importlib.import_module("quire.codec")

from fuzz.seeds import MOST, write_seeds  # noqa: E402 - these import quire
from quire.codec import _blocks  # noqa: E402
from tests.codec.hostile import DECODERS, attempt  # noqa: E402

HERE = Path(__file__).parent
_PROGRESS = 10_000  # inputs between two progress lines
# The same code without threads, which would have to be started for each input.
_blocks.ordered_map = lambda function, items, *_, **__: map(function, items)


class Run:
    """A run, with the numbers of inputs and of inputs that were decoded."""

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
            os._exit(0)  # like libFuzzer, which runs no exit handlers

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
    parser.add_argument("--seconds", type=float, default=math.inf, help="maximum duration")
    parser.add_argument("--timeout", type=int, default=10, help="seconds for one input; use more on a busy machine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, help="folder to keep the corpus in; default: a temporary folder")
    options = parser.parse_args()
    warnings.simplefilter("error")
    corpus = options.corpus or Path(tempfile.mkdtemp())
    write_seeds(options.decoder, corpus)
    run = Run(options.decoder, options.runs, options.seconds)
    limits = [f"-timeout={options.timeout}", "-rss_limit_mb=2048"]
    kept = HERE / "crashes"
    kept.mkdir(exist_ok=True)
    shown = [f"-artifact_prefix={kept}/{options.decoder}-", "-print_final_stats=0", "-verbosity=0", f"-max_len={MOST}"]
    gc.freeze()
    atheris.Setup([sys.argv[0], str(corpus), f"-seed={options.seed}", *limits, *shown], run.one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

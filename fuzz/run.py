"""Fuzz every decoder, at most two at a time: python fuzz/run.py --runs=1000000. Prints a summary line for each."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.codec.hostile import DECODERS

ROOT = Path(__file__).parent.parent


def fuzz(decoder: str, options: argparse.Namespace) -> tuple[str, str]:
    """Fuzz one decoder in its own process; return its summary, and its output if it failed."""
    command = [sys.executable, str(ROOT / "fuzz/decode.py"), f"--decoder={decoder}", f"--runs={options.runs}"]
    command += [f"--seconds={options.seconds}", f"--seed={options.seed}", f"--timeout={options.timeout}"]
    if options.corpus:
        command.append(f"--corpus={options.corpus / decoder}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SUMMARY")]
    summary = lines[-1] if lines else f"SUMMARY {decoder}: it did not finish"
    without_coverage = "Is the code instrumented" in done.stderr  # the number of inputs then means little
    return summary, done.stdout[-4000:] + done.stderr[-8000:] if done.returncode or without_coverage else ""


def main() -> int:
    """Fuzz the given decoders, or all; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs for each decoder")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="maximum duration for each decoder")
    parser.add_argument("--timeout", type=int, default=10, help="seconds for one input; use more on a busy machine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--corpus", type=Path, help="folder to keep the corpora in, for the next run")
    parser.add_argument("decoders", nargs="*", help=f"some of: {', '.join(DECODERS)}")
    options = parser.parse_args()
    failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for summary, output in pool.map(lambda name: fuzz(name, options), options.decoders or DECODERS):
            print(summary, flush=True)
            if output:
                failed = 1
                print(output, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())

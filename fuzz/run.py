"""Fuzz every decoder, at most two at once: python fuzz/run.py --runs=1000000; one line of numbers for each."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.codec.hostile import DECODERS

ROOT = Path(__file__).parent.parent


def fuzz(decoder: str, asked: argparse.Namespace) -> tuple[str, str]:
    """Fuzz one decoder in a process of its own: its summary, and all that it printed where it failed."""
    command = [sys.executable, str(ROOT / "fuzz/decode.py"), f"--decoder={decoder}", f"--runs={asked.runs}"]
    command += [f"--seconds={asked.seconds}", f"--seed={asked.seed}", f"--timeout={asked.timeout}"]
    if asked.corpus:
        command.append(f"--corpus={asked.corpus / decoder}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SUMMARY")]
    summary = lines[-1] if lines else f"SUMMARY {decoder}: it did not come to its end"
    blind = "Is the code instrumented" in done.stderr  # without coverage, the number of inputs means little
    return summary, done.stdout[-4000:] + done.stderr[-8000:] if done.returncode or blind else ""


def main() -> int:
    """Fuzz those that were asked for, or all; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs for each decoder")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most so many seconds for each")
    parser.add_argument("--timeout", type=int, default=10, help="seconds for one input; more where the machine is busy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--corpus", type=Path, help="a folder to keep what was found in, for the next run")
    parser.add_argument("decoders", nargs="*", help=f"some of: {', '.join(DECODERS)}")
    asked = parser.parse_args()
    failed = 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        for summary, output in pool.map(lambda name: fuzz(name, asked), asked.decoders or DECODERS):
            print(summary, flush=True)
            if output:
                failed = 1
                print(output, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())

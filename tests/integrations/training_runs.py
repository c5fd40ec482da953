"""The contract of a trainer: a run that is killed and resumed trains on every row of every epoch exactly once."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quire import BaseDocument
from quire.storage import write_dataset
from quire.typing import NdArray, float32

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]
ROWS, EPOCHS, SAVE_EVERY = 203, 2, 3


class Row(BaseDocument):
    number: int
    x: NdArray[float32, 4]
    y: float


def write_rows(folder: Path) -> Path:
    vectors = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    rows = (Row(number=i, x=x, y=float(x.sum())) for i, x in enumerate(vectors))
    write_dataset(rows, folder, document_type=Row, format="arrow", shard_bytes=2_000)
    return folder


@dataclass
class Training:
    """A training program, its data, and the folder of its checkpoints and records."""

    program: str
    data: Path
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    launches: bool = False  # whether the trainer starts its own processes
    runs: int = 0

    def run(self, processes: int = 1, *, kill_at: int = 0, **options: Any) -> str:
        """Run the program in new processes; with `kill_at`, rank 0 is killed in this step. Returns the output."""
        config = {
            "data": str(self.data),
            "folder": str(self.folder),
            "run": self.runs,
            "processes": processes,
            "kill_at": kill_at,
            "batch_size": 8,
            "epochs": EPOCHS,
            "save_every": SAVE_EVERY,
            "workers": 0,
            "accumulate": 1,
            **self.options,
            **options,
        }
        self.runs += 1
        codes, output = self._run_processes(config, 1 if self.launches else processes)
        if not kill_at and any(codes):
            raise AssertionError(f"{self.program} failed with {codes}:\n{output}")
        if kill_at and not any(codes):
            raise AssertionError(f"{self.program} was not killed in step {kill_at}:\n{output}")
        return output

    def _run_processes(self, config: dict[str, Any], number: int) -> tuple[list[int], str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = self.folder / f"output-{config['run']}.txt"
        processes = []
        with log.open("w") as output:
            for rank in range(number):
                environment = {
                    **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST"))},
                    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(PROGRAMS)]),
                    "QUIRE_TEST_CONFIG": json.dumps(config),
                    "OMP_NUM_THREADS": "1",
                    "HF_HUB_OFFLINE": "1",
                }
                if not self.launches and (number > 1 or self.program == "fsdp2"):  # as torchrun does
                    environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number)}
                    environment |= {
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                        "LOCAL_WORLD_SIZE": str(number),
                    }
                command = [sys.executable, str(PROGRAMS / f"train_{self.program}.py")]
                processes.append(
                    subprocess.Popen(
                        command, env=environment, cwd=self.folder, stdout=output, stderr=output, start_new_session=True
                    )
                )
            try:
                # A rank that has lost another one may wait for it for ever.
                while any(process.poll() is None for process in processes):
                    if any(process.returncode for process in processes):
                        break
                    time.sleep(0.05)
            finally:
                codes = [process.poll() for process in processes]
                for process in processes:
                    end_group(process)
        return [-9 if code is None else code for code in codes], log.read_text()

    def read_rows(self) -> list[int]:
        """Return the rows that are part of the model, in the order of the steps."""
        rows: list[int] = []
        records = [self._read_run(run) for run in range(self.runs)]
        for run, (_, steps) in enumerate(records):
            later = [resumed for resumed, _ in records[run + 1 :]]
            committed = min([step for step in later if step is not None], default=None)
            for step in sorted(steps):
                if committed is None or step <= committed:
                    rows += steps[step]
        return rows

    def _read_run(self, run: int) -> tuple[int | None, dict[int, list[int]]]:
        steps: dict[int, list[int]] = {}
        resumed = None
        for path in sorted(self.folder.glob(f"rows-{run}-*.jsonl")):
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                if "resumed" in entry:
                    resumed = entry["resumed"]
                else:
                    steps.setdefault(entry["step"], []).extend(entry["rows"])
        return resumed, steps

    def check(self) -> None:
        """Check that each epoch has every row once."""
        rows = self.read_rows()
        epochs = [sorted(rows[start : start + ROWS]) for start in range(0, len(rows), ROWS)]
        wrong = [
            f"epoch {number}: {sorted(set(range(ROWS)) - set(epoch))} missing, {len(epoch) - len(set(epoch))} repeated"
            for number, epoch in enumerate(epochs)
            if epoch != list(range(ROWS))
        ]
        assert not wrong, wrong
        assert len(epochs) == EPOCHS

    def check_contract(self, first: dict[str, Any], second: dict[str, Any], *, in_first_epoch: bool = False) -> None:
        """Kill a run after a checkpoint, resume it with other options, and check the rows.

        It is killed at any step, or at any of the first epoch.
        """
        steps = (1 if in_first_epoch else EPOCHS) * ROWS // (8 * first.get("processes", 1))
        kill_at = random.randrange(SAVE_EVERY * self.options.get("accumulate", 1) + 1, steps - 1)
        try:
            self.run(**first, kill_at=kill_at)
            self.run(**second)
            self.check()
        except AssertionError as error:
            raise AssertionError(f"killed in step {kill_at} of {steps}: {error}") from error


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a process, and the processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

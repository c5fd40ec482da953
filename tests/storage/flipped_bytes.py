"""Flip bytes of the shards of a dataset and read them unverified, many times. Run as a script, which must not crash.

Arguments: the folder of a dataset to copy, a folder to work in, a seed, and the number of rounds.
It prints a line of JSON: the number of rounds that succeeded, that raised an error of quire, and another one.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import traceback
from pathlib import Path

import numpy as np

from quire.errors import QuireError, ShardError
from quire.storage import open_dataset
from tests.strategies import Tree


def damage(file: Path, chance: random.Random) -> None:
    """Change a few bytes: single ones, runs, numbers that are too large; the end of the file more often."""
    content = bytearray(file.read_bytes())
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(content))
        if chance.random() < 0.3:
            at = max(0, len(content) - 1 - chance.randrange(min(len(content), 4000)))
        how = chance.randrange(4)
        if how == 0:
            content[at] ^= 1 << chance.randrange(8)
        elif how == 1:
            content[at] = chance.randrange(256)
        else:
            size = 4 if how == 2 else 8
            at -= at % size
            value = chance.choice((0x7FFFFFFF, 0xFFFFFFFF, 0x80000000, 0, 1, chance.randrange(1 << 31)))
            content[at : at + size] = value.to_bytes(size, "little")[: max(0, len(content) - at)]
    file.write_bytes(content)


def main(source: Path, work: Path, seed: int, rounds: int) -> None:
    chance = random.Random(seed)
    counts = {"fine": 0, "typed": 0}
    others: list[str] = []
    for number in range(rounds):
        path = work / "copy"
        shutil.copytree(source, path)
        file = chance.choice(sorted(path.glob("*.arrow")) or sorted(path.glob("*.parquet")))
        damage(file, chance)
        try:
            dataset = open_dataset(path, Tree, cache=work / f"cache-{number}", verify="never")
            rows = np.random.default_rng(number).permutation(len(dataset))
            columns = dataset._row_reader.gather(rows)
            columns.documents()
            counts["fine"] += 1
        except ShardError as error:
            assert file.name in str(error), error
            counts["typed"] += 1
        except QuireError:
            counts["typed"] += 1
        except Exception as error:  # noqa: BLE001 - what must not be
            others.append("".join(traceback.format_exception(error)[-3:]))
        shutil.rmtree(path)
        shutil.rmtree(work / f"cache-{number}", ignore_errors=True)
    print(json.dumps({**counts, "others": others}))  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))

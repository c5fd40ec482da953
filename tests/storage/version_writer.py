"""A process that changes a dataset at random, and reports each change that was acknowledged. Run as a script.

Arguments: the folder, the number of the writer, the number of changes, a seed. Writer w owns the keys 'w-...', so that
its own history says what the dataset has to contain. A line is printed before each change, and one after it.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from quire import BaseDocument
from quire.errors import ConflictError
from quire.storage import open_dataset, write_dataset


class Item(BaseDocument):
    id: str
    value: int


def apply(rows: dict[str, int], change: list[Any]) -> None:
    """Apply a change to a plain dict."""
    kind, argument = change
    if kind in ("append", "upsert"):
        rows.update(argument)
    elif kind == "delete":
        for key in argument:
            rows.pop(key, None)
    elif kind == "update":
        rows.update({key: value for key, value in argument.items() if key in rows})


def choose(chance: random.Random, name: str, rows: dict[str, int], number: int) -> list[Any]:
    """Choose a change of the rows of a writer."""
    kind = chance.choice(["append", "append", "upsert", "upsert", "delete", "update", "compact", "read"])
    own = sorted(rows)
    if kind == "append":
        return [kind, {f"{name}-{number}-{n}": number for n in range(chance.randint(1, 3))}]
    if kind == "upsert":
        return [kind, dict.fromkeys([*chance.sample(own, min(2, len(own))), f"{name}-{number}-u"], number)]
    if kind == "delete":
        return [kind, chance.sample(own, min(2, len(own)))]
    if kind == "update":
        return [kind, dict.fromkeys(chance.sample(own, min(1, len(own))), number)]
    return [kind, []]


def run(folder: str, change: list[Any], chance: random.Random) -> None:
    """Make a change."""
    kind, argument = change
    if kind == "append":
        items = [Item(id=key, value=value) for key, value in argument.items()]
        write_dataset(items, folder, Item, mode="append", format="arrow")
        return
    dataset = open_dataset(folder, Item)
    if kind == "upsert":
        dataset.upsert([Item(id=key, value=value) for key, value in argument.items()])
    elif kind == "delete":
        dataset.delete({"id": {"$in": argument}})
    elif kind == "update" and argument:
        dataset.update({"id": {"$in": [*argument]}}, value=next(iter(argument.values())))
    elif kind == "compact" and chance.random() < 0.3:
        dataset.compact()
    else:
        keys = [item.id for item in dataset]
        assert len(keys) == len(set(keys)), "a key is stored twice"


def main(folder: str, name: str, changes: int, seed: int, known: dict[str, int]) -> None:
    """Make changes, beginning with the rows that the writer has."""
    chance, rows = random.Random(seed), known
    for number in range(changes):
        change = choose(chance, name, rows, seed * 1_000_000 + number)
        print(json.dumps(["begin", change]), flush=True)  # noqa: T201
        try:
            run(folder, change, chance)
        except ConflictError:
            print(json.dumps(["conflict", change]), flush=True)  # noqa: T201
            continue
        apply(rows, change)
        print(json.dumps(["done", change]), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]))

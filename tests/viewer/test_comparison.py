"""Two columns counted together, enums without their class, and pictures of files, over HTTP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.needs("fastapi", "uvicorn", "PIL", "pyarrow", "av")

PROGRAM = """
from enum import Enum
from quire import BaseDocument
from quire.storage import write_dataset

class Animal(Enum):
    cat = 'C'
    dog = 'D'
    bird = 'B'

class Owner(BaseDocument):
    favourite: Animal

class Guess(BaseDocument):
    label: Animal
    prediction: Animal | None = None
    number: int
    owner: Owner
    file: str
    note: str = 'label'

animals = list(Animal)
write_dataset(
    [
        Guess(
            label=animals[i % 3],
            prediction=None if i % 10 == 9 else animals[i % 3 if i % 4 else 0],
            number=i % 50,
            owner=Owner(favourite=animals[i % 2]),
            file=f'pictures/{i % 2}.png',
        )
        for i in range(300)
    ],
    'guesses',
    Guess,
)
"""


@pytest.fixture(scope="module")
def guesses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of another process, whose classes are unknown here."""
    from tests.viewer.viewer_client import png

    folder = tmp_path_factory.mktemp("guesses")
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=folder, check=True, timeout=120)
    dataset = folder / "guesses"
    (dataset / "pictures").mkdir()
    (dataset / "pictures" / "0.png").write_bytes(png((200, 10, 10)))
    (dataset / "pictures" / "1.png").symlink_to(folder / "outside.png")
    (folder / "outside.png").write_bytes(png((1, 2, 3)))
    return dataset


@pytest.fixture(scope="module")
def client(guesses: Path) -> Iterator[Any]:
    from tests.viewer.viewer_client import open_client

    with open_client(guesses, files=True) as http_client:
        yield http_client


def expected_pairs(count: int = 300) -> list[tuple[str, str | None]]:
    names = ["cat", "dog", "bird"]
    return [(names[i % 3], None if i % 10 == 9 else names[i % 3 if i % 4 else 0]) for i in range(count)]


def test_comparison_counts_every_pair_of_values(client: Any) -> None:
    counted = client.get_json("comparison", path="label", other="prediction")
    pairs = expected_pairs()
    assert counted["labels"] == ["bird", "cat", "dog", None]
    counts = {
        (a, b): n
        for a, line in zip(counted["labels"], counted["counts"], strict=True)
        for b, n in zip(counted["labels"], line, strict=True)
    }
    assert counts == {(a, b): pairs.count((a, b)) for a in counted["labels"] for b in counted["labels"]}
    assert (counted["rows"], counted["total"], counted["others"]) == (300, 300, False)
    assert counted["equal"] == sum(a == b for a, b in pairs)


def test_comparison_counts_the_rows_of_a_filter(client: Any) -> None:
    counted = client.get_json("comparison", path="label", other="prediction", where="number < 10 and label = dog")
    pairs = [pair for i, pair in enumerate(expected_pairs()) if i % 50 < 10 and pair[0] == "dog"]
    assert (counted["rows"], counted["equal"]) == (len(pairs), sum(a == b for a, b in pairs))
    assert len(pairs) == client.get_json("rows", where="number < 10 and label = dog")["count"]


def test_values_beyond_the_most_frequent_are_counted_together(client: Any) -> None:
    counted = client.get_json("comparison", path="number", other="number")
    assert (len(counted["labels"]), counted["others"]) == (12, True)
    assert counted["labels"] == sorted(counted["labels"], key=float)
    assert sum(map(sum, counted["counts"])) == counted["equal"] == 300
    assert counted["counts"][-1][-1] == 300 - 12 * 6


def test_comparison_of_values_that_are_not_counted_is_an_error(client: Any) -> None:
    answer = client.get("/api/comparison", path="owner", other="label")
    assert (answer.status, "whose values are not counted" in answer.json["error"]) == (400, True)
    assert client.get("/api/comparison", path="labl", other="label").status == 404
    assert client.get("/api/comparison", path="label").status == 422


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        ("label = cat", 100),
        ("label = C", 100),
        ("label = B", 100),
        ("label in (cat, bird)", 200),
        ("owner.favourite = dog", 150),
        ("label != prediction", sum(a != b for a, b in expected_pairs())),
        (
            "label = prediction and number > 25",
            sum(a == b and i % 50 > 25 for i, (a, b) in enumerate(expected_pairs())),
        ),
        ('note = "label"', 300),
        ("note = label", 0),
    ],
)
def test_filters_take_the_names_of_enums_without_their_class(line: str, rows: int, client: Any) -> None:
    assert client.get_json("rows", where=line)["count"] == rows


def test_names_of_enums_are_shown_without_their_class(client: Any) -> None:
    columns = {node["path"]: node["role"] for node in client.get_json("dataset")["tree"]}
    assert (columns["label"], columns["note"]) == ("name", "text")
    page = client.get_json("rows", count=2)
    place = page["columns"].index("label")
    assert [row["cells"][place] for row in page["rows"]] == [{"t": "name", "v": "cat"}, {"t": "name", "v": "dog"}]
    fields = {item["name"]: item["value"] for item in client.get_json("document", row=1)["document"]["fields"]}
    assert fields["label"] == {"t": "name", "v": "dog"}
    assert fields["owner"]["fields"][-1]["value"] == {"t": "name", "v": "dog"}
    top = client.get_json("statistics", path="label")["label"]["top"]
    assert {value["value"] for value in top} == {"cat", "dog", "bird"}


def test_wrong_name_of_an_enum_is_an_error_with_the_nearest(client: Any) -> None:
    answer = client.get("/api/rows", where="label = dgo")
    assert (answer.status, answer.json["position"]) == (400, 8)
    assert answer.json["error"] == "label has no value 'dgo'. Did you mean 'dog'?"


def test_files_of_the_folder_are_pictures_in_rows_and_documents(client: Any, guesses: Path) -> None:
    page = client.get_json("rows", count=2)
    place = page["columns"].index("file")
    size = (guesses / "pictures" / "0.png").stat().st_size
    picture = {"t": "image", "n": size, "mime": "image/png", "file": "pictures/0.png"}
    # A link that leads out of the folder stays a text.
    assert [row["cells"][place] for row in page["rows"]] == [picture, "pictures/1.png"]
    document = client.get_json("document", row=0)["document"]
    assert {"name": "file", "path": "file", "value": picture} in document["fields"]
    assert client.get("/api/image", row=0, path="file").headers["content-type"] == "image/webp"


def test_files_are_texts_unless_they_are_asked_for(guesses: Path) -> None:
    from tests.viewer.viewer_client import open_client

    with open_client(guesses) as other:
        page = other.get_json("rows", count=1)
        assert page["rows"][0]["cells"][page["columns"].index("file")] == "pictures/0.png"

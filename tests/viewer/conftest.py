from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset in a folder, with a picture inside it and another one outside."""
    from quire.storage import write_dataset
    from tests.viewer.viewer_client import Place, places, png

    folder = tmp_path_factory.mktemp("view")
    dataset = folder / "places" / "data"
    write_dataset(places(), dataset, Place, format="arrow")
    (dataset / "inside").mkdir()
    (dataset / "inside" / "picture.png").write_bytes(png((1, 200, 3)))
    (folder / "secret.png").write_bytes(png((200, 1, 3)))
    (dataset / "inside" / "leads-out.png").symlink_to(folder / "secret.png")
    return dataset


@pytest.fixture(scope="module")
def client(stored: Path) -> Iterator[object]:
    from tests.viewer.viewer_client import open_client

    with open_client(stored) as http_client:
        yield http_client

"""Screenshots of the viewer for the docs: `python -m tests.viewer.screenshots docs/images` renders them.

The data is generated: landscapes of four kinds, with captions, audio and embeddings.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFilter
from playwright.sync_api import Page, sync_playwright

from quire import BaseDocument, DocumentArray
from quire.typing import NdArray
from quire.viewer import Viewer
from tests.programs import find_chromium

LARGEST = 195_000
"""The maximum number of bytes of a screenshot."""
SIZE = {"width": 1280, "height": 760}
PHONE = {"width": 390, "height": 760}
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


class Kind(Enum):
    dune = 1
    sea = 2
    forest = 3
    night = 4


class Author(BaseDocument):
    name: str
    born: int | None = None


class Sound(BaseDocument):
    tensor: NdArray[8000, np.float32]
    rate: int = 8000


class Box(BaseDocument):
    label: str
    corners: NdArray[4, np.float32]


class Scene(BaseDocument):
    picture: bytes
    caption: str
    kind: Kind
    guess: Kind
    score: float | None = None
    likes: int
    published: bool
    depth: NdArray[24, 32, np.float32]
    embedding: NdArray[32, np.float32]
    sound: Sound | None = None
    taken: datetime
    author: Author
    boxes: DocumentArray[Box]
    tags: list[str]


COLOURS = {
    Kind.dune: ((244, 196, 138), (196, 92, 60)),
    Kind.sea: ((150, 205, 230), (20, 70, 120)),
    Kind.forest: ((190, 220, 160), (30, 80, 50)),
    Kind.night: ((70, 60, 120), (12, 12, 34)),
}
FIRST = ["A quiet", "A long", "An early", "A windy", "A golden", "A cold", "A still", "A far"]
WHAT = {
    Kind.dune: ["ridge of sand", "desert morning", "dune at noon"],
    Kind.sea: ["bay before rain", "harbour light", "tide coming in"],
    Kind.forest: ["path through pines", "clearing", "valley of ferns"],
    Kind.night: ["hill under stars", "field by moonlight", "horizon after dusk"],
}
THEN = ["", ", seen from the road", ", with nobody around", " and one small cloud", ", the last of the roll"]
AUTHORS = [("Ines Moreau", 1979), ("Tomas Lindqvist", 1988), ("Aiko Tan", None), ("Jonas Weber", 1991)]
TAGS = ["wide", "calm", "film", "dusk", "blue", "warm"]


def landscape(chance: np.random.Generator, kind: Kind, width: int = 240, height: int = 168) -> bytes:
    """Draw layers of hills, and a sun or a moon."""
    top, bottom = (np.array(colour, float) for colour in COLOURS[kind])
    down = np.linspace(0, 1, height)[:, None, None]
    sky = np.tile(top * (1 - down) * 1.05 + bottom * down * 0.6 + 60 * (1 - down), (1, width, 1))
    for layer in range(4):
        waves = [(chance.uniform(0.02, 0.09), chance.uniform(0.6, 4), chance.random()) for _ in range(4)]
        across = np.linspace(0, 1, width)
        ridge = sum(high * np.sin(2 * np.pi * (across * often + begin)) for high, often, begin in waves)
        shade = (layer + 1) / 4.6
        sky[np.arange(height)[:, None] > (0.42 + 0.14 * layer + ridge) * height] = top * (1 - shade) + bottom * shade
    image = Pillow.fromarray(np.clip(sky, 0, 255).astype(np.uint8))
    x, y, size = chance.integers(30, width - 30), chance.integers(18, 52), chance.integers(9, 17)
    light = (226, 228, 240) if kind is Kind.night else (255, 244, 214)
    ImageDraw.Draw(image).ellipse((x - size, y - size, x + size, y + size), fill=light)
    buffer = io.BytesIO()
    image.filter(ImageFilter.GaussianBlur(0.6)).save(buffer, "JPEG", quality=86)
    return buffer.getvalue()


def scenes(count: int) -> Iterator[Scene]:
    """Generate `count` reproducible scenes."""
    chance = np.random.default_rng(7)
    centres = {kind: chance.normal(size=32) * 1.3 for kind in Kind}
    pictures = {kind: [landscape(chance, kind) for _ in range(16)] for kind in Kind}
    for i in range(count):
        kind = list(Kind)[chance.choice(4, p=[0.34, 0.3, 0.22, 0.14])]
        yield Scene(
            id=f"scene-{i:05d}",
            picture=pictures[kind][chance.integers(16)],
            caption=f"{chance.choice(FIRST)} {chance.choice(WHAT[kind])}{chance.choice(THEN)}",
            kind=kind,
            guess=kind if chance.random() < 0.84 else list(Kind)[chance.integers(4)],
            score=None if chance.random() < 0.06 else float(chance.beta(5, 2)),
            likes=int(chance.lognormal(4, 1.1)),
            published=bool(chance.random() < 0.7),
            depth=relief(chance),
            embedding=(centres[kind] + chance.normal(size=32) * 0.8).astype(np.float32),
            sound=None if chance.random() < 0.25 else Sound(id=f"sound-{i}", tensor=note(chance)),
            taken=datetime.fromisoformat("2024-01-01") + timedelta(minutes=int(chance.integers(0, 1_000_000))),
            **more(chance),
        )


def more(chance: np.random.Generator) -> dict[str, Any]:
    name, born = AUTHORS[chance.integers(len(AUTHORS))]
    labels = ["sun", "hill", "tree"][: chance.integers(0, 4)]
    boxes = [Box(label=label, corners=chance.random(4, np.float32)) for label in labels]
    return {
        "author": Author(id=name.split()[0].lower(), name=name, born=born),
        "boxes": DocumentArray[Box](boxes),
        "tags": chance.choice(TAGS, chance.integers(1, 4), replace=False).tolist(),
    }


def relief(chance: np.random.Generator) -> Any:
    rows, columns = np.mgrid[0:24, 0:32]
    waves = np.sin(columns / chance.uniform(4, 9) + chance.random() * 6) + np.cos(rows / chance.uniform(3, 7))
    return (waves + rows / 8).astype(np.float32)


def note(chance: np.random.Generator) -> Any:
    at = np.arange(8000) / 8000
    pitch = 220 * 2 ** (chance.integers(0, 12) / 12)
    return (np.sin(2 * np.pi * pitch * at) * np.exp(-3 * at) * 0.6).astype(np.float32)


def shoot(page: Page, folder: Path) -> None:
    """Take a screenshot of each state of the page."""

    def shot(name: str) -> None:
        page.wait_for_timeout(700)
        page.screenshot(path=folder / f"view-{name}.png")

    page.wait_for_selector("html[data-ready]")
    page.wait_for_selector(".head[data-path='depth'] + .head")
    page.wait_for_timeout(1500)
    shot("rows")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector("#panel .card")
    page.locator("#panel .near").scroll_into_view_if_needed()
    shot("document")
    page.keyboard.press("Escape")
    page.locator(".head[data-path='score'] .head-chart").click()
    page.wait_for_selector("#panel svg.tall")
    shot("statistics")
    page.keyboard.press("Escape")
    page.locator(".head[data-path='kind'] .head-chart").click()
    page.locator(".compare select").select_option("guess")
    page.wait_for_selector("#panel .matrix")
    shot("comparison")
    page.keyboard.press("Escape")
    page.locator("#grid").press("Home")
    page.keyboard.press("m")
    page.wait_for_selector(".legend-item")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".tip .card")
    shot("map")
    page.keyboard.press("m")
    page.keyboard.press("t")
    page.fill("#where", "kind = night or (likes > 200 and score > 0.8)")
    page.press("#where", "Enter")
    page.locator("#about", has_text=" of 2,400 rows").wait_for()
    page.wait_for_timeout(300)
    page.keyboard.press("Enter")
    page.wait_for_selector("#panel .card")
    shot("dark")


def main(folder: Path) -> None:
    """Take all screenshots."""
    with Viewer(DocumentArray[Scene](scenes(2400)), title="scenes") as viewer, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=ARGUMENTS)
        page = browser.new_page(viewport=SIZE)
        page.goto(viewer.url)
        shoot(page, folder)
        phone = browser.new_page(viewport=PHONE, is_mobile=True, has_touch=True)
        phone.goto(viewer.url)
        phone.wait_for_selector("html[data-ready]")
        phone.wait_for_timeout(1500)
        phone.screenshot(path=folder / "view-phone.png")
        browser.close()
    for file in sorted(folder.glob("view-*.png")):
        image = Pillow.open(file).convert("RGB")
        image.save(file, optimize=True)
        if file.stat().st_size > LARGEST:
            image.quantize(256, method=Pillow.Quantize.MAXCOVERAGE).save(file, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

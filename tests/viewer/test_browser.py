"""The page in Chromium, driven by Playwright; no request may leave the machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.storage import write_dataset
from quire.typing import NdArray
from quire.viewer import Viewer
from tests.programs import find_chromium
from tests.viewer.viewer_client import HOSTILE, png

pytestmark = pytest.mark.needs("fastapi", "uvicorn", "PIL", "pyarrow", "av", "playwright", "program:chromium")

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--autoplay-policy=no-user-gesture-required",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=find_chromium(), args=ARGUMENTS)
        yield started
        started.close()


class Watched:
    """A page, its requests, and its errors."""

    def __init__(self, browser: Browser, viewer: Viewer, **options: Any) -> None:
        self.viewer = viewer
        self.context = browser.new_context(viewport={"width": 1360, "height": 820}, **options)
        self.page: Page = self.context.new_page()
        self.requests: list[str] = []
        self.problems: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self.problems.append(message.text))

    def open(self) -> Page:
        self.page.goto(self.viewer.url)
        self.page.wait_for_selector("html[data-ready]")
        return self.page

    def check(self) -> None:
        own = f"http://127.0.0.1:{self.viewer.port}/"
        assert [url for url in self.requests if not url.startswith(own)] == []
        assert self.problems == []
        self.context.close()


@pytest.fixture(scope="module")
def viewer(stored: Path) -> Iterator[Viewer]:
    with Viewer(stored) as started:
        yield started


@pytest.fixture
def watched(browser: Browser, viewer: Viewer) -> Iterator[Watched]:
    watched_page = Watched(browser, viewer)
    yield watched_page
    watched_page.check()


@pytest.fixture
def page(watched: Watched) -> Page:
    return watched.open()


def until(page: Page, expression: str) -> None:
    """Wait until an expression is true; the page's security policy blocks Playwright's `wait_for_function`."""
    for _ in range(200):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(25)
    raise AssertionError(f"never true: {expression}")


def cell(page: Page, index: int, path: str) -> Any:
    heads = page.locator(".row-head .head[data-path]").evaluate_all("all => all.map((each) => each.dataset.path)")
    return page.locator(f"#cell-{index}-{heads.index(path)}")


def test_page_shows_rows_and_images(page: Page, watched: Watched) -> None:
    assert "token" not in page.url
    expect(page.locator("#title")).to_have_text("data")
    expect(page.locator("#about")).to_contain_text("300 rows")
    expect(cell(page, 0, "caption")).to_contain_text("A hill number 0")
    until(page, "[...document.querySelectorAll('.look-image img')].slice(0, 3).every((each) => each.naturalWidth)")
    assert page.evaluate("document.cookie") == ""
    expect(page.get_by_role("grid")).to_have_attribute("aria-rowcount", "301")
    expect(cell(page, 0, "embedding").locator("svg.spark")).to_be_visible()
    assert any("/api/image" in url for url in watched.requests)


def test_hostile_caption_is_shown_as_text(page: Page) -> None:
    expect(cell(page, 1, "caption")).to_contain_text("<script>")
    page.locator("#grid").press("ArrowDown")
    page.locator("#grid").press("Enter")
    expect(page.locator("#panel .prose", has_text=HOSTILE).first).to_be_visible()
    assert page.locator("#panel script, #grid script, img[src=x]").count() == 0
    assert "taken" not in page.title()


def test_scrolling_keeps_few_elements(page: Page) -> None:
    page.locator("#grid").evaluate("(grid) => { grid.scrollTop = grid.scrollHeight; }")
    expect(page.locator(".row[data-row='299']")).to_be_visible()
    expect(page.locator("#place")).to_contain_text("300 of 300")
    assert page.locator(".grid-layer .row").count() < 40
    page.mouse.move(600, 500)
    page.mouse.wheel(0, -100_000)
    expect(page.locator(".row[data-row='0']")).to_be_visible()


def test_filter_shows_matching_rows(page: Page) -> None:
    page.keyboard.press("/")
    page.keyboard.type("kind = lake and score > 0.5")
    page.keyboard.press("Enter")
    expect(page.locator("#about")).to_contain_text(" of 300 rows")
    expect(cell(page, 0, "kind")).to_have_text("lake")
    page.locator("#clear").click()
    expect(page.locator("#about")).to_contain_text("300 rows")


def test_invalid_filter_is_reported_and_rows_stay(watched: Watched) -> None:
    page = watched.open()
    page.fill("#where", "scroe > 1")
    page.press("#where", "Enter")
    expect(page.locator("#where-note")).to_contain_text("Did you mean 'score'")
    expect(cell(page, 0, "caption")).to_contain_text("A hill")
    page.fill("#where", "visits > 99999")
    page.press("#where", "Enter")
    expect(page.locator("#state")).to_contain_text("No rows match")
    page.get_by_role("button", name="Show all rows").click()
    expect(cell(page, 0, "caption")).to_be_visible()
    watched.problems.clear()  # the browser logs responses with status 400


def test_click_on_a_header_sorts(page: Page) -> None:
    head = page.locator(".head[data-path='visits']")
    for order in ("ascending", "descending"):
        head.locator(".head-name").click()
        expect(head).to_have_attribute("aria-sort", order)
    until(page, "document.querySelectorAll('.grid-layer .row:not([data-empty])').length > 5")
    numbers = [int(cell(page, index, "visits").inner_text().replace(",", "")) for index in range(6)]
    assert numbers == sorted(numbers, reverse=True)
    head.locator(".head-name").click()
    expect(head).to_have_attribute("aria-sort", "none")


def test_audio_and_video_are_played(page: Page) -> None:
    play = cell(page, 0, "sound.tensor").locator("button.play")
    play.click()
    expect(play).to_have_attribute("aria-pressed", "true")
    expect(play).to_have_attribute("aria-pressed", "false")  # half a second later
    film = cell(page, 0, "film").locator("video")
    film.scroll_into_view_if_needed()
    film.click()
    until(page, "document.querySelector('.grid video').currentTime > 0")
    page.locator("#grid").press("Enter")
    expect(page.locator("#panel audio").first).to_be_visible()
    until(page, "document.querySelector('#panel audio').duration > 0.4")
    until(page, "document.querySelector('#panel video').videoWidth === 64")


def test_keyboard_controls_the_page(page: Page) -> None:
    grid = page.locator("#grid")
    expect(grid).to_be_focused()
    for key in ("ArrowDown", "ArrowDown", "j", "k", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    expect(grid).to_have_attribute("aria-activedescendant", "cell-2-2")
    page.keyboard.press("End")
    expect(page.locator(".row.active")).to_have_attribute("data-row", "299")
    page.keyboard.press("PageUp")
    expect(page.locator(".row.active")).not_to_have_attribute("data-row", "299")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    expect(page.locator("#panel h2").first).to_have_text("Row 0")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#panel h2").first).to_have_text("Row 1")
    page.keyboard.press("Escape")
    expect(page.locator("#panel")).to_be_hidden()
    page.keyboard.press("s")
    expect(page.locator(".head[aria-sort='ascending']")).to_have_count(1)
    page.keyboard.press("i")
    expect(page.locator("#panel")).to_be_visible()
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()


def test_document_panel_shows_nested_fields_and_neighbours(page: Page) -> None:
    for _ in range(2):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("#panel details.nest", has_text="Author").first).to_be_visible()
    expect(page.locator("#panel")).to_contain_text("author 1")
    cards = page.locator("#panel .card")
    expect(cards).to_have_count(12)
    expect(cards.first).to_contain_text("town")  # row 2 is a town, and towns form a cluster
    row = cards.first.get_attribute("data-row")
    cards.first.click()
    expect(page.locator("#panel h2").first).to_have_text(f"Row {row}")
    expect(page.locator(".row.active")).to_have_attribute("data-row", str(row))
    page.get_by_label("Metric").select_option("euclidean")
    expect(page.locator("#panel .near")).to_contain_text("distance")


def test_click_on_statistics_filters(page: Page) -> None:
    page.locator(".head[data-path='kind'] .head-chart").click()
    expect(page.locator("#panel")).to_contain_text("Most frequent")
    page.locator("#panel .top-line").nth(1).click()
    expect(page.locator("#about")).to_contain_text("100 of 300 rows")
    page.locator("#tree .leaf", has_text="score").click()
    expect(page.locator("#panel svg.chart.tall g.bar")).to_have_count(20)
    expect(page.locator(".head[data-path='score'] svg.chart")).to_be_visible()


def test_map_points_show_and_open_rows(page: Page) -> None:
    page.keyboard.press("m")
    expect(page.locator("#atlas")).to_contain_text("300 of 300 rows")
    expect(page.locator(".legend-item")).to_have_text(["hill", "lake", "town"])
    canvas = page.locator("#atlas canvas")
    expect(canvas).to_be_focused()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".tip .card")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.locator("#panel h2").first).to_contain_text("Row ")
    painted = canvas.evaluate("(c) => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size")
    assert painted > 10
    page.locator("#show-grid").click()
    expect(page.locator("#grid")).to_be_visible()


def test_theme_switch_is_remembered(browser: Browser, viewer: Viewer) -> None:
    watched = Watched(browser, viewer, color_scheme="dark")
    page = watched.open()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    watched.check()


def test_columns_can_be_hidden_and_opened_by_keyboard(page: Page) -> None:
    page.locator("#tree li[data-path='caption'] .eye").click(force=True)
    expect(page.locator(".head[data-path='caption']")).to_have_count(0)
    page.locator("#tree li").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("#panel h2").first).to_have_text("picture")
    page.locator("#tree li[data-path='author']").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#tree li[data-path='author.name']")).to_be_hidden()


def test_filter_survives_a_reload(page: Page) -> None:
    page.fill("#where", "open")
    page.press("#where", "Enter")
    expect(page.locator("#about")).to_contain_text("150 of 300")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    expect(page.locator("#about")).to_contain_text("150 of 300")


def test_every_control_has_an_accessible_name(page: Page) -> None:
    named = "each.getAttribute('aria-label') || each.textContent.trim() || each.labels?.length"
    controls = "[...document.querySelectorAll('button, input, select, canvas')]"
    nameless = page.evaluate(f"{controls}.filter((each) => !({named})).map((each) => each.outerHTML)")
    assert nameless == []
    assert page.evaluate("[...document.images].filter((image) => !image.hasAttribute('alt')).length") == 0


def test_page_without_token_says_that_it_is_closed(browser: Browser, viewer: Viewer) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"http://127.0.0.1:{viewer.port}/")
    expect(page.locator("h1")).to_have_text("This page is closed")
    context.close()


class Number(BaseDocument):
    number: int


def test_grid_scrolls_millions_of_rows(browser: Browser, tmp_path: Path) -> None:
    """The rows are higher than the tallest possible element, so the scroll bar is scaled."""
    part, rows = DocumentBatch[Number], 2_000_000
    blocks = (
        part.from_columns({"id": [""] * 250_000, "number": np.arange(start, start + 250_000)})
        for start in range(0, rows, 250_000)
    )
    write_dataset(blocks, tmp_path / "many", Number, format="arrow")
    with Viewer(tmp_path / "many") as viewer:
        watched = Watched(browser, viewer)
        page = watched.open()
        page.keyboard.press("End")
        expect(page.locator(".row[data-row='1999999']")).to_be_visible()
        page.keyboard.press("ArrowUp")
        expect(page.locator(".row.active")).to_have_attribute("data-row", "1999998")
        page.mouse.move(600, 500)
        page.mouse.wheel(0, -360)
        expect(page.locator(".row[data-row='1999999']")).to_have_count(0)
        expect(page.locator(".row[data-row='1999980']")).to_be_visible()
        page.locator("#grid").evaluate("(grid) => { grid.scrollTop = (grid.scrollHeight - grid.clientHeight) / 2; }")
        expect(page.locator(".row[data-row='1000000']")).to_be_visible()
        watched.check()


def test_damaged_rows_show_an_error_in_place(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    write_dataset(
        [Number(number=i) for i in range(4000)], folder, Number, format="arrow", shard_bytes=40_000, group_bytes=8192
    )
    [*_, last] = sorted(folder.glob("*.arrow"))
    last.write_bytes(last.read_bytes()[:-100])
    with Viewer(folder) as viewer:
        watched = Watched(browser, viewer)
        page = watched.open()
        page.keyboard.press("End")
        expect(page.locator(".row.failed").first).to_contain_text("the shard was altered or truncated")
        page.keyboard.press("Home")
        expect(page.locator(".row[data-row='0']")).to_be_visible()
        watched.problems.clear()  # the browser logs responses with status 400
        watched.check()


def test_empty_dataset_shows_a_message(browser: Browser) -> None:
    with Viewer(DocumentArray[Number]([])) as viewer:
        watched = Watched(browser, viewer)
        page = watched.open()
        expect(page.locator("#state")).to_contain_text("Nothing here yet")
        watched.check()


class Guess(BaseDocument):
    label: str
    prediction: str
    wide: NdArray[np.uint8, 20, 80, 3]
    file: str


@pytest.fixture(scope="module")
def guesses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guesses") / "data"
    names = ["cat", "dog", "bird"]
    documents = [
        Guess(
            label=names[i % 3],
            prediction=names[i % 3 if i % 4 else 0],
            wide=np.full((20, 80, 3), i % 200, np.uint8),
            file="a.png",
        )
        for i in range(6000)
    ]
    write_dataset(documents, folder, Guess, format="arrow")
    (folder / "a.png").write_bytes(png((10, 200, 30)))
    return folder


def open_page(browser: Browser, viewer: Viewer, **options: Any) -> tuple[Watched, Page]:
    watched_page = Watched(browser, viewer, **options)
    return watched_page, watched_page.open()


def test_two_columns_are_compared_and_a_count_filters_its_rows(browser: Browser, guesses: Path) -> None:
    with Viewer(guesses) as viewer:
        watched_page, page = open_page(browser, viewer)
        page.locator("#grid").press("ArrowRight")
        page.locator("#grid").press("ArrowRight")
        page.locator(".head[data-path='label'] .head-chart").click()
        page.locator(".compare select").select_option("prediction")
        expect(page.locator("#panel h2")).to_have_text("label and prediction")
        expect(page.locator(".matrix tbody th")).to_have_text(["bird", "cat", "dog"])
        expect(page.locator(".matrix td.same")).to_have_text(["1,500", "2,000", "1,500"])
        page.locator(".matrix td.differs button").first.click()
        expect(page.locator("#where")).to_have_value('label = "bird" and prediction = "cat"')
        expect(page.locator("#about")).to_contain_text("500 of 6,000 rows")
        page.fill("#where", "")
        page.press("#where", "Enter")
        page.locator("#panel button", has_text="Show the rows that differ").click()
        expect(page.locator("#where")).to_have_value("label != prediction")
        expect(page.locator("#about")).to_contain_text("1,000 of 6,000 rows")
        watched_page.check()


def test_pictures_are_whole_and_those_of_files_are_shown(browser: Browser, guesses: Path) -> None:
    with Viewer(guesses, files=True) as viewer:
        watched_page, page = open_page(browser, viewer)
        picture = cell(page, 0, "wide").locator("img")
        assert picture.evaluate("(img) => getComputedStyle(img).objectFit") == "contain"
        file = cell(page, 0, "file").locator("img")
        expect(file).to_be_visible()
        until(
            page,
            f"document.getElementById('{cell(page, 0, 'file').get_attribute('id')}').querySelector('img').naturalWidth",
        )
        page.locator("#grid").press("Enter")
        expect(page.locator("#panel figcaption", has_text="a.png")).to_be_visible()
        watched_page.check()


def test_row_height_is_remembered_by_the_next_viewer(browser: Browser, guesses: Path) -> None:
    context = browser.new_context()
    heights = []
    for _ in range(2):  # on two ports
        with Viewer(guesses) as viewer:
            page = context.new_page()
            page.goto(viewer.url)
            page.wait_for_selector("html[data-ready]")
            heights.append(page.locator("#grid").get_attribute("data-height"))
            if len(heights) == 1:
                page.keyboard.press("d")
            chosen = page.locator("#grid").get_attribute("data-height")
            page.close()
    context.close()
    assert heights[0] != heights[1] == chosen


def test_statistics_show_the_first_rows_before_all_are_read(browser: Browser, guesses: Path) -> None:
    with Viewer(guesses) as viewer:
        watched_page, page = open_page(browser, viewer)
        held: list[Any] = []

        def hold(route: Any) -> None:  # Playwright looks at the signature, which methods of a list do not have
            held.append(route)

        page.route("**/api/statistics?path=label", hold)
        page.locator(".head[data-path='label'] .head-chart").click()
        expect(page.locator("#panel .stat")).to_contain_text("5,000")
        expect(page.locator("#panel [role=status]")).to_contain_text("First rows")
        assert len(held) == 1
        held[0].continue_()
        expect(page.locator("#panel .stat")).to_contain_text("6,000")
        expect(page.locator("#panel [role=status]")).to_have_count(0)
        watched_page.check()


def test_page_fits_a_phone(browser: Browser, guesses: Path) -> None:
    with Viewer(guesses, files=True) as viewer:
        context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
        page = context.new_page()
        page.goto(viewer.url)
        page.wait_for_selector("html[data-ready]")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        for name in ("#title", "#where", "#density", "#theme", "#toggle-columns"):
            box = page.locator(name).bounding_box()
            assert box is not None
            assert 0 <= box["x"] < box["x"] + box["width"] <= 390, name
        heads = page.locator(".row-head .head[data-path]").evaluate_all("all => all.map((each) => each.dataset.path)")
        assert heads[0] in ("wide", "file")
        assert "id" not in heads
        page.locator(".row[data-row='1'] .cell").nth(1).tap()
        box = page.locator("#panel").bounding_box()
        assert box is not None
        assert (box["x"], box["y"], box["width"], box["height"]) == (0, 0, 390, 844)
        page.locator("#panel [data-close]").tap()
        expect(page.locator("#panel")).to_be_hidden()
        context.close()

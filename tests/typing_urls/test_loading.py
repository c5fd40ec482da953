"""Loading of URLs and encoded bytes from every kind of location."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.errors import DecodeError, UriError, UriNotFoundError
from quire.files import to_data_uri
from quire.media import encode_mesh, encode_points, to_audio_bytes, to_image_bytes, to_video_bytes
from quire.tensors import get_framework
from quire.typing import (
    AudioBytes,
    AudioUrl,
    ImageBytes,
    ImageUrl,
    Mesh3DBytes,
    Mesh3DUrl,
    PointCloud3DBytes,
    PointCloud3DUrl,
    TextBytes,
    TextUrl,
    VideoBytes,
    VideoUrl,
)
from tests.files.http_server import Site, serve_files
from tests.media.sample_media import FRAMEWORKS, frame_numbers, numbered_frames, tone

pytestmark = pytest.mark.needs("PIL", "av", "trimesh", "fsspec")

PICTURE = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
VERTICES = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 2]], float)
FACES = np.array([[0, 1, 2], [0, 2, 3]])
FILES = {
    "picture.png": to_image_bytes(PICTURE),
    "sound.wav": to_audio_bytes(tone(), 8000),
    "film.mp4": to_video_bytes(numbered_frames(), 10),
    "text.txt": ("Grüße " * 9).encode(),
    "mesh.obj": encode_mesh(VERTICES, FACES, "obj"),
    "cloud.ply": encode_points(VERTICES),
}
CHECKS: dict[str, tuple[Any, Any, Callable[[Any], bool]]] = {
    "picture.png": (ImageUrl, ImageBytes, lambda image: (image == PICTURE).all()),
    "sound.wav": (AudioUrl, AudioBytes, lambda sound: sound.rate == 8000 and (sound.samples == tone()).all()),
    "film.mp4": (VideoUrl, VideoBytes, lambda clip: frame_numbers(clip.frames) == list(range(12))),
    "text.txt": (TextUrl, TextBytes, lambda text: text == "Grüße " * 9),
    "mesh.obj": (Mesh3DUrl, Mesh3DBytes, lambda mesh: np.allclose(mesh.vertices[mesh.faces], VERTICES[FACES])),
    "cloud.ply": (PointCloud3DUrl, PointCloud3DBytes, lambda cloud: np.allclose(cloud.points, VERTICES)),
}


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serve_files(FILES) as server:
        yield server


def _addresses(name: str, folder: Path, site: Site) -> list[str]:
    import fsspec

    path = folder / name
    path.write_bytes(FILES[name])
    with fsspec.open(f"memory://urls/{name}", "wb") as file:
        file.write(FILES[name])
    data = to_data_uri(FILES[name], "application/octet-stream", base64=True)
    return [str(path), path.as_uri(), f"{site.url}/{name}", data, f"memory://urls/{name}"]


@pytest.mark.parametrize("name", FILES)
def test_load_reads_paths_http_data_and_fsspec_urls(name: str, tmp_path: Path, site: Site) -> None:
    url_type, bytes_type, check = CHECKS[name]
    for address in _addresses(name, tmp_path, site):
        url = url_type(address)
        assert check(url.load()), address
        assert url.load_bytes() == FILES[name]
        with pytest.raises(UriError, match="limit is 10 bytes"):
            url.load_bytes(max_bytes=10)
        with pytest.raises(UriError, match="limit is 10 bytes"):
            url.load(max_bytes=10)
    assert check(bytes_type(FILES[name]).load())


@pytest.mark.parametrize("url_type", [check[0] for check in CHECKS.values()])
@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_load_of_missing_file_raises_not_found(url_type: Any, scheme: str, tmp_path: Path, site: Site) -> None:
    with pytest.raises(UriNotFoundError, match="nothing"):
        url_type(f"{scheme}{tmp_path}/nothing.x").load()
    with pytest.raises(UriNotFoundError, match="404"):
        url_type(f"{site.url}/nothing.x").load()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_load_returns_tensors_of_framework(framework: str) -> None:
    handles = get_framework(framework).handles
    assert handles(type(ImageBytes(FILES["picture.png"]).load(framework)))
    assert handles(type(AudioBytes(FILES["sound.wav"]).load(framework).samples))
    clip = VideoBytes(FILES["film.mp4"]).load(framework)
    assert all(handles(type(part)) for part in clip[:3])
    assert handles(type(next(VideoBytes(FILES["film.mp4"]).frames(framework)).pixels))
    assert all(handles(type(part)) for part in Mesh3DBytes(FILES["mesh.obj"]).load(framework))
    assert handles(type(PointCloud3DBytes(FILES["cloud.ply"]).load(framework).points))


def test_load_passes_options_to_decoder(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    image = ImageUrl(tmp_path / "picture.png")
    assert (image.load(channel_axis=0) == PICTURE.transpose(2, 0, 1)).all()
    assert image.load(width=2, height=3).shape == (3, 2, 3)
    with pytest.raises(DecodeError, match=r"picture\.png.*max_pixels"):
        image.load(max_pixels=15)
    assert AudioUrl(tmp_path / "sound.wav").load(rate=4000, mono=True).samples.shape == (1000, 1)
    assert VideoUrl(tmp_path / "film.mp4").load(stride=3, width=10).frames.shape == (4, 32, 10, 3)
    assert PointCloud3DUrl(tmp_path / "mesh.obj").load(samples=7, seed=1).points.shape == (7, 3)
    with pytest.raises(DecodeError, match="not text in ascii"):
        TextUrl(tmp_path / "text.txt").load("ascii")
    assert TextUrl(tmp_path / "text.txt").load("latin-1").startswith("GrÃ¼Ã\x9fe")
    with pytest.raises(TypeError, match="heigth"):
        image.load(heigth=3)  # type: ignore[call-arg]


def test_frames_reads_http_ranges(site: Site) -> None:
    generator = np.random.default_rng(0)
    film = [generator.integers(0, 255, (96, 96, 3), np.uint8) for _ in range(120)]
    content = to_video_bytes(film, 10, "mkv", codec="libx264rgb", codec_options={"crf": "0", "g": "10"})
    assert len(content) > 3_000_000
    site.files["/data/large.mkv"] = content
    url = VideoUrl(f"{site.url}/large.mkv")
    for ranges in (True, False):
        site.ranges = ranges
        pixels = [frame.pixels for frame in url.frames(start=10.0)]
        assert (np.stack(pixels) == np.stack(film[100:])).all()
    site.ranges, site.seen = True, []
    next(url.frames(start=10.0))
    starts = [int((asked or "bytes=0-")[6:].partition("-")[0]) for _, _, asked in site.seen]
    assert max(starts) > len(content) / 2  # the file was not read from the start


def test_frames_resumes_interrupted_download(site: Site) -> None:
    url = VideoUrl(f"{site.url}/film.mp4")
    site.cuts = 2
    assert frame_numbers(frame.pixels for frame in url.frames()) == list(range(12))
    site.cuts = 20
    with pytest.raises(UriError, match="broke off"):
        list(url.frames(retries=0))
    site.cuts, site.failures = 0, 2
    assert frame_numbers(frame.pixels for frame in url.frames()) == list(range(12))


def test_frames_reads_whole_file_without_range_support(site: Site) -> None:
    url = VideoUrl(f"{site.url}/film.mp4")
    site.ranges = False
    for site.lengths in (True, False):
        site.cuts = 1 if site.lengths else 0  # without a length, truncation goes unnoticed
        assert frame_numbers(frame.pixels for frame in url.frames()) == list(range(12))
        with pytest.raises(UriError, match="limit is 100 bytes"):
            next(url.frames(max_bytes=100))


def test_urls_behave_like_strings() -> None:
    url = ImageUrl("https://example.com/a.png")
    assert url == "https://example.com/a.png"
    assert url.endswith(".png")
    assert hash(url) == hash(str(url))
    assert repr(url) == "'https://example.com/a.png'"
    assert isinstance(url, str)
    assert {url: 1}["https://example.com/a.png"] == 1
    assert io.BytesIO(ImageBytes(b"abc")).read() == b"abc"

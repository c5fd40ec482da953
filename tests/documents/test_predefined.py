"""Text, Image, Audio, Video, Mesh3D and PointCloud3D: on their own, as fields and as base classes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

import quire
from quire import Audio, BaseDocument, DocumentArray, Image, Mesh3D, PointCloud3D, Text, Video
from quire.typing import (
    AudioBytes,
    AudioUrl,
    ImageBytes,
    ImageUrl,
    Mesh3DBytes,
    Mesh3DUrl,
    NdArray,
    PointCloud3DBytes,
    PointCloud3DUrl,
    TextBytes,
    TextUrl,
    VideoBytes,
    VideoUrl,
    uint8,
)

TENSOR = np.zeros((4, 3))
KINDS: dict[str, tuple[Any, type, type, str | None]] = {
    # the class, the types of its URL and bytes, and the field that a bare tensor is stored in
    "Image": (Image, ImageUrl, ImageBytes, "tensor"),
    "Audio": (Audio, AudioUrl, AudioBytes, "tensor"),
    "Video": (Video, VideoUrl, VideoBytes, "tensor"),
    "Mesh3D": (Mesh3D, Mesh3DUrl, Mesh3DBytes, None),
    "PointCloud3D": (PointCloud3D, PointCloud3DUrl, PointCloud3DBytes, "points"),
}


@pytest.mark.parametrize("name", [*KINDS, "Text"])
def test_predefined_document_is_exported_and_starts_empty(name: str) -> None:
    document = getattr(quire, name)()
    assert {value for key, value in document if key != "id"} == {None}
    assert {"url", "embedding", "bytes_"} <= set(type(document).model_fields)


@pytest.mark.parametrize(("tp", "url_type", "bytes_type", "tensor"), KINDS.values(), ids=KINDS)
def test_field_wraps_bare_value_in_document(tp: Any, url_type: type, bytes_type: type, tensor: str | None) -> None:
    class Page(BaseDocument):
        part: tp

    part = Page(part="a.bin").part
    assert type(part) is tp
    assert type(part.url) is url_type
    assert Page(part=url_type("a.bin")).part.url == "a.bin"
    assert type(Page(part=b"x").part.bytes_) is bytes_type
    if tensor is None:
        with pytest.raises(ValidationError):
            Page(part=TENSOR)
    else:
        assert getattr(Page(part=TENSOR).part, tensor) is TENSOR
    page = Page(part="a.bin")
    page.part = b"y"
    assert page.part.bytes_ == b"y"


def test_text_field_accepts_string() -> None:
    class Page(BaseDocument):
        title: Text

    page = Page(title="a")
    assert page.title.text == "a"
    assert type(Page(title=b"a").title.bytes_) is TextBytes
    assert type(Text(url="a.txt").url) is TextUrl


@pytest.mark.parametrize("tp", [Image, Audio, Video, Mesh3D, PointCloud3D, Text])
def test_predefined_documents_survive_roundtrips(tp: Any) -> None:
    rows = DocumentArray[tp]([tp(url="ä", bytes_=b"\xff", embedding=np.arange(3.0)), tp(url="b", embedding=np.ones(3))])
    for restored in (
        DocumentArray[tp].from_bytes(rows.to_bytes()),
        DocumentArray[tp].from_json(rows.to_json()),
        pickle.loads(pickle.dumps(rows)),
        rows.stack().unstack(),
    ):
        assert restored == rows
        assert [type(row.url) for row in restored] == [type(row.url) for row in rows]
        assert type(restored[0].bytes_) is type(rows[0].bytes_)


def test_predefined_documents_can_be_subclassed() -> None:
    class Photo(Image):
        tensor: NdArray[uint8, "h", "w", 3] | None = None
        likes: int = 0

    class Album(BaseDocument):
        cover: Photo

    assert type(Album(cover="a.png").cover) is Photo
    photo = Photo(tensor=np.zeros((2, 3, 3), np.uint8), likes=3)
    assert Photo.from_bytes(photo.to_bytes()) == photo
    with pytest.raises(ValidationError, match="tensor"):
        Photo(tensor=np.zeros((2, 3)))


def test_video_audio_accepts_url() -> None:
    video = Video(url="a.mp4", audio="a.wav", times=[0.0, 0.1])
    assert isinstance(video.audio, Audio)
    assert type(video.audio.url) is AudioUrl
    assert Video.from_bytes(video.to_bytes()) == video


@pytest.mark.needs("PIL", "av", "trimesh")
def test_loading_urls_fills_predefined_documents(tmp_path: Path) -> None:
    from quire.media import save_audio, save_image, save_mesh, save_video
    from tests.media.sample_media import numbered_frames, tone

    save_image(numbered_frames()[0], tmp_path / "a.png")
    save_audio(tone(), tmp_path / "a.wav", 8000)
    save_video(numbered_frames(), tmp_path / "a.mp4", 10)
    save_mesh(np.eye(3), np.array([[0, 1, 2]]), tmp_path / "a.ply")
    image = Image(url=tmp_path / "a.png")
    image.tensor = image.url.load()
    audio = Audio(url=tmp_path / "a.wav")
    audio.tensor, audio.rate = audio.url.load()
    video = Video(url=tmp_path / "a.mp4")
    video.tensor, video.times, video.key_frames, _ = video.url.load()
    mesh = Mesh3D(url=tmp_path / "a.ply")
    mesh.vertices, mesh.faces = mesh.url.load()
    cloud = PointCloud3D(url=tmp_path / "a.ply")
    cloud.points, cloud.colors = cloud.url.load(samples=5)
    assert (image.tensor.shape, audio.rate, audio.tensor.shape) == ((32, 48, 3), 8000, (2000, 2))
    assert (video.tensor.shape, video.times.shape) == ((12, 32, 48, 3), (12,))
    assert (mesh.vertices.shape, mesh.faces.shape, cloud.points.shape) == ((3, 3), (1, 3), (5, 3))

"""`decode_video` in datasets: which frames, their size and layout, and errors of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import BaseDocument
from quire.data import DecodeWarning, MultiModalDataset, decode_image, decode_video
from quire.errors import DecodeError, OptionError
from quire.media import to_video_bytes
from quire.typing import VideoBytes
from tests.data.sample_pictures import encode, pixels
from tests.media.sample_media import frame_numbers, numbered_frames

pytestmark = pytest.mark.needs("av")


class Film(BaseDocument):
    number: int
    video: VideoBytes


def film(number: int = 0, count: int = 12, video_format: str = "mp4", **options: Any) -> Film:
    return Film(number=number, video=to_video_bytes(numbered_frames(count), 10, video_format, **options))


def dataset_of(documents: Any, step: Any, **options: Any) -> MultiModalDataset[Any]:
    return MultiModalDataset[Film](documents, {"video": step}, framework="numpy", **options)


def numbers(row: Any) -> list[int]:
    return frame_numbers(row)


@pytest.mark.parametrize("video_format", ["mp4", "mkv", "webm", "avi"])
def test_frames_are_spread_evenly(video_format: str) -> None:
    [row] = decode_video(4, (16, 24))([film(video_format=video_format).video], "numpy")
    assert row.shape == (4, 3, 16, 24)
    assert numbers(row) == [1, 4, 7, 10]
    [more] = decode_video(24, 16)([film(video_format=video_format).video], "numpy")
    assert numbers(more) == sorted([*range(12), *range(12)])


@given(count=st.integers(1, 16), frames=st.integers(1, 9), keys=st.integers(1, 6), rate=st.sampled_from([None, 5, 10]))
@settings(max_examples=25, deadline=None)
def test_chosen_frames_equal_those_of_a_whole_decode(count: int, frames: int, keys: int, rate: float | None) -> None:
    """Whatever the distance of the key frames, over which decoding skips, the right frames come out."""
    options = {"codec": "libx264", "codec_options": {"g": str(keys), "bf": "2"}}
    [row] = decode_video(frames, 16, rate=rate)([film(count=count, **options).video], "numpy")
    if rate is None:
        expected = [int((i + 0.5) * count / frames) for i in range(frames)]
    else:
        times = [round(i * 10 / rate) for i in range(frames)]
        expected = [time for time in times if time < count]
    assert numbers(row[: len(expected)]) == expected
    assert not row[len(expected) :].any()


def test_rates_begin_where_clip_says() -> None:
    content = film(count=12).video
    for clip, expected in (("start", [0, 2, 4]), ("center", [3, 5, 7])):
        [row] = decode_video(3, 16, rate=5, clip=clip)([content], "numpy")
        assert numbers(row) == expected
    dataset = dataset_of([film(n) for n in range(8)], decode_video(2, 16, rate=10, clip="random"), seed=1)
    starts = {numbers(row)[0] for row in dataset.__getitems__(range(8)).video}
    assert len(starts) > 2
    assert {numbers(row)[0] for row in dataset.preprocess([film()]).video} == {5}


def test_key_frames_are_decoded_alone() -> None:
    content = film(count=12, codec="libx264", codec_options={"g": "3", "sc_threshold": "0"}).video
    [row] = decode_video(4, 16, key_frames=True)([content], "numpy")
    assert numbers(row) == [0, 3, 6, 9]
    [two] = decode_video(2, 16, key_frames=True)([content], "numpy")
    assert numbers(two) == [3, 9]
    batch = dataset_of([Film(number=0, video=content)], decode_video(6, 16, key_frames=True)).__getitems__([0])
    assert batch.mask("video")[0].any(axis=(1, 2, 3)).tolist() == [True] * 4 + [False] * 2


def test_layouts_and_dtypes_agree() -> None:
    content = film().video
    [tchw] = decode_video(3, (16, 20))([content], "numpy")
    [thwc] = decode_video(3, (16, 20), layout="THWC")([content], "numpy")
    [cthw] = decode_video(3, (16, 20), layout="CTHW")([content], "numpy")
    assert np.array_equal(tchw, thwc.transpose(0, 3, 1, 2))
    assert np.array_equal(tchw, cthw.transpose(1, 0, 2, 3))
    [normal] = decode_video(3, (16, 20), normalize=((0.5,), (0.25,)))([content], "numpy")
    assert np.allclose(normal, (tchw / 255 - 0.5) / 0.25, atol=1e-5)
    [grey] = decode_video(3, (16, 20), color="L")([content], "numpy")
    assert grey.shape == (3, 1, 16, 20)


@pytest.mark.needs("PIL")
@pytest.mark.parametrize("resize", ["box", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize(("size", "crop"), [((32, 48), None), (24, "center")])
def test_resized_frames_are_close_to_those_of_images(resize: Any, size: Any, crop: Any) -> None:
    """The difference that the page states, for frames with saturated colours."""
    content = to_video_bytes(np.stack([pixels(96, 64, seed) for seed in range(4)]), 10)
    [whole] = decode_video(4, (64, 96), layout="THWC")([content], "numpy")
    [rows] = decode_video(4, size, crop=crop, resize=resize)([content], "numpy")
    expected = decode_image(size, crop=crop, resize=resize)([encode(frame, "PNG") for frame in whole], "numpy")
    difference = rows.astype(int) - expected
    assert 10 * np.log10(255**2 / np.mean(difference**2)) > 28
    assert np.abs(difference).max() <= 60


def test_crops_and_flips_are_the_same_for_all_frames() -> None:
    frames = np.zeros((6, 32, 64, 3), np.uint8)
    frames[:, :, 32:] = 250
    content = to_video_bytes(frames, 10, "mp4")
    [left_right] = decode_video(4, 16)([content], "numpy")
    assert left_right[..., 0].max() < 20
    assert left_right[..., -1].min() > 230
    dataset = dataset_of([Film(number=0, video=content)], decode_video(4, 16, flip=1.0))
    [flipped] = dataset.__getitems__([0]).video
    assert np.array_equal(flipped, left_right[..., ::-1])
    cropped = dataset_of([Film(number=0, video=content)] * 4, decode_video(4, 16, crop="random"))
    rows = cropped.__getitems__(range(4)).video
    assert all(np.abs(row - row[:1].astype(int)).max() <= 8 for row in rows)
    assert len({row.tobytes() for row in rows}) > 1


def test_damaged_videos_are_errors_of_their_rows() -> None:
    documents = [film(0), Film(id="bad", number=1, video=b"no video"), film(2)]
    with pytest.raises(DecodeError, match=r"^Film.video: document 1 \(id bad\): "):
        dataset_of(documents, decode_video(2, 16)).__getitems__(range(3))
    with pytest.warns(DecodeWarning):
        batch = dataset_of(documents, decode_video(2, 16, on_error="replace")).__getitems__(range(3))
    assert batch.number.tolist() == [0, 2, 2]
    for options in ({"max_pixels": 100}, {"max_frames": 5}):
        with pytest.raises(DecodeError, match=next(iter(options))):
            decode_video(2, 16, **options)([film().video])


@pytest.mark.parametrize(
    "options",
    [
        {"frames": 0},
        {"rate": 0},
        {"rate": 5, "key_frames": True},
        {"layout": "HWC"},
        {"clip": "x"},
        {"resize": "hamming"},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="decode_video"):
        decode_video(**{"frames": 2, "size": 16, **options})

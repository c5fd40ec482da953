"""`decode_image` in datasets: the pixels of a batch, augmentations, errors of rows, and the evaluation form."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray
from quire.data import DecodeWarning, MultiModalDataset, decode_image
from quire.errors import DecodeError, MissingValueError, OptionError, SchemaError
from quire.typing import ImageBytes, ImageUrl
from tests.data.sample_pictures import Example, MaybePhoto, Photo, encode, photos, picture, pixels

pytestmark = pytest.mark.needs("PIL")
AUGMENT = decode_image((24, 32), crop="random", flip=True)


def dataset_of(documents: Any, step: Any, **options: Any) -> MultiModalDataset[Any]:
    kind = type(documents[0])
    return MultiModalDataset[kind](documents, {"image": step}, framework="numpy", **options)  # type: ignore[valid-type]


def reference(content: bytes, size: tuple[int, int], crop: bool) -> Any:
    """Decode with Pillow, step by step: rotate, crop, resize."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
    height, width = size
    if crop:
        share = min(image.width / width, image.height / height)
        across, down = round(width * share), round(height * share)
        left, top = (image.width - across) // 2, (image.height - down) // 2
        image = image.crop((left, top, left + across, top + down))
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))


def psnr(first: Any, second: Any) -> float:
    error = np.mean((first.astype(np.float64) - second) ** 2)
    return float(np.inf if error == 0 else 10 * np.log10(255**2 / error))


# --- pixels


@pytest.mark.parametrize("crop", [None, "center"])
@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "BMP", "TIFF"])
def test_exact_decoding_equals_pillow(crop: Any, image_format: str) -> None:
    contents = [encode(pixels(90, 60, seed), image_format) for seed in range(3)]
    batch = decode_image((24, 32), crop=crop, layout="HWC", exact=True)(contents, "numpy")
    for row, content in zip(batch, contents, strict=True):
        assert np.array_equal(row, reference(content, (24, 32), crop is not None))


def test_layouts_dtypes_and_normalization_agree() -> None:
    content = picture(1)
    [hwc] = decode_image(20, layout="HWC", exact=True)([content], "numpy")
    [chw] = decode_image(20, exact=True)([content], "numpy")
    assert np.array_equal(chw, hwc.transpose(2, 0, 1))
    [floats] = decode_image(20, dtype="float32", exact=True)([content], "numpy")
    assert np.allclose(floats, chw / 255, atol=1e-6)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    for layout, plain in (("CHW", chw.transpose(1, 2, 0)), ("HWC", hwc)):
        [normal] = decode_image(20, normalize=(mean, std), exact=True, layout=layout)([content], "numpy")
        expected = (plain / 255 - mean) / std
        assert np.allclose(normal, expected.transpose(2, 0, 1) if layout == "CHW" else expected, atol=1e-5)
    [half] = decode_image(20, dtype="float16", exact=True)([content], "numpy")
    assert half.dtype == np.float16
    assert np.allclose(half, chw / 255, atol=1e-3)


@pytest.mark.parametrize(("color", "channels"), [("L", 1), ("RGB", 3), ("RGBA", 4)])
def test_colors_give_channels(color: Any, channels: int) -> None:
    from PIL import Image

    contents = [picture(0), encode(pixels(40, 30), "PNG"), encode(Image.fromarray(pixels(40, 30)).convert("L"))]
    batch = decode_image(16, color=color)(contents, "numpy")
    assert batch.shape == (3, channels, 16, 16)
    if color == "RGBA":
        assert (batch[:, 3] == 255).all()


@pytest.mark.needs("simplejpeg")
@pytest.mark.parametrize(("width", "height", "least", "most"), [(320, 256, 45, 6), (1024, 768, 38, 24)])
def test_simplejpeg_is_close_to_the_reference(width: int, height: int, least: float, most: int) -> None:
    """The differences that the page states: full decoding for 320 x 256, a reduced scale for 1024 x 768."""
    contents = [encode(pixels(width, height, seed), quality=90) for seed in range(4)]
    fast = decode_image(224, crop="center")(contents, "numpy")
    exact = decode_image(224, crop="center", exact=True)(contents, "numpy")
    assert psnr(fast, exact) > least
    assert int(np.abs(fast.astype(int) - exact).max()) <= most


@pytest.mark.parametrize(("width", "height", "least", "most"), [(320, 256, 99, 0), (1024, 768, 45, 6)])
def test_pillow_at_a_reduced_scale_is_close_to_the_reference(
    width: int, height: int, least: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without simplejpeg, Pillow decodes at a reduced scale, too."""
    monkeypatch.setattr("quire.media._image_rows.is_available", lambda module: module != "simplejpeg")
    contents = [encode(pixels(width, height, seed), quality=90) for seed in range(4)]
    fast = decode_image(224, crop="center")(contents, "numpy")
    exact = decode_image(224, crop="center", exact=True)(contents, "numpy")
    assert psnr(fast, exact) > least
    assert int(np.abs(fast.astype(int) - exact).max()) <= most


@pytest.mark.needs("simplejpeg")
def test_decoders_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """JPEG is decoded by simplejpeg, all else by Pillow, and everything by Pillow with `exact`."""
    from quire.media import _image_rows

    used: list[str] = []
    decoders = [
        decoder._replace(decode=lambda *rest, d=decoder: (used.append(d.module), d.decode(*rest))[1])
        for decoder in _image_rows.IMAGE_DECODERS
    ]
    monkeypatch.setattr(_image_rows, "IMAGE_DECODERS", tuple(decoders))
    contents = [encode(pixels(40, 30), name) for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")]
    for exact, expected in ((False, ["simplejpeg", *["PIL"] * 5]), (True, ["PIL"] * 6)):
        used.clear()
        decode_image(8, exact=exact, threads=1)(contents, "numpy")
        assert used == expected


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("crop", [None, "center"])
@pytest.mark.parametrize("exact", [False, True])
def test_exif_orientation_is_applied(orientation: int, crop: Any, exact: bool) -> None:
    from PIL import Image

    image = Image.fromarray(pixels(96, 64, 3))
    exif = image.getexif()
    exif[0x0112] = orientation
    content = encode(image, quality=95, exif=exif)
    [row] = decode_image((24, 40), crop=crop, layout="HWC", exact=exact)([content], "numpy")
    expected = reference(content, (24, 40), crop is not None)
    assert psnr(row, expected) > 40
    png = encode(image, "PNG", exif=exif)
    [row] = decode_image((24, 40), crop=crop, layout="HWC")([png], "numpy")
    # Pillow resizes first across and then down, so that rotating before or after differs by rounding.
    assert int(np.abs(row.astype(int) - reference(png, (24, 40), crop is not None)).max()) <= (orientation > 4)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_random_crops_are_parts_of_the_image(data: Any) -> None:
    """With nearest-neighbour resizing, every pixel of a crop is a pixel of the image, in the right order."""
    width, height = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60))
    coordinates = np.zeros((height, width, 3), np.uint8)
    coordinates[..., 0], coordinates[..., 1] = np.arange(width), np.arange(height)[:, None]
    flip = data.draw(st.sampled_from([0.0, 1.0]))
    step = decode_image((8, 9), crop="random", flip=flip, resize="nearest", layout="HWC")
    dataset = dataset_of([Photo(number=0, image=encode(coordinates, "PNG"))], step, seed=data.draw(st.integers(0, 99)))
    [row] = dataset.__getitems__([0]).image
    across, down = row[0, :, 0].astype(int), row[:, 0, 1].astype(int)
    assert (row[..., 0] == across).all()
    assert (row[..., 1] == down[:, None]).all()
    assert (np.diff(across) * (-1 if flip else 1) >= 0).all()
    assert (np.diff(down) >= 0).all()


# --- sources of the bytes


class Link(BaseDocument):
    image: ImageUrl


class Stored(BaseDocument):
    bytes: ImageBytes | None = None
    path: str | None = None


class Nested(BaseDocument):
    image: Stored | None = None


class Loose(BaseDocument):
    image: dict[str, Any]


class Album(BaseDocument):
    photos: DocumentArray[Photo]


def test_bytes_urls_and_pairs_of_bytes_and_path_decode_alike(tmp_path: Path) -> None:
    content, file = picture(2), tmp_path / "a.jpg"
    file.write_bytes(content)
    step = decode_image(16)
    expected = step([content], "numpy")[0]
    rows = [
        dataset_of([Link(image=str(file))], step),
        dataset_of([Nested(image=Stored(bytes=content, path="gone.jpg"))], step),
        dataset_of([Nested(image=Stored(path=str(file)))], step),
        dataset_of([Loose(image={"bytes": content, "path": None})], step),
        dataset_of([Loose(image={"bytes": None, "path": str(file)})], step),
    ]
    for dataset in rows:
        assert np.array_equal(dataset.__getitems__([0]).image[0], expected)
    album = Album(photos=photos(3))
    inside = MultiModalDataset[Album]([album], {"photos.image": step}, framework="numpy").__getitems__([0])
    assert np.array_equal(inside.photos.flat.image, step([photo.image for photo in album.photos], "numpy"))


def test_missing_url_is_an_error_of_its_row(tmp_path: Path) -> None:
    dataset = dataset_of([Link(id="a", image=str(tmp_path / "gone.jpg"))], decode_image(16))
    with pytest.raises(DecodeError, match=r"Link.image: document 0 \(id a\): .*gone.jpg"):
        dataset[0]


def test_fields_without_media_are_refused() -> None:
    with pytest.raises(SchemaError, match=r"Photo.number: decode_image decodes bytes.*field is int"):
        MultiModalDataset[Photo](photos(1), {"number": decode_image(8)})
    with pytest.raises(SchemaError, match="neither field"):
        MultiModalDataset[Photo](photos(1), {"": decode_image(8)})
    with pytest.raises(OptionError, match="not Optional"):
        MultiModalDataset[Photo](photos(1), {"image": decode_image(8, on_error="null")})


@pytest.mark.parametrize(
    "options",
    [
        {"crop": "middle"},
        {"resize": "best"},
        {"layout": "WHC"},
        {"dtype": "int32"},
        {"color": "BGR"},
        {"on_error": "ignore"},
        {"threads": 0},
        {"flip": 2.0},
        {"crop_scale": (0.5, 1.5)},
        {"crop_ratio": (0, 1)},
        {"normalize": ((0.5, 0.5), (1, 1))},
        {"normalize": ((0.5,), (0,))},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="decode_image"):
        decode_image(8, **options)
    with pytest.raises(OptionError, match="size"):
        decode_image((0, 8))


# --- damaged and unusual files

WEIRD: dict[str, Any] = {
    "truncated": lambda: picture(0)[:900],
    "truncated png": lambda: encode(pixels(40, 30), "PNG")[:200],
    "text": lambda: b"this is no image at all, but a text of some length",
    "empty": lambda: b"",
    "wav": lambda: b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(40),
    "html in a jpeg": lambda: b"\xff\xd8\xff<html>" + bytes(100),
    "zero size": lambda: bytes(_bmp_without_width()),
}


def _bmp_without_width() -> bytearray:
    content = bytearray(encode(pixels(40, 30), "BMP"))
    content[18:22] = bytes(4)  # the width
    return content


@pytest.mark.parametrize("kind", WEIRD)
def test_damaged_files_raise_with_row_and_field(kind: str) -> None:
    documents = [*photos(3), Photo(id="bad", number=3, image=WEIRD[kind]())]
    dataset = dataset_of(documents, decode_image(16))
    with pytest.raises(DecodeError, match=r"^Photo.image: document 3 \(id bad\): "):
        dataset.__getitems__(range(4))


ERRORS: dict[str, Any] = {
    **WEIRD,
    "bomb": lambda: encode(np.zeros((300, 400, 3), np.uint8), "PNG"),
    "32-bit": lambda: encode(_image(np.zeros((4, 4), np.float32)), "TIFF"),
}


def _image(array: Any) -> Any:
    from PIL import Image

    return Image.fromarray(array)


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize(
    ("on_error", "numbers"), [("skip", [0, 2]), ("replace", [0, 2, 2]), ("null", [0, 1, 2]), ("raise", [])]
)
def test_on_error_applies_to_every_kind_of_damage(kind: str, on_error: Any, numbers: list[int]) -> None:
    documents = [MaybePhoto(id=f"m{n}", number=n, image=ERRORS[kind]() if n == 1 else picture(n)) for n in range(3)]
    step = decode_image(16, on_error=on_error, max_pixels=100_000)
    dataset = dataset_of(documents, step, missing="mask")
    message = r"^MaybePhoto.image: document 1 \(id m1\): "
    if on_error == "raise":
        with pytest.raises(DecodeError, match=message):
            dataset.__getitems__(range(3))
        return
    with pytest.warns(DecodeWarning, match=message):
        batch = dataset.__getitems__(range(3))
    assert batch.number.tolist() == numbers
    good = decode_image(16)([documents[0].image, documents[2].image], "numpy")
    rows = {"skip": good, "replace": good[[0, 1, 1]], "null": np.stack([good[0], 0 * good[0], good[1]])}
    assert np.array_equal(batch.image, rows[on_error])
    if on_error == "null":
        assert batch.validity("image").tolist() == [True, False, True]


@pytest.mark.parametrize("on_error", ["raise", "skip", "replace", "null"])
def test_on_error_does_not_apply_to_unusual_files(on_error: Any) -> None:
    plain = _image(pixels(40, 30))
    exif = plain.getexif()
    exif[0x0112] = 6
    contents = [
        encode(plain.convert("CMYK"), "JPEG"),
        encode(_image(np.zeros((30, 40), np.uint16)), "PNG"),
        encode(plain, "JPEG", exif=exif),
        encode(plain, "GIF", save_all=True, append_images=[plain.rotate(90)]),
        encode(plain.convert("P"), "PNG"),
    ]
    documents = [MaybePhoto(number=n, image=content) for n, content in enumerate(contents)]
    batch = dataset_of(documents, decode_image(16, on_error=on_error)).__getitems__(range(5))  # warnings are errors
    assert batch.number.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("image_format", ["JPEG", "PNG"])
def test_bombs_are_refused_before_they_are_decoded(image_format: str) -> None:
    content = encode(np.zeros((300, 400, 3), np.uint8), image_format)
    with pytest.raises(DecodeError, match=r"400 x 300 pixels.*max_pixels=100,000"):
        decode_image(16, max_pixels=100_000)([content])
    assert decode_image(16, max_pixels=120_000)([content], "numpy").shape == (1, 3, 16, 16)


def test_unusual_files_have_stated_results() -> None:
    from PIL import Image

    plain = Image.fromarray(pixels(40, 30))
    cmyk = encode(plain.convert("CMYK"), "JPEG", quality=95)
    deep = Image.fromarray(np.arange(30 * 40, dtype=np.uint16).reshape(30, 40) * 54)
    animated = encode(plain, "GIF", save_all=True, append_images=[Image.new("RGB", (40, 30), "red")])
    step = decode_image((30, 40), layout="HWC")
    assert psnr(step([cmyk], "numpy")[0], pixels(40, 30)) > 25
    expected = np.repeat((np.asarray(deep) >> 8).astype(np.uint8)[..., None], 3, 2)
    assert np.array_equal(step([encode(deep, "PNG")], "numpy")[0], expected)
    assert psnr(step([animated], "numpy")[0], pixels(40, 30)) > 15  # the first frame, not the red one
    with pytest.raises(DecodeError, match="32-bit"):
        step([encode(Image.new("F", (4, 4)), "TIFF")])


def test_harmless_damage_is_accepted_as_by_pillow() -> None:
    """simplejpeg raises for a stray byte; every decoder then gives the pixels of the reference."""
    content = picture(0)
    stray = content[:-2] + b"\x00\x12" + content[-2:]
    image = decode_image(16)
    assert psnr(image([stray + b"trailing"], "numpy"), image([content], "numpy")) > 45


def mixed_documents() -> list[MaybePhoto]:
    contents = [picture(0), b"bad", picture(2), None, picture(4), b"worse"]
    return [MaybePhoto(id=f"m{n}", number=n, image=content) for n, content in enumerate(contents)]


def test_on_error_skip_leaves_out_rows() -> None:
    documents = [document for document in mixed_documents() if document.image is not None]
    dataset = dataset_of(documents, decode_image(16, on_error="skip"))
    with pytest.warns(DecodeWarning, match=r"MaybePhoto.image: document \d .id m\d.: .*not an image"):
        batch = dataset.__getitems__(range(5))
    assert batch.number.tolist() == [0, 2, 4]
    assert np.array_equal(batch.image, decode_image(16)([documents[i].image for i in (0, 2, 3)], "numpy"))
    with pytest.warns(DecodeWarning), pytest.raises(DecodeError, match="document 1 is skipped"):
        dataset[1]


def test_on_error_replace_takes_the_next_good_row() -> None:
    documents = [document for document in mixed_documents() if document.image is not None]
    dataset = dataset_of(documents, decode_image(16, on_error="replace"))
    with pytest.warns(DecodeWarning):
        batch = dataset.__getitems__(range(5))
    assert batch.number.tolist() == [0, 2, 2, 4, 0]
    assert np.array_equal(batch.image[1], batch.image[2])
    with pytest.raises(DecodeError, match="no row of the batch.*document 1"):
        dataset.__getitems__([1])


def test_on_error_null_follows_missing() -> None:
    step = decode_image(16, on_error="null")
    with pytest.warns(DecodeWarning):
        batch = dataset_of(mixed_documents(), step, missing="mask").__getitems__(range(6))
    assert batch.validity("image").tolist() == [True, False, True, False, True, False]
    assert not batch.image[[1, 3, 5]].any()
    with pytest.warns(DecodeWarning), pytest.raises(MissingValueError, match="MaybePhoto.image: document 1"):
        dataset_of(mixed_documents(), step).__getitems__(range(6))
    filled = dataset_of(mixed_documents(), step, missing={"image": np.full((3, 16, 16), 7, np.uint8)})
    with pytest.warns(DecodeWarning):
        assert (filled.__getitems__(range(6)).image[1] == 7).all()


def test_values_of_lists_are_not_skipped() -> None:
    with pytest.raises(OptionError, match="for the batches of a dataset"):
        decode_image(8, on_error="skip")([picture(0)])
    assert not decode_image(8, on_error="null")([b"bad"], "numpy").any()


# --- augmentations


def test_augmentations_depend_on_seed_epoch_and_row_alone() -> None:
    documents = photos(12)
    dataset = dataset_of(documents, AUGMENT, seed=5)
    whole = dataset.__getitems__(range(12)).image
    for rows in ([3], [7, 3, 11], range(4, 9)):
        assert np.array_equal(dataset.__getitems__(rows).image, whole[list(rows)])
    one_thread = dataset_of(documents, decode_image((24, 32), crop="random", flip=True, threads=1), seed=5)
    assert np.array_equal(one_thread.__getitems__(range(12)).image, whole)
    assert not np.array_equal(dataset_of(documents, AUGMENT, seed=6).__getitems__(range(12)).image, whole)
    dataset.set_epoch(1)
    assert dataset.epoch == 1
    other = dataset.__getitems__(range(12)).image
    assert all(not np.array_equal(a, b) for a, b in zip(whole, other, strict=True))
    dataset.set_epoch(0)
    assert np.array_equal(pickle.loads(pickle.dumps(dataset)).__getitems__(range(12)).image, whole)


def test_fields_are_augmented_alike_unless_their_seeds_differ() -> None:
    class Pair(BaseDocument):
        left: bytes
        right: bytes

    pairs = [Pair(left=picture(n), right=picture(n)) for n in range(8)]
    alike = MultiModalDataset[Pair](pairs, {"left": AUGMENT, "right": AUGMENT}, framework="numpy")
    batch = alike.__getitems__(range(8))
    assert np.array_equal(batch.left, batch.right)
    other = decode_image((24, 32), crop="random", flip=True, seed=1)
    batch = MultiModalDataset[Pair](pairs, {"left": AUGMENT, "right": other}, framework="numpy").__getitems__(range(8))
    assert not np.array_equal(batch.left, batch.right)


def test_preprocess_uses_the_evaluation_form() -> None:
    documents = photos(6)
    dataset = dataset_of(documents, AUGMENT)
    center = decode_image((24, 32), crop="center")
    expected = dataset_of(documents, center).__getitems__(range(6)).image
    assert np.array_equal(dataset.preprocess(documents).image, expected)
    assert np.array_equal(AUGMENT([document.image for document in documents], "numpy"), expected)
    assert AUGMENT.evaluation() == center
    assert AUGMENT.is_random
    assert not center.is_random


def test_flips_happen_with_their_probability() -> None:
    halves = np.zeros((8, 8, 3), np.uint8)
    halves[:, 4:] = 255
    documents = [Photo(number=n, image=encode(halves, "PNG")) for n in range(400)]
    for probability in (0.0, 0.25, 1.0):
        step = decode_image(8, flip=probability)
        rows = dataset_of(documents, step, seed=3).__getitems__(range(400)).image
        assert abs(float((rows[:, 0, 0, 0] == 255).mean()) - probability) < 0.08


# --- output, workers, streams


@pytest.mark.needs("torch")
def test_output_class_is_checked_without_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.columns import Columns
    from quire.errors import FunctionError

    dataset = MultiModalDataset[Photo](photos(4), {"image": AUGMENT}, output=Example)
    monkeypatch.setattr(Columns, "iter_documents", None)  # which validation row by row would call
    batch = dataset.__getitems__(range(4))
    assert batch.document_type is Example
    assert batch.image.shape == (4, 3, 24, 32)
    monkeypatch.undo()
    with pytest.raises(FunctionError, match="is no Example after preprocessing"):
        MultiModalDataset[Photo](photos(4), {"image": decode_image(8)}, output=Example).__getitems__([0])


@pytest.mark.needs("torch")
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_give_the_same_batches(start_method: str) -> None:
    import torch
    from torch.utils.data import DataLoader

    dataset = MultiModalDataset[Photo](photos(12), {"image": AUGMENT}, output=Example, seed=2)
    expected = dataset.__getitems__(range(12)).image
    loader = DataLoader(dataset, 4, num_workers=2, multiprocessing_context=start_method, collate_fn=dataset.collate_fn)
    assert torch.equal(torch.cat([batch.image for batch in loader]), expected)


@pytest.mark.needs("torch")
def test_persistent_workers_see_the_epoch() -> None:
    import torch
    from torch.utils.data import DataLoader

    dataset = MultiModalDataset[Photo](photos(8), {"image": AUGMENT})
    options: Any = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader = DataLoader(dataset, 8, collate_fn=dataset.collate_fn, **options)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        [batch] = loader
        assert torch.equal(batch.image, dataset.__getitems__(range(8)).image)


@pytest.fixture(scope="module", name="folder")
def write_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from quire.storage import write_dataset

    folder = tmp_path_factory.mktemp("photos")
    write_dataset(photos(40), folder, shard_bytes=4096)
    return folder


def stream_of(folder: Path, **options: Any) -> Any:
    from quire.data import StreamingDataset

    options = {"preprocessing": {"image": AUGMENT}, "output": Example, "seed": 4, **options}
    return StreamingDataset[Photo](folder, options.pop("batch_size", 8), **options)


@pytest.mark.needs("torch", "pyarrow")
def test_streams_give_what_datasets_in_memory_give(folder: Path) -> None:
    import torch

    memory = MultiModalDataset[Photo](photos(40), {"image": AUGMENT}, output=Example, seed=4)
    stream = stream_of(folder)
    for epoch in range(2):
        memory.set_epoch(epoch)
        for batch in stream:
            assert torch.equal(batch.image, memory.__getitems__(batch.number.tolist()).image)


@pytest.mark.needs("torch", "pyarrow")
def test_any_number_of_workers_and_a_resume_give_the_same_pictures(folder: Path) -> None:
    import torch
    from torch.utils.data import DataLoader

    def pictures(batches: Any) -> dict[int, Any]:
        return {
            int(number): image for batch in batches for number, image in zip(batch.number, batch.image, strict=True)
        }

    expected = pictures(stream_of(folder))
    assert len(expected) == 40
    workers = pictures(DataLoader(stream_of(folder), batch_size=None, num_workers=2))
    threads = pictures(stream_of(folder).loader(threads=2))
    first = stream_of(folder, batch_size=4)
    begun = iter(first)
    resumed = pictures([next(begun), next(begun), next(begun)])
    state = json.loads(json.dumps(first.state_dict()))
    second = stream_of(folder, batch_size=2, rank=0, world_size=2)
    second.load_state_dict(state)
    other = stream_of(folder, batch_size=2, rank=1, world_size=2)
    other.load_state_dict(state)
    resumed |= pictures(second) | pictures(other)
    for result in (workers, threads, resumed):
        assert result.keys() == expected.keys()
        assert all(torch.equal(result[number], expected[number]) for number in expected)


@given(data=st.data())
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@pytest.mark.needs("torch", "pyarrow")
def test_pictures_are_a_function_of_seed_epoch_and_row(folder: Path, data: Any) -> None:
    """Whatever the workers, the batch size and the place where training stops, and whatever continues there."""
    import torch

    from quire.data import WorkerLoader

    seed, epoch = data.draw(st.integers(0, 3), "seed"), data.draw(st.integers(0, 2), "epoch")
    memory = MultiModalDataset[Photo](photos(40), {"image": AUGMENT}, output=Example, seed=seed)
    memory.set_epoch(epoch)
    expected, seen, state = memory.__getitems__(range(40)).image, list[int](), None
    while len(seen) < 40:
        stream = stream_of(folder, batch_size=data.draw(st.sampled_from([4, 8]), "batch size"), seed=seed)
        stream.set_epoch(epoch)
        workers = data.draw(st.integers(0, 2), "workers")
        loader: Any = WorkerLoader(stream, workers) if workers else stream.loader(threads=2)
        if state is not None:
            loader.load_state_dict(state)
        most = data.draw(st.integers(2, 10), "batches")
        for batch in islice(loader, most):
            numbers = batch.number.tolist()
            assert torch.equal(batch.image, expected[numbers])
            seen += numbers
        state = json.loads(json.dumps(loader.state_dict()))
    assert sorted(seen) == list(range(40))


@pytest.mark.needs("torch")
def test_workers_decode_into_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoded rows are sent as the place of the memory that they were decoded to, and are not copied to it."""
    from quire.data import _media_steps
    from quire.data._shm_transport import SharedArena, SharedTensor

    arena, written = SharedArena(), list[int]()
    decode_into = _media_steps.DecodeStep._decode

    def record(step: Any, values: Any, array: Any, context: Any) -> Any:
        written.append(array.ctypes.data)
        return decode_into(step, values, array, context)

    monkeypatch.setattr(_media_steps.DecodeStep, "_decode", record)
    dataset = MultiModalDataset[Photo](photos(8), {"image": decode_image(96)}, framework="torch")
    monkeypatch.setattr("quire.data._dataset.in_worker", lambda: True)
    monkeypatch.setattr("quire.data._dataset.shared_arena", lambda: arena)
    image = dataset.__getitems__(range(8)).image
    assert image.data_ptr() == written[0]
    piece = arena._find_piece(image)
    assert piece is not None
    assert type(arena.prepare(image)) is SharedTensor
    assert piece.was_sent, "of the piece itself, and not of a copy"


@pytest.mark.needs("torch", "pyarrow")
def test_rows_by_number_are_those_of_the_epoch(folder: Path) -> None:
    import torch

    stream = stream_of(folder)
    next(iter(stream))
    [batch] = list(stream_of(folder, batch_size=40))
    order = np.argsort(batch.number.numpy())
    assert torch.equal(stream.take(range(40)).image, batch.image[order])
    assert torch.equal(stream.preprocess(photos(3)).image, AUGMENT([p.image for p in photos(3)], "torch"))


@pytest.mark.needs("torch", "pyarrow")
def test_skipped_rows_are_reported(tmp_path: Path) -> None:
    from quire.data import StreamingDataset
    from quire.storage import write_dataset

    documents = [*photos(6), Photo(id="bad", number=6, image=b"bad"), Photo(id="cut", number=7, image=picture(1)[:99])]
    write_dataset(documents, tmp_path)
    step = {"image": decode_image(8, on_error="skip")}
    stream = StreamingDataset[Photo](tmp_path, 4, step, shuffle=False)
    assert [batch.number.tolist() for batch in stream] == [[0, 1, 2, 3], [4, 5]]
    assert len(stream.errors) == 2
    assert "Photo.image: document 6 (id bad)" in stream.errors[0]
    windows = StreamingDataset[Photo](tmp_path, 2, step, shuffle=False).windows(2, 2)
    assert [batch.number.tolist() for batch in windows] == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.needs("torch", "pyarrow")
def test_mixed_streams_augment_rows_alike(folder: Path) -> None:
    import torch

    from quire.data import MixedDataset

    memory = MultiModalDataset[Photo](photos(40), {"image": AUGMENT}, seed=4)
    parts = {name: stream_of(folder, output=None) for name in ("a", "b")}
    mixed = MixedDataset(parts, {"a": 1, "b": 1}, mix="row")
    for batch, _ in zip(mixed, range(3), strict=False):
        assert torch.equal(batch.image, memory.__getitems__(batch.number.tolist()).image)


@pytest.mark.needs("torch", "pyarrow")
def test_decoded_rows_count_against_the_memory_budget(folder: Path) -> None:
    plain = stream_of(folder, preprocessing=None, output=None, memory_bytes=1 << 20)
    large = {"image": decode_image(256)}
    assert stream_of(folder, preprocessing=large, output=None, memory_bytes=1 << 20)._group_size == 1
    assert plain._group_size > 1


THREADS = """
import os
import torch
from tests.data.sample_pictures import Photo, photos
from quire.data import MultiModalDataset, decode_image

documents = photos(32)
before = len(os.listdir("/proc/self/task"))
dataset = MultiModalDataset[Photo](documents, {"image": decode_image(224, normalize=((0.5,), (0.5,)), threads=1)})
dataset.__getitems__(range(32))
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.needs("torch")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_decoding_enters_no_openmp_region() -> None:
    ended = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "0"

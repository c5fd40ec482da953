from __future__ import annotations

import io
import pickle
import struct
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from quire import Document, DocumentArray
from quire.errors import DecodeError, EncodeError, MissingDependencyError, TensorError, UriError, UriNotFoundError
from quire.tensors import framework_of, get_framework

pytestmark = pytest.mark.needs("PIL")

FRAMEWORKS = [
    "numpy",
    *(pytest.param(name, marks=pytest.mark.needs(name)) for name in ("torch", "tensorflow", "jax", "paddle")),
]
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
CHANCE = np.random.default_rng(0)
PIXELS = CHANCE.integers(0, 256, (20, 30, 3), dtype=np.uint8)


def picture(mode: str = "RGB", image_format: str = "PNG", pixels: Any = PIXELS, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Pillow.fromarray(pixels).convert(mode).save(buffer, image_format, **options)
    return buffer.getvalue()


def decoded(content: bytes) -> np.ndarray[Any, Any]:
    with Pillow.open(io.BytesIO(content)) as image:
        return np.array(image.convert("RGB"))


def image(framework: str = "numpy", pixels: Any = PIXELS, **fields: Any) -> Document:
    return Document(tensor=get_framework(framework).from_numpy(pixels.copy()), **fields)


def values(document: Document, framework: str = "numpy") -> np.ndarray[Any, Any]:
    """Return the tensor as numpy, after checking its framework."""
    own = framework_of(document.tensor)
    assert own is not None
    assert own.name == framework
    return own.to_numpy(document.tensor)


# --- decoding


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1"])
def test_decoding_png_yields_rgb(mode: str) -> None:
    content = picture(mode)
    document = Document(blob=content).convert_blob_to_image_tensor()
    assert document.tensor.dtype == np.uint8
    assert document.tensor.shape == (20, 30, 3)
    assert np.array_equal(document.tensor, decoded(content))
    if mode in ("RGB", "RGBA"):
        assert np.array_equal(document.tensor, PIXELS)


def test_decoding_drops_palette_transparency() -> None:
    content = picture("P", transparency=bytes(range(256)))
    document = Document(blob=content).convert_blob_to_image_tensor()
    assert np.array_equal(document.tensor, decoded(picture("P")))


def test_decoding_rejects_formats_that_run_programs() -> None:
    with pytest.raises(DecodeError, match="EPS is not decoded, because that runs another program"):
        Document(blob=picture(image_format="EPS")).convert_blob_to_image_tensor()


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_decoding_jpeg_yields_rgb(mode: str) -> None:
    content = picture(mode, "JPEG")
    assert np.array_equal(Document(blob=content).convert_blob_to_image_tensor().tensor, decoded(content))


def test_decoded_tensor_is_writable() -> None:
    document = Document(blob=picture()).convert_blob_to_image_tensor()
    document.tensor[0] = 0
    assert document.tensor[0].sum() == 0


def test_decoding_16_bit_png_keeps_upper_byte(here: Path) -> None:
    deep = (np.arange(600, dtype=np.uint16) * 100).reshape(20, 30)
    Pillow.fromarray(deep).save(here / "deep.png")
    tensor = Document(uri="deep.png").load_uri_to_image_tensor().tensor
    assert np.array_equal(tensor, np.repeat((deep >> 8).astype(np.uint8)[..., None], 3, axis=2))


def test_decoding_rejects_32_bit_pixels() -> None:
    content = picture("F", "TIFF")
    with pytest.raises(DecodeError, match="the pixels are 'F', 32-bit numbers"):
        Document(blob=content).convert_blob_to_image_tensor()


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_decoding_puts_channels_at_channel_axis(axis: int) -> None:
    tensor = Document(blob=picture()).convert_blob_to_image_tensor(channel_axis=axis).tensor
    assert np.array_equal(np.moveaxis(tensor, axis, -1), PIXELS)


@pytest.mark.parametrize(("width", "height", "shape"), [(8, 4, (4, 8)), (8, None, (20, 8)), (None, 4, (4, 30))])
def test_decoding_resizes_to_width_and_height(width: int | None, height: int | None, shape: tuple[int, int]) -> None:
    document = Document(blob=picture()).convert_blob_to_image_tensor(width, height)
    assert document.tensor.shape == (*shape, 3)
    expected = np.array(Pillow.fromarray(PIXELS).resize(shape[::-1]))
    assert np.array_equal(document.tensor, expected)


@pytest.mark.parametrize("image_format", ["GIF", "TIFF"])
def test_decoding_multiple_frames_fills_chunks(image_format: str) -> None:
    buffer = io.BytesIO()
    frames = [Pillow.new("RGB", (6, 5), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    frames[0].save(buffer, image_format, save_all=True, append_images=frames[1:])
    document = Document(blob=buffer.getvalue()).convert_blob_to_image_tensor(channel_axis=0)
    assert document.tensor[:, 0, 0].tolist() == [255, 0, 0]
    assert [chunk.tensor[:, 4, 5].tolist() for chunk in document.chunks] == [[255, 0, 0], [0, 255, 0], [0, 0, 255]]
    assert {chunk.parent_id for chunk in document.chunks} == {document.id}


# --- loading


def test_load_uri_to_image_tensor_reads_paths_http_and_data_uris(
    here: Path, server: ThreadingHTTPServer, address: str
) -> None:
    server.picture = picture()  # type: ignore[attr-defined]
    (here / "a b.png").write_bytes(picture())
    for uri in ("a b.png", (here / "a b.png").as_uri(), f"{address}/picture.png"):
        document = Document(uri=uri)
        assert document.load_uri_to_image_tensor() is document
        assert np.array_equal(document.tensor, PIXELS)
    document.convert_uri_to_datauri(base64=True)
    assert np.array_equal(document.load_uri_to_image_tensor(timeout=1, max_bytes=10_000).tensor, PIXELS)
    with pytest.raises(UriError, match="the limit is 5 bytes"):
        document.load_uri_to_image_tensor(max_bytes=5)


def test_image_methods_name_missing_fields_and_files(here: Path) -> None:
    with pytest.raises(UriNotFoundError, match="a.jpg: there is no such file"):
        Document(uri="a.jpg").load_uri_to_image_tensor()
    with pytest.raises(UriError, match="has no uri"):
        Document().load_uri_to_image_tensor()
    with pytest.raises(DecodeError, match="has no blob"):
        Document().convert_blob_to_image_tensor()
    with pytest.raises(TensorError, match="has no tensor. Set `tensor`, or fill it by load_uri_to_image_tensor"):
        Document().set_image_tensor_normalization()
    assert list(here.iterdir()) == []


def _damaged() -> dict[str, bytes]:
    good = picture()
    return {
        "empty": b"",
        "text": b"not an image",
        "head": good[:20],
        "truncated": good[: len(good) // 2],
        "checksum": good[:40] + bytes([good[40] ^ 1]) + good[41:],
        "jpeg": picture("RGB", "JPEG")[:300],
    }


@pytest.mark.parametrize("name", _damaged())
def test_decoding_damaged_image_names_source(here: Path, name: str) -> None:
    (here / "bad.png").write_bytes(_damaged()[name])
    with pytest.raises(DecodeError, match="bad.png: the bytes are not an image that Pillow can read"):
        Document(uri="bad.png").load_uri_to_image_tensor()
    document = Document(blob=_damaged()[name])
    with pytest.raises(DecodeError, match=f"the blob of Document {document.id}"):
        document.convert_blob_to_image_tensor()
    assert document.tensor is None


def _bomb(width: int, height: int) -> bytes:
    def chunk(tag: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + tag + data + struct.pack(">I", zlib.crc32(tag + data))

    head = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [10_000, 30_000])  # Pillow only warns of the first
def test_decoding_rejects_decompression_bombs(side: int) -> None:
    with pytest.raises(DecodeError, match="too large to be decoded.*MAX_IMAGE_PIXELS"):
        Document(blob=_bomb(side, side)).convert_blob_to_image_tensor()


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_decoding_rejects_bombs_when_pillow_warnings_are_ignored() -> None:
    with pytest.raises(DecodeError, match="100,000,000 pixels, more than 89,478,485"):
        Document(blob=_bomb(10_000, 10_000)).convert_blob_to_image_tensor()


def test_decoding_counts_pixels_over_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    frames = [Pillow.new("L", (10, 10), shade) for shade in range(20)]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    monkeypatch.setattr(Pillow, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DecodeError, match="2,000 pixels, more than 1,000"):
        Document(blob=buffer.getvalue()).convert_blob_to_image_tensor()
    monkeypatch.setattr(Pillow, "MAX_IMAGE_PIXELS", None)
    assert len(Document(blob=buffer.getvalue()).convert_blob_to_image_tensor().chunks) == 20


def test_missing_pillow_error_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "PIL"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_NoPillow(), *sys.meta_path])
    with pytest.raises(MissingDependencyError, match=r"decoding an image needs PIL.*pip install 'quire-ml\[image\]'"):
        Document(blob=b"x").convert_blob_to_image_tensor()


class _NoPillow:
    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == "PIL":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


# --- encoding


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_png_roundtrip_keeps_pixels_and_framework(framework: str) -> None:
    document = image(framework).convert_image_tensor_to_blob()
    assert document.blob is not None
    assert np.array_equal(decoded(document.blob), PIXELS)
    values(document, framework)
    front = image(framework, np.moveaxis(PIXELS, -1, 0)).convert_image_tensor_to_blob(channel_axis=0)
    assert front.blob == document.blob


@pytest.mark.parametrize(
    ("shape", "mode"), [((5, 6), "L"), ((5, 6, 1), "L"), ((5, 6, 2), "LA"), ((5, 6, 3), "RGB"), ((5, 6, 4), "RGBA")]
)
def test_encoding_chooses_mode_by_channels(shape: tuple[int, ...], mode: str) -> None:
    pixels = CHANCE.integers(0, 256, shape, dtype=np.uint8)
    blob = image(pixels=pixels).convert_image_tensor_to_blob().blob
    assert blob is not None
    with Pillow.open(io.BytesIO(blob)) as encoded:
        assert encoded.mode == mode
        assert np.array_equal(np.array(encoded), pixels.reshape(np.array(encoded).shape))


@pytest.mark.parametrize(("name", "mime_type"), [("png", "image/png"), ("jpg", "image/jpeg"), ("JPEG", "image/jpeg")])
def test_convert_image_tensor_to_uri_states_mime_type(name: str, mime_type: str) -> None:
    uri = image().convert_image_tensor_to_uri(image_format=name).uri
    assert uri is not None
    assert uri.startswith(f"data:{mime_type};base64,")
    again = Document(uri=uri).load_uri_to_image_tensor()
    assert again.tensor.shape == PIXELS.shape
    assert name != "png" or np.array_equal(again.tensor, PIXELS)


def test_load_pil_image_to_datauri_keeps_pixels() -> None:
    document = Document().load_pil_image_to_datauri(Pillow.fromarray(PIXELS))
    assert np.array_equal(document.load_uri_to_image_tensor().tensor, PIXELS)


def test_save_image_tensor_to_file_infers_format(here: Path) -> None:
    document = image()
    assert document.save_image_tensor_to_file("a.png") is document
    document.save_image_tensor_to_file(here / "b.jpg").save_image_tensor_to_file("c")
    document.save_image_tensor_to_file("d.dat", image_format="bmp")
    buffer = io.BytesIO()
    document.save_image_tensor_to_file(buffer, -1, "png")
    formats = []
    for source in ("a.png", "b.jpg", "c", "d.dat", buffer):
        with Pillow.open(source) as saved:
            formats.append(saved.format)
    assert formats == ["PNG", "JPEG", "PNG", "BMP", "PNG"]
    assert np.array_equal(Document(uri="a.png").load_uri_to_image_tensor().tensor, PIXELS)


def test_encoding_rejects_unknown_formats_and_invalid_images(here: Path) -> None:
    with pytest.raises(EncodeError, match="'pgn' is not a format.*Did you mean 'png'"):
        image().convert_image_tensor_to_blob(image_format="pgn")
    with pytest.raises(EncodeError, match="got float32 .*set_image_tensor_inv_normalization"):
        image(pixels=PIXELS.astype(np.float32)).save_image_tensor_to_file("a.png")
    with pytest.raises(EncodeError, match=r"got uint8 \(3, 20, 30\).*channel_axis=0"):
        image(pixels=np.moveaxis(PIXELS, -1, 0)).convert_image_tensor_to_uri()
    with pytest.raises(EncodeError, match="cannot be written as JPEG"):
        image(pixels=np.zeros((4, 4, 4), np.uint8)).convert_image_tensor_to_blob(image_format="jpeg")
    assert list(here.iterdir()) == []


# --- normalization and resizing


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("axis", [-1, 0, 1, 2])
def test_normalization_matches_formula_and_is_reverted(framework: str, axis: int) -> None:
    document = image(framework, np.moveaxis(PIXELS, -1, axis))
    before = document.tensor
    assert document.set_image_tensor_normalization(channel_axis=axis) is document
    result = values(document, framework)
    assert result.dtype == np.float32
    expected = (PIXELS / 255.0 - MEAN) / STD
    assert np.allclose(np.moveaxis(result, axis, -1), expected, rtol=0, atol=1e-6)
    assert before is not document.tensor
    document.set_image_tensor_inv_normalization(channel_axis=axis)
    assert np.array_equal(np.moveaxis(values(document, framework), axis, -1), PIXELS)
    assert values(document, framework).dtype == np.uint8


def test_normalization_leaves_original_tensor_unchanged() -> None:
    original = PIXELS.copy()
    Document(tensor=original).set_image_tensor_normalization()
    assert np.array_equal(original, PIXELS)


def test_inverse_normalization_restores_every_byte() -> None:
    pixels = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(16, 16, 3)
    document = image(pixels=pixels).set_image_tensor_normalization().set_image_tensor_inv_normalization()
    assert np.array_equal(document.tensor, pixels)


def test_normalization_accepts_own_constants_for_one_channel() -> None:
    document = image(pixels=PIXELS[..., :1]).set_image_tensor_normalization(img_mean=[0.5], img_std=[0.25])
    assert np.allclose(document.tensor, (PIXELS[..., :1] / 255 - 0.5) / 0.25, atol=1e-6)


def test_inverse_normalization_clips_to_bytes() -> None:
    document = Document(tensor=np.array([[[-9.0, 0.0, 9.0]]])).set_image_tensor_inv_normalization()
    assert document.tensor.tolist() == [[[0, 116, 255]]]


@pytest.mark.parametrize(
    ("pixels", "call", "message"),
    [
        (PIXELS.astype(np.float32), "set_image_tensor_normalization", r"expected uint8 of three axes, got float32"),
        (PIXELS[0], "set_image_tensor_normalization", r"got uint8 \(30, 3\)"),
        (PIXELS, "set_image_tensor_inv_normalization", "expected floats of three axes, got uint8"),
        (
            PIXELS.transpose(2, 0, 1),
            "set_image_tensor_normalization",
            "30 channels, but there are 3 means.*channel_axis",
        ),
        (PIXELS[0], "convert_image_tensor_to_sliding_windows", "expected three axes"),
        (PIXELS, "convert_image_tensor_to_sliding_windows", r"no window of 64 x 64 pixels fits.*padding=True"),
    ],
)
def test_image_methods_reject_invalid_shapes_and_dtypes(pixels: Any, call: str, message: str) -> None:
    document = image(pixels=pixels)
    with pytest.raises(TensorError, match=message):
        getattr(document, call)()
    assert np.array_equal(document.tensor, pixels)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_set_channel_axis_moves_axis_and_keeps_framework(framework: str) -> None:
    document = image(framework).set_image_tensor_channel_axis(-1, 0)
    assert np.array_equal(values(document, framework), PIXELS.transpose(2, 0, 1))
    assert np.array_equal(values(document.set_image_tensor_channel_axis(0, -1), framework), PIXELS)
    with pytest.raises(TensorError, match=r"shape \(20, 30, 3\) has no axis 3"):
        document.set_image_tensor_channel_axis(3, 0)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_set_shape_resizes_by_nearest_pixel(framework: str) -> None:
    assert np.array_equal(values(image(framework).set_image_tensor_shape((20, 30)), framework), PIXELS)
    smaller = values(image(framework).set_image_tensor_shape((10, 10)), framework)
    assert np.array_equal(smaller, PIXELS[1::2, 1::3])
    larger = values(image(framework).set_image_tensor_shape((40, 60)), framework)
    assert np.array_equal(larger, PIXELS.repeat(2, axis=0).repeat(2, axis=1))
    front = image(framework, PIXELS.transpose(2, 0, 1)).set_image_tensor_shape((10, 10), channel_axis=0)
    assert np.array_equal(values(front, framework), smaller.transpose(2, 0, 1))


def test_resample_scales_both_sides() -> None:
    assert image().set_image_tensor_resample(0.5).tensor.shape == (10, 15, 3)
    assert image().set_image_tensor_resample(1.55).tensor.shape == (31, 46, 3)
    assert image(pixels=PIXELS.transpose(2, 0, 1)).set_image_tensor_resample(2, channel_axis=0).tensor.shape == (
        3,
        40,
        60,
    )
    with pytest.raises(TensorError, match="cannot become 0 x 0 pixels"):
        image().set_image_tensor_resample(0.01)


@pytest.mark.needs("torch")
def test_image_methods_reject_gradients_and_sparse_tensors() -> None:
    import torch

    with pytest.raises(TensorError, match="part of a gradient graph"):
        Document(tensor=torch.zeros(3, 3, 3, requires_grad=True)).set_image_tensor_shape((2, 2))
    with pytest.raises(TensorError, match="its layout is coo"):
        Document(tensor=torch.zeros(3, 3).to_sparse()).set_image_tensor_channel_axis(0, 1)


# --- windows


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("axis", [-1, 0])
def test_sliding_windows_tile_image(framework: str, axis: int) -> None:
    document = image(framework, np.moveaxis(PIXELS, -1, axis))
    document.convert_image_tensor_to_sliding_windows((8, 10), channel_axis=axis)
    result = values(document, framework)
    assert result.shape == ((6, 8, 10, 3) if axis == -1 else (6, 3, 8, 10))
    expected = [PIXELS[row : row + 8, column : column + 10] for row in (0, 8) for column in (0, 10, 20)]
    assert np.array_equal(result, [np.moveaxis(part, -1, axis) for part in expected])


def test_sliding_windows_copy_memory() -> None:
    original = PIXELS.copy()
    document = Document(tensor=original).convert_image_tensor_to_sliding_windows((20, 30))
    document.tensor[:] = 0
    assert np.array_equal(original, PIXELS)


def test_sliding_windows_apply_strides_and_padding() -> None:
    document = image().convert_image_tensor_to_sliding_windows((8, 10), strides=(7, 15), padding=True)
    wide = np.zeros((22, 40, 3), np.uint8)
    wide[:20, :30] = PIXELS
    expected = [wide[row : row + 8, column : column + 10] for row in (0, 7, 14) for column in (0, 15)]
    assert np.array_equal(document.tensor, expected)
    assert image().convert_image_tensor_to_sliding_windows(padding=True).tensor.shape == (1, 64, 64, 3)
    with pytest.raises(TensorError, match="must be at least 1 pixel"):
        image().convert_image_tensor_to_sliding_windows((8, 8), strides=(0, 1))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sliding_windows_as_chunks_record_location(framework: str) -> None:
    document = image(framework, location=[100, 200])
    document.convert_image_tensor_to_sliding_windows((10, 10), strides=(10, 5), as_chunks=True)
    assert np.array_equal(values(document, framework), PIXELS)
    assert len(document.chunks) == 10
    chunk = document.chunks[6]
    assert chunk.location == [110, 205, 10, 10]
    assert chunk.parent_id == document.id
    assert np.array_equal(values(chunk, framework), PIXELS[10:20, 5:15])


# --- chained calls


def preprocess(document: Document) -> Document:
    return document.load_uri_to_image_tensor().set_image_tensor_normalization().set_image_tensor_channel_axis(-1, 0)


@pytest.fixture
def photos(here: Path) -> list[np.ndarray[Any, Any]]:
    """Write 24 JPEG files and return the expected result of `preprocess` for each."""
    expected = []
    for number in range(24):
        content = picture("RGB", "JPEG", CHANCE.integers(0, 256, (32, 24, 3), dtype=np.uint8))
        (here / f"{number:02}.jpg").write_bytes(content)
        expected.append(((decoded(content) / 255.0 - MEAN) / STD).transpose(2, 0, 1).astype(np.float32))
    return expected


def test_chained_calls_preprocess_files(photos: list[Any]) -> None:
    documents = DocumentArray.from_files("*.jpg")
    assert len(documents) == 24
    for document, expected in zip(documents, photos, strict=True):
        assert preprocess(document) is document
        assert document.tensor.dtype == np.float32
        assert np.allclose(document.tensor, expected, atol=1e-6)


def test_chained_calls_are_thread_safe(photos: list[Any]) -> None:
    documents = DocumentArray.from_files("*.jpg")
    repeated = [*documents] * 4
    barrier = threading.Barrier(8)
    with ThreadPoolExecutor(8, initializer=barrier.wait) as pool:
        result = list(pool.map(lambda document: preprocess(document.model_copy()), repeated))
        changed = list(pool.map(preprocess, documents))
    assert all(one is other for one, other in zip(changed, documents, strict=True))
    assert all(np.allclose(one.tensor, expected, atol=1e-6) for one, expected in zip(result, photos * 4, strict=True))
    for document, expected in zip(documents, photos, strict=True):
        assert np.allclose(document.tensor, expected, atol=1e-6)


def test_loaded_document_survives_pickle_bytes_and_stack(photos: list[Any]) -> None:
    document = preprocess(Document(uri="03.jpg"))
    assert pickle.loads(pickle.dumps(document)).identical(document)
    assert Document.from_bytes(document.to_bytes()).identical(document)
    batch = DocumentArray[Document]([preprocess(one) for one in DocumentArray.from_files("0*.jpg")]).stack()
    assert np.allclose(batch.tensor, photos[:10], atol=1e-6)


def test_image_methods_return_subclass(photos: list[Any]) -> None:
    class Photo(Document):
        likes: int = 0

    photo = Photo(uri="00.jpg", likes=3).load_uri_to_image_tensor(channel_axis=0)
    assert photo.likes == 3
    assert photo.tensor.shape == (3, 32, 24)
    assert len(photos) == 24


@pytest.mark.needs("torch")
def test_loading_validates_tensor_of_subclass(photos: list[Any]) -> None:
    import torch

    from quire.typing import TorchTensor

    class Photo(Document):
        tensor: TorchTensor[3, 32, 24] | None = None  # type: ignore[type-arg, valid-type]

    photo = Photo(uri="00.jpg").load_uri_to_image_tensor(channel_axis=0)
    assert isinstance(photo.tensor, torch.Tensor)
    with pytest.raises(ValueError, match="tensor"):
        photo.load_uri_to_image_tensor()
    assert photo.tensor.shape == (3, 32, 24)
    assert len(photos) == 24


def test_loading_marks_tensor_as_set(photos: list[Any]) -> None:
    document = Document(uri="00.jpg")
    assert document.load_uri_to_image_tensor().model_fields_set == {"uri", "mime_type", "tensor"}
    assert len(photos) == 24

"""What the image calls of `Document` do: each changes the document."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.documents import _pixels
from quire.documents._held import held, whose
from quire.errors import TensorError
from quire.files import Limits, Target, open_target, read_uri, to_data_uri
from quire.media import decode_frames, encode_image, encode_pillow, pillow_format
from quire.tensors import framework_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.documents._document import Document

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def load_uri(document: Document, width: int | None, height: int | None, channel_axis: int, limits: Limits) -> None:
    """The image at the document's uri as its tensor."""
    uri = held(document, "uri")
    _set_frames(document, decode_frames(read_uri(uri, **limits), uri, width, height), channel_axis)


def load_blob(document: Document, width: int | None, height: int | None, channel_axis: int) -> None:
    """The image in the document's blob as its tensor."""
    frames = decode_frames(held(document, "blob"), f"the blob of {whose(document)}", width, height)
    _set_frames(document, frames, channel_axis)


def _set_frames(document: Document, frames: list[NDArray[Any]], channel_axis: int) -> None:
    """The first frame is the tensor; where there are more, every frame is a chunk."""
    if channel_axis != -1:
        frames = [_pixels.move_axis(frame, -1, channel_axis) for frame in frames]
    _put(document, frames[0])
    if len(frames) > 1:
        document.chunks.extend({"tensor": frame, "parent_id": document.id} for frame in frames)


def _put(document: Document, tensor: Any) -> None:
    """Set the tensor. That `Document` itself takes an array of numpy is known; a subclass may have a say."""
    if type(tensor) is np.ndarray and "__quire_any_tensor__" in vars(type(document)):
        document.__dict__["tensor"] = tensor
        document.__pydantic_fields_set__.add("tensor")
    else:
        document.tensor = tensor


def change(document: Document, make: Callable[..., NDArray[Any]], *arguments: Any) -> None:
    """Put what a function of numpy makes of the tensor in its place, as a tensor of the same framework and device."""
    _put(document, _alike(document.tensor, make(array_of(document), *arguments)))


def resample(document: Document, ratio: float, channel_axis: int) -> None:
    """Rows and columns times the ratio, rounded down."""
    array = array_of(document)
    rows, columns = (int(size * ratio) for size in _pixels.move_axis(array, channel_axis, -1).shape[:2])
    change(document, _pixels.resized, rows, columns, channel_axis)


def array_of(document: Document) -> NDArray[Any]:
    """The tensor as numpy; an error where that would lose something."""
    tensor = held(document, "tensor")
    framework = framework_of(tensor)
    assert framework is not None
    reason = framework.refusal(tensor) or (f"its layout is {framework.layout(tensor)}" * framework.is_sparse(tensor))
    if getattr(tensor, "requires_grad", False):
        reason = "it is part of a gradient graph (use .detach())"
    if reason:
        raise TensorError(f"the tensor of {whose(document)} cannot be worked on as an image: {reason}.")
    return framework.to_numpy(tensor)


def _alike(tensor: Any, array: NDArray[Any]) -> Any:
    """The array as a tensor of the framework, and on the device, of another tensor."""
    framework = framework_of(tensor)
    assert framework is not None
    made = framework.from_numpy(array)
    device = framework.device(tensor)
    return made if framework.device(made) == device else framework.to_device(made, device)


def encoded(document: Document, channel_axis: int, image_format: str) -> bytes:
    """The tensor as an encoded image."""
    array = array_of(document)
    return encode_image(array if array.ndim == 2 else _pixels.move_axis(array, channel_axis, -1), image_format)


def to_uri(document: Document, channel_axis: int, image_format: str) -> None:
    """The tensor as an encoded image in a data URI."""
    content = encoded(document, channel_axis, image_format)
    document.uri = to_data_uri(content, mime_type(image_format), base64=True)


def pillow_to_uri(document: Document, image: Any) -> None:
    """Pillow's image as a PNG in a data URI."""
    document.uri = to_data_uri(encode_pillow(image, "png"), "image/png", base64=True)


def mime_type(image_format: str) -> str:
    """The media type of a format."""
    return f"image/{pillow_format(image_format).lower()}"


def save(document: Document, file: Target, channel_axis: int, image_format: str | None) -> None:
    """The tensor as an image in a file; its format is asked for, or told by the name of the file, or PNG."""
    if image_format is None:
        name = os.fspath(file) if isinstance(file, (str, os.PathLike)) else ""
        image_format = os.path.splitext(name)[1][1:] or "png"  # noqa: PTH122 - of a name that may be no path
    content = encoded(document, channel_axis, image_format)
    with open_target(file) as target:
        target.write(content)


def slide(
    document: Document,
    window: Sequence[int],
    strides: Sequence[int] | None,
    channel_axis: int,
    *,
    padding: bool,
    as_chunks: bool,
) -> None:
    """Windows that slide over the tensor in its place, or as chunks that know where they lie."""
    height, width = window
    row_step, column_step = strides or window
    image = array_of(document)
    made, starts = _pixels.windows(image, (height, width), (row_step, column_step), channel_axis, padding=padding)
    if not as_chunks:
        _put(document, _alike(document.tensor, made))
        return
    top, left = (document.location or [0, 0])[:2]
    document.chunks.extend(
        {
            "tensor": _alike(document.tensor, part),
            "location": [top + row, left + column, height, width],
            "parent_id": document.id,
        }
        for part, (row, column) in zip(made, starts, strict=True)
    )

"""The document for when there is no schema yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field
from typing_extensions import Self, Unpack

from quire.array import DocumentArray
from quire.document import BaseDocument
from quire.documents import _images, _pixels, _uris, _words
from quire.documents._images import MEAN, STD
from quire.documents._yielding import YieldingProperty
from quire.files import Limits, Target
from quire.typing import AnyTensor


def _no_documents() -> DocumentArray[Document]:
    return _Documents._trusted([])


class Document(BaseDocument):
    """A document that holds whatever comes: text, a tensor, bytes, tags, and documents below and beside it.

    The calls that load, convert, set and save change the document and give it, so that they chain:
    `d.load_uri_to_image_tensor().set_image_tensor_normalization()`. Those that read the uri take `timeout` (60 seconds)
    and `max_bytes` (1 GiB). `channel_axis` says where the colours of an image are: -1, behind rows and columns, unless
    told. A tensor of any framework stays one of that framework.
    """

    __quire_any_tensor__: ClassVar[bool] = True  # `tensor` takes any: the image calls need not ask

    parent_id: str | None = None
    uri: str | None = None
    mime_type: str | None = None
    text: str | None = None
    tensor: AnyTensor | None = None
    embedding: AnyTensor | None = None
    blob: bytes | None = None
    tags: dict[str, Any] = Field(default_factory=dict)
    weight: float | None = None
    modality: str | None = None
    location: list[float] | None = None
    offset: float | None = None
    scores: dict[str, Any] = Field(default_factory=dict)
    chunks: DocumentArray[Document] = Field(default_factory=_no_documents)
    matches: DocumentArray[Document] = Field(default_factory=_no_documents)

    # --- the content

    content = YieldingProperty(_uris.content, _uris.set_content)
    """The text, the tensor or the blob: the first of them that is there. Setting it clears the other two."""

    content_type = YieldingProperty(_uris.content_type)
    """Which of them `content` is: 'text', 'tensor' or 'blob'; None where there is none."""

    # --- images

    def load_uri_to_image_tensor(
        self, width: int | None = None, height: int | None = None, channel_axis: int = -1, **limits: Unpack[Limits]
    ) -> Self:
        """Set `tensor` to the image at `uri`: uint8, red, green and blue, resized if `width` or `height` is given.

        Of an image of several frames `tensor` is the first, and all of them are added to `chunks`.
        """
        _images.load_uri(self, width, height, channel_axis, limits)
        return self

    def convert_blob_to_image_tensor(
        self, width: int | None = None, height: int | None = None, channel_axis: int = -1
    ) -> Self:
        """Set `tensor` to the encoded image in `blob`, as `load_uri_to_image_tensor` does."""
        _images.load_blob(self, width, height, channel_axis)
        return self

    def convert_image_tensor_to_blob(self, channel_axis: int = -1, image_format: str = "png") -> Self:
        """Set `blob` to the image in `tensor`, encoded as 'png', 'jpeg' or another format that Pillow writes."""
        self.blob = _images.encoded(self, channel_axis, image_format)
        return self

    def convert_image_tensor_to_uri(self, channel_axis: int = -1, image_format: str = "png") -> Self:
        """Set `uri` to a data URI of the image in `tensor`."""
        _images.to_uri(self, channel_axis, image_format)
        return self

    def load_pil_image_to_datauri(self, image: Any) -> Self:
        """Set `uri` to a data URI of Pillow's image, as PNG."""
        _images.pillow_to_uri(self, image)
        return self

    def save_image_tensor_to_file(self, file: Target, channel_axis: int = -1, image_format: str | None = None) -> Self:
        """Write the image in `tensor` to a file, in the format that is asked for or that the file's name tells."""
        _images.save(self, file, channel_axis, image_format)
        return self

    def set_image_tensor_normalization(
        self, channel_axis: int = -1, img_mean: Sequence[float] = MEAN, img_std: Sequence[float] = STD
    ) -> Self:
        """Make float32 of a uint8 image: (pixel / 255 - mean) / deviation, by channel; by default ImageNet's."""
        _images.change(self, _pixels.normalized, channel_axis, img_mean, img_std)
        return self

    def set_image_tensor_inv_normalization(
        self, channel_axis: int = -1, img_mean: Sequence[float] = MEAN, img_std: Sequence[float] = STD
    ) -> Self:
        """Undo `set_image_tensor_normalization`: uint8 again, rounded."""
        _images.change(self, _pixels.denormalized, channel_axis, img_mean, img_std)
        return self

    def set_image_tensor_channel_axis(self, original_channel_axis: int, new_channel_axis: int) -> Self:
        """Move the channels of the image to another axis: (-1, 0) for torch."""
        _images.change(self, _pixels.move_axis, original_channel_axis, new_channel_axis)
        return self

    def set_image_tensor_shape(self, shape: tuple[int, int], channel_axis: int = -1) -> Self:
        """Give the image (rows, columns) of pixels, each the nearest of the old ones."""
        _images.change(self, _pixels.resized, *shape, channel_axis)
        return self

    def set_image_tensor_resample(self, ratio: float, channel_axis: int = -1) -> Self:
        """Give the image so many times its rows and columns, each pixel the nearest of the old ones."""
        _images.resample(self, ratio, channel_axis)
        return self

    def convert_image_tensor_to_sliding_windows(
        self,
        window_shape: tuple[int, int] = (64, 64),
        strides: tuple[int, int] | None = None,
        padding: bool = False,  # noqa: FBT001, FBT002 - as in DocArray
        channel_axis: int = -1,
        as_chunks: bool = False,  # noqa: FBT001, FBT002
    ) -> Self:
        """Cut the image into windows of (rows, columns), side by side or by `strides`.

        Only windows within the image; with `padding` all that start in it, zeros beyond. `tensor` gets a new first axis
        of windows; or they are added to `chunks`, each with its `location`: (row, column, rows, columns).
        """
        _images.slide(self, window_shape, strides, channel_axis, padding=padding, as_chunks=as_chunks)
        return self

    # --- addresses and bytes

    def load_uri_to_blob(self, **limits: Unpack[Limits]) -> Self:
        """Set `blob` to the bytes at `uri`, and `mime_type` if there is none and the uri tells it."""
        _uris.load_blob(self, limits)
        return self

    def load_uri_to_text(self, charset: str = "utf-8", **limits: Unpack[Limits]) -> Self:
        """Set `text` to the text at `uri`."""
        _uris.load_text(self, charset, limits)
        return self

    def convert_uri_to_datauri(
        self,
        charset: str = "utf-8",
        base64: bool = False,  # noqa: FBT001, FBT002
        **limits: Unpack[Limits],
    ) -> Self:
        """Put the content at `uri` into `uri` itself. The charset is told for text alone."""
        _uris.uri_to_data_uri(self, charset, limits, base64=base64)
        return self

    def convert_text_to_datauri(self, charset: str = "utf-8", base64: bool = False) -> Self:  # noqa: FBT001, FBT002
        """Set `uri` to a data URI of `text`."""
        _uris.text_to_data_uri(self, charset, base64=base64)
        return self

    def convert_blob_to_datauri(self, charset: str = "utf-8", base64: bool = False) -> Self:  # noqa: FBT001, FBT002
        """Set `uri` to a data URI of `blob`, whose `mime_type` must be known."""
        _uris.blob_to_data_uri(self, charset, base64=base64)
        return self

    def convert_content_to_datauri(self) -> Self:
        """Set `uri` to a data URI of `text` or `blob`."""
        _uris.content_to_data_uri(self)
        return self

    def save_uri_to_file(self, file: Target, **limits: Unpack[Limits]) -> Self:
        """Write the bytes at `uri` to a file."""
        _uris.save_uri(self, file, limits)
        return self

    def save_blob_to_file(self, file: Target) -> Self:
        """Write `blob` to a file."""
        _uris.save_blob(self, file)
        return self

    def convert_blob_to_tensor(self, dtype: Any = None, count: int = -1, offset: int = 0) -> Self:
        """Set `tensor` to the numbers in `blob`: so many (-1 for all) from an offset in bytes; float64 unless told."""
        _uris.blob_to_tensor(self, dtype, count, offset)
        return self

    def convert_tensor_to_blob(self) -> Self:
        """Set `blob` to the numbers of `tensor`."""
        _uris.tensor_to_blob(self)
        return self

    # --- words

    def get_vocabulary(self, text_attrs: Sequence[str] = ("text",)) -> dict[str, int]:
        """How often each word occurs in the fields."""
        return _words.vocabulary(self, text_attrs)

    def convert_text_to_tensor(
        self, vocab: Mapping[str, int], max_length: int | None = None, dtype: Any = "int64"
    ) -> Self:
        """Set `tensor` to the numbers that the words of `text` have in the vocabulary, from 2 on.

        A word that is not in it is 1. To have `max_length` numbers, words at the front are dropped or zeros put there.
        """
        _words.text_to_tensor(self, vocab, max_length, dtype)
        return self

    def convert_tensor_to_text(self, vocab: Mapping[str, int] | Mapping[int, str], delimiter: str = " ") -> Self:
        """Set `text` to the words whose numbers are in `tensor`."""
        _words.tensor_to_text(self, vocab, delimiter)
        return self


_Documents = DocumentArray[Document]

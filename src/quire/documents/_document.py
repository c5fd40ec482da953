"""`Document`: the general-purpose document for data without a schema."""

from __future__ import annotations

import copy
import re
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import Self, Unpack

from quire._equality import equal_values
from quire._extra_fields import explain_unknown_fields
from quire.array import DocumentArray
from quire.document import BaseDocument
from quire.documents import _pixels
from quire.documents._document_array import NestedDocumentArray
from quire.errors import DecodeError, DocumentTypeError, EncodeError, PathError, TensorError, UriError, did_you_mean
from quire.files import ReadLimits, Target, display_uri, guess_type, open_target, read_uri, scheme_of, to_data_uri
from quire.media import decode_frames, encode_pillow, pillow_format, save_image, to_image_bytes
from quire.schema import find_model, first_keys, written_names
from quire.tensors import Tensor, describe, framework_of
from quire.typing import AnyTensor

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

ContentType = Literal["text", "tensor", "blob"]
_CONTENT_TYPES: tuple[ContentType, ...] = ("text", "tensor", "blob")

_MISSING = {  # the error for an empty field, and how to fill it
    "uri": (UriError, "Set `uri` to a path or an address"),
    "blob": (DecodeError, "Set `blob`, or fill it by load_uri_to_blob()"),
    "text": (EncodeError, "Set `text`, or fill it by load_uri_to_text()"),
    "tensor": (TensorError, "Set `tensor`, or fill it by load_uri_to_image_tensor()"),
}

_WORD_SEPARATOR = re.compile(r"[\s!-&(-/:-@\[-`{-~]+")  # whitespace, and ASCII punctuation except the apostrophe
_PADDING, _UNKNOWN = 0, 1


class YieldingProperty(property):
    """A property that yields to a field of the same name in a subclass.

    A plain property is a data descriptor, so it would silently hide the value of such a field.
    """

    name: str

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self.name = name

    def __get__(self, document: Any, owner: type[Any] | None = None, /) -> Any:
        if document is not None and self.name in type(document).model_fields:
            return document.__dict__[self.name]
        return super().__get__(document, owner)

    def __set__(self, document: Any, value: Any, /) -> None:
        if self.name in type(document).model_fields:
            document.__pydantic_validator__.validate_assignment(document, self.name, value)
        else:
            super().__set__(document, value)


def _content_field(value: object) -> ContentType:
    return "text" if isinstance(value, str) else "blob" if isinstance(value, (bytes, bytearray)) else "tensor"


def _read_fields(document_type: type[Document], values: object) -> object:
    """Move `content` to the field of its type, and values that are not fields into `tags`.

    A subclass that sets `extra` in its `model_config` follows that instead.
    """
    if not isinstance(values, dict) or values.keys() <= document_type.model_fields.keys():
        return values
    if document_type.__quire_extra__ is not None:
        return values
    values = dict(values)
    known = _input_keys(document_type)
    if "content" in values and "content" not in known:
        name = _content_field(values["content"])
        conflicts = [kind for kind in _CONTENT_TYPES if values.get(kind) is not None]
        if conflicts:
            raise PydanticCustomError("content", "content= and {name}= exclude each other", {"name": conflicts[0]})
        content = values.pop("content")
        if content is not None:
            values[name] = content
    unknown = {key: value for key, value in values.items() if key not in known and not str(key).endswith("\0")}
    tags = values.get("tags") or {}
    if unknown and isinstance(tags, Mapping):
        values = {key: value for key, value in values.items() if key not in unknown}
        values["tags"] = {**tags, **unknown}
    return values


def _input_keys(document_type: type[Document]) -> set[str]:
    """Return the keys of input that are fields or computed fields of a class, by their names and aliases."""
    notes = document_type.document_schema().notes
    if "input keys" not in notes:
        fields = document_type.model_fields
        keys = {*written_names(document_type), *(key for info in fields.values() for key in first_keys(info))}
        notes["input keys"] = keys
    return notes["input keys"]  # type: ignore[no-any-return]


class _Chunks:
    """The field `chunks`, read in a way that the array knows its document: what is added gets its `parent_id`."""

    def __get__(self, document: Any, owner: type[Any] | None = None) -> Any:
        if document is None:
            raise AttributeError("chunks")  # as for every field of a class
        try:
            chunks = document.__dict__["chunks"]
        except KeyError:
            raise AttributeError("chunks") from None
        if isinstance(chunks, NestedDocumentArray):
            object.__setattr__(chunks, "_owner", weakref.ref(document))
        return chunks

    def __set__(self, document: Any, value: Any) -> None:  # makes it precede the value in `__dict__`
        raise AssertionError("pydantic sets fields")


def _no_documents() -> DocumentArray[Document]:
    return _Documents._trusted([])


class Document(BaseDocument):
    """A document for any content: text, a tensor, bytes, tags, and nested documents (`chunks` and `matches`).

    `content=` sets `text`, `tensor` or `blob`, by its type. Keywords that are not fields are stored in `tags`. Chunks
    get the id of the document as their `parent_id`. A document or a mapping that is passed first provides the fields
    that are not passed by name.

    The methods that load, convert, set and save change the document and return it, so calls can be chained:
    `d.load_uri_to_image_tensor().set_image_tensor_normalization()`. Methods that read `uri` accept `timeout` (60
    seconds) and `max_bytes` (1 GiB). `channel_axis` is the axis of the colour channels, by default the last one. A
    tensor keeps its framework.
    """

    __quire_any_tensor__: ClassVar[bool] = True  # `tensor` accepts any tensor, so image methods skip validation

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

    __quire_collects__: ClassVar[bool] = True
    __quire_array__: ClassVar[Any] = NestedDocumentArray

    if TYPE_CHECKING:

        def __init__(self, source: Document | Mapping[str, Any] | None = None, /, **fields: Any) -> None: ...

    else:

        def __init__(self, source: Document | Mapping[str, Any] | None = None, /, **fields: Any) -> None:
            """Make a document of the values of fields, optionally with those of another document or of a mapping."""
            __tracebackhide__ = True
            if isinstance(source, BaseDocument):
                shared = copy.deepcopy(source) if fields.pop("copy", False) else source
                names = source.__pydantic_fields_set__ | {"id"}
                fields = {**{name: value for name, value in shared.__dict__.items() if name in names}, **fields}
            elif isinstance(source, Mapping):
                fields = {**source, **fields}
            elif source is not None:
                raise DocumentTypeError(
                    f"{type(self).__name__} takes a document or a mapping without a name, got {describe(source)}. "
                    "Name the field: text=, tensor=, blob= or content=."
                )
            if fields.get("uri") is not None and "mime_type" not in fields:
                fields["mime_type"] = guess_type(str(fields["uri"]))
            try:  # not by `super().__init__`: pydantic looks for the types of a local class in the caller's frame
                self.__pydantic_validator__.validate_python(fields, self_instance=self)
            except ValidationError as error:
                raise explain_unknown_fields(type(self), error) from None
            self._adopt_chunks()

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "chunks":
                self._adopt_chunks()

        __init__.__pydantic_base_init__ = True  # pydantic then validates nested documents without calling it

    def _adopt_chunks(self) -> None:
        chunks = self.chunks
        if isinstance(chunks, NestedDocumentArray):
            chunks._adopt(chunks._documents)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = super().__get_pydantic_core_schema__(source, handler)
        model = find_model(handler.resolve_ref_schema(schema), cls)
        if model is not None:  # inside of the model, to which the fields `chunks` and `matches` refer
            read = partial(_read_fields, cls)
            model["schema"] = core_schema.no_info_before_validator_function(read, model["schema"])
        return schema

    # --- fields

    @property
    def non_empty_fields(self) -> tuple[str, ...]:
        """The names of the fields that have a value other than their default, without the `id` in front."""
        return tuple(name for name in type(self).model_fields if name != "id" and not self._is_default(name))

    def pop(self, *fields: str) -> None:
        """Set fields to their defaults."""
        known = type(self).model_fields
        for name in fields:
            if name not in known:
                raise PathError(f"{type(self).__name__} has no field {name!r}. {did_you_mean(name, known)}")
            if name != "id":
                self.__dict__[name] = known[name].get_default(call_default_factory=True)
                self.__pydantic_fields_set__.discard(name)

    def clear(self) -> None:
        """Set all fields except the `id` to their defaults."""
        self.pop(*type(self).model_fields)

    def _is_default(self, name: str) -> bool:
        default = type(self).model_fields[name].get_default(call_default_factory=True)
        return equal_values(self.__dict__[name], default)

    # --- content

    def _content_type(self) -> ContentType | None:
        return next((name for name in _CONTENT_TYPES if getattr(self, name) is not None), None)

    def _get_content(self) -> Any:
        name = self._content_type()
        return None if name is None else getattr(self, name)

    def _set_content(self, value: Any) -> None:
        kind = _content_field(value)
        setattr(self, kind, value)  # first, so that an invalid value leaves the document unchanged
        for name in _CONTENT_TYPES:
            if name != kind:
                setattr(self, name, None)

    content = YieldingProperty(_get_content, _set_content)
    """The first of `text`, `tensor` and `blob` that is set. Setting it clears the other two."""

    content_type = YieldingProperty(_content_type)
    """The field that `content` returns: 'text', 'tensor' or 'blob'; None if all three are empty."""

    # --- images

    def load_uri_to_image_tensor(
        self, width: int | None = None, height: int | None = None, channel_axis: int = -1, **limits: Unpack[ReadLimits]
    ) -> Self:
        """Set `tensor` to the image at `uri`: uint8, RGB, resized if `width` or `height` is given.

        If the image has several frames, `tensor` is the first one, and every frame is appended to `chunks`.
        """
        uri = self._require("uri")
        return self._set_frames(decode_frames(read_uri(uri, **limits), uri, width, height), channel_axis)

    def convert_blob_to_image_tensor(
        self, width: int | None = None, height: int | None = None, channel_axis: int = -1
    ) -> Self:
        """Set `tensor` to the encoded image in `blob`, as `load_uri_to_image_tensor` does."""
        blob = self._require("blob")
        return self._set_frames(decode_frames(blob, f"the blob of {self._label()}", width, height), channel_axis)

    def _set_frames(self, frames: Sequence[NDArray[Any]], channel_axis: int) -> Self:
        if channel_axis != -1:
            frames = [_pixels.move_axis(frame, -1, channel_axis) for frame in frames]
        self._set_tensor(frames[0])
        if len(frames) > 1:
            self.chunks.extend({"tensor": frame, "parent_id": self.id} for frame in frames)
        return self

    def convert_image_tensor_to_blob(self, channel_axis: int = -1, image_format: str = "png") -> Self:
        """Set `blob` to the image in `tensor`, encoded as 'png', 'jpeg' or another format that Pillow writes."""
        self.blob = to_image_bytes(self._tensor_as_numpy(), image_format, channel_axis=channel_axis)
        return self

    def convert_image_tensor_to_uri(self, channel_axis: int = -1, image_format: str = "png") -> Self:
        """Set `uri` to a data URI of the image in `tensor`."""
        content = to_image_bytes(self._tensor_as_numpy(), image_format, channel_axis=channel_axis)
        self.uri = to_data_uri(content, f"image/{pillow_format(image_format).lower()}", base64=True)
        return self

    def load_pil_image_to_datauri(self, image: Any) -> Self:
        """Set `uri` to a data URI of a Pillow image, encoded as PNG."""
        self.uri = to_data_uri(encode_pillow(image, "png"), "image/png", base64=True)
        return self

    def save_image_tensor_to_file(self, file: Target, channel_axis: int = -1, image_format: str | None = None) -> Self:
        """Write the image in `tensor` to a file.

        The format is `image_format`, or else the suffix of the file name, or else PNG.
        """
        save_image(self._tensor_as_numpy(), file, image_format=image_format, channel_axis=channel_axis)
        return self

    def set_image_tensor_normalization(
        self,
        channel_axis: int = -1,
        img_mean: Sequence[float] = IMAGENET_MEAN,
        img_std: Sequence[float] = IMAGENET_STD,
    ) -> Self:
        """Convert a uint8 image to float32: (pixel / 255 - mean) / std per channel, by default those of ImageNet."""
        return self._transform_tensor(_pixels.normalize, channel_axis, img_mean, img_std)

    def set_image_tensor_inv_normalization(
        self,
        channel_axis: int = -1,
        img_mean: Sequence[float] = IMAGENET_MEAN,
        img_std: Sequence[float] = IMAGENET_STD,
    ) -> Self:
        """Revert `set_image_tensor_normalization`: uint8 again, rounded."""
        return self._transform_tensor(_pixels.denormalize, channel_axis, img_mean, img_std)

    def set_image_tensor_channel_axis(self, original_channel_axis: int, new_channel_axis: int) -> Self:
        """Move the channels of the image to another axis: (-1, 0) for torch."""
        return self._transform_tensor(_pixels.move_axis, original_channel_axis, new_channel_axis)

    def set_image_tensor_shape(self, shape: tuple[int, int], channel_axis: int = -1) -> Self:
        """Resize the image to (rows, columns) by nearest-neighbour interpolation."""
        return self._transform_tensor(_pixels.resize, *shape, channel_axis)

    def set_image_tensor_resample(self, ratio: float, channel_axis: int = -1) -> Self:
        """Scale the rows and columns of the image by `ratio`, by nearest-neighbour interpolation."""
        return self._transform_tensor(_pixels.resample, ratio, channel_axis)

    def convert_image_tensor_to_sliding_windows(
        self,
        window_shape: tuple[int, int] = (64, 64),
        strides: tuple[int, int] | None = None,
        padding: bool = False,  # noqa: FBT001, FBT002 - as in DocArray
        channel_axis: int = -1,
        as_chunks: bool = False,  # noqa: FBT001, FBT002
    ) -> Self:
        """Cut the image into windows of (rows, columns), adjacent or `strides` apart.

        Only windows that fit into the image are cut; with `padding`, all windows that start in it, filled with zeros
        past its edges. `tensor` gets a new first axis of windows. With `as_chunks` the windows are appended to
        `chunks` instead, each with its `location`: (row, column, rows, columns).
        """
        height, width = window_shape
        row_step, column_step = strides or window_shape
        windows, positions = _pixels.sliding_windows(
            self._tensor_as_numpy(), (height, width), (row_step, column_step), channel_axis, padding=padding
        )
        if not as_chunks:
            self._set_tensor(_convert_like(self.tensor, windows))
            return self
        top, left = (self.location or [0, 0])[:2]
        self.chunks.extend(
            {
                "tensor": _convert_like(self.tensor, window),
                "location": [top + row, left + column, height, width],
                "parent_id": self.id,
            }
            for window, (row, column) in zip(windows, positions, strict=True)
        )
        return self

    # --- URIs and bytes

    def load_uri_to_blob(self, **limits: Unpack[ReadLimits]) -> Self:
        """Set `blob` to the bytes at `uri`, and `mime_type` if it is empty and the URI implies it."""
        uri = self._require("uri")
        self.blob = read_uri(uri, **limits)
        self.mime_type = self.mime_type or guess_type(uri)
        return self

    def load_uri_to_text(self, charset: str = "utf-8", **limits: Unpack[ReadLimits]) -> Self:
        """Set `text` to the text at `uri`."""
        uri = self._require("uri")
        content = read_uri(uri, **limits)
        try:
            self.text = content.decode(charset)
        except (UnicodeDecodeError, LookupError) as error:
            raise DecodeError(
                f"{display_uri(uri)}: not text in {charset} ({error}). Pass the right charset."
            ) from error
        return self

    def convert_uri_to_datauri(
        self,
        charset: str = "utf-8",
        base64: bool = False,  # noqa: FBT001, FBT002
        **limits: Unpack[ReadLimits],
    ) -> Self:
        """Replace `uri` by a data URI of the content at it; a data URI stays. The charset is stated for text only."""
        uri = self._require("uri")
        if scheme_of(uri) != "data":
            mime_type = self.mime_type or guess_type(uri) or "application/octet-stream"
            self.uri = _data_uri(read_uri(uri, **limits), mime_type, charset, base64=base64)
        return self

    def convert_text_to_datauri(self, charset: str = "utf-8", base64: bool = False) -> Self:  # noqa: FBT001, FBT002
        """Set `uri` to a data URI of `text`."""
        try:
            content = self._require("text").encode(charset)
        except (UnicodeEncodeError, LookupError) as error:
            raise EncodeError(f"the text of {self._label()} cannot be written in {charset} ({error}).") from error
        self.uri = _data_uri(content, self.mime_type or "text/plain", charset, base64=base64)
        return self

    def convert_blob_to_datauri(self, charset: str = "utf-8", base64: bool = False) -> Self:  # noqa: FBT001, FBT002
        """Set `uri` to a data URI of `blob`, which needs a `mime_type`."""
        blob = self._require("blob")
        if self.mime_type is None:
            raise EncodeError(f"{self._label()} has no mime_type, which a data URI states. Set it: 'image/png'.")
        self.uri = _data_uri(blob, self.mime_type, charset, base64=base64)
        return self

    def convert_content_to_datauri(self) -> Self:
        """Set `uri` to a data URI of `text` or `blob`."""
        kind = self._content_type()
        if kind == "text":
            return self.convert_text_to_datauri()
        if kind == "blob":
            return self.convert_blob_to_datauri(base64=True)
        content = "nothing" if kind is None else "a tensor"
        raise EncodeError(
            f"{self._label()} holds {content}, and only text or a blob can become a data URI. "
            "For an image use convert_image_tensor_to_uri()."
        )

    def save_uri_to_file(self, file: Target, **limits: Unpack[ReadLimits]) -> Self:
        """Write the bytes at `uri` to a file."""
        content = read_uri(self._require("uri"), **limits)
        with open_target(file) as target:
            target.write(content)
        return self

    def save_blob_to_file(self, file: Target) -> Self:
        """Write `blob` to a file."""
        blob = self._require("blob")
        with open_target(file) as target:
            target.write(blob)
        return self

    def convert_blob_to_tensor(self, dtype: DTypeLike | None = None, count: int = -1, offset: int = 0) -> Self:
        """Set `tensor` to the raw numbers in `blob`.

        `dtype` defaults to float64, `count` is the number of items (-1: all), `offset` is in bytes.
        """
        try:
            array = np.frombuffer(self._require("blob"), dtype=dtype or np.float64, count=count, offset=offset)
        except (ValueError, TypeError) as error:
            raise DecodeError(
                f"the blob of {self._label()} does not hold numbers of {dtype or 'float64'}: {error}."
            ) from error
        self.tensor = array.copy()  # an array over bytes is read-only
        return self

    def convert_tensor_to_blob(self) -> Self:
        """Set `blob` to the raw numbers of `tensor`, in row-major order."""
        self.blob = self._tensor_as_numpy().tobytes()
        return self

    # --- words

    def get_vocabulary(self, text_attrs: Sequence[str] = ("text",)) -> dict[str, int]:
        """Count how often each word occurs in the fields."""
        return Counter(word for name in text_attrs for word in _split_words(getattr(self, name) or ""))

    def convert_text_to_tensor(
        self, vocab: Mapping[str, int], max_length: int | None = None, dtype: DTypeLike = "int64"
    ) -> Self:
        """Set `tensor` to the vocabulary numbers of the words of `text`, which start at 2.

        Unknown words become 1. With `max_length`, the numbers are truncated or padded with 0 at the front.
        """
        numbers = [vocab.get(word, _UNKNOWN) for word in _split_words(self._require("text"))]
        if max_length is not None:
            numbers = [_PADDING] * (max_length - len(numbers)) + numbers[max(0, len(numbers) - max_length) :]
        self.tensor = np.array(numbers, dtype=dtype)
        return self

    def convert_tensor_to_text(self, vocab: Mapping[str, int] | Mapping[int, str], delimiter: str = " ") -> Self:
        """Set `text` to the words whose vocabulary numbers are in `tensor`.

        Padding is left out, and unknown numbers become '<UNK>'.
        """
        names = {
            key if isinstance(key, int) else name: name if isinstance(key, int) else key for key, name in vocab.items()
        }
        numbers = (int(number) for number in self._tensor_as_numpy().ravel())
        self.text = delimiter.join(str(names.get(number, "<UNK>")) for number in numbers if number != _PADDING)
        return self

    # --- access to the fields

    def _label(self) -> str:
        return f"{type(self).__name__} {self.id}"

    def _require(self, name: Literal["uri", "blob", "text", "tensor"]) -> Any:
        """Return the value of a field; if it is empty, raise an error that says how to fill it."""
        value = getattr(self, name)
        if value is None:
            error_type, remedy = _MISSING[name]
            raise error_type(f"{self._label()} has no {name}. {remedy} first.")
        return value

    def _tensor_as_numpy(self) -> NDArray[Any]:
        """Return `tensor` as a numpy array; raise if the conversion would lose something."""
        tensor = self._require("tensor")
        framework = framework_of(tensor)
        assert framework is not None
        reason = framework.refusal(tensor)
        if not reason and framework.is_sparse(tensor):
            reason = f"its layout is {framework.layout(tensor)}"
        if getattr(tensor, "requires_grad", False):
            reason = "it is part of a gradient graph (use .detach())"
        if reason:
            raise TensorError(f"the tensor of {self._label()} cannot be converted to numpy: {reason}.")
        return framework.to_numpy(tensor)

    def _set_tensor(self, tensor: Tensor) -> None:
        # `Document` itself accepts every numpy array, so validation is skipped. A subclass may redefine `tensor`,
        # and `__quire_any_tensor__` is not in its own namespace.
        if type(tensor) is np.ndarray and "__quire_any_tensor__" in vars(type(self)):
            self.__dict__["tensor"] = tensor
            self.__pydantic_fields_set__.add("tensor")
        else:
            self.tensor = tensor

    def _transform_tensor(self, function: Callable[..., NDArray[Any]], *arguments: Any) -> Self:
        """Apply a numpy function to `tensor` and keep its framework and device."""
        self._set_tensor(_convert_like(self.tensor, function(self._tensor_as_numpy(), *arguments)))
        return self


Document.chunks = _Chunks()  # type: ignore[assignment]
_Documents = DocumentArray[Document]


def _convert_like(tensor: Tensor, array: NDArray[Any]) -> Tensor:
    """Convert an array to the framework and the device of a tensor."""
    framework = framework_of(tensor)
    assert framework is not None
    converted = framework.from_numpy(array)
    device = framework.device(tensor)
    return converted if framework.device(converted) == device else framework.to_device(converted, device)


def _data_uri(content: bytes, mime_type: str, charset: str, *, base64: bool) -> str:
    is_text = mime_type.startswith("text/")
    return to_data_uri(content, mime_type, charset=charset if is_text else None, base64=base64)


def _split_words(text: str) -> list[str]:
    return [word for word in _WORD_SEPARATOR.split(text.lower()) if word]

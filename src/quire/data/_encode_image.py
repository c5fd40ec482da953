"""`encode_image`: the images of a tensor column become encoded bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from quire.columns import Column, ObjectColumn, TensorColumn
from quire.data._media_steps import MediaStep, StepContext, check_choices, run_threads
from quire.errors import CodecError, EncodeError, OptionError, SchemaError, reject_unknown_options
from quire.media import as_numpy, encode_row, pillow_format
from quire.schema import Field, FieldKind


@reject_unknown_options
def encode_image(
    image_format: str = "jpeg",
    *,
    quality: int | None = None,
    layout: Literal["CHW", "HWC"] = "CHW",
    threads: int | None = None,
) -> EncodeImageStep:
    """Encode a column of images with threads: the reverse of `decode_image`, as a preprocessing step or a function.

    Called with a tensor of images, or a list of them, the step returns a list of bytes.

    image_format: 'jpeg', 'png', 'webp', or another one that Pillow writes. simplejpeg encodes JPEG if it is installed.
    quality: from 1 to 100, for formats that have one; by default that of the encoder.
    layout: 'CHW' if the channels come first, 'HWC' if they come last. Pixels are uint8, of 1, 3 or 4 channels.
    threads: that share the images; by default one for each processor, and one in a worker process.
    """
    return EncodeImageStep(image_format=image_format, quality=quality, layout=layout, threads=threads)


@dataclass(frozen=True, kw_only=True)
class EncodeImageStep(MediaStep):
    """The step that `encode_image` returns."""

    image_format: str = "jpeg"
    quality: int | None = None
    layout: Literal["CHW", "HWC"] = "CHW"

    __name__: ClassVar[str] = "encode_image"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices("encode_image", layout=(self.layout, ("CHW", "HWC")))
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise OptionError(f"encode_image: quality={self.quality} is from 1 to 100.")
        pillow_format(self.image_format)  # raises an error for an unknown format

    def check_field(self, field: Field, path: str) -> None:
        """Raise an error for a field that holds no tensors."""
        if field.kind not in (FieldKind.TENSOR, FieldKind.ANY, FieldKind.UNION):
            raise SchemaError(f"{path}: encode_image encodes tensors, and the field is {field}.")

    def __call__(self, images: Any) -> list[bytes | None]:
        """Encode images: a tensor of them, or a list."""
        return self._encode(list(images), lambda number: f"encode_image: value {number}")

    def run(self, column: Column, context: StepContext) -> Column:
        """Encode a column of images."""
        if isinstance(column, TensorColumn) and column.shapes is None:
            images = column.mask_values(list(as_numpy(column.data)))
        else:
            images = column.values()
        contents = self._encode(
            images, lambda number: f"{context.path}: {context.describe_row(int(context.owners[number]))}"
        )
        return ObjectColumn(Field(column.field.name, FieldKind.BYTES, bytes, nullable=column.field.nullable), contents)

    def _encode(self, images: list[Any], describe: Any) -> list[bytes | None]:
        contents: list[bytes | None] = [None] * len(images)

        def encode(number: int) -> None:
            pixels = as_numpy(images[number])
            if self.layout == "CHW" and pixels.ndim == 3:
                pixels = np.moveaxis(pixels, 0, -1)
            try:
                contents[number] = encode_row(pixels, self.image_format, self.quality)
            except CodecError as error:
                raise EncodeError(f"{describe(number)}: {error}") from error

        present = [number for number, image in enumerate(images) if image is not None]
        errors = run_threads(encode, present, self.count_threads(), stops=True)
        if errors:
            raise errors[min(errors)]
        return contents

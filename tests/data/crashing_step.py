"""A step that crashes as a decoder library does, in a module that child processes import fast."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import Self

from quire.data._media_steps import DecodeStep
from quire.errors import DecodeError

CRASHES = {b"segfault": signal.SIGSEGV, b"abort": signal.SIGABRT}


@dataclass(frozen=True, kw_only=True)
class CrashingStep(DecodeStep):
    """Decodes a number, and crashes as a decoder library does for some bytes."""

    __name__: ClassVar[str] = "decode_number"
    draws: ClassVar[int] = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (2,)

    @property
    def dtype_name(self) -> str:
        return "float16"

    def evaluation(self) -> Self:
        return self

    def decode_row(self, content: Any, row: Any, where: str, _: Sequence[float] | None) -> int | None:
        content = bytes(content)
        if content in CRASHES:
            signal.signal(CRASHES[content], signal.SIG_DFL)
            os.kill(os.getpid(), CRASHES[content])
        if content == b"exit":
            os._exit(3)
        if content == b"print":
            os.write(1, b"noise of a library")
            content = b"7"
        if content == b"fault":
            raise KeyError(content)
        if not content.isdigit():
            raise DecodeError(f"{where}: no number")
        row[:] = int(content), os.environ["PARENT"] != str(os.getpid())
        return None

"""The names of DocArray up to 0.21: `from quire.compat import Document, DocumentArray`.

`DocumentArray` is `quire.DocumentArray[Document]`, so an array without a type is one of `Document`s, and its keys are
also ids, traversals (`'@c,m'`) and pairs of rows and attributes. See the page about migrating from DocArray 0.21.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.documents import Document

if TYPE_CHECKING:
    from quire.documents import NestedDocumentArray as DocumentArray
else:
    from quire.array import DocumentArray as _DocumentArray

    DocumentArray = _DocumentArray[Document]

__all__ = ["Document", "DocumentArray"]

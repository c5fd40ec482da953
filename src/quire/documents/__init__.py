"""Ready-made documents."""

from quire.documents._document import Document
from quire.documents._image import Image
from quire.documents._text import Text

__all__ = ["Document", "Image", "Text"]

"""Ready-made documents."""

from quire.documents._document import Document
from quire.documents._from_files import documents_of_files
from quire.documents._image import Image
from quire.documents._text import Text

__all__ = ["Document", "Image", "Text", "documents_of_files"]

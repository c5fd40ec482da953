"""Ready-made documents."""

from quire.documents._audio import Audio
from quire.documents._document import Document
from quire.documents._from_files import documents_of_files
from quire.documents._image import Image
from quire.documents._mesh import Mesh3D, PointCloud3D
from quire.documents._text import Text
from quire.documents._video import Video

__all__ = ["Audio", "Document", "Image", "Mesh3D", "PointCloud3D", "Text", "Video", "documents_of_files"]

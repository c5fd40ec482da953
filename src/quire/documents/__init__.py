"""Predefined documents: one class per modality, and the general-purpose `Document`."""

from quire.documents._document import Document
from quire.documents._from_files import address_field, content_field, documents_of_files
from quire.documents._modalities import Audio, Image, Mesh3D, PointCloud3D, Text, Video

__all__ = [
    "Audio",
    "Document",
    "Image",
    "Mesh3D",
    "PointCloud3D",
    "Text",
    "Video",
    "address_field",
    "content_field",
    "documents_of_files",
]

"""Predefined documents: one class per modality, and the general-purpose `Document`."""

from quire.documents._document import Document
from quire.documents._document_array import NestedDocumentArray
from quire.documents._from_files import address_field, content_field, documents_of_files
from quire.documents._modalities import AnyDocument, Audio, Image, Mesh3D, PointCloud3D, Text, Video

__all__ = [
    "AnyDocument",
    "Audio",
    "Document",
    "Image",
    "Mesh3D",
    "NestedDocumentArray",
    "PointCloud3D",
    "Text",
    "Video",
    "address_field",
    "content_field",
    "documents_of_files",
]

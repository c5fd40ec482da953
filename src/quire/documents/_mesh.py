"""Meshes and clouds of points."""

from __future__ import annotations

from quire.document import BaseDocument
from quire.typing import AnyTensor, Mesh3DBytes, Mesh3DUrl, PointCloud3DBytes, PointCloud3DUrl


class Mesh3D(BaseDocument, main=("url", "bytes_")):
    """A mesh as an address, as vertices and faces, or as encoded bytes, and its embedding.

    `vertices` are of shape (n, 3), and `faces` of shape (m, 3): the numbers of the vertices of each triangle. A field
    typed `Mesh3D` takes an address or bytes.
    """

    url: Mesh3DUrl | None = None
    vertices: AnyTensor | None = None
    faces: AnyTensor | None = None
    embedding: AnyTensor | None = None
    bytes_: Mesh3DBytes | None = None


class PointCloud3D(BaseDocument, main=("url", "points", "bytes_")):
    """A cloud of points as an address, a tensor of shape (n, 3) or encoded bytes, and its embedding.

    `colors` are of shape (n, 3) or (n, 4). A field typed `PointCloud3D` takes an address, a tensor of points or bytes.
    """

    url: PointCloud3DUrl | None = None
    points: AnyTensor | None = None
    colors: AnyTensor | None = None
    embedding: AnyTensor | None = None
    bytes_: PointCloud3DBytes | None = None

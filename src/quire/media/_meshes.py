"""Decode and encode meshes and point clouds with trimesh."""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire._optional import require
from quire.errors import DecodeError, EncodeError, OptionError, did_you_mean
from quire.files import Target, display_uri
from quire.media._common import as_numpy, limit_error, suffix_of, write_bytes

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray
    from trimesh.parent import Geometry

MAX_POINTS = 1 << 26
"""Default limit on the points of a mesh or a point cloud, and on its faces."""

_READABLE = ("glb", "obj", "off", "ply", "stl", "xyz")
"""Self-contained formats: others refer to further files, or are compressed."""
_WRITABLE = ("glb", "obj", "off", "ply", "stl")
_TRIMESH_ERRORS = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    NameError,  # trimesh reads variables that a damaged glTF left unassigned
    OSError,
    EOFError,
    MemoryError,
    NotImplementedError,
    RecursionError,
    struct.error,
)


class Mesh(NamedTuple):
    """Vertices of shape (n, 3), and faces of shape (m, 3): the vertex indices of each triangle."""

    vertices: Any
    faces: Any


class Points(NamedTuple):
    """Points of shape (n, 3), and their colors of shape (n, 4), uint8, or None."""

    points: Any
    colors: Any = None


class _Part(NamedTuple):
    """One geometry of a file, and its 4 x 4 transform in the scene (None: identity)."""

    geometry: Any
    matrix: Any

    def points(self) -> NDArray[np.float64]:
        points = np.array(self.geometry.vertices, np.float64).reshape(-1, 3)
        return points if self.matrix is None else points @ self.matrix[:3, :3].T + self.matrix[:3, 3]

    def colors(self) -> NDArray[np.uint8] | None:
        visual = getattr(self.geometry, "visual", None)
        if visual is None or getattr(visual, "kind", None) != "vertex":
            return None
        colors: NDArray[np.uint8] = np.array(visual.vertex_colors, np.uint8).reshape(-1, 4)
        return colors if len(colors) == len(self.geometry.vertices) else None


def decode_mesh(
    content: bytes, where: str = "the bytes", *, file_type: str | None = None, max_points: int = MAX_POINTS
) -> Mesh:
    """Decode a mesh; the meshes of a scene are merged into one. Vertices are float64, faces int64.

    `file_type` is detected from the content by default. More than `max_points` vertices or faces are an error.
    """
    parts = [part for part in _load_parts(content, where, file_type, max_points) if hasattr(part.geometry, "faces")]
    if not parts:
        raise DecodeError(f"{display_uri(where)}: there are no faces in it. Read points alone as a point cloud.")
    vertices, faces, start = [], [], 0
    for part in parts:
        points, corners = part.points(), np.asarray(part.geometry.faces, np.int64).reshape(-1, 3)
        # Each part by itself: after merging, a missing vertex of one part would be a vertex of another.
        if corners.size and not 0 <= corners.min() <= corners.max() < len(points):
            raise DecodeError(f"{display_uri(where)}: a face refers to a missing vertex.")
        vertices.append(points)
        faces.append(corners + start)
        start += len(points)
    return Mesh(np.concatenate(vertices), np.concatenate(faces))


def decode_points(
    content: bytes,
    where: str = "the bytes",
    *,
    samples: int | None = None,
    seed: int | None = None,
    file_type: str | None = None,
    max_points: int = MAX_POINTS,
) -> Points:
    """Decode the points of a point cloud or of a mesh, with their colors.

    `samples` draws n points from the faces, weighted by area; from a point cloud, which has no faces, n of its points.
    """
    if samples is not None and not 0 < samples <= max_points:
        raise OptionError(f"samples is between 1 and max_points={max_points:,}, got {samples:,}.")
    parts = _load_parts(content, where, file_type, max_points)
    if not parts:
        raise DecodeError(f"{display_uri(where)}: there are no points in it.")
    generator = np.random.default_rng(seed)
    if samples is not None and all(hasattr(part.geometry, "faces") for part in parts):
        mesh = decode_mesh(content, where, file_type=file_type, max_points=max_points)
        return Points(_sample_faces(mesh, samples, generator, where))
    points = np.concatenate([part.points() for part in parts])
    part_colors = [part.colors() for part in parts]
    colors = None
    if all(part is not None for part in part_colors):
        colors = np.concatenate([part for part in part_colors if part is not None])
    if samples is None:
        return Points(points, colors)
    chosen = generator.choice(len(points), samples, replace=samples > len(points))
    return Points(points[chosen], None if colors is None else colors[chosen])


def encode_mesh(vertices: NDArray[Any], faces: NDArray[Any], file_type: str = "ply") -> bytes:
    """Encode a mesh as 'ply', 'glb', 'obj', 'off' or 'stl'."""
    mesh = _import_trimesh("encoding a mesh").Trimesh(vertices=vertices, faces=faces, process=False)
    return _export(mesh, file_type)


def encode_points(points: NDArray[Any], colors: NDArray[Any] | None = None, file_type: str = "ply") -> bytes:
    """Encode a point cloud."""
    return _export(_import_trimesh("encoding points").PointCloud(points, colors=colors), file_type)


def save_mesh(vertices: object, faces: object, file: Target, *, file_type: str | None = None) -> None:
    """Write a mesh to a file, by default in the format of the file's suffix."""
    write_bytes(file, encode_mesh(as_numpy(vertices), as_numpy(faces), file_type or suffix_of(file, "ply")))


def save_points(points: object, file: Target, *, colors: object = None, file_type: str | None = None) -> None:
    """Write a point cloud to a file, by default in the format of the file's suffix."""
    color_array = None if colors is None else as_numpy(colors)
    write_bytes(file, encode_points(as_numpy(points), color_array, file_type or suffix_of(file, "ply")))


def _export(geometry: Geometry, file_type: str) -> bytes:
    if file_type.lower() not in _WRITABLE:
        near = did_you_mean(file_type, _WRITABLE)
        raise EncodeError(f"{file_type!r} is not a format of meshes that can be written. {near}")
    try:
        content = geometry.export(file_type=file_type.lower())
    except _TRIMESH_ERRORS as error:
        raise EncodeError(f"it cannot be written as {file_type}: {error}.") from error
    return content.encode() if isinstance(content, str) else bytes(content)


def _import_trimesh(needed_for: str) -> ModuleType:
    return require("trimesh", extra="mesh", needed_for=needed_for)


def _load_parts(content: bytes, where: str, file_type: str | None, max_points: int) -> list[_Part]:
    """Load the geometries of a file, and check their number of points.

    A scene may show one geometry many times; each instance counts, because the caller copies it.
    """
    trimesh = _import_trimesh("decoding a mesh")
    kind = (file_type or _detect_type(content)).lower().lstrip(".")
    if kind not in _READABLE:
        raise DecodeError(f"{display_uri(where)}: files of type {kind!r} are not read. {did_you_mean(kind, _READABLE)}")
    try:
        loaded = trimesh.load(io.BytesIO(content), file_type=kind, process=False)
        if hasattr(loaded, "graph"):
            nodes = [loaded.graph[name] for name in loaded.graph.nodes_geometry]
            instances = [_Part(loaded.geometry[name], matrix) for matrix, name in nodes]
            parts = [part for part in instances if hasattr(part.geometry, "vertices")]
        else:
            parts = [_Part(loaded, None)]
        total = sum(max(len(part.geometry.vertices), len(getattr(part.geometry, "faces", ()))) for part in parts)
    except _TRIMESH_ERRORS as error:
        raise DecodeError(f"{display_uri(where)}: the bytes are not {kind} that trimesh can read ({error}).") from error
    if total > max_points:
        raise limit_error(where, f"there are {total:,} points or faces", "max_points", max_points)
    return parts


def _detect_type(content: bytes) -> str:
    """Return the format that the first bytes imply."""
    head = bytes(content[:512]).lstrip()
    if head.startswith(b"glTF"):
        return "glb"
    if head.startswith(b"ply"):
        return "ply"
    if head.startswith((b"OFF", b"COFF")):
        return "off"
    # Binary STL has no magic number: an 80-byte header, the number of triangles, and 50 bytes for each.
    if len(content) >= 84 and len(content) == 84 + 50 * int.from_bytes(content[80:84], "little"):
        return "stl"
    return "stl" if head.startswith(b"solid") else "obj"


def _sample_faces(mesh: Mesh, samples: int, generator: np.random.Generator, where: str) -> NDArray[np.float64]:
    """Draw points uniformly from the surface: a face by its area, then a position on it.

    Two uniform numbers u and v give a point of the parallelogram of the two edges. Half of them fall outside of the
    triangle (u + v > 1), and are reflected into it.
    """
    corners = mesh.vertices[mesh.faces]
    first, second = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    areas = np.linalg.norm(np.cross(first, second), axis=1)
    total = areas.sum()
    if not np.isfinite(total) or total <= 0:
        raise DecodeError(f"{display_uri(where)}: the faces have no area to draw points from.")
    chosen = generator.choice(len(areas), samples, p=areas / total)
    positions = generator.random((samples, 2, 1))
    outside = positions.sum(axis=1) > 1
    positions[outside[:, 0]] = 1 - positions[outside[:, 0]]
    drawn: NDArray[np.float64] = corners[chosen, 0] + positions[:, 0] * first[chosen] + positions[:, 1] * second[chosen]
    return drawn

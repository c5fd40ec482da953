"""Meshes and clouds of points, by trimesh."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire._optional import require
from quire.errors import DecodeError, EncodeError, OptionError, did_you_mean
from quire.files import shown
from quire.media._limits import MAX_POINTS, too_much

if TYPE_CHECKING:
    from numpy.typing import NDArray

_READ = ("glb", "obj", "off", "ply", "stl", "xyz")
"""The formats that hold all they need: others point to files beside them, or are packed."""
_WRITTEN = ("glb", "obj", "off", "ply", "stl")
_BAD = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    OSError,
    EOFError,
    MemoryError,
    NotImplementedError,
    RecursionError,
    struct.error,
)


class Mesh(NamedTuple):
    """Points of shape (n, 3), and faces of shape (m, 3): the numbers of the points of each triangle."""

    vertices: Any
    faces: Any


class Points(NamedTuple):
    """Points of shape (n, 3), and their colours of shape (n, 4), uint8, if there are any."""

    points: Any
    colors: Any = None


def decode_mesh(
    content: bytes, where: str = "the bytes", *, file_type: str | None = None, max_points: int = MAX_POINTS
) -> Mesh:
    """The triangles of a mesh; those of a scene of several, in one. Vertices are float64, faces int64.

    `file_type` is told by the content unless given. More than `max_points` vertices or faces are an error.
    """
    parts = [part for part in _parts(content, where, file_type, max_points) if hasattr(part[0], "faces")]
    if not parts:
        raise DecodeError(f"{shown(where)}: there are no faces in it. Points alone are read as a cloud of points.")
    vertices = [_moved(geometry.vertices, matrix) for geometry, matrix in parts]
    starts = np.cumsum([0, *map(len, vertices[:-1])])
    faces = [np.asarray(part[0].faces, np.int64) + start for part, start in zip(parts, starts, strict=True)]
    made = Mesh(np.concatenate(vertices), np.concatenate(faces).reshape(-1, 3))
    if made.faces.size and not 0 <= made.faces.min() <= made.faces.max() < len(made.vertices):
        raise DecodeError(f"{shown(where)}: a face has a point that is not there.")
    return made


def decode_points(
    content: bytes,
    where: str = "the bytes",
    *,
    samples: int | None = None,
    seed: int | None = None,
    file_type: str | None = None,
    max_points: int = MAX_POINTS,
) -> Points:
    """The points of a cloud or of a mesh, with their colours. `samples` are drawn from the faces, by their area.

    Of a cloud, which has no faces, that many of its points are drawn.
    """
    if samples is not None and not 0 < samples <= max_points:
        raise OptionError(f"samples is between 1 and max_points={max_points:,}, got {samples:,}.")
    parts = list(_parts(content, where, file_type, max_points))
    if not parts:
        raise DecodeError(f"{shown(where)}: there are no points in it.")
    chance = np.random.default_rng(seed)
    if samples is not None and all(hasattr(geometry, "faces") for geometry, _ in parts):
        mesh = decode_mesh(content, where, file_type=file_type, max_points=max_points)
        return Points(_on_faces(mesh, samples, chance, where))
    points = np.concatenate([_moved(geometry.vertices, matrix) for geometry, matrix in parts])
    colors = _colors([geometry for geometry, _ in parts])
    if samples is None:
        return Points(points, colors)
    chosen = chance.choice(len(points), samples, replace=samples > len(points))
    return Points(points[chosen], None if colors is None else colors[chosen])


def encode_mesh(vertices: NDArray[Any], faces: NDArray[Any], file_type: str = "ply") -> bytes:
    """A mesh as a file: 'ply', 'glb', 'obj', 'off' or 'stl'."""
    mesh = _trimesh("encoding a mesh").Trimesh(vertices=vertices, faces=faces, process=False)
    return _exported(mesh, file_type)


def encode_points(points: NDArray[Any], colors: NDArray[Any] | None = None, file_type: str = "ply") -> bytes:
    """A cloud of points as a file."""
    return _exported(_trimesh("encoding points").PointCloud(points, colors=colors), file_type)


def _exported(geometry: Any, file_type: str) -> bytes:
    if file_type.lower() not in _WRITTEN:
        near = did_you_mean(file_type, _WRITTEN)
        raise EncodeError(f"{file_type!r} is not a format of meshes that is written here. {near}")
    try:
        made = geometry.export(file_type=file_type.lower())
    except _BAD as error:
        raise EncodeError(f"it cannot be written as {file_type}: {error}.") from error
    return made.encode() if isinstance(made, str) else bytes(made)


def _trimesh(needed_for: str) -> Any:
    return require("trimesh", extra="mesh", needed_for=needed_for)


def _parts(content: bytes, where: str, file_type: str | None, max_points: int) -> Iterator[tuple[Any, Any]]:
    """The geometries of a file, each with where it stands (None: where it is); their number of points is checked."""
    trimesh = _trimesh("decoding a mesh")
    kind = (file_type or _sniffed(content)).lower().lstrip(".")
    if kind not in _READ:
        raise DecodeError(f"{shown(where)}: files of type {kind!r} are not read. {did_you_mean(kind, _READ)}")
    try:
        found = trimesh.load(io.BytesIO(content), file_type=kind, process=False)
        placed = _placed(found)
        total = sum(max(len(geometry.vertices), len(getattr(geometry, "faces", ()))) for geometry, _ in placed)
    except _BAD as error:
        raise DecodeError(f"{shown(where)}: the bytes are no {kind} that trimesh can read ({error}).") from error
    if total > max_points:
        raise too_much(where, f"there are {total:,} points or faces", "max_points", max_points)
    return iter(placed)


def _placed(found: Any) -> list[tuple[Any, Any]]:
    if not hasattr(found, "graph"):
        return [(found, None)]
    nodes = [found.graph[name] for name in found.graph.nodes_geometry]
    placed = [(found.geometry[name], matrix) for matrix, name in nodes]
    return [(geometry, matrix) for geometry, matrix in placed if hasattr(geometry, "vertices")]


def _sniffed(content: bytes) -> str:
    """The format that the first bytes tell."""
    head = bytes(content[:512]).lstrip()
    if head.startswith(b"glTF"):
        return "glb"
    if head.startswith(b"ply"):
        return "ply"
    if head.startswith((b"OFF", b"COFF")):
        return "off"
    if len(content) >= 84 and len(content) == 84 + 50 * int.from_bytes(content[80:84], "little"):
        return "stl"
    return "stl" if head.startswith(b"solid") else "obj"


def _moved(vertices: Any, matrix: Any) -> NDArray[np.float64]:
    points = np.array(vertices, np.float64).reshape(-1, 3)
    return points if matrix is None else points @ matrix[:3, :3].T + matrix[:3, 3]


def _colors(geometries: list[Any]) -> NDArray[np.uint8] | None:
    found = [_own_colors(geometry) for geometry in geometries]
    return None if any(colors is None for colors in found) else np.concatenate([c for c in found if c is not None])


def _own_colors(geometry: Any) -> NDArray[np.uint8] | None:
    visual = getattr(geometry, "visual", None)
    if visual is None or getattr(visual, "kind", None) != "vertex":
        return None
    colors: NDArray[np.uint8] = np.array(visual.vertex_colors, np.uint8).reshape(-1, 4)
    return colors if len(colors) == len(geometry.vertices) else None


def _on_faces(mesh: Mesh, samples: int, chance: np.random.Generator, where: str) -> NDArray[np.float64]:
    """Points on the faces: one by its area, and a place on it by two numbers."""
    corners = mesh.vertices[mesh.faces]
    first, second = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    areas = np.linalg.norm(np.cross(first, second), axis=1)
    total = areas.sum()
    if not np.isfinite(total) or total <= 0:
        raise DecodeError(f"{shown(where)}: the faces have no area to draw points from.")
    chosen = chance.choice(len(areas), samples, p=areas / total)
    places = chance.random((samples, 2, 1))
    outside = places.sum(axis=1) > 1
    places[outside[:, 0]] = 1 - places[outside[:, 0]]
    drawn: NDArray[np.float64] = corners[chosen, 0] + places[:, 0] * first[chosen] + places[:, 1] * second[chosen]
    return drawn

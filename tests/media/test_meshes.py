"""Decoding and encoding of meshes and point clouds."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.errors import DecodeError, EncodeError, OptionError
from quire.media import decode_mesh, decode_points, encode_mesh, encode_points, save_mesh, save_points
from tests.strategies import laws

pytestmark = pytest.mark.needs("trimesh")

VERTICES = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 2]], float)
FACES = np.array([[0, 1, 2], [0, 2, 3]])


@pytest.mark.parametrize("file_type", ["ply", "glb", "obj", "off", "stl"])
def test_mesh_roundtrip_keeps_faces(file_type: str) -> None:
    mesh = decode_mesh(encode_mesh(VERTICES, FACES, file_type))
    assert (mesh.vertices.dtype, mesh.faces.dtype) == (np.float64, np.int64)
    assert np.allclose(np.sort(mesh.vertices[mesh.faces], axis=1), np.sort(VERTICES[FACES], axis=1))
    assert decode_mesh(encode_mesh(VERTICES, FACES, file_type), file_type=file_type).faces.shape == (2, 3)


def test_decode_points_samples_faces_by_area() -> None:
    content = encode_mesh(VERTICES, FACES)
    points = decode_points(content, samples=3000, seed=7).points
    assert points.shape == (3000, 3)
    on_first = np.isclose(points[:, 2], 0) & (points[:, :2].sum(axis=1) <= 1 + 1e-9)
    on_second = np.isclose(points[:, 0], 0) & (points[:, 1] + points[:, 2] / 2 <= 1 + 1e-9)
    assert (on_first | on_second).all()
    assert on_second.sum() / on_first.sum() == pytest.approx(2, rel=0.2)  # the second face is twice as large
    assert (decode_points(content, samples=3000, seed=7).points == points).all()


def test_point_cloud_roundtrip_keeps_points_and_colors(tmp_path: Path) -> None:
    colors = np.arange(16, dtype=np.uint8).reshape(4, 4)
    save_points(VERTICES, tmp_path / "cloud.ply", colors=colors)
    cloud = decode_points((tmp_path / "cloud.ply").read_bytes())
    assert np.allclose(cloud.points, VERTICES)
    assert (cloud.colors == colors).all()
    assert decode_points(encode_points(VERTICES, colors), samples=3, seed=0).colors.shape == (3, 4)
    assert decode_points(encode_mesh(VERTICES, FACES)).colors is None
    with pytest.raises(DecodeError, match="no faces"):
        decode_mesh((tmp_path / "cloud.ply").read_bytes())


def test_decode_mesh_enforces_max_points() -> None:
    content = encode_mesh(VERTICES, FACES)
    with pytest.raises(DecodeError, match=r"m.ply: there are 4 points.*max_points=3.*larger max_points"):
        decode_mesh(content, "m.ply", max_points=3)
    with pytest.raises(OptionError, match="samples"):
        decode_points(content, samples=0)
    with pytest.raises(OptionError, match="max_points"):
        decode_points(content, samples=5, max_points=4)


def _glb_with_instances(count: int) -> bytes:
    """Return a scene that shows one mesh many times."""
    content = encode_mesh(VERTICES, FACES, "glb")
    size = struct.unpack("<I", content[12:16])[0]
    tree = json.loads(content[20 : 20 + size])
    shown = next(number for number, node in enumerate(tree["nodes"]) if "mesh" in node)
    mesh = tree["nodes"][shown]["mesh"]
    start = len(tree["nodes"])
    tree["nodes"] += [{"mesh": mesh, "name": f"n{i}", "translation": [i, 0, 0]} for i in range(count)]
    tree["nodes"][0].setdefault("children", []).extend(range(start, start + count))
    text = json.dumps(tree).encode()
    text += b" " * (-len(text) % 4)
    body = struct.pack("<I", len(text)) + b"JSON" + text + content[20 + size :]
    return content[:8] + struct.pack("<I", 12 + len(body)) + body


def test_decode_mesh_counts_every_instance() -> None:
    content = _glb_with_instances(50)
    mesh = decode_mesh(content)
    assert mesh.vertices.shape == (4 * 51, 3)
    assert mesh.vertices[:, 0].max() == 50
    with pytest.raises(DecodeError, match="204 points"):
        decode_mesh(content, max_points=100)


@pytest.mark.parametrize("number", [0, 1])
def test_decode_mesh_rejects_face_with_a_vertex_of_another_mesh(number: int) -> None:
    import trimesh

    faces = np.asarray(FACES, np.uint32), np.ascontiguousarray(np.asarray(FACES, np.uint32)[:, ::-1])
    content = trimesh.Scene([trimesh.Trimesh(VERTICES, part, process=False) for part in faces]).export(file_type="glb")
    assert len(decode_mesh(content).vertices) == 2 * len(VERTICES)
    assert content.count(faces[number].tobytes()) == 1
    damaged = faces[number].copy()
    damaged[0, 0] = len(VERTICES)  # in the scene, a vertex of the other mesh
    with pytest.raises(DecodeError, match="a face refers to a missing vertex"):
        decode_mesh(content.replace(faces[number].tobytes(), damaged.tobytes()))


@pytest.mark.parametrize("content", [b"", b"ply\nformat nonsense", b"glTF" + b"\xff" * 100, b"OFF\n1 x\n", b"solid\n"])
def test_decode_mesh_rejects_other_bytes(content: bytes) -> None:
    with pytest.raises(DecodeError, match=r"noise\.bin"):
        decode_mesh(content, "noise.bin")


def test_decode_mesh_rejects_face_with_missing_vertex() -> None:
    content = b"OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1 99\n"
    with pytest.raises(DecodeError):
        decode_mesh(content)


@laws
@given(st.sampled_from(["ply", "glb", "stl", "off"]), st.floats(0, 1), st.integers(0, 255))
@example("glb", 0.75, 32)  # trimesh raises UnboundLocalError
def test_decode_mesh_of_damaged_bytes_raises_only_decode_error(file_type: str, place: float, value: int) -> None:
    content = bytearray(encode_mesh(VERTICES, FACES, file_type))
    position = int(place * (len(content) - 1))
    content[position] = value
    for damaged in (bytes(content), bytes(content[:position])):
        try:
            mesh = decode_mesh(damaged, file_type=file_type)
        except DecodeError:
            continue
        assert mesh.faces.max(initial=0) < max(1, len(mesh.vertices))


def test_unknown_mesh_formats_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DecodeError, match="'zip' are not read"):
        decode_mesh(b"PK", file_type="zip")
    with pytest.raises(EncodeError, match="'plx' is not a format"):
        save_mesh(VERTICES, FACES, tmp_path / "x.plx")
    save_mesh(VERTICES, FACES, tmp_path / "x.obj")
    assert decode_mesh((tmp_path / "x.obj").read_bytes()).faces.shape == (2, 3)

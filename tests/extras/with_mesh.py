"""Encode a mesh to bytes, and decode it to vertices and faces."""

from __future__ import annotations

import trimesh

from quire.media import decode_mesh

mesh = decode_mesh(trimesh.creation.box().export(file_type="ply"), "a box", file_type="ply")
assert mesh.vertices.shape == (8, 3)
assert mesh.faces.shape == (12, 3)

"""The fixtures of tests/documents: an HTTP server and a working directory."""

from __future__ import annotations

from tests.documents.conftest import address, here, server

__all__ = ["address", "here", "server"]

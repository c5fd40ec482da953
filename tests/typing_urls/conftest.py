"""The server of the documents' tests."""

from __future__ import annotations

from tests.documents.conftest import address, here, server

__all__ = ["address", "here", "server"]

"""The `quire` command line."""

from quire.cli._main import main

__all__ = ["main"]

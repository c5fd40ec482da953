"""The command `quire`, a module for each group of its commands."""

from quire.cli._main import main

__all__ = ["main"]

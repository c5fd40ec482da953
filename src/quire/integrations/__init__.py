"""Training loops of other libraries: a data module for Lightning, and a Trainer for Hugging Face transformers."""

from quire.integrations import lightning, transformers

__all__ = ["lightning", "transformers"]

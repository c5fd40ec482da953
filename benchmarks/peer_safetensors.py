"""safetensors with numpy arrays."""

from safetensors.numpy import load, save

__all__ = ["load", "save"]

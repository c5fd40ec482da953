"""Images as files have them, and as arrays."""

from quire.media._images import decode_frames, encode_image, encode_pillow, pillow_format

__all__ = ["decode_frames", "encode_image", "encode_pillow", "pillow_format"]

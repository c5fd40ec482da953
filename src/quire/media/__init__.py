"""Decode and encode images, audio, video and 3D geometry.

Decoders return numpy arrays; encoders accept tensors of any framework. Pillow, PyAV and trimesh are imported on first
use.
"""

from quire.media._audio import MAX_SAMPLES, MAX_SECONDS, Sound, decode_audio, encode_audio, save_audio, to_audio_bytes
from quire.media._common import as_numpy, as_tensor
from quire.media._images import (
    decode_frames,
    decode_image,
    encode_image,
    encode_pillow,
    import_pillow,
    open_image,
    pillow_format,
    save_image,
    to_image_bytes,
)
from quire.media._meshes import (
    MAX_POINTS,
    Mesh,
    Points,
    decode_mesh,
    decode_points,
    encode_mesh,
    encode_points,
    save_mesh,
    save_points,
)
from quire.media._video import (
    MAX_CLIP_PIXELS,
    MAX_FRAME_PIXELS,
    MAX_FRAMES,
    Clip,
    Frame,
    FrameOptions,
    decode_video,
    encode_video,
    save_video,
    stream_frames,
    to_video_bytes,
)

__all__ = [
    "MAX_CLIP_PIXELS",
    "MAX_FRAMES",
    "MAX_FRAME_PIXELS",
    "MAX_POINTS",
    "MAX_SAMPLES",
    "MAX_SECONDS",
    "Clip",
    "Frame",
    "FrameOptions",
    "Mesh",
    "Points",
    "Sound",
    "as_numpy",
    "as_tensor",
    "decode_audio",
    "decode_frames",
    "decode_image",
    "decode_mesh",
    "decode_points",
    "decode_video",
    "encode_audio",
    "encode_image",
    "encode_mesh",
    "encode_pillow",
    "encode_points",
    "encode_video",
    "import_pillow",
    "open_image",
    "pillow_format",
    "save_audio",
    "save_image",
    "save_mesh",
    "save_points",
    "save_video",
    "stream_frames",
    "to_audio_bytes",
    "to_image_bytes",
    "to_video_bytes",
]

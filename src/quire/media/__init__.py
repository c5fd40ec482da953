"""Images, sound, videos and meshes: as files have them, and as arrays.

What is decoded is numpy's; what is encoded may be of any framework. Pillow, PyAV and trimesh are imported when they are
first needed.
"""

from quire.media._audio import Sound, decode_audio, encode_audio
from quire.media._images import decode_frames, decode_image, encode_image, encode_pillow, pillow_format
from quire.media._limits import (
    MAX_CLIP_PIXELS,
    MAX_FRAME_PIXELS,
    MAX_FRAMES,
    MAX_POINTS,
    MAX_SAMPLES,
    MAX_SECONDS,
)
from quire.media._meshes import Mesh, Points, decode_mesh, decode_points, encode_mesh, encode_points
from quire.media._save import (
    save_audio,
    save_image,
    save_mesh,
    save_points,
    save_video,
    to_audio_bytes,
    to_image_bytes,
    to_video_bytes,
)
from quire.media._tensors import as_numpy, as_tensor
from quire.media._video import Clip, Frame, FrameOptions, decode_video, stream_frames
from quire.media._video_files import encode_video

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

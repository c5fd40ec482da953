"""Decode and encode images, audio, video and 3D geometry.

Decoders return numpy arrays; encoders accept tensors of any framework. Pillow, PyAV and trimesh are imported on first
use.

Names without an entry in `__all__` are for other packages of quire.
"""

from quire.media._audio import MAX_SAMPLES as MAX_SAMPLES
from quire.media._audio import MAX_SECONDS as MAX_SECONDS
from quire.media._audio import Sound, decode_audio, encode_audio, save_audio, to_audio_bytes
from quire.media._audio import as_audio_frames as as_audio_frames
from quire.media._audio import decode_samples as decode_samples
from quire.media._audio import encode_wav as encode_wav
from quire.media._common import as_numpy as as_numpy
from quire.media._common import as_tensor as as_tensor
from quire.media._image_rows import CHANNELS as CHANNELS
from quire.media._image_rows import IMAGE_DECODERS as IMAGE_DECODERS
from quire.media._image_rows import INTERPOLATION_CODES as INTERPOLATION_CODES
from quire.media._image_rows import MAX_IMAGE_PIXELS as MAX_IMAGE_PIXELS
from quire.media._image_rows import Box as Box
from quire.media._image_rows import ImageColor as ImageColor
from quire.media._image_rows import ImageLayout as ImageLayout
from quire.media._image_rows import ImageRows as ImageRows
from quire.media._image_rows import Interpolation as Interpolation
from quire.media._image_rows import encode_row as encode_row
from quire.media._images import PILLOW_ERRORS as PILLOW_ERRORS
from quire.media._images import decode_frames, decode_image, encode_image, save_image, to_image_bytes
from quire.media._images import encode_pillow as encode_pillow
from quire.media._images import import_pillow as import_pillow
from quire.media._images import open_image as open_image
from quire.media._images import pillow_format as pillow_format
from quire.media._media_types import MEDIA_SUFFIXES as MEDIA_SUFFIXES
from quire.media._media_types import data_uri_family as data_uri_family
from quire.media._media_types import detect_media_type as detect_media_type
from quire.media._media_types import read_media_uri as read_media_uri
from quire.media._meshes import MAX_POINTS as MAX_POINTS
from quire.media._meshes import (
    Mesh,
    Points,
    decode_mesh,
    decode_points,
    encode_mesh,
    encode_points,
    save_mesh,
    save_points,
)
from quire.media._video import MAX_CLIP_PIXELS as MAX_CLIP_PIXELS
from quire.media._video import MAX_FRAME_PIXELS as MAX_FRAME_PIXELS
from quire.media._video import MAX_FRAMES as MAX_FRAMES
from quire.media._video import Clip, Frame, decode_video, encode_video, save_video, stream_frames, to_video_bytes
from quire.media._video import FrameOptions as FrameOptions
from quire.media._video_rows import FrameTimes as FrameTimes
from quire.media._video_rows import VideoRows as VideoRows

__all__ = [
    "Clip",
    "Frame",
    "Mesh",
    "Points",
    "Sound",
    "decode_audio",
    "decode_frames",
    "decode_image",
    "decode_mesh",
    "decode_points",
    "decode_video",
    "encode_audio",
    "encode_image",
    "encode_mesh",
    "encode_points",
    "encode_video",
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

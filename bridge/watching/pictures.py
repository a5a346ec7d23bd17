"""Encoded pictures: what environments render, as JPEG or PNG; several lanes as a mosaic."""

from __future__ import annotations

import dataclasses
import importlib
import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from bridge.encoding.tensors import Array
from bridge.errors import Code, RequestError
from bridge.extras import install_command

__all__ = ["FORMATS", "MAX_LANES", "View", "encode", "mosaic"]

FORMATS = ("jpeg", "png")
"""The values of the JoinWorld setting `frame`."""
MAX_LANES = 64
"""Lanes in a mosaic."""
_QUALITY = 80
# Pixels up to which a picture is sent without loss: drawings of a few cells and glyphs suffer most.
_SMALL = 128 * 128
# Pixels of a mosaic; lanes are made smaller until they fit.
_MOST_PIXELS = 1280 * 960
_GAP = 2


@dataclasses.dataclass(frozen=True)
class View:
    """The view of a viewer. Viewers with equal views share one picture."""

    format: str
    """One of `FORMATS`; small pictures are PNG always."""
    lanes: tuple[int, ...]
    """The lanes to show, each once."""


def encode(frames: Sequence[Any], view: View) -> bytes:
    """Encode what lanes rendered, in one picture.

    Args:
        frames: An array of shape (height, width, 3), dtype uint8, for each lane of the view.
        view: How.

    Raises:
        RequestError: FAILED_PRECONDITION: a lane rendered something else.
    """
    picture = mosaic([_checked(frame) for frame in frames])
    height, width = picture.shape[:2]
    if view.format == "png" or height * width <= _SMALL:
        return encode_png(picture)
    return _jpeg(picture)


def mosaic(frames: Sequence[Array]) -> Array:
    """Return one picture of several, row by row, each made smaller by leaving out pixels where they are too many."""
    if len(frames) == 1:
        return np.ascontiguousarray(frames[0])
    columns = int(np.ceil(np.sqrt(len(frames))))
    rows = -(-len(frames) // columns)
    height = max(frame.shape[0] for frame in frames)
    width = max(frame.shape[1] for frame in frames)
    step = 1
    while rows * columns * -(-height // step) * -(-width // step) > _MOST_PIXELS:
        step += 1
    height, width = -(-height // step), -(-width // step)
    picture = np.zeros((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3), np.uint8)
    for index, frame in enumerate(frames):
        row, column = divmod(index, columns)
        small = frame[::step, ::step]
        top, left = row * (height + _GAP), column * (width + _GAP)
        picture[top : top + small.shape[0], left : left + small.shape[1]] = small
    return picture


def _checked(frame: Any) -> Array:
    array = np.asarray(frame)
    if array.ndim == 2:
        array = np.repeat(array[:, :, None], 3, axis=2)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8 or not array.size:
        raise RequestError(
            Code.FAILED_PRECONDITION,
            f"expected render() to return an array of shape (height, width, 3) and dtype uint8, got {_named(frame)}; "
            "make the environment with render_mode='rgb_array'",
        )
    return array


def _named(frame: Any) -> str:
    if isinstance(frame, np.ndarray):
        return f"one of shape {frame.shape} and dtype {frame.dtype}"
    return "None" if frame is None else f"a {type(frame).__name__}"


def _jpeg(picture: Array) -> bytes:
    encoder = _simplejpeg()
    if encoder is not None:
        return bytes(encoder.encode_jpeg(picture, quality=_QUALITY, colorspace="RGB", colorsubsampling="420"))
    try:
        from PIL import Image
    except ImportError as error:
        text = f"pictures as JPEG need the package pillow: {install_command('web')}; or ask for frame=png"
        raise RequestError(Code.FAILED_PRECONDITION, text) from error
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "JPEG", quality=_QUALITY)
    return out.getvalue()


def _simplejpeg() -> Any:
    """Return the faster encoder; None: it is not installed."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def encode_png(picture: Array) -> bytes:
    """Encode without loss, by the standard library alone."""
    height, width = picture.shape[:2]
    lines = np.empty((height, 1 + width * 3), np.uint8)
    # Each line as its difference from the one above it, which makes most of it zeros.
    lines[:, 0] = 2
    flat = picture.reshape(height, width * 3)
    lines[0, 1:] = flat[0]
    np.subtract(flat[1:], flat[:-1], out=lines[1:, 1:])
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes(), 1)),
        (b"IEND", b""),
    ]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)

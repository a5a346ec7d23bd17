"""Encode arrays of pixels as JPEG or PNG files."""

from __future__ import annotations

import importlib
import io
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.core.extras import install_command
from bridge.errors import Code, RequestError

__all__ = ["QUALITY", "encode_either", "encode_jpeg", "encode_png"]

QUALITY = 80
"""The default quality of a JPEG."""
_FULL_COLOR = 90
"""The quality from which on a JPEG has a color for each pixel, not one for four pixels."""
_PIXELS_A_BYTE = 16
"""If each byte of a PNG encodes at least this many pixels, the PNG is used without a comparison with JPEG."""
_WORTH = 1.5
"""The largest ratio of a drawing's PNG to its JPEG: a PNG has no noise around sprites and letters."""
_RUN = 4
"""The least average length, in pixels, of the runs of one color that make a picture flat."""
_FEW = 24
"""Changes are few if less than one in this many values differs from the value above it."""


def encode_jpeg(picture: NDArray[np.uint8], quality: int = QUALITY) -> bytes:
    """Return a picture of shape (height, width, 3) as JPEG.

    Args:
        picture: The picture.
        quality: The quality, 1 to 100.

    Raises:
        RequestError: FAILED_PRECONDITION: no package that encodes JPEG is installed.
    """
    full = quality >= _FULL_COLOR
    encoder = _simplejpeg()
    if encoder is not None:
        sampling = "444" if full else "420"
        return bytes(encoder.encode_jpeg(picture, quality=quality, colorspace="RGB", colorsubsampling=sampling))
    try:
        from PIL import Image
    except ImportError:
        text = f"pictures as JPEG need the package pillow: {install_command('web')}; or ask for frame=png"
        raise RequestError(Code.FAILED_PRECONDITION, text) from None
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "JPEG", quality=quality, subsampling=0 if full else 2)
    return out.getvalue()


def _simplejpeg() -> Any:
    """Return the faster encoder; None: it is not installed."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def encode_either(picture: NDArray[np.uint8], quality: int = QUALITY) -> bytes:
    """Return a picture of shape (height, width, 3) as PNG if it is at most half larger than a JPEG, else as JPEG.

    For drawings with areas of one color, a JPEG is blurred, has noise around edges, and is usually larger than the PNG.

    Args:
        picture: The picture.
        quality: The quality of a JPEG, 1 to 100.

    Raises:
        RequestError: As `encode_jpeg`.
    """
    if not _is_flat(picture):
        return encode_jpeg(picture, quality)
    lossless = encode_png(picture)
    # True of most drawings. No JPEG is made then, because it would hardly be smaller.
    if len(lossless) * _PIXELS_A_BYTE <= picture.shape[0] * picture.shape[1]:
        return lossless
    lossy = encode_jpeg(picture, quality)
    return lossless if len(lossless) <= _WORTH * len(lossy) else lossy


def encode_png(picture: NDArray[np.uint8]) -> bytes:
    """Return a picture of shape (height, width, 3) as PNG, without loss, with only the standard library."""
    height, width = picture.shape[:2]
    lines = np.empty((height, 1 + width * 3), np.uint8)
    # Each line as its difference from the line above, so that most values are zeros.
    lines[:, 0] = 2
    flat = picture.reshape(height, width * 3)
    lines[0, 1:] = flat[0]
    np.subtract(flat[1:], flat[:-1], out=lines[1:, 1:])
    # Few changes, such as the edges of a drawing, are best encoded as runs of zeros. More changes, such as tiles,
    # repeat.
    few = np.count_nonzero(lines[1:, 1:]) * _FEW <= height * width
    compressor = zlib.compressobj(1, strategy=zlib.Z_RLE if few else zlib.Z_DEFAULT_STRATEGY)
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", compressor.compress(lines.data) + compressor.flush()),
        (b"IEND", b""),
    ]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _is_flat(picture: NDArray[np.uint8]) -> bool:
    """True if a picture consists of areas of one color, as drawings do.

    Only few rows are examined, so that the test of a photograph or noise costs little.
    """
    height, width = picture.shape[:2]
    rows = picture.reshape(height, width * 3)[:: max(1, height // 32)]
    return bool(np.count_nonzero(rows[:, 3:] != rows[:, :-3]) * _RUN <= rows.size)

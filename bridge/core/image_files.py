"""Arrays of pixels as the bytes of image files: JPEG, and PNG."""

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
"""Of a JPEG, where nothing else is asked for."""
_FULL_COLOR = 90
"""The quality from which a JPEG has a color for each pixel, not one for four of them."""
_PIXELS_A_BYTE = 16
"""The pixels that a byte of a PNG stands for in a picture that is small enough as PNG, whatever a JPEG takes."""
_WORTH = 1.5
"""How many times as large as a JPEG the PNG of a drawing may be: it has no noise around sprites and letters."""
_RUN = 4
"""The least average length, in pixels, of the runs of one color that make a picture flat."""
_FEW = 24
"""In pixels: where fewer than one of so many has a value that differs from the one above, changes are few."""


def encode_jpeg(picture: NDArray[np.uint8], quality: int = QUALITY) -> bytes:
    """Return a picture of shape (height, width, 3) as JPEG.

    Args:
        picture: The picture.
        quality: 1 to 100.

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
    """Return a picture of shape (height, width, 3) as PNG where that is at most half larger than a JPEG, else as JPEG.

    A JPEG blurs what is drawn in areas of one color, has noise around its edges, and is mostly larger than the PNG.

    Args:
        picture: The picture.
        quality: Of a JPEG, 1 to 100.

    Raises:
        RequestError: As `encode_jpeg`.
    """
    if not _is_flat(picture):
        return encode_jpeg(picture, quality)
    lossless = encode_png(picture)
    # Most drawings are: a JPEG, which would hardly be smaller, is not made then.
    if len(lossless) * _PIXELS_A_BYTE <= picture.shape[0] * picture.shape[1]:
        return lossless
    lossy = encode_jpeg(picture, quality)
    return lossless if len(lossless) <= _WORTH * len(lossy) else lossy


def encode_png(picture: NDArray[np.uint8]) -> bytes:
    """Return a picture of shape (height, width, 3) as PNG: without loss, by the standard library alone."""
    height, width = picture.shape[:2]
    lines = np.empty((height, 1 + width * 3), np.uint8)
    # Each line as its difference from the one above it, which makes most of it zeros.
    lines[:, 0] = 2
    flat = picture.reshape(height, width * 3)
    lines[0, 1:] = flat[0]
    np.subtract(flat[1:], flat[:-1], out=lines[1:, 1:])
    # Few changes, as of a drawing with edges, are best told as the runs of zeros between them. Where there are more, as
    # of tiles, they are the same again and again.
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
    """Return whether a picture is made of areas of one color, as drawings are.

    Few rows are looked at: of a photograph or noise the answer costs next to nothing.
    """
    height, width = picture.shape[:2]
    rows = picture.reshape(height, width * 3)[:: max(1, height // 32)]
    return bool(np.count_nonzero(rows[:, 3:] != rows[:, :-3]) * _RUN <= rows.size)

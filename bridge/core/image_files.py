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

__all__ = ["encode_jpeg", "encode_png"]

_QUALITY = 80


def encode_jpeg(picture: NDArray[np.uint8]) -> bytes:
    """Return a picture of shape (height, width, 3) as JPEG.

    Raises:
        RequestError: FAILED_PRECONDITION: no package that encodes JPEG is installed.
    """
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


def encode_png(picture: NDArray[np.uint8]) -> bytes:
    """Return a picture of shape (height, width, 3) as PNG: without loss, by the standard library alone."""
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

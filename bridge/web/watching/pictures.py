"""Encode what environments render as one picture; several lanes form a mosaic."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from bridge.core.encoding.tensors import Array
from bridge.core.image_files import QUALITY, encode_either, encode_png
from bridge.errors import Code, RequestError

__all__ = ["FORMATS", "LOSSLESS", "MAX_LANES", "View", "encode", "mosaic"]

FORMATS = ("jpeg", "png")
"""The values of the JoinWorld setting `frame`."""
MAX_LANES = 64
"""The most lanes in a mosaic."""
LOSSLESS = 100
"""The quality from which no picture is a JPEG."""
# Pictures up to this number of pixels are sent without loss: small drawings of cells and glyphs suffer most from it.
_SMALL = 128 * 128
# The most pixels of a mosaic; lanes are scaled down until they fit.
_MOST_PIXELS = 1280 * 960
_GAP = 2


@dataclasses.dataclass(frozen=True)
class View:
    """What a viewer sees. Viewers with equal views share one picture."""

    format: str
    """One of `FORMATS`; small pictures and drawings are always PNG."""
    lanes: tuple[int, ...]
    """The lanes to show, each at most once."""


def encode(frames: Sequence[Any], view: View, quality: int = QUALITY) -> bytes:
    """Encode the rendered frames of lanes as one picture.

    Args:
        frames: An array of shape (height, width, 3), dtype uint8, for each lane of the view.
        view: The view.
        quality: The JPEG quality, 1 to 99; `LOSSLESS`: all pictures are PNG.

    Raises:
        RequestError: FAILED_PRECONDITION: a lane did not render such an array.
    """
    picture = mosaic([_checked(frame) for frame in frames])
    height, width = picture.shape[:2]
    if view.format == "png" or quality >= LOSSLESS or height * width <= _SMALL:
        return encode_png(picture)
    return encode_either(picture, quality)


def mosaic(frames: Sequence[Array]) -> Array:
    """Return one picture that shows several in rows; large ones are scaled down by leaving out pixels."""
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

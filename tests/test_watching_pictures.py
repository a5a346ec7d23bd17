"""Pictures encoded, and several in one."""

import io
import sys

import numpy as np
import pytest
from PIL import Image

from bridge.errors import RequestError
from bridge.web.watching.pictures import View, encode, mosaic


@pytest.mark.parametrize("size", [(210, 160), (1, 1), (3, 200), (128, 128)])
def test_png_is_without_loss(size):
    picture = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    data = encode([picture], View("png", (0,)))
    assert data.startswith(b"\x89PNG")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), picture)


@pytest.mark.parametrize("encoder", ["simplejpeg", "pillow"])
def test_jpeg_is_close_and_small_pictures_are_png(encoder, monkeypatch):
    if encoder == "pillow":
        monkeypatch.setitem(sys.modules, "simplejpeg", None)
    else:
        pytest.importorskip("simplejpeg")
    rows, columns = np.mgrid[0:400, 0:600]
    picture = np.stack([rows % 256, columns % 256, (rows + columns) % 256], 2).astype(np.uint8) // 2
    data = encode([picture], View("jpeg", (0,)))
    assert data.startswith(b"\xff\xd8")
    assert np.abs(np.asarray(Image.open(io.BytesIO(data))).astype(int) - picture).mean() < 4
    assert encode([picture[:100, :100]], View("jpeg", (0,))).startswith(b"\x89PNG")


def test_without_an_encoder_of_jpeg_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(RequestError, match=r"gymnasium-bridge\[web\].*frame=png"):
        encode([np.zeros((200, 200, 3), np.uint8)], View("jpeg", (0,)))


def test_lanes_are_put_side_by_side_and_made_smaller_where_they_are_many():
    frames = [np.full((10, 20, 3), shade, np.uint8) for shade in (50, 100, 150)]
    picture = mosaic(frames)
    assert picture.shape == (22, 42, 3)
    assert (picture[0, 0, 0], picture[0, 41, 0], picture[21, 0, 0], picture[21, 41, 0]) == (50, 100, 150, 0)
    many = mosaic([np.zeros((400, 600, 3), np.uint8)] * 16)
    assert many.shape[0] * many.shape[1] < 1.1 * 1280 * 960


@pytest.mark.parametrize(
    "frame", [None, "text", np.zeros((3, 3)), np.zeros((2, 2, 4), np.uint8), np.zeros((0, 2, 3), np.uint8)]
)
def test_what_is_no_picture_is_refused_by_name(frame):
    with pytest.raises(RequestError, match="rgb_array"):
        encode([frame], View("png", (0,)))


def test_a_grey_picture_is_a_picture():
    data = encode([np.full((4, 5), 7, np.uint8)], View("png", (0,)))
    assert np.asarray(Image.open(io.BytesIO(data))).tolist() == [[[7, 7, 7]] * 5] * 4

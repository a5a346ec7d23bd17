"""Pictures encoded, and several in one."""

import io
import sys

import gymnasium
import numpy as np
import pytest
from PIL import Image

from bridge import Web, make_remote, serve_gym
from bridge.errors import RequestError, SettingError
from bridge.web.watching.pictures import View, encode, mosaic
from tests.web_envs import Paddle


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
    with pytest.raises(RequestError, match=r"pip install -e '\.\[web\]'.*frame=png"):
        encode([photograph()], View("jpeg", (0,)))


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


JPEG = View("jpeg", (0,))


def decoded(data):
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def sprites(colors, size=(300, 400)):
    """A drawing: squares of one color each on a ground of one color."""
    random = np.random.default_rng(0)
    picture = np.full((*size, 3), (20, 60, 30), np.uint8)
    for color in random.integers(0, 256, (colors, 3)):
        top, left = random.integers(0, size[0] - 9), random.integers(0, size[1] - 9)
        picture[top : top + 9, left : left + 9] = color
    return picture


def photograph(size=(300, 400)):
    """Noise over a slope: as large without loss as its pixels."""
    slope = np.linspace(0, 200, size[0] * size[1] * 3).reshape(*size, 3)
    return (slope + np.random.default_rng(0).integers(0, 50, (*size, 3))).astype(np.uint8)


@pytest.mark.parametrize("colors", [1, 12, 100, 200], ids=lambda colors: f"{colors} colors")
def test_a_drawing_in_flat_colors_is_sent_without_loss_where_that_is_smaller(colors):
    picture = sprites(colors)
    data = encode([picture], JPEG)
    assert data.startswith(b"\x89PNG")
    assert np.array_equal(decoded(data), picture)
    plain = io.BytesIO()
    Image.fromarray(picture).save(plain, "JPEG", quality=80)
    assert len(data) < len(plain.getvalue())


# Of MountainCar the PNG is larger than the JPEG, which has noise around the hills.
@pytest.mark.parametrize("env", ["CartPole-v1", "FrozenLake-v1", "MountainCar-v0", "Acrobot-v1"])
def test_what_gymnasium_draws_is_sent_without_loss(env):
    made = gymnasium.make(env, render_mode="rgb_array")
    made.reset(seed=0)
    assert np.array_equal(decoded(encode([made.render()], JPEG)), made.render())
    made.close()


def bricks(spread):
    """A wall of bricks, each of a color of its own within so many shades: as PNG always about as large."""
    shades = np.random.default_rng(0).integers(100, 100 + spread, (75, 50, 3), np.uint8)
    return np.repeat(np.repeat(shades, 4, axis=0), 6, axis=1)


def test_a_drawing_may_take_half_more_than_a_jpeg_and_no_more():
    sent = {}
    for spread in range(2, 156, 2):
        picture = bricks(spread)
        data, lossless = encode([picture], JPEG), len(encode([picture], View("png", (0,))))
        plain = io.BytesIO()
        Image.fromarray(picture).save(plain, "JPEG", quality=80)
        if lossless * 16 > picture.shape[0] * picture.shape[1]:
            sent[lossless / len(plain.getvalue())] = data.startswith(b"\x89PNG")
    # The encoders differ by some percent.
    assert {png for ratio, png in sent.items() if ratio > 1.6} == {False}
    assert {png for ratio, png in sent.items() if 1.0 < ratio < 1.4} == {True}


def test_of_a_drawing_that_is_small_without_loss_no_jpeg_is_made(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    data = encode([sprites(12)], JPEG)
    monkeypatch.undo()
    assert np.array_equal(decoded(data), sprites(12))


def test_a_photograph_is_a_jpeg_and_so_is_a_drawing_that_is_smaller_as_one():
    assert encode([photograph()], JPEG).startswith(b"\xff\xd8")
    # Few changes from pixel to pixel, but each line differs everywhere from the one above.
    rows = np.random.default_rng(0).integers(0, 256, (600, 1, 3))
    stripes = np.clip(rows + np.arange(600)[None, :, None] // 8, 0, 255).astype(np.uint8)
    assert len(encode([stripes], JPEG)) <= len(encode([stripes], View("png", (0,))))


@pytest.mark.parametrize("size", [(1, 20000), (20000, 1), (129, 128), (2, 9000)])
def test_pictures_of_any_form_are_encoded(size):
    picture = np.zeros((*size, 3), np.uint8)
    picture[size[0] // 2 :, size[1] // 2 :] = 255
    assert np.array_equal(decoded(encode([picture], JPEG)), picture)


@pytest.mark.parametrize("encoder", ["simplejpeg", "pillow"])
def test_the_quality_decides_how_close_and_how_large_a_jpeg_is(encoder, monkeypatch):
    if encoder == "pillow":
        monkeypatch.setitem(sys.modules, "simplejpeg", None)
    else:
        pytest.importorskip("simplejpeg")
    picture = photograph()
    sizes, errors = [], []
    for quality in (1, 40, 80, 90, 99):
        data = encode([picture], JPEG, quality)
        assert data.startswith(b"\xff\xd8")
        sizes.append(len(data))
        errors.append(np.abs(decoded(data).astype(int) - picture).mean())
    assert sizes == sorted(sizes)
    assert errors == sorted(errors, reverse=True)
    lossless = encode([picture], JPEG, 100)
    assert lossless.startswith(b"\x89PNG")
    assert np.array_equal(decoded(lossless), picture)


class Camera(Paddle):
    def render(self):
        return photograph()


def test_a_server_encodes_at_the_quality_that_it_was_given(viewers):
    frames = []
    for quality in (10, 90, 100):
        with serve_gym(Camera, web=Web(quality=quality)) as server:
            env = make_remote(f"{server.url}?world=")
            env.reset(seed=0)
            frames.append(viewers(server).join().look("frame")[1]["frame"].astype(int))
            env.close()
    errors = [np.abs(frame - photograph()).mean() for frame in frames]
    assert errors[0] > errors[1] > 0
    assert errors[2] == 0


@pytest.mark.parametrize("quality", [0, 101, -5, 80.0, True, "high", None])
def test_a_quality_that_is_none_is_refused(quality):
    with pytest.raises(SettingError, match="expected quality to be an integer from 1 to 100"):
        Web(quality=quality)

"""The script that draws the README's picture."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from bridge import serve_gym
from tests.places import ROOT


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    pytest.importorskip("matplotlib")
    path = ROOT / "docs" / "pictures.py"
    spec = importlib.util.spec_from_file_location("pictures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pictures", module)  # dataclasses look it up
        spec.loader.exec_module(module)
    return module


def test_a_frame_is_read_from_the_server_and_cut_to_a_square(pictures: ModuleType) -> None:
    with serve_gym("CartPole-v1") as server:
        frame = pictures.read_frame(server.url, pictures.Scene("CartPole-v1", "CartPole", steps=3, zoom=2.0))
    assert frame.shape == (200, 200, 3)
    assert len(np.unique(frame.reshape(-1, 3), axis=0)) > 2  # cart, pole and background


def test_a_square_beyond_the_frame_is_moved_into_it(pictures: ModuleType) -> None:
    frame = np.arange(6 * 10 * 3, dtype=np.uint8).reshape(6, 10, 3)
    corner = pictures.crop(frame, pictures.Scene("a", "A", steps=0, center=(1.0, 0.0), zoom=2.0))
    assert np.array_equal(corner, frame[:3, 7:])


def test_the_picture_is_small_and_has_the_size_that_the_readme_shows_twice(
    pictures: ModuleType, tmp_path: Path
) -> None:
    from PIL import Image

    random = np.random.default_rng(0)
    history = [
        SimpleNamespace(number=number, returns=random.uniform(0, 500, 64), steps=number * 1000, rate=1.0)
        for number in (1, 2, 3)
    ]
    frames = [random.integers(0, 255, (64, 64, 3), np.uint8) for _ in pictures.SCENES]
    path = tmp_path / "picture.png"
    pictures.draw(pictures.Outcome(history, np.full(8, 500.0), 1.0, None), frames, path)
    with Image.open(path) as image:
        assert image.width == 1600
        assert image.convert("RGBA").getchannel("A").getpixel((0, 0)) == 0  # round corners on any background
    stored = Path(pictures.PICTURE)
    assert max(path.stat().st_size, stored.stat().st_size) < 400_000

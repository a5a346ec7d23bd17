"""Draw `docs/readme.png`: the demo's learning curve beside frames of environments that were read over the network.

Run it with `make pictures`. It needs the extra `test`, which brings the environments and matplotlib, and OpenGL for
MuJoCo (`MUJOCO_GL=egl` unless set).
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image

from bridge import make_remote
from bridge.facade.demo import ENV_ID, Demo, Outcome, plot_curve, run_demo
from bridge.testing import ServerProcess

PICTURE = Path(__file__).resolve().parent / "readme.png"
WIDTH, HEIGHT = 8.0, 3.4
"""Inches; at 200 dots an inch the picture is twice as wide as the README shows it."""
DPI = 200
COLUMNS = 3
LEFT, ZOO_LEFT = 0.22, 4.18
"""Inches from the left edge to the two panels."""
CARD, EDGE, TEXT, FAINT = "#ffffff", "#d0d7de", "#1f2328", "#59636e"

Frame = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Scene:
    """A moment in an environment."""

    env_id: str
    """`MODULE:ENV_ID`, as `gymnasium-bridge serve` takes it."""
    title: str
    """The text below the frame."""
    steps: int
    """Random steps before the frame is taken."""
    seed: int = 0
    """Of the environment and of the actions."""
    center: tuple[float, float] = (0.5, 0.5)
    """The middle of the square that is shown: fractions of the width and of the height."""
    zoom: float = 1.0
    """The side of that square is the frame's shorter side divided by this."""


SCENES = (
    Scene("CartPole-v1", "CartPole", steps=12, center=(0.5, 0.62), zoom=1.25),
    Scene("LunarLander-v3", "LunarLander", steps=45, center=(0.55, 0.5)),
    Scene("CarRacing-v3", "CarRacing", steps=60),
    Scene("ale_py:ALE/Pong-v5", "Atari Pong", steps=216, seed=2, center=(0.5, 0.37)),
    Scene("HalfCheetah-v5", "HalfCheetah", steps=20, center=(0.48, 0.52), zoom=1.5),
    Scene("minigrid:MiniGrid-DoorKey-8x8-v0", "MiniGrid", steps=8),
)


def train() -> Outcome:
    """Run the demo."""
    with tempfile.TemporaryDirectory() as folder:
        return run_demo(Demo(picture=Path(folder) / "learning_curve.png"))


def read_frames() -> list[Frame]:
    """Serve all scenes by one server in a process of its own, and read a frame of each over gRPC."""
    with ServerProcess(*(scene.env_id for scene in SCENES)) as server:
        return [read_frame(server.url, scene) for scene in SCENES]


def read_frame(url: str, scene: Scene) -> Frame:
    """Play a scene at the server, and return the square of its frame that is shown."""
    env = make_remote(url, env_id=scene.env_id.rpartition(":")[2], render_mode="rgb_array")
    try:
        env.reset(seed=scene.seed)
        env.action_space.seed(scene.seed)
        for _ in range(scene.steps):
            env.step(env.action_space.sample())
        frame: Any = env.render()
    finally:
        env.close()
    return crop(np.asarray(frame, np.uint8), scene)


def crop(frame: Frame, scene: Scene) -> Frame:
    """Cut out the square that is shown."""
    height, width = frame.shape[:2]
    side = int(min(height, width) / scene.zoom)
    left = int(np.clip(scene.center[0] * width - side / 2, 0, width - side))
    top = int(np.clip(scene.center[1] * height - side / 2, 0, height - side))
    return frame[top : top + side, left : left + side]


def draw(outcome: Outcome, frames: list[Frame], path: Path) -> None:
    """Write the picture: a white card with round corners, so that it can be read on any background."""
    style = {
        "font.family": "DejaVu Sans",
        "font.size": 8.5,
        "text.color": TEXT,
        "axes.edgecolor": EDGE,
        "axes.labelcolor": FAINT,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with rc_context(style):
        figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="none")
        card = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(0, HEIGHT))
        card.axis("off")
        inset = 0.02
        card.add_patch(
            FancyBboxPatch(
                (inset, inset),
                WIDTH - 2 * inset,
                HEIGHT - 2 * inset,
                boxstyle="round,pad=0,rounding_size=0.12",
                facecolor=CARD,
                edgecolor=EDGE,
                linewidth=0.8,
            )
        )
        draw_curve(figure, outcome)
        draw_zoo(figure, frames)
        figure.savefig(path, transparent=False, facecolor="none")
    with Image.open(path) as image:
        image.convert("RGBA").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
            path, optimize=True
        )


def place(left: float, bottom: float, width: float, height: float) -> tuple[float, float, float, float]:
    """Return a place in inches as fractions of the figure."""
    return left / WIDTH, bottom / HEIGHT, width / WIDTH, height / HEIGHT


def draw_curve(figure: Figure, outcome: Outcome) -> None:
    """Draw the learning curve on the left."""
    detail = f"{len(outcome.history[0].returns)} environments in {Demo.servers} server processes"
    heading(figure, LEFT, f"{ENV_ID} learned over gRPC", detail)
    axes = figure.add_axes(place(LEFT + 0.43, 0.52, 3.1, HEIGHT - 0.7 - 0.52))
    plot_curve(axes, outcome.history, outcome.returns)
    for line, size in zip(axes.lines, (4.5, 4.5, 0.0, 10.0), strict=True):
        line.set_markersize(size)
    axes.set_ylabel("return")
    axes.set_xlabel("thousand environment steps")
    axes.tick_params(length=0, labelsize=7.5)
    axes.legend(loc="lower right", frameon=False, fontsize=7.5, handlelength=1.6, labelspacing=0.35, borderaxespad=0.2)


def draw_zoo(figure: Figure, frames: list[Frame]) -> None:
    """Draw the frames on the right."""
    heading(figure, ZOO_LEFT, "A zoo behind one server", "frames as the remote render() returns them")
    side, gap, caption = 1.1, 0.14, 0.24
    for number, (scene, frame) in enumerate(zip(SCENES, frames, strict=True)):
        row, column = divmod(number, COLUMNS)
        left = ZOO_LEFT + column * (side + gap)
        bottom = HEIGHT - 0.7 - side - row * (side + caption)
        axes = figure.add_axes(place(left, bottom, side, side))
        axes.axis("off")
        smooth = "antialiased" if frame.shape[0] > 300 else "nearest"
        image = axes.imshow(frame, interpolation=smooth, aspect="auto")
        corners = "round,pad=0,rounding_size=0.06"
        border = FancyBboxPatch((0, 0), 1, 1, boxstyle=corners, transform=axes.transAxes, fill=False, clip_on=False)
        border.set(edgecolor=EDGE, linewidth=0.8)
        axes.add_patch(border)
        image.set_clip_path(border)
        figure.text(
            (left + side / 2) / WIDTH,
            (bottom - 0.045) / HEIGHT,
            scene.title,
            ha="center",
            va="top",
            color=FAINT,
            fontsize=7.5,
        )


def heading(figure: Figure, left: float, title: str, detail: str) -> None:
    """Write a panel's heading."""
    figure.text(left / WIDTH, (HEIGHT - 0.22) / HEIGHT, title, ha="left", va="top", fontsize=10, fontweight="bold")
    figure.text(left / WIDTH, (HEIGHT - 0.42) / HEIGHT, detail, ha="left", va="top", fontsize=8, color=FAINT)


def main() -> None:
    """Write the picture."""
    os.environ.setdefault("MUJOCO_GL", "egl")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    frames = read_frames()
    draw(train(), frames, PICTURE)
    print(f"wrote {PICTURE.name}, {PICTURE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()

"""Draw the badges of the README, and the pictures of `docs/` but for screenshots. With `--check`: are they current?

The state diagrams are drawn from the tables of the code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

from state_charts import Arrows, arrows, draw

from bridge.core.client.slots import slot
from bridge.core.client.world import session_states as client_states
from bridge.core.server import session_states as server_states
from bridge.perlert import lobby, player

FOLDER = Path(__file__).resolve().parent

STYLE = """
  svg { font: 14px system-ui, sans-serif; }
  text { fill: #1f2430; } .small { font-size: 12px; fill: #5b6374; } .title { font-weight: 600; }
  .box { fill: #eef1fb; stroke: #5c6bc0; } .user { fill: #fff4e0; stroke: #d99000; }
  .frame { fill: none; stroke: #b7bdcc; }
  .line { stroke: #5b6374; fill: none; stroke-width: 1.5; } .wire { stroke: #5c6bc0; stroke-width: 3; fill: none; }
  .head { fill: #5b6374; } .wirehead { fill: #5c6bc0; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7ef; } .small { fill: #a9b0c0; } .box { fill: #2a3050; stroke: #8c9bf0; }
    .user { fill: #43361c; stroke: #e0aa3e; }
    .frame { stroke: #565d70; } .line { stroke: #a9b0c0; } .head { fill: #a9b0c0; }
    .wire { stroke: #8c9bf0; } .wirehead { fill: #8c9bf0; }
  }
"""


class Drawing:
    """Collects shapes; `str()` is the SVG.

    Args:
        width: In pixels.
        height: In pixels.
        title: What a screen reader says of the picture.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img"><title>{escape(title)}</title><style>{STYLE}</style>'
        )
        self.parts: list[str] = []

    def __str__(self) -> str:
        return "\n".join([self.head, *self.parts, "</svg>", ""])

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        """Write a line of text whose baseline is at `y`."""
        self.parts.append(f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, text: str, below: str = "", kind: str = "box"
    ) -> None:
        """Draw a box with a text, and a smaller one below it."""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" class="{kind}"/>')
        middle = y + height / 2 + 5
        self.text(x + width / 2, middle - (9 if below else 0), text)
        if below:
            self.text(x + width / 2, middle + 10, below, "small")

    def frame(self, x: float, y: float, width: float, height: float, title: str) -> None:
        """Draw the outline of a process or machine."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="10" class="frame" stroke-dasharray="5 4"/>'
        )
        self.text(x + 14, y + 22, title, "title", "start")

    def arrow(self, x: float, y: float, to_x: float, to_y: float, text: str = "", kind: str = "line") -> None:
        """Draw a horizontal or vertical arrow, with a text above it."""
        size = 7 if kind == "line" else 10
        if y == to_y:
            back = size if to_x < x else -size
            points = f"{to_x},{to_y} {to_x + back},{to_y - size / 2} {to_x + back},{to_y + size / 2}"
            end = (to_x + back, to_y)
        else:
            back = size if to_y < y else -size
            points = f"{to_x},{to_y} {to_x - size / 2},{to_y + back} {to_x + size / 2},{to_y + back}"
            end = (to_x, to_y + back)
        self.parts.append(f'<path d="M {x} {y} L {end[0]} {end[1]}" class="{kind}"/>')
        self.parts.append(f'<polygon points="{points}" class="{"head" if kind == "line" else "wirehead"}"/>')
        if text:
            self.text((x + to_x) / 2, min(y, to_y) - 8, text, "small")

    def bar(self, x: float, y: float, width: float, text: str, kind: str = "box") -> None:
        """Draw a stretch of time."""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="28" rx="4" class="{kind}"/>')
        self.text(x + width / 2, y + 19, text, "small")


def architecture() -> Drawing:
    """Draw the parts that a step goes through."""
    drawing = Drawing(860, 330, "An environment and a training loop on two machines, joined by a server and a client")
    drawing.frame(10, 10, 330, 310, "where the environment runs")
    drawing.frame(520, 10, 330, 310, "where the training loop runs")
    left = [
        ("your environment", "gymnasium.Env", "user"),
        ("world", "one environment, or lanes", "box"),
        ("session", "the protocol's state", "box"),
        ("transport", "gRPC over HTTP/2", "box"),
    ]
    right = [
        ("your training loop", "envs.step(actions)", "user"),
        ("vector environment", "slots, resets, batches", "box"),
        ("pool and session", "waits; the protocol's state", "box"),
        ("transport", "gRPC over HTTP/2", "box"),
    ]
    for x, boxes in ((55, left), (565, right)):
        for row, (name, below, kind) in enumerate(boxes):
            y = 45 + row * 68
            drawing.box(x, y, 240, 48, name, below, kind)
            if row:
                drawing.arrow(x + 110, y - 20, x + 110, y)
                drawing.arrow(x + 130, y, x + 130, y - 20)
    drawing.arrow(565, 264, 295, 264, "Step requests: actions", "wire")
    drawing.arrow(295, 282, 565, 282, "", "wire")
    drawing.text(430, 304, "answers: observations,", "small")
    drawing.text(430, 322, "rewards, flags, infos", "small")
    return drawing


def threads() -> Drawing:
    """Draw which thread does what while an environment's call takes long."""
    drawing = Drawing(860, 210, "The threads of a server in time")
    for row, (name, below) in enumerate(
        [
            ("serving thread", "environments live here"),
            ("deputy", "stands by"),
            ("helper", "compresses, encodes"),
        ]
    ):
        y = 40 + row * 58
        drawing.text(12, y + 14, name, "title", "start")
        drawing.text(12, y + 31, below, "small", "start")
        drawing.parts.append(f'<path d="M 190 {y + 15} L 840 {y + 15}" class="frame"/>')
    drawing.bar(195, 41, 45, "loop")
    drawing.bar(242, 41, 48, "step", "user")
    drawing.bar(292, 41, 45, "loop")
    drawing.bar(339, 41, 300, "a reset that takes long", "user")
    drawing.bar(641, 41, 45, "loop")
    drawing.bar(688, 41, 48, "step", "user")
    drawing.bar(738, 41, 95, "loop")
    drawing.bar(420, 99, 219, "event loop: health, joins, refusals")
    drawing.bar(350, 157, 110, "a picture to JPEG")
    drawing.arrow(339, 24, 420, 24, "40 ms")
    drawing.text(860 - 16, 204, "time →", "small", "end")
    return drawing


def step() -> Drawing:
    """Draw the way of one Step of 64 lanes, with the processor time of each part."""
    drawing = Drawing(860, 250, "One Step of 64 CartPole lanes, with the processor time of each part")
    drawing.text(12, 62, "client", "title", "start")
    drawing.text(12, 172, "server", "title", "start")
    for y in (57, 167):
        drawing.parts.append(f'<path d="M 80 {y} L 850 {y}" class="frame"/>')
    drawing.box(85, 38, 105, 40, "write", "2.7 µs")
    drawing.box(205, 148, 105, 40, "read, check", "5.7 µs")
    drawing.box(322, 148, 225, 40, "64 environments step", "390 µs", "user")
    drawing.box(559, 148, 105, 40, "write", "3.2 µs")
    drawing.box(700, 38, 140, 40, "read, no copy", "4.3 µs")
    drawing.arrow(197, 78, 197, 148, "", "wire")
    drawing.text(192, 118, "one request, 120 bytes", "small", "end")
    drawing.arrow(682, 148, 682, 78, "", "wire")
    drawing.text(672, 118, "one answer, 1.8 kB", "small", "end")
    drawing.text(
        430, 232, "Without the sockets and the operating system; measured as docs/performance.md says.", "small"
    )
    return drawing


def badge(left: str, right: str) -> str:
    """Draw a badge: a fact's name on grey, the fact on blue."""
    widths = [7 * len(text) + 14 for text in (left, right)]
    parts, x = [], 0
    for text, width, fill in zip((left, right), widths, ("#50566b", "#3f51b5"), strict=True):
        parts.append(f'<rect x="{x}" width="{width}" height="20" fill="{fill}"/>')
        parts.append(f'<text x="{x + width / 2}" y="14" fill="#fff" text-anchor="middle">{escape(text)}</text>')
        x += width
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{x}" height="20" role="img" font-family="Verdana, sans-serif" '
        f'font-size="11"><title>{escape(left)}: {escape(right)}</title><clipPath id="round">'
        f'<rect width="{x}" height="20" rx="4"/></clipPath><g clip-path="url(#round)">{"".join(parts)}</g></svg>\n'
    )


def licence() -> str:
    """Draw the badge of the licence."""
    return badge("licence", "MIT")


def python() -> str:
    """Draw the badge of Python's versions: those that the classifiers of the package name."""
    project = (FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8")
    versions = re.findall(r"^  \"Programming Language :: Python :: (3\.\d+)\",$", project, re.MULTILINE)
    return badge("python", f"{versions[0]} – {versions[-1]}")


def episode_states() -> Arrows:
    """Return how far a slot's episode is, but for a move, and a reset in the midst of it, which the page tells."""
    state, event = slot.EpisodeState, slot.EpisodeEvent
    shown = {
        (before, what): after
        for (before, what), after in slot.EPISODES.items()
        if what is not event.MOVED and (what is not event.BEGIN or before in (state.IDLE, state.ENDED))
    }
    return arrows(shown)


STATES: dict[str, Callable[[], Arrows]] = {
    "states-server.svg": lambda: arrows(server_states.TRANSITIONS, server_states.SessionState.CLOSED),
    "states-client.svg": lambda: arrows(client_states.TRANSITIONS, client_states.ClientState.LOST),
    "states-link.svg": lambda: arrows(slot.LINKS),
    "states-episode.svg": episode_states,
    "states-lobby.svg": lambda: arrows(lobby.TRANSITIONS),
    "states-player.svg": lambda: arrows(player.TRANSITIONS),
}
"""The state diagrams, by the tables that they show."""

DRAWINGS: dict[str, Callable[[], object]] = {"architecture.svg": architecture, "threads.svg": threads, "step.svg": step}
DRAWINGS |= {"badge-licence.svg": licence, "badge-python.svg": python}
DRAWINGS |= {name: lambda found=found: draw(found()) for name, found in STATES.items()}


def main() -> None:
    """Draw all, or compare with what is committed."""
    for name, drawing in DRAWINGS.items():
        path, fresh = FOLDER / name, str(drawing())
        if "--check" not in sys.argv[1:]:
            path.write_text(fresh, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != fresh:
            sys.exit(f"{name} is not current; run python docs/drawings.py")


if __name__ == "__main__":
    main()

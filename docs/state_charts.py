"""Draw the state diagrams of the pages, which are written for Mermaid, as SVG in the built site.

GitHub draws Mermaid's text itself. The site would have to load Mermaid from another host, so `site_hooks.py` has the
diagrams drawn here: a column for each state, and a row for each transition, with an arrow from its state to the next.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

TRANSITION = re.compile(r"^\s*(\S+) --> (\w+)(?:: (.*))?$", re.MULTILINE)
WIDTH, ROW, HEAD, BOX = 860, 30, 46, 30
"""In pixels: the drawing, a row, the top of the first row, and the height of a state's box."""


def fence(source: str, *_: Any, **__: Any) -> str:
    """Return the HTML of a block of Mermaid, as pymdownx.superfences asks for it."""
    return f'<div class="drawing states">{draw(source)}</div>'


def draw(source: str) -> str:
    """Return the SVG of a state diagram.

    Raises:
        ValueError: There is no transition in it.
    """
    found = [(a, b, label or "") for a, b, label in TRANSITION.findall(source) if a != "[*]"]
    if not found:
        raise ValueError(f"expected transitions such as `a --> b: event`, got {source!r}")
    states = list(dict.fromkeys(state for a, b, _ in found for state in (a, b)))
    pitch = WIDTH / len(states)
    at = {state: pitch * (number + 0.5) for number, state in enumerate(states)}
    height = HEAD + ROW * len(found) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img"><title>{escape(", ".join(states))}, and what leads from one to the other</title>'
    ]
    width = min(pitch - 8, 150)
    for state, x in at.items():
        parts.append(f'<path class="life" d="M {x:.0f} {BOX} V {height - 4}"/>')
        parts.append(
            f'<rect class="state" x="{x - width / 2:.0f}" y="1" width="{width:.0f}" height="{BOX - 2}" rx="6"/>'
        )
        parts.append(f'<text class="name" x="{x:.0f}" y="{BOX / 2 + 5:.0f}">{escape(state)}</text>')
    for number, (a, b, label) in enumerate(found):
        parts += _transition(at[a], at[b], HEAD + ROW * number + 18, label)
    return "".join([*parts, "</svg>"])


def _transition(start: float, end: float, y: float, label: str) -> list[str]:
    """Draw an arrow and what it is called; a transition to the same state is a loop."""
    if start == end:
        line = f"M {start:.0f} {y - 9} h 14 a 4.5 4.5 0 0 1 0 9 h -8"
        head, middle = f"{start:.0f},{y} {start + 7:.0f},{y - 4} {start + 7:.0f},{y + 4}", start
    else:
        back = -7 if end > start else 7
        line = f"M {start:.0f} {y} H {end + back:.0f}"
        head = f"{end:.0f},{y} {end + back:.0f},{y - 4} {end + back:.0f},{y + 4}"
        middle = (start + end) / 2
    half = 3.4 * len(label) + 6  # about half the width of the text
    x, anchor = middle, "middle"
    if start == end:
        x, anchor = (start + 26, "start") if start + 26 + 2 * half < WIDTH else (start - 8, "end")
    elif middle < half:
        x, anchor = min(start, end) + 6, "start"
    elif middle > WIDTH - half:
        x, anchor = max(start, end) - 6, "end"
    below = 1 if start == end else -6
    return [
        f'<path class="go" d="{line}"/><polygon points="{head}"/>',
        f'<text class="event" x="{x:.0f}" y="{y + below}" text-anchor="{anchor}">{escape(label)}</text>',
    ]

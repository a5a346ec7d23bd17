"""Draw a table of transitions as SVG: a column for each state, and a row for each arrow from a state to the next."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from html import escape
from typing import TypeAlias

Arrows: TypeAlias = list[tuple[str, str, str]]
"""A state, the next state, and the events that lead there."""

WIDTH, ROW, HEAD, BOX = 860, 30, 54, 30
"""In pixels: the drawing, a row, the top of the first row, and the height of a state's box."""

STYLE = """
  svg { font: 13px system-ui, sans-serif; }
  text { fill: #1f2430; } .name { font-weight: 600; } .paper { fill: #ffffff; }
  .event { font-size: 12.5px; paint-order: stroke; stroke: #ffffff; stroke-width: 4px; }
  .state { fill: #eef1fb; stroke: #5c6bc0; } .life { stroke: #b7bdcc; }
  .go { fill: none; stroke: #5c6bc0; stroke-width: 1.6; } polygon { fill: #5c6bc0; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7ef; } .paper { fill: #1b1f2a; } .event { stroke: #1b1f2a; }
    .state { fill: #2a3050; stroke: #8c9bf0; } .life { stroke: #565d70; }
    .go { stroke: #8c9bf0; } polygon { fill: #8c9bf0; }
  }
"""


def arrows(table: Mapping[tuple[Enum, Enum], Enum], last: Enum | None = None) -> Arrows:
    """Return the arrows of a table of transitions, without those to the last state, which every state has."""
    found: dict[tuple[Enum, Enum], list[str]] = {}
    for (state, event), following in table.items():
        if following is not last:
            found.setdefault((state, following), []).append(event.value)
    return [(a.value, b.value, " / ".join(events)) for (a, b), events in found.items()]


def draw(found: Arrows) -> str:
    """Return the SVG of a state diagram."""
    states = list(dict.fromkeys(state for a, b, _ in found for state in (a, b)))
    pitch = WIDTH / len(states)
    at = {state: pitch * (number + 0.5) for number, state in enumerate(states)}
    height = HEAD + ROW * len(found) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img"><title>{escape(", ".join(states))}, and what leads from one to the other</title>'
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>',
    ]
    width = min(pitch - 8, 150)
    for state, x in at.items():
        parts.append(f'<path class="life" d="M {x:.0f} {BOX + 8} V {height - 8}"/>')
        parts.append(
            f'<rect class="state" x="{x - width / 2:.0f}" y="9" width="{width:.0f}" height="{BOX - 2}" rx="6"/>'
        )
        parts.append(
            f'<text class="name" x="{x:.0f}" y="{BOX / 2 + 13:.0f}" text-anchor="middle">{escape(state)}</text>'
        )
    for number, (a, b, label) in enumerate(found):
        parts += _transition(at[a], at[b], HEAD + ROW * number + 18, label)
    return "\n".join([*parts, "</svg>", ""])


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

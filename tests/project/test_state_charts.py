"""The state diagrams of the pages, which docs/drawings.py draws: each shows every transition of its table."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from enum import Enum
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from bridge.core.client.world import session_states as client_states
from bridge.core.server import session_states as server_states
from bridge.perlert import lobby, player
from tests.places import ROOT

DOCS = ROOT / "docs"
NAMES = sorted(path.name for path in DOCS.glob("states-*.svg"))


@pytest.fixture(scope="module")
def drawings() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        spec = importlib.util.spec_from_file_location("docs_drawings", DOCS / "drawings.py")
        assert spec is not None
        assert spec.loader is not None
        module: ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
        sys.modules.pop("state_charts", None)


def parts(name: str, kind: str) -> list[ElementTree.Element]:
    return [part for part in ElementTree.parse(DOCS / name).iter() if part.get("class") == kind]


def drawn(name: str) -> list[tuple[str, str, str]]:
    """The arrows of a picture: where each begins and ends, and what it is called."""
    middle = {
        float(box.get("x", 0)) + float(box.get("width", 0)) / 2: text.text or ""
        for box, text in zip(parts(name, "state"), parts(name, "name"), strict=True)
    }
    heads = [part for part in ElementTree.parse(DOCS / name).iter() if part.tag.endswith("polygon")]
    found = []
    for arrow, head, event in zip(parts(name, "go"), heads, parts(name, "event"), strict=True):
        tail, tip = float(arrow.get("d", "").split()[1]), float(head.get("points", "").partition(",")[0])
        start, end = (middle[min(middle, key=lambda x: abs(x - at))] for at in (tail, tip))
        found.append((start, end, event.text or ""))
    return found


def test_every_state_diagram_is_committed_and_shown(drawings: Any) -> None:
    assert sorted(drawings.STATES) == NAMES
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    assert [name for name in NAMES if f"]({name})" not in pages] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_arrow_leads_from_its_state_to_the_next(drawings: Any, name: str) -> None:
    assert drawn(name) == drawings.STATES[name]()


@pytest.mark.parametrize(
    ("name", "table", "last"),
    [
        ("states-server.svg", server_states.TRANSITIONS, server_states.SessionState.CLOSED),
        ("states-client.svg", client_states.TRANSITIONS, client_states.ClientState.LOST),
        ("states-lobby.svg", lobby.TRANSITIONS, None),
        ("states-player.svg", player.TRANSITIONS, None),
    ],
    ids=["server", "client", "lobby", "player"],
)
def test_the_diagram_has_every_transition_and_no_other(
    name: str, table: Mapping[tuple[Enum, Enum], Enum], last: Enum | None
) -> None:
    shown = [(a, event, b) for a, b, label in drawn(name) for event in label.split(" / ")]
    assert sorted(shown) == sorted((s.value, e.value, f.value) for (s, e), f in table.items() if f is not last)


def test_the_diagram_of_a_link_has_every_transition(drawings: Any) -> None:
    shown = [(a, event, b) for a, b, label in drawn("states-link.svg") for event in label.split(" / ")]
    assert sorted(shown) == sorted((s.value, e.value, f.value) for (s, e), f in drawings.slot.LINKS.items())


def test_the_diagram_of_an_episode_has_every_transition_but_two_that_its_page_tells(drawings: Any) -> None:
    """A move leads to *idle*, and a reset to *resetting*, from every state but *cut*."""
    shown = {(a, event): b for a, b, label in drawn("states-episode.svg") for event in label.split(" / ")}
    table = {(state.value, event.value): after.value for (state, event), after in drawings.slot.EPISODES.items()}
    assert shown.items() <= table.items()
    told = {
        event: {"moved to another world": "idle", "episode asked for": "resetting"}.get(event) for _, event in table
    }
    left_out = {pair: after for pair, after in table.items() if pair not in shown}
    assert left_out == {pair: told[pair[1]] for pair in left_out}
    for event in filter(told.get, told):
        assert {state for state, each in table if each == event} == {state for state, _ in table} - {"cut"}


@pytest.mark.parametrize("name", NAMES)
def test_texts_stay_within_the_drawing(name: str) -> None:
    width = float(ElementTree.parse(DOCS / name).getroot().get("width", 0))
    for part in parts(name, "event"):
        long = 6.8 * len(part.text or "")  # in the font that browsers choose
        left = float(part.get("x", 0)) - {"start": 0, "middle": 0.5, "end": 1}[part.get("text-anchor", "")] * long
        assert left >= -long * 0.1, part.text
        assert left + long <= width + long * 0.1, part.text

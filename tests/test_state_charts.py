"""The state diagrams of the built site, which docs/state_charts.py draws from Mermaid's text."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCKS = [
    (path.name, block)
    for path in sorted(DOCS.glob("*.md"))
    for block in re.findall(r"```mermaid\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
]


@pytest.fixture(scope="module")
def charts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("state_charts", DOCS / "state_charts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts(svg: str, kind: str) -> list[str]:
    return [part.text or "" for part in ElementTree.fromstring(svg).iter() if part.get("class") == kind]


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[f"{page}-{n}" for n, (page, _) in enumerate(BLOCKS)])
def test_every_transition_of_a_page_has_an_arrow_from_its_state_to_the_next(
    charts: ModuleType, page: str, block: str
) -> None:
    svg = charts.draw(block)
    lines = [line.strip() for line in block.splitlines() if "-->" in line and "[*]" not in line]
    assert texts(svg, "event") == [line.partition(": ")[2] for line in lines]
    drawing = ElementTree.fromstring(svg)
    middle = {
        float(rect.get("x", 0)) + float(rect.get("width", 0)) / 2: name
        for rect, name in zip(
            [part for part in drawing.iter() if part.get("class") == "state"], texts(svg, "name"), strict=True
        )
    }
    found = []
    for arrow, head in zip(
        [part for part in drawing.iter() if part.get("class") == "go"],
        [part for part in drawing.iter() if part.tag.endswith("polygon")],
        strict=True,
    ):
        tail, tip = float(arrow.get("d", "").split()[1]), float(head.get("points", "").partition(",")[0])
        found.append(tuple(middle[min(middle, key=lambda x: abs(x - end))] for end in (tail, tip)))
    assert [f"{a} --> {b}" for a, b in found] == [line.partition(": ")[0] for line in lines]


def test_texts_stay_within_the_drawing(charts: ModuleType) -> None:
    for _, block in BLOCKS:
        for part in ElementTree.fromstring(charts.draw(block)).iter():
            if part.get("class") == "event":
                width = 6.8 * len(part.text or "")  # of the font that the site has
                left = (
                    float(part.get("x", 0)) - {"start": 0, "middle": 0.5, "end": 1}[part.get("text-anchor", "")] * width
                )
                assert left >= -width * 0.1, part.text
                assert left + width <= charts.WIDTH + width * 0.1, part.text


def test_the_fence_is_html_and_a_diagram_without_a_transition_is_refused(charts: ModuleType) -> None:
    html = charts.fence("stateDiagram-v2\n    a --> b: x < y", "mermaid", "mermaid", {}, None)
    assert html.startswith('<div class="drawing states"><svg ')
    assert "x &lt; y" in html
    with pytest.raises(ValueError, match=r"expected transitions such as `a --> b: event`, got 'flowchart LR'"):
        charts.draw("flowchart LR")

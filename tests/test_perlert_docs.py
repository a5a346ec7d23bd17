import re
from pathlib import Path

import pytest

from bridge.perlert import GuardConfig, LobbyConfig, RolloutConfig, lobby, player
from bridge.perlert.protocol import packet

DOCS = Path(__file__).parent.parent / "docs" / "perlert.md"


def diagram(table):
    """The state diagram of a table, as it stands in the docs."""
    lines = [f"    {state.name} --> {after.name}: {event.value}" for (state, event), after in table.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


@pytest.mark.parametrize("module", [lobby, player], ids=lambda module: module.__name__)
def test_the_state_diagrams_in_the_docs_are_those_of_the_tables(module):
    assert diagram(module.TRANSITIONS) in DOCS.read_text()


def test_the_limits_in_the_docs_are_the_defaults():
    text = DOCS.read_text()
    for config in (GuardConfig(), LobbyConfig(), RolloutConfig()):
        for row in re.findall(rf"^\|(.*)\| `{type(config).__name__}\.(.*)` \|$", text, re.M):
            values = row[0].split("|")[1]
            for name in row[1].split("`, `"):
                value = getattr(config, name)
                if isinstance(value, int | float) and not isinstance(value, bool):
                    assert f"{value:,g}".replace("e+06", ",000,000") in values.replace(".0", ""), (name, value, values)
    assert f"{packet.MAX_DATAGRAM:,} and {packet.MAX_MESSAGE:,} bytes" in text
    assert f"| {packet.MAX_FIELD} bytes |" in text

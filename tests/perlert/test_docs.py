import re

from bridge.perlert import GuardConfig, LobbyConfig, RolloutConfig
from bridge.perlert.protocol import packet
from tests.places import ROOT

DOCS = ROOT / "docs" / "perlert.md"


def test_the_limits_in_the_docs_are_the_defaults():
    text = DOCS.read_text()
    for config in (GuardConfig(), LobbyConfig(), RolloutConfig()):
        for row in re.findall(rf"^\|(.*)\| `{type(config).__name__}\.(.*)` \|$", text, re.M):
            values = row[0].split("|")[1]
            for name in row[1].split("`, `"):
                value = getattr(config, name)
                if isinstance(value, int | float) and not isinstance(value, bool):
                    assert f"{value:,g}".replace("e+06", ",000,000") in values.replace(".0", ""), (name, value, values)
    sizes = packet.MAX_DATAGRAM, packet.MAX_MESSAGE, packet.MAX_CLIENT_MESSAGE
    assert f"{', '.join(f'{size:,}' for size in sizes)} bytes" in text
    assert f"| {packet.MAX_FIELD} bytes |" in text

"""Lobbies of tests, and what they have sent."""

from bridge.perlert import RolloutConfig
from bridge.perlert.lobby import Lobby
from bridge.perlert.protocol.packet import (
    Header,
    Slot,
    parse_client,
    parse_server,
)
from bridge.perlert.protocol.profile import Claim, format_tag
from bridge.perlert.rollout import Rollout
from tests.perlert_simulation import guard_of

H = Header("city", 7)


ANN, BOB, EVE = ("127.0.0.1", 1001), ("127.0.0.1", 1002), ("127.0.0.1", 1003)


SECRET = b"a secret of the server"


class Heard(Lobby):
    """A lobby with what a host does before: the book of bytes, and the grammar."""

    def receive(self, datagram, sender, now):
        if not self.guard.heard(sender, datagram, now):
            return []
        return self.handle(parse_client(datagram), sender, len(datagram), now)


def make(slots=2, *, bots=(), guard=None, config=None, spectators=0, **settings):
    watches = {f"spectator{i}": "agent0" for i in range(spectators)}
    keys = [f"agent{i}" for i in range(slots)]
    found = [Slot(key, True, "citizen", "cpu" if key in bots else "", key in bots) for key in keys]
    return Heard(
        H,
        found + [Slot(key, True, "spectator", "", False) for key in watches],
        guard_of(guard, SECRET),
        config=config,
        watches=watches,
        **settings,
    )


def claim(lobby, key, name, address, seq, word="w", former=""):
    """A registration with the token of the address."""
    tag = format_tag(Claim(name, True, lobby.guard.token(address), seq, word, former))
    return f"city:7;register={key},{tag}".encode()


def to(out, address):
    return [parse_server(datagram) for datagram, target in out if target == address]


def slot(lobby, key):
    return lobby.listing()[key]


def new_run(lobby, port=40000):
    return Rollout(H, port, lobby.guard, lambda key, text: None, RolloutConfig())

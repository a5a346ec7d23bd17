"""A vector environment by host name: one and many slots, with TLS and without, IPv4 and IPv6."""

from __future__ import annotations

import pytest

from bridge import TLS
from bridge.testing import make_certificates
from tests.network.programs import PORT, serve, vector_shape

SLOTS = [1, 2, 4, 16]
TIMES = 2
"""A look-up that is shared or not depends on when each slot asks for it."""
FAMILIES = ["IPv4", "IPv6", "both"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("slots", SLOTS)
def test_a_vector_by_host_name(network, tmp_path, slots, secure, family):
    game, trainer = network.machine("game-pc"), network.machine("trainer")
    network.name("game.example", *{"IPv4": [game.ipv4], "IPv6": [game.ipv6], "both": [game.ipv6, game.ipv4]}[family])
    keywords, secret = {}, {}
    if secure:
        make_certificates(tmp_path / "certs", ["game.example"])
        keywords["tls"] = TLS(ca=str(tmp_path / "certs" / "ca.pem"))
        secret["tls"] = TLS(str(tmp_path / "certs" / "server.pem"), str(tmp_path / "certs" / "server.key"))
    game.start(serve, "CartPole-v1", secret).next()
    url = f"grpc{'s' * secure}://game.example:{PORT}"
    assert trainer.run(vectors, url, slots, keywords) == [(slots, 4)] * TIMES


def vectors(url, slots, keywords):
    return [vector_shape(url, slots, **keywords) for _ in range(TIMES)]

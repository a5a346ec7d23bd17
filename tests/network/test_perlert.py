"""PERLERT where datagrams are late, lost, doubled and overtake each other."""

from __future__ import annotations

import warnings

import pytest

from bridge.perlert import make_perlert_env, serve_perlert
from bridge.testing import Conditions, CountingEnv

PORT, LENGTH = 32322, 30
RETURN = float(sum(range(LENGTH + 1)))  # of an episode of CountingEnv, whose rewards are 1, 2, 3, …
KEY = "0123456789abcdef0123456789abcdef"
ROUGH = Conditions(delay=0.02, jitter=0.03, loss=0.15, duplicate=0.15, reorder=0.15, hold=0.1)


def lobby(key):
    warnings.filterwarnings("ignore", "serve_perlert on", UserWarning)
    keywords = {"name": "count", "host": "0.0.0.0", "port": PORT, "fps": 30, "key": key}
    with serve_perlert(lambda: CountingEnv(LENGTH), **keywords) as server:
        yield server.url
        yield server.wait()


def played(troubles, key):
    """Play three runs, then more until the client has counted each trouble; 30 at most.

    Returns:
        What came of each run, what the client counted, and the shortest round trip.
    """
    with make_perlert_env(f"perlert://game-pc:{PORT}/count:0", key=key) as env:
        returns, round_trips = [], []
        info = {"perlert": dict.fromkeys(troubles, 0)}
        while len(returns) < 3 or (len(returns) < 30 and not all(map(info["perlert"].get, troubles))):
            _, info = env.reset()
            total, over = 0.0, False
            while not over:
                _, reward, terminated, truncated, info = env.step(1)
                total += reward
                round_trips += [found for found in [info["perlert"]["rtt_min"]] if found is not None]
                over = terminated or truncated
            returns.append((total, info["return"], terminated))
    return returns, info["perlert"], min(round_trips)


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "enciphered"])
def test_runs_end_and_their_returns_are_exact_whatever_is_lost(network, key):
    game, player = network.machine("game-pc"), network.machine("player", ROUGH)
    game.start(lobby, key).next()
    troubles = ["lost", "reordered"]
    if key is None:  # a cipher lets no datagram through twice
        troubles.append("duplicates")
    returns, counted, round_trip = player.run(played, troubles, key)
    assert returns == [(RETURN, RETURN, True)] * len(returns)
    assert all(counted[trouble] > 0 for trouble in troubles)
    assert round_trip >= 0.04, "the line takes 40 ms or more there and back"
    there, back = network.counts(player)
    assert there.lost > 0
    assert back.lost > 0

"""A game has what every served world has: TLS, tokens, a directory, and a trainer that is dialed."""

from __future__ import annotations

import contextlib

import pytest

from bridge import TLS, make_remote, make_vec_remote
from bridge.dial import DialListener
from bridge.errors import BridgeError
from bridge.testing import make_certificates
from tests.game.loops import walking
from tests.support import until


def test_agents_join_by_tls_with_the_token_and_nobody_else_does(process, tmp_path):
    certificates = make_certificates(tmp_path)
    tls = TLS(certificate=certificates["server.pem"], key=certificates["server.key"])
    with walking(False, process=process, tls=tls, token="secret") as walk:
        port = walk.game.server.port
        assert walk.game.url.startswith("grpcs://")
        ca = TLS(ca=certificates["ca.pem"])
        env = make_remote(f"grpcs://127.0.0.1:{port}", tls=ca, token="secret")
        env.reset(seed=1)
        assert env.step(2)[0].shape == (2,)
        env.close()
        with pytest.raises(BridgeError):
            make_remote(f"grpcs://127.0.0.1:{port}", tls=ca, token="wrong")
        with pytest.raises(BridgeError):
            make_remote(f"grpc://127.0.0.1:{port}", token="secret")


@pytest.mark.parametrize("scheme", ["grpc", "ws"])
def test_a_game_dials_a_trainer_that_listens(process, scheme):
    with (
        contextlib.closing(DialListener("listen://127.0.0.1:0", timeout=30.0)) as listener,
        walking(False, process=process, dial=f"{scheme}://127.0.0.1:{listener.port}", dial_name="dots") as walk,
    ):
        until(lambda: [endpoint.name for endpoint in listener.endpoints()] == ["dots"])
        envs = make_vec_remote(listener, num_envs=1, blocking=True)
        envs.reset(seed=5)
        assert (5, None) in walk.begun
        assert envs.step([1])[0].shape == (1, 2)
        envs.close()


def test_games_are_the_endpoints_of_a_directory(process, tmp_path):
    file = tmp_path / "urls.txt"
    with walking(False, process=process) as one, walking(False, process=process) as two:
        file.write_text(f"{one.game.url}\n{two.game.url}\n", encoding="utf-8")
        envs = make_vec_remote(file.as_uri(), num_envs=2, blocking=True)
        envs.reset(seed=3)
        seeds = [seed for walk in (one, two) for seed, _ in walk.begun if seed is not None]
        assert sorted(seeds) == [3, 4]
        envs.close()

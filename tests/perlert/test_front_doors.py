"""PERLERT through the doors that a user knows: `make_remote`, `make_vec_remote`, `gymnasium-bridge serve --perlert`."""

from __future__ import annotations

import selectors
import signal
import subprocess
import sys

import pytest

from bridge import errors, make_remote, make_vec_remote
from bridge.cli import main
from bridge.perlert import PerlertEnv, PerlertVectorEnv, serve_perlert
from tests.preloaded import run


def test_make_remote_and_make_vec_remote_take_perlert_urls() -> None:
    with serve_perlert("CartPole-v1", instances=2, fps=60.0) as server:
        env = make_remote(server.urls[0], timeout=20.0)
        assert isinstance(env, PerlertEnv)
        observation, _ = env.reset()
        assert env.observation_space.contains(observation)
        env.close()
        envs = make_vec_remote([server.urls[1]], timeout=20.0)
        assert isinstance(envs, PerlertVectorEnv)
        assert envs.num_envs == 1
        envs.close()


def test_a_mixture_of_protocols_is_refused() -> None:
    with pytest.raises(errors.SettingError, match="perlert:// URLs alone"):
        make_vec_remote(["perlert://127.0.0.1:9/cartpole:0", "grpc://127.0.0.1:9"])


def test_bridge_serve_publishes_over_perlert_until_sigterm() -> None:
    command = [sys.executable, "-m", "bridge", "serve", "CartPole-v1", "--perlert", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            assert selector.select(60.0), "no URL was printed"
        url = process.stdout.readline().split()[-1]
        assert url.startswith("perlert://127.0.0.1:")
        env = make_remote(url, timeout=20.0)
        env.reset()
        env.step(1)
        env.close()
        process.send_signal(signal.SIGTERM)
        _, problems = process.communicate(timeout=30)
        assert process.returncode == 0, problems
    finally:
        process.kill()
        process.communicate()


def test_a_lobby_ends_with_its_standard_input() -> None:
    ended = run("-m", "bridge", "serve", "CartPole-v1", "--perlert", "0", "--exit-on-eof")
    assert ended.returncode == 0, ended.stderr
    assert "serving perlert://127.0.0.1:" in ended.stdout


def test_options_that_perlert_has_not_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "CartPole-v1", "--perlert", "0", "--num-envs", "8"]) == 2
    assert "--num-envs cannot be given with --perlert" in capsys.readouterr().err

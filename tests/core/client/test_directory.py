"""`bridge.core.client.wire.dialer`: the addresses of a name, in the order in which they are tried."""

import socket
import threading

import pytest

from bridge import make_remote, serve_gym
from bridge.core.client.wire.dialer import interleave
from bridge.errors import ConnectError


def test_address_families_take_turns_and_the_first_stays_first() -> None:
    six, four = socket.AF_INET6, socket.AF_INET
    assert interleave([(six, 1), (six, 2), (six, 3), (four, 4)]) == ((six, 1), (four, 4), (six, 2), (six, 3))
    assert interleave([(four, 1), (six, 2), (four, 3)]) == ((four, 1), (six, 2), (four, 3))
    assert interleave([]) == ()


@pytest.mark.parametrize("name", ["bridge-resolver", "bridge-keepalive"])
def test_a_thread_that_could_not_be_started_is_started_the_next_time(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with serve_gym("CartPole-v1") as server:
        url = f"grpc://localhost:{server.port}"
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises((ConnectError, RuntimeError), match="can't start new thread"):
                make_remote(url, timeout=20)
        env = make_remote(url, timeout=20)
        assert env.reset(seed=0)[0].shape == (4,)
        assert any(thread.name == "bridge-keepalive" for thread in threading.enumerate())
        env.close()


@pytest.mark.parametrize("name", ["bridge-resolver", "bridge-keepalive"])
def test_a_thread_whose_start_was_interrupted_is_started_the_next_time(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start = threading.Thread.start

    def interrupt(thread: threading.Thread) -> None:
        if thread.name == name:
            raise KeyboardInterrupt
        start(thread)

    with serve_gym("CartPole-v1") as server:
        url = f"grpc://localhost:{server.port}"
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupt)
            with pytest.raises(KeyboardInterrupt):
                make_remote(url)
        env = make_remote(url, timeout=20)
        assert env.reset(seed=0)[0].shape == (4,)
        assert any(thread.name == "bridge-keepalive" for thread in threading.enumerate())
        env.close()

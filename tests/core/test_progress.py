"""A call that waits reports its progress to a person at a terminal, and to nobody else."""

from __future__ import annotations

import io
import socket
import sys
import time
from pathlib import Path

import pytest

from bridge import errors, make_remote, make_vec_remote, serve_gym
from bridge.core.logs import Progress, tell
from tests.inside import look_every


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def as_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard error a terminal; within a test, since pytest sets its own before each."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_a_short_wait_says_nothing_and_a_long_one_each_change_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = as_terminal(monkeypatch)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    waiting = Progress()
    waiting.tell("0 of 8")
    assert terminal.getvalue() == ""
    waiting.tell("0 of 8")
    for count in (1, 1, 2, 3):
        now[0] += 2.0
        waiting.tell(f"{count} of 8")
    assert terminal.getvalue().splitlines() == ["bridge: 1 of 8", "bridge: 2 of 8", "bridge: 3 of 8"]
    waiting.tell("4 of 8")
    assert "4 of 8" not in terminal.getvalue(), "too soon after the last line"


def test_a_stream_that_is_no_terminal_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    tell("3 of 8")
    assert stream.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw
    tell("3 of 8")


def test_a_client_says_which_server_it_waits_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal = as_terminal(monkeypatch)
    look_every(monkeypatch, 0.05)
    with socket.create_server(("127.0.0.1", 0)) as mute, serve_gym("CartPole-v1") as server:
        url = f"grpc://127.0.0.1:{mute.getsockname()[1]}"
        make_vec_remote([server.url, url], timeout=0.6).close()  # in the end the other one stands in
        assert f"bridge: waiting for {url}; 1 of 2 worlds joined\n" in terminal.getvalue()
        with pytest.raises(errors.RemoteTimeoutError):
            make_remote(url, timeout=0.3)
        assert f"bridge: waiting for {url}, at most 0 s more\n" in terminal.getvalue()
        (tmp_path / "urls.txt").write_text(f"{server.url}\n{url}\n")
        make_vec_remote((tmp_path / "urls.txt").as_uri(), num_envs=2, timeout=0.6).close()
        assert f"bridge: waiting for {url}; 1 of 2 worlds joined\n" in terminal.getvalue()

"""Platforms that are not Linux, faked: what they lack is taken away, and what cannot work is an error that says so."""

from __future__ import annotations

import socket

import pytest

from bridge import make_remote, serve_gym
from bridge.cli import main
from bridge.errors import SettingError


def socketpair() -> tuple[socket.socket, socket.socket]:
    """Return a pair of sockets made over loopback, as Python makes it on Windows."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


def test_without_unix_sockets_each_way_to_ask_for_one_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    monkeypatch.setattr(socket, "socketpair", socketpair)
    with pytest.raises(SettingError, match="no Unix sockets, so unix_path cannot be given; leave it out"):
        serve_gym("CartPole-v1", unix_path="socket")
    with pytest.raises(SettingError, match="no Unix sockets for 'unix:///socket'; use grpc://HOST:PORT"):
        make_remote("unix:///socket")
    assert main(["info", "unix:///socket"]) == 2
    assert "no Unix sockets" in capsys.readouterr().err

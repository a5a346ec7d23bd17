"""Platforms that are not Linux, faked: what they lack is taken away, and what cannot work is an error that says so."""

from __future__ import annotations

import os
import socket
import sys
import types
from pathlib import Path

import pytest

from bridge import make_remote, serve_gym
from bridge.cli import lobby
from bridge.errors import Code, RequestError, SettingError
from bridge.fleet.health import check_health
from bridge.recording import writer
from bridge.recording.reader import read_folder
from bridge.transport.address import parse_address
from bridge.worlds.isolated import child


def socketpair() -> tuple[socket.socket, socket.socket]:
    """Return a pair of sockets made over loopback, as Python makes it on Windows."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


def test_without_unix_sockets_each_way_to_ask_for_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    monkeypatch.setattr(socket, "socketpair", socketpair)
    with pytest.raises(SettingError, match="no Unix sockets, so unix_path cannot be given; leave it out"):
        serve_gym("CartPole-v1", unix_path="socket")
    with pytest.raises(SettingError, match="no Unix sockets for 'unix:///socket'; use grpc://HOST:PORT"):
        make_remote("unix:///socket")
    with pytest.raises(SettingError, match="no Unix sockets"):
        check_health(parse_address("unix:///socket"), 1.0)


def test_a_limit_of_memory_is_refused_where_the_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    with pytest.raises(RequestError, match="max_world_bytes is not possible on this system") as caught:
        child._load(b"", None, 1 << 30)
    assert caught.value.code == Code.UNIMPLEMENTED


def test_the_lobby_for_terminals_is_refused_where_a_terminal_cannot_be_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lobby, "os", types.SimpleNamespace(name="nt"))
    with pytest.raises(SettingError, match=r"needs Linux or macOS.*bridge\.perlert\.PerlertEnv"):
        lobby.run_lobby("perlert://127.0.0.1:1")


def test_recordings_are_written_as_bytes_where_files_are_text_unless_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    binary, opened = 1 << 30, []

    def open_file(path: Path, flags: int, mode: int) -> int:
        opened.append(flags)
        return os.open(path, flags & ~binary, mode)

    fake = types.SimpleNamespace(**{**vars(os), "open": open_file, "O_BINARY": binary})
    monkeypatch.setattr(writer, "os", fake)
    with serve_gym("CartPole-v1", record=str(tmp_path)) as server:
        env = make_remote(server.url)
        env.reset(seed=1)
        env.step(1)
        env.close()
    assert opened
    assert all(flags & binary for flags in opened)
    (episode,) = read_folder(tmp_path).episodes()
    assert episode.length == 1

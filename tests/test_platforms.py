"""Platforms that are not Linux, faked: what they lack is taken away, and what cannot work is an error that says so."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from bridge import make_remote, serve_gym
from bridge.cli import lobby
from bridge.errors import Code, RequestError, SettingError
from bridge.fleet.health import check_health
from bridge.recording import writer
from bridge.recording.reader import read_folder
from bridge.transport.address import parse_address
from bridge.worlds.isolated import child, world


def socketpair() -> tuple[socket.socket, socket.socket]:
    """Return a pair of sockets made over loopback, as Python makes it on Windows."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


# What Windows does not have. The standard library's modules that use it themselves are imported before.
WINDOWS = """
import asyncio, multiprocessing.util, os, selectors, signal, socket, subprocess, sys

class Socket(socket.socket):
    def __getattribute__(self, name):
        if name in ("sendmsg", "recvmsg", "recvmsg_into"):
            raise AttributeError(name)
        return super().__getattribute__(name)

socket.socket = socket.SocketType = Socket
socket.socketpair = socketpair
selectors.DefaultSelector = selectors.SelectSelector
for module, names in {
    os: "fork register_at_fork setsid killpg getuid O_CLOEXEC sched_getaffinity",
    signal: "pthread_sigmask SIGKILL SIGHUP SIGUSR1 SIGALRM setitimer",
    socket: "AF_UNIX TCP_KEEPIDLE TCP_KEEPINTVL TCP_KEEPCNT IP_PKTINFO IPV6_RECVPKTINFO SO_TIMESTAMPNS MSG_DONTWAIT",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for name in ("fcntl", "grp", "pwd", "resource", "termios", "tty"):
    sys.modules[name] = None
"""
PLAY = """
import bridge, numpy as np
from bridge.perlert import PerlertEnv, serve_perlert, udp
from bridge.wrappers import BlockingReset

udp._LINUX = False

with bridge.serve_gym("CartPole-v1") as server:
    envs = BlockingReset(bridge.make_vec_remote(server.url, num_envs=3))
    observations, infos = envs.reset(seed=1)
    assert observations.shape == (3, 4)
    for _ in range(50):
        observations, *rest = envs.step(np.ones(3, int))
    envs.close()

with bridge.serve_gym("CartPole-v1", processes=2) as group:
    envs = bridge.make_vec_remote(group.urls)
    envs.reset(seed=1)
    envs.close()

with serve_perlert("CartPole-v1", fps=60) as server, PerlertEnv(server.url) as env:
    env.reset(seed=1)
    over = False
    while not over:
        *_, terminated, truncated, _ = env.step(1)
        over = terminated or truncated
print("played")
"""


def test_without_what_windows_lacks_servers_and_clients_play_all_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import socket\n{inspect.getsource(socketpair)}{WINDOWS}{PLAY}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "played\n", "")


def test_without_unix_sockets_each_way_to_ask_for_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    monkeypatch.setattr(socket, "socketpair", socketpair)
    with pytest.raises(SettingError, match="no Unix sockets, so unix_path cannot be given; leave it out"):
        serve_gym("CartPole-v1", unix_path="socket")
    with pytest.raises(SettingError, match="no Unix sockets for 'unix:///socket'; use grpc://HOST:PORT"):
        make_remote("unix:///socket")
    with pytest.raises(SettingError, match="no Unix sockets"):
        check_health(parse_address("unix:///socket"), 1.0)


@pytest.mark.parametrize("options", [{"isolation": "process"}, {"allow_env_factories": True}], ids=str)
def test_worlds_in_processes_are_refused_where_the_loop_cannot_wait_for_a_process(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(world, "os", types.SimpleNamespace(name="nt"))
    with pytest.raises(SettingError, match="need Linux or macOS"):
        serve_gym("CartPole-v1", **options)


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

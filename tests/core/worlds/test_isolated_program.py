"""`bridge.core.worlds.isolated.program`: the process of a world that begins without the main module of its server."""

from __future__ import annotations

import functools
import os
import pickle
import socket
import struct
import types

import pytest

from bridge.core.worlds.isolated.program import Program
from bridge.testing import CountingEnv
from tests.support import server_process, until
from tests.trick_envs import gone

PARENT = """
import functools, pickle, socket, struct, sys, time, types
from bridge.core.worlds.isolated.program import Program

ours, theirs = socket.socketpair()
program = Program(theirs, pickle.dumps(types.SimpleNamespace(make_env=functools.partial(time.sleep, 60.0))))
theirs.close()
ours.sendall(struct.pack(">Q", 1) + b"h")
ours.recv(100)
ours.sendall(struct.pack(">Q", 1) + b"?")  # which it reads, and does not return from
print(program.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif("sys.platform == 'win32'")
def test_an_environment_that_does_not_return_ends_with_its_server() -> None:
    with server_process(PARENT) as (parent, pid):
        assert not gone(int(pid))
        parent.kill()
        parent.wait(30)
        until(lambda: gone(int(pid)))


@pytest.mark.skipif("sys.platform == 'win32'")
def test_an_environment_is_made_and_closed_in_a_session_of_its_own() -> None:
    recipe = pickle.dumps(types.SimpleNamespace(make_env=functools.partial(CountingEnv, 5)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        program = Program(theirs, recipe)
        theirs.close()
        assert program.exitcode is None
        for kind in (b"h", b"?", b"x"):
            ours.sendall(struct.pack(">Q", 1) + kind)
            (size,) = struct.unpack(">Q", ours.recv(8, socket.MSG_WAITALL))
            assert ours.recv(size, socket.MSG_WAITALL)[:1] == b"+"
            if kind == b"?":
                assert os.getsid(program.pid) == program.pid, "Ctrl-C goes to the server alone"
        program.join(30)
    assert program.exitcode == 0
    program.join(30)  # once more, which returns at once


@pytest.mark.skipif("sys.platform == 'win32'")
def test_a_program_that_cannot_be_started_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/there/is/no/python")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
        with pytest.raises(OSError, match="no/python"):
            Program(theirs, b"")
        assert before == (os.listdir("/proc/self/fd") if before else [])

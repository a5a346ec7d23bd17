"""`bridge.core.worlds.isolated.program`: the process of a world that begins without the main module of its server."""

from __future__ import annotations

import pytest

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

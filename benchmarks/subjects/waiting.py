"""Remotes that keep one waiting: behind links with delay, and with environments that are slow."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import patch

from benchmarks.loops import vector_stepping
from benchmarks.registry import Measure, goal, subject
from benchmarks.serving import Script, joined, server_on
from benchmarks.subjects.cartpole import ENV_ID, LANES
from benchmarks.subjects.lanes import sending

DELAY_MS = 20.0
"""The milliseconds that each link adds to a round trip."""
SLOW = 4
# `select` waits for fractions of a millisecond, which `epoll` rounds up: the link is to take its time and no more.
PROXY = """
import collections, os, selectors, socket, sys, threading, time
host, port, delay = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
listener = socket.create_server(("127.0.0.1", 0), backlog=256)
print(listener.getsockname()[1], flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
selector, others, under_way = selectors.SelectSelector(), {}, collections.deque()
selector.register(listener, selectors.EVENT_READ)

def accept():
    pair = (listener.accept()[0], socket.create_connection((host, port)))
    for sock, other in (pair, pair[::-1]):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(sock, selectors.EVENT_READ)
        others[sock] = other

while True:
    wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
    for key, _ in selector.select(wait):
        if key.fileobj is listener:
            accept()
            continue
        data = key.fileobj.recv(65536)
        if not data:
            selector.unregister(key.fileobj)
        under_way.append((time.monotonic() + delay, others[key.fileobj], data))
    while under_way and under_way[0][0] <= time.monotonic():
        _, sock, data = under_way.popleft()
        if data:
            sock.sendall(data)
        else:
            sock.shutdown(socket.SHUT_WR)
"""
# The same environments behind bare sockets: 46 bytes ask for a step, 130 bytes answer.
ECHO = """
import os, selectors, socket, sys, threading
import gymnasium
env_id, count = sys.argv[1], int(sys.argv[2])
listener = socket.create_server(("127.0.0.1", 0), backlog=256)
print(listener.getsockname()[1], flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
selector = selectors.DefaultSelector()
for _ in range(count):
    connection = listener.accept()[0]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    env = gymnasium.make(env_id)
    env.reset(seed=0)
    selector.register(connection, selectors.EVENT_READ, env)
answer = bytes(130)
while True:
    for key, _ in selector.select():
        if not key.fileobj.recv(46):
            os._exit(0)
        _, _, terminated, truncated, _ = key.data.step(0)
        if terminated or truncated:
            key.data.reset()
        key.fileobj.sendall(answer)
"""


@subject(
    "far-64",
    f"gRPC: a vector step of {LANES} worlds behind links of {DELAY_MS:g} ms",
    group="far",
    unit="ms",
    higher_is_better=False,
)
def far_worlds() -> Iterator[Measure]:
    with server_on("grpc", ENV_ID) as url:
        host, _, port = url.removeprefix("grpc://").rpartition(":")
        with (
            Script(PROXY, host, port, str(DELAY_MS / 2000.0)) as near,
            # As other machines, to which each remote has a link of its own.
            patch("bridge.core.client.wire.connection.is_loopback", return_value=False),
            joined(f"grpc://127.0.0.1:{near}", num_envs=LANES) as envs,
        ):
            steps = vector_stepping(envs)
            yield lambda seconds: 1000.0 * LANES / steps(seconds)


@subject(
    "floor-far",
    f"floor: {LANES} CartPoles and an echo each behind links of {DELAY_MS:g} ms",
    group="far",
    unit="ms",
    higher_is_better=False,
    kind="floor",
)
def floor_of_far_worlds() -> Iterator[Measure]:
    with (
        Script(ECHO, ENV_ID, str(LANES)) as port,
        Script(PROXY, "127.0.0.1", port, str(DELAY_MS / 2000.0)) as near,
        ExitStack() as stack,
    ):
        ends = [stack.enter_context(socket.create_connection(("127.0.0.1", int(near)))) for _ in range(LANES)]
        for end in ends:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = bytes(46)

        def measure(seconds: float) -> float:
            steps = 0
            start = time.perf_counter()
            until = start + seconds
            while (now := time.perf_counter()) < until:
                for end in ends:
                    end.sendall(request)
                for end in ends:
                    end.recv(130, socket.MSG_WAITALL)
                steps += 1
            return 1000.0 * (now - start) / steps

        yield measure


goal("B-9", "far-64", against=DELAY_MS, at_most=1.25)


def with_stragglers() -> Iterator[list[str]]:
    with ExitStack() as stack:
        fast = stack.enter_context(server_on("unix", ENV_ID))
        arguments = ("benchmarks.envs:SlowCartPole-v0",)
        slow = [stack.enter_context(server_on("unix", *arguments)) for _ in range(SLOW)]
        yield [fast] * (LANES - SLOW) + slow


@subject("stragglers-step", f"{LANES} worlds of which {SLOW} take 50 ms a step: lock-step", group="stragglers")
def stragglers_in_step() -> Iterator[Measure]:
    for urls in with_stragglers():
        with joined(urls) as envs:
            yield vector_stepping(envs)


@subject("stragglers-recv", f"the same by send and recv(at_least={LANES * 3 // 4})", group="stragglers")
def stragglers_by_recv() -> Iterator[Measure]:
    for urls in with_stragglers():
        with joined(urls) as envs:
            yield sending(envs, LANES * 3 // 4)


goal("B-12", "stragglers-recv", against="stragglers-step", at_least=5.0)

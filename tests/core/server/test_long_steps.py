"""Long steps: what is answered meanwhile, and which environments are in a call at the same time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from bridge import Limits, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import Code, RefusedError, RemoteError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.core.server.thread_tools import FPS, THREADS, ask, health, server_threads
from tests.inside import deputy_runs_after
from tests.peers import Stream
from tests.support import until
from tests.thread_envs import (
    SLOW,
    CallbackAgents,
    CallbackEnv,
    Gate,
    MeetingEnv,
)
from tests.trick_envs import TrickEnv, gone


class DozingEnv(CountingEnv):
    """Its step takes a millisecond, in which other threads run."""

    dozes = True

    def step(self, action: Any) -> Any:
        time.sleep(0.001)
        return super().step(action)


# Answers while an environment is in a call


def act(stream: Stream, action: int) -> None:
    """Send a Step of a single environment, or of one agent."""
    ((uid, _),) = stream.specs.actions.items()
    stream.send(step=pb.StepRequest(actions={uid: pack_tensor(np.int64(action))}))


def acted(stream: Stream, action: int) -> Any:
    """Step, and return the kind of the answer."""
    act(stream, action)
    return stream.take().WhichOneof("payload")


@contextlib.contextmanager
def worlds(*servers: Any, each: int, token: str | None = None) -> Iterator[list[Stream]]:
    """Make worlds of servers, begin their episodes, and yield their streams."""
    with contextlib.ExitStack() as stack:
        streams = []
        for server in servers:
            for _ in range(each):
                stream = Stream(server, own_connection=True, token=token)
                stack.callback(stream.die)
                made = stream.ask(create_world=pb.CreateWorldRequest()).create_world
                stream.join(made.world_name)
                assert stream.ask(step=pb.StepRequest()).WhichOneof("payload") == "step"
                streams.append(stream)
        yield streams


def fastest(call: Callable[[], Any]) -> float:
    """The seconds that a call takes at best; machines of tests are busy."""
    best = float("inf")
    for _ in range(20):
        began = time.monotonic()
        call()
        best = min(best, time.monotonic() - began)
        if best < 0.1:
            break
    return best


@contextlib.contextmanager
def held_step(kind: str) -> Iterator[tuple[Any, Stream, Gate]]:
    """Serve an environment and keep it in a step.

    Yield the server, a stream that is in another of its worlds, and the gate that the step waits for.
    """
    gate, token = Gate(), "secret-token"
    with contextlib.ExitStack() as stack:
        if kind == "agents":
            server = stack.enter_context(serve_parallel(lambda: CallbackAgents(1, gate), token=token))
        else:
            fps = {"fps": FPS} if kind == "real-time" else {}
            server = stack.enter_context(serve_gym(lambda: CallbackEnv(gate), **fps, token=token))
        held, other = stack.enter_context(worlds(server, each=2, token=token))
        stack.callback(gate.release.set)
        act(held, 1)
        assert gate.entered.wait(20)
        yield server, other, gate


@pytest.mark.parametrize("kind", ["single", "real-time", "agents"])
def test_what_needs_no_environment_is_answered_within_100_ms_during_a_long_step(kind: str) -> None:
    def refused() -> None:
        stranger = Stream(server, token="a wrong one")
        try:
            with pytest.raises(grpc.RpcError) as caught:
                stranger.ask(join_world=pb.JoinWorldRequest())
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        finally:
            stranger.close()

    def assert_quick() -> None:
        seconds = {"health": fastest(lambda: health(channel)), "a wrong token": fastest(refused)}
        for key in ("server.version", "world.name", "world.timing", "world.observation_space"):
            seconds[key] = fastest(lambda key=key: ask(other, key))
        assert all(value < 0.1 for value in seconds.values()), seconds

    with held_step(kind) as (server, other, gate), grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        health(channel)  # the first call connects, which is not what is measured here
        began = time.monotonic()
        assert_quick()
        while kind == "single" and time.monotonic() < began + 5.0:
            assert not gate.release.wait(0.5)
            assert_quick()


def test_a_deputy_that_is_quicker_than_the_thread_of_the_call_gives_the_loop_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a busy machine: it has left the loop, and looks for a long call again before that thread runs."""
    deputy_runs_after(monkeypatch, 0.0)
    with (
        serve_gym(lambda: DozingEnv(1000)) as server,
        make_remote(server.url, timeout=20.0) as env,
        make_remote(server.url) as other,
    ):
        env.reset(seed=0)
        other.reset(seed=0)
        for _ in range(50):
            env.step(0)
            assert other.get_attr("dozes")


def test_requests_that_need_an_environment_are_answered_in_order_once_the_long_step_ends() -> None:
    with held_step("single") as (server, other, gate):
        act(other, 0)
        act(other, 0)
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            health(channel)
        gate.release.set()
        assert [other.take().WhichOneof("payload") for _ in range(2)] == ["step", "step"]


# Which environments are in a call at the same time


def at_the_same_time(calls: list[Callable[[], Any]]) -> list[Any]:
    """Make calls in threads; return their results."""
    results: list[Any] = [None] * len(calls)

    def call(index: int) -> None:
        results[index] = calls[index]()

    workers = [threading.Thread(target=call, args=(index,)) for index in range(len(calls))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()
    return results


class Inside:
    """Counts how many calls are inside at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = self.most = self.calls = 0

    def __call__(self) -> None:
        with self._lock:
            self.now += 1
            self.calls += 1
            self.most = max(self.most, self.now)
        time.sleep(SLOW / 2)  # long enough for another thread to take over the event loop
        with self._lock:
            self.now -= 1


def test_thread_safe_environments_of_two_worlds_are_in_a_step_at_the_same_time() -> None:
    barrier = threading.Barrier(2)

    def meet() -> None:
        barrier.wait(10)

    with serve_gym(lambda: CallbackEnv(meet), thread_safe=True) as server, worlds(server, each=2) as streams:
        for stream in streams:
            act(stream, 1)
        assert [stream.take().WhichOneof("payload") for stream in streams] == ["step", "step"]


def test_thread_safe_lanes_in_real_time_are_in_a_step_at_the_same_time() -> None:
    barrier = threading.Barrier(2)
    met = threading.Event()

    def meet() -> None:
        if not met.is_set():
            barrier.wait(10)
            met.set()

    with serve_gym(lambda: CallbackEnv(meet), num_envs=2, fps=FPS, thread_safe=True) as server:
        envs = make_vec_remote(server.url)
        try:
            blocking = BlockingReset(envs)
            blocking.reset()
            blocking.step(np.ones(2, np.int64))
            assert met.wait(20)
        finally:
            envs.close()


def test_other_environments_are_never_in_a_call_at_the_same_time_not_even_of_several_servers() -> None:
    inside = Inside()
    with (
        serve_gym(lambda: CallbackEnv(inside)) as one,
        serve_gym(lambda: CallbackEnv(inside), fps=FPS) as two,
        serve_parallel(lambda: CallbackAgents(1, inside)) as three,
        worlds(one, two, three, each=2) as streams,
    ):

        def several(stream: Stream) -> None:
            for _ in range(5):
                assert acted(stream, 1) == "step"

        at_the_same_time([lambda stream=stream: several(stream) for stream in streams])
        until(lambda: inside.calls >= 22)
        assert inside.most == 1


# Isolated worlds


def test_isolated_worlds_step_at_the_same_time_without_a_thread_each(tmp_path: Path) -> None:
    with (
        serve_gym(MeetingEnv, env_kwargs={"folder": str(tmp_path)}, isolation="process") as server,
        worlds(server, each=3) as streams,
    ):
        try:
            assert server_threads() == THREADS
            for stream in streams:
                act(stream, 1)
            until(lambda: len(list(tmp_path.glob("inside-*"))) == 3, deadline=20)
            assert server_threads() == THREADS
        finally:
            (tmp_path / "go").touch()
        for stream in streams:
            assert stream.take().WhichOneof("payload") == "step"


@pytest.mark.slow
def test_a_hung_process_is_ended_by_its_timer_while_other_worlds_are_served() -> None:
    with serve_gym(TrickEnv, isolation="process", limits=Limits(call_timeout=1.0)) as server:
        bad = make_remote(server.url, env_kwargs={"trick": "loop"}, timeout=30)
        good = make_remote(server.url, timeout=30)
        try:
            bad.reset()
            good.reset()
            pid = bad.call("pid")
            bad.step(0)
            bad.step(0)
            failures: list[RemoteError] = []

            def hang() -> None:
                try:
                    bad.step(0)
                except RemoteError as error:
                    failures.append(error)

            hanging = threading.Thread(target=hang)
            hanging.start()
            steps = 0
            try:
                while hanging.is_alive():
                    good.step(0)
                    steps += 1
                    assert server_threads() == THREADS
            finally:
                hanging.join(30)
            assert steps > 20, "its world went on meanwhile"
            assert isinstance(failures[0], RefusedError)
            assert failures[0].code == Code.DEADLINE_EXCEEDED
            until(lambda: gone(pid))
            good.step(0)
        finally:
            good.close()
            bad.close()


def test_the_threads_of_a_server_end_with_it() -> None:
    before = server_threads()
    with serve_gym("CartPole-v1"):
        assert server_threads() == THREADS
    with serve_gym("CartPole-v1"), serve_gym("CartPole-v1"):
        assert server_threads() == sorted(2 * THREADS)
    assert server_threads() == before == []

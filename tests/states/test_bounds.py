"""States at servers that end, and clients that ask for too much: bounded, told, and nothing of others touched."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import RecordEpisodeStatistics

from bridge import Listener, Observer, SavedState, States, make_remote, serve_gym
from bridge.core.encoding import values
from bridge.core.encoding.tensors import unpack_tensor
from bridge.core.worlds.scheduling import Scheduler
from bridge.errors import BridgeError, Code, RefusedError, RequestError
from bridge.pb import states_pb2
from bridge.states.handler import StatesHandler
from bridge.testing import Inspector
from tests.states_envs import Walk
from tests.support import assert_identical, server_process, until

DEADLINE = 60.0
# On the port that it is given, so that another one can take its place.
SERVE = """
import sys, bridge
server = bridge.serve_gym("CartPole-v1", port=int(sys.argv[1]))
print(server.url, flush=True)
server.wait(grace=0.0)
"""


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_the_states_of_a_server_that_ended_are_gone_and_the_environment_goes_on(end: str) -> None:
    with server_process(SERVE, "0") as (process, url):
        env = make_remote(url, timeout=DEADLINE, wait_for_server=DEADLINE)
        with closing(env):
            env.reset(seed=0)
            state = env.save_state()
            getattr(process, end)()  # killed, or drained
            process.wait(DEADLINE)
            with pytest.raises(BridgeError):
                env.restore_state(state)
            port = url.rpartition(":")[2]
            with server_process(SERVE, port) as (_, again):
                assert again == url
                env.reset(seed=0)
                with pytest.raises(RefusedError, match="before this one was started") as refused:
                    env.restore_state(state)
                assert refused.value.code == Code.NOT_FOUND
                wanted = env.step(1)
                env.reset(seed=0)
                assert_identical(env.step(1), wanted)


def test_saves_without_end_leave_the_server_and_others_alone() -> None:
    with (
        serve_gym(Walk, states=States(max_states=50)) as server,
        closing(make_remote(server.url, timeout=DEADLINE)) as greedy,
        closing(make_remote(server.url, timeout=DEADLINE)) as other,
    ):
        greedy.reset(seed=0)
        other.reset(seed=1)
        mine = other.save_state()
        wanted = other.step(1)
        for _ in range(50):
            greedy.save_state()
        for _ in range(150):
            with pytest.raises(RefusedError, match="max_states=50") as refused:
                greedy.save_state()
            assert refused.value.code == Code.RESOURCE_EXHAUSTED
        other.restore_state(mine)
        assert_identical(other.step(1), wanted)
        with Inspector(server.url, DEADLINE) as inspector:
            assert unpack_tensor(inspector.read_property("server.messages.states.states")) == 51


class Virtual:
    """A server's handler of states under a clock that the test turns, without a server."""

    def __init__(self, limits: States) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(lambda: self.now)
        self.handler = StatesHandler(limits, "start", self.scheduler)
        self.counts = {one.key: one.read for one in self.handler.properties()}

    def answer(self, client: str, **request: Any) -> Any:
        """Answer a request; raises what it raises."""
        found: list[Any] = []
        asked = Beside(client)
        message = states_pb2.StatesRequest(**request).SerializeToString()
        self.scheduler.start(self.handler.answer(message, asked), lambda result, error: found.append((result, error)))
        until(lambda: [self.scheduler.run(), *found][1:], DEADLINE)
        result, error = found[0]
        if error is not None:
            raise error
        return states_pb2.StatesResponse.FromString(result)

    def states(self) -> Any:
        return self.counts["server.messages.states.states"]()


class Beside:
    """Answers as the part beside an environment."""

    world = "0"

    def __init__(self, client: object) -> None:
        self.client, self.home = client, os.getpid()

    async def run(self, request: bytes) -> bytes:
        name, *arguments = values.decode(request)
        if name == "describe":
            return values.encode(["a walk", cloudpickle.dumps(Walk) if arguments[0] else b"", ""])
        return values.encode([["copy", 1000]] if name == "save" else None)

    def charge(self, seconds: float) -> None:
        """Charge nothing."""


SAVES = 5_000


def grown(function: Callable[[], object]) -> int:
    """Return how many bytes are there that were not, after so many calls of a function."""
    tracemalloc.start()
    try:
        for _ in range(SAVES // 10):  # what is made once has been made then
            function()
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(SAVES):
            function()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def test_of_saves_without_end_those_beyond_the_bound_take_no_memory() -> None:
    virtual = Virtual(States(max_states=50))
    with closing(virtual.handler):
        for _ in range(50):
            virtual.answer("greedy", save={"lanes": [0]})

        def save() -> None:
            with pytest.raises(RequestError, match="max_states=50"):
                virtual.answer("greedy", save={"lanes": [0]})

        assert grown(save) < 50_000
        assert virtual.states() == 50
        virtual.answer("other", save={"lanes": [0]})
        virtual.handler.left("greedy")
        virtual.now += 61.0
        virtual.scheduler.run()
        assert virtual.states() == 1, "its own are gone, and nobody else's"


def test_of_saves_without_end_that_are_released_nothing_is_left() -> None:
    virtual = Virtual(States(max_states=50))
    with closing(virtual.handler):

        def save() -> None:
            (state,) = virtual.answer("busy", save={"lanes": [0]}).states
            virtual.answer("busy", release={"states": [state.identifier]})

        assert grown(save) < 50_000
        assert virtual.states() == 0


class Slow(Walk):
    """Takes some milliseconds to be copied."""

    def make(self) -> None:
        self.parts = [[float(number)] for number in range(2000)]


def test_small_saves_that_are_released_at_once_are_charged_where_somebody_else_waits() -> None:
    with serve_gym(Slow) as server, closing(make_remote(server.url, timeout=DEADLINE)) as env:
        env.reset(seed=0)
        for _ in range(100):
            env.save_state().release()
        assert server.status()["charged_client"] < 0.05, "there is nobody to be fair to"
        over = threading.Event()

        def attack() -> None:
            while not over.is_set():
                env.save_state().release()

        attacker = threading.Thread(target=attack)
        attacker.start()
        try:
            with closing(make_remote(server.url, timeout=DEADLINE)) as victim:
                victim.reset(seed=0)

                def play() -> None:
                    if victim.step(0)[2]:
                        victim.reset()

                def is_charged() -> bool:
                    play()
                    return server.status()["charged_client"] > 0.2

                until(is_charged, DEADLINE)
                for _ in range(100):
                    play()
        finally:
            over.set()
            attacker.join(DEADLINE)
        env.step(0)


class Huge(Walk):
    """Has ten megabytes, and more with each step."""

    def make(self) -> None:
        self.parts = [np.zeros(10_000_000 // 8)]

    def act(self, action: int) -> None:
        self.parts.append(np.ones(10_000_000 // 8))


@pytest.mark.slow
def test_a_huge_state_is_refused_and_gives_its_memory_back() -> None:
    limits = States(max_state_bytes=25_000_000)
    with serve_gym(Huge, states=limits) as server, closing(make_remote(server.url, timeout=DEADLINE)) as env:
        env.reset(seed=0)
        state = env.save_state()
        env.step(0)
        env.step(0)
        for _ in range(3):
            with pytest.raises(RefusedError, match="max_state_bytes=25000000") as refused:
                env.save_state()
            assert refused.value.code == Code.RESOURCE_EXHAUSTED
        with Inspector(server.url, DEADLINE) as inspector:
            assert unpack_tensor(inspector.read_property("server.messages.states.states")) == 1
        env.restore_state(state)
        env.save_state()


def test_an_identifier_of_another_server_and_a_changed_one_are_refused_alike() -> None:
    with (
        serve_gym(Walk) as one,
        serve_gym(Walk) as other,
        closing(make_remote(one.url, timeout=DEADLINE)) as env,
        closing(make_remote(other.url, timeout=DEADLINE)) as there,
    ):
        env.reset(seed=0)
        there.reset(seed=0)
        state, foreign = env.save_state(), there.save_state()
        for identifier in (foreign.identifier, state.identifier[:-1], state.identifier + "A", state.identifier.upper()):
            forged = SavedState(identifier, state.url, state.how, state.bytes, state.environment)
            with pytest.raises(RefusedError, match="there is no such state") as refused:
                env.restore_state(forged)
            assert refused.value.code == Code.NOT_FOUND
            env.release_states([forged])
        env.restore_state(state)


def counted() -> gymnasium.Env[Any, Any]:
    """Walks for seven steps, and tells its return."""
    return RecordEpisodeStatistics(gymnasium.wrappers.TimeLimit(Walk(), 7))


def test_returns_and_lengths_are_those_of_the_restored_episode() -> None:
    with serve_gym(counted) as server, closing(make_remote(server.url, timeout=DEADLINE)) as env:
        env.reset(seed=0)
        for _ in range(3):
            env.step(1)
        state = env.save_state()
        ends = []
        for _ in range(2):
            last: Any = None
            while last is None or not (last[2] or last[3]):
                last = env.step(1)
            ends.append((last[4]["episode"]["r"], last[4]["episode"]["l"]))
            env.restore_state(state)
        assert ends[0] == ends[1]
        assert ends[0][1] == 7


class Fragile(Walk):
    """Holds what cannot be copied, and makes it anew in each reset."""

    def begin(self) -> None:
        self.numbers = iter([float(n) for n in range(300)])

    def act(self, action: int) -> None:
        self.x = self.x + next(self.numbers)


class Told(Observer, Listener):
    """Adds up the rewards of the episodes that it is told of."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def made(self, world: Any) -> Told:
        return self

    def began(self, lane: Any, result: Any, mask: Any) -> None:
        self.events.append(("began", np.array(result[0])))

    def placed(self, result: Any, mask: Any) -> None:
        self.events.append(("placed", np.array(result[0])))

    def stepped(self, lane: Any, action: Any, result: Any) -> Any:
        self.events.append(("stepped", np.array(result[0])))
        return result


@pytest.mark.parametrize(("kind", "how"), [(Walk, "copy"), (Fragile, "replay")], ids=["copy", "replay"])
def test_an_observer_follows_a_restored_environment(kind: Any, how: str) -> None:
    told = Told()
    with (
        serve_gym(kind, observers=[told]) as server,
        closing(make_remote(server.url, states=True, timeout=DEADLINE)) as env,
    ):
        env.reset(seed=0)
        saved = env.step(1)[0]
        state = env.save_state()
        assert state.how == how
        after = env.step(2)[0]
        env.step(0)
        env.restore_state(state)
        env.step(2)
        assert [name for name, _ in told.events] == ["began", "stepped", "stepped", "stepped", "placed", "stepped"]
        assert_identical(told.events[4][1], saved)
        assert_identical(told.events[5][1], after)

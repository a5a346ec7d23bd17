"""States at servers that end, and clients that ask for too much: bounded, told, and nothing of others touched."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import RecordEpisodeStatistics

from bridge import Listener, Observer, SavedState, States, make_remote, serve_gym
from bridge.core.encoding.tensors import unpack_tensor
from bridge.errors import BridgeError, Code, RefusedError
from bridge.testing import Inspector
from tests.states_envs import Walk
from tests.support import assert_identical, sampled, server_process, until

DEADLINE = 60.0
# On the port that it is given, so that another one can take its place.
SERVE = """
import sys, bridge
server = bridge.serve_gym("CartPole-v1", port=int(sys.argv[1]))
print(server.url, flush=True)
server.wait(grace=0.0)
"""


@pytest.mark.parametrize("end", ["kill", "terminate"])
@pytest.mark.slow
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


class Slow(Walk):
    """Takes some milliseconds to be copied."""

    def make(self) -> None:
        self.parts = [[float(number)] for number in range(2000)]


@pytest.mark.slow
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
        if len(self.parts) < 4:  # enough for this test: what tries the environment makes many more steps
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("kind", "how"), sampled([(Walk, "copy"), (Fragile, "replay")], 2, 1, slow=True), ids=["copy", "replay"]
)
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

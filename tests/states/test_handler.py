"""`bridge.states.handler`: who saves without end is refused, and takes no memory by it."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from typing import Any

import cloudpickle
import pytest

from bridge import States
from bridge.core.encoding import values
from bridge.core.worlds.scheduling import Scheduler
from bridge.errors import RequestError
from bridge.pb import states_pb2
from bridge.states.handler import StatesHandler
from tests.states_envs import Walk
from tests.support import until

DEADLINE = 60.0


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_of_saves_without_end_that_are_released_nothing_is_left() -> None:
    virtual = Virtual(States(max_states=50))
    with closing(virtual.handler):

        def save() -> None:
            (state,) = virtual.answer("busy", save={"lanes": [0]}).states
            virtual.answer("busy", release={"states": [state.identifier]})

        assert grown(save) < 50_000
        assert virtual.states() == 0

"""How many of our functions one step of one environment passes through, at each end; the list is printed.

Python calls are most of what a step costs. A change that adds some must show what they are for.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import bridge
import bridge.wrappers
from bridge import make_remote, make_vec_remote, serve_gym
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.inside import in_serving_thread
from tests.support import server_process

ROOT, WRAPPERS = Path(bridge.__file__).parent, Path(bridge.wrappers.__file__).parent
# What a step of CartPole may take at most: calls, and files.
CLIENT = (24, 14)
SERVER = (18, 12)
# What each further world adds at the server, where the Steps of all come together.
FURTHER_WORLD = 10
# What a step of a vector environment of one slot may take, and each further slot.
ONE_SLOT, FURTHER_SLOT = 60, 15
# What lanes that end in a step add to it, where they begin anew in the same step (SAME_STEP), however many they are.
LANES_THAT_END = 25
# What a step of one slot may take that sees that its server was killed.
LOST_SERVER = (107, 23)
_SERVER = """
from bridge import serve_gym
with serve_gym("CartPole-v1") as server:
    print(server.url, flush=True)
    server.wait()
"""


class Quiet(CountingEnv):
    """Has nothing to tell in its infos."""

    def reset(self, **given: Any) -> Any:
        return super().reset(**given)[0], {}

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {}


class Counter:
    """Takes note of each call of a function of ours."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        for root in (ROOT, WRAPPERS):
            if event == "call" and code.co_filename.startswith(f"{root}{os.sep}"):
                file = Path(code.co_filename).relative_to(root.parent).as_posix().removeprefix("bridge/")
                self.calls.append((file, getattr(code, "co_qualname", code.co_name)))

    def check(self, most: tuple[int, int]) -> None:
        calls, files = len(self.calls), len({file for file, _ in self.calls})
        listing = "\n".join(f"{number:3} {file} {name}" for number, (file, name) in enumerate(self.calls, 1))
        print(f"{calls} calls in {files} files\n{listing}")
        assert (calls <= most[0], files <= most[1]) == (True, True), f"{calls} calls in {files} files:\n{listing}"


def test_one_step_passes_few_functions_of_the_client() -> None:
    counter = Counter()
    with serve_gym("CartPole-v1") as server:
        env = make_remote(server.url)
        env.reset(seed=0)
        for action in (0, 1, 0, 1):  # what is remembered is remembered then
            env.step(action)
        sys.setprofile(counter)
        try:
            env.step(0)
        finally:
            sys.setprofile(None)
        env.close()
    assert ("core/client/envs/env.py", "RemoteEnv.step" if sys.version_info >= (3, 11) else "step") in counter.calls
    counter.check(CLIENT)


def calls_of_a_vector_step(num_envs: int) -> list[tuple[str, str]]:
    counter = Counter()
    with serve_gym("CartPole-v1") as server:
        envs = BlockingReset(make_vec_remote(server.url, num_envs=num_envs))
        envs.reset(seed=0)
        for action in (0, 1, 0, 1):  # what is remembered is remembered then
            envs.step(np.full(num_envs, action))
        actions = np.zeros(num_envs, np.int64)
        sys.setprofile(counter)
        try:
            envs.step(actions)
        finally:
            sys.setprofile(None)
        envs.close()
    return counter.calls


def test_a_vector_step_passes_few_functions_and_each_further_slot_few_more() -> None:
    """The wrappers count. Slots of one machine share a connection, whose answers may arrive in several pieces."""
    one, four, twelve = (calls_of_a_vector_step(count) for count in (1, 4, 12))
    counts = Counter()
    counts.calls = one
    counts.check((ONE_SLOT, len(one)))
    arrivals = ("Poller.ready", "ready", "Connection._receive", "_receive", "GrpcClient.receive_data", "receive_data")
    few, many = (sum(name not in arrivals for _, name in calls) for calls in (four, twelve))
    assert (many - few) / 8 <= FURTHER_SLOT, f"{few} calls for 4 slots, {many} for 12"


def calls_of_a_step_of_lanes(lanes: int, length: int) -> list[tuple[str, str]]:
    """What the client passes through in the third step of lanes, which end in it if their episodes are as long."""
    counter = Counter()
    with serve_gym(lambda: Quiet(length)) as server:
        envs: Any = make_vec_remote(server.url, num_envs=lanes, lanes=True, blocking=True, autoreset_mode="SameStep")
        envs.reset(seed=0)
        actions = np.zeros(lanes, np.int64)
        for _ in range(2):
            envs.step(actions)
        sys.setprofile(counter)
        try:
            envs.step_async(actions)
            results = envs.wait_for_all("step")
        finally:
            sys.setprofile(None)
        assert (results.first is not None) == (length == 3)
        envs.close()
    arrivals = ("Poller.ready", "ready", "Connection._receive", "_receive", "GrpcClient.receive_data", "receive_data")
    return [call for call in counter.calls if call[1] not in arrivals]


def test_lanes_that_end_in_a_step_and_begin_anew_add_few_functions_of_the_client() -> None:
    going_on, four, twelve = (calls_of_a_step_of_lanes(*given) for given in ((4, 9), (4, 3), (12, 3)))
    counts = Counter()
    counts.calls = four
    print(f"{len(going_on)} calls where none ends")
    counts.check((len(going_on) + LANES_THAT_END, len(four)))
    assert len(twelve) <= len(four) + 1  # a longer message has a longer length


def test_a_step_that_sees_a_lost_server_passes_few_functions() -> None:
    """Its process was killed: the connection ends without a word, and the episode is truncated."""
    counter = Counter()
    with server_process(_SERVER) as (process, url):
        envs = BlockingReset(make_vec_remote(url, num_envs=1))
        envs.reset(seed=0)
        for action in (0, 1, 0, 1):  # what is remembered is remembered then
            envs.step(np.full(1, action))
        process.kill()
        process.wait(30)
        sys.setprofile(counter)
        try:
            truncations = envs.step(np.zeros(1, np.int64))[3]
        finally:
            sys.setprofile(None)
        envs.close()
    assert truncations.tolist() == [True]
    counter.check(LOST_SERVER)


def calls_of_the_server(server: Any, step: Callable[[int], Any]) -> list[tuple[str, str]]:
    """What a step of a client passes through in the server's thread, without what comes now and then."""
    counter = Counter()
    for action in (0, 1, 0, 1):
        step(action)
    call_in_serving_thread(server, lambda: sys.setprofile(counter))
    for action in (1, 0):  # once they are answered, what brought the function into the thread is over, too
        step(action)
    steps = []
    for action in (0, 1) * 8:  # a turn after one that took long is looked at closer: the plainest counts
        counter.calls.clear()
        step(action)
        steps.append(list(counter.calls))  # the answer is here, so all of it ran
    call_in_serving_thread(server, lambda: sys.setprofile(None))
    return min(steps, key=len)


def test_one_step_passes_few_functions_of_the_server() -> None:
    counter = Counter()
    with serve_gym("CartPole-v1") as server:
        env = make_remote(server.url)
        env.reset(seed=0)
        counter.calls = calls_of_the_server(server, env.step)
        env.close()
    assert "core/worlds/local.py" in {file for file, _ in counter.calls}
    counter.check(SERVER)


def calls_for_worlds(count: int) -> list[tuple[str, str]]:
    with serve_gym("CartPole-v1") as server:
        envs = BlockingReset(make_vec_remote(server.url, num_envs=count))
        envs.reset(seed=0)
        found = calls_of_the_server(server, lambda action: envs.step(np.full(count, action)))
        envs.close()
    return found


def test_each_further_world_of_a_client_adds_few_functions_of_the_server() -> None:
    few, many = calls_for_worlds(4), calls_for_worlds(12)
    listing = "\n".join(f"{number:3} {file} {name}" for number, (file, name) in enumerate(many, 1))
    assert (len(many) - len(few)) / 8 <= FURTHER_WORLD, f"{len(few)} calls for 4 worlds, {len(many)} for 12:\n{listing}"


def call_in_serving_thread(server: Any, function: Callable[[], Any]) -> None:
    """Call a function in the server's thread, and wait until it returned."""
    done = threading.Event()

    def call() -> None:
        function()
        done.set()

    in_serving_thread(server, call)
    assert done.wait(20.0)

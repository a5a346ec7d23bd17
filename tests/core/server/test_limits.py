"""Every limit of a server: its name is in the refusal, nothing was done, and below it everything goes on."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from bridge import Limits, Server, errors, make_remote, make_vec_remote, serve_gym
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.http2_tools import Hand
from tests.peers import Stream
from tests.places import ROOT
from tests.support import server_process, until

DOCS = ROOT / "docs" / "limits.md"


class WaitingEnv(CountingEnv):
    """Its steps wait for the test."""

    def __init__(self, entered: threading.Event, release: threading.Event) -> None:
        super().__init__(1000)
        self.entered, self.release = entered, release

    def step(self, action: Any) -> Any:
        self.entered.set()
        assert self.release.wait(30)
        return super().step(action)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


def url_of(server: Server, over: str) -> str:
    """Where the server is reached over this transport."""
    (url,) = [url for url in server.urls if url.startswith(over)]
    return url


class WideEnv(CountingEnv):
    """Its observations have 50 KB."""

    def __init__(self) -> None:
        super().__init__(2)
        self.observation_space = gymnasium.spaces.Box(0, 255, (50_000,), np.uint8)

    def reset(self, **keywords: Any) -> Any:
        return np.zeros(50_000, np.uint8), super().reset(**keywords)[1]

    def step(self, action: Any) -> Any:
        return np.zeros(50_000, np.uint8), *super().step(action)[1:]


def test_an_end_in_an_answer_that_is_too_large_is_told_to_a_client_that_asks_for_less() -> None:
    with serve_gym(WideEnv, limits=Limits(max_message_bytes=40_000)) as server:
        stream = Stream(server).join()
        act, whole, less = {1: pack_tensor(0)}, [stream.uids["observation"]], [stream.uids["reward"]]
        assert stream.ask(step=pb.StepRequest()).step.state == pb.RUNNING
        assert stream.ask(step=pb.StepRequest(actions=act)).step.state == pb.RUNNING
        for _ in range(2):
            answer = stream.ask(step=pb.StepRequest(actions=act, requested_observations=whole))
            assert answer.error.code == Code.RESOURCE_EXHAUSTED
            assert "max_message_bytes=40000" in answer.error.message
        step = stream.ask(step=pb.StepRequest(actions=act, requested_observations=less)).step
        assert (step.state, unpack_tensor(step.observations[less[0]])[()]) == (pb.TERMINATED, 2.0)
        assert stream.ask(step=pb.StepRequest(actions=act)).step.state == pb.RUNNING
        stream.close()


@pytest.mark.parametrize("over", ["grpc", "unix"])
def test_more_requests_than_may_be_in_flight_are_refused_and_later_ones_served(over: str, path: str) -> None:
    entered, release = threading.Event(), threading.Event()
    with serve_gym(
        lambda: WaitingEnv(entered, release), limits=Limits(max_requests_in_flight=1), unix_path=path
    ) as server:
        busy = make_vec_remote(server.url)
        other = make_remote(url_of(server, over))
        BlockingReset(busy).reset(seed=0)
        other.reset(seed=0)
        busy.step_async(np.zeros(1, np.int64))
        assert entered.wait(10)
        with pytest.raises(errors.RefusedError, match="max_requests_in_flight=1 requests already") as caught:
            other.step(1)
        assert caught.value.code == errors.Code.RESOURCE_EXHAUSTED
        release.set()
        busy.step_wait()
        assert server.status()["requests"] == 0
        other.step(1)  # the episode goes on: nothing was done
        other.close()
        busy.close()


@pytest.mark.parametrize("over", ["grpc", "unix"])
@pytest.mark.parametrize("size", [6000, 300_000])
def test_requests_that_take_more_than_the_queue_are_refused_and_smaller_ones_served(
    size: int, over: str, path: str
) -> None:
    with serve_gym("CartPole-v1", limits=Limits(max_queued_bytes=5000), unix_path=path) as server:
        env = make_remote(url_of(server, over))
        env.reset(seed=0)
        for _ in range(2):
            with pytest.raises(errors.RefusedError, match=r"more than max_queued_bytes=5000") as caught:
                env.call("set_state", "x" * size)
            assert caught.value.code == errors.Code.RESOURCE_EXHAUSTED
        assert env.step(1)[1] == 1.0
        until(lambda: server.status()["queued_bytes"] == 0)
        env.close()


class LargeEnv(gymnasium.Env[Any, Any]):
    """Gives observations that no socket holds."""

    observation_space = gymnasium.spaces.Box(0, 255, (6_000_000,), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)
    size = 3

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros((6_000_000,), np.uint8), {}


BEGIN = pb.EnvironmentRequest(step=pb.StepRequest(requested_observations=[1])).SerializeToString()
RESET = pb.EnvironmentRequest(reset=pb.ResetRequest()).SerializeToString()


@pytest.mark.slow
def test_output_that_waits_for_a_slow_reader_takes_room_and_gives_it_back() -> None:
    with serve_gym(LargeEnv, limits=Limits(max_queued_bytes=1_000_000)) as server, Hand(server) as slow:
        other = make_remote(server.url)
        number = slow.play()
        slow.credits = False
        slow.say(number, BEGIN)
        until(lambda: server.status()["queued_bytes"] > 1_000_000)
        with pytest.raises(errors.RefusedError, match=r"more than max_queued_bytes=1000000"):
            other.get_attr("size")
        slow.credits = True
        slow.room(1 << 24)
        slow.room(1 << 24, number)
        assert len(slow.response(number).step.observations) == 1
        until(lambda: server.status()["queued_bytes"] == 0)
        assert other.get_attr("size") == 3
        slow.credits = False
        again = slow.play()
        slow.say(again, BEGIN, RESET)
        until(lambda: server.status()["queued_bytes"] > 1_000_000)
        slow.sock.close()  # without having read
        until(lambda: server.status()["queued_bytes"] == 0)
        assert other.get_attr("size") == 3
        other.close()


FULL = """
import os, resource, sys, bridge
server = bridge.serve_gym("CartPole-v1")
print(server.url, flush=True)
sys.stdin.readline()
held = []
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    print("full", flush=True)
sys.stdin.readline()
for file in held:
    os.close(file)
sys.stdin.read()
"""


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such limit")
def test_who_comes_while_no_file_descriptor_is_left_waits_until_one_is() -> None:
    with server_process(FULL) as (process, url), make_remote(url, timeout=60) as env:
        assert process.stdin is not None
        assert process.stdout is not None
        env.reset(seed=1)
        process.stdin.write("fill\n")
        assert process.stdout.readline() == "full\n"
        with ThreadPoolExecutor() as threads:
            other = threads.submit(make_remote, url, timeout=60)
            for _ in range(20):
                env.step(0)
                env.reset()
            assert not other.done()
            process.stdin.write("free\n")
            with other.result(60) as late:
                late.reset(seed=1)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Limits) if "int" in field.type])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many"])
def test_a_limit_that_is_no_positive_integer_is_refused_by_name(name: str, value: Any) -> None:
    if name == "max_worlds" and value == 0:
        assert Limits(max_worlds=0).max_worlds == 0
        return
    with pytest.raises(errors.SettingError, match=f"expected {name} to be a (positive|non-negative) integer"):
        Limits(**{name: value})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Limits) if "float" in field.type])
@pytest.mark.parametrize("value", [-1, -0.5, float("nan"), True, "many"])
def test_a_limit_that_is_no_positive_number_of_seconds_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(errors.SettingError, match=f"expected {name} to be a (positive )?number of seconds"):
        Limits(**{name: value})


def test_a_limit_that_may_be_none_is_and_no_other() -> None:
    optional = {"call_timeout", "max_world_bytes", "idle_timeout", "abandoned_timeout"}
    for field in dataclasses.fields(Limits):
        if field.name in optional:
            assert getattr(Limits(**{field.name: None}), field.name) is None
        else:
            with pytest.raises(errors.SettingError, match=f"expected {field.name} to be"):
                Limits(**{field.name: None})
    assert Limits(drain_timeout=0).drain_timeout == 0


def test_the_table_in_the_docs_has_every_limit_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", DOCS.read_text(), re.MULTILINE))
    for field in dataclasses.fields(Limits):
        assert rows[field.name].strip().removesuffix(" s") == _shown(field.default), field.name


def _shown(default: Any) -> str:
    return "none" if default is None else f"{default:.0f}"

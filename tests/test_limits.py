"""Every limit of a server: its name is in the refusal, nothing was done, and below it everything goes on."""

from __future__ import annotations

import dataclasses
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge import errors, make_remote, make_vec_remote, serve_gym
from bridge.server.limits import Limits
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.support import until

DOCS = Path(__file__).parent.parent / "docs" / "limits.md"


class WaitingEnv(CountingEnv):
    """Its steps wait for the test."""

    def __init__(self, entered: threading.Event, release: threading.Event) -> None:
        super().__init__(1000)
        self.entered, self.release = entered, release

    def step(self, action: Any) -> Any:
        self.entered.set()
        assert self.release.wait(30)
        return super().step(action)


def test_more_requests_than_may_be_in_flight_are_refused_and_later_ones_served() -> None:
    entered, release = threading.Event(), threading.Event()
    with serve_gym(lambda: WaitingEnv(entered, release), max_requests_in_flight=1) as server:
        busy, other = make_vec_remote(server.url), make_remote(server.url)
        BlockingReset(busy).reset(seed=0)
        other.reset(seed=0)
        busy.step_async(np.zeros(1, np.int64))
        assert entered.wait(10)
        with pytest.raises(errors.RefusedError, match="max_requests_in_flight=1 requests already") as caught:
            other.step(1)
        assert caught.value.code == errors.Code.RESOURCE_EXHAUSTED
        release.set()
        busy.step_wait()
        assert server._transport._flight.requests == 0
        other.step(1)  # the episode goes on: nothing was done
        other.close()
        busy.close()


def test_requests_that_take_more_than_the_queue_are_refused_and_smaller_ones_served() -> None:
    with serve_gym("CartPole-v1", max_queued_bytes=5000) as server:
        env = make_remote(server.url)
        env.reset(seed=0)
        with pytest.raises(errors.RefusedError, match=r"more than max_queued_bytes=5000"):
            env.call("set_state", "x" * 6000)
        assert env.step(1)[1] == 1.0
        until(lambda: server._transport._flight.bytes == 0)
        env.close()


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Limits)])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many"])
def test_a_limit_that_is_no_positive_integer_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(errors.SettingError, match=f"expected {name} to be a positive integer"):
        Limits(**{name: value})


def test_the_table_in_the_docs_has_every_limit_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", DOCS.read_text(), re.MULTILINE))
    for field in dataclasses.fields(Limits):
        assert rows[field.name].strip().replace(" ", "") == str(field.default), field.name

"""Environments that compute by libraries: what those remember is no part of a state, what they draw is refused."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import mujoco
import pytest

from bridge import make_remote, serve_gym
from tests.library_envs import COPIED, DRAW_LATE, RIGHT_OR_REFUSED, FirstStep, FirstStepWithin, Table
from tests.states.right_or_refused import (
    examine,
    examine_replay,
    goes_wrong,
    goes_wrong_as_a_lane,
    is_moved_by_a_save,
    is_replayed_wrong,
    replayed_in_place,
)
from tests.support import stable_id

DEADLINE = 60.0


@pytest.mark.parametrize("kind", COPIED, ids=stable_id)
def test_what_computes_by_a_library_is_copied(kind: Any) -> None:
    assert examine(kind) == ""
    assert not goes_wrong(kind)
    assert not goes_wrong_as_a_lane(kind)
    assert not is_moved_by_a_save(kind)


@pytest.mark.parametrize("kind", RIGHT_OR_REFUSED, ids=stable_id)
def test_what_changes_the_objects_of_a_library_is_right_or_refused(kind: Any) -> None:
    assert not goes_wrong(kind)
    assert not goes_wrong_as_a_lane(kind)
    assert not is_replayed_wrong(kind)


@pytest.mark.parametrize("kind", DRAW_LATE, ids=stable_id)
def test_a_library_that_draws_by_itself_is_refused_however_seldom(kind: Any) -> None:
    assert "draws from what all share" in examine(kind)
    assert "draws from what all share" in examine_replay(kind)


@pytest.mark.parametrize("kind", [FirstStep, FirstStepWithin], ids=stable_id)
def test_an_attribute_that_a_first_step_makes_is_gone_before_a_replay_in_place(kind: Any) -> None:
    assert examine_replay(kind) == ""
    assert replayed_in_place(kind)


def test_a_table_that_all_environments_of_a_maker_have_is_saved_over_the_wire() -> None:
    prices = Table().prices.copy()
    with serve_gym(lambda: Table(prices)) as server, closing(make_remote(server.url, timeout=DEADLINE)) as env:
        env.reset(seed=3)
        state = env.save_state()
        wanted = [env.step(1)[1] for _ in range(5)]
        env.restore_state(state)
        assert [env.step(1)[1] for _ in range(5)] == wanted
        assert state.bytes < prices.memory_usage().sum()


def test_an_older_mujoco_that_copies_no_data_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    from gymnasium.envs.mujoco.hopper_v5 import HopperEnv

    monkeypatch.delattr(mujoco, "mj_copyData")
    assert "mj_copyData" in examine(HopperEnv)
    assert examine_replay(HopperEnv) == ""

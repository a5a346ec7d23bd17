"""Environments whose state is hard to find: after a save, 100 steps and a restore they go on right, or are refused."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest

from bridge import make_vec_remote, serve_gym
from bridge.errors import RefusedError
from tests.awkward_envs import AWKWARD
from tests.curious_envs import CURIOUS, SEEDS_SELDOM
from tests.curious_envs import RIGHT as PLAIN
from tests.odd_envs import DRAWS_SELDOM, ODD, RIGHT
from tests.states.right_or_refused import (
    examine,
    examine_replay,
    goes_wrong,
    goes_wrong_as_a_lane,
    is_moved_by_a_save,
    is_replayed_wrong,
)
from tests.support import sampled, stable_id

DEADLINE = 60.0
ALL = [*AWKWARD, *ODD, *CURIOUS]


@pytest.mark.parametrize("kind", ALL, ids=stable_id)
def test_an_awkward_environment_is_right_or_refused_and_never_wrong(kind: Any) -> None:
    if goes_wrong(kind):
        assert len(examine(kind).split()) > 5, "wrong, and its check passes"


@pytest.mark.parametrize("kind", [*DRAWS_SELDOM, *SEEDS_SELDOM], ids=stable_id)
def test_an_environment_that_draws_elsewhere_is_refused_however_seldom_it_does(kind: Any) -> None:
    assert len(examine(kind).split()) > 5
    assert len(examine_replay(kind).split()) > 5


@pytest.mark.parametrize("kind", sampled([*ODD, *CURIOUS], 3, slow=True), ids=stable_id)
def test_an_odd_environment_is_replayed_right_or_not_at_all(kind: Any) -> None:
    if is_replayed_wrong(kind):
        assert len(examine_replay(kind).split()) > 5, "wrong, and its check passes"


@pytest.mark.parametrize("kind", sampled(ALL, 24, slow=6), ids=stable_id)
def test_an_awkward_environment_that_lives_beside_others_is_right_or_refused(kind: Any) -> None:
    # First the check, as a server has it in a process of its own: some change what all share but once in a process.
    reason = examine(kind)
    if reason:
        assert len(reason.split()) > 5
    else:
        assert not goes_wrong_as_a_lane(kind)
        assert not is_moved_by_a_save(kind)


@pytest.mark.parametrize("kind", sampled(ALL, 195, slow=48), ids=stable_id)
@pytest.mark.parametrize("worlds", [False, True], ids=["lanes", "worlds"])
def test_a_slot_of_an_awkward_environment_is_right_or_refused(kind: Any, worlds: bool) -> None:
    with (
        serve_gym(kind, **({} if worlds else {"num_envs": 3})) as server,
        closing(make_vec_remote(server.url, num_envs=3, lanes=not worlds, blocking=True, states=True)) as envs,
    ):
        envs.reset(seed=3)
        envs.action_space.seed(1)

        def played(actions: list[Any]) -> list[list[tuple[Any, ...]]]:
            """What each slot gives."""
            results = [[np.array(part) for part in envs.step(action)[:4]] for action in actions]
            return [[tuple(part[slot].tobytes() for part in result) for result in results] for slot in range(3)]

        for moment in (1, 120):
            played([envs.action_space.sample() for _ in range(moment)])
            actions = [envs.action_space.sample() for _ in range(100)]
            try:
                (state,) = envs.save_state(slots=[0])
                wanted = played(actions)[0]
                envs.restore_state(state, slots=[0])
                others = [np.array([action[0], *envs.action_space.sample()[1:]]) for action in actions]
                assert played(others)[0] == wanted, "restored beside others that went on"
                envs.restore_state(state)
                assert played([np.repeat(action[0], 3) for action in actions]) == [wanted] * 3, "forked"
            except RefusedError as error:
                assert len(str(error).split()) > 5  # noqa: PT017 - a refusal is right
                return


@pytest.mark.parametrize("kind", sampled([*RIGHT, *PLAIN], 36, slow=4), ids=stable_id)
def test_what_looks_hard_and_can_be_copied_is(kind: Any) -> None:
    assert examine(kind) == ""
    assert not goes_wrong(kind)
    assert not goes_wrong_as_a_lane(kind)

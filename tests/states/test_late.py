"""Environments that show late whether a state was right: right beside a twin that is never saved, or refused."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from bridge import make_remote, serve_gym
from tests.late_envs import (
    CHANGES_LATE,
    LATES,
    RIGHT,
    SeedsByClass,
    SeedsBySystem,
    SeedsResets,
    SeedsResetsOfRandom,
    Vectorized,
)
from tests.states.right_or_refused import examine, examine_replay, goes_on_like_its_twin, refusals
from tests.support import stable_id


@pytest.mark.parametrize("kind", LATES, ids=stable_id)
def test_what_shows_late_is_right_or_refused(kind: Any) -> None:
    with refusals():
        goes_on_like_its_twin(kind)


@pytest.mark.parametrize("kind", CHANGES_LATE, ids=stable_id)
def test_what_changes_an_attribute_that_all_share_is_refused_however_late(kind: Any) -> None:
    for reason in examine(kind), examine_replay(kind):
        assert "all environments share" in reason or "all share it" in reason


def test_a_generator_that_a_reset_makes_is_saved_and_one_without_a_seed_is_made_anew() -> None:
    assert examine(SeedsResets) == ""
    with serve_gym(SeedsResets) as server, closing(make_remote(server.url)) as env:
        env.reset(seed=3)
        state = env.save_state()
        wanted = [env.step(1)[0].tobytes() for _ in range(50)]
        first = env.reset()[0].tobytes()
        env.restore_state(state)
        assert [env.step(1)[0].tobytes() for _ in range(50)] == wanted
        assert env.reset()[0].tobytes() != first
    assert "by a reset" in examine_replay(SeedsResets)


def test_a_constructor_that_makes_a_generator_without_a_seed_may_not_be_called_by_a_step() -> None:
    assert examine(SeedsBySystem) == ""
    for reason in examine_replay(SeedsBySystem), examine(SeedsByClass), examine_replay(SeedsByClass):
        assert "SeedsBySystem.__init__ uses default_rng() without a seed" in reason


def test_what_else_differs_after_a_reset_without_a_seed_is_refused_however_late_it_comes() -> None:
    assert "its reset without a seed differs" in examine(SeedsResetsOfRandom)


def test_a_method_whose_function_is_an_object_is_replayed_or_refused_in_words() -> None:
    assert "has no attribute" not in examine_replay(Vectorized)


@pytest.mark.parametrize("kind", RIGHT, ids=stable_id)
def test_what_shows_late_and_can_be_copied_is(kind: Any) -> None:
    goes_on_like_its_twin(kind)

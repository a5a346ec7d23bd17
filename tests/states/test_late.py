"""Environments that show late whether a state was right: right beside a twin that is never saved, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.late_envs import LATES, RIGHT, Vectorized
from tests.states.right_or_refused import examine_replay, goes_on_like_its_twin, refusals
from tests.support import stable_id


@pytest.mark.parametrize("kind", LATES, ids=stable_id)
def test_what_shows_late_is_right_or_refused(kind: Any) -> None:
    with refusals():
        goes_on_like_its_twin(kind)


def test_a_method_whose_function_is_an_object_is_replayed_or_refused_in_words() -> None:
    assert "has no attribute" not in examine_replay(Vectorized)


@pytest.mark.parametrize("kind", RIGHT, ids=stable_id)
def test_what_shows_late_and_can_be_copied_is(kind: Any) -> None:
    goes_on_like_its_twin(kind)

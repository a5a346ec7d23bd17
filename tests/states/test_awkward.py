"""Environments whose state is hard to find: after a save, 100 steps and a restore they go on right, or are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.awkward_envs import AWKWARD
from tests.odd_envs import ODD, RIGHT
from tests.states.right_or_refused import examine, examine_replay, goes_wrong, is_replayed_wrong
from tests.support import stable_id


@pytest.mark.parametrize("kind", [*AWKWARD, *ODD], ids=stable_id)
def test_an_awkward_environment_is_right_or_refused_and_never_wrong(kind: Any) -> None:
    if goes_wrong(kind):
        assert len(examine(kind).split()) > 5, "wrong, and its check passes"


@pytest.mark.parametrize("kind", ODD, ids=stable_id)
def test_an_odd_environment_is_replayed_right_or_not_at_all(kind: Any) -> None:
    if is_replayed_wrong(kind):
        assert len(examine_replay(kind).split()) > 5, "wrong, and its check passes"


@pytest.mark.parametrize("kind", RIGHT, ids=stable_id)
def test_what_looks_hard_and_can_be_copied_is(kind: Any) -> None:
    assert examine(kind) == ""
    assert not goes_wrong(kind)

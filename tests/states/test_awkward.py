"""Environments whose state is hard to find: after a save, 100 steps and a restore they go on right, or are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.awkward_envs import AWKWARD
from tests.states.right_or_refused import examine, goes_wrong
from tests.support import stable_id


@pytest.mark.parametrize("kind", AWKWARD, ids=stable_id)
def test_an_awkward_environment_is_right_or_refused_and_never_wrong(kind: Any) -> None:
    if goes_wrong(kind):
        assert len(examine(kind).split()) > 5, "wrong, and its check passes"

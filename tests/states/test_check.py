"""`bridge.states.check`: kinds of environments that can be copied, and those that are refused by what they hold."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.states.check import examine
from tests.states_envs import REFUSED, RIGHT
from tests.support import stable_id


@pytest.mark.parametrize("kind", RIGHT, ids=stable_id)
def test_a_kind_that_can_be_copied_passes_the_check(kind: Any) -> None:
    assert examine(kind) == ""


@pytest.mark.parametrize("kind", REFUSED, ids=stable_id)
def test_a_kind_that_cannot_be_copied_is_refused_by_what_it_holds(kind: Any) -> None:
    reason = examine(kind)
    assert len(reason.split()) > 5, reason

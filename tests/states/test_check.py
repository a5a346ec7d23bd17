"""`bridge.states.check`: kinds of environments that can be copied, and those that are refused by what they hold."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

from bridge.states.check import examine, examine_replay
from tests.states.right_or_refused import judge
from tests.states_envs import REFUSED, RIGHT, Walk
from tests.support import sampled, stable_id


@pytest.mark.parametrize("kind", sampled(RIGHT, len(RIGHT), slow=2), ids=stable_id)
def test_a_kind_that_can_be_copied_passes_the_check(kind: Any) -> None:
    assert examine(kind) == ""


@pytest.mark.parametrize("kind", REFUSED, ids=stable_id)
def test_a_kind_that_cannot_be_copied_is_refused_by_what_it_holds(kind: Any) -> None:
    reason = examine(kind)
    assert len(reason.split()) > 5, reason


class Managed(Walk):
    """Counts in an object that it got."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        super().__init__()

    def act(self, action: int) -> None:
        self.manager["n"] += action
        self.x = self.x + self.manager["n"]


class Numbered(Managed):
    """Draws numbers of an object in C that it got."""

    def act(self, action: int) -> None:
        self.x = self.x + next(self.manager)


def test_environments_that_move_an_object_which_all_of_them_got_are_refused() -> None:
    held, numbers = {"n": 0}, itertools.count()
    assert "have too" in examine(lambda: Managed(held))
    assert examine(lambda: Managed({"n": 0})) == ""
    assert "other environments of its kind have its itertools.count too" in examine_replay(lambda: Numbered(numbers))


def test_an_object_that_all_got_and_none_changes_is_no_hindrance() -> None:
    table = {"gain": [1.0]}

    class Reads(Managed):
        def act(self, action: int) -> None:
            self.x = self.x + self.manager["gain"][0]

    assert examine(lambda: Reads(table)) == ""


class Remembers(Walk):
    """Knows how much its process has remembered, which changes three times."""

    remembered = staticmethod(functools.lru_cache(lambda key: key * 2.0))

    def act(self, action: int) -> None:
        self.x = self.x + self.remembered(action) + self.remembered.cache_info().currsize


def test_what_changes_but_once_in_a_process_is_found_for_a_copy_and_for_a_replay() -> None:
    verdict = judge(Remembers)
    assert verdict.way == ""
    assert "by replay: an environment that was replayed did not go on as the original" in verdict.reason


class CallsItself(Walk):
    """Keeps a function that its own closure holds."""

    def __init__(self) -> None:
        super().__init__()

        def depth(left: int) -> int:
            return 0 if left == 0 else 1 + depth(left - 1)

        self._depth = depth


def test_a_function_that_calls_itself_is_refused_by_its_name() -> None:
    assert "_depth is a function whose closure holds a builtins.function" in examine(CallsItself)

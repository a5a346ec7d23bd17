"""`bridge.states.stack`: what code changes is told from what it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bridge.states.stack import changed_by

TABLE: Any = {}
Table: Any = type("Table", (), {})


def reads_for_a_key(self: Any, a: int) -> None:
    self.grid[TABLE[a]] = 1


def reads_for_keys_of_several_parts(self: Any, a: int) -> None:
    self.grid[TABLE[a][0], TABLE[a][1]] += 1


def reads_for_a_value(self: Any, a: int) -> None:
    self.grid[0] += TABLE[a][0] if a else TABLE[0][a]
    self.grid[1:2] = [TABLE[a]]


def reads_for_an_argument(self: Any, a: int) -> None:
    self.items.append((TABLE[a], [self.names[a] for _ in TABLE]))
    self.items.pop(TABLE[a])


def reads_for_a_delete(self: Any, a: int) -> None:
    del self.grid[TABLE[a]], self.grid[self.names[a]]


def reads_in_a_chain(self: Any, a: int) -> None:
    self.grid[0] = self.grid[1] = TABLE[a] < a < TABLE[0] or self.names[a]


def reads_where_errors_are_caught(self: Any, a: int) -> None:
    try:
        self.grid[TABLE[a]] = 1
    except KeyError:
        self.grid[self.names[0]] = 2
    finally:
        with self.lock:
            self.grid[TABLE[0]] = 3


def reads_a_copy(self: Any, a: int) -> None:
    sorted(TABLE)[a] = 1
    self.names.copy().append(a)


def reads_by_a_choice(self: Any, a: int) -> None:
    self.grid[TABLE if a else self.names] += 1
    self.grid[a] = self.grid.get(a, TABLE)


def reads_for_an_attribute(self: Any, a: int) -> None:
    self.grid.best = TABLE[a]
    self.best += TABLE.best
    self.names.best += a
    self.__class__ = Table
    Table.make(self).best = type(self)(a).best = Table().best


READ = [
    *(reads_for_a_key, reads_for_keys_of_several_parts, reads_for_a_value, reads_for_an_argument, reads_for_a_delete),
    *(reads_in_a_chain, reads_where_errors_are_caught, reads_a_copy, reads_by_a_choice, reads_for_an_attribute),
]


def changes_an_item(self: Any, a: int) -> None:
    TABLE[a] = 1


def changes_an_item_in_place(self: Any, a: int) -> None:
    TABLE[a][self.grid[a]] += self.grid[0]


def changes_a_value_of_an_item(self: Any, a: int) -> None:
    TABLE[a].rows[1:2] = [a]


def changes_by_a_method(self: Any, a: int) -> None:
    TABLE[self.grid[a]].append(self.grid)


def changes_one_of_the_class(self: Any, a: int) -> None:
    self.names[a] = 1


def changes_one_of_the_class_by_its_name(self: Any, a: int) -> None:
    type(self).names[a].update(b=1)


def changes_by_a_choice(self: Any, a: int) -> None:
    (TABLE if a else self.grid)[a] = 1


def changes_by_a_choice_of_a_choice(self: Any, a: int) -> None:
    (self.grid or (self.grid if a else TABLE))[a] = 1


def changes_after_a_loop(self: Any, a: int) -> None:
    for key in self.grid:
        while a:
            if key:
                break
            a -= 1
        else:
            TABLE[key] = [one for one in self.grid if one]


def changes_where_errors_are_caught(self: Any, a: int) -> None:
    try:
        self.grid[TABLE[a]] = 1
    except KeyError:
        del TABLE[a]


def changes_what_surrounds(self: Any, a: int) -> Callable[[], None]:
    table: Any = []

    def change() -> None:
        table[self.grid[a]] = 1

    return change


def changes_an_attribute(self: Any, a: int) -> None:
    TABLE[a].best += 1


def changes_by_dropping_an_attribute(self: Any, a: int) -> None:
    del TABLE.best


def changes_a_class(self: Any, a: int) -> None:
    Table.best = a


def changes_its_class(self: Any, a: int) -> None:
    self.__class__.best += a


def changes_its_class_by_type(self: Any, a: int) -> None:
    type(self).best += a


def changes_its_class_by_a_method(cls: Any, a: int) -> None:
    cls.best = a


CHANGED = [
    *(changes_an_attribute, changes_by_dropping_an_attribute, changes_a_class, changes_its_class),
    *(changes_its_class_by_type, changes_its_class_by_a_method),
    *(changes_an_item, changes_an_item_in_place, changes_a_value_of_an_item, changes_by_a_method),
    *(changes_one_of_the_class, changes_one_of_the_class_by_its_name, changes_by_a_choice),
    *(changes_by_a_choice_of_a_choice, changes_after_a_loop, changes_where_errors_are_caught),
    changes_what_surrounds(None, 0),
]


def changed(function: Callable[..., Any]) -> set[str]:
    def shared(opname: str, name: str) -> bool:
        return name in ("TABLE", "table")

    def is_class(opname: str, name: str) -> bool:
        return name == "Table"

    return set(changed_by(function.__code__, shared, is_class, frozenset(["names"])))


@pytest.mark.parametrize("function", READ, ids=lambda function: function.__name__)
def test_what_is_only_read_is_not_changed(function: Callable[..., Any]) -> None:
    assert changed(function) == set()


@pytest.mark.parametrize("function", CHANGED, ids=lambda function: function.__name__)
def test_what_is_changed_is_named(function: Callable[..., Any]) -> None:
    assert len(changed(function)) == 1

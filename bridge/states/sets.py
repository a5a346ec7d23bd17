"""Sets copied with their order, and with the order in which they will take what is added later.

The order of a set comes of its table: how large that is, which of its cells are taken, and where something was removed.
`copy.copy` makes another table of the same items: a program that goes through it, or pops from it, would do something
else. The table is read, as CPython has it since 3.10; a copy is filled in an order by which it gets the same one, and
counts only if it did.
"""

from __future__ import annotations

import copy
import ctypes
import random
from collections.abc import Iterator
from typing import Any

__all__ = ["copied_set"]

_WORD = ctypes.c_ssize_t
_NEIGHBOURS = 9
"""How many cells after the first one are looked at, before another place is."""
_SMALL = 100
"""The most items of a set for which shuffled orders are tried, too: a larger set hardly ever needs them."""
_SHUFFLES = 64
"""The number of these orders."""
_MASK = 2 ** (8 * ctypes.sizeof(_WORD)) - 1


def _head(value: set[Any]) -> tuple[int, ...]:
    """Return what CPython has behind the head of a set: fill, used, mask, table, hash, finger."""
    return tuple((_WORD * 6).from_address(id(value) + object.__basicsize__))


class _Table:
    """Where the items of a set are.

    Args:
        value: The set.
    """

    def __init__(self, value: set[Any]) -> None:
        self.fill, self.used, self.mask, address, _, self.finger = _head(value)
        """How many cells are taken, also by what was removed; how many items there are; the last cell's number."""
        self.known = self.used == len(value) and self.mask & (self.mask + 1) == 0 and self.mask >= self.fill
        """False: another Python has sets of another kind."""
        cells = (_WORD * (2 * (self.mask + 1))).from_address(address) if self.known else ()
        self.cells = list(cells)
        """For each cell the address of an item, and its hash; 0: there is none."""

    def same(self, other: _Table) -> bool:
        """True if another set has its items in the same cells, and will put new ones into the same."""
        mine, theirs = (self.fill, self.used, self.mask, self.finger), (other.fill, other.used, other.mask, 0)
        return self.known and other.known and mine == theirs and self.cells == other.cells


def copied_set(value: set[Any]) -> set[Any] | None:
    """Return a set of the same items that has, and will have, the same order; None: it cannot be made."""
    wanted = _Table(value)
    made: set[Any] = copy.copy(value)
    if wanted.same(_Table(made)):
        return made
    if not wanted.known or wanted.finger:
        return None
    order = _order(value, wanted)
    if order is None:
        return None
    for made in _grown(order, wanted.mask):
        for item in order:
            if type(item) is _Removed:
                made.discard(item)
        if wanted.same(_Table(made)):
            return made
    return None


class _Removed:
    """Is added and removed, where an item was.

    Args:
        hashed: Leads to the cell.
    """

    def __init__(self, hashed: int) -> None:
        self._hash = hashed

    def __hash__(self) -> int:
        return self._hash


def _order(value: set[Any], wanted: _Table) -> list[Any] | None:
    """Return the items in an order in which each finds its cell free, and those before it taken."""
    mask, items = wanted.mask, iter(value)
    addresses = {id(item) for item in value}
    homes: list[Any] = []
    others: list[tuple[int, int, Any]] = []
    taken = bytearray(mask + 1)
    for cell in range(mask + 1):
        address, hashed = wanted.cells[2 * cell], wanted.cells[2 * cell + 1]
        if not address:
            continue
        if address not in addresses:
            item: Any = _Removed(cell)
            hashed = cell
        else:
            item = next(items)
        if hashed & mask == cell:
            homes.append(item)
            taken[cell] = 1
        else:
            others.append((cell, hashed, item))
    while others:
        left = []
        for cell, hashed, item in others:
            if next(place for place in _places(hashed, mask) if not taken[place]) == cell:
                taken[cell] = 1
                homes.append(item)
            else:
                left.append((cell, hashed, item))
        if len(left) == len(others):
            return None
        others = left
    return homes


def _places(hashed: int, mask: int) -> Iterator[int]:
    """Give the cells that are looked at for an item, one after the other."""
    rest, place = hashed & _MASK, hashed & mask
    while True:
        yield from range(place, place + (_NEIGHBOURS if place + _NEIGHBOURS <= mask else 0) + 1)
        rest >>= 5
        place = (place * 5 + 1 + rest) & mask


def _grown(order: list[Any], mask: int) -> Iterator[set[Any]]:
    """Give sets of the items, whose tables have grown in the ways in which they do."""
    yield set(order)
    # One that is made of a whole at once has room for twice as many.
    yield _more(order[: max(5, (mask + 1) // 4)], order)
    # One that is full is made anew, for four times as many as are left in it then.
    for left in ((mask + 1) // 4 - 1, (mask + 1) // 8):
        if 0 < left <= len(order):
            made = set(order[: left - 1])
            number = 0
            while (_head(made)[0] + 1) * 5 < _head(made)[2] * 3:
                passing = _Removed(number)
                made.add(passing)
                made.discard(passing)
                number += 1
            made.update(order[left - 1 :])
            yield made
    # As the table grew, items were put into the larger one in the order of the smaller one: which of those that belong
    # into the same cell came first is not known.
    if len(order) <= _SMALL:
        for seed in range(_SHUFFLES):
            yield set(random.Random(seed).sample(order, len(order)))


def _more(first: list[Any], order: list[Any]) -> set[Any]:
    made: set[Any] = set()
    made.update(dict.fromkeys(first))
    made.update(order[len(first) :])
    return made

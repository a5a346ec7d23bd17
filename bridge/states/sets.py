"""Copy sets so that they keep their order of iteration, now and after later additions.

The order of a set depends on its hash table: its size, the used cells, and the cells of removed items. `copy.copy`
makes a different table of the same items, so a program that iterates over the copy, or pops from it, could behave
differently. We read the table, in the layout of CPython since 3.10, and fill a new set in an order that gives the same
table. The copy is used only if its table is the same.
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
"""How many cells after the first one are probed before a jump (CPython's `LINEAR_PROBES`)."""
_SMALL = 100
"""The most items of a set for which shuffled orders are tried too; larger sets hardly ever need them."""
_SHUFFLES = 64
"""The number of shuffled orders."""
_MASK = 2 ** (8 * ctypes.sizeof(_WORD)) - 1


def _head(value: set[Any]) -> tuple[int, ...]:
    """Return the fields of CPython's set object: fill, used, mask, table, hash, finger."""
    return tuple((_WORD * 6).from_address(id(value) + object.__basicsize__))


class _Table:
    """The hash table of a set.

    Args:
        value: The set.
    """

    def __init__(self, value: set[Any]) -> None:
        self.fill, self.used, self.mask, address, _, self.finger = _head(value)
        """The used cells, including those of removed items; the items; the last cell's number; the pop position."""
        self.known = self.used == len(value) and self.mask & (self.mask + 1) == 0 and self.mask >= self.fill
        """False if this Python has another layout of sets."""
        cells = (_WORD * (2 * (self.mask + 1))).from_address(address) if self.known else ()
        self.cells = list(cells)
        """For each cell the address of its item and the hash; an address of 0: the cell is free."""

    def same(self, other: _Table) -> bool:
        """True if another set has the same items in the same cells, and will place new items alike."""
        mine, theirs = (self.fill, self.used, self.mask, self.finger), (other.fill, other.used, other.mask, 0)
        return self.known and other.known and mine == theirs and self.cells == other.cells


def copied_set(value: set[Any]) -> set[Any] | None:
    """Return a set of the same items with the same order, now and later; None: it cannot be made."""
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
    """An item that is added and removed again, to reproduce the cell of a removed item.

    Args:
        hashed: Its hash, which leads to the cell.
    """

    def __init__(self, hashed: int) -> None:
        self._hash = hashed

    def __hash__(self) -> int:
        return self._hash


def _order(value: set[Any], wanted: _Table) -> list[Any] | None:
    """Return the items in an order in which each gets its cell: the cells probed before it are already used."""
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
    """Yield the cells that are probed for an item, in order."""
    rest, place = hashed & _MASK, hashed & mask
    while True:
        yield from range(place, place + (_NEIGHBOURS if place + _NEIGHBOURS <= mask else 0) + 1)
        rest >>= 5
        place = (place * 5 + 1 + rest) & mask


def _grown(order: list[Any], mask: int) -> Iterator[set[Any]]:
    """Yield sets of the items whose tables have grown in different ways."""
    yield set(order)
    # A set filled from a dict at once has a table for twice as many items.
    yield _more(order[: max(5, (mask + 1) // 4)], order)
    # A full table is rebuilt for four times as many items as are left in it.
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
    # When a table grew, items moved into the larger table in the order of the smaller one. So among items with the same
    # first cell we do not know which came first.
    if len(order) <= _SMALL:
        for seed in range(_SHUFFLES):
            yield set(random.Random(seed).sample(order, len(order)))


def _more(first: list[Any], order: list[Any]) -> set[Any]:
    made: set[Any] = set()
    made.update(dict.fromkeys(first))
    made.update(order[len(first) :])
    return made

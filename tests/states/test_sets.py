"""`bridge.states.sets`: a copy of a set has its order, now and after what is done with both."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from bridge.states.sets import copied_set

KEYS: dict[str, Callable[[random.Random], Any]] = {
    "cells": lambda rng: (rng.randrange(20), rng.randrange(20)),
    "numbers": lambda rng: rng.randrange(1000),
    "negative": lambda rng: rng.randrange(-50, 50),
    "texts": lambda rng: str(rng.randrange(10**6)),
    "large": lambda rng: rng.getrandbits(60),
}


@pytest.mark.parametrize("size", [0, 1, 5, 8, 30, 100, 400])
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("removing", [0.0, 0.45], ids=["grown", "churned"])
def test_a_copied_set_has_and_keeps_the_order(size: int, keys: str, removing: float) -> None:
    key, made = KEYS[keys], 0
    for seed in range(20):
        rng = random.Random(seed)
        value: set[Any] = set()
        for _ in range(size):
            value.add(key(rng))
            if rng.random() < removing:
                value.discard(rng.choice(list(value)))
        copied = copied_set(value)
        if copied is None:
            continue
        made += 1
        assert list(copied) == list(value)
        for _ in range(size):
            item = key(rng)
            for each in (value, copied):
                each.add(item)
            if rng.random() < 0.4:
                first = next(iter(value))
                value.discard(first)
                copied.discard(first)
            assert list(copied) == list(value)
    assert removing or made >= 18, "one from which nothing was removed can be copied"


@pytest.mark.parametrize(
    "items",
    [
        [67, 45, 74, 3, 29],
        [215, 73, 960, 417, 580, 601, 493, 216, 708, 60, 621, 769, 287, 787, 425, 66, 271, 622, 984, 801],
    ],
    ids=["of 5", "of 20"],
)
def test_items_that_competed_for_a_cell_as_their_set_grew_are_copied(items: list[int]) -> None:
    value: set[int] = set()
    for item in items:
        value.add(item)
    copied = copied_set(value)
    assert copied is not None
    assert list(copied) == list(value)


def test_a_set_that_something_was_popped_from_is_not_copied() -> None:
    value = set(range(10))
    value.pop()
    assert copied_set(value) is None

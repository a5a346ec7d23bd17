"""Differences between the supported versions of Gymnasium, 1.1 to 1.4.

All other code is written for the newest version. This module adds what older versions lack, and names the version that
introduced it, so that a function can be removed when that version is the oldest supported one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import SyncVectorEnv, VectorWrapper

from bridge.errors import UnsupportedSpaceError

__all__ = ["VERSION", "BatchWrapper", "SyncLanes", "dict_space", "discrete_space", "graph_space"]

VERSION = tuple(int(part) for part in re.findall(r"\d+", gymnasium.__version__)[:3])
"""The installed version: major, minor and patch."""

if TYPE_CHECKING or VERSION >= (1, 4):
    _Base: TypeAlias = VectorWrapper[Any, Any, Any, Any, np.ndarray[Any, Any]]
    _Sync: TypeAlias = SyncVectorEnv[Any, Any]
else:  # 1.4 made the classes generic
    _Base, _Sync = VectorWrapper, SyncVectorEnv


class BatchWrapper(_Base):
    """A vector wrapper whose rewards and flags are arrays."""

    if VERSION < (1, 3):
        # Before 1.2.3 a vector wrapper closes the wrapped environment when the wrapper is garbage-collected:
        # `BlockingReset(envs).reset()` would close `envs`, which the caller still uses.
        def __del__(self) -> None:
            """Leave the wrapped environment open, as Gymnasium 1.3 and later do."""


class SyncLanes(_Sync):
    """The base class of a SyncVectorEnv with its own way of stepping."""


def discrete_space(n: int, start: int, dtype: np.dtype[Any]) -> spaces.Discrete:
    """Return `Discrete(n, start=start, dtype=dtype)`.

    Gymnasium 1.2.2 introduced the keyword. Before, the dtype is set as an attribute of the space: observations and
    batches have that dtype, but `sample()` returns int64, which is cast when the action is sent.
    """
    if VERSION >= (1, 2, 2):
        return spaces.Discrete(n, start=start, dtype=dtype.type)
    if dtype.kind not in "iu":
        raise TypeError(f"expected an integer dtype for a Discrete space, got {dtype}")
    space = spaces.Discrete(n, start=start)
    space.dtype = dtype
    return space


def dict_space(items: Iterable[tuple[Any, Space[Any]]], *, sort_keys: bool) -> spaces.Dict:
    """Return a `Dict` with its keys in the order of `items`.

    Gymnasium 1.4 introduced `sort_keys`, with which a batch of the space keeps the order too. Before, the keys of a
    batch are sorted, at both ends.
    """
    if VERSION >= (1, 4):
        return spaces.Dict(list(items), sort_keys=sort_keys)
    return spaces.Dict(list(items))


def graph_space(node: Space[Any], edge: Space[Any] | None) -> spaces.Graph:
    """Return `Graph(node, edge)`.

    Raises:
        UnsupportedSpaceError: The space of its nodes or edges is neither Box nor Discrete, and the installed Gymnasium
            is older than 1.4.
    """
    for part in (node, edge):
        if VERSION < (1, 4) and part is not None and not isinstance(part, (spaces.Box, spaces.Discrete)):
            raise UnsupportedSpaceError(
                f"expected a Graph of Box or Discrete spaces, got one of {type(part).__name__}, which needs Gymnasium "
                f"1.4 or newer; {gymnasium.__version__} is installed here: pip install 'gymnasium>=1.4'"
            )
    return spaces.Graph(node, edge)

"""Differences between the versions of Gymnasium that this package runs with, 1.1 to 1.4.

Everything else in the package is written for the newest version. What an older one lacks is here, with the version that
brought it, so that a name can go once that version is the oldest.
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
        # Until 1.2.3 a vector wrapper closes what it wraps when nobody refers to the wrapper any more: in
        # `BlockingReset(envs).reset()` that would close `envs`, which the caller still has.
        def __del__(self) -> None:
            """Leave the wrapped environment open, as from Gymnasium 1.3 on."""


class SyncLanes(_Sync):
    """The base of a SyncVectorEnv that steps its environments in a way of its own."""


def discrete_space(n: int, start: int, dtype: np.dtype[Any]) -> spaces.Discrete:
    """Return `Discrete(n, start=start, dtype=dtype)`.

    Gymnasium 1.2.2 brought the keyword. Before it, the space gets the dtype as an attribute: observations and batches
    have that dtype, but `sample()` returns int64, which is cast when the action is sent.
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

    Gymnasium 1.4 brought `sort_keys`, by which a batch of the space keeps the order too. Before it, the keys of a batch
    are sorted, at both ends alike.
    """
    if VERSION >= (1, 4):
        return spaces.Dict(list(items), sort_keys=sort_keys)
    return spaces.Dict(list(items))


def graph_space(node: Space[Any], edge: Space[Any] | None) -> spaces.Graph:
    """Return `Graph(node, edge)`.

    Raises:
        UnsupportedSpaceError: Its nodes or edges are of another kind than Box and Discrete, and a Gymnasium older than
            1.4 is installed.
    """
    for part in (node, edge):
        if VERSION < (1, 4) and part is not None and not isinstance(part, (spaces.Box, spaces.Discrete)):
            raise UnsupportedSpaceError(
                f"expected a Graph of Box or Discrete spaces, got one of {type(part).__name__}, which needs Gymnasium "
                f"1.4 or newer; {gymnasium.__version__} is installed here: pip install 'gymnasium>=1.4'"
            )
    return spaces.Graph(node, edge)

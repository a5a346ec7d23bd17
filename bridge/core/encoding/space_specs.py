"""Make spaces from the specs of a server that does not send its spaces (D-24)."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from bridge.core.encoding.space_json import check_space_bytes
from bridge.core.encoding.tensors import Spec, TensorSpace
from bridge.core.gymnasium_versions import discrete_space
from bridge.errors import TensorError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["space_from_specs"]

# Limits of what a server may declare. A Dict of more spaces takes minutes to make; each level of a name nests a space.
_MOST_SPECS = 4096
_MOST_LEVELS = 64
# An integer with fewer values becomes a Discrete, otherwise a Box.
_MAX_DISCRETE = 1 << 32


def space_from_specs(specs: Iterable[Spec], root: str) -> Space[Any]:
    """Make a space from the specs of a server that does not send its spaces (D-24).

    Nested names become Dict spaces, a bounded integer a Discrete, other numbers a Box, text a Text, a variable leading
    dimension a Sequence, and all other tensors a `TensorSpace`. A single spec named `root` is the space itself.

    Raises:
        TensorError: A name is both a leaf and a level (`a` and `a.b`), or a spec has no space.
    """
    specs = list(specs)
    if len(specs) > _MOST_SPECS:
        raise TensorError(f"expected at most {_MOST_SPECS} specs of what is no signal, got {len(specs)}")
    check_space_bytes((spec.shape, spec.dtype) for spec in specs if spec.data_type != pb.PROTO)
    tree: dict[str, Any] = {}
    for spec in specs:
        *levels, last = spec.name.split(".")
        if len(levels) > _MOST_LEVELS:
            raise TensorError(f"the spec name {spec.name!r:.80} has more than {_MOST_LEVELS} levels")
        node = tree
        for level in levels:
            node = node.setdefault(level, {})
            if not isinstance(node, dict):
                raise TensorError(f"the spec name {spec.name!r} nests below {level!r}, which is a tensor itself")
        if last in node:
            raise TensorError(f"the spec name {spec.name!r} is given twice, or is a level of nesting too")
        node[last] = spec
    return _space_of(tree[root] if list(tree) == [root] and isinstance(tree[root], Spec) else tree)


def _space_of(node: Any) -> Space[Any]:
    if isinstance(node, dict):
        return spaces.Dict([(key, _space_of(item)) for key, item in node.items()])
    spec: Spec = node
    try:
        return _space_of_spec(spec)
    except (AssertionError, OverflowError, ValueError) as error:
        if isinstance(error, TensorError):
            raise
        raise TensorError(f"the spec {spec.name!r} ({spec.describe()}) has no space: {error}") from error


def _space_of_spec(spec: Spec) -> Space[Any]:
    if spec.data_type == pb.PROTO or -1 in spec.shape[1:] or (spec.data_type == pb.STRING and len(spec.shape) > 1):
        return TensorSpace(spec)
    if spec.shape[:1] == (-1,):
        feature = _space_of(dataclasses.replace(spec, shape=spec.shape[1:]))
        if isinstance(feature, spaces.Box) and not feature.shape:
            return TensorSpace(spec)  # Gymnasium warns each time a stacked Sequence of these is used
        return spaces.Sequence(feature, stack=spec.data_type != pb.STRING)
    if spec.data_type == pb.STRING:
        text = spaces.Text(4096, min_length=0, charset=string.printable)
        return spaces.Sequence(text) if spec.shape else text
    if spec.dtype.kind == "b":
        # Samples of Discrete and MultiBinary are integers, which are refused where a bool is expected (D-11).
        return spaces.Box(0, 1, spec.shape, np.bool_)
    if spec.dtype.kind in "iu":
        limits = np.iinfo(spec.dtype)
        low = np.asarray(limits.min if spec.minimum is None else spec.minimum)
        high = np.asarray(limits.max if spec.maximum is None else spec.maximum)
        # The number of values, the difference plus one, must also fit the dtype.
        if not spec.shape and int(high) - int(low) < min(_MAX_DISCRETE, limits.max):
            return discrete_space(int(high) - int(low) + 1, int(low), spec.dtype)
    else:
        low = np.asarray(-np.inf if spec.minimum is None else spec.minimum)
        high = np.asarray(np.inf if spec.maximum is None else spec.maximum)
    full = [np.broadcast_to(bound, spec.shape).astype(spec.dtype) for bound in (low, high)]
    return spaces.Box(full[0], full[1], spec.shape, spec.dtype.type)

"""Spaces and the text fields: observations, actions and rewards as decimals.

A Box, Discrete, MultiDiscrete or MultiBinary value is its elements in C order, separated by commas (`5,6.78`). A Dict
observation names its parts (`x:0.54,y:0.95`, nested ones `arm.x:0.5`); a Dict action lists them without names, in the
space's order, because an action holds no colon (P-2).

Floats of an observation are rounded to `decimals` places (P-22) and an element without a bound is sent between
-99999999 and 99999999, so that the longest observation is known when the world is published. Actions are written with
the digits that give the same float back.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from bridge.errors import InvalidActionError, PacketError, UnsupportedSpaceError

__all__ = ["DECIMALS", "LIMIT", "Space", "TextCodec", "decimal_text", "parse_decimal"]

DECIMALS = 6
"""Decimal places of an observation's floats and of rewards, unless told."""
LIMIT = 99_999_999.0
"""The largest magnitude that is sent for a float without a bound."""

Space: TypeAlias = spaces.Space[Any]

_DECIMAL = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?\Z", re.ASCII)
_INTEGER = re.compile(r"-?[0-9]{1,20}\Z", re.ASCII)
_BANNED = re.compile(r"[:;,=.\x00-\x1f\x7f]")


def parse_decimal(text: str) -> Decimal:
    """Read a finite decimal with a dot; an exponent is read, too, and never written.

    Raises:
        PacketError: It is none (`nan`, `inf`, blanks, an empty text, another alphabet's digits).
    """
    if len(text) > 400 or not _DECIMAL.match(text):
        raise PacketError(f"expected a finite decimal such as -1.25, got {text[:40]!r}")
    value = Decimal(text)
    if not math.isfinite(float(value)):
        raise PacketError(f"expected a finite decimal, got {text[:40]!r}")
    return value


def decimal_text(value: Decimal) -> str:
    """Write a decimal without exponent, trailing zeros or a negative zero."""
    text = f"{value:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def _float_text(value: float, decimals: int) -> str:
    text = f"{value:.{decimals}f}"
    if decimals:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _exact_text(value: Any) -> str:
    """The shortest decimal that reads back as the same float."""
    text = np.format_float_positional(value, unique=True, trim="-")
    return "0" if text == "-0" else text


@dataclasses.dataclass(frozen=True)
class _Leaf:
    path: tuple[str, ...]
    space: Space
    shape: tuple[int, ...]
    dtype: Any
    floats: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def _leaves(space: Space, path: tuple[str, ...] = ()) -> list[_Leaf]:
    if isinstance(space, spaces.Dict):
        found: list[_Leaf] = []
        for name, part in space.spaces.items():
            if not isinstance(name, str) or not name or _BANNED.search(name):
                raise UnsupportedSpaceError(
                    f"expected names without `:` `;` `,` `=` `.` and control characters in a Dict space, got {name!r}; "
                    "rename the key with a wrapper"
                )
            found += _leaves(part, (*path, name))
        if not found:
            raise UnsupportedSpaceError("expected a Dict space with parts, got an empty one")
        return found
    if isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        dtype = np.dtype(space.dtype)
        if dtype.kind not in "iufb":
            raise UnsupportedSpaceError(f"expected numbers in {space}, got dtype {dtype}")
        shape = tuple(space.shape or ())
        if not math.prod(shape):
            raise UnsupportedSpaceError(f"expected a space with elements, got {space}")
        return [_Leaf(path, space, shape, dtype, dtype.kind == "f")]
    raise UnsupportedSpaceError(
        f"expected a Box, Discrete, MultiDiscrete, MultiBinary or a Dict of these, got {space}; PERLERT carries short "
        "texts: convert the space with a wrapper, e.g. gymnasium.wrappers.FlattenObservation, or serve it over grpc://"
    )


def _integer_width(leaf: _Leaf) -> int:
    space = leaf.space
    if isinstance(space, spaces.Discrete):
        return max(len(str(int(space.start))), len(str(int(space.start) + int(space.n) - 1)))
    if isinstance(space, spaces.MultiDiscrete):
        ends = np.concatenate([space.start.ravel(), (space.start + space.nvec - 1).ravel()])
        return max(len(str(int(end))) for end in ends)
    if isinstance(space, spaces.MultiBinary):
        return 1
    assert isinstance(space, spaces.Box)
    return max(len(str(int(end))) for end in (space.low.min(), space.high.max()))


class TextCodec:
    """One space's values as text and back.

    Args:
        space: A Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of these, nested or not.
        named: Write the parts of a Dict as `name:value` (observations); False: values alone (actions, P-2).
        decimals: Decimal places of floats (P-22); None: as many as give the same float back.

    Raises:
        UnsupportedSpaceError: The space has no such form.
    """

    def __init__(self, space: Space, *, named: bool = True, decimals: int | None = DECIMALS) -> None:
        self.space, self.named, self.decimals = space, named, decimals
        self._leaves = _leaves(space)
        self.elements = sum(leaf.size for leaf in self._leaves)
        names = [".".join(leaf.path) for leaf in self._leaves]
        self._names = names if named and isinstance(space, spaces.Dict) else None

    def max_bytes(self) -> int:
        """Return the length of the longest text that `encode` writes, in bytes."""
        total = self.elements - 1
        for leaf in self._leaves:
            if not leaf.floats:
                total += leaf.size * _integer_width(leaf)
            elif self.decimals is None:
                info = np.finfo(leaf.dtype)
                # sign, integer digits, dot, zeros of the smallest denormal and its digits
                total += leaf.size * (3 + 2 * int(np.ceil(-np.log10(float(info.smallest_subnormal)))) + info.precision)
            else:
                low, high = (np.asarray(getattr(leaf.space, side), np.float64) for side in ("low", "high"))
                bound = np.where(np.isfinite(low) & np.isfinite(high), np.maximum(abs(low), abs(high)), LIMIT)
                digits = np.floor(np.log10(np.maximum(np.minimum(bound, LIMIT), 1.0))) + 1
                total += int(digits.sum()) + leaf.size * (1 + bool(self.decimals) + self.decimals)
        if self._names:
            total += sum(len(name.encode()) + 1 for name in self._names)
        return total

    def _part(self, value: Any, path: tuple[str, ...]) -> Any:
        for name in path:
            if not isinstance(value, Mapping) or name not in value:
                raise InvalidActionError(f"expected a mapping with {name!r}, got {value!r}")
            value = value[name]
        return value

    def encode(self, value: Any) -> str:
        """Write a value of the space.

        Raises:
            InvalidActionError: Its shape is another, or it holds NaN.
        """
        texts = []
        for number, leaf in enumerate(self._leaves):
            part = self._part(value, leaf.path)
            try:
                array = np.asarray(part, leaf.dtype).reshape(-1)
            except (TypeError, ValueError, OverflowError) as error:
                raise InvalidActionError(f"expected a value of {leaf.space}, got {part!r}: {error}") from error
            if array.size != leaf.size:
                raise InvalidActionError(f"expected {leaf.size} elements for {leaf.space}, got {array.size}")
            if not leaf.floats:
                items = [str(int(item)) for item in array.tolist()]
            elif np.isnan(array).any():
                raise InvalidActionError(f"expected numbers for {leaf.space}, got NaN: {part!r}")
            elif self.decimals is None:
                if np.isinf(array).any():
                    raise InvalidActionError(f"expected finite numbers for {leaf.space}, got infinity: {part!r}")
                items = [_exact_text(item) for item in array]
            else:
                items = [_float_text(min(max(item, -LIMIT), LIMIT), self.decimals) for item in array.tolist()]
            if self._names:
                items[0] = f"{self._names[number]}:{items[0]}"
            texts += items
        return ",".join(texts)

    def _items(self, text: str) -> list[str]:
        if len(text) > 64 * 1024:
            raise PacketError(f"expected a short text, got {len(text)} characters")
        items = text.split(",")
        if len(items) != self.elements:
            raise PacketError(f"expected {self.elements} values for {self.space}, got {len(items)}: {text[:80]!r}")
        if not self._names:
            return items
        # Parts may come in any order; each begins with its name.
        groups: dict[str, list[str]] = {}
        name = ""
        for item in items:
            before, colon, after = item.rpartition(":")
            if colon:
                name = before
                if name in groups:
                    raise PacketError(f"expected each name once, got {name!r} twice")
                groups[name] = []
            elif not groups:
                raise PacketError(f"expected name:value, got {item[:40]!r}")
            groups[name].append(after)
        ordered: list[str] = []
        for wanted, leaf in zip(self._names, self._leaves, strict=True):
            if len(groups.get(wanted, ())) != leaf.size:
                raise PacketError(f"expected {leaf.size} values named {wanted!r}, got {text[:80]!r}")
            ordered += groups[wanted]
        return ordered

    def decode(self, text: str, *, check: bool = True) -> Any:
        """Read a value: a numpy array, an integer for Discrete, a dict for Dict.

        Args:
            text: The field.
            check: Refuse a value outside of the space, as a server does with an action.

        Raises:
            PacketError: The text has another form, or the value is not in the space.
        """
        items = self._items(text)
        result: Any = {}
        for leaf in self._leaves:
            mine, items = items[: leaf.size], items[leaf.size :]
            if leaf.floats:
                numbers: list[float] = [float(parse_decimal(item)) for item in mine]
                with np.errstate(over="ignore"):
                    array = np.array(numbers, leaf.dtype)
                if not np.isfinite(array).all():
                    raise PacketError(f"expected numbers that {leaf.dtype} can hold, got {text[:80]!r}")
            else:
                for item in mine:
                    if not _INTEGER.match(item):
                        raise PacketError(f"expected an integer, got {item[:40]!r}")
                try:
                    array = np.array([int(item) for item in mine], leaf.dtype)
                except OverflowError as error:
                    raise PacketError(f"expected integers that {leaf.dtype} can hold, got {text[:80]!r}") from error
            value: Any = array.reshape(leaf.shape)
            if isinstance(leaf.space, spaces.Discrete):
                value = array[0]
            if check and not leaf.space.contains(value):
                raise PacketError(f"expected a value of {leaf.space}, got {','.join(mine)[:80]!r}")
            if not leaf.path:
                return value
            target = result
            for name in leaf.path[:-1]:
                target = target.setdefault(name, {})
            target[leaf.path[-1]] = value
        return result

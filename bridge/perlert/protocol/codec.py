"""Spaces and the text fields: observations, actions and rewards as decimals.

A Box, Discrete, MultiDiscrete or MultiBinary value is its elements in C order, separated by commas (`5,6.78`). A Dict
observation names its parts (`x:0.54,y:0.95`, nested ones `arm.x:0.5`); a Dict action lists them without names, in the
space's order, because an action holds no colon (P-2).

Floats of an observation are rounded to `decimals` places (P-22) and an element without a bound is sent between
-99999999 and 99999999, so that the longest observation is known when the world is published. Actions are written with
the digits that give the same float back.
"""

from __future__ import annotations

import itertools
import math
import re
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from bridge.encoding.spaces import Layout, Leaf, bounds_of
from bridge.errors import InvalidActionError, PacketError, TensorError, UnsupportedSpaceError

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
    if len(text) > 400 or not _DECIMAL.match(text) or math.isinf(float(text)):
        raise PacketError(f"expected a finite decimal such as -1.25, got {text[:40]!r}")
    return Decimal(text)


def decimal_text(value: Decimal) -> str:
    """Write a decimal without exponent, trailing zeros or a negative zero."""
    text = f"{value:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def _float_text(value: float, decimals: int) -> str:
    text = f"{min(max(value, -LIMIT), LIMIT):.{decimals}f}"
    if decimals:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _exact_text(value: Any) -> str:
    """The shortest decimal that reads back as the same float."""
    text = np.format_float_positional(value, unique=True, trim="-")
    return "0" if text == "-0" else text


class _Part:
    """An array of a space: how many numbers of which type, and between which bounds."""

    def __init__(self, leaf: Leaf) -> None:
        self.space, self.shape, self.size = leaf.space, leaf.spec.shape, math.prod(leaf.spec.shape)
        self.name = ".".join(leaf.path)
        self.dtype = np.dtype(leaf.space.dtype)
        self.low, self.high = bounds_of(leaf.space)
        self.is_float = self.dtype.kind == "f"
        info: Any = np.finfo if self.is_float else np.iinfo
        held = info(np.int8 if self.dtype.kind == "b" else self.dtype)
        self._number: type[float] = float if self.is_float else int
        self.least, self.most = self._number(held.min), self._number(held.max)

    def read(self, text: str) -> float:
        """Read a number, which may be greater than the type can hold."""
        if not (_DECIMAL if self.is_float else _INTEGER).match(text):
            raise PacketError(f"expected {'a finite decimal' if self.is_float else 'an integer'}, got {text[:40]!r}")
        return self._number(text)


def _leaves(layout: Layout) -> tuple[Leaf, ...]:
    """Return the parts of a space that has a text form, or raise UnsupportedSpaceError."""
    for leaf in layout.leaves:
        names = [key for key in leaf.path if not isinstance(key, str) or not key or _BANNED.search(key)]
        if leaf.kind not in ("array", "scalar") or any(isinstance(key, int) for key in leaf.path):
            raise UnsupportedSpaceError(
                f"expected a Box, Discrete, MultiDiscrete, MultiBinary or a Dict of these, got {layout.space}; PERLERT "
                "carries short texts: convert the space with a wrapper, e.g. gymnasium.wrappers.FlattenObservation, or "
                "serve it over grpc://"
            )
        if names:
            raise UnsupportedSpaceError(
                f"expected names without `:` `;` `,` `=` `.` and control characters in a Dict space, got {names[0]!r}; "
                "rename the key with a wrapper"
            )
    if not layout.leaves or not all(math.prod(leaf.spec.shape) for leaf in layout.leaves):
        raise UnsupportedSpaceError(f"expected a space with parts and elements, got {layout.space}")
    return layout.leaves


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
        self.space, self.decimals = space, decimals
        try:
            self._layout = Layout(space, "value")
        except TensorError as error:
            raise UnsupportedSpaceError(f"expected numbers in {space}: {error}") from error
        self._parts = [_Part(leaf) for leaf in _leaves(self._layout)]
        self._size = sum(part.size for part in self._parts)
        self._named = named and bool(self._parts[0].name)

    def max_bytes(self) -> int:
        """Return the length of the longest text that `encode` writes, in bytes."""
        total = self._size - 1 + sum(len(part.name.encode()) + 1 for part in self._parts if self._named)
        for part in self._parts:
            if not part.is_float:
                total += part.size * max(len(str(int(end))) for end in (part.low.min(), part.high.max()))
            elif self.decimals is None:
                info = np.finfo(part.dtype)
                # sign, integer digits, dot, zeros of the smallest denormal and its digits
                total += part.size * (3 + 2 * int(np.ceil(-np.log10(float(info.smallest_subnormal)))) + info.precision)
            else:
                most = np.maximum(abs(part.low.astype(np.float64)), abs(part.high.astype(np.float64)))
                digits = np.floor(np.log10(np.clip(most, 1.0, LIMIT))) + 1
                total += int(digits.sum()) + part.size * (1 + bool(self.decimals) + self.decimals)
        return total

    def encode(self, value: Any) -> str:
        """Write a value of the space.

        Raises:
            InvalidActionError: Its structure or shape is another, or it holds NaN.
        """
        try:
            arrays = self._layout.pack(value, rounding=True)
        except TensorError as error:
            raise InvalidActionError(str(error)) from error
        texts = []
        for part, array in zip(self._parts, arrays, strict=True):
            flat = array.reshape(-1).astype(part.dtype, copy=False)
            numbers = flat.tolist()
            if not part.is_float:
                items = [str(int(number)) for number in numbers]
            elif any(map(math.isnan, numbers)):
                raise InvalidActionError(f"expected numbers for {part.space}, got NaN: {value!r:.80}")
            elif self.decimals is not None:
                items = [_float_text(number, self.decimals) for number in numbers]
            elif any(map(math.isinf, numbers)):
                raise InvalidActionError(f"expected finite numbers for {part.space}, got infinity: {value!r:.80}")
            else:
                items = [_exact_text(item) for item in flat]
            if self._named:
                items[0] = f"{part.name}:{items[0]}"
            texts += items
        return ",".join(texts)

    def _items(self, text: str) -> list[str]:
        """Return the texts of all elements, in the order of the space."""
        items = text.split(",") if len(text) <= 64 * 1024 else []
        if len(items) != self._size:
            raise PacketError(f"expected {self._size} values for {self.space}, got {text[:80]!r}")
        if not self._named:
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
        for part in self._parts:
            if len(groups.get(part.name, ())) != part.size:
                raise PacketError(f"expected {part.size} values named {part.name!r}, got {text[:80]!r}")
        return [item for part in self._parts for item in groups[part.name]]

    def decode(self, text: str, *, check: bool = True) -> Any:
        """Read a value: a numpy array, an integer for Discrete, a dict for Dict.

        Args:
            text: The field.
            check: Refuse a value outside of the space, as a server does with an action.

        Raises:
            PacketError: The text has another form, or the value is not in the space.
        """
        items, arrays = iter(self._items(text)), []
        for part in self._parts:
            numbers = [part.read(item) for item in itertools.islice(items, part.size)]
            if min(numbers) < part.least or max(numbers) > part.most:
                raise PacketError(f"expected numbers that {part.dtype} can hold, got {text[:80]!r}")
            array = np.array(numbers, part.dtype).reshape(part.shape)
            if check and ((array < part.low) | (array > part.high)).any():
                raise PacketError(f"expected a value of {self.space}, got {text[:80]!r}")
            arrays.append(array)
        return self._layout.unpack(arrays)

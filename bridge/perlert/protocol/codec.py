"""The text fields: observations, actions and rewards, with decimal numbers.

A Box, Discrete, MultiDiscrete or MultiBinary value is its elements in C order, separated by commas (`5,6.78`). A Dict
observation names its parts (`x:0.54,y:0.95`, nested ones `arm.x:0.5`); a Dict action lists them without names, in the
space's order, because an action holds no colon (P-2).

Floats of an observation are rounded to `decimals` places (P-22), and a value of an unbounded element is clipped to
±99999999, so that the length of the longest observation is known when the world is published. Actions are written with
enough digits to restore the same float.
"""

from __future__ import annotations

import itertools
import math
import re
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from bridge.core.encoding.spaces import Layout, bounds_of
from bridge.errors import InvalidActionError, PacketError, TensorError, UnsupportedSpaceError

__all__ = ["DECIMALS", "LIMIT", "Space", "TextCodec", "decimal_text", "parse_decimal"]

DECIMALS = 6
"""The default number of decimal places for rewards, and for floats in observations."""
LIMIT = 99_999_999.0
"""The largest magnitude that is sent for an unbounded float."""

Space: TypeAlias = spaces.Space[Any]

_DECIMAL = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?\Z", re.ASCII)
_INTEGER = re.compile(r"-?[0-9]{1,20}\Z", re.ASCII)
_BANNED = re.compile(r"[:;,=.\x00-\x1f\x7f]")


def parse_decimal(text: str) -> Decimal:
    """Parse a finite decimal with a dot; an exponent is accepted, but never written.

    Raises:
        PacketError: The text is not such a number (`nan`, `inf`, blanks, an empty text, digits of other alphabets).
    """
    # The pattern comes first: `float` and `Decimal` also accept blanks, underscores and digits of other alphabets.
    if len(text) > 400 or not _DECIMAL.match(text) or math.isinf(float(text)):
        raise PacketError(f"expected a finite decimal such as -1.25, got {text[:40]!r}")
    return Decimal(text)


def decimal_text(value: Decimal) -> str:
    """Format a decimal without exponent, trailing zeros or a negative zero."""
    return _shortest(f"{value:f}")


def _shortest(text: str) -> str:
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    # The result of rounding a small negative number.
    return "0" if text == "-0" else text


class TextCodec:
    """Converts values of one space to text and back.

    Args:
        space: A Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of these, nested or not.
        named: Write the parts of a Dict as `name:value` (for observations); False: only values (for actions, P-2).
        decimals: Decimal places of floats (P-22); None: as many as restore the same float.

    Raises:
        UnsupportedSpaceError: The space has no text form.
    """

    def __init__(self, space: Space, *, named: bool = True, decimals: int | None = DECIMALS) -> None:
        self.space, self.decimals = space, decimals
        try:
            self._layout = Layout(space, "value")
        except TensorError as error:
            raise UnsupportedSpaceError(f"expected numbers in {space}: {error}") from error
        self._leaves = self._layout.leaves
        for leaf in self._leaves:
            if leaf.kind not in ("array", "scalar") or any(isinstance(key, int) for key in leaf.path):
                raise UnsupportedSpaceError(
                    f"expected a Box, Discrete, MultiDiscrete, MultiBinary or a Dict of these, got {space}; PERLERT "
                    "carries short texts: convert the space with a wrapper, e.g. "
                    "gymnasium.wrappers.FlattenObservation, or serve it over grpc://"
                )
            if wrong := [key for key in leaf.path if not isinstance(key, str) or not key or _BANNED.search(key)]:
                raise UnsupportedSpaceError(
                    "expected names without `:` `;` `,` `=` `.` and control characters in a Dict space, got "
                    f"{wrong[0]!r}; rename the key with a wrapper"
                )
        self._sizes = [math.prod(leaf.spec.shape) for leaf in self._leaves]
        if not all(self._sizes) or not self._sizes:
            raise UnsupportedSpaceError(f"expected a space with parts and elements, got {space}")
        self._names = [".".join(leaf.path) for leaf in self._leaves] if named and self._leaves[0].path else []

    def max_bytes(self) -> int:
        """Return the length in bytes of the longest text that `encode` writes with decimal places."""
        total = sum(self._sizes) - 1 + sum(len(name.encode()) + 1 for name in self._names)
        for leaf in self._leaves:
            for ends in zip(*(bound.flat for bound in bounds_of(leaf.space)), strict=True):
                if leaf.spec.dtype.kind == "f":
                    # With a sign, which the other bound may need.
                    total += len(f"{-min(max(map(abs, ends)), LIMIT):.{self.decimals}f}")
                else:
                    total += max(len(str(int(end))) for end in ends)
        return total

    def encode(self, value: Any) -> str:
        """Format a value of the space.

        Raises:
            InvalidActionError: Its structure or shape is wrong, or it contains NaN.
        """
        try:
            arrays = self._layout.pack(value, rounding=True)
        except TensorError as error:
            raise InvalidActionError(str(error)) from error
        texts = []
        for leaf, array in zip(self._leaves, arrays, strict=True):
            flat = array.astype(leaf.space.dtype, copy=False).ravel()
            numbers = flat.tolist()
            if flat.dtype.kind != "f":
                items = [str(int(number)) for number in numbers]
            # With decimals, an infinite observation is sent as the limit. An action must be exactly what the agent
            # chose.
            elif any(map(math.isnan, numbers)) or (self.decimals is None and any(map(math.isinf, numbers))):
                raise InvalidActionError(
                    f"expected finite numbers for {leaf.space}, got NaN or infinity: {value!r:.80}"
                )
            elif self.decimals is None:
                # Formatted with the dtype: a float32 converted to a Python float would have the digits of a float64.
                items = [_shortest(np.format_float_positional(number, unique=True, trim="-")) for number in flat]
            else:
                items = [_shortest(f"{min(max(number, -LIMIT), LIMIT):.{self.decimals}f}") for number in numbers]
            texts.append(",".join(items))
        return ",".join(map(":".join, zip(self._names, texts, strict=True)) if self._names else texts)

    def _items(self, text: str) -> list[list[str]]:
        """Return the texts of each part's elements; named parts may come in any order."""
        # Checked before splitting, because the text is untrusted.
        if len(text) > 64 * 1024 or text.count(",") != sum(self._sizes) - 1:
            raise PacketError(f"expected {sum(self._sizes)} values for {self.space}, got {text[:80]!r}")
        if not self._names:
            items = iter(text.split(","))
            return [list(itertools.islice(items, size)) for size in self._sizes]
        # A part begins at a name; the commas in between separate further elements of an array.
        found = [part.partition(":") for part in re.split(",(?=[^,]*:)", text)]
        values = {name: items.split(",") for name, _, items in found}
        for name, size in zip(self._names, self._sizes, strict=True):
            if len(values.get(name, ())) != size or len(values) < len(found):
                raise PacketError(f"expected {size} values named {name!r}, and each name once, got {text[:80]!r}")
        return [values[name] for name in self._names]

    def decode(self, text: str, *, check: bool = True) -> Any:
        """Parse a value: a NumPy array, an integer for Discrete, a dict for Dict.

        Args:
            text: The field.
            check: Refuse a value outside the space, as a server does with an action.

        Raises:
            PacketError: The text is malformed, or the value is not in the space.
        """
        arrays = []
        for leaf, items in zip(self._leaves, self._items(text), strict=True):
            dtype = np.dtype(leaf.space.dtype)
            form, number = (_DECIMAL, float) if dtype.kind == "f" else (_INTEGER, int)
            # Range and dtype are checked here: the checks of tensors take twice as long for an action.
            held: Any = np.finfo(dtype) if number is float else np.iinfo("i1" if dtype.kind == "b" else dtype)
            for item in items:
                if not form.match(item):
                    expected = "a finite decimal" if number is float else "an integer"
                    raise PacketError(f"expected {expected}, got {item[:40]!r}")
            numbers = list(map(number, items))
            # Written with the fewest digits, the largest float32 reads as a number above it, by less than half of its
            # last bit.
            slack = 1 + float(held.eps) / 4 if number is float else 1
            if min(numbers) < number(held.min) * slack or max(numbers) > number(held.max) * slack:
                raise PacketError(f"expected numbers that {dtype} can hold, got {text[:80]!r}")
            array = np.array(numbers, dtype).reshape(leaf.spec.shape)
            low, high = bounds_of(leaf.space)
            if check and ((array < low) | (array > high)).any():
                raise PacketError(f"expected a value of {self.space}, got {text[:80]!r}")
            arrays.append(array)
        return self._layout.unpack(arrays)

"""The text by which the names of attributes travel, and what a client reads from it."""

from __future__ import annotations

from bridge.core.encoding.names import MOST_BYTES, AttributeNames, KnownNames


def test_what_is_too_long_or_no_public_name_is_left_out() -> None:
    text = AttributeNames.of({f"name{number}": bool(number % 2) for number in range(20_000)})
    assert MOST_BYTES - 20 < len(text.encode()) <= MOST_BYTES
    known = KnownNames(text)
    assert {"name0", "name2"} <= known.attributes
    assert "name1" in known.methods
    assert AttributeNames.of({"x" * 100_000: False}) == ""
    assert len(AttributeNames.of({"é" * 20_000: False, "ü" * 20_000: False}).split()) == 1
    hostile = KnownNames("_private __class__ a.b 1x ok go() ()")
    assert (hostile.attributes, "go" in hostile, "_private" in hostile) == ({"ok"}, True, False)
    known.add_attribute("name1")
    assert "name1" in known.attributes - known.methods

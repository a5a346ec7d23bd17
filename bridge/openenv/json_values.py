"""Samples of Gymnasium's spaces as JSON, and spaces as JSON Schema.

Numbers are written with all digits, so that a float32 survives the round trip unchanged. Like in Python's `json`,
non-finite numbers are written as `NaN` and `Infinity`. A picture is an array or, on request, a PNG in a data URL.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from bridge.core.encoding.space_json import check_space_bytes, plain_space_from_json, space_to_json
from bridge.core.encoding.spaces import bounds_of, is_picture
from bridge.core.extras import needed
from bridge.core.image_files import encode_png
from bridge.errors import SettingError

__all__ = ["SPACE", "expecting", "from_json", "schema_of", "space_of", "to_bytes", "to_json"]

SPACE = "x-gymnasium-space"
"""The key in a schema under which our servers write the space itself."""
TEXT_CHARSET = "".join(c for c in map(chr, (*range(0x250), *range(0x2000, 0x2070))) if c.isprintable() or c in "\n\t")
"""The characters of a Text space whose schema names none: European letters, and general punctuation."""
_MAX_TEXT = 1 << 20
_MOST_SCHEMAS = 10_000
_PNG = "data:image/png;base64,"
_NUMBERS: dict[str, Any] = {"integer": (np.int64, -(2**63), 2**63 - 1), "number": (np.float64, -np.inf, np.inf)}
# Their JSON is that of Gymnasium, which batches the values inside.
_CONTAINERS = (spaces.OneOf, spaces.Sequence, spaces.Graph)
# The exceptions that JSON of an unexpected structure causes.
_MISFITS = (AssertionError, AttributeError, LookupError, OSError, OverflowError, RecursionError, TypeError, ValueError)


def to_json(space: Space[Any], sample: Any, *, pictures: bool = False) -> Any:
    """Return a sample of a space as a value for `json.dumps`; with `pictures`, write pictures as PNGs."""
    if isinstance(space, spaces.Dict):
        return {str(key): to_json(part, sample[key], pictures=pictures) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [to_json(part, item, pictures=pictures) for part, item in zip(space.spaces, sample, strict=True)]
    if pictures and is_picture(space):
        return _PNG + base64.b64encode(encode_png(sample)).decode()
    return space.to_jsonable([sample])[0]


def to_bytes(value: Any) -> bytes:
    """Return a value, such as a message with an info, as JSON bytes; unsupported values are written as `repr`."""
    return json.dumps(value, default=lambda item: item.tolist() if hasattr(item, "tolist") else repr(item)).encode()


@contextlib.contextmanager
def expecting(wanted: str, value: Any, fail: Callable[[str], Exception] = SettingError) -> Iterator[None]:
    """Raise an error that says what was expected if JSON has another structure.

    Args:
        wanted: What is expected.
        value: What was received.
        fail: Creates the exception.
    """
    try:
        yield
    except _MISFITS as error:
        raise fail(f"expected {wanted}, got {value!r:.200}: {error!r}") from error


def from_json(space: Space[Any], value: Any) -> Any:
    """Return the sample of which `to_json` returned a value, in the form that `Layout` takes: lists stand for arrays.

    Call it inside `expecting`.

    Args:
        space: The space of the sample.
        value: Parsed JSON.
    """
    if isinstance(space, spaces.Dict):
        return {key: from_json(part, value[str(key)]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(from_json(part, item) for part, item in zip(space.spaces, value, strict=True))
    if isinstance(value, str) and is_picture(space):
        return _read_picture(value, space.shape or ())
    if isinstance(space, _CONTAINERS) or getattr(space.dtype, "kind", "") == "f":  # which accepts null, pydantic's NaN
        return space.from_jsonable([value])[0]
    return value


def _read_picture(text: str, shape: tuple[int, ...]) -> Any:
    with needed("pictures as PNG need the package pillow", "web"):
        from PIL import Image
    picture = Image.open(io.BytesIO(base64.b64decode(text.removeprefix(_PNG))), formats=("PNG",))
    if (picture.height, picture.width) != shape[:2]:  # checked before decoding: a few bytes may encode gigabytes
        raise ValueError(f"the picture is of {picture.height} x {picture.width} pixels")
    return np.array(picture.convert("RGB"))


# Schemas


def schema_of(space: Space[Any], *, pictures: bool = False) -> dict[str, Any]:
    """Return the JSON Schema for the values that `to_json` returns for a space.

    It also contains the space itself, for clients of this package. If a schema would be long (OneOf, Sequence, Graph),
    it contains only the type.
    """
    return {**_schema(space, pictures), SPACE: space_to_json(space)}


def _schema(space: Space[Any], pictures: bool) -> dict[str, Any]:
    if isinstance(space, spaces.Dict):
        properties = {str(key): _schema(part, pictures) for key, part in space.spaces.items()}
        if len(properties) < len(space.spaces):
            raise SettingError(f"OpenEnv's JSON has texts as keys, and two keys of {space} are the same text")
        return {"type": "object", "properties": properties, "required": list(properties)}
    if isinstance(space, spaces.Tuple):
        return {"type": "array", "prefixItems": [_schema(part, pictures) for part in space.spaces]}
    if isinstance(space, spaces.Text):
        return {"type": "string", "minLength": space.min_length, "maxLength": space.max_length}
    if pictures and is_picture(space):
        return {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"}
    if isinstance(space, _CONTAINERS):
        inner = (getattr(space, name, None) for name in ("stacked_feature_space", "node_space", "edge_space"))
        parts = (*getattr(space, "spaces", ()), *inner)
        if any(isinstance(part, (spaces.Dict, spaces.Tuple, *_CONTAINERS)) for part in parts):
            raise SettingError(f"OpenEnv's JSON holds no {type(space).__name__} of composites, got {space}")
        return {"type": "object" if isinstance(space, spaces.Graph) else "array"}
    found: dict[str, Any] = {"type": "number" if space.dtype.kind == "f" else "integer"}  # type: ignore[union-attr]
    for name, bounds in zip(("minimum", "maximum"), bounds_of(space), strict=True):
        if bounds.size and np.isfinite(bounds.flat[0]) and (bounds == bounds.flat[0]).all():
            found[name] = bounds.flat[0].item()
    for count in reversed(space.shape or ()):
        found = {"type": "array", "items": found, "minItems": count, "maxItems": count}
    return found


def space_of(schema: Any, definitions: Mapping[str, Any], count: Iterator[int] | None = None) -> Space[Any] | None:
    """Return the space that a JSON Schema describes; None if it describes no space, such as an object with any keys.

    Call it inside `expecting`.

    Args:
        schema: A schema as OpenEnv's servers, and so pydantic, write it.
        definitions: The targets of its `$ref`.
        count: Counts the schemas that were read for the whole space.
    """
    count = count or itertools.count()
    # Definitions that refer twice to the next definition double the work at each level.
    if next(count) == _MOST_SCHEMAS:
        raise ValueError(f"it has more than {_MOST_SCHEMAS} parts")
    if SPACE in schema:
        return plain_space_from_json(schema[SPACE])
    if "$ref" in schema:
        return space_of(definitions[schema["$ref"].rpartition("/")[2]], definitions, count)
    if "anyOf" in schema:  # for an optional field, use the type of its value
        choices = [choice for choice in schema["anyOf"] if choice.get("type") != "null"]
        return space_of(choices[0], definitions, count) if len(choices) == 1 else None
    if schema.get("type") == "object":
        parts = {name: space_of(part, definitions, count) for name, part in schema.get("properties", {}).items()}
        found = {name: part for name, part in parts.items() if part is not None}
        return spaces.Dict(found) if found else None
    if schema.get("type") == "string":
        longest = min(schema.get("maxLength", _MAX_TEXT), _MAX_TEXT)
        return spaces.Text(longest, min_length=schema.get("minLength", 0), charset=TEXT_CHARSET)
    if schema.get("type") == "boolean":
        return spaces.Discrete(2)
    if schema.get("type") == "integer" and "minimum" in schema and "maximum" in schema:
        return spaces.Discrete(schema["maximum"] - schema["minimum"] + 1, start=schema["minimum"])
    shape: tuple[int, ...] = ()
    while schema.get("type") == "array" and "minItems" in schema and schema["minItems"] == schema.get("maxItems"):
        shape, schema = (*shape, schema["minItems"]), schema.get("items", {})
    if schema.get("type") not in _NUMBERS:
        return None
    dtype, least, most = _NUMBERS[schema["type"]]
    check_space_bytes([(shape, dtype)])
    return spaces.Box(schema.get("minimum", least), schema.get("maximum", most), shape, dtype)

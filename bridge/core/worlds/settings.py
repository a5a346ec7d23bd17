"""Read and check the settings of requests, for all kinds of worlds.

Every function that reads a setting raises RequestError with INVALID_ARGUMENT; the error names the setting and says
what was expected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from bridge.core.encoding import values
from bridge.core.encoding.seeds import unpack_seed, unpack_seeds
from bridge.core.encoding.tensors import Array, unpack_tensor
from bridge.errors import Code, RequestError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = [
    "ROLES",
    "ResetRequest",
    "SentKwargs",
    "Settings",
    "for_gymnasium",
    "masked",
    "read_bool",
    "read_choice",
    "read_kwargs",
    "read_reset",
    "read_scalar",
    "read_string",
    "read_text",
    "reading",
    "refuse_unknown",
    "without_mask",
    "wrong",
]

ROLES = ("player", "spectator")
"""The roles of an agent; the first is the default."""

Settings: TypeAlias = Mapping[str, pb.Tensor]
"""The settings of a request, by name."""

# The kind of worlds that take a setting, for the error of a world that does not.
_ELSEWHERE = {
    "role": "real-time worlds, served with fps=",
    "wait": "real-time worlds, served with fps=",
    "restart": "real-time worlds, served with fps=",
    "together": "real-time worlds of several agents",
    "reset_mask": "worlds of lanes, served with num_envs=",
    "agent": "worlds of several agents, of serve_parallel",
}


def refuse_unknown(settings: Settings, known: Sequence[str], request: str) -> None:
    """Raise INVALID_ARGUMENT if a setting is not in `known`; `request` is the request's name, for the message."""
    unknown = sorted(set(settings) - set(known))
    if unknown:
        allowed = ", ".join(known) or "none"
        hints = "".join(f"; {name} is for {_ELSEWHERE[name]}" for name in unknown if name in _ELSEWHERE)
        text = f"unknown {request} settings {', '.join(unknown)}; the settings here are: {allowed}{hints}"
        raise RequestError(Code.INVALID_ARGUMENT, text)


@contextlib.contextmanager
def reading(request: str) -> Iterator[None]:
    """Convert a TensorError, raised for a malformed or unexpected tensor, to INVALID_ARGUMENT."""
    try:
        yield
    except TensorError as error:
        raise RequestError(Code.INVALID_ARGUMENT, f"bad {request} settings: {error}") from error


def read_scalar(settings: Settings, name: str, request: str = "JoinWorld") -> object:
    """Return a setting as a NumPy scalar, a string or an array; None: it is not given."""
    if name not in settings:
        return None
    with reading(request):
        return unpack_tensor(settings[name], name)[()]


def wrong(name: str, expected: str, value: object) -> RequestError:
    """Return the error for a setting with an unexpected value."""
    return RequestError(Code.INVALID_ARGUMENT, f"expected the setting {name} to be {expected}, got {value!r:.100}")


def read_choice(settings: Settings, name: str, choices: Sequence[str], request: str = "JoinWorld") -> str:
    """Return a setting that is one of a few words; the first is the default."""
    value = read_scalar(settings, name, request)
    if value is None:
        return choices[0]
    if not isinstance(value, str) or value not in choices:
        raise wrong(name, f"one of {', '.join(choices)}", value)
    return value


def read_string(settings: Settings, name: str, request: str) -> str | None:
    """Return a setting that is any string; None: it is not given."""
    value = read_scalar(settings, name, request)
    if not isinstance(value, (str, type(None))):
        raise wrong(repr(name), "a string", value)
    return value


def read_text(settings: Settings, name: str, request: str, pattern: re.Pattern[str], expected: str) -> str:
    """Return a required setting, a string that `pattern` matches in full; `expected` describes it for the error."""
    value = read_scalar(settings, name, request)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise wrong(name, expected, value)
    return value


def read_bool(settings: Settings, name: str, request: str, default: bool) -> bool:
    """Return a setting that is a bool."""
    value = read_scalar(settings, name, request)
    if value is None:
        return default
    if not isinstance(value, np.bool_):
        raise wrong(name, "a bool", value)
    return bool(value)


def _decoded(settings: Settings, name: str) -> object:
    """Return a setting that is encoded with the values codec; None: it is not given."""
    if name not in settings:
        return None
    tensor = settings[name]
    if tensor.WhichOneof("payload") != "uint8s":
        raise TensorError(f"expected the setting {name!r} as uint8 bytes of the values codec")
    # `decode_request` limits the number of values, because they come from a client.
    return values.decode_request(tensor.uint8s.array)


# CreateWorld


class SentKwargs(dict[str, object]):
    """Keyword arguments of an environment, some of them from a client: classes that they name are not imported."""


def read_kwargs(settings: Settings, known: Sequence[str], defaults: Mapping[str, object]) -> dict[str, object]:
    """Return an environment's keyword arguments: `kwargs`, `kwargs.NAME` and `render_mode` override `defaults`.

    Returns `SentKwargs` if the client sent `kwargs` or `kwargs.NAME`.

    Args:
        settings: The settings of CreateWorld; the caller reads the remaining ones.
        known: The names of all settings that the server's worlds take.
        defaults: The server's keyword arguments.
    """
    plain = {name: tensor for name, tensor in settings.items() if not name.startswith("kwargs.")}
    refuse_unknown(plain, (*known, "kwargs.NAME"), "CreateWorld")
    with reading("CreateWorld"):
        given = _decoded(settings, "kwargs") or {}
        if not isinstance(given, dict):
            raise TensorError(f"expected kwargs to be a dict, got {given!r:.80}")
        sent = bool(given) or len(plain) < len(settings)
        kwargs: dict[str, object] = SentKwargs({**defaults, **given}) if sent else {**defaults}
        for name, tensor in settings.items():
            if name.startswith("kwargs."):
                array = unpack_tensor(tensor, name)
                # A scalar becomes a Python object, so that an environment gets the arguments that it gets locally.
                kwargs[name.removeprefix("kwargs.")] = array if array.shape else array.item()
    render_mode = read_string(settings, "render_mode", "CreateWorld")
    if render_mode:
        kwargs["render_mode"] = render_mode
    return kwargs


# Reset and ResetWorld


_EMPTY = "reset_mask_alone"
"""A key beside `reset_mask`: the lanes get an empty dict, as Gymnasium's lanes do if a user passes only the mask."""


def masked(options: Mapping[str, object] | None, mask: Array) -> dict[str, object]:
    """Return the options of a reset of some lanes.

    Args:
        options: The options for the environments.
        mask: The lanes, bool, shape `(lanes,)`.
    """
    if options is None:
        return {"reset_mask": mask}
    return {**options, "reset_mask": mask, **({} if options else {_EMPTY: True})}


def without_mask(options: Mapping[str, Any] | None) -> tuple[dict[str, Any] | None, Any]:
    """Return the options of a reset that the environments get, and the `reset_mask`, None if there is none.

    With a mask alone, as in an automatic reset of lanes, the environments get None, as in a reset without options.
    """
    if options is None:
        return None, None
    rest = {key: value for key, value in options.items() if key not in ("reset_mask", _EMPTY)}
    alone = not rest and "reset_mask" in options and _EMPTY not in options
    return None if alone else rest, options.get("reset_mask")


def for_gymnasium(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the options of a reset in Gymnasium's form, without the key that stands for an empty dict."""
    return None if options is None else {key: value for key, value in options.items() if key != _EMPTY}


@dataclasses.dataclass(frozen=True)
class ResetRequest:
    """The settings of a reset, read and checked."""

    seed: int | list[int | None] | None
    """One seed, from which each lane's seed is derived, or one seed for each lane."""
    options: dict[str, object] | None
    """The options for the environment's `reset`."""
    mask: Array
    """True for each lane to reset, bool, shape `(lanes,)`; `(1,)` for a world without lanes."""
    restart: bool
    """In real time, whether running episodes end; a seed or options end them anyway."""

    @property
    def seeds(self) -> Sequence[int | None]:
        """A seed for each lane; None: the lane gets no seed."""
        if isinstance(self.seed, list):
            return self.seed
        return [None] * len(self.mask) if self.seed is None else range(self.seed, self.seed + len(self.mask))


def read_reset(settings: Settings, known: Sequence[str], lanes: int | None) -> ResetRequest:
    """Read the settings of a reset.

    Args:
        settings: The settings of Reset or ResetWorld.
        known: The names of the settings that the world takes.
        lanes: The number of lanes; None: a single environment, or several agents.
    """
    refuse_unknown(settings, known, "Reset")
    with reading("Reset"):
        arrays = {name: unpack_tensor(tensor, name) for name, tensor in settings.items() if name != "options"}
        seed: int | list[int | None] | None = None
        if "seed" in arrays:
            seed = unpack_seed(arrays["seed"]) if lanes is None else unpack_seeds(arrays["seed"], lanes)
        count = lanes or 1
        mask = arrays.get("reset_mask", np.ones(count, np.bool_))
        if mask.shape != (count,) or mask.dtype != np.bool_ or not mask.any():
            raise TensorError(f"expected a reset_mask of {lanes} bools, one of them True, got {mask!r:.80}")
        options = _decoded(settings, "options")
        if not isinstance(options, (dict, type(None))):
            raise TensorError(f"expected options to be a dict, got {type(options).__name__}")
        return ResetRequest(seed, options, mask, read_bool(settings, "restart", "Reset", True))

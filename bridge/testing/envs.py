"""Tiny Gymnasium environments for tests: every space, failures, slow resets, countable steps.

All are deterministic: after `reset(seed=…)` the same actions give the same observations, rewards, flags and infos bit
for bit, in any process, so that a remote environment can be compared with a local one.
"""

from __future__ import annotations

import copy
import threading
import zlib
from collections.abc import Callable
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from bridge.core.gymnasium_versions import VERSION, dict_space
from bridge.errors import ResetNeededError, SettingError

__all__ = [
    "EVERY_SPACE",
    "CountingEnv",
    "FailingEnv",
    "SlowResetEnv",
    "SpaceEnv",
    "TestFailure",
    "digest",
    "make_info",
]


class TestFailure(Exception):  # noqa: N818 - it is a failure on purpose, not an error class of the library
    """The error that `FailingEnv` raises."""

    __test__ = False  # not a test case, despite its name


def digest(value: Any) -> int:
    """Return 32 bits that depend only on a value, and are the same in every process.

    Arrays are hashed with dtype, shape and elements, so an action that arrives with another dtype has another digest.
    Python and NumPy scalars are hashed by value and kind (bool, int, float), so `1` and `numpy.int64(1)` have the same
    digest. The order of a dict's keys does not matter.

    Raises:
        TypeError: The value contains something that no Gymnasium space contains.
    """
    return zlib.crc32(_canonical(value))


def _canonical(value: Any) -> bytes:
    if value is None:
        return b"none;"
    if isinstance(value, (bool, np.bool_)):
        return b"bool:%d;" % bool(value)
    if isinstance(value, (int, np.integer)):
        return b"int:%d;" % int(value)
    if isinstance(value, (float, np.floating)):
        return b"float:" + float(value).hex().encode() + b";"
    if isinstance(value, str):
        return b"str:" + repr(value).encode("utf-8", "backslashreplace") + b";"
    if isinstance(value, np.ndarray):
        little = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
        return f"array:{value.dtype.name}:{value.shape}:".encode() + little.tobytes() + b";"
    if isinstance(value, (tuple, list)):
        return (b"(" if isinstance(value, tuple) else b"[") + b"".join(map(_canonical, value)) + b")"
    if isinstance(value, dict):
        items = sorted((_canonical(key), _canonical(item)) for key, item in value.items())
        return b"{" + b"".join(key + b"=" + item for key, item in items) + b"}"
    raise TypeError(f"expected a value of a Gymnasium space, got {type(value).__name__}")


def _declared(space: spaces.Space[Any], value: Any) -> Any:
    """Return a space's element with arrays for all Boxes: samples of an integer Box of shape () are scalars."""
    if isinstance(space, spaces.Box):
        return np.asarray(value) if isinstance(value, np.generic) else value
    if isinstance(space, spaces.Dict):
        return {key: _declared(part, value[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_declared(part, item) for part, item in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.OneOf):
        return value[0], _declared(space.spaces[value[0]], value[1])
    if isinstance(space, spaces.Sequence) and not space.stack:
        return tuple(_declared(space.feature_space, item) for item in value)
    return value


def make_info(generator: np.random.Generator, steps: int) -> dict[str, Any]:
    """Return an info with every kind of value that infos may contain, as fresh objects each time.

    These are numbers, strings, bytes, None, NumPy scalars and arrays of several dtypes, tuples, lists, and nested
    dicts; also NaN, infinities and arrays of text, but not in the first step of an episode: Gymnasium's `check_env`
    compares those infos with `numpy.allclose`, for which NaN differs from itself and text is an error.

    Args:
        generator: The source of random values.
        steps: The number of steps in the episode so far; 0 for the info of a reset.
    """
    compared = steps == 1
    return {
        "steps": steps,
        "none": None,
        "flag": steps % 2 == 0,
        "text": f"step {steps}: καλημέρα",
        "empty_text": "",
        "bytes": bytes([0, 255, steps % 256]),
        "big": 2**70 + steps,
        "negative": -(2**63),
        "number": float(generator.standard_normal()),
        "not_finite": [float("nan"), float("inf"), float("-inf")] if not compared else [],
        "float16": np.float16(generator.random()),
        "int8": np.int8(generator.integers(-128, 128)),
        "uint64": np.uint64(2**64 - 1),
        "bool_": np.bool_(generator.random() < 0.5),
        "action_mask": generator.integers(0, 2, size=6, dtype=np.int8),
        "float64s": np.array([np.nan, np.inf, -0.0]) if not compared else generator.random(3),
        "uint16s": generator.integers(0, 2**16, size=(2, 3), dtype=np.uint16),
        "scalar_array": np.array(generator.random(), dtype=np.float32),
        "no_elements": np.zeros((0, 3), dtype=np.float32),
        "list": [1, 2.5, None, "x", [True]],
        "tuple": (1, (2, np.float32(3.0))),
        "nested": {"a.b": {"": generator.integers(0, 9, size=2), "%": {}}, "list": [{"k": None}]},
        **({} if compared else {"texts": np.array(["a", "bc", ""])}),
        **({"only_on_odd_steps": generator.random(2)} if steps % 2 else {}),
    }


class SpaceEnv(gymnasium.Env[Any, Any]):
    """An environment with any two spaces, whose observations are samples of the observation space.

    The reward of a step is `digest(action) / 2**32 + step count`, so it shows whether an action arrived with another
    value, dtype or shape. Episodes last `min_steps` to `max_steps` steps, drawn from the seed, and end by termination
    or truncation with equal probability. `info["action_digest"]` is the digest of the last action, and the other
    entries come from `make_info`.

    Args:
        observation_space: Any space. A copy is sampled, so that this one's random state does not change.
        action_space: Any space.
        min_steps: The shortest episode, at least 1; 2 or more for Gymnasium's `check_env`.
        max_steps: The longest episode.
        infos: If False, infos are empty.

    Raises:
        SettingError: The episode lengths are not 1 <= min_steps <= max_steps.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's declaration

    def __init__(
        self,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
        *,
        min_steps: int = 3,
        max_steps: int = 12,
        infos: bool = True,
    ) -> None:
        if not 1 <= min_steps <= max_steps:
            raise SettingError(f"expected 1 <= min_steps <= max_steps, got {min_steps} and {max_steps}")
        self.observation_space = spaces.Discrete(5) if observation_space is None else observation_space
        self.action_space = spaces.Discrete(2) if action_space is None else action_space
        self._source = copy.deepcopy(self.observation_space)
        self._min_steps, self._max_steps, self._infos = min_steps, max_steps, infos
        self._seeded = False
        self._steps = -1  # no episode
        self._length = 0
        self._by_termination = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. If `options` are given, `info["options"]` contains them."""
        super().reset(seed=seed)
        if seed is not None or not self._seeded:
            self._source.seed(int(self.np_random.integers(2**31)))
            self._seeded = True
        self._steps = 0
        self._length = int(self.np_random.integers(self._min_steps, self._max_steps + 1))
        self._by_termination = bool(self.np_random.random() < 0.5)
        info = make_info(self.np_random, 0) if self._infos else {}
        if self._infos and options is not None:
            info["options"] = copy.deepcopy(options)
        return self._observe(), info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Play one step.

        Raises:
            gymnasium.error.InvalidAction: The action is not in the action space.
            ResetNeededError: No episode is running.
        """
        if self._steps < 0:
            raise ResetNeededError("expected a running episode, but none is: call reset() first")
        try:
            action = _declared(self.action_space, action)
            fits = self.action_space.contains(action)
        except (KeyError, IndexError, TypeError, ValueError):  # a value of another structure
            fits = False
        if not fits:
            raise gymnasium.error.InvalidAction(f"expected an element of {self.action_space}, got {action!r}")
        self._steps += 1
        steps, code = self._steps, digest(action)
        ended = steps >= self._length
        if ended:
            self._steps = -1
        info = {"action_digest": code, **make_info(self.np_random, steps)} if self._infos else {}
        terminated, truncated = ended and self._by_termination, ended and not self._by_termination
        return self._observe(), code / 2**32 + steps, terminated, truncated, info

    def _observe(self) -> Any:
        return _declared(self._source, self._source.sample())


class CountingEnv(gymnasium.Env[NDArray[np.int64], Any]):
    """An environment with the observation `[episode, step]`, int64 of shape (2,), which shows lost or repeated calls.

    `episode` counts resets from 1, `step` the steps since. The reward is the step's number.

    Args:
        length: The number of steps per episode.
        truncates: True if episodes end by truncation, False by termination.
        action_space: Any space; actions are ignored.
    """

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self, length: int = 5, *, truncates: bool = False, action_space: spaces.Space[Any] | None = None
    ) -> None:
        self.observation_space = spaces.Box(0, 2**62, shape=(2,), dtype=np.int64)
        self.action_space = spaces.Discrete(2) if action_space is None else action_space
        self.length, self.truncates = length, truncates
        self.episode = self.steps = 0
        self.closed = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.int64], dict[str, Any]]:
        """Begin the next episode."""
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return np.array([self.episode, 0], dtype=np.int64), {"seed": seed}

    def step(self, action: Any) -> tuple[NDArray[np.int64], SupportsFloat, bool, bool, dict[str, Any]]:
        """Count a step.

        Raises:
            ResetNeededError: The episode has ended, or none has begun.
        """
        if not self.episode or self.steps >= self.length:
            raise ResetNeededError("expected a running episode, but none is: call reset() first")
        self.steps += 1
        ended = self.steps >= self.length
        observation = np.array([self.episode, self.steps], dtype=np.int64)
        return observation, float(self.steps), ended and not self.truncates, ended and self.truncates, {}

    def close(self) -> None:
        """Set `closed` to True."""
        self.closed = True


class FailingEnv(CountingEnv):
    """A `CountingEnv` that raises `TestFailure` in one reset or step, and works before and after it.

    Args:
        fail_in_reset: The reset that fails, counted from 1 over the environment's life; None: no reset does.
        fail_in_step: The step that fails, counted from 1 over the environment's life; None: no step does.
        length: The number of steps per episode.
    """

    def __init__(self, *, fail_in_reset: int | None = None, fail_in_step: int | None = None, length: int = 5) -> None:
        super().__init__(length)
        self._fail_in_reset, self._fail_in_step = fail_in_reset, fail_in_step
        self._resets_asked = self._steps_asked = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.int64], dict[str, Any]]:
        """Begin the next episode, or raise `TestFailure`."""
        self._resets_asked += 1
        if self._resets_asked == self._fail_in_reset:
            raise TestFailure(f"reset {self._resets_asked} fails on purpose")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[NDArray[np.int64], SupportsFloat, bool, bool, dict[str, Any]]:
        """Count a step, or raise `TestFailure`."""
        self._steps_asked += 1
        if self._steps_asked == self._fail_in_step:
            raise TestFailure(f"step {self._steps_asked} fails on purpose")
        return super().step(action)


class SlowResetEnv(CountingEnv):
    """A `CountingEnv` whose reset returns when the test says so, without sleeping.

    A reset first sets `in_reset`, then waits for `release`. If that is not set in time, it raises `TestFailure`.

    Args:
        release: The event that a reset waits for, shared with the test.
        deadline: The most seconds that a reset waits.
        free_resets: The number of first resets that do not wait.
        length: The number of steps per episode.
    """

    def __init__(
        self, release: threading.Event, *, deadline: float = 10.0, free_resets: int = 0, length: int = 5
    ) -> None:
        super().__init__(length)
        self._release, self._deadline, self._free_resets = release, deadline, free_resets
        self.in_reset = threading.Event()
        self._resets_asked = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.int64], dict[str, Any]]:
        """Wait for `release`, then begin the next episode.

        Raises:
            TestFailure: `release` was not set within the deadline.
        """
        self._resets_asked += 1
        if self._resets_asked > self._free_resets:
            self.in_reset.set()
            if not self._release.wait(self._deadline):
                raise TestFailure(f"reset {self._resets_asked} was not released within {self._deadline:g} s")
        return super().reset(seed=seed, options=options)


def _box_limits(dtype: type[np.integer[Any]]) -> Callable[[], spaces.Space[Any]]:
    limits = np.iinfo(dtype)
    # Gymnasium cannot sample values of 2**63 - 1 or above, as its documentation says.
    high = min(int(limits.max), 2**63 - 2)
    return lambda: spaces.Box(int(limits.min), high, shape=(2, 3), dtype=dtype)


def _per_element() -> spaces.Space[Any]:
    return spaces.Box(
        np.array([[-1.0, 0.0], [-5.5, 2.0]], dtype=np.float32), np.array([[1.0, 0.1], [5.5, 2.0]], dtype=np.float32)
    )


def _half_bounded() -> spaces.Space[Any]:
    inf = np.inf
    return spaces.Box(np.array([0.0, -inf, -inf, -1.0]), np.array([inf, 3.0, inf, 1.0]), dtype=np.float64)


def _half_bounded_int() -> spaces.Space[Any]:
    inf = np.inf
    return spaces.Box(np.array([0.0, -inf, -inf, -1.0]), np.array([inf, 3.0, inf, 1.0]), dtype=np.int32)


def _mixed() -> spaces.Space[Any]:
    return spaces.Dict(
        {
            "camera": spaces.Box(0, 255, shape=(4, 5, 3), dtype=np.uint8),
            "goal": spaces.OneOf((spaces.Discrete(3), spaces.Text(4))),
            "inventory": spaces.Sequence(
                spaces.Dict({"kind": spaces.Discrete(4), "weights": spaces.Sequence(spaces.Box(0, 1, shape=(2,)))})
            ),
            "map": spaces.Graph(spaces.Box(-1, 1, shape=(2,)), spaces.Discrete(3)),
            "pose": spaces.Tuple((spaces.Box(-np.inf, np.inf, shape=(3,)), spaces.Tuple((spaces.MultiBinary(2),)))),
        }
    )


EVERY_SPACE: dict[str, Callable[[], spaces.Space[Any]]] = {
    # Box: every dtype
    "box_float16": lambda: spaces.Box(-2, 2, shape=(3,), dtype=np.float16),
    "box_float32": lambda: spaces.Box(-1, 1, shape=(2, 3), dtype=np.float32),
    "box_float64": lambda: spaces.Box(-1e300, 1e300, shape=(2,), dtype=np.float64),
    "box_int8": _box_limits(np.int8),
    "box_int16": _box_limits(np.int16),
    "box_int32": _box_limits(np.int32),
    "box_int64": _box_limits(np.int64),
    "box_uint8": _box_limits(np.uint8),
    "box_uint16": _box_limits(np.uint16),
    "box_uint32": _box_limits(np.uint32),
    "box_uint64": _box_limits(np.uint64),
    "box_bool": lambda: spaces.Box(0, 1, shape=(2, 2), dtype=np.bool_),
    # Box: shapes and bounds
    "box_scalar": lambda: spaces.Box(-1, 1, shape=(), dtype=np.float32),
    "box_scalar_int": lambda: spaces.Box(-3, 3, shape=(), dtype=np.int16),
    "box_one_element": lambda: spaces.Box(-1, 1, shape=(1,)),
    "box_no_elements": lambda: spaces.Box(-1, 1, shape=(0,)),
    "box_image": lambda: spaces.Box(0, 255, shape=(12, 10, 3), dtype=np.uint8),
    "box_per_element": _per_element,
    "box_per_element_int": lambda: spaces.Box(np.array([-1, 0, 5]), np.array([1, 0, 500]), dtype=np.int16),
    "box_infinite": lambda: spaces.Box(-np.inf, np.inf, shape=(3,), dtype=np.float32),
    "box_infinite_float16": lambda: spaces.Box(-np.inf, np.inf, shape=(3,), dtype=np.float16),
    "box_infinite_int": lambda: spaces.Box(-np.inf, np.inf, shape=(3,), dtype=np.int32),
    "box_half_bounded": _half_bounded,
    "box_half_bounded_int": _half_bounded_int,
    "box_bounded_below": lambda: spaces.Box(0, np.inf, shape=(2,), dtype=np.float32),
    "box_bounded_above": lambda: spaces.Box(-np.inf, 0, shape=(2,), dtype=np.float64),
    # the finite discrete ones
    "discrete": lambda: spaces.Discrete(5),
    "discrete_one": lambda: spaces.Discrete(1),
    "discrete_start": lambda: spaces.Discrete(4, start=-2),
    "discrete_int32": lambda: spaces.Discrete(3, start=7, dtype=np.int32),
    "discrete_uint8": lambda: spaces.Discrete(3, dtype=np.uint8),
    "multi_binary": lambda: spaces.MultiBinary(5),
    "multi_binary_2d": lambda: spaces.MultiBinary((2, 3)),
    "multi_discrete": lambda: spaces.MultiDiscrete([5, 2, 2]),
    "multi_discrete_start": lambda: spaces.MultiDiscrete([3, 4], start=[-1, 10]),
    "multi_discrete_2d": lambda: spaces.MultiDiscrete(np.array([[1, 2], [3, 4]])),
    "multi_discrete_2d_start_int8": lambda: spaces.MultiDiscrete(
        np.array([[1, 2], [3, 4]]), dtype=np.int8, start=np.array([[0, -1], [5, -6]])
    ),
    # text
    "text": lambda: spaces.Text(6),
    "text_maybe_empty": lambda: spaces.Text(3, min_length=0, charset="zya"),
    "text_unicode": lambda: spaces.Text(4, min_length=2, charset="äπ漢🎲\n'\"\\ "),
    # composites
    "dict": lambda: spaces.Dict({"position": spaces.Box(-1, 1, shape=(2,)), "color": spaces.Discrete(3)}),
    "dict_insertion_order": lambda: dict_space(
        [("z", spaces.Discrete(2)), ("a", spaces.Discrete(3)), ("m", spaces.Discrete(4))], sort_keys=False
    ),
    "dict_odd_keys": lambda: spaces.Dict(
        {
            "a.b": spaces.Discrete(2),
            "a": spaces.Dict({"b": spaces.Discrete(3)}),
            "": spaces.Discrete(4),
            "%": spaces.Discrete(5),
            "%2E": spaces.Discrete(6),
            ".": spaces.Discrete(7),
            "κλειδί /?&=#": spaces.Box(0, 1, shape=(1,)),
        }
    ),
    "dict_int_keys": lambda: spaces.Dict(
        {0: spaces.Discrete(2), -7: spaces.Text(3)}  # type: ignore[dict-item]
    ),
    "dict_int_and_text_keys": lambda: spaces.Dict(
        {0: spaces.Discrete(2), "0": spaces.Discrete(3)}  # type: ignore[dict-item]
    ),
    "dict_empty": lambda: spaces.Dict({}),
    "dict_nested": lambda: spaces.Dict(
        {
            "outer": spaces.Dict({"inner": spaces.Dict({"x": spaces.Discrete(2)}), "y": spaces.MultiBinary(3)}),
            "z": spaces.Box(-1, 1, shape=(2,)),
        }
    ),
    "tuple": lambda: spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, shape=(2,)), spaces.Text(3))),
    "tuple_one": lambda: spaces.Tuple((spaces.Discrete(3),)),
    "tuple_empty": lambda: spaces.Tuple(()),
    "tuple_nested": lambda: spaces.Tuple(
        (spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(2))), spaces.Dict({"a": spaces.Tuple((spaces.Text(2),))}))
    ),
    "tuple_of_empty_ones": lambda: spaces.Tuple((spaces.Tuple(()), spaces.Dict({}), spaces.Discrete(2))),
    # sequences
    "sequence_of_box": lambda: spaces.Sequence(spaces.Box(0, 1, shape=(2,))),
    "sequence_of_box_stacked": lambda: spaces.Sequence(spaces.Box(0, 1, shape=(2,)), stack=True),
    "sequence_of_discrete": lambda: spaces.Sequence(spaces.Discrete(4, start=1)),
    "sequence_of_discrete_stacked": lambda: spaces.Sequence(spaces.Discrete(4), stack=True),
    "sequence_of_text": lambda: spaces.Sequence(spaces.Text(3)),
    "sequence_of_dict": lambda: spaces.Sequence(
        spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(0, 1, shape=(1,))})
    ),
    "sequence_of_dict_stacked": lambda: spaces.Sequence(
        spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(0, 1, shape=(1,))}), stack=True
    ),
    "sequence_of_tuple": lambda: spaces.Sequence(spaces.Tuple((spaces.Discrete(2), spaces.Text(2)))),
    "sequence_of_sequence": lambda: spaces.Sequence(spaces.Sequence(spaces.Discrete(3))),
    # graphs
    "graph": lambda: spaces.Graph(spaces.Box(-1, 1, shape=(3,)), spaces.Discrete(3)),
    "graph_box_edges": lambda: spaces.Graph(spaces.Discrete(4), spaces.Box(0, 1, shape=(2,), dtype=np.float64)),
    "graph_of_dicts": lambda: spaces.Graph(
        spaces.Dict(b=spaces.Box(-1, 1, shape=(2,)), a=spaces.Discrete(3)),
        spaces.Tuple((spaces.MultiBinary(2), spaces.Text(3))),
    ),
    "graph_of_sequences": lambda: spaces.Graph(spaces.Sequence(spaces.Discrete(2)), None),
    "graph_without_edges": lambda: spaces.Graph(spaces.Box(-1, 1, shape=(2, 2)), None),
    # one of several
    "one_of": lambda: spaces.OneOf((spaces.Discrete(3), spaces.Box(-1, 1, shape=(2,)), spaces.Text(4))),
    "one_of_nested": lambda: spaces.OneOf(
        (spaces.Dict({"a": spaces.Discrete(2)}), spaces.OneOf((spaces.MultiBinary(2), spaces.Tuple(()))))
    ),
    "mixed": _mixed,
}
"""A factory for each space that tests use, by a name that can be a test's id.

With an older Gymnasium, spaces that it cannot make are left out.
"""
_NEWER = {
    "discrete_int32": (1, 2, 2),
    "discrete_uint8": (1, 2, 2),
    "graph_of_dicts": (1, 4),
    "graph_of_sequences": (1, 4),
}
for _name, _version in _NEWER.items():
    if _version > VERSION:
        del EVERY_SPACE[_name]

"""Environments that use arrays of PyTorch or JAX, perhaps on an accelerator: `array=`, `device=`.

Actions are converted by DLPack, without a copy on the same device; all results of a step are copied to the host at
once. A library is imported only if it is used.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from gymnasium.vector import VectorWrapper

from bridge.core.encoding.tensors import Array
from bridge.core.worlds.kinds import EnvWrapper, GymEnv, Lanes
from bridge.errors import SettingError

__all__ = ["ArrayKind", "Arrays"]

ArrayKind: TypeAlias = Literal["numpy", "torch", "jax"]


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The kind of arrays that an environment uses. It can be pickled.

    Raises:
        SettingError: The library is unknown or not installed, or does not have the device.
    """

    kind: ArrayKind = "numpy"
    device: str | None = None
    """The device for actions, such as `cuda:0`; None: the library's default device."""

    def __post_init__(self) -> None:
        if self.kind not in ("numpy", *_LIBRARIES):
            known = ", ".join(map(repr, ("numpy", *_LIBRARIES)))
            raise SettingError(f"expected array to be one of {known}, got {self.kind!r:.80}")
        if self.kind == "numpy":
            if self.device is not None:
                raise SettingError(f"device={self.device!r} is for array='torch' or 'jax': give that too")
            return
        self._library()

    def _library(self) -> _Library:
        try:
            return _LIBRARIES[self.kind](self.device)
        except ImportError as error:
            raise SettingError(
                f"array={self.kind!r} needs the package {self.kind}, which is not here: {error}"
            ) from None
        except (RuntimeError, ValueError) as error:
            raise SettingError(f"expected a device of {self.kind}, got {self.device!r}: {error}") from error

    def wrap(self, env: GymEnv) -> EnvWrapper:
        """Return an environment with NumPy arrays outside; `kind` is not `numpy`."""
        return _HostEnv(env, self._library())

    def wrap_lanes(self, env: Lanes) -> Lanes:
        """Return lanes with NumPy arrays outside; `kind` is not `numpy`."""
        return _HostLanes(env, self._library())

    def describe(self) -> dict[str, object]:
        """Return nothing, because recordings have NumPy arrays."""
        return {}


class _Library(abc.ABC):
    """A library of arrays."""

    array: type
    """The class of its arrays."""

    @abc.abstractmethod
    def from_host(self, array: Array) -> object:
        """Return a NumPy array as an array of the library, on the device."""

    @abc.abstractmethod
    def to_host(self, arrays: Sequence[Any]) -> list[Array]:
        """Return arrays of the library as NumPy arrays; waits for the device once."""

    def action(self, action: object) -> Any:
        """Return an action with arrays of the library in place of NumPy's."""
        return _mapped(action, (np.ndarray, np.generic), lambda leaf: self.from_host(np.asarray(leaf)))

    def results(self, results: object) -> Any:
        """Return the result of `reset` or `step` with NumPy arrays in place of the library's."""
        found: list[object] = []
        _mapped(results, (self.array,), found.append)
        # Two traversals of the results, in the same order, so that all arrays are copied together, with one wait.
        arrays = iter(self.to_host(found))
        return _mapped(results, (self.array,), lambda leaf: next(arrays))


class _Torch(_Library):
    def __init__(self, device: str | None) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._device = self._torch.device(device) if device else self._torch.get_default_device()
        self._torch.empty(0, device=self._device)  # raises if there is no such device
        self.array = self._torch.Tensor

    def from_host(self, array: Array) -> object:
        # DLPack takes only writable arrays, and an array from the network may not be one.
        own = np.array(array) if not array.flags.writeable or array.ndim == 0 else array
        try:
            tensor = self._torch.from_dlpack(own)
        except (BufferError, RuntimeError, TypeError):  # a dtype that the installed NumPy cannot export
            tensor = self._torch.as_tensor(own)
        return tensor.to(self._device)

    def to_host(self, arrays: Sequence[Any]) -> list[Array]:
        copies = [array.detach().to("cpu", non_blocking=True) for array in arrays]
        # The copies were only started, and are complete after this.
        if any(array.is_cuda for array in arrays):
            self._torch.cuda.current_stream(self._device).synchronize()
        return [self._numpy(copy) for copy in copies]

    @staticmethod
    def _numpy(tensor: Any) -> Array:
        try:
            return cast(Array, tensor.numpy(force=True))  # also a lazy conjugate, which is computed here
        except TypeError:
            if not tensor.is_floating_point():
                raise
            return cast(Array, tensor.float().numpy())  # such as bfloat16, which NumPy does not have


class _Jax(_Library):
    def __init__(self, device: str | None) -> None:
        self._jax: Any = importlib.import_module("jax")
        platform, _, number = (device or "").partition(":")
        devices, index = self._jax.devices(platform or None), int(number or 0)
        # Python would count a negative number from the end.
        if not 0 <= index < len(devices):
            raise ValueError(f"there are {len(devices)}, with numbers from 0")
        self._device = devices[index]
        self.array = self._jax.Array

    def from_host(self, array: Array) -> object:
        own = np.array(array) if not array.flags.writeable or array.ndim == 0 else array
        try:
            made = self._jax.numpy.from_dlpack(own)
        except (BufferError, RuntimeError, TypeError, ValueError):  # such as int64, which JAX has only in its x64 mode
            made = self._jax.numpy.asarray(own)
        return self._jax.device_put(made, self._device)

    def to_host(self, arrays: Sequence[Any]) -> list[Array]:
        hosts = [np.asarray(array) for array in self._jax.device_get(arrays)]
        # "V" are the dtypes that NumPy does not have, such as bfloat16.
        return [host.astype(np.float32) if host.dtype.kind == "V" else host for host in hosts]


_LIBRARIES: Mapping[str, Callable[[str | None], _Library]] = {"torch": _Torch, "jax": _Jax}


class _HostEnv(EnvWrapper):
    """One environment with NumPy arrays outside."""

    def __init__(self, env: GymEnv, library: _Library) -> None:
        super().__init__(env)
        self._library = library

    def reset(self, **given: Any) -> Any:
        """Reset the environment."""
        return self._library.results(self.env.reset(**given))

    def step(self, action: Any) -> Any:
        """Step the environment."""
        return self._library.results(self.env.step(self._library.action(action)))

    def render(self) -> Any:
        """Draw the environment."""
        return self._library.results(self.env.render())


class _HostLanes(VectorWrapper):
    """Lanes with NumPy arrays outside."""

    def __init__(self, env: Lanes, library: _Library) -> None:
        super().__init__(env)
        self._library = library

    def reset(self, **given: Any) -> Any:
        """Reset the lanes."""
        return self._library.results(self.env.reset(**given))

    def step(self, actions: Any) -> Any:
        """Step the lanes."""
        return self._library.results(self.env.step(self._library.action(actions)))

    def render(self) -> Any:
        """Draw the lanes."""
        return self._library.results(self.env.render())


def _mapped(tree: Any, kinds: tuple[type, ...], function: Callable[[object], object]) -> Any:
    """Return a tree of containers, with a function applied to the leaves of some classes."""
    if isinstance(tree, kinds):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: _mapped(item, kinds, function) for key, item in tree.items()}
    if isinstance(tree, (tuple, list)):
        items = [_mapped(item, kinds, function) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)  # the first: a GraphInstance
    if isinstance(tree, np.ndarray) and tree.dtype == object:  # such as `final_obs`, with an item for each lane
        made = np.empty_like(tree)
        for place, item in np.ndenumerate(tree):
            made[place] = _mapped(item, kinds, function)
        return made
    return tree

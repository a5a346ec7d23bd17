"""Objects that cannot be copied by their fields: those that draw, and those with a save function of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from bridge.states.atari import AtariState
from bridge.states.fields import module_of
from bridge.states.tables import array_digest, is_table, table_digest

__all__ = ["OwnWay", "draws", "is_value", "own_way", "part_of_table", "pixels_of"]

_DRAWING = {
    "pygame": (
        "Surface",
        "Clock",
        "Font",
        "Window",
        "PixelArray",
        "Sound",
        "Channel",
        "Joystick",
        "Renderer",
        "Texture",
    ),
    "pygame.surface": ("Surface", "SurfaceType"),
    "pygame.time": ("Clock",),
    "pygame.font": ("Font",),
    "pygame.freetype": ("Font",),
    "pygame.mixer": ("Sound", "Channel"),
    "pygame.window": ("Window",),
}
"""Classes, by module, whose objects draw or display."""
_DRAWING_MODULES = (
    "gymnasium.envs.mujoco.mujoco_rendering",
    "gymnasium.envs.classic_control.rendering",
    "mujoco.renderer",
    "mujoco.rendering",
    "mujoco.viewer",
    "mujoco.gl_context",
    "mujoco.egl",
    "mujoco.glfw",
    "mujoco.osmesa",
    "pyglet.",
    "OpenGL.",
    "glfw",
)
"""Modules in which all objects draw."""


_VALUES = {"pygame.rect": ("Rect", "FRect"), "pygame.math": ("Vector2", "Vector3"), "pygame.color": ("Color",)}
"""Classes, by module, whose objects are a few numbers; `copy.copy` copies them."""


def is_value(kind: type) -> bool:
    """True if objects of a C class are only a few numbers, such as a rectangle."""
    return kind.__name__ in _VALUES.get(module_of(kind), ())


def draws(value: Any) -> bool:
    """True if an object draws, such as a surface, a window or a renderer: it does not influence later steps."""
    kind: Any = type(value)
    return _draws(kind)


@functools.lru_cache(4096)
def _draws(kind: type) -> bool:
    module = module_of(kind)
    return kind.__name__ in _DRAWING.get(module, ()) or module.startswith(_DRAWING_MODULES)


def surfaces_in(value: Any) -> list[Any]:
    """Return the pygame surfaces in a value that draws, or in its lists and dicts."""
    if type(value) in (list, tuple, dict):
        items = value.values() if isinstance(value, dict) else value
        return [found for item in items for found in surfaces_in(item)]
    return [value] if draws(value) and hasattr(value, "get_buffer") else []


@dataclasses.dataclass(frozen=True)
class OwnWay:
    """State that an object has saved of itself.

    Args:
        name: The name of the way, which clients see in `SavedState.how`.
        size: The approximate size in bytes.
        put: Puts the state into another object of the class; a seed reseeds the object's generator.
        fits: Returns why the state does not fit another object, or ""; called before anything is changed.
    """

    name: str
    size: int
    put: Callable[[Any, int | None], None]
    fits: Callable[[Any], str] = lambda living: ""


def own_way(value: Any) -> OwnWay | None:
    """Return the state that an object saves of itself; None: its class cannot."""
    module, name = module_of(type(value)), type(value).__name__
    if name == "ALEInterface" and module.startswith("ale_py"):
        return _of_ale(value)
    if is_table(value):
        return _compared(value, table_digest, "it is a table that has changed since")
    if module.startswith("mujoco"):
        if name == "MjData":
            return _of_mujoco_data(value)
        if name == "MjModel":
            return _of_mujoco_model(value)
    return None


def part_of_table(array: np.ndarray[Any, Any]) -> OwnWay:
    """Return the state of an array that lies in a table's memory; raises ValueError if it cannot be compared."""
    return _compared(array, array_digest, "it is a part of a table, and has changed since")


def _compared(value: Any, digest_of: Callable[[Any], str], changed: str) -> OwnWay:
    """Return the state of an object that stays where it is: the living one must have the digest of the saved one."""
    digest = digest_of(value)
    return OwnWay("copy", 200, lambda living, seed: None, lambda living: "" if digest_of(living) == digest else changed)


def pixels_of(value: Any) -> OwnWay | None:
    """Return the pixels of surfaces, for code that reads pixels; None: there is no surface."""
    saved = [(_form(surface), surface.get_buffer().raw) for surface in surfaces_in(value)]
    if not saved:
        return None

    def fits(living: Any) -> str:
        same = list(map(_form, surfaces_in(living))) == [form for form, _ in saved]
        return "" if same else "its code reads pixels, and its surfaces are not drawn yet, or are other ones"

    def put(living: Any, seed: int | None) -> None:
        for surface, (_, data) in zip(surfaces_in(living), saved, strict=True):
            surface.get_buffer().write(data, 0)

    return OwnWay("copy", sum(len(data) for _, data in saved), put, fits)


def _form(surface: Any) -> tuple[Any, ...]:
    return surface.get_size(), surface.get_pitch(), surface.get_masks()


# The measured memory of a copy of MjData, beside its buffers.
_MUJOCO_BYTES = 1_200_000


def _of_ale(ale: Any) -> OwnWay:
    state = AtariState(ale)

    def fits(living: Any) -> str:
        # The emulator would accept the state of another game without an error.
        same = living.getRAMSize() == ale_facts[0] and list(map(str, living.getMinimalActionSet())) == ale_facts[1]
        return "" if same else "it is of another game"

    ale_facts = ale.getRAMSize(), list(map(str, ale.getMinimalActionSet()))
    return OwnWay("ale", state.size, state.put, fits)


def _of_mujoco_data(data: Any) -> OwnWay:
    mujoco = sys.modules["mujoco"]
    if not hasattr(mujoco, "mj_copyData"):
        raise ValueError(f"mujoco {mujoco.__version__} cannot copy into other data: a newer one can (mj_copyData)")
    model = data.model
    saved = mujoco.MjData(model)
    mujoco.mj_copyData(saved, model, data)

    def fits(living: Any) -> str:
        return "" if _sizes(living.model) == _sizes(model) else "its model has other sizes"

    def put(living: Any, seed: int | None) -> None:
        mujoco.mj_copyData(living, living.model, saved)

    # Only the used part of its arena takes memory.
    return OwnWay("mujoco", int(saved.nbuffer) + int(data.maxuse_arena) + _MUJOCO_BYTES, put, fits)


class _Model:
    """The bytes of a model, shared by many states."""

    def __init__(self, data: bytes) -> None:
        self.data = data


_models: weakref.WeakValueDictionary[bytes, _Model] = weakref.WeakValueDictionary()


def _of_mujoco_model(model: Any) -> OwnWay:
    mujoco = sys.modules["mujoco"]
    # The model is part of the state, because an environment may change it.
    data = _bytes_of(mujoco, model)
    digest = hashlib.sha256(data).digest()
    saved = _models.get(digest)
    size = 100 if saved is not None else len(data)
    if saved is None:
        saved = _models[digest] = _Model(data)

    def fits(living: Any) -> str:
        return "" if _sizes(living) == _sizes(model) else "its model has other sizes"

    def put(living: Any, seed: int | None) -> None:
        if _bytes_of(mujoco, living) == saved.data:
            return
        source = mujoco.MjModel.from_binary_path("state.mjb", {"state.mjb": saved.data})
        for part in ("", "opt", "stat", "vis"):
            _copy_numbers(getattr(source, part) if part else source, getattr(living, part) if part else living)
        if _bytes_of(mujoco, living) != saved.data:
            raise ValueError("the model of the state cannot be put into this environment: something of it is read-only")

    return OwnWay("mujoco", size, put, fits)


def _sizes(model: Any) -> tuple[int, ...]:
    return tuple(int(getattr(model, name)) for name in ("nq", "nv", "nu", "na", "nbody", "ngeom", "nsite", "nbuffer"))


def _copy_numbers(source: Any, target: Any) -> None:
    """Copy the numbers of a MuJoCo structure into another one of the same sizes."""
    for name in dir(source):
        if name.startswith("_"):
            continue
        value = getattr(source, name)
        if isinstance(value, np.ndarray):
            own = getattr(target, name)
            if own.shape == value.shape and own.flags.writeable:
                own[...] = value
        elif isinstance(value, (int, float)):
            # Sizes cannot be set; they are equal anyway.
            with contextlib.suppress(AttributeError):
                setattr(target, name, value)
        elif type(value).__module__.startswith("mujoco") and not callable(value):
            _copy_numbers(value, getattr(target, name))


def _bytes_of(mujoco: Any, model: Any) -> bytes:
    buffer = np.zeros(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return buffer.tobytes()

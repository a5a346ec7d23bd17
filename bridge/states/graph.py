"""Copy an environment field by field, and put the copy back into an environment of the same kind.

`copy.deepcopy` does not work, for three reasons. It asks each object how to copy it, and every environment of MuJoCo,
Box2D and ALE, and many others, answer through `gymnasium.utils.EzPickle` with a new environment. It shares functions,
with the values in their closures. And it turns a view of an array into a separate array. So this module copies fields
by rules for each type. A value without a rule is refused with its place: a state is right, or is refused.

The environment and its wrappers, the *layers*, are not copied. Their fields are copied, and put back into the layers of
a living environment. So references to layers stay right, and objects that draw stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gymnasium.utils import RecordConstructorArgs

from bridge.core.worlds.lane_vector import LaneVectorEnv
from bridge.states.copier import Copier, Kept, refuse_impure, set_fields
from bridge.states.digest import objects_in
from bridge.states.fields import fields_of
from bridge.states.generators import bits_of_reset
from bridge.states.layers import layers_of, make_generators, titles
from bridge.states.refusal import CannotCopyError
from bridge.states.restorer import Restorer
from bridge.states.scan import Shared, shared_by

__all__ = ["EnvSnapshot", "common_to", "copied", "restore", "take"]


class EnvSnapshot:
    """A copy of the fields of all layers of an environment.

    Args:
        kinds: The classes of the layers.
        fields: The fields of each layer.
        size: The approximate memory use, in bytes.
        how: How its parts were saved: `copy`, and the names of objects' own ways, such as `ale`.
        common: What the layers' code shares with other environments.
        shared: Objects that classes and modules hold too, by id; they are not copied.
        digest: A digest of the shared values.
    """

    def __init__(
        self,
        kinds: list[type],
        fields: list[dict[str, Any]],
        size: int,
        how: tuple[str, ...],
        common: Shared,
        shared: Mapping[int, Any],
        digest: str,
    ) -> None:
        self.kinds, self.fields, self.size, self.how = kinds, fields, size, how
        self.common, self.shared, self.digest = common, shared, digest


def take(env: Any, *more: Any) -> tuple[EnvSnapshot, tuple[Any, ...]]:
    """Copy the whole state of an environment.

    Args:
        env: The environment, with its wrappers.
        more: Values to copy with it, such as the last observation, which may contain the same objects.

    Raises:
        CannotCopyError: It holds a value that cannot be copied.
    """
    layers = layers_of(env)
    make_generators(layers)
    fields, copied, copier = _copies(layers, more, {})
    common, objects, digest = common_to(layers, copier.code, copier.by_address)
    if common.unseeded and copier.makes_envs:
        raise CannotCopyError(common.unseeded)
    unseeded = copier.unseeded if common.samples else []
    for space in unseeded:
        _ = space.np_random
    pixels = common.pixels and copier.draws
    if unseeded or pixels or copier.met(objects):
        # Copy again without the objects that a class or a module holds too: those must stay the same objects.
        fields, copied, copier = _copies(layers, more, objects, pixels=pixels)
    copier.refuse_shared_closures(samples=common.samples)
    kinds = [type(layer) for layer in layers]
    how = ("copy", *sorted(copier.ways))
    return EnvSnapshot(kinds, fields, copier.size, how, common, objects, digest), copied


def common_to(layers: Sequence[Any], code: Iterable[Any], by_address: str) -> tuple[Shared, dict[int, Any], str]:
    """Return what code shares with other environments, the shared objects by id, and a digest of their values.

    Args:
        layers: The layers of the environment.
        code: The classes of the objects in the environment, and its functions and modules.
        by_address: The name of a class in it whose objects are hashed by address, which no copy keeps; "": none.

    Raises:
        CannotCopyError: Environments with this code have no separate state.
    """
    common = shared_by((*map(type, layers), *code))
    if common.reason:
        raise CannotCopyError(common.reason)
    if common.hashes and by_address:
        raise CannotCopyError(f"its code uses hash(), which is the address of a {by_address}, and no copy has that")
    digest, unseen = common.look()
    if unseen:
        raise CannotCopyError(unseen)
    return common, objects_in(common.values()), digest


def _copies(
    layers: Sequence[Any], more: Sequence[Any], shared: Mapping[int, Any], *, pixels: bool = False
) -> tuple[list[dict[str, Any]], tuple[Any, ...], Copier]:
    copier = Copier(layers, shared, pixels=pixels)
    fields: list[dict[str, Any]] = []
    for index, layer in enumerate(layers):
        refuse_impure(type(layer), (f"{type(layer).__name__}",))
        own: dict[str, Any] = {}
        kept = set(LaneVectorEnv.KEPT) if isinstance(layer, LaneVectorEnv) else set()
        if isinstance(layer, RecordConstructorArgs):
            # The arguments that a Gymnasium wrapper was made with. Functions in them cannot be copied.
            kept.add("_saved_kwargs")
        for name, value in fields_of(layer):
            path = str(index), name
            own[name] = Kept(path) if name in kept else copier.field(value, path)
        fields.append(own)
    return fields, tuple(copier.copy(value, ("result",)) for value in more), copier


def restore(
    snapshot: EnvSnapshot, env: Any, *more: Any, seed: int | None = None, compared: bool = False
) -> tuple[Any, ...]:
    """Put a snapshot into a living environment. Everything is checked before anything is changed.

    Args:
        snapshot: The result of `take`.
        env: An environment with the same layers.
        more: The values that `take` copied with it.
        seed: Reseeds the generators; None: they go on.
        compared: True: shared values have just been compared, for the previous lane.

    Returns:
        Copies of `more`.

    Raises:
        CannotCopyError: The layers differ, or a value that stays in the living environment has changed.
    """
    layers = layers_of(env)
    if [type(layer) for layer in layers] != snapshot.kinds:
        mine, theirs = titles(map(type, layers)), titles(snapshot.kinds)
        raise CannotCopyError(f"the state is of {theirs}, this environment is {mine}")
    if not compared and snapshot.common.digest() != snapshot.digest:
        raise CannotCopyError("what its class or its module holds has changed since, which all environments share")
    bits = bits_of_reset(layers, snapshot.fields)
    copier = Restorer(layers, seed, snapshot.shared, bits, pixels=snapshot.common.pixels)
    fields = [copier.layer(index, own) for index, own in enumerate(snapshot.fields)]
    copied = tuple(copier.copy(value, ("result",)) for value in more)
    # From here on nothing should fail. If a library does fail, the environment's next step will show it.
    for put, living in copier.puts:
        put(living, seed)
    for layer, own in zip(layers, fields, strict=True):
        set_fields(layer, own)
    if seed is not None:
        for layer in layers:
            if "_np_random_seed" in getattr(layer, "__dict__", {}):
                layer.__dict__["_np_random_seed"] = seed
    return copied


def copied(env: Any, values: Sequence[Any], *, back: bool = False) -> tuple[Any, ...]:
    """Return copies of values that belong to a state, such as an observation.

    Args:
        env: The environment.
        values: The values; with `back`, copies that this function returned before.
        back: True: copy the saved values for the living environment.

    Raises:
        CannotCopyError: A value cannot be copied.
    """
    layers = layers_of(env)
    copier = Restorer(layers, None, {}) if back else Copier(layers, {})
    return tuple(copier.copy(value, ("result",)) for value in values)

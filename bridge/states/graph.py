"""All that an environment is, copied field by field, and put back into an environment of the same kind.

`copy.deepcopy` asks each object how it is to be copied. Every environment of MuJoCo, Box2D and ALE, and many of users'
own, answer that by `gymnasium.utils.EzPickle`: with a new environment. It takes functions as they are, with what their
closures hold, and an array that is a part of another one becomes an array of its own. So here the fields are copied, by
rules for each type, and what has no rule is refused with the place where it was found: a state is right, or there is
none.

The environment and its wrappers, the *layers*, are not copied: their fields are, and are put back into the layers of a
living environment. So references to them stay right, and whatever draws stays with whom it draws for.
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
    """The fields of all layers of an environment.

    Args:
        kinds: The classes of the layers.
        fields: The fields of each.
        size: About how many bytes of memory it takes.
        how: The ways by which its parts were saved: `copy`, and the environment's own.
        common: What the code that they run shares with other environments.
        shared: What classes and modules hold too, by its id: it is in the state as it is.
        digest: Of all that they hold.
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
    """Copy all that an environment is.

    Args:
        env: The environment, with its wrappers.
        more: What is copied with it, such as its last observation, in which the same objects may be.

    Raises:
        CannotCopyError: It holds something that cannot be copied.
    """
    layers = layers_of(env)
    make_generators(layers)
    fields, copied, copier = _copies(layers, more, {})
    common, objects, digest = common_to(layers, copier.code, copier.by_address)
    unseeded = copier.unseeded if common.samples else []
    for space in unseeded:
        _ = space.np_random
    pixels = common.pixels and copier.draws
    if unseeded or pixels or copier.met(objects):
        # What a class or a module holds too stays what it is: a copy would no longer be the object that they hold.
        fields, copied, copier = _copies(layers, more, objects, pixels=pixels)
    copier.refuse_shared_closures(samples=common.samples)
    kinds = [type(layer) for layer in layers]
    how = ("copy", *sorted(copier.ways))
    return EnvSnapshot(kinds, fields, copier.size, how, common, objects, digest), copied


def common_to(layers: Sequence[Any], code: Iterable[Any], by_address: str) -> tuple[Shared, dict[int, Any], str]:
    """Return what code shares with other environments, the objects of it, and a digest of what they hold now.

    Args:
        layers: The layers of the environment.
        code: The classes of what it holds, and its functions and modules.
        by_address: Names the class of an object that a copy has at another address, which is its hash; "": none.

    Raises:
        CannotCopyError: An environment of this code has no state of its own.
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
            # By which a wrapper of Gymnasium tells how it was made: a function there may be no copy.
            kept.add("_saved_kwargs")
        for name, value in fields_of(layer):
            path = str(index), name
            own[name] = Kept(path) if name in kept else copier.field(value, path)
        fields.append(own)
    return fields, tuple(copier.copy(value, ("result",)) for value in more), copier


def restore(
    snapshot: EnvSnapshot, env: Any, *more: Any, seed: int | None = None, compared: bool = False
) -> tuple[Any, ...]:
    """Put a snapshot into a living environment; all is looked at before anything is changed.

    Args:
        snapshot: What `take` returned.
        env: An environment of the same layers.
        more: What `take` has copied with it.
        seed: Seeds the generators; None: they go on.
        compared: True: what all environments share was compared just now, as for the lane before.

    Returns:
        Copies of `more`.

    Raises:
        CannotCopyError: The layers differ, or what stays with the living environment is not what it was.
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
    # From here on nothing fails, but for a library that does: and then the environment says so in its next step.
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
    """Return copies of values that are told with a state, such as an observation; with `back` of those copies.

    Raises:
        CannotCopyError: One cannot be copied.
    """
    layers = layers_of(env)
    copier = Restorer(layers, None, {}) if back else Copier(layers, {})
    return tuple(copier.copy(value, ("result",)) for value in values)

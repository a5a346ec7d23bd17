"""The Reset of each slot: its seed, the options, and whether it is to be reset at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.core.client.slots.slot import STEPPED, Member
from bridge.core.encoding import values
from bridge.core.encoding.seeds import pack_seed
from bridge.core.encoding.tensors import Array, pack_tensor
from bridge.errors import AlreadyPendingError, SeedError, SettingError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb

if TYPE_CHECKING:
    from bridge.core.client.slots.members import SlotMembers

__all__ = ["check_mask", "further_seeds", "plan_resets", "reset_settings"]


def plan_resets(
    members: SlotMembers,
    seed: int | Sequence[int | None] | None,
    options: Mapping[str, Any] | None,
    slot_options: Sequence[Mapping[str, Any]] | None,
    *,
    started: bool,
) -> list[tuple[Member, Mapping[str, pb.Tensor], Sequence[int | None] | None]]:
    """Return each member to reset, the settings of its Reset, which can be sent, and its seeds if any were given.

    Args:
        members: Who fills the slots.
        seed: As for `RemoteVectorEnv.reset`.
        options: As for `RemoteVectorEnv.reset`; the dict stays as it is.
        slot_options: Further options of each slot's own.
        started: Whether there are episodes that a mask could spare.

    Raises:
        SettingError: Seeds or options cannot be sent, or the lanes of one world were given different options.
        AlreadyPendingError: A mask spares lanes whose answer to a step was not taken.
    """
    given = _checked_options(options)
    mask = given.pop("reset_mask", None)
    if mask is not None:
        check_mask(mask, len(members.at))
    # Before the first reset no slot has an episode that a mask could spare.
    if mask is None or not started:
        mask = np.ones(len(members.at), np.bool_)
    # What stands for the others in a list seeds nothing.
    seeds = [one if chosen else None for one, chosen in zip(_spread_seeds(seed, len(mask)), mask, strict=True)]
    plans: list[tuple[Member, Mapping[str, pb.Tensor], Sequence[int | None] | None]] = []
    for member in members.filling:
        chosen, part = mask[member.slots], seeds[member.slots]
        # The Reset would make the session drop the answer to that step, which the other lanes are to be given.
        if member.episode in STEPPED and not chosen.all():
            raise AlreadyPendingError(
                f"the answer of {member.remote.url} to a step has not come, or was not taken; reset all its slots too",
                "step",
            )
        if not chosen.any():
            continue
        owns = [] if slot_options is None else [dict(own) for own in slot_options[member.slots]]
        if any(own != owns[0] for own in owns):
            raise SettingError(
                f"expected the same options for all {member.lanes} lanes of {member.remote.url}, which are reset by "
                f"one call, got {owns}; give make_vec_remote lanes=False for options of each slot's own"
            )
        together = {**given, **(owns[0] if owns else {})}
        sent = member.remote.options(together if together or options is not None else None)
        # Without a mask where all lanes begin: a world may then move to another server, as `before_episode` says.
        lane_mask = None if member.single or chosen.all() else chosen
        settings = reset_settings(part[0] if member.single else part, sent, lane_mask)
        member.remote.check_reset(settings)  # raises where it is too large to be sent
        plans.append((member, settings, None if seed is None else part))
    return plans


def _spread_seeds(seed: Any, num_envs: int) -> list[int | None]:
    """Return a seed, or None, for each slot, by Gymnasium's rules."""
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + slot for slot in range(num_envs)]
    if not isinstance(seed, Iterable):
        raise SeedError(f"expected a seed of type int, or one for each of the {num_envs} slots, got {seed!r:.80}")
    seeds = list(seed)
    if len(seeds) != num_envs:
        raise SettingError(f"expected one seed for each of the {num_envs} slots, got {len(seeds)}")
    return seeds


def further_seeds(seeds: Sequence[int | None], start: int, episode: int) -> list[int | None] | None:
    """Return the seeds of an episode in another world than the one that was seeded; None: the user gave none.

    Args:
        seeds: What the user's last reset gave to each slot of the world.
        start: The first of these slots.
        episode: Its number since that reset.
    """
    if all(seed is None for seed in seeds):
        # The user wants no certain episodes: nothing is added to the Reset.
        return None
    return [
        # From all three numbers: else two slots with one seed, or two episodes of a slot, would be alike.
        None if seed is None else int(np.random.SeedSequence([seed, start + lane, episode]).generate_state(1)[0])
        for lane, seed in enumerate(seeds)
    ]


def check_mask(mask: Any, num_envs: int) -> None:
    """Check a reset mask as Gymnasium's vector environments do."""
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"expected options['reset_mask'] to be a NumPy array, got {type(mask).__name__}")
    if mask.shape != (num_envs,):
        raise SettingError(f"expected options['reset_mask'] to have the shape ({num_envs},), got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"expected options['reset_mask'] to be of bools, got {mask.dtype}")
    if not mask.any():
        raise SettingError(f"expected options['reset_mask'] to hold a True, got {mask}")


def _checked_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return reset options as a new dict; SettingError where they are none."""
    if options is not None and not isinstance(options, Mapping):
        raise SettingError(f"expected options to be a dict, such as {{'low': -0.1}}, got {options!r:.80}")
    return dict(options or {})


def reset_settings(
    seed: int | Sequence[int | None] | None = None,
    options: Mapping[str, Any] | None = None,
    reset_mask: Array | None = None,
) -> dict[str, pb.Tensor]:
    """Return the Reset settings for one environment, or with a list of seeds or a mask for lanes.

    Raises:
        SeedError: A seed is no integer, or negative.
        SettingError: An option cannot be sent.
    """
    settings: dict[str, pb.Tensor] = {}
    if isinstance(seed, list) and all(item is None for item in seed):
        seed = None
    if seed is not None:
        settings["seed"] = pack_seed(seed)
    if options is not None:
        try:
            settings["options"] = pack_tensor(np.frombuffer(values.encode(_checked_options(options)), np.uint8))
        except TensorError as error:
            raise SettingError(f"the reset options cannot be sent: {error}") from error
    if reset_mask is not None:
        settings["reset_mask"] = pack_tensor(reset_mask)
    return settings

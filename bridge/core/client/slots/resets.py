"""The Resets of slots: seeds, options, and the reset mask."""

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
    """Return each member to reset, the settings of its Reset, and its seeds if any were given.

    Args:
        members: The members of the vector environment.
        seed: The argument of `RemoteVectorEnv.reset`.
        options: The argument of `RemoteVectorEnv.reset`; the dict is not changed.
        slot_options: Additional options for each slot.
        started: True if there are running episodes that a mask can exclude.

    Raises:
        SettingError: Seeds or options cannot be sent, or the lanes of one world were given different options.
        AlreadyPendingError: A mask excludes lanes whose answer to a step was not received yet.
    """
    given = _checked_options(options)
    mask = given.pop("reset_mask", None)
    if mask is not None:
        check_mask(mask, len(members.at))
    # Before the first reset there are no running episodes that a mask could exclude.
    if mask is None or not started:
        mask = np.ones(len(members.at), np.bool_)
    # Ignore seeds of slots outside of the mask.
    seeds = [one if chosen else None for one, chosen in zip(_spread_seeds(seed, len(mask)), mask, strict=True)]
    plans: list[tuple[Member, Mapping[str, pb.Tensor], Sequence[int | None] | None]] = []
    for member in members.filling:
        chosen, part = mask[member.slots], seeds[member.slots]
        # The Reset would make the session drop the answer to that step, which the other lanes need.
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
        # If all lanes begin, send no mask: then the world may move to another server (`before_episode`).
        lane_mask = None if member.single or chosen.all() else chosen
        settings = reset_settings(part[0] if member.single else part, sent, lane_mask)
        member.remote.check_reset(settings)  # raises if the message is too large
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
    """Return the seeds of an episode in a world that replaces the seeded one; None: the user gave no seed.

    Args:
        seeds: The seeds of the world's slots in the user's last reset.
        start: The first of these slots.
        episode: The number of the episode since that reset.
    """
    if all(seed is None for seed in seeds):
        # The user did not ask for reproducible episodes: add nothing to the Reset.
        return None
    return [
        # Use all three numbers: otherwise two slots with equal seeds, or two episodes of a slot, would be the same.
        None if seed is None else int(np.random.SeedSequence([seed, start + lane, episode]).generate_state(1)[0])
        for lane, seed in enumerate(seeds)
    ]


def check_mask(mask: Any, num_envs: int) -> None:
    """Check a reset mask like Gymnasium's vector environments."""
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"expected options['reset_mask'] to be a NumPy array, got {type(mask).__name__}")
    if mask.shape != (num_envs,):
        raise SettingError(f"expected options['reset_mask'] to have the shape ({num_envs},), got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"expected options['reset_mask'] to be of bools, got {mask.dtype}")
    if not mask.any():
        raise SettingError(f"expected options['reset_mask'] to hold a True, got {mask}")


def _checked_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of reset options; raise SettingError if they are not a dict."""
    if options is not None and not isinstance(options, Mapping):
        raise SettingError(f"expected options to be a dict, such as {{'low': -0.1}}, got {options!r:.80}")
    return dict(options or {})


def reset_settings(
    seed: int | Sequence[int | None] | None = None,
    options: Mapping[str, Any] | None = None,
    reset_mask: Array | None = None,
) -> dict[str, pb.Tensor]:
    """Return the Reset settings for one environment; with a list of seeds or a mask, for lanes.

    Raises:
        SeedError: A seed is negative or not an integer.
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

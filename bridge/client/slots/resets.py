"""The Reset of each slot: its seed, the options, and whether it is to be reset at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bridge.encoding import values
from bridge.encoding.seeds import pack_seed
from bridge.encoding.tensors import Array, pack_tensor
from bridge.errors import SettingError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["check_mask", "checked_options", "further_seeds", "reset_settings", "spread_seeds"]


def spread_seeds(seed: Any, num_envs: int) -> list[int | None]:
    """Return a seed, or None, for each slot, by Gymnasium's rules."""
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + slot for slot in range(num_envs)]
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


def checked_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
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
            settings["options"] = pack_tensor(np.frombuffer(values.encode(checked_options(options)), np.uint8))
        except TensorError as error:
            raise SettingError(f"the reset options cannot be sent: {error}") from error
    if reset_mask is not None:
        settings["reset_mask"] = pack_tensor(reset_mask)
    return settings

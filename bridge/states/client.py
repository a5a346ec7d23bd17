"""The methods `save_state`, `restore_state` and `release_states` of remote environments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np
from google.protobuf.message import DecodeError
from gymnasium.vector import VectorEnv

from bridge.core.client.envs.env import RemoteEnv
from bridge.core.client.messages import MessageAnswer, MessageReply, MessageTarget
from bridge.core.encoding.message_form import Origin
from bridge.errors import PeerError, SettingError, shown_url
from bridge.pb import states_pb2
from bridge.states.bounds import FORM
from bridge.states.saved import SavedState

__all__ = ["release_states", "restore_state", "save_state"]


@overload
def save_state(env: RemoteEnv) -> SavedState: ...


@overload
def save_state(env: Any, slots: Sequence[int] | None = None) -> list[SavedState]: ...


def save_state(env: Any, slots: Sequence[int] | None = None) -> Any:
    """Save the state of a remote environment, or of slots of a vector environment. The episode goes on.

    Args:
        env: What `make_remote`, `make_vec_remote` or `make_parallel_remote` returns.
        slots: The slots; None: all slots. One request is sent for each world.

    Returns:
        A `SavedState`; of a vector environment a list of them, in the order of `slots`.

    Raises:
        RefusedError: FAILED_PRECONDITION: no episode runs, or the environment cannot be saved, with the reason;
            RESOURCE_EXHAUSTED: a limit of the server is reached; PERMISSION_DENIED: this client is a viewer;
            UNIMPLEMENTED: the server or this kind of world has no states. Nothing is changed.
    """
    if _is_one(env):
        _refuse_slots(slots)
        request = states_pb2.StatesRequest(save=states_pb2.SaveStates(lanes=[0]))
        (answer,) = env.send_message(FORM, request.SerializeToString()).answers
        return _states_of(answer)[0].saved_by(env, release_states)
    order = _checked(env, slots)

    def write(target: MessageTarget) -> bytes:
        save = states_pb2.SaveStates(lanes=target.lanes)
        return states_pb2.StatesRequest(save=save).SerializeToString()

    reply: MessageReply = env.send_message(FORM, write, order)
    found: dict[int, SavedState] = {}
    for answer in reply.answers:
        found.update(zip(answer.target.slots, _states_of(answer), strict=True))
    base = env.unwrapped
    known = {slot: dataclasses.replace(found[slot], moment=base.moment(slot)) for slot in order}
    return [known[slot].saved_by(env, release_states) for slot in order]


def restore_state(
    env: Any,
    state: SavedState | Sequence[SavedState],
    slots: Sequence[int] | None = None,
    *,
    seed: int | Sequence[int | None] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Continue from a saved state, in a remote environment or in slots of a vector environment.

    Args:
        env: What `make_remote`, `make_vec_remote` or `make_parallel_remote` returns.
        state: The state; for slots also a list with one state for each slot, in order.
        slots: The slots, each once; None: all slots. All lanes of a world are restored by one request.
        seed: Reseeds the environments' generators so that branches differ: slot i with `seed + i`, or with its item
            of a list. None: the generators go on like those of the original.

    Returns:
        The observation and info from when the state was saved. For several agents: dicts of the agents that were
        alive. For a vector environment: what its `reset` returns; other slots keep their current values.

    Raises:
        RefusedError: NOT_FOUND: the state no longer exists, or belongs to another server; FAILED_PRECONDITION: it
            belongs to another environment, or is kept in another world's process. The episode goes on. Slots of
            other worlds may have been restored: they return the saved observation in their next `step`, and ignore
            its action.
        SettingError: A slot is at another server than the state, or the numbers of states and slots differ.
    """
    if _is_one(env):
        _refuse_slots(slots)
        if not isinstance(state, SavedState):
            raise SettingError(f"expected a SavedState, as save_state() returns it, got {state!r:.80}")
        (number,) = _seeds(seed, [0])
        branch = states_pb2.RestoreStates(branches=[_branch(state, 0, number)])
        request = states_pb2.StatesRequest(restore=branch)
        return _began(env.send_message(FORM, request.SerializeToString()))
    order = _checked(env, slots)
    states = [state] * len(order) if isinstance(state, SavedState) else list(state)
    if len(states) != len(order) or not all(isinstance(one, SavedState) for one in states):
        raise SettingError(f"expected a SavedState, or one for each of {len(order)} slots, got {len(states)} items")
    urls = [shown_url(url) for url in env.unwrapped.urls]
    of_slot = dict(zip(order, states, strict=True))
    elsewhere = [slot for slot in order if urls[slot] != of_slot[slot].url and of_slot[slot].url in urls]
    if elsewhere:
        slot = elsewhere[0]
        raise SettingError(
            f"slot {slot} is at {urls[slot]}, and the state is kept at {of_slot[slot].url}: restore it in slots there"
        )
    seeds = dict(zip(order, _seeds(seed, order), strict=True))

    def write(target: MessageTarget) -> bytes:
        branches = [
            _branch(of_slot[slot], lane, seeds[slot]) for slot, lane in zip(target.slots, target.lanes, strict=True)
        ]
        restore = states_pb2.RestoreStates(branches=branches)
        return states_pb2.StatesRequest(restore=restore).SerializeToString()

    # A recorder on this side knows slots, not lanes, so the origin has no lane.
    origins = {slot: Origin(of_slot[slot].moment, seed=seeds[slot]) for slot in order}
    return _began(env.send_message(FORM, write, order, origins))


def release_states(env: Any, states: Iterable[SavedState], slots: Sequence[int] | None = None) -> None:
    """Delete states at the server of an environment. States that no longer exist are ignored.

    Args:
        env: A remote environment, or a vector of environments, at the server of the states.
        states: The states.
        slots: The slots whose servers are asked; None: all slots.
    """
    identifiers = [state.identifier for state in states]
    release = states_pb2.StatesRequest(release=states_pb2.ReleaseStates(states=identifiers)).SerializeToString()
    if _is_one(env):
        env.send_message(FORM, release)
    else:
        env.send_message(FORM, release, range(env.num_envs) if slots is None else slots)


def _is_one(env: Any) -> bool:
    """True for a single environment, with one agent or several; False for a vector environment with slots."""
    # Checked by an attribute, because importing the class for several agents needs PettingZoo.
    return isinstance(env, RemoteEnv) or (not isinstance(env, VectorEnv) and hasattr(env, "possible_agents"))


def _refuse_slots(slots: Any) -> None:
    if slots is not None:
        raise SettingError("slots= is for vector environments; this one is single")


def _checked(env: Any, slots: Any) -> list[int]:
    if not hasattr(env, "send_message") or not hasattr(env, "num_envs"):
        text = f"expected what make_remote or make_vec_remote returns, got {env!r:.80}; unwrap it"
        raise SettingError(text)
    order = list(range(env.num_envs)) if slots is None else [int(slot) for slot in np.asarray(slots).reshape(-1)]
    if not order or len(set(order)) != len(order) or min(order) < 0 or max(order) >= env.num_envs:
        raise SettingError(f"expected different slots from 0 to {env.num_envs - 1}, got {slots!r:.80}")
    return order


def _seeds(seed: Any, slots: list[int]) -> list[int | None]:
    if seed is None:
        return [None] * len(slots)
    found: list[Any]
    found = list(seed) if isinstance(seed, Iterable) else [seed + slot if _is_seed(seed) else seed for slot in slots]
    if len(found) != len(slots) or not all(one is None or _is_seed(one) for one in found):
        raise SettingError(
            f"expected seed to be a number from 0 on, or one for each of {len(slots)} slots, got {seed!r:.80}"
        )
    return [None if one is None else int(one) for one in found]


def _is_seed(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and 0 <= int(value) < 2**64


def _branch(state: SavedState, lane: int, seed: int | None) -> states_pb2.RestoreStates.Branch:
    branch = states_pb2.RestoreStates.Branch(state=state.identifier, lane=lane)
    if seed is not None:
        branch.seed = seed
    return branch


def _began(reply: MessageReply) -> tuple[Any, dict[str, Any]]:
    if reply.began is None:
        urls = dict.fromkeys(answer.target.url for answer in reply.answers)
        raise PeerError(", ".join(urls), "it restored a state, but did not report the restored observation")
    return reply.began


def _states_of(answer: MessageAnswer) -> list[SavedState]:
    url, count = answer.target.url, len(answer.target.lanes)
    try:
        states = states_pb2.StatesResponse.FromString(answer.data).states
    except DecodeError as error:
        raise PeerError(url, f"its answer to a save cannot be read: {error}") from error
    if len(states) != count:
        raise PeerError(url, f"expected {count} states of as many lanes, got {len(states)}")
    shown = shown_url(url)
    return [SavedState(one.identifier, shown, one.how, one.bytes, one.environment) for one in states]

"""What a world is: something that agents join, and that gives each of them specs and episodes."""

from __future__ import annotations

import abc
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import gymnasium

from bridge import values
from bridge.errors import Code, RequestError, TensorError
from bridge.pb import bridge_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.properties import PropertyTree
from bridge.tensors import Array, Spec, fill_tensor
from bridge.worlds.resets import ResetBook

__all__ = ["Agent", "AllOf", "Lock", "World", "answer_to", "environment_failure"]

Lock = AbstractContextManager[Any]
"""What every call of an environment in this process is made under."""


class AllOf(AbstractContextManager[None]):
    """Several locks held together, taken in their order."""

    def __init__(self, locks: Sequence[Lock]) -> None:
        self._locks = locks

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        for lock in reversed(self._locks):
            lock.__exit__(None, None, None)


class Agent(abc.ABC):
    """One connection's seat in a world.

    A session calls `begin` for the first Step of a sequence and `step` for the others, never two at once. What a call
    raises as RequestError is the answer to that request, and changes nothing.
    """

    actions: Mapping[int, Spec]
    """Action specs by UID."""
    observations: Mapping[int, Spec]
    """Observation specs by UID."""
    may_wait = True
    """Whether a call may wait for a clock or for other agents; False: it takes what its environment takes."""

    def specs(self) -> pb.ActionObservationSpecs:
        """Return the specs as they travel."""
        return pb.ActionObservationSpecs(
            actions={uid: spec.to_proto() for uid, spec in self.actions.items()},
            observations={uid: spec.to_proto() for uid, spec in self.observations.items()},
        )

    @abc.abstractmethod
    def reset(self, settings: Mapping[str, pb.Tensor], running: bool) -> None:
        """Take the settings of the next sequence, and end the running one (D-14)."""

    @abc.abstractmethod
    def begin(self) -> int:
        """Start a sequence; return its state, RUNNING."""

    @abc.abstractmethod
    def step(self, actions: Mapping[int, Array]) -> int:
        """Apply actions, already checked against their specs; return the state that follows."""

    def prepare(self, uids: Sequence[int]) -> None:
        """Learn which observations the Step that follows asks for; called before its `begin` or `step`."""
        del uids  # of no interest to most worlds

    def interrupt(self) -> None:  # noqa: B027 - a world may have nothing to note
        """Take note that the sequence was cut off from outside; `observe` gives its last observations once more."""

    def ended(self, state: int) -> tuple[int, int]:
        """Return how many environments the last `step` stepped, and how many of them ended their episode by it."""
        return 1, int(state != pb.RUNNING)

    @abc.abstractmethod
    def observe(self, uids: Sequence[int]) -> Mapping[int, Array]:
        """Return these observations of the last `begin` or `step`, and compute no others (D-10)."""

    # The same in the parts that pay where the same few requests come again and again.

    keeps_actions = False
    """Whether what `decode` returned may be applied any number of times."""

    def decode(self, actions: Mapping[int, Array]) -> Any:
        """Return what `apply` takes for the actions that `step` takes; raises as `step` for those that are none."""
        return actions

    def apply(self, action: Any) -> int:
        """Do as `step` does with what `decode` returned."""
        return self.step(action)

    def values(self, uids: Sequence[int]) -> list[Array | float | bool | bytes]:
        """Return what `observe` does, in the order of the UIDs; scalars may be Python's, and uint8 arrays bytes."""
        observed = self.observe(uids)
        return [observed[uid] for uid in uids]

    @abc.abstractmethod
    def properties(self) -> PropertyTree:
        """Return the properties of the world, as this agent sees it."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Give up the seat; the world goes on."""

    def hang_up(self) -> None:  # noqa: B027 - most agents never wait
        """Take note, from any thread, that the client is gone, so that no call of it waits any longer."""

    def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a method of the environment, or read an attribute."""
        raise RequestError(Code.UNIMPLEMENTED, f"this world has no methods to call, so not {request.name!r} either")


class World(abc.ABC):
    """Something that agents join. `join` may be called from any thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.resets = ResetBook()

    @abc.abstractmethod
    def join(self, settings: Mapping[str, pb.Tensor]) -> Agent:
        """Seat an agent.

        Raises:
            RequestError: RESOURCE_EXHAUSTED where the world is full, INVALID_ARGUMENT for settings it does not know.
        """

    @property
    @abc.abstractmethod
    def agents(self) -> int:
        """How many agents are in."""

    @property
    def alive(self) -> bool:
        """Whether it can still be joined; a world that ended by itself is not."""
        return True

    @abc.abstractmethod
    def close(self) -> None:
        """End the world; agents that are still in get an error on their next Step."""

    def retire(self) -> bool:
        """End the world if no agent is in; return whether it did."""
        if self.agents:
            return False
        self.close()
        return True

    def prepare_reset(self, settings: Mapping[str, pb.Tensor], caller: Agent | None) -> Callable[[], None]:
        """Take the settings of the sequence that a ResetWorld begins; return what takes them back.

        Raises:
            RequestError: INVALID_ARGUMENT for settings that the world does not take.
        """
        refuse_unknown(settings, (), "ResetWorld")
        return lambda: None

    def reset(
        self, settings: Mapping[str, pb.Tensor], caller: Agent | None, gone: Callable[[], bool], timeout: float
    ) -> None:
        """Begin a new sequence for every agent (D-15): wait until each running one but the caller was interrupted.

        Args:
            settings: For the next sequence.
            caller: The agent of the connection that asks, where it is in this world.
            gone: Whether that connection has ended.
            timeout: Seconds to wait for the others' Steps.

        Raises:
            RequestError: Bad settings, or DEADLINE_EXCEEDED.
        """
        undo = self.prepare_reset(settings, caller)
        untold, withdrawn = self.resets.wait(self.resets.interrupt(caller), timeout, gone)
        if withdrawn:
            undo()
        if untold:
            then = "nothing was reset" if withdrawn else "they are interrupted at their next Step"
            raise RequestError(
                Code.CANCELLED if gone() else Code.DEADLINE_EXCEEDED,
                f"ResetWorld of {self.name!r}: {untold} other agents did not Step within "
                f"reset_world_timeout={timeout:g} s, so {then}; let each agent Step once, or leave",
            )
        if self.resets.closed:
            raise RequestError(Code.NOT_FOUND, f"the world {self.name!r} was destroyed while ResetWorld waited")
        if caller is not None:
            self.resets.end(caller)


def environment_failure(where: str, error: BaseException) -> RequestError:
    """Turn what an environment raised into the answer: INTERNAL with its own traceback text (D-2)."""
    frames = traceback.format_exception(type(error), error, error.__traceback__)
    return RequestError(
        Code.INTERNAL,
        f"the environment raised {type(error).__name__} in {where}: {error}\n{''.join(frames)}"
        "Mend the environment, or reset to begin a new episode.",
    )


def answer_to(where: str, error: BaseException) -> RequestError:
    """Turn what an environment raised into the answer, with a plain word for what is no failure of it."""
    if isinstance(error, gymnasium.error.ResetNeeded):
        return RequestError(Code.FAILED_PRECONDITION, f"no {where} before the first Step: {error}")
    if isinstance(error, NotImplementedError) and where == "render":
        return RequestError(Code.FAILED_PRECONDITION, "this environment has no frames to render")
    return environment_failure(where, error)


def read_bytes(settings: Mapping[str, pb.Tensor], name: str) -> Any:
    """Decode a setting that travels in the values codec, or return None where it is not given."""
    if name not in settings:
        return None
    tensor = settings[name]
    if tensor.WhichOneof("payload") != "uint8s":
        raise TensorError(f"the setting {name!r} travels as uint8 bytes of the values codec")
    return values.decode(tensor.uint8s.array)


# Settings that other worlds than the one at hand take.
_ELSEWHERE = {
    "role": "real-time worlds, served with fps=",
    "wait": "real-time worlds, served with fps=",
    "restart": "real-time worlds, served with fps=",
    "reset_mask": "worlds of lanes, served with num_envs=",
    "agent": "worlds of several agents, of serve_parallel",
}


def refuse_unknown(settings: Mapping[str, pb.Tensor], known: Sequence[str], request: str) -> None:
    """Raise INVALID_ARGUMENT where a setting is none of `known`."""
    unknown = sorted(set(settings) - set(known))
    if unknown:
        allowed = ", ".join(known) or "none"
        hints = "".join(f"; {name} is for {_ELSEWHERE[name]}" for name in unknown if name in _ELSEWHERE)
        raise RequestError(
            Code.INVALID_ARGUMENT,
            f"unknown {request} settings {', '.join(unknown)}; the settings here are: {allowed}{hints}",
        )


def fill_observations(response: pb.StepResponse, observations: Mapping[int, Array]) -> None:
    """Write observations into a Step's response."""
    for uid, array in observations.items():
        fill_tensor(response.observations[uid], array)

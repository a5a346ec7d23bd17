"""Saves and restores, beside the environments of one world; asked by `bridge.states.handler` alone.

What is saved stays in the process of the environment: in the server's for all its worlds, so that a state of one may be
restored in another; of an isolated world in the world's own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import cloudpickle

from bridge.core.encoding import values
from bridge.core.encoding.message_form import Origin
from bridge.core.worlds.messages import MessagePart, Stage
from bridge.errors import Code, RequestError
from bridge.states.check import single
from bridge.states.graph import CannotCopyError, EnvSnapshot, layers_of, restore, take
from bridge.states.scan import shared_by

__all__ = ["StatesPart", "drop", "forget"]


class _Saved:
    """A state."""

    def __init__(self, snapshot: EnvSnapshot, result: tuple[Any, ...], shared: str, origin: Origin) -> None:
        self.snapshot, self.result, self.shared, self.origin = snapshot, result, shared, origin


_stores: dict[str, dict[str, _Saved]] = {}
"""The states of each start of a server, by identifier."""


def forget(start: str) -> None:
    """Drop all states of a start of a server."""
    _stores.pop(start, None)


def drop(start: str, identifiers: Iterable[str]) -> None:
    """Drop states of this process."""
    store = _stores.get(start, {})
    for identifier in identifiers:
        store.pop(identifier, None)


class StatesPart(MessagePart):
    """Saves and restores.

    Args:
        stage: Reaches the environments.
        start: Names the start of the server.
    """

    def __init__(self, stage: Stage, start: str) -> None:
        super().__init__(stage)
        self._states = _stores.setdefault(start, {})

    def answer(self, request: bytes) -> bytes:
        """Answer the handler: a name, and arguments."""
        name, *arguments = values.decode(request)
        return values.encode(getattr(self, f"_{name}")(*arguments))

    def _describe(self, whole: bool) -> Any:
        """Return what the environments are, and with `whole` what makes another one, pickled, or why it cannot be."""
        env = self._one(0)
        # In one process for the check: `make` itself may hold what cannot be sent, or one environment alone.
        if not whole:
            return [_title(env, self.stage), b"", ""]
        try:
            return [_title(env, self.stage), cloudpickle.dumps(single(self.stage.make)), ""]
        except Exception as error:  # whatever the pickling of a user's objects raises
            return [_title(env, self.stage), b"", f"what makes it cannot be sent to a process of its own: {error!r}"]

    def _save(self, lanes: Sequence[int], identifiers: Sequence[str]) -> Any:
        found: list[_Saved] = []
        for lane in lanes:
            env = self._one(lane)
            observation, info = self.stage.newest(lane)
            try:
                snapshot, result = take(env, observation, dict(info))
            except CannotCopyError as error:
                raise _refused(error) from error
            shared = shared_by(snapshot.classes)
            if shared.reason:
                raise _refused(shared.reason)
            found.append(_Saved(snapshot, result, shared.digest(), Origin(self.stage.moment, lane)))
        # Only now: a save of some lanes that fails has saved none.
        self._states.update(zip(identifiers, found, strict=True))
        return [["+".join(saved.snapshot.how), saved.snapshot.size] for saved in found]

    def _restore(self, branches: Sequence[Any]) -> Any:
        self.stage.check_place()
        plan = []
        for identifier, lane, seed in branches:
            saved, env = self._states.get(identifier), self._one(lane)
            if saved is None:
                text = "the state is not where this environment is: it is kept in the process of another world"
                raise RequestError(Code.FAILED_PRECONDITION, text)
            if shared_by(saved.snapshot.classes).digest() != saved.shared:
                text = "what its class or its module holds has changed since, which all environments share"
                raise _refused(text)
            kinds = [type(layer) for layer in layers_of(env)]
            if kinds != saved.snapshot.kinds:
                raise RequestError(Code.FAILED_PRECONDITION, "the state is of an environment with other wrappers")
            plan.append((saved, lane, env, seed))
        for saved, lane, env, seed in plan:
            try:
                observation, info = restore(saved.snapshot, env, *saved.result, seed=seed)
            except (CannotCopyError, ValueError) as error:
                raise _refused(error) from error
            self.stage.place(lane, observation, info, dataclasses.replace(saved.origin, seed=seed))
        return None

    def _drop(self, identifiers: Sequence[str]) -> Any:
        for identifier in identifiers:
            self._states.pop(identifier, None)
        return None

    def _one(self, lane: int) -> Any:
        envs = self.stage.envs
        if not envs:
            text = f"the lanes of {self.stage.facts.kind} are in other processes, or in a simulator, which is not saved"
            raise RequestError(Code.UNIMPLEMENTED, text)
        if self.stage.facts.agents:
            raise RequestError(Code.UNIMPLEMENTED, "an environment of several agents is not saved")
        if not 0 <= lane < len(envs):
            raise RequestError(Code.INVALID_ARGUMENT, f"expected lanes 0 to {len(envs) - 1}, got {lane}")
        return envs[lane]


def _refused(why: object) -> RequestError:
    return RequestError(Code.FAILED_PRECONDITION, f"this environment has no state that can be copied: {why}")


def _title(env: Any, stage: Stage) -> str:
    """Return what an environment is, as text: its wrappers and its class, its id and its arguments."""
    names = [f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in layers_of(env)]
    spec = getattr(env, "spec", None)
    recipe = getattr(stage.make, "__self__", None)
    kwargs: Mapping[str, Any] = {**(getattr(spec, "kwargs", None) or {}), **(getattr(recipe, "kwargs", None) or {})}
    given = ", ".join(f"{name}={value!r:.200}" for name, value in sorted(kwargs.items()))
    process = f" {os.getpid()}" if "__main__" in names[-1] else ""
    return f"{' '.join(names)} {getattr(spec, 'id', '')}({given}){process}"

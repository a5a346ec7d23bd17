"""The base of the conformance checks: connections, worlds, and an agent that tracks its state.

A check is a function that takes a `Bench`. It returns if the server conforms, raises `Failed` with what was expected
and what came if it does not, and raises `Skip` if there is nothing to check.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from bridge.errors import Code, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import samples
from bridge.testing.wire import NoAnswerError, ProcessStream, StreamEndedError, describe

__all__ = ["CHECKS", "Bench", "Check", "CheckedAgent", "Failed", "Options", "Skip", "check", "unused"]

UNKNOWN_NAME = "conformance check: no such name"
"""A name that no server has as a world, a setting or a property."""
QUIET = 0.25
"""Seconds in which an answer that must not come yet would come."""


class Failed(Exception):  # noqa: N818 - the outcome of a check
    """The server does not do what the requirement asks."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(expected, got)
        self.expected, self.got = expected, got

    def __str__(self) -> str:
        return f"expected {self.expected}, got {self.got}"


class Skip(Exception):  # noqa: N818 - the outcome of a check
    """There is nothing to check, and why."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a conformance run."""

    timeout: float = 10.0
    """Seconds that one answer may take."""
    create_settings: Mapping[str, pb.Tensor] = dataclasses.field(default_factory=dict)
    """CreateWorld settings that give a world to check."""
    join_settings: Mapping[str, pb.Tensor] = dataclasses.field(default_factory=dict)
    """JoinWorld settings that the world needs."""
    world: str | None = None
    """An existing world to join; None: create one, or else the default world."""
    actions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """A lawful value for actions by name, where the spec says too little: texts, protos, variable lengths."""
    required_actions: tuple[str, ...] = ()
    """Names of the actions without which a Step in a running sequence is an error."""
    steps: int = 500
    """Steps that are played at most to meet the end of a sequence."""
    seed: int = 0
    """Where the random actions come from."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One check of one requirement."""

    requirement: str
    name: str
    run: Callable[[Bench], None]


CHECKS: list[Check] = []


def check(requirement: str, name: str) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Register a function as a check of a requirement; `name` is a sentence that is true if it passes."""

    def enter(function: Callable[[Bench], None]) -> Callable[[Bench], None]:
        CHECKS.append(Check(requirement, name, function))
        return function

    return enter


def unused(uids: Mapping[int, Any], start: int = 987_654_321) -> int:
    """Return a UID that is in no spec."""
    while start in uids:
        start += 1
    return start


class CheckedAgent:
    """A connection that sends the checks' requests and tracks the state of its sequence."""

    def __init__(self, stream: ProcessStream, bench: Bench) -> None:
        self.stream, self.bench = stream, bench
        self.specs = pb.ActionObservationSpecs()
        self.running = False
        self.world: str | None = None

    # Requests as they are, and what must come of them.

    def ask(self, **payload: Any) -> pb.EnvironmentResponse:
        """Send a request, given as its member (`step=StepRequest(…)`), and return the answer: its kind, or an error.

        Raises:
            Failed: The answer is of another kind, did not come, or the stream ended.
        """
        self.stream.send(pb.EnvironmentRequest(**payload))
        kind = next(iter(payload), "error")
        return self.take(kind)

    def take(self, kind: str, timeout: float | None = None) -> pb.EnvironmentResponse:
        """Return the next answer, which must be of a kind, or an error; raises what `ask` raises."""
        try:
            answer = self.stream.receive(timeout)
        except NoAnswerError as error:
            self.bench.hung = True
            raise Failed(f"a {kind} answer or an error", str(error)) from None
        except StreamEndedError as error:
            raise Failed(f"a {kind} answer or an error, the stream open", str(error)) from None
        if answer.WhichOneof("payload") not in (kind, "error"):
            raise Failed(f"a {kind} answer or an error", describe(answer))
        return answer

    def good(self, why: str, **payload: Any) -> Any:
        """Send a request that must succeed, and return the answer of its kind."""
        kind = next(iter(payload))
        answer = self.ask(**payload)
        if answer.WhichOneof("payload") == "error":
            raise Failed(f"a {kind} answer {why}", describe(answer))
        return getattr(answer, kind)

    def bad(self, why: str, **payload: Any) -> pb.Status:
        """Send a request that must be answered with an error, and return the error."""
        answer = self.ask(**payload)
        if answer.WhichOneof("payload") != "error":
            raise Failed(f"an error {why}", describe(answer))
        return answer.error

    # The protocol's steps.

    def join(self, world: str) -> None:
        """Join a world."""
        request = pb.JoinWorldRequest(world_name=world, settings=self.bench.options.join_settings)
        self.specs = self.good(f"when joining the world {world!r}", join_world=request).specs
        self.world, self.running = world, False

    def leave(self) -> None:
        """Leave the world."""
        self.good("to LeaveWorld", leave_world=pb.LeaveWorldRequest())
        self.running = False

    def reset(self) -> pb.ActionObservationSpecs:
        """Reset, and return the specs that came."""
        answer = self.good("to Reset", reset=pb.ResetRequest(settings={}))
        self.specs, self.running = answer.specs, False
        return self.specs

    def step(
        self, why: str, actions: Mapping[int, pb.Tensor] | None = None, observations: list[int] | None = None
    ) -> pb.StepResponse:
        """Send a Step that must succeed."""
        request = pb.StepRequest(actions=actions or {}, requested_observations=observations or [])
        answer: pb.StepResponse = self.good(why, step=request)
        self.running = answer.state == pb.RUNNING
        return answer

    def start(self, observations: list[int] | None = None) -> pb.StepResponse:
        """Send the first Step of a sequence, which must give RUNNING."""
        answer = self.step("to the first Step of a sequence", None, observations)
        if not self.running:
            got = describe(pb.EnvironmentResponse(step=answer))
            raise Failed("RUNNING from the first Step of a sequence", got)
        return answer

    def to_running(self) -> None:
        """Send a first Step unless a sequence is running."""
        if not self.running:
            self.start()

    def bad_step(
        self, why: str, actions: Mapping[int, pb.Tensor] | None = None, *, observations: Any = ()
    ) -> pb.Status:
        """Send a Step that must be answered with an error."""
        answer = self.ask(step=pb.StepRequest(actions=actions or {}, requested_observations=observations))
        if answer.WhichOneof("payload") != "error":
            self.running = answer.step.state == pb.RUNNING
            raise Failed(f"an error {why}", describe(answer))
        return answer.error

    def must_be_first(self, why: str) -> None:
        """Check that the next Step is the first of a sequence: it ignores an unknown action and gives RUNNING (D-9)."""
        answer = self.step(f"and the action ignored {why}", self.nonsense())
        if not self.running:
            raise Failed(f"RUNNING {why}", describe(pb.EnvironmentResponse(step=answer)))

    def must_be_running(self, why: str) -> None:
        """Check that a sequence is running: only then is a Step with an unknown action an error (D-9, D-11)."""
        self.bad_step(f"to an unknown action {why}: a sequence must still be running", self.nonsense())

    # Actions.

    def nonsense(self) -> dict[int, pb.Tensor]:
        """Return an action with a UID that is in no spec."""
        return {unused(self.specs.actions): samples.pack(pb.FLOAT, 0.0)}

    def lawful(self) -> dict[int, pb.Tensor]:
        """Return a lawful value for every action.

        Raises:
            Skip: None is known: the server refuses what its specs allow.
        """
        if self.bench.unlawful:
            raise Skip(self.bench.unlawful)
        return self.draw()

    def draw(self, text: str | None = None) -> dict[int, pb.Tensor]:
        """Return a random value for each action from its spec, or the one in the options.

        Raises:
            SettingError: That one does not fit.
        """
        given = self.bench.options.actions
        out = {}
        for uid, spec in self.specs.actions.items():
            if spec.name in given:
                value = given[spec.name]
                try:
                    out[uid] = value if isinstance(value, pb.Tensor) else samples.pack(spec.dtype, value)
                except (TypeError, ValueError, OverflowError) as error:
                    kind = pb.DataType.Name(spec.dtype)
                    raise SettingError(
                        f"expected the action {spec.name!r} as {kind}, got {value!r}: {error}"
                    ) from error
                continue
            made = samples.lawful(spec, self.bench.generator, self.bench.text if text is None else text)
            if made is not None:
                out[uid] = made
        return out

    def changeable(self) -> dict[int, pb.TensorSpec]:
        """Return the specs of the actions that checks may vary: those without a value in the options."""
        return {uid: spec for uid, spec in self.specs.actions.items() if spec.name not in self.bench.options.actions}


class Bench:
    """The server under check, and what is known of it so far."""

    def __init__(self, channel: Any, metadata: tuple[tuple[str, str], ...], options: Options) -> None:
        self.channel, self.metadata, self.options = channel, metadata, options
        self.generator = np.random.default_rng(options.seed)
        self.notes: list[str] = []
        self.hung = False  # an answer did not come in time
        self.can_create = False
        self.no_world = ""  # why no world can be joined
        self.one_connection = ""  # why a second connection cannot be had
        self.own_worlds = ""  # why a second connection cannot use a world that the first one made
        self.unlawful = ""  # why no lawful action is known
        self.text = ""
        self.cache: dict[str, Any] = {}
        self.left_over: list[str] = []  # worlds to destroy in the end
        self._killed = False

    def note(self, text: str) -> None:
        """Record a note: something that is allowed but could be better."""
        self.notes.append(text)

    def need_two(self) -> None:
        """Skip if the server serves one connection only."""
        if self.one_connection:
            raise Skip(self.one_connection.removeprefix("!"))

    def need_shared_world(self) -> None:
        """Skip if two connections cannot use one world."""
        self.need_two()
        if self.own_worlds and self.options.world is None:
            raise Skip(self.own_worlds)

    def need_create(self) -> None:
        """Skip where no worlds can be created."""
        if not self.can_create:
            raise Skip("the server does not create worlds")

    @contextlib.contextmanager
    def connection(self) -> Iterator[CheckedAgent]:
        """Open a connection; close it in the end."""
        with self._open() as stream:
            yield CheckedAgent(stream, self)

    def _open(self) -> ProcessStream:
        deadline = time.monotonic() + min(self.options.timeout, 5.0)
        while True:
            stream = ProcessStream(self.channel, self.metadata, self.options.timeout)
            if not self.one_connection:
                return stream
            # The one before may not be over yet for a server that takes one at a time.
            try:
                stream.ask(pb.EnvironmentRequest(leave_world=pb.LeaveWorldRequest()))
                return stream
            except NoAnswerError:
                return stream
            except StreamEndedError:
                stream.close()
                if time.monotonic() >= deadline:
                    return ProcessStream(self.channel, self.metadata, self.options.timeout)
                threading.Event().wait(0.02)

    def kill(self, agent: CheckedAgent) -> None:
        """Break a connection, as when its client dies."""
        agent.stream.close()
        self._killed = True

    def create(self, agent: CheckedAgent) -> str:
        """Create a world on a connection, and return its name."""
        request = pb.CreateWorldRequest(settings=self.options.create_settings)
        answer: pb.CreateWorldResponse = agent.good("to CreateWorld", create_world=request)
        return answer.world_name

    @contextlib.contextmanager
    def world(self, agent: CheckedAgent, *, new: bool = False) -> Iterator[str]:
        """Return the name of a world to join: a new one if the server can create worlds, destroyed at the end.

        Raises:
            Skip: No world can be had, or none can be created and `new` asks for it.
        """
        if self.no_world:
            raise Skip(self.no_world)
        if new:
            self.need_create()
        if self.options.world is not None and not new:
            yield self.options.world
        elif self.can_create:
            name = self.create(agent)
            try:
                yield name
            finally:
                self.destroy(agent, name)
        else:
            yield ""

    def destroy(self, agent: CheckedAgent, name: str) -> None:
        """Leave and destroy a world, ignoring the answers; `tidy` retries what failed."""
        try:
            if self.hung:
                raise Failed("an answer", "none")
            agent.ask(leave_world=pb.LeaveWorldRequest())
            self._destroyed(agent, name)
        except Failed:
            self.left_over.append(name)

    def tidy(self) -> None:
        """Destroy, on a connection of its own, the worlds that could not be destroyed on theirs."""
        names, self.left_over = self.left_over, []
        if names:
            with contextlib.suppress(Failed), self.connection() as agent:
                for name in names:
                    self._destroyed(agent, name)

    def _destroyed(self, agent: CheckedAgent, name: str) -> None:
        answer = agent.ask(destroy_world=pb.DestroyWorldRequest(world_name=name))
        # Refused, perhaps because an agent that is gone is still there for the server: try again later.
        if answer.WhichOneof("payload") == "error" and answer.error.code != Code.NOT_FOUND:
            self.left_over.append(name)

    @contextlib.contextmanager
    def joined(self, *, new: bool = False) -> Iterator[CheckedAgent]:
        """Open a connection that has joined a world; leave it and close in the end."""
        with self.connection() as agent, self.world(agent, new=new) as world:
            self._join_soon(agent, world)
            try:
                yield agent
            finally:
                if not self.hung:
                    with contextlib.suppress(Failed):
                        agent.ask(leave_world=pb.LeaveWorldRequest())

    def _join_soon(self, agent: CheckedAgent, world: str) -> None:
        # A server may need a moment to see that an earlier agent of its one world has died.
        deadline = time.monotonic() + (min(self.options.timeout, 2.0) if self._killed else 0.0)
        while True:
            try:
                return agent.join(world)
            except Failed:
                if self.hung or time.monotonic() >= deadline:
                    raise
                threading.Event().wait(0.02)

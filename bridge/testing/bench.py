"""The base of the conformance checks: connections, worlds, and an agent that tracks its state.

A check is a function that takes a `Bench`. It returns if the server conforms, raises `Failed` with what was expected
and what came if it does not, and raises `Skip` if it does not apply.
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
"""A name that no server uses for a world, a setting or a property."""
QUIET = 0.25
"""Seconds to wait for a response that must not come yet."""


class Failed(Exception):  # noqa: N818 - the outcome of a check
    """The server violates the requirement."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(expected, got)
        self.expected, self.got = expected, got

    def __str__(self) -> str:
        return f"expected {self.expected}, got {self.got}"


class Skip(Exception):  # noqa: N818 - the outcome of a check
    """The check does not apply; the message says why."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a conformance run."""

    timeout: float = 10.0
    """Seconds to wait for a response."""
    create_settings: Mapping[str, pb.Tensor] = dataclasses.field(default_factory=dict)
    """CreateWorld settings for a world to check."""
    join_settings: Mapping[str, pb.Tensor] = dataclasses.field(default_factory=dict)
    """JoinWorld settings that the world needs."""
    world: str | None = None
    """An existing world to join; None: create one, or else use the default world."""
    actions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Valid values of actions by name, where the spec does not say enough: texts, protos, variable lengths."""
    required_actions: tuple[str, ...] = ()
    """Names of actions that a Step in a running sequence must contain."""
    steps: int = 500
    """The most steps to play until the end of a sequence."""
    seed: int = 0
    """The seed of the random actions."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One check of one requirement."""

    requirement: str
    name: str
    run: Callable[[Bench], None]


CHECKS: list[Check] = []


def check(requirement: str, name: str) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Register a function as a check of a requirement; `name` is a sentence that is true if the check passes."""

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

    # Requests as given, and checks of their responses.

    def ask(self, **payload: Any) -> pb.EnvironmentResponse:
        """Send a request, given as its member (`step=StepRequest(…)`), and return its response or an error.

        Raises:
            Failed: The response is of another kind or did not come, or the stream ended.
        """
        self.stream.send(pb.EnvironmentRequest(**payload))
        kind = next(iter(payload), "error")
        return self.take(kind)

    def take(self, kind: str, timeout: float | None = None) -> pb.EnvironmentResponse:
        """Return the next response, which must be of a kind, or an error; raise like `ask`."""
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
        """Send a request that must succeed, and return the response of its kind."""
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

    # Requests of the protocol.

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
        """Reset, and return the received specs."""
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
        """Send the first Step of a sequence, which must return RUNNING."""
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
        """Check that the next Step is the first of a sequence: it ignores unknown actions and returns RUNNING (D-9)."""
        answer = self.step(f"and the action ignored {why}", self.nonsense())
        if not self.running:
            raise Failed(f"RUNNING {why}", describe(pb.EnvironmentResponse(step=answer)))

    def must_be_running(self, why: str) -> None:
        """Check that a sequence is running: only then a Step with an unknown action is an error (D-9, D-11)."""
        self.bad_step(f"to an unknown action {why}: a sequence must still be running", self.nonsense())

    # Actions.

    def nonsense(self) -> dict[int, pb.Tensor]:
        """Return an action with a UID that is in no spec."""
        return {unused(self.specs.actions): samples.pack(pb.FLOAT, 0.0)}

    def lawful(self) -> dict[int, pb.Tensor]:
        """Return a valid value for every action.

        Raises:
            Skip: None is known: the server refuses values that its specs allow.
        """
        if self.bench.unlawful:
            raise Skip(self.bench.unlawful)
        return self.draw()

    def draw(self, text: str | None = None) -> dict[int, pb.Tensor]:
        """Return a random value for each action from its spec, or the one in the options.

        Raises:
            SettingError: The value in the options does not match the spec.
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
    """The server under test, and the known facts about it."""

    def __init__(self, channel: Any, metadata: tuple[tuple[str, str], ...], options: Options) -> None:
        self.channel, self.metadata, self.options = channel, metadata, options
        self.generator = np.random.default_rng(options.seed)
        self.notes: list[str] = []
        self.hung = False  # a response did not come in time
        self.can_create = False
        self.no_world = ""  # why no world can be joined; empty: one can
        self.one_connection = ""  # why a second connection cannot be opened
        self.own_worlds = ""  # why a second connection cannot use a world that the first one created
        self.unlawful = ""  # why no valid action is known
        self.text = ""
        self.cache: dict[str, Any] = {}
        self.left_over: list[str] = []  # worlds to destroy at the end
        self._killed = False

    def note(self, text: str) -> None:
        """Record a note: something that is allowed but could be better."""
        self.notes.append(text)

    def need_two(self) -> None:
        """Skip if the server accepts only one connection."""
        if self.one_connection:
            raise Skip(self.one_connection.removeprefix("!"))

    def need_shared_world(self) -> None:
        """Skip if two connections cannot use one world."""
        self.need_two()
        if self.own_worlds and self.options.world is None:
            raise Skip(self.own_worlds)

    def need_create(self) -> None:
        """Skip if no worlds can be created."""
        if not self.can_create:
            raise Skip("the server does not create worlds")

    @contextlib.contextmanager
    def connection(self) -> Iterator[CheckedAgent]:
        """Open a connection, and close it at the end."""
        with self._open() as stream:
            yield CheckedAgent(stream, self)

    def _open(self) -> ProcessStream:
        deadline = time.monotonic() + min(self.options.timeout, 5.0)
        while True:
            stream = ProcessStream(self.channel, self.metadata, self.options.timeout)
            if not self.one_connection:
                return stream
            # A server that accepts one connection at a time may not have noticed the end of the previous one.
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
        """Break a connection, as if its client had died."""
        agent.stream.close()
        self._killed = True

    def create(self, agent: CheckedAgent) -> str:
        """Create a world on a connection, and return its name."""
        request = pb.CreateWorldRequest(settings=self.options.create_settings)
        answer: pb.CreateWorldResponse = agent.good("to CreateWorld", create_world=request)
        return answer.world_name

    @contextlib.contextmanager
    def world(self, agent: CheckedAgent, *, new: bool = False) -> Iterator[str]:
        """Yield the name of a world to join: a new one if the server can create worlds, destroyed at the end.

        Raises:
            Skip: There is no world, or `new` is True and none can be created.
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
        """Leave and destroy a world, ignoring the responses; `tidy` tries again if this failed."""
        try:
            if self.hung:
                raise Failed("an answer", "none")
            agent.ask(leave_world=pb.LeaveWorldRequest())
            self._destroyed(agent, name)
        except Failed:
            self.left_over.append(name)

    def tidy(self) -> None:
        """Destroy, on a new connection, the worlds that could not be destroyed on theirs."""
        names, self.left_over = self.left_over, []
        if names:
            with contextlib.suppress(Failed), self.connection() as agent:
                for name in names:
                    self._destroyed(agent, name)

    def _destroyed(self, agent: CheckedAgent, name: str) -> None:
        answer = agent.ask(destroy_world=pb.DestroyWorldRequest(world_name=name))
        # Refused, maybe because the server has not noticed the end of an agent: try again later.
        if answer.WhichOneof("payload") == "error" and answer.error.code != Code.NOT_FOUND:
            self.left_over.append(name)

    @contextlib.contextmanager
    def joined(self, *, new: bool = False) -> Iterator[CheckedAgent]:
        """Open a connection that has joined a world; leave and close it at the end."""
        with self.connection() as agent, self.world(agent, new=new) as world:
            self._join_soon(agent, world)
            try:
                yield agent
            finally:
                if not self.hung:
                    with contextlib.suppress(Failed):
                        agent.ask(leave_world=pb.LeaveWorldRequest())

    def _join_soon(self, agent: CheckedAgent, world: str) -> None:
        # A server may need a moment to notice that an earlier agent of its only world has died.
        deadline = time.monotonic() + (min(self.options.timeout, 2.0) if self._killed else 0.0)
        while True:
            try:
                return agent.join(world)
            except Failed:
                if self.hung or time.monotonic() >= deadline:
                    raise
                threading.Event().wait(0.02)

"""Messages of features and of other packages, which a joined session answers: what serves one, and what it is given.

A `SessionMessage` has up to two parts. Its *part beside the environment* runs where the environment is stepped: in the
environment's thread, and of an isolated world in the world's process. Its *handler*, one object a server, runs in the
serving thread: it knows the clients, keeps what outlives a request, and asks the part, as often as it likes. One that
only looks at environments needs no handler, one that only answers from what it knows needs no part.

The core hands on bytes, and knows what no message means. It checks who sends one (who plays, and has its world alone),
how large it is, and what it costs.

Another package names one by an entry point in its `pyproject.toml`: a function that returns a `SessionMessage`, whose
keywords are what an operator may set.

    [project.entry-points."gymnasium_bridge.messages"]
    note = "my_package.note:note_message"

It is served where the operator says so: `serve_gym(…, messages=["note"])`, `gymnasium-bridge serve --message note`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from bridge.core.encoding.message_form import MessageForm, Origin
from bridge.core.encoding.properties import Property
from bridge.core.worlds.scheduling import Scheduler
from bridge.errors import SettingError

__all__ = ["GROUP", "AskedMessage", "Callee", "MessageHandler", "MessagePart", "PartOutcome", "SessionMessage", "Stage"]

GROUP = "gymnasium_bridge.messages"
"""The group of entry points."""


class Stage(Protocol):
    """What the part of a message beside the environment reaches. Used in the environment's thread alone."""

    facts: Any
    """What the environment is, an `EnvFacts`: its spaces, and how many lanes one call steps."""

    @property
    def envs(self) -> Sequence[Any]:
        """The environments that are stepped one by one, with their wrappers: one, or one a lane; none: lanes that are
        in other processes, or in a simulator.
        """

    @property
    def whole(self) -> Any:
        """The object that is stepped: an environment, or a vector environment of all lanes."""

    @property
    def make(self) -> Callable[[], Any]:
        """Makes another object like `whole`, with the same arguments; it can be pickled by `cloudpickle` mostly."""

    @property
    def moment(self) -> str:
        """A name for what the environments have done so far, by whoever keeps an account of it; empty: nobody does.

        A part that puts an environment into this situation later gives it back, as an `Origin`.
        """

    @property
    def fresh(self) -> bool:
        """True as long as no environment was reset, and no client has called or changed one."""

    def intercept(self, lane: int, callee: Callee | None) -> None:
        """Have something called in the place of an environment, which calls it.

        Args:
            lane: Its index in `envs`.
            callee: What is called; None: the environment itself, as at first.
        """

    def replace(self, lane: int, env: Any) -> None:
        """Step another environment of the same kind from here on; the one that was stepped is closed.

        Args:
            lane: Its index in `envs`.
            env: The other one.
        """

    def newest(self, lane: int | None) -> tuple[Any, Any]:
        """Return the last observation and info of an environment: the object itself, not a copy.

        Args:
            lane: Its index in `envs`; None: those of all lanes that are stepped as a whole.

        Raises:
            RequestError: FAILED_PRECONDITION: no episode runs in it.
        """

    def check_place(self, lane: int | None = 0) -> None:
        """Raise what `place` would, before anything is changed.

        Raises:
            RequestError: UNIMPLEMENTED: this world cannot follow, as one in real time; or the form of the message does
                not say `places`.
        """

    def place(self, lane: int | None, observation: Any, info: Any, origin: Origin | None = None) -> None:
        """Say that an environment is in another situation now, in which an episode runs.

        The world follows once the request is answered: the episode that ran is over, the client that asks sees the new
        situation as it sees what a reset returns, and so do observers. Call it last: where the request raises
        afterwards, the world does not follow.

        Args:
            lane: Its index in `envs`; None: all lanes are, which are stepped as a whole.
            observation: What it sees there, which `step` goes on from; kept as it is.
            info: The info that goes with it.
            origin: When an environment was in this situation before; None: that is not known.

        Raises:
            RequestError: As `check_place`.
        """


class Callee(Protocol):
    """What is called in the place of an environment, and calls it: `Stage.intercept`."""

    def reset(self, **given: Any) -> tuple[Any, Any]:
        """Reset the environment; as of `gymnasium.Env`."""

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Step the environment; as of `gymnasium.Env`."""

    def called(self, request: Any) -> None:
        """Note that a client calls a method, or reads an attribute; `request` is its `CallRequest`."""

    def changed(self, name: str, value: Any) -> None:
        """Note that a client sets an attribute."""


class MessagePart:
    """The part of a message beside one environment, or the lanes of one world. Subclasses override what they need.

    Made for the first message that reaches the environment, in its thread.

    Args:
        stage: Reaches the environment.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def answer(self, request: bytes) -> bytes:
        """Answer what the handler asks, or where there is none, a client's request.

        What it raises is the answer: a `bridge.errors.RequestError` with its code, anything else as INTERNAL with the
        traceback. Nobody's episode ends by it.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End with the environment, which is closed after this."""


PartMaker: TypeAlias = Callable[[Stage], MessagePart]


class AskedMessage(Protocol):
    """A request that a handler answers, and the environments that its client plays in."""

    client: object
    """Whose request it is: equal for all connections of one client, as far as the server can tell."""
    world: str
    """The name of the world."""
    home: object
    """Where they live: equal for all that share a process."""

    async def run(self, request: bytes) -> bytes:
        """Have the part beside the environment answer a request; return what it returned.

        Raises:
            RequestError: What it raised; or the world is over.
        """

    def charge(self, seconds: float) -> None:
        """Charge the client processor time that was used elsewhere for its request."""


class MessageHandler:
    """The part of a message in a server: one object a server. Subclasses override what they need.

    All of it runs in the serving thread, so it may not take long. Others are served while it awaits `AskedMessage.run`,
    and it may await nothing else: there is no event loop of asyncio.

    Args:
        scheduler: Makes calls later: `call_later(seconds, function)`, and `call_soon_threadsafe` from other threads.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    async def answer(self, request: bytes, asked: AskedMessage) -> bytes:
        """Answer a request of a client; what it raises is the answer, as of `MessagePart.answer`."""
        return await asked.run(request)

    async def joined(self, asked: AskedMessage) -> None:
        """Note that a client that may send the message has joined a world, and says that it is going to."""

    def left(self, client: object) -> None:
        """Note that a client is gone which has sent requests: none of its connections is in a world any more."""

    def ended(self, home: object) -> None:
        """Note that the process of an isolated world is gone, with all that its part had."""

    def properties(self) -> Sequence[Property]:
        """Return what clients can read about it, below `server.messages.NAME`."""
        return ()

    def close(self) -> None:
        """End with the server."""


@dataclasses.dataclass(frozen=True)
class SessionMessage:
    """A message that is served in a session.

    Examples:
        >>> from bridge import MessageForm, MessagePart, SessionMessage
        >>> class Count(MessagePart):
        ...     def answer(self, request):
        ...         return bytes([len(self.stage.envs)])
        >>> urls = "type.googleapis.com/count.Request", "type.googleapis.com/count.Response"
        >>> message = SessionMessage(MessageForm("count", *urls), part=Count)

    Args:
        form: How it travels.
        part: Makes the part beside an environment: a class of `MessagePart`, or a function. For isolated worlds it is
            pickled, as `isolation="process"` does with what makes environments. None: there is none.
        handler: Makes the part in a server: a class of `MessageHandler`, or a function. None: the part beside the
            environment answers alone.
        free_seconds: The processor time of one request that is not charged. Where others wait for the server, a client
            that used more is read later, for as long as it used more. By default none: small requests without end would
            cost their client nothing.
        moment: What `Stage.moment` says; set for each request by what stands between a world and its environment.

    Raises:
        SettingError: It has neither part.
    """

    form: MessageForm
    part: PartMaker | None = None
    handler: Callable[[Scheduler], MessageHandler] | None = None
    free_seconds: float = 0.0
    moment: str = ""

    def __post_init__(self) -> None:
        if self.part is None and self.handler is None:
            raise SettingError(f"expected the message {self.form.name!r} to have a part or a handler, got neither")


@dataclasses.dataclass(frozen=True)
class PartOutcome:
    """What came of a request to a part."""

    answer: bytes
    """What the part returned."""
    placed: tuple[Any, ...] | None = None
    """Observations and infos, as a reset returns them, where environments are in another situation; None: none is."""
    lanes: tuple[int, ...] = ()
    """Which are."""
    origins: tuple[Origin | None, ...] = ()
    """For each of these lanes, when an environment was in its situation before."""
    seconds: float = 0.0
    """Processor time that it took in another thread, or another process."""

"""Messages of features and of other packages, which a joined session answers.

A `SessionMessage` has a part, a handler, or both. The *part* runs beside the environment: in the environment's thread
or, for an isolated world, in the world's process. The *handler*, one object per server, runs in the serving thread: it
knows the clients, keeps data between requests, and may ask the part any number of times. A message that only reads
environments needs no handler; a message that is answered from the handler's data needs no part.

The core forwards bytes, and does not know what a message means. It checks that the sender plays and is alone in its
world, how large the message is, and what it costs.

Another package registers a message by an entry point in its `pyproject.toml`: a function that returns a
`SessionMessage`, and whose keyword arguments an operator may set.

    [project.entry-points."gymnasium_bridge.messages"]
    note = "my_package.note:note_message"

An operator enables it by `serve_gym(…, messages=["note"])` or `gymnasium-bridge serve --message note`.
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
    """The access of a message's part to the environment. Used only in the environment's thread."""

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
        """A name for what the environments have done so far; empty: nothing keeps a record of it.

        A part that puts an environment into this situation later gives it back, as an `Origin`.
        """

    @property
    def fresh(self) -> bool:
        """True until an environment is reset, or a client calls a method or sets an attribute of one."""

    def intercept(self, lane: int, callee: Callee | None) -> None:
        """Call an object in place of an environment; the object calls the environment.

        Args:
            lane: Its index in `envs`.
            callee: The object to call; None: the environment itself again.
        """

    def replace(self, lane: int, env: Any) -> None:
        """Step another environment of the same kind from now on; the previous one is closed.

        Args:
            lane: Its index in `envs`.
            env: The other environment.
        """

    def newest(self, lane: int | None) -> tuple[Any, Any]:
        """Return the last observation and info of an environment: the object itself, not a copy.

        Args:
            lane: Its index in `envs`; None: those of all lanes that are stepped as a whole.

        Raises:
            RequestError: FAILED_PRECONDITION: no episode runs in it.
        """

    def check_place(self, lane: int | None = 0) -> None:
        """Raise the error that `place` would raise, before anything is changed.

        Raises:
            RequestError: UNIMPLEMENTED: this world cannot follow, such as a world in real time; or the form of the
                message does not set `places`.
        """

    def place(self, lane: int | None, observation: Any, info: Any, origin: Origin | None = None) -> None:
        """Report that the part has put an environment into another situation, in which an episode runs.

        The world follows when the request is answered: the previous episode ends, and the client and the observers get
        the new situation in the way they get the result of a reset. Call this method last: if the part raises
        afterwards, the world does not follow.

        Args:
            lane: Its index in `envs`; None: all lanes, which are stepped as a whole.
            observation: The observation in that situation, from which `step` continues; kept without a copy.
            info: The info of that situation.
            origin: When an environment was in this situation before; None: that is not known.

        Raises:
            RequestError: As `check_place`.
        """


class Callee(Protocol):
    """An object that is called in place of an environment, and calls it: see `Stage.intercept`."""

    def reset(self, **given: Any) -> tuple[Any, Any]:
        """Reset the environment, as `gymnasium.Env.reset` does."""

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Step the environment, as `gymnasium.Env.step` does."""

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
        """Answer a request of the handler or, without a handler, of a client.

        An exception is sent as the answer: a `bridge.errors.RequestError` with its code, any other exception as
        INTERNAL with the traceback. No episode ends because of it.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release what the part holds; the environment is closed afterwards."""


PartMaker: TypeAlias = Callable[[Stage], MessagePart]


class AskedMessage(Protocol):
    """A request that a handler answers, with access to the environments in which the client plays."""

    client: object
    """The client that sent the request: equal for all connections of one client, as far as the server can tell."""
    world: str
    """The name of the world."""
    home: object
    """The process of the environments: equal for all environments in one process."""

    async def run(self, request: bytes) -> bytes:
        """Have the part answer a request; return its answer.

        Raises:
            RequestError: The error that the part raised; or the world has ended.
        """

    def charge(self, seconds: float) -> None:
        """Charge the client for processor time that its request used in another thread or process."""


class MessageHandler:
    """The handler of a message: one object per server. Subclasses override what they need.

    All methods run in the serving thread, so they must return soon. Other clients are served while a method awaits
    `AskedMessage.run`; it may await nothing else, because there is no asyncio event loop.

    Args:
        scheduler: Makes calls later: `call_later(seconds, function)`, and `call_soon_threadsafe` from other threads.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    async def answer(self, request: bytes, asked: AskedMessage) -> bytes:
        """Answer a request of a client; an exception is sent as `MessagePart.answer` says."""
        return await asked.run(request)

    async def joined(self, asked: AskedMessage) -> None:
        """Note that a client has joined a world, may send the message, and has announced that it will."""

    def left(self, client: object) -> None:
        """Note that a client that has sent requests has left: none of its connections is in a world any more."""

    def ended(self, home: object) -> None:
        """Note that the process of an isolated world has ended, and with it the data of the message's part."""

    def properties(self) -> Sequence[Property]:
        """Return the properties of the message that clients can read, below `server.messages.NAME`."""
        return ()

    def close(self) -> None:
        """Release what the handler holds; the server is closing."""


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
        form: The name and the types of the message, and the limits of a request.
        part: Makes the part: a subclass of `MessagePart`, or a function. For isolated worlds it is pickled, as the
            functions that make environments are. None: there is no part.
        handler: Makes the handler: a subclass of `MessageHandler`, or a function. None: the part answers alone.
        free_seconds: The processor time of one request that is not charged. While other clients wait for the server,
            the next request of a client that used more is read later, by the time in excess. The default is 0, because
            otherwise endless small requests would cost the client nothing.
        moment: The value of `Stage.moment`, set for each request by the code between a world and its environment.

    Raises:
        SettingError: The message has neither a part nor a handler.
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
    """The outcome of a request to a part."""

    answer: bytes
    """What the part returned."""
    placed: tuple[Any, ...] | None = None
    """Observations and infos, as a reset returns them, of environments in another situation; None: there are none."""
    lanes: tuple[int, ...] = ()
    """The lanes in another situation."""
    origins: tuple[Origin | None, ...] = ()
    """For each of these lanes, when an environment was in this situation before."""
    seconds: float = 0.0
    """Processor time that the request took in another thread, or another process."""

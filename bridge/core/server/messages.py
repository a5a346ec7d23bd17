"""The messages of features and of other packages that a server accepts, and the state of one request."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
import types
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from typing import Any, TypeVar

from bridge.core.encoding.message_form import MESSAGES_KEY
from bridge.core.encoding.properties import ENCODED, NUMBER, TEXT, Property
from bridge.core.logs import SafeLog
from bridge.core.worlds.base import Agent
from bridge.core.worlds.messages import MessageHandler, SessionMessage
from bridge.core.worlds.scheduling import PendingResult, Scheduler
from bridge.errors import Code, RequestError, SettingError

__all__ = ["ClientMessage", "ServedMessage", "ServedMessages", "timed"]

_log = SafeLog(__name__)
# The most faults of one handler that are logged.
_MOST_FAULTS = 10
T = TypeVar("T")


class ServedMessage:
    """A message of a server, with its handler.

    Args:
        message: The message.
        scheduler: The argument of `MessageHandler`.
    """

    def __init__(self, message: SessionMessage, scheduler: Scheduler) -> None:
        self.message = message
        self.handler = MessageHandler(scheduler) if message.handler is None else message.handler(scheduler)
        self._told: set[str] = set()
        """The faults of the handler that were logged."""

    def properties(self) -> list[Property]:
        """Return the message's properties for clients. Invalid ones of the handler are left out, and logged once."""
        # The handler may be another package's, and all clients read the properties: its faults must not fail them.
        try:
            given = [self._checked(each) for each in self.handler.properties()]
        except (Exception, SystemExit) as error:
            self._log_once("properties, which are left out", error)
            return []
        return given

    def tell(self, method: str, *arguments: object) -> None:
        """Call a method of the handler; log an exception once."""
        try:
            getattr(self.handler, method)(*arguments)
        except (Exception, SystemExit) as error:
            self._log_once(method, error)

    def _log_once(self, method: str, error: BaseException) -> None:
        fault = f"the message {self.message.form.name!r}: its handler raised in {method}: {error!r:.200}"
        # Otherwise a client that comes and goes would fill the log.
        if fault not in self._told and len(self._told) < _MOST_FAULTS:
            self._told.add(fault)
            _log.error("%s", fault, exc_info=error)

    def _checked(self, leaf: Property) -> Property:
        """Return a property of the message whose errors say that it belongs to the message."""
        name = self.message.form.name
        above = f"{MESSAGES_KEY}.{name}."
        if not isinstance(leaf, Property) or leaf.kind not in (TEXT, NUMBER, ENCODED) or leaf.in_environment:
            raise TypeError(f"expected bridge.Property objects of a kind text, number or encoded, got {leaf!r:.200}")
        if not leaf.key.startswith(above) or leaf.key == above:
            raise ValueError(f"expected a key that begins with {above!r}, got {leaf.key!r:.200}")

        def guarded(function: Callable[..., T]) -> Callable[..., T]:
            def call(*arguments: object) -> T:
                with _failures_of(f"the property {leaf.key!r} of the message {name!r}"):
                    return function(*arguments)

            return call

        return dataclasses.replace(
            leaf,
            read=None if leaf.read is None else guarded(leaf.read),
            write=None if leaf.write is None else guarded(leaf.write),
        )


class ServedMessages:
    """The messages that a server accepts.

    Args:
        messages: The messages.
        scheduler: The argument of `MessageHandler`.

    Raises:
        SettingError: Two messages have the same name, or the same `type_url`.
    """

    def __init__(self, messages: Iterable[SessionMessage], scheduler: Scheduler) -> None:
        self._of: dict[str, ServedMessage] = {}
        self._clients: dict[object, set[object]] = {}
        """The sessions of each client that has sent a request."""
        for message in messages:
            form = message.form
            if form.request_url in self._of or form.name in self.names:
                raise SettingError(f"expected messages of different names and type_urls, got two of {form.name!r}")
            self._of[form.request_url] = ServedMessage(message, scheduler)

    @property
    def names(self) -> list[str]:
        """The names of the messages."""
        return [served.message.form.name for served in self._of.values()]

    @property
    def urls(self) -> list[str]:
        """The `type_url` of each message's requests."""
        return list(self._of)

    def find(self, url: str) -> ServedMessage | None:
        """Return the message whose requests have this `type_url`; None: there is none."""
        return self._of.get(url)

    def named(self, name: str) -> ServedMessage | None:
        """Return the message with a name; None: there is none."""
        return next((served for served in self._of.values() if served.message.form.name == name), None)

    def asked(self, client: object, session: object) -> None:
        """Note that a session of a client has sent a request."""
        self._clients.setdefault(client, set()).add(session)

    def closed(self, session: object) -> None:
        """Note that a session is over. Handlers are told about clients without another session."""
        for client in [client for client, sessions in self._clients.items() if session in sessions]:
            self._clients[client].discard(session)
            if not self._clients[client]:
                del self._clients[client]
                self._tell("left", client)

    def ended(self, home: object) -> None:
        """Note that the process of an isolated world has ended."""
        self._tell("ended", home)

    def close(self) -> None:
        """Close all handlers; the server is closing."""
        self._tell("close")

    def _tell(self, method: str, *arguments: object) -> None:
        for served in self._of.values():
            served.tell(method, *arguments)

    def properties(self) -> list[Property]:
        """Return the properties of the messages, for clients."""
        text = "the names of the messages that this server takes, separated by spaces"
        found = [Property(MESSAGES_KEY, TEXT, text, lambda: " ".join(self.names))]
        for served in self._of.values():
            found += served.properties()
        return found


class ClientMessage:
    """A request that a handler answers. `bridge.core.worlds.messages.AskedMessage` is its interface.

    Args:
        message: The message.
        agent: The client's agent in the world.
        client: The client that sent the request.
        world: The name of the world.
    """

    def __init__(self, message: SessionMessage, agent: Agent, client: object, world: str) -> None:
        self._message = message
        self._agent = agent
        self.client, self.world = client, world
        self.home = agent.home
        self.placed: int | None = None
        """The state of the agent's sequence, if environments were put into another situation; None: none was."""
        self.seconds = 0.0
        """The processor time used for the request."""

    async def run(self, request: bytes) -> bytes:
        """Have the part in the environment's thread or process answer a request."""
        if self._message.part is None:
            text = f"the message {self._message.form.name!r} has no part beside environments"
            raise RequestError(Code.UNIMPLEMENTED, text)
        outcome = await self._agent.run_message(self._message, request)
        self.charge(outcome.seconds)
        if outcome.placed is not None:
            # At once: whatever the handler does next, the environment is in that situation, and its world follows.
            self.placed = self._agent.place(outcome.placed, outcome.lanes)
        return outcome.answer

    def charge(self, seconds: float) -> None:
        """Charge the client processor time."""
        self.seconds += seconds

    async def announce(self, handler: MessageHandler) -> None:
        """Tell a handler that the client will send its message. The client joins even if the handler raises."""
        try:
            await timed(handler.joined(self), self.charge)
        except RequestError:
            pass  # the client's message will get the error
        except (Exception, SystemExit):  # from another package's code
            _log.exception("the message %r: its handler raised in joined", self._message.form.name)

    async def answer(self, handler: MessageHandler, request: bytes) -> bytes:
        """Have a handler answer a request; raises RequestError for all of the handler's exceptions."""
        name = self._message.form.name
        with _failures_of(f"the handler of the message {name!r}"):
            answering = handler.answer(request, self)
            if not isinstance(answering, types.CoroutineType):
                raise TypeError(f"expected answer to be a coroutine function, which returned {answering!r:.80}")
            answer = await timed(answering, self.charge)
            if not isinstance(answer, (bytes, bytearray)):
                raise TypeError(f"expected bytes as the answer, got {answer!r:.80} of type {type(answer).__name__}")
        return bytes(answer)


@contextlib.contextmanager
def _failures_of(what: str) -> Iterator[None]:
    """Convert exceptions of another package's code to RequestErrors, which name it."""
    try:
        yield
    except (RequestError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        frames = "".join(traceback.format_exception(error))
        text = f"{what} raised {type(error).__name__}: {error}\n{frames}"
        raise RequestError(Code.INTERNAL, text) from error


@types.coroutine
def timed(coroutine: Coroutine[Any, Any, T], spent: Callable[[float], None]) -> Generator[Any, Any, T]:
    """Run a coroutine, and report the processor time that it takes in this thread, without its waits.

    Raises:
        TypeError: It awaits an object that nothing here would resume, such as `asyncio.sleep`.
    """
    while True:
        began = time.thread_time()
        try:
            pending = coroutine.send(None)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            spent(time.thread_time() - began)
        if not isinstance(pending, PendingResult):
            # Nothing would resume it: there is no asyncio event loop here.
            coroutine.close()
            raise TypeError(f"expected that asked.run(…) is awaited, and what builds on it, got {pending!r:.80}")
        yield pending

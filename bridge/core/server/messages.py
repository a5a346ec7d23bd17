"""The messages of features and of other packages that a server takes, and the requests of one at a time."""

from __future__ import annotations

import time
import traceback
import types
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, TypeVar

from bridge.core.encoding.message_form import MESSAGES_KEY
from bridge.core.encoding.properties import TEXT, Property
from bridge.core.logs import SafeLog
from bridge.core.worlds.base import Agent
from bridge.core.worlds.environment import Result
from bridge.core.worlds.messages import MessageHandler, SessionMessage
from bridge.core.worlds.scheduling import Scheduler
from bridge.errors import Code, RequestError, SettingError

__all__ = ["ClientMessage", "ServedMessage", "ServedMessages", "timed"]

_log = SafeLog(__name__)
T = TypeVar("T")


class ServedMessage:
    """A message of a server, with its handler.

    Args:
        message: The message.
        scheduler: As `MessageHandler` takes it.
    """

    def __init__(self, message: SessionMessage, scheduler: Scheduler) -> None:
        self.message = message
        self.handler = MessageHandler(scheduler) if message.handler is None else message.handler(scheduler)


class ServedMessages:
    """The messages that a server takes.

    Args:
        messages: The messages.
        scheduler: As `MessageHandler` takes it.

    Raises:
        SettingError: Two have one name, or one `type_url`.
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
        """The `type_url` of each one's requests."""
        return list(self._of)

    def find(self, url: str) -> ServedMessage | None:
        """Return the message whose requests have this `type_url`; None: there is none."""
        return self._of.get(url)

    def named(self, name: str) -> ServedMessage | None:
        """Return the message of a name; None: there is none."""
        return next((served for served in self._of.values() if served.message.form.name == name), None)

    def asked(self, client: object, session: object) -> None:
        """Note that a session of a client has sent a request."""
        self._clients.setdefault(client, set()).add(session)

    def closed(self, session: object) -> None:
        """Note that a session is over; handlers hear of clients that have no other one."""
        for client in [client for client, sessions in self._clients.items() if session in sessions]:
            self._clients[client].discard(session)
            if not self._clients[client]:
                del self._clients[client]
                self._tell("left", client)

    def ended(self, home: object) -> None:
        """Note that the process of an isolated world is gone."""
        self._tell("ended", home)

    def close(self) -> None:
        """End with the server."""
        self._tell("close")

    def _tell(self, method: str, *arguments: object) -> None:
        for served in self._of.values():
            try:
                getattr(served.handler, method)(*arguments)
            except (Exception, SystemExit):  # another package's: the others are told all the same
                _log.exception("the message %r: its handler raised in %s", served.message.form.name, method)

    def properties(self) -> list[Property]:
        """Return what clients can read about them."""
        text = "the names of the messages that this server takes, separated by spaces"
        found = [Property(MESSAGES_KEY, TEXT, text, lambda: " ".join(self.names))]
        for served in self._of.values():
            found += served.handler.properties()
        return found


class ClientMessage:
    """A request that a handler answers; `bridge.core.worlds.messages.AskedMessage` says what it has.

    Args:
        message: What was asked.
        agent: The client's part in the world.
        client: Whose it is.
        world: The name of the world.
    """

    def __init__(self, message: SessionMessage, agent: Agent, client: object, world: str) -> None:
        self._message = message
        self._agent = agent
        self.client, self.world = client, world
        self.home = agent.home
        self.placed: Result | None = None
        """What the environments see that were put into another situation; None: none was."""
        self.seconds = 0.0
        """Processor time that was used for it."""

    async def run(self, request: bytes) -> bytes:
        """Have the part beside the environment answer a request."""
        if self._message.part is None:
            text = f"the message {self._message.form.name!r} has no part beside environments"
            raise RequestError(Code.UNIMPLEMENTED, text)
        outcome = await self._agent.run_message(self._message, request)
        self.charge(outcome.seconds)
        if outcome.placed is not None:
            # At once: whatever the handler does then, the environment is there, and its world follows.
            self._agent.place(outcome.placed, outcome.lanes)
            self.placed = outcome.placed
        return outcome.answer

    def charge(self, seconds: float) -> None:
        """Charge the client processor time."""
        self.seconds += seconds

    async def announce(self, handler: MessageHandler) -> None:
        """Tell a handler that the client is going to send its message. What it raises keeps nobody from joining."""
        try:
            await timed(handler.joined(self), self.charge)
        except RequestError:
            pass  # the message itself will say so
        except (Exception, SystemExit):  # another package's
            _log.exception("the message %r: its handler raised in joined", self._message.form.name)

    async def answer(self, handler: MessageHandler, request: bytes) -> bytes:
        """Have a handler answer a request; raises RequestError, whatever the handler raises."""
        name = self._message.form.name
        try:
            answer = await timed(handler.answer(request, self), self.charge)
            if not isinstance(answer, (bytes, bytearray)):
                raise TypeError(f"expected bytes as the answer, got {answer!r:.80} of type {type(answer).__name__}")
        except RequestError:
            raise
        except (Exception, SystemExit) as error:
            frames = "".join(traceback.format_exception(error))
            text = f"the handler of the message {name!r} raised {type(error).__name__}: {error}\n{frames}"
            raise RequestError(Code.INTERNAL, text) from error
        return bytes(answer)


@types.coroutine
def timed(coroutine: Coroutine[Any, Any, T], spent: Callable[[float], None]) -> Generator[Any, Any, T]:
    """Run a coroutine, and tell the processor time that it takes in this thread, without what it waits for."""
    while True:
        began = time.thread_time()
        try:
            pending = coroutine.send(None)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            spent(time.thread_time() - began)
        yield pending

"""The server's account of saved states: their owners, limits and timeouts. Runs in the serving thread."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import secrets
import subprocess
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from bridge.core.encoding import values
from bridge.core.encoding.properties import NUMBER, TEXT, Property
from bridge.core.worlds.messages import AskedMessage, MessageHandler
from bridge.core.worlds.scheduling import PendingResult, Scheduler
from bridge.errors import Code, RequestError
from bridge.pb import states_pb2
from bridge.states.bounds import START_KEY, States
from bridge.states.check import Verdict, run_check
from bridge.states.part import drop, forget, left

__all__ = ["StatesHandler"]

_MOST_LANES = 4096
_MOST_KINDS = 1000
_CLIENTS = 2
"""The limits of all clients together, as a multiple of one client's: one client cannot use up everything."""
_MOST_CHARGED = 0.2
"""The most seconds of a check that are charged: checks run in a separate process, one at a time."""
_LOOK = 0.5
"""The longest pause between two searches for expired states, in seconds."""


@dataclasses.dataclass
class _StateEntry:
    """What the server knows of a state; the content is kept beside the environment."""

    home: object
    environment: str
    size: int
    owner: object
    """The client that saved it; it counts towards this client's limits."""
    users: set[object]
    """The connected clients that have saved or restored it."""
    used: float
    """The time of its last use, in seconds of the scheduler."""
    abandoned: float | None = None
    """When the last of its users left; None: a user is connected."""


class _Entries(dict[str, _StateEntry]):
    """The states by identifier, with running totals, so that refusing a save costs the same however many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[object] = Counter()
        """The number of states of each client."""
        self.sizes: Counter[object] = Counter()
        """The bytes of each client's states."""
        self.size = 0
        """The bytes of all states."""

    def add(self, identifier: str, entry: _StateEntry) -> None:
        """Add a state, whose size is not known yet."""
        self[identifier] = entry
        self.counts[entry.owner] += 1

    def resize(self, entry: _StateEntry, size: int) -> None:
        """Set the size of a state."""
        self.size += size - entry.size
        self.sizes[entry.owner] += size - entry.size
        entry.size = size

    def remove(self, identifier: str) -> _StateEntry | None:
        """Remove and return a state; None: there is no such state."""
        entry = self.pop(identifier, None)
        if entry is not None:
            self.resize(entry, 0)
            self.counts[entry.owner] -= 1
            if not self.counts[entry.owner]:
                del self.counts[entry.owner], self.sizes[entry.owner]
        return entry


class StatesHandler(MessageHandler):
    """Answers the message of states.

    Args:
        limits: The limits.
        start: Identifies this start of the server.
        scheduler: The server's scheduler.
    """

    def __init__(self, limits: States, start: str, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._limits = limits
        self._start = start
        self._entries = _Entries()
        self._verdicts: dict[str, PendingResult[Verdict]] = {}
        """The verdict on each kind of environment, by its description; pending while the check runs."""
        self._dropped: dict[object, list[str]] = {}
        """Removed states whose memory has to be freed in the process that keeps them."""
        self._numbers: dict[object, int] = {}
        """The numbers of clients for which actions are kept."""
        self._count = itertools.count()
        self._checks = threading.Lock()
        """Held during a check, so that checks use one processor at most."""
        self._looks = False
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        """The processes of checks, including ended ones."""

    async def answer(self, request: bytes, asked: AskedMessage) -> bytes:
        """Answer a request to save, restore or release states."""
        try:
            message = states_pb2.StatesRequest.FromString(request)
        except DecodeError as error:
            text = f"expected a StatesRequest, got {len(request)} bytes that are none"
            raise RequestError(Code.INVALID_ARGUMENT, text) from error
        await self._give_back(asked)
        kind = message.WhichOneof("kind")
        if kind == "save":
            return await self._save(list(message.save.lanes), asked)
        if kind == "restore":
            return await self._restore(message.restore.branches, asked)
        if kind == "release":
            self._release(message.release.states, asked)
            await self._give_back(asked)
            return states_pb2.StatesResponse().SerializeToString()
        raise RequestError(Code.INVALID_ARGUMENT, "expected to save, restore or release states, got neither")

    async def joined(self, asked: AskedMessage) -> None:
        """Begin to keep the environments' actions, because we do not know yet whether they can be copied."""
        await self._ask(asked, "keep", *self._kept(asked.client))

    async def _ask(self, asked: AskedMessage, name: str, *arguments: object) -> Any:
        return values.decode(await asked.run(values.encode([name, *arguments])))

    # Save

    async def _save(self, lanes: list[int], asked: AskedMessage) -> bytes:
        _check_lanes(lanes)
        # Check this first, so that a client without room left causes no work.
        self._check_room(asked.client, len(lanes), 0)
        environment, way = await self._checked(asked)
        identifiers = [f"{self._start}.{secrets.token_urlsafe(24)}" for _ in lanes]
        # Reserve the entries now: during the call the deputy may serve another request.
        entries = [
            _StateEntry(asked.home, environment, 0, asked.client, {asked.client}, self.scheduler.now()) for _ in lanes
        ]
        for identifier, entry in zip(identifiers, entries, strict=True):
            self._entries.add(identifier, entry)
        try:
            found = await self._ask(asked, "save", lanes, identifiers, way, *self._kept(asked.client))
        except BaseException:
            for identifier in identifiers:
                self._entries.remove(identifier)
            raise
        response = states_pb2.StatesResponse()
        for identifier, entry, (how, size) in zip(identifiers, entries, found, strict=True):
            self._entries.resize(entry, size)
            response.states.add(identifier=identifier, how=how, bytes=size, environment=_digest(environment))
        try:
            self._check_room(asked.client, 0, 0)
        except RequestError:
            # The size is known only after the save. Drop these states again, and no others.
            self._forget(identifiers)
            await self._give_back(asked)
            raise
        self._look_later()
        return response.SerializeToString()

    def _kept(self, client: object) -> tuple[int, int, int]:
        """Return the arguments for keeping actions: the client's number, the most steps and the most bytes."""
        if client not in self._numbers:
            self._numbers[client] = next(self._count)
        return self._numbers[client], self._limits.max_replay_steps, self._limits.max_state_bytes

    async def _checked(self, asked: AskedMessage) -> tuple[str, str]:
        """Return the environments' description and how to save them; raise FAILED_PRECONDITION if impossible."""
        environment, made, problem = await self._ask(asked, "describe", False)
        pending = self._verdicts.get(environment)
        asks = pending is None
        if pending is None:
            environment, made, problem = await self._ask(asked, "describe", True)
            if len(self._verdicts) >= _MOST_KINDS:
                self._verdicts.clear()
            pending = self._verdicts[environment] = PendingResult()
            if problem:
                pending.set_result(Verdict("", problem))
            else:
                arguments = made, pending
                thread = threading.Thread(target=self._check, args=arguments, name="bridge-states-check", daemon=True)
                self._threads = [each for each in self._threads if each.is_alive()]
                self._threads.append(thread)
                thread.start()
        verdict = await pending
        if asks:
            asked.charge(min(verdict.seconds, _MOST_CHARGED))
        if not verdict.way:
            text = f"this environment has no state that can be copied: {verdict.reason}"
            raise RequestError(Code.FAILED_PRECONDITION, text)
        return str(environment), verdict.way

    def _check(self, made: bytes, verdict: PendingResult[Verdict]) -> None:
        """Check a kind of environment. Runs in a separate thread, which waits for the process of the check."""
        with self._checks:
            try:
                found = Verdict("", "the server ends") if self._closed else run_check(made, self._started)
            except Exception as error:  # such as a full disk: the waiting client is told
                found = Verdict("", f"its kind could not be checked: {error!r}")
        self.scheduler.call_soon_threadsafe(partial(verdict.set_result, found))

    def _started(self, process: subprocess.Popen[bytes]) -> None:
        self._processes.append(process)
        if self._closed:
            process.kill()

    def _check_room(self, client: object, states: int, size: int) -> None:
        """Raise RESOURCE_EXHAUSTED if this many more states or bytes exceed a limit."""
        limits = self._limits
        entries = self._entries
        for who, count, held, times in (
            ("this client has", entries.counts[client], entries.sizes[client], 1),
            ("all clients have", len(entries), entries.size, _CLIENTS),
        ):
            if count + states > limits.max_states * times:
                more = f"of at most {times} times max_states={limits.max_states}" if times > 1 else ""
                raise _full(f"{who} {count} states {more or f'of at most max_states={limits.max_states}'}")
            taken = held + size
            if taken > limits.max_state_bytes * times:
                most = f"max_state_bytes={limits.max_state_bytes}"
                raise _full(f"{who} states of {taken} bytes, of at most {f'{times} times ' if times > 1 else ''}{most}")

    # Restore

    async def _restore(self, branches: Iterable[Any], asked: AskedMessage) -> bytes:
        plan = [(one.state, one.lane, one.seed if one.HasField("seed") else None) for one in branches]
        _check_lanes([lane for _, lane, _ in plan])
        (environment, *_) = await self._ask(asked, "describe", False)
        for identifier, _, _ in plan:
            entry = self._entries.get(identifier)
            if entry is None:
                raise self._gone(identifier)
            if entry.home != asked.home:
                text = "the state is kept in the process of another world: restore it where it was saved"
                raise RequestError(Code.FAILED_PRECONDITION, text)
            if entry.environment != environment:
                text = "the state is of another environment, or of one with other arguments or wrappers"
                raise RequestError(Code.FAILED_PRECONDITION, text)
        self._use([identifier for identifier, _, _ in plan], asked)
        done = await self._ask(asked, "restore", [list(one) for one in plan], *self._kept(asked.client))
        while not done:
            # Serve other requests between two slices of a replay.
            pause: PendingResult[None] = PendingResult()
            self.scheduler.call_later(0.0, partial(pause.set_result, None))
            await pause
            done = await self._ask(asked, "go_on")
        return states_pb2.StatesResponse().SerializeToString()

    def _gone(self, identifier: str) -> RequestError:
        start = identifier.partition(".")[0]
        if start != self._start:
            text = "there is no such state here: it was saved at another server, or before this one was started"
        else:
            text = "there is no such state: it was released, or its time is over, or its world's process is gone"
        return RequestError(Code.NOT_FOUND, text)

    def _use(self, identifiers: Iterable[str], asked: AskedMessage) -> None:
        for identifier in identifiers:
            entry = self._entries[identifier]
            entry.users.add(asked.client)
            entry.used, entry.abandoned = self.scheduler.now(), None

    # The end of states

    def _release(self, identifiers: Sequence[str], asked: AskedMessage) -> None:
        # Knowing the identifier is the right to use a state, and so to release it.
        self._forget([identifier for identifier in identifiers if identifier in self._entries])

    def _forget(self, identifiers: Iterable[str]) -> None:
        for identifier in identifiers:
            entry = self._entries.remove(identifier)
            if entry is not None:
                self._dropped.setdefault(entry.home, []).append(identifier)

    async def _give_back(self, asked: AskedMessage) -> None:
        """Free the memory of removed states in the process of this request's world."""
        identifiers = self._dropped.pop(asked.home, None)
        if identifiers:
            await self._ask(asked, "drop", identifiers)

    def left(self, client: object) -> None:
        """Start the timeout of states that only this client used."""
        number = self._numbers.pop(client, None)
        if number is not None:
            left(self._start, number)
        now = self.scheduler.now()
        for entry in self._entries.values():
            entry.users.discard(client)
            if not entry.users and entry.abandoned is None:
                entry.abandoned = now
        self._look_later()

    def ended(self, home: object) -> None:
        """Remove the states of a process that has ended."""
        for identifier in [one for one, entry in self._entries.items() if entry.home == home and home != _here()]:
            self._entries.remove(identifier)
        if home != _here():
            self._dropped.pop(home, None)

    def _look_later(self) -> None:
        """Schedule a search for expired states, as long as there are states."""
        if self._looks or self._closed or not self._entries:
            return
        self._looks = True
        limits = self._limits
        pause = min(_LOOK, limits.state_timeout / 2, limits.state_abandoned_timeout / 2)
        self.scheduler.call_later(pause, self._look)

    def _look(self) -> None:
        self._looks = False
        now, limits = self.scheduler.now(), self._limits
        over = [
            identifier
            for identifier, entry in self._entries.items()
            if now - entry.used >= limits.state_timeout
            or (entry.abandoned is not None and now - entry.abandoned >= limits.state_abandoned_timeout)
        ]
        self._forget(over)
        if _here() in self._dropped:
            drop(self._start, self._dropped.pop(_here()))
        self._look_later()

    def properties(self) -> list[Property]:
        """Return the properties that clients can read."""
        counts = {
            "states": lambda: len(self._entries),
            "bytes": lambda: self._entries.size,
            "max_states": lambda: self._limits.max_states,
            "max_state_bytes": lambda: self._limits.max_state_bytes,
        }
        texts = {
            "states": "how many states of environments are saved",
            "bytes": "the approximate memory of all states, in bytes",
            "max_states": "the most states of one client",
            "max_state_bytes": "the most bytes of the states of one client",
        }
        return [
            Property(
                START_KEY, TEXT, "identifies this start of the server, to which its states belong", lambda: self._start
            ),
            *(Property(f"server.messages.states.{name}", NUMBER, texts[name], read) for name, read in counts.items()),
        ]

    def close(self) -> None:
        """Drop all states."""
        self._closed = True
        for process in self._processes:
            process.kill()
        for thread in self._threads:
            thread.join(_LOOK)
        self._entries.clear()
        forget(self._start)


def _here() -> object:
    """Return the home of environments in this process."""
    return os.getpid()


def _check_lanes(lanes: Sequence[int]) -> None:
    if not lanes or len(lanes) > _MOST_LANES or len(set(lanes)) != len(lanes):
        raise RequestError(Code.INVALID_ARGUMENT, f"expected different lanes, one to {_MOST_LANES} of them")


def _full(text: str) -> RequestError:
    remedy = "release() states that are not needed any more, or start the server with larger limits"
    return RequestError(Code.RESOURCE_EXHAUSTED, f"{text}; {remedy}")


def _digest(environment: str) -> str:
    # A digest, because the arguments may be confidential.
    return hashlib.sha256(environment.encode()).hexdigest()[:16]

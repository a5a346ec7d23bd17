"""A game whose server is in a process of its own: there it takes the program's thread no time.

Python runs one thread of a process at a time, and may let another one wait for milliseconds. So each process has a
`Handover`, and what passes between the two lies in shared memory. The program leaves its news in a few slots, and says
in a pipe which; where none is free, they wait in its own hand-over, and are put together there, as for a server that
is slow. What the server has chosen stands on a board, the newest choice alone, at which the program looks in each
exchange: neither end waits for the other, and no thread of ours runs in the program but one that waits for the
process's end.

The child is a fresh interpreter, as those of `processes=` are: no main module is imported again. What it serves comes
through its standard input, from its own parent; it ends when that ends, so it never outlives the program.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import io
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import Any, NoReturn

import cloudpickle
import numpy as np

from bridge.core.ownership import forget_in_child, leak
from bridge.core.server.core_server import SWITCH_INTERVAL
from bridge.errors import ClosedError, Code, RequestError, SettingError
from bridge.game.handover import Choice, Handover, News

__all__ = ["GameProcess", "run_child"]

_CHILD = "import sys; sys.path[:] = {path!r}; from bridge.game.process import run_child; run_child()"
_START_TIMEOUT = 120.0
_END_TIMEOUT = 15.0
"""Seconds that the process has to answer, and to end once it was told to."""
_PATIENCE = 0.5
"""Seconds that a program whose wait is over gives the server to hear of that."""
_SLOTS = 4
"""Messages of the program that the server has not taken yet, at most; each has a slot."""
_BOARD = 1 << 24
"""Bytes of the board; the system takes memory for those alone that are written."""
_HEAD = struct.Struct("=QQII")
"""How many messages the program has left, and the server has taken; the size and the checksum of the choice below."""
_TAKEN, _CHOICE = 8, 16
"""Where the second and the third of them are."""
_TOLD = ("waits", "waiting", "ignored", "last", "interval", "rounds")
"""What the server's hand-over has from the program's, beside news."""


class GameProcess:
    """A server in a process of its own, from the program's side. Its attributes and methods are those of the server.

    Args:
        serve: Called there, with the hand-over and the arguments; returns the server, which runs.
        defaults: The actions of agents that have none, by name.
        arguments: Travel by value.

    Raises:
        SettingError: It cannot be served, or not be sent to another process.
    """

    def __init__(self, serve: Callable[..., Any], defaults: Mapping[str, Any], *arguments: Any) -> None:
        self._board = SharedMemory(create=True, size=_BOARD)
        self.handover = _ProgramHandover(defaults, self._board, self._say)
        try:
            order = cloudpickle.dumps((self._board.name, serve, defaults, arguments))
        except Exception as error:
            self.handover.free()
            raise SettingError(f"process=True: what is served cannot be sent to another process: {error!r}") from error
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asking, self._saying, self._stopping = threading.Lock(), threading.Lock(), threading.Lock()
        self._ended, self._asked = False, 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C in the terminal goes to the program, which then closes the game.
            start_new_session=os.name == "posix",
        )
        self._reader = threading.Thread(target=self._read, name="bridge-game", daemon=True)
        self._reader.start()
        forget_in_child(self)
        atexit.register(self.stop)
        try:
            with contextlib.suppress(OSError):  # it died at once, which the answer tells
                self._process.stdin.write(order)  # type: ignore[union-attr]
                self._process.stdin.flush()  # type: ignore[union-attr]
            self._answer(_START_TIMEOUT)
        except (ClosedError, TimeoutError) as error:
            self.stop()
            raise SettingError(f"process=True: the server did not start: {error}") from error
        except BaseException:
            self.stop()
            raise

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = self._ask(name)
        return (lambda *given, **named: self._ask(name, given, named)) if found is _Method else found

    def stop(self, grace: float = 0.0) -> None:
        """Stop the server, and wait for its process. May be called twice.

        Args:
            grace: Seconds that clients have to leave.
        """
        with self._stopping:
            if self._ended:
                return
            self.handover.close()
            with contextlib.suppress(ClosedError, TimeoutError):
                self._ask("stop", (grace,), {}, grace)
            self._ended = True
            with contextlib.suppress(OSError):
                self._process.stdin.close()  # type: ignore[union-attr]
            try:
                self._process.wait(_END_TIMEOUT)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._reader.join(_END_TIMEOUT)
            self._process.stdout.close()  # type: ignore[union-attr]
            self.handover.free()
            atexit.unregister(self.stop)

    def after_fork(self) -> None:
        """In a forked process: leave the server to the parent process, and do not keep it alive when that dies."""
        atexit.unregister(self.stop)
        leak(self._process)  # the lock of its stdout is held by a thread that only the parent has
        self._ended, self._stopping = True, threading.Lock()
        null = os.open(os.devnull, os.O_RDWR)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                os.dup2(null, pipe.fileno(), inheritable=False)
        os.close(null)

    def __repr__(self) -> str:
        return f"GameProcess({'stopped' if self._ended else self._process.pid})"

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    # What passes through the pipes

    def _say(self, *what: Any) -> None:
        with self._saying, contextlib.suppress(OSError, ValueError):  # its end is told by what it says last
            pickle.dump(what, self._process.stdin)  # type: ignore[arg-type]
            self._process.stdin.flush()  # type: ignore[union-attr]

    def _read(self) -> None:
        """Wait for what the process says, until it ends."""
        with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                kind, *what = pickle.load(self._process.stdout)  # type: ignore[arg-type]
                if kind == "chosen":
                    self.handover.chosen()
                else:
                    self._answers.put((kind, *what))
        if not self.handover.closed:
            self.handover.ended = f"the server's process has ended by itself, with {self._process.wait()}"
            self.handover.close(RequestError(Code.UNAVAILABLE, self.handover.ended))
        self._answers.put(None)

    def _ask(self, name: str, given: Any = None, named: Any = None, patience: float = 0.0) -> Any:
        with self._asking:
            if self._ended:
                raise ClosedError("this game was closed; serve_game() makes another one")
            self._asked += 1
            self._say("ask", self._asked, name, given, named)
            return self._answer(_END_TIMEOUT + patience)

    def _answer(self, timeout: float) -> Any:
        number, until = -1, time.monotonic() + timeout
        while number != self._asked:  # that of a question before came after its deadline
            try:
                answer = self._answers.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"the server's process has not answered within {timeout:g} s") from None
            if answer is None:
                self._answers.put(None)  # whoever asks next is told, too
                raise ClosedError(f"{self.handover.ended}; serve_game() makes another one")
            kind, number, value = answer
        if kind == "error":
            raise value
        return value


class _Method:
    """Stands for a method of the server."""


class _ProgramHandover(Handover):
    """The program's end."""

    def __init__(self, defaults: Mapping[str, Any], board: SharedMemory, say: Callable[..., None]) -> None:
        super().__init__(defaults)
        self.wakes = True
        self.notify = self.began = self._send
        self._board, self._say = board, say
        self._read_head = bytes(_HEAD.size - _CHOICE)  # nothing was chosen
        self._slots: list[SharedMemory | None] = [None] * _SLOTS
        self._sent = 0

    def exchange(self, news: News | None, begins: bool, wait: bool, timeout: float | None) -> Choice:
        """Leave news, and take what to do next."""
        with self._changed:
            self._look()
            choice = super().exchange(news, begins, wait, timeout)
            if wait or news is None:
                self._send()  # what it took
            return choice

    def ignore(self) -> None:
        """Note an exchange of a program that has not looked whether a round is to begin."""
        super().ignore()
        self._send()

    def chosen(self) -> None:
        """Take what the server has chosen, for which the program waits."""
        with self._changed:
            self._look()
            self._changed.notify_all()

    def close(self, reason: RequestError | None = None) -> None:
        """End it at both ends."""
        super().close(reason)
        self._say("close", reason)

    def free(self) -> None:
        """Give the memory back; there is no further exchange."""
        with self._changed:
            for memory in (self._board, *filter(None, self._slots)):
                memory.close()
                memory.unlink()
            self._slots = []

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> None:
        def there() -> bool:
            if self.queued:  # there was no slot for the news
                self._send()
            return ready()

        super()._wait(there, timeout)
        if not self._offered and not self.closed:
            # What was chosen until the server knows that nobody waits any more is taken: it counts on that.
            self._send()
            until = time.monotonic() + _PATIENCE
            while self._slots and _on_their_way(self._board) and time.monotonic() < until:
                self._changed.wait(0.001)
            self._look()

    def _look(self) -> None:
        """Take the newest choice from the board, if there is one."""
        if not self._slots:
            return
        head = bytes(_bytes_of(self._board)[_CHOICE : _HEAD.size])
        if head == self._read_head:
            return
        size, check = struct.unpack("=II", head)
        body = bytes(_bytes_of(self._board)[_HEAD.size : _HEAD.size + size])
        if not size or zlib.crc32(body) != check:
            return  # it is being written; the next look will find it
        self._read_head = head
        rounds, number, actions, seed, options = pickle.loads(body)
        # What was chosen before the server knew of the round that has begun is not for this one.
        if rounds == self.rounds:
            self._next = self.default if number == 0 else Choice(actions, seed, options, number=number)
            self._offered = number > 0

    def _add(self, news: News) -> None:
        if self.queued or not self._has_slot:
            super()._add(news)
        else:
            self._leave(news)

    @property
    def _has_slot(self) -> bool:
        return bool(self._slots) and _on_their_way(self._board) < _SLOTS

    def _send(self) -> None:
        """Leave the state, and the oldest news; and further ones, as long as slots are free."""
        with self._changed:
            while self._has_slot:
                self._leave(self.read())
                if not self.queued:
                    return

    def _leave(self, news: News | None) -> None:
        """Leave news in a slot, with the state."""
        under, taken = (self.taken, self.taken) if news is None else (news.under, news.next or self.taken)
        state = {name: getattr(self, name) for name in _TOLD}
        numbers = [None if choice is None else choice.number for choice in (under, taken)]
        buffers: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        plain = None if news is None else dataclasses.replace(news, under=None, next=None)
        _Pickler(file, 5, buffer_callback=buffers.append).dump((state, numbers, plain))
        parts = [file.getbuffer(), *(buffer.raw() for buffer in buffers)]
        memory = self._slot(sum(part.nbytes for part in parts))
        start = 0
        for part in parts:
            _bytes_of(memory)[start : start + part.nbytes] = part
            start += part.nbytes
        self._sent += 1
        _write(self._board, 0, struct.pack("=Q", self._sent))
        self._say("news", memory.name, [part.nbytes for part in parts])

    def _slot(self, size: int) -> SharedMemory:
        index = self._sent % _SLOTS
        memory = self._slots[index]
        if memory is None or memory.size < size:
            if memory is not None:
                memory.close()
                memory.unlink()
            memory = self._slots[index] = SharedMemory(create=True, size=size + size // 2)
        return memory


class _Pickler(pickle.Pickler):
    """Passes arrays by their memory, those too whose axes are in another order, as pygame's are."""

    def reducer_override(self, given: Any) -> Any:
        """Return how an array in another order is made of one in the usual order."""
        if (
            type(given) is not np.ndarray
            or given.dtype.hasobject
            or given.flags.c_contiguous
            or given.flags.f_contiguous
        ):
            return NotImplemented
        order = sorted(range(given.ndim), key=lambda axis: -abs(given.strides[axis]))
        return np.transpose, (
            np.ascontiguousarray(given.transpose(order)),
            [order.index(axis) for axis in range(given.ndim)],
        )


class _ServerHandover(Handover):
    """The server's end."""

    pause = 0.001

    def __init__(self, defaults: Mapping[str, Any], board: SharedMemory, say: Callable[..., None]) -> None:
        super().__init__(defaults)
        self._board, self._say = board, say
        self._offers = {0: self.default}
        self._count = self._received = 0

    @property
    def unread(self) -> bool:
        """True if there are news that were not read, or on their way."""
        return super().unread or _on_their_way(self._board) > 0

    def offer(self, choice: Choice) -> None:
        """Have the next exchange take a choice."""
        with self._changed:
            super().offer(choice)
            self._post()

    def withdraw(self, choice: Choice | None = None) -> None:
        """Have the next exchange take the default, in the place of a choice."""
        with self._changed:
            before = self._next
            super().withdraw(choice)
            if self._next is not before:
                self._post()

    def receive(self, state: Mapping[str, Any], numbers: list[int | None], news: News | None) -> None:
        """Take what the program has left."""
        with self._changed:
            first = self.waits is None
            vars(self).update(state)
            if first:
                self.began()
            before, taken = self.taken, self._numbered(numbers[1])
            if news is not None:
                news.under, news.next = self._numbered(numbers[0]), None if self.waiting else taken
            self.taken = taken
            if taken is self._next:
                self._offered = False
            if taken is not None and taken.actions is None and taken is not before:
                self._round_taken(taken)
            newest = numbers[1] or 0
            self._offers = {each: of for each, of in self._offers.items() if each in (0, *numbers) or each > newest}
            if news is not None:
                self._add(news)
            self._received += 1
            _write(self._board, _TAKEN, struct.pack("=Q", self._received))
            if self._offered:
                self._tell()

    def _numbered(self, number: int | None) -> Choice | None:
        if self.taken is not None and self.taken.number == number:
            return self.taken  # as a round that began by itself, of which there are many
        return None if number is None else Choice(None) if number < 0 else self._offers[number]

    def _round_taken(self, taken: Choice) -> None:
        """Offer no longer what was for the round before, or is as the one that has begun by itself."""
        if self._next is taken or self._next.actions is not None or self._next.begins(None, None):
            self._next, self._offered = self.default, False
        else:
            self._post()  # a round that somebody has asked for meanwhile

    def _post(self) -> None:
        """Put on the board what is to be done next."""
        choice = self._next
        if choice.number < 0:
            self._count += 1
            choice.number = self._count
            self._offers[self._count] = choice
        body = pickle.dumps((self.rounds, choice.number, choice.actions, choice.seed, choice.options))
        if len(body) + _HEAD.size > _BOARD:
            text = f"expected actions and options of at most {_BOARD >> 20} MB, got {len(body) >> 20}"
            raise RequestError(Code.RESOURCE_EXHAUSTED, text)
        _write(self._board, _HEAD.size, body)
        _write(self._board, _CHOICE, struct.pack("=II", len(body), zlib.crc32(body)))
        self._tell()

    def _tell(self) -> None:
        """Wake the program where it waits."""
        if self.waiting:
            self.waiting, self.last = False, time.monotonic()
            self._say("chosen")


def _bytes_of(memory: SharedMemory) -> memoryview:
    assert memory.buf is not None, "it was not closed"
    return memory.buf


def _write(memory: SharedMemory, at: int, data: bytes | memoryview) -> None:
    # In one step: `pack_into` writes zeros first, which the other end might read.
    _bytes_of(memory)[at : at + len(data)] = data


def _on_their_way(board: SharedMemory) -> int:
    sent, received, *_ = _HEAD.unpack_from(_bytes_of(board))
    return int(sent - received)


# The server's process


def _opened(name: str) -> SharedMemory:
    """Open memory that the program has made, and frees."""
    if sys.version_info >= (3, 13):
        return SharedMemory(name, track=False)
    memory = SharedMemory(name)
    if os.name == "posix":  # this process would free it at its end
        resource_tracker.unregister(f"/{memory.name.lstrip('/')}", "shared_memory")
    return memory


def run_child() -> NoReturn:
    """Serve what standard input says until it ends: the whole life of a server's process."""
    source, out = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed must not stand between our answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the program's
    sys.setswitchinterval(SWITCH_INTERVAL)
    if sys.platform == "linux":
        # It does not interrupt the program, which wakes it in each frame, where they share a processor.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    saying = threading.Lock()

    def say(*what: Any) -> None:
        with saying, contextlib.suppress(OSError):
            out.write(pickle.dumps(what))
            out.flush()

    server: Any = None
    try:
        board, serve, defaults, arguments = pickle.load(source)
        handover = _ServerHandover(defaults, _opened(board), say)
        server = serve(handover, *arguments)
        say("answer", 0, None)
        _follow(source, handover, server, say)
    except EOFError:
        if server is not None:
            handover.close(RequestError(Code.UNAVAILABLE, "the game's program has ended without closing the game"))
    except BaseException as error:
        say("error", 0, error if isinstance(error, SettingError) else SettingError(repr(error)))
        if not isinstance(error, SettingError):
            raise
    finally:
        if server is not None:
            server.stop()
        sys.stderr.flush()
        os._exit(0)


def _follow(source: Any, handover: _ServerHandover, server: Any, say: Callable[..., None]) -> NoReturn:
    """Do what the program says; EOFError: it is gone."""
    opened: dict[str, SharedMemory] = {}
    while True:
        kind, *what = pickle.load(source)
        if kind == "close":
            handover.close(*what)
        elif kind == "news":
            name, sizes = what
            if name not in opened:
                for other in list(opened) if len(opened) >= 2 * _SLOTS else ():
                    opened.pop(other).close()
                opened[name] = _opened(name)
            start, parts = 0, []
            for size in sizes:
                parts.append(bytearray(_bytes_of(opened[name])[start : start + size]))
                start += size
            handover.receive(*pickle.loads(parts[0], buffers=parts[1:]))
        else:
            number, name, given, named = what
            try:
                found = getattr(server, name)
                answer = found(*given, **named) if given is not None else _Method if callable(found) else found
                say("answer", number, answer)
            except Exception as error:
                say("error", number, error)

"""A game whose server runs in its own process, where its Python code does not delay the program's thread.

Python runs one thread of a process at a time, and may let another thread wait for milliseconds. So each process has one
end of the `Handover`. A thread of the program sends the news, which stays queued in the program's end while the server
is slow. `exchange` itself receives the choices that have arrived, so that it gets the newest one.

The child is a fresh interpreter, like those of `processes=`: it does not import the main module again. The parent sends
what to serve. The child ends when the parent has ended, so it never outlives the program.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import cloudpickle
import numpy as np

from bridge.core.encoding.values import Notes, decode_info, encode_info
from bridge.core.ownership import forget_in_child, leak
from bridge.core.server.core_server import SWITCH_INTERVAL
from bridge.core.server.shutdown import Stopping
from bridge.core.signals import leave_signals
from bridge.errors import ClosedError, Code, RequestError, SettingError
from bridge.game.handover import Choice, Handover, News, ProgramEnd

__all__ = ["GameProcess", "run_child"]

_CHILD = "import sys; sys.path[:] = {path!r}; from bridge.game.process import run_child; run_child({numbers})"
_START_TIMEOUT = 120.0
_END_TIMEOUT = 15.0
"""Seconds that the process has to answer a question, and to end after `stop`."""
_SLICE = 0.1
"""The most seconds to wait for an answer at a time."""


class GameProcess:
    """The program's side of a server in its own process. It has the attributes and methods of the server.

    Args:
        serve: Called in the child with the `Handover` and the arguments; returns a running server.
        defaults: The default action of each agent, by name.
        arguments: Further arguments of `serve`, which are pickled.

    Raises:
        SettingError: The arguments cannot be pickled, or the server does not start.
    """

    def __init__(self, serve: Callable[..., Any], defaults: Mapping[str, Any], *arguments: Any) -> None:
        if getattr(sys, "frozen", False) or not sys.executable:
            # Its executable, if known at all, is the program itself, which would start a second time.
            raise SettingError(
                "process=True: expected a program that Python runs, got an executable that contains Python "
                "(sys.frozen, or no sys.executable); leave process out"
            )
        try:
            order = cloudpickle.dumps((serve, defaults, arguments))
        except Exception as error:
            raise SettingError(f"process=True: what is served cannot be sent to another process: {error!r}") from error
        # Reentrant: a signal handler may close the game while the interrupted thread waits for an answer.
        self._asking, self._stopping = threading.RLock(), Stopping()
        self._asked = 0
        self._answers: dict[int, Sequence[Any]] = {}
        """Answers that are still to be returned, by the number of the question."""
        pairs = socket.socketpair(), socket.socketpair()
        self._news, self._questions = (Connection(ours.detach()) for ours, _ in pairs)
        theirs = [end for _, end in pairs]
        numbers = [end.fileno() for end in theirs]
        for end in theirs:
            end.set_inheritable(True)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD.format(path=sys.path, numbers=numbers)],
            stdin=subprocess.DEVNULL,
            close_fds=os.name == "posix",  # Windows passes all inheritable handles or none
            pass_fds=numbers if os.name == "posix" else (),
            # Ctrl-C in the terminal goes to the program, which then closes the game.
            start_new_session=os.name == "posix",
        )
        self.handover = _LinkedEnd(defaults, self._news, self._process)
        atexit.register(self.stop)
        forget_in_child(self)
        try:
            for end in theirs:
                end.close()
            with contextlib.suppress(OSError):  # if it died at once, `_answer` raises
                self._questions.send_bytes(order)
            self._answer(0, _START_TIMEOUT)
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

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def stop(self, grace: float = 0.0) -> None:
        """Stop the server, and wait for its process to end. May be called twice.

        Args:
            grace: Seconds that clients have to disconnect.
        """
        with self._stopping.begin(grace) as begun:
            if not begun or self._questions.closed:
                return
            self.handover.close()
            try:
                self._ask("stop", (grace,), {}, grace)
            except ClosedError:
                pass
            except TimeoutError:  # it hangs, or is stopped by a signal
                self._process.kill()
            self._questions.close()  # the child ends at the end of this connection
            try:
                self._process.wait(_END_TIMEOUT)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self.handover.end()
            atexit.unregister(self.stop)

    def after_fork(self) -> None:
        """Detach in a forked process: the server belongs to the parent, and must end when the parent ends."""
        atexit.unregister(self.stop)
        leak(self._process)
        self._asking, self._stopping = threading.RLock(), Stopping()
        self.handover.closed = RequestError(Code.FAILED_PRECONDITION, "the game belongs to the parent process")
        self._news.close()
        self._questions.close()

    def __repr__(self) -> str:
        return f"GameProcess({'stopped' if self._questions.closed else self._process.pid})"

    def _ask(self, name: str, given: Any = None, named: Any = None, patience: float = 0.0) -> Any:
        with self._asking:
            number = self._asked = self._asked + 1
            with contextlib.suppress(OSError):  # it has ended: `_answer` raises
                self._questions.send((number, name, given, named))
            return self._answer(number, _END_TIMEOUT + patience)

    def _answer(self, asked: int, timeout: float) -> Any:
        until = time.monotonic() + timeout
        while asked not in self._answers:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the server's process has not answered within {timeout:g} s")
            try:
                # In slices: a signal handler that asks meanwhile may receive this answer, too.
                if self._questions.poll(min(left, _SLICE)):
                    number, *answer = self._questions.recv()
                    self._answers[number] = answer
            except (EOFError, OSError):
                raise ClosedError(f"{self.handover.lost()}; serve_game() makes another one") from None
        value, error = self._answers.pop(asked)
        if error is not None:
            raise error
        return value


class _Method:
    """Marks an attribute of the server that is a method."""


class _LinkedEnd(ProgramEnd):
    """The program's end, whose news is read in another process.

    Args:
        defaults: The default action of each agent, by name.
        link: The connection that sends news and receives choices.
        process: The process at the other end.
    """

    def __init__(self, defaults: Mapping[str, Any], link: Connection, process: subprocess.Popen[bytes]) -> None:
        super().__init__(defaults)
        self._link = link
        self._process = process
        self._ready = threading.Event()
        self.notify = self._ready.set
        self._sender = threading.Thread(target=self._send, name="bridge-game", daemon=True)
        self._sender.start()

    def end(self) -> None:
        """Wait for the sending thread, after the process has ended."""
        self._sender.join(_END_TIMEOUT)
        self._link.close()

    def lost(self) -> str:
        """Close the game because the process has ended by itself, and return the reason."""
        if not self.closed:
            self.ended = f"the server's process has ended by itself, with {self._process.wait()}"
            self.close(RequestError(Code.UNAVAILABLE, self.ended))
        return self.ended

    def _send(self) -> None:
        closed = None
        with contextlib.suppress(OSError):  # `_look` notices that the process has ended
            while closed is None:
                self._ready.wait()
                self._ready.clear()
                closed = self.closed  # read first, so that all news is sent before the close
                while (news := self.read()) is not None:
                    # Infos go through our codec: the child cannot import the program's classes, and locks cannot be
                    # pickled.
                    told = {name: decode_info(encode_info(of, Notes())) for name, of in news.infos.items()}
                    news.infos = {name: of for name, (of, *_) in told.items()}
                    news.notes = [note for _, these, _ in told.values() for note in these]
                    self._link.send_bytes(_packed(news))
            self._link.send_bytes(_packed(closed))

    def _pause(self, seconds: float) -> None:
        self._changed.release()
        try:
            with contextlib.suppress(OSError):  # `_look` notices that the process has ended
                self._link.poll(seconds)
        finally:
            self._changed.acquire()
        self._look()

    def _look(self) -> None:
        try:
            while self._link.poll():
                self._next = self._link.recv()
        except (EOFError, OSError):
            self.lost()


def _packed(news: News | RequestError) -> memoryview:
    file = io.BytesIO()
    _Pickler(file, 5).dump(news)
    return file.getbuffer()


class _Pickler(pickle.Pickler):
    """Packs arrays that are not C-contiguous, such as pygame's pictures, as fast as others."""

    def reducer_override(self, given: Any) -> Any:
        """Pack a C-contiguous copy of an array: NumPy would pack other orders item by item."""
        if type(given) is not np.ndarray or given.flags.c_contiguous:
            return NotImplemented
        return np.ascontiguousarray(given).__reduce_ex__(5)


# The server's process


def run_child(numbers: Sequence[int]) -> NoReturn:
    """Serve the program until it ends. This is the main function of the server's process.

    Args:
        numbers: The file descriptors of two sockets: for news and choices, and for questions and answers.
    """
    with contextlib.suppress(OSError):  # a program without a console has no such descriptors
        os.dup2(2, 1)  # the program's stdout may be a pipe whose reader waits for its end
    leave_signals()  # the program handles them
    sys.setswitchinterval(SWITCH_INTERVAL)
    if sys.platform == "linux":
        # On a shared processor, this process then does not preempt the program, which wakes it in each frame.
        with contextlib.suppress(OSError):  # some sandboxes refuse it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if os.name == "posix":
        numbers = [_moved(number) for number in numbers]
    link, questions = (Connection(number) for number in numbers)
    server: Any = None
    try:
        serve, defaults, arguments = pickle.loads(questions.recv_bytes())
        outbox = _Outbox(link)
        handover = Handover(defaults, outbox.put)
        server = serve(handover, *arguments)
        reader = threading.Thread(target=_read, args=(link, handover, outbox), name="bridge-game", daemon=True)
        reader.start()
        questions.send((0, None, None))
        while True:
            number, name, given, named = questions.recv()
            if name == "stop":
                reader.join(_END_TIMEOUT)  # the reader receives first how the program ended
            questions.send((number, *_answer(server, name, given, named)))
    except (EOFError, OSError):
        if server is not None:
            handover.close(RequestError(Code.UNAVAILABLE, "the game's program has ended without closing the game"))
    except BaseException as error:
        questions.send((0, None, error if isinstance(error, SettingError) else SettingError(repr(error))))
        if not isinstance(error, SettingError):
            raise
    finally:
        if server is not None:
            server.stop()
        if sys.stderr is not None:
            sys.stderr.flush()
        os._exit(0)


def _moved(number: int) -> int:
    """Move a file to another descriptor, which child processes do not inherit.

    `dup` returns the lowest free descriptor. `select` takes none above 1,023, and the program may have that many files
    open.
    """
    moved = os.dup(number)
    os.close(number)
    return moved


def _answer(server: Any, name: str, given: Any, named: Any) -> tuple[Any, Exception | None]:
    try:
        found = getattr(server, name)
        answer = found(*given, **named) if given is not None else _Method if callable(found) else found
        pickle.dumps(answer)
    except Exception as error:
        return None, error
    return answer, None


def _read(link: Connection, handover: Handover, outbox: _Outbox) -> None:
    """Receive the program's news until it closes the game or ends."""
    with contextlib.suppress(EOFError, OSError):
        while isinstance(news := pickle.loads(link.recv_bytes()), News):
            handover.add(news)
            outbox.send()
        handover.close(news)


class _Outbox:
    """Sends the newest choice without blocking: the program may be suspended.

    Args:
        link: The connection to the program.
    """

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._sending = threading.Lock()
        self._newest: Choice | None = None

    def put(self, choice: Choice) -> None:
        """Send a choice now, or when the next news arrives."""
        # The other fields are for the server alone.
        self._newest = Choice(choice.actions, choice.seed, choice.options, choice.number, choice.stamp)
        self.send()

    def send(self) -> None:
        """Send the newest choice if it is unsent and the connection is writable."""
        with self._sending, contextlib.suppress(OSError):
            if self._newest is not None and select.select([], [self._link], [], 0)[1]:
                newest, self._newest = self._newest, None
                self._link.send(newest)

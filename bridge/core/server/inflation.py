"""Compressed requests, inflated step by step in the helper thread. The event loop admits each step.

A server inflates one message at a time. Otherwise many growing messages would all be in memory, each half done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from bridge.core.server.serving import HelperThread
from bridge.core.transport.messages import CompressedMessage, Inflater, RefusedMessage
from bridge.errors import Code, RequestError

__all__ = ["MAX_RATIO", "Inflation"]

MAX_RATIO = 50
"""The largest ratio of a message's size to its compressed size, beyond the first MiB."""
_STEP = 1 << 20


class Inflation:
    """Inflates one message.

    Args:
        message: The message.
        encoding: The compression, one of `bridge.core.transport.messages.encodings`.
        max_message_bytes: The largest message to accept.
        admit: Called by the event loop with the bytes of each step before their memory is allocated, and with the
            negative number when they are released. Raises RequestError.
        helper: Does the work.
        turns: The server's unfinished inflations; the first one is running.
        done: Called by the event loop at the end: with the request (a bytearray that was admitted as a whole), with a
            RefusedMessage if it was not admitted, or with a RequestError if it cannot be read.
    """

    def __init__(
        self,
        message: CompressedMessage,
        encoding: str,
        max_message_bytes: int,
        admit: Callable[[int], None],
        helper: HelperThread,
        turns: deque[Inflation],
        done: Callable[[bytearray | RefusedMessage | RequestError], None],
    ) -> None:
        self._data: bytes | bytearray = message.data
        self._max = max_message_bytes
        # Up to a MiB any ratio is accepted: zeros shrink a thousandfold, and are a valid request.
        self._most = max(_STEP, MAX_RATIO * len(message.data))
        self._admit = admit
        self._helper = helper
        self._turns = turns
        self._done = done
        self._inflater = Inflater(encoding)
        self._rest: bytes | bytearray = self._data
        self._plain = bytearray()
        self._admitted = 0
        self._cancelled = False
        self.seconds = 0.0
        """The processor time used so far."""

    def start(self) -> None:
        """Start when its turn comes."""
        self._turns.append(self)
        if self._turns[0] is self:
            self.go_on()

    def cancel(self) -> None:
        """Cancel the inflation; `done` is not called."""
        self._cancelled = True
        self._give_back()
        self._end_turn()

    def _end_turn(self) -> None:
        # If it waited, the running one continues.
        if self._turns[0] is not self:
            self._turns.remove(self)
            return
        self._turns.popleft()
        if self._turns:
            self._turns[0].go_on()

    def _give_back(self) -> None:
        # Release the bytes admitted for steps, and the received bytes if they were counted as a large message.
        self._admit(-self._admitted)
        if type(self._data) is bytearray:
            self._admit(-len(self._data))
        self._data, self._admitted = b"", 0

    def go_on(self) -> None:
        """Inflate the next step. Called for the first one of `turns`."""
        try:
            # Before each step, not for the whole size: it is unknown, and a client may declare any.
            self._admit(_STEP)
        except RequestError as error:
            # Not at once: if thousands of waiting ones were refused, each would end within the one before.
            self._helper.answer(self._stepped, error)
            return
        self._admitted += _STEP
        self._helper.submit(self._step, self._stepped)

    def _step(self) -> bytes:
        """Inflate as much as one step holds, in the helper thread."""
        began = time.thread_time()
        # The inflater keeps the unused bytes, so all bytes are passed to it in the first step.
        data, self._rest = self._rest, b""
        try:
            return self._inflater.take(data, _STEP)
        finally:
            self.seconds += time.thread_time() - began

    def _stepped(self, result: bytes | Exception) -> None:
        # The helper thread had begun this step: its result is dropped.
        if self._cancelled:
            return
        if isinstance(result, Exception):
            # A RequestError: it was not admitted, or there is no helper thread.
            self._finish(RefusedMessage.of(result) if isinstance(result, RequestError) else _unreadable(str(result)))
            return
        self._plain += result
        size = len(self._plain)
        if size > self._max:
            text = f"a request is larger than max_message_bytes={self._max}, once it is uncompressed"
            self._finish(RequestError(Code.RESOURCE_EXHAUSTED, text))
        elif size > self._most:
            text = f"a compressed request is more than {MAX_RATIO} times larger once it is uncompressed; send it plain"
            self._finish(RequestError(Code.RESOURCE_EXHAUSTED, text))
        elif self._inflater.eof:
            # The request now counts its own size, which its reader releases, so `_give_back` is not called.
            self._admit(size - self._admitted)
            self._admitted = 0
            self._finish(self._plain)
        # All input is used, and the end of the data is missing.
        elif not result:
            self._finish(_unreadable("it is cut off"))
        else:
            self.go_on()

    def _finish(self, result: bytearray | RefusedMessage | RequestError) -> None:
        self._give_back()
        self._plain, self._rest = bytearray(), b""
        self._end_turn()
        self._done(result)


def _unreadable(why: str) -> RequestError:
    return RequestError(Code.INTERNAL, f"a request came compressed that cannot be read: {why}")

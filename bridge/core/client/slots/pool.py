"""A pool of remotes, which deliver to one poller, and the wait for their answers.

`Pool` is enough for one remote environment, or for the agents of one world: failures are raised to the caller.
`bridge.core.client.slots.vector_pool` adds what a vector environment needs: retries, spares, and moving slots.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TypeVar

from bridge.core.client.wire import keepalive
from bridge.core.client.wire.poller import Poller
from bridge.core.client.world.remote import Delivery, Remote
from bridge.core.client.world.session_states import Joined, Lost, Refused, Replied, StepAnswered
from bridge.core.logs import LOOK, tell
from bridge.errors import ConnectionLostError, RefusedError, RemoteError, RemoteTimeoutError

__all__ = ["Awaited", "Pool"]

Awaited = TypeVar("Awaited", Joined, StepAnswered, Replied)
"""An event that a caller waits for."""


class Pool:
    """The remotes of one owner, and the wait for their answers.

    Args:
        timeout: Seconds to wait for any answer.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.poller: Poller[Delivery] = Poller()
        self.turn = threading.Lock()
        """Held during a call of the owner, and by the keepalive thread between calls."""

    def wait(self, remote: Remote, kind: type[Awaited], purpose: str) -> Awaited:
        """Wait for the outstanding answer of a remote.

        Args:
            remote: The remote.
            kind: The expected event.
            purpose: The purpose of the request, for the error, such as "to reset".

        Raises:
            RemoteTimeoutError: There was no answer within `timeout` seconds; the connection is given up.
            RemoteError: The remote refused, or was lost.
        """
        try:
            return self.wait_for_all((remote,), kind, purpose)[remote]
        except RemoteTimeoutError as late:
            remote.give_up(late)  # a late answer must not be taken for a later one
            raise
        except ConnectionLostError as lost:
            # A single environment reconnects only in `reset`; slots of a vector environment reconnect by themselves.
            if kind is Joined:
                raise
            raise ConnectionLostError(lost.url, f"{lost.reason}. Call reset() to connect again") from lost.__cause__

    def join(self, remote: Remote) -> None:
        """Connect a remote, and wait until its world is joined. After an error, which `wait` lists, it is closed."""
        try:
            remote.open()
            self.wait(remote, Joined, "to join a world")
        except BaseException:  # includes KeyboardInterrupt: the caller gets no remote that it could close
            remote.close(0.5)
            raise

    def wait_for_all(
        self, remotes: Iterable[Remote], kind: type[Awaited], purpose: str, *, tolerate: int | None = None
    ) -> dict[Remote, Awaited]:
        """Wait for one answer from each of several remotes, in any order.

        Args:
            remotes: The remotes.
            kind: The expected event of each remote.
            purpose: The purpose of the requests, for the error.
            tolerate: The code of refusals that do not raise; such remotes are not in the result.

        Raises:
            RemoteTimeoutError: Some remotes did not answer within `timeout` seconds; the error names their URLs.
            RemoteError: A remote was lost; or a remote refused, after all others have answered.
        """
        # A dict keeps the order, so that errors name the URLs in the order of the remotes.
        missing = dict.fromkeys(remotes)
        deadline = time.monotonic() + self.timeout
        extra = None
        refused: RemoteError | None = None
        found: dict[Remote, Awaited] = {}
        count = len(missing)
        while missing:
            left = deadline - time.monotonic()
            try:
                source, number, what, arrived = self.poller.get(min(left, LOOK) if kind is Joined else left)
            except queue.Empty:
                if kind is Joined and left > LOOK:
                    # For a single remote, the time left says more than a count.
                    more = f"; {len(found)} of {count} answered" if count > 1 else f", at most {left - LOOK:.0f} s more"
                    tell(f"waiting for {next(iter(missing)).url}{more}")
                    continue
                if extra is None:  # slow to look up, so only after the deadline
                    extra = max(remote.allowance for remote in missing)
                    if extra > 0.0:
                        deadline += extra
                        continue
                urls = ", ".join(dict.fromkeys(remote.url for remote in missing))
                reason = next(iter(missing)).late(purpose, self.timeout).reason
                raise RemoteTimeoutError(urls, reason) from refused
            # Even if nobody waits for this remote: its session matches answers to requests by their order.
            event = source.receive(number, what, arrived)
            if event is None or source not in missing:
                continue
            # The refusal of a question is a `Replied` too; its error is raised below.
            if isinstance(event, kind) and not (isinstance(event, Replied) and event.error):
                del missing[source]
                found[source] = event
                if kind is Joined and self.in_flight:  # messages must be taken between calls too
                    keepalive.add(self)
            elif isinstance(event, (Lost, Refused, Replied)) and event.error is not None:
                if isinstance(event, Lost):
                    raise event.error
                del missing[source]
                if not isinstance(event.error, RefusedError) or event.error.code != tolerate:
                    refused = refused or event.error
        # Only now: otherwise the other answers would be taken for answers to the next requests.
        if refused is not None:
            raise refused
        return found

    # Between calls

    @property
    def in_flight(self) -> bool:
        """True if a world has Steps in flight, so that the keepalive thread takes messages between calls."""
        return self.poller.look_period < math.inf

    def poll_nowait(self) -> float:
        """Do the work between calls, without waiting, unless a call runs. Called by the keepalive thread.

        Returns:
            The seconds until the next call of this method.
        """
        # A running call does the same work. The thread never blocks, because it serves all pools.
        if self.turn.acquire(blocking=False):
            try:
                self._work_between_calls()
            finally:
                self.turn.release()
        return min(keepalive.period(), self.poller.look_period)

    def _work_between_calls(self) -> None:
        """Handle messages that have arrived. The end of a connection is left to the owner's next call."""
        items = self.poller.items
        self.poller.poll_nowait()
        while items and not isinstance(items[0][2], RemoteError):
            source, number, what, arrived = items.popleft()
            try:
                source.receive(number, what, arrived)
            except RemoteError as error:
                # There is no caller to raise it to. The owner's next call finds the connection lost.
                source.give_up(error)

    def corked(self) -> AbstractContextManager[None]:
        """Return a context manager that collects what is sent over shared connections, and sends it at its end."""
        return self.poller.corked()

    def is_frozen(self) -> bool:
        """Take the poller's lock at the end of the interpreter; return True if another thread will never release it."""
        return self.poller.is_frozen()

    def close(self, remotes: Iterable[Remote], timeout: float) -> None:
        """Leave the worlds of remotes and close their connections, within `timeout` seconds in total."""
        if self.in_flight:
            # Frequent polling is needed only for Steps in flight, and there are none any more.
            self.poller.look_seldom()
            keepalive.remove(self)
        leaving, deadline = list(remotes), time.monotonic() + timeout
        for remote in leaving:
            remote.leave()
        for remote in leaving:  # the wait for one remote takes the answers of all
            remote.finish(max(0.0, deadline - time.monotonic()))

"""Waits for remotes: they deliver to one poller, and a pool waits for their answers.

`Pool` is enough for one remote environment, or for the agents of one world, whose failures are the caller's.
`bridge.core.client.slots.vector_pool` adds what a vector environment needs: retries, spares, and slots that come and
go.
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
    """Remotes of one owner, and the wait for their answers.

    Args:
        timeout: Seconds to wait for any answer.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.poller: Poller[Delivery] = Poller()
        self.turn = threading.Lock()
        """Held while a call of the owner runs, and by the thread that works between calls."""

    def wait(self, remote: Remote, kind: type[Awaited], purpose: str) -> Awaited:
        """Wait for the one answer of a remote that is outstanding.

        Args:
            remote: Whose answer.
            kind: The event that it is to be.
            purpose: What was asked, for the error: "to reset".

        Raises:
            RemoteTimeoutError: It did not come within `timeout` seconds; the connection is given up.
            RemoteError: The remote refused, or was lost.
        """
        try:
            return self.wait_for_all((remote,), kind, purpose)[remote]
        except RemoteTimeoutError as late:
            remote.give_up(late)  # an answer that comes yet belongs to nothing any more
            raise
        except ConnectionLostError as lost:
            # Slots of a vector environment are connected again by themselves; a single environment waits for `reset`.
            if kind is Joined:
                raise
            raise ConnectionLostError(lost.url, f"{lost.reason}. Call reset() to connect again") from lost.__cause__

    def join(self, remote: Remote) -> None:
        """Connect a remote, and wait until its world is joined; raises as `wait`, without a connection then."""
        try:
            remote.open()
            self.wait(remote, Joined, "to join a world")
        except BaseException:  # KeyboardInterrupt too: the caller has no remote to close then
            remote.close(0.5)
            raise

    def wait_for_all(
        self, remotes: Iterable[Remote], kind: type[Awaited], purpose: str, *, tolerate: int | None = None
    ) -> dict[Remote, Awaited]:
        """Wait for an answer from each of some remotes, whichever comes first.

        Args:
            remotes: Whose answers.
            kind: The event that each is to be.
            purpose: What was asked, for the error.
            tolerate: The code of refusals that do not raise; such remotes are not in the result.

        Raises:
            RemoteTimeoutError: Some did not come within `timeout` seconds; it names their URLs.
            RemoteError: A remote was lost, or one has refused and all others have answered.
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
                    # Of one, the time that is left says more than a count.
                    more = f"; {len(found)} of {count} answered" if count > 1 else f", at most {left - LOOK:.0f} s more"
                    tell(f"waiting for {next(iter(missing)).url}{more}")
                    continue
                if extra is None:  # looked up here alone: nearly all waits end before
                    extra = max(remote.allowance for remote in missing)
                    if extra > 0.0:
                        deadline += extra
                        continue
                urls = ", ".join(dict.fromkeys(remote.url for remote in missing))
                reason = next(iter(missing)).late(purpose, self.timeout).reason
                raise RemoteTimeoutError(urls, reason) from refused
            # Also for a remote that nobody waits for: its session matches answers to requests by their order.
            event = source.receive(number, what, arrived)
            if event is None or source not in missing:
                continue
            # A refused question is a `Replied` too: its error is raised below.
            if isinstance(event, kind) and not (isinstance(event, Replied) and event.error):
                del missing[source]
                found[source] = event
                if kind is Joined and self.in_flight:  # then what comes is taken also between calls
                    keepalive.add(self)
            elif isinstance(event, (Lost, Refused, Replied)) and event.error is not None:
                if isinstance(event, Lost):
                    raise event.error
                del missing[source]
                if not isinstance(event.error, RefusedError) or event.error.code != tolerate:
                    refused = refused or event.error
        # Only now: what the others answer to this request would be taken for the answers to their next ones.
        if refused is not None:
            raise refused
        return found

    # Between calls

    @property
    def in_flight(self) -> bool:
        """True if a world's Steps are in flight, so that the thread that works between calls takes what comes."""
        return self.poller.look_period < math.inf

    def poll_nowait(self) -> float:
        """Do what is due between calls, without waiting, unless the owner is in one; called by the keepalive thread.

        Returns:
            The seconds until the next look.
        """
        # If the owner is in a call, that call does the same. The thread waits for nobody: it serves all pools.
        if self.turn.acquire(blocking=False):
            try:
                self._work_between_calls()
            finally:
                self.turn.release()
        return min(keepalive.period(), self.poller.look_period)

    def _work_between_calls(self) -> None:
        """Take what has come. How a connection ended is left to the owner's next call."""
        items = self.poller.items
        self.poller.poll_nowait()
        while items and not isinstance(items[0][2], RemoteError):
            source, number, what, arrived = items.popleft()
            try:
                source.receive(number, what, arrived)
            except RemoteError as error:
                # Nobody is here to raise it to. The owner's next call finds the connection lost.
                source.give_up(error)

    def corked(self) -> AbstractContextManager[None]:
        """Return a block in which what is sent over shared connections waits, and leaves in one piece at its end."""
        return self.poller.corked()

    def is_frozen(self) -> bool:
        """Take the poller's lock at the end of the interpreter; True: another thread will never give it back."""
        return self.poller.is_frozen()

    def close(self, remotes: Iterable[Remote], timeout: float) -> None:
        """Leave the worlds of remotes and end their connections, within `timeout` seconds in all."""
        if self.in_flight:
            # The poller looks often only for Steps in flight, of which none is left.
            self.poller.look_seldom()
            keepalive.remove(self)
        leaving, deadline = list(remotes), time.monotonic() + timeout
        for remote in leaving:
            remote.leave()
        for remote in leaving:  # while the first one is waited for, the answers to all are taken
            remote.finish(max(0.0, deadline - time.monotonic()))

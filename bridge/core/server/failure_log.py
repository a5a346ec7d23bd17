"""Logs the errors of environments: in full for the first time, then as a count each minute."""

from __future__ import annotations

import re

from bridge.core.logs import SafeLog
from bridge.core.worlds.scheduling import Scheduler, Timer

__all__ = ["FailureLog"]

_log = SafeLog(__name__)
_INTERVAL = 60.0
# Kinds of failures that are told apart; all further ones are counted as one.
_MOST_KINDS = 100
_FURTHER = "failures of further kinds"
_KIND = re.compile(r"the environment raised \w+ in [^:\n]*")


class FailureLog:
    """Logs failures without letting an environment that only fails fill the log.

    Args:
        scheduler: Tells the counts, a minute after the first failure that was not logged in full.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._counts: dict[str, int] = {}
        """Failures of each kind that was logged, since they were last told."""
        self._timer: Timer | None = None
        self.total = 0
        """All failures that were ever noted."""

    def add(self, world: str | None, message: str) -> None:
        """Note a failure.

        Args:
            world: The name of the world.
            message: What its client is told: a line, and the environment's traceback.
        """
        self.total += 1
        found = _KIND.match(message)
        # Without the exception's text, in which each failure may have a number of its own.
        kind = found[0] if found is not None else message.partition("\n")[0][:80]
        if kind not in self._counts:
            if len(self._counts) < _MOST_KINDS:
                self._counts[kind] = 0
                # Further lines are indented: what a client has sent must not look like a line of the log.
                _log.error("world=%s %s", world, message.replace("\n", "\n  "))
                return
            kind = _FURTHER
        self._counts[kind] = self._counts.get(kind, 0) + 1
        if self._timer is None:
            self._timer = self._scheduler.call_later(_INTERVAL, self._tell)

    def _tell(self) -> None:
        self._timer = None
        for kind, count in self._counts.items():
            if count:
                _log.error("%s: %d times more in the last minute", kind, count)
                self._counts[kind] = 0

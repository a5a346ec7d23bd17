"""What a server is told of worlds in processes of their own; `bridge.core.worlds.isolated` has the processes."""

from __future__ import annotations

import dataclasses
import multiprocessing

from bridge.errors import SettingError

__all__ = ["CALL_TIMEOUT", "Isolation", "start_method"]

CALL_TIMEOUT = 300.0
"""Seconds that one call of an environment may take unless told otherwise."""


@dataclasses.dataclass(frozen=True)
class Isolation:
    """The limits of a world's process."""

    call_timeout: float | None = CALL_TIMEOUT
    """Seconds that one call of its environment may take, its construction too; None: for ever."""
    max_world_bytes: int | None = None
    """Bytes of memory that it may allocate (where the system can limit that: Linux); None: no limit of ours."""
    own_program: bool = False
    """True if it begins without the main module of this program, which `multiprocessing` would import. It has no limit
    of memory, and no client's factory then."""

    @classmethod
    def of(
        cls, isolation: str | None, call_timeout: float | None, max_world_bytes: int | None, *, always: bool = False
    ) -> Isolation | None:
        """Read the keywords of a server; None: its worlds live in its own process.

        Args:
            isolation: `process` or None.
            call_timeout: As above.
            max_world_bytes: As above.
            always: Worlds have processes of their own whatever `isolation` says.

        Raises:
            SettingError: A keyword is out of its range, or stands without `isolation`.
        """
        if isolation not in (None, "process"):
            raise SettingError(f"expected isolation to be 'process' or None, got {isolation!r}")
        if isolation is not None or always:
            return cls(call_timeout, max_world_bytes)
        if call_timeout != CALL_TIMEOUT or max_world_bytes is not None:
            text = "call_timeout and max_world_bytes are for worlds in processes: give isolation='process' too"
            raise SettingError(text)
        return None


def start_method() -> str:
    """Return the start method of world processes: never fork, because this process has threads."""
    # `spawn` and the forkserver import the main module: without the guard each process would start a server, and the
    # processes of that, without end.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SettingError(
            "the main module starts a server while a process of its environments imports it; guard it by "
            "if __name__ == '__main__':"
        )
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"

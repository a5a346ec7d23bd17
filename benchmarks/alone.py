"""One measurement at a time on a machine: each takes a lock, and refuses to begin while another holds one.

A measurement has a file of its own in the temporary directory, locked while it runs: `flock` does that, and on Windows
`msvcrt.locking`. The system frees the lock when the process ends, however it ends, so no file is ever taken for a
measurement that crashed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = ["add_busy", "measuring"]

if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[str], wait: bool) -> bool:
        # Windows keeps others from reading what is locked: this byte is far behind what the file says.
        file.seek(1 << 30)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        finally:
            file.seek(0)
        return True
else:
    import fcntl

    def _lock(file: IO[str], wait: bool) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True


def add_busy(parser: argparse.ArgumentParser) -> None:
    """Add the option `--busy` to a measurement's options."""
    parser.add_argument("--busy", action="store_true", help="measure although other programs run, and mark the results")


@contextmanager
def measuring(parser: argparse.ArgumentParser, busy: bool) -> Iterator[Callable[[], list[str]]]:
    """Keep other measurements off this machine; end the program with an error where one runs already.

    Args:
        parser: Its name names this measurement to others; it shows the error.
        busy: Measure all the same. Both are then told of each other, and say so in their results.

    Yields:
        A function that returns the names of the measurements that ran at the same time so far.
    """
    folder = Path(tempfile.gettempdir(), "gymnasium-bridge-measurements")
    folder.mkdir(exist_ok=True)
    name = f"{parser.prog} (process {os.getpid()}, since {time.strftime('%H:%M:%S')})"
    mine = folder / f"{os.getpid()}-{time.monotonic_ns()}.running"
    with _opened(folder / "beginning.lock") as beginning:
        _lock(beginning, wait=True)  # two that begin at once would each not see the other
        running = [other for other in folder.glob("*.running") if not _left_behind(other)]
        before = [_lines(other)[0] for other in running]
        if running and not busy:
            parser.error(
                f"expected no other measurement on this machine; there is {', '.join(before)}: wait for its end, or "
                "measure anyway with --busy, which marks the results of both"
            )
        for other in running:
            with other.open("a", encoding="utf-8") as file:
                file.write(f"{name}\n")
        claim = _opened(mine)
        _lock(claim, wait=True)
        claim.write(f"{name}\n")
        claim.flush()

    def others() -> list[str]:
        return before + _lines(mine)[1:]

    try:
        yield others
    finally:
        beside = others()
        claim.close()
        mine.unlink(missing_ok=True)
        if beside:
            print(f"machine BUSY, do not compare these figures: {', '.join(beside)} ran at the same time", flush=True)


def _opened(path: Path) -> IO[str]:
    """Open a file that every user of the machine may lock."""
    file = path.open("a+", encoding="utf-8")
    for item, mode in ((path, 0o666), (path.parent, 0o777)):
        if os.stat(item).st_uid == getattr(os, "getuid", lambda: 0)():
            os.chmod(item, mode)
    return file


def _left_behind(path: Path) -> bool:
    """Delete the file of a measurement whose process has ended; return True if it was one."""
    with path.open("r+", encoding="utf-8") as file:
        ended = _lock(file, wait=False)
    if ended:
        path.unlink(missing_ok=True)
    return ended


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()

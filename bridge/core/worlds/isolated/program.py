"""A world's process that begins with a fresh interpreter, and not with the program's main module.

A process of `multiprocessing` imports the main module of the program that starts it. A script that serves without
`if __name__ == "__main__"` would run once more by that.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile

from bridge.core.worlds.isolated.child import main

__all__ = ["Program", "run"]

_CODE = "import sys; from bridge.core.worlds.isolated.program import run; run(*map(int, sys.argv[1:]))"


class Program(subprocess.Popen[bytes]):
    """As much of a `multiprocessing.Process` as `WorldProcess` uses. Needs a system that passes on open files.

    Args:
        sock: The child's end of the pipe.
        recipe: What it makes its environment of: a pickle of ours, in which what is of the main module is by value.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, sock: socket.socket, recipe: bytes) -> None:
        # Only the process holds the other end, so that this one can be read when it is gone, whatever ended it.
        self.sentinel, held = os.pipe()
        """A file that can be read once the process has ended."""
        numbers = (sock.fileno(), held)
        # So that it finds the modules that this program finds, also those beside its script.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        try:
            # By a file: an argument has a limit of size, and a pipe would fill before the process has begun to read.
            with tempfile.TemporaryFile() as file:
                file.write(recipe)
                file.seek(0)
                super().__init__(
                    [sys.executable, "-c", _CODE, *map(str, numbers)],
                    stdin=file,
                    pass_fds=numbers,
                    start_new_session=True,  # Ctrl-C goes to the server alone
                    env={**os.environ, "PYTHONPATH": path},
                )
        except BaseException:
            os.close(self.sentinel)
            raise
        finally:
            os.close(held)

    @property
    def exitcode(self) -> int | None:
        """Its exit code, or the signal that ended it as a negative number; None: it goes on."""
        return self.poll()

    def join(self, seconds: float) -> None:
        """Wait until it has ended, for so many seconds at most."""
        if self.sentinel >= 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(seconds)
                os.close(self.sentinel)
                self.sentinel = -1


def run(sock: int, held: int) -> None:
    """Serve an environment; called in the new interpreter.

    Args:
        sock: The number of the pipe's end.
        held: The number of the writing end of a pipe, which is open as long as the process is there.
    """
    for number in (sock, held):
        # What the environment starts must not hold them open: the server would not see this process end.
        os.set_inheritable(number, False)
    main(socket.socket(fileno=sock), sys.stdin.buffer.read(), None, None, held)

"""A world's process with a fresh interpreter, which does not import the program's main module.

A process of `multiprocessing` imports the main module of the program that starts it. That would run a serving script
again if it has no `if __name__ == "__main__"`.
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
    """The part of a `multiprocessing.Process` that `WorldProcess` uses. Needs a system that passes on open files.

    Args:
        sock: The child's end of the pipe.
        recipe: The recipe of the environment: this package's pickle, with objects of the main module by value.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self, sock: socket.socket, recipe: bytes) -> None:
        # Only the process holds the other end, so that this one becomes readable when it ends, for any reason.
        self.sentinel, held = os.pipe()
        """A file that can be read when the process has ended."""
        numbers = (sock.fileno(), held)
        # So that it finds the modules that this program finds, including those beside its script.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        try:
            # In a file: an argument is limited in size, and a pipe would fill before the process begins to read.
            with tempfile.TemporaryFile() as file:
                file.write(recipe)
                file.seek(0)
                super().__init__(
                    [sys.executable, "-c", _CODE, *map(str, numbers)],
                    stdin=file,
                    pass_fds=numbers,
                    start_new_session=True,  # Ctrl-C goes only to the server
                    env={**os.environ, "PYTHONPATH": path},
                )
        except BaseException:
            os.close(self.sentinel)
            raise
        finally:
            os.close(held)

    @property
    def exitcode(self) -> int | None:
        """Its exit code, or the signal that ended it as a negative number; None: it is running."""
        return self.poll()

    def join(self, seconds: float) -> None:
        """Wait until it has ended, for at most `seconds`."""
        if self.sentinel >= 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(seconds)
                os.close(self.sentinel)
                self.sentinel = -1


def run(sock: int, held: int) -> None:
    """Serve an environment; called in the new interpreter.

    Args:
        sock: The file descriptor of the pipe's end.
        held: The file descriptor of the writing end of a pipe, which stays open as long as the process lives.
    """
    for number in (sock, held):
        # Programs that the environment starts must not hold them open: the server would not see this process end.
        os.set_inheritable(number, False)
    main(socket.socket(fileno=sock), sys.stdin.buffer.read(), None, None, held)

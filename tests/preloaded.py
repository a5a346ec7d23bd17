"""Programs in processes of their own, forked from one that has imported what most of them import.

A fresh interpreter takes half a second of processor time until it serves; a forked one a tenth of that. The process is
its own in every way that a server's tests look at: its main thread, its signals, its files, its end.

One process of the tests starts one such parent, with the first program; it ends with the process of the tests. Tests of
what this package imports have another one, a bare one, that has imported other packages alone.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

AVAILABLE = hasattr(os, "fork") and hasattr(socket, "send_fds")
"""False where processes cannot be forked: programs are started anew there."""
MODULES = (
    "bridge.cli.serve",
    "bridge.facade.make",
    "bridge.facade.serve",
    "bridge.testing",
    "gymnasium.envs.classic_control.cartpole",
    "tests.planned_env",
    "tests.thread_envs",
)
BARE_MODULES = ("gymnasium", "gymnasium.envs.classic_control.cartpole", "google.protobuf.descriptor_pb2")
"""What the bare parent imports: packages that nobody does without."""


class Program:
    """A program that a forked process runs; it has the part of `subprocess.Popen` that tests use.

    Args:
        arguments: `-c` and a script, `-m` and a module, or a file; before it may stand `-W error` or `-W ignore`, and
            after it what `sys.argv` has after its first item.
        pipe: Give it a pipe as its standard input, `stdin`; otherwise it has none.
        session: Run it in a session of its own.
        cwd: Its folder; None: that of the tests.
        env: Its environment variables; None: those of the tests.
        stdout: The file descriptor of its standard output; None: a pipe, which `stdout` reads.
        stderr: The file descriptor of its standard error; None: that of the tests.
        bare: Fork it from a process that has not imported this package.
    """

    def __init__(
        self,
        *arguments: str,
        pipe: bool = False,
        session: bool = False,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        bare: bool = False,
    ) -> None:
        self.returncode: int | None = None
        self._answers, theirs = socket.socketpair()
        files = [theirs.fileno()]
        read, written = os.pipe() if stdout is None else (os.open(os.devnull, os.O_RDONLY), os.dup(stdout))
        self.stdout = open(read, encoding="locale")  # noqa: SIM115 - `subprocess.Popen` leaves it open, too
        self.stdin: io.TextIOWrapper | None = None
        if pipe:
            source, sink = os.pipe()
            self.stdin = open(sink, "w", buffering=1, encoding="locale")  # noqa: SIM115
        else:
            source = os.open(os.devnull, os.O_RDONLY)
        try:
            socket.send_fds(_parent(bare), [b"\n"], [*files, source, written, 2 if stderr is None else stderr])
        finally:
            theirs.close()
            os.close(source)
            os.close(written)
        wanted = {
            "arguments": arguments,
            "session": session,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(env or os.environ),
        }
        self._answers.sendall(f"{json.dumps(wanted)}\n".encode())
        self.pid = self._read()

    def _read(self) -> int:
        line = b""
        while not line.endswith(b"\n"):
            part = self._answers.recv(1)  # the number of the process, and later its exit code
            if not part:
                raise RuntimeError("the parent of forked programs has ended")
            line += part
        return int(line)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self.wait(30)
        if self.stdin is not None:
            self.stdin.close()
        self.stdout.close()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code, which is negative for a signal."""
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = self._read()
            self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    *arguments: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    typed: str = "",
    bare: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and return what it printed; as `subprocess.run`.

    Args:
        arguments: As of `Program`.
        cwd: Its folder; None: that of the tests.
        env: Its environment variables; None: those of the tests.
        timeout: Seconds until it must have ended.
        typed: What it reads from its standard input, which ends after it.
        bare: True if what matters is what it imports: it has imported nothing of this package yet.
    """
    words = [str(word) for word in arguments]
    if not AVAILABLE:
        return subprocess.run(
            [sys.executable, *words],
            input=typed,
            cwd=cwd,
            env=env,
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
        )
    with tempfile.TemporaryFile("w+") as errors:
        with Program(*words, cwd=cwd, env=env, pipe=bool(typed), stderr=errors.fileno(), bare=bare) as program:
            if program.stdin is not None:
                with program.stdin:
                    program.stdin.write(typed)  # less than a pipe holds
            printed = _read_all(program.stdout, timeout)
            code = program.wait(timeout)
        errors.seek(0)
        return subprocess.CompletedProcess(words, code, printed, errors.read())


def _read_all(file: io.TextIOWrapper, timeout: float) -> str:
    """Read what a program prints until its end; raises subprocess.TimeoutExpired where that takes too long."""
    printed, deadline = b"", time.monotonic() + timeout
    while select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(file.fileno(), 65536)
        if not part:
            return printed.decode()
        printed += part
    raise subprocess.TimeoutExpired("a forked program", timeout, printed)


@functools.cache
def _parent(bare: bool) -> socket.socket:
    """Start the process that forks; return the socket to it."""
    mine, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "tests.preloaded", str(theirs.fileno()), *["bare"] * bare],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        cwd=Path(__file__).parent.parent,
        start_new_session=True,  # Ctrl-C is for the tests, which end their programs
    )
    theirs.close()

    def end() -> None:
        mine.close()
        process.wait(30)

    atexit.register(end)
    return mine


def _serve(control: socket.socket, modules: tuple[str, ...]) -> dict[str, Any] | None:
    """Fork for each request; return what to run in a forked process, and None at the end of all."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:  # the core tests have not all packages
            if (error.name or "").startswith(("bridge", "tests")):
                raise  # it has another name now: without it, each program would import it anew
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy all of it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the keepers of programs end by themselves
    while True:
        sent, files, _, _ = socket.recv_fds(control, 1, 4)
        if not sent:
            return None
        if os.fork() == 0:
            control.close()
            return _keep(*files)
        for file in files:
            os.close(file)


def _keep(answers: int, *files: int) -> dict[str, Any]:
    """Fork a program, and say when it has ended; only the program's process returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stream = socket.socket(fileno=answers)
    with stream.makefile() as lines:
        wanted: dict[str, Any] = json.loads(lines.readline())
    pid = os.fork()
    if pid == 0:
        stream.close()
        for standard, file in enumerate(files):
            os.dup2(file, standard)
            os.close(file)
        return wanted
    for file in files:
        os.close(file)
    with contextlib.suppress(OSError):  # nobody waits for it any more
        stream.sendall(f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        stream.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _run(arguments: list[str], session: bool, cwd: str, env: dict[str, str]) -> None:
    """Be the program, as a fresh interpreter would."""
    if session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    named = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[1:1] = [folder for folder in named if folder not in sys.path]
    # The streams of before are those of other files.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    if arguments[0] == "-W":
        sys.warnoptions.append(arguments[1])  # for the processes that it starts
        warnings.simplefilter("error" if arguments[1] == "error" else "ignore")
        arguments = arguments[2:]
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        code, name = rest[0], "<string>"
    else:
        sys.argv = [kind, *rest]
        sys.path[0] = str(Path(kind).resolve().parent)
        code, name = Path(kind).read_text(encoding="utf-8"), kind
        main.__file__ = str(Path(kind).resolve())
    exec(compile(code, name, "exec"), main.__dict__)


if __name__ == "__main__":
    found = _serve(socket.socket(fileno=int(sys.argv[1])), BARE_MODULES if "bare" in sys.argv[2:] else MODULES)
    if found is not None:
        _run(**found)

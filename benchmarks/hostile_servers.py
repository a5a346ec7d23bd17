"""`python -m benchmarks.hostile_servers`: what servers that mean harm cost a client, and `gymnasium-bridge info`.

Server and client are processes of their own. The client makes an environment, resets it and steps it three times, with
messages of at most 32 MiB and a timeout of 5 seconds; `gymnasium-bridge info --all` reads what there is to know.
Measured are the memory that the client takes beyond what it had before, its seconds, and how it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from benchmarks.alone import add_busy, measuring
from benchmarks.attacks import Watch
from bridge import make_remote
from bridge.cli import main as bridge
from tests.hostile_servers import HOSTILE, hostile

TIMEOUT = 5.0
MAX_MESSAGE_BYTES = 32 << 20
_SPAWN = multiprocessing.get_context("spawn")
_MIB = 1 << 20


def serve(name: str, pipe: Any) -> None:
    """Serve until the pipe says so: the whole life of the server's process."""
    with hostile(name) as url:
        pipe.send(url)
        pipe.recv()


def step(url: str, compressed: bool) -> str:
    """Be a client; return how it ended."""
    options: dict[str, Any] = {"compression": "gzip"} if compressed else {}
    try:
        env = make_remote(url, timeout=TIMEOUT, max_message_bytes=MAX_MESSAGE_BYTES, **options)
        with contextlib.closing(env):
            env.reset(seed=0)
            for _ in range(3):
                env.step(0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "as it should"


def info(url: str, compressed: bool) -> str:
    """Look what there is; return how it ended."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = bridge(["info", url, "--all", "--timeout", str(TIMEOUT)])
    return f"exit code {code}, {len(out.getvalue()):,} characters. {errors.getvalue().strip()}"


CLIENTS: dict[str, Callable[[str, bool], str]] = {"client": step, "gymnasium-bridge info": info}


def act(kind: str, url: str, compressed: bool, pipe: Any) -> None:
    """Be a client: the whole life of its process."""
    pipe.send(None)  # everything is imported
    pipe.recv()
    began = time.monotonic()
    said = CLIENTS[kind](url, compressed)
    pipe.send((time.monotonic() - began, said))


def measure(name: str, kind: str) -> tuple[float, float, str]:
    """Return the MiB and seconds that a client took, and how it ended."""
    ours, theirs = _SPAWN.Pipe()
    mine, its = _SPAWN.Pipe()
    server = _SPAWN.Process(target=serve, args=(name, theirs), daemon=True)
    server.start()
    url = ours.recv()
    client = _SPAWN.Process(target=act, args=(kind, url, "compressed" in name, its), daemon=True)
    client.start()
    try:
        mine.recv()
        base = psutil.Process(client.pid).memory_info().rss
        watch = Watch(psutil.Process(client.pid))
        mine.send(None)
        over = mine.poll(120.0)
        watch.close()
        seconds, said = mine.recv() if over else (float("inf"), "**it did not end**")
    finally:
        with contextlib.suppress(OSError):
            ours.send(None)
        for process in (client, server):
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()
    return max(0.0, watch.peak - base) / _MIB, seconds, said


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and print the table; the exit code is 1 where a client took too long."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile_servers", description="Hostile servers.")
    parser.add_argument("servers", nargs="*", metavar="SERVER", help=f"all, or some of: {', '.join(HOSTILE)}")
    add_busy(parser)
    arguments = parser.parse_args(argv)
    for unknown in [name for name in arguments.servers if name not in HOSTILE]:
        parser.error(f"there is no server {unknown!r}; see --help")
    slow = []
    with measuring(parser, arguments.busy):
        print("| server | client: MiB | s | ends with | info: MiB | s | ends with |\n|---|---|---|---|---|---|---|")
        for name in arguments.servers or HOSTILE:
            cells = [name]
            for kind in CLIENTS:
                grown, seconds, said = measure(name, kind)
                text = " ".join(said.split()).replace("|", "/")
                cells += [f"{grown:.0f}", f"{seconds:.1f}", text if len(text) <= 160 else f"{text[:159]}…"]
                if seconds > 3 * TIMEOUT:
                    slow.append(f"{name} ({kind})")
            print(f"| {' | '.join(cells)} |", flush=True)
        print(f"slower than {3 * TIMEOUT:g} s: {', '.join(slow) or 'none'}")
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())

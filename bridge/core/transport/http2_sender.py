"""The sending half of an HTTP/2 connection, without input or output: frames, flow control, header blocks."""

from __future__ import annotations

import struct
from collections.abc import Collection

from bridge.core.transport.frames import (
    FRAME,
    INITIAL_WINDOW,
    MAX_WINDOW,
    MIN_FRAME_SIZE,
    ErrorCode,
    Fields,
    Flag,
    FrameType,
    Http2Error,
    Setting,
    Stream,
    StreamError,
    pack_frame,
)
from bridge.core.transport.header_fields import HeaderWriter
from bridge.core.transport.messages import PREFIX, pack_prefix

__all__ = ["SMALL", "Http2Sender"]

_DATA = FrameType.DATA  # the type of nearly all frames
# Packs a frame's header, and the prefix of the only gRPC message in the frame.
_pack_heads = struct.Struct(f"{FRAME.format}BI").pack
# Every peer accepts a frame of this size. A limit of 256 KiB was tried: the copy saved nothing.
SMALL = 16384
"""Up to this many bytes are sent from one piece of memory. The parts of larger data must not change before sending."""


class Http2Sender:
    """Frames the bytes that one end of a connection sends, as far as the peer's flow-control windows allow.

    Args:
        outgoing: The list to append bytes to send to.
    """

    def __init__(self, outgoing: list[bytes | memoryview]) -> None:
        self.outgoing = outgoing
        self._headers = HeaderWriter()
        self._window = INITIAL_WINDOW
        self._initial_window = INITIAL_WINDOW
        self._max_frame_size = MIN_FRAME_SIZE
        self._waiting: set[Stream] = set()
        self.widened = False
        """True if waiting streams may continue: `take_widened` returns them."""
        # The most that any stream's window exceeds the initial window. With it `on_settings` seldom needs a loop over
        # all streams: a peer may send many SETTINGS frames.
        self._widest = 0

    def frame(self, kind: int, flags: int, number: int, payload: bytes = b"") -> None:
        """Send a frame."""
        self.outgoing.append(pack_frame(kind, flags, number, payload))

    def send_headers(self, stream: Stream, fields: Fields, *, end_stream: bool = False) -> None:
        """Send header fields. Raises ValueError, and sends nothing, if they do not fit a frame."""
        fields = list(fields)
        # Without Huffman codes a field takes at most 12 bytes besides its text. The size is checked before the encoder
        # runs: a block that is encoded but not sent would make the peer's compression table differ from ours.
        size = sum(len(name) + len(value) + 12 for name, value in fields)
        if size > self._max_frame_size:
            raise ValueError(f"expected metadata of less than {self._max_frame_size} bytes, got {size}")
        flags = Flag.END_HEADERS | (Flag.END_STREAM if end_stream else 0)
        self.frame(FrameType.HEADERS, flags, stream.number, self._headers.pack(fields))

    def send_data(self, stream: Stream, parts: list[bytes | memoryview], size: int) -> None:
        """Send `size` bytes. Bytes without a window stay `pending`. After the stream's end nothing is sent."""
        if stream.local_closed:
            return
        if size <= SMALL:  # every peer accepts it in one frame
            # A small frame is joined to one piece of memory, which the socket takes by one `send`.
            if size <= self._window and size <= self._initial_window + stream.send_window and not stream.pending:
                self._window -= size
                stream.send_window -= size
                self.outgoing.append(b"".join((FRAME.pack(0, size, _DATA, 0, stream.number), *parts)))
                return
            # Copied, because the caller may change its arrays before the peer gives more window.
            parts = [b"".join(parts)]
        stream.pending.extend(memoryview(part) for part in parts if len(part))
        self._waiting.add(stream)
        self.send_pending(stream)

    def send_grpc_message(self, stream: Stream, parts: list[bytes | memoryview], size: int) -> None:
        """Send an uncompressed gRPC message of `size` bytes; see `send_data`."""
        whole = size + PREFIX
        # As in `send_data`, but with both headers packed at once: this is the path of nearly each step.
        fits = whole <= SMALL and whole <= self._window and whole <= self._initial_window + stream.send_window
        if fits and not stream.pending and not stream.local_closed:
            self._window -= whole
            stream.send_window -= whole
            self.outgoing.append(b"".join((_pack_heads(0, whole, _DATA, 0, stream.number, 0, size), *parts)))
        else:
            self.send_data(stream, [pack_prefix(0, size), *parts], whole)

    def send_pending(self, stream: Stream) -> bool:
        """Send pending data as far as the peer's windows allow; return True if that ended the stream."""
        pending = stream.pending
        while pending:
            window = min(self._window, self._initial_window + stream.send_window, self._max_frame_size)
            # Below 0 if the peer's settings have made windows smaller since (RFC 9113, 6.9.2).
            if window <= 0:
                return False
            parts, size = [], 0
            while pending and size < window:
                first = pending[0]
                if len(first) > window - size:
                    parts.append(first[: window - size])
                    # Slices of a memoryview copy nothing, however small the windows are.
                    pending[0] = first[window - size :]
                    size = window
                else:
                    parts.append(pending.popleft())
                    size += len(first)
            self.outgoing.append(FRAME.pack(size >> 16, size & 0xFFFF, FrameType.DATA, 0, stream.number))
            self.outgoing += parts
            self._window -= size
            stream.send_window -= size
        self._waiting.discard(stream)
        if not stream.local_closed:
            return False
        trailers, stream.trailers = stream.trailers, None
        if trailers:
            self.send_headers(stream, trailers, end_stream=True)
        else:
            # All data was sent before, without the flag. An empty frame needs no window.
            self.frame(FrameType.DATA, Flag.END_STREAM, stream.number)
        return True

    def discard_pending(self, stream: Stream) -> None:
        """Drop the data that waits for a window."""
        stream.pending.clear()
        self._waiting.discard(stream)

    def reset_stream(self, number: int, code: int) -> None:
        """Send RST_STREAM."""
        self.frame(FrameType.RST_STREAM, 0, number, code.to_bytes(4, "big"))

    def update_window(self, number: int, more: int) -> None:
        """Send WINDOW_UPDATE."""
        self.frame(FrameType.WINDOW_UPDATE, 0, number, more.to_bytes(4, "big"))

    # The peer's windows

    def on_settings(self, payload: bytes, streams: Collection[Stream]) -> None:
        """Apply the peer's settings, which have valid values, and acknowledge them. `streams`: all open streams."""
        for key, value in struct.iter_unpack(">HI", payload):
            if key == Setting.INITIAL_WINDOW_SIZE:
                # A stream's window is relative to this one, so that no loop over all streams is needed.
                if value + self._widest > MAX_WINDOW:
                    # Streams with wider windows may have ended, or have used their windows, since.
                    self._widest = max((stream.send_window for stream in streams), default=0)
                if value + self._widest > MAX_WINDOW:
                    raise Http2Error("a stream's window is wider than HTTP/2 allows", ErrorCode.FLOW_CONTROL_ERROR)
                # Waiting streams are tried after all received frames are read: see `Http2Receiver.receive_data`.
                self.widened = self.widened or value > self._initial_window
                self._initial_window = value
            elif key == Setting.MAX_FRAME_SIZE:
                self._max_frame_size = value
            else:
                self._headers.setting_changed(key, value)
        self.frame(FrameType.SETTINGS, Flag.ACK, 0)

    def on_window_update(self, stream: Stream | None, more: int) -> None:
        """Widen the window of a stream, or of the connection if `stream` is None."""
        if stream is None:
            self._window += more
            if self._window > MAX_WINDOW:
                raise Http2Error("the window is wider than HTTP/2 allows", ErrorCode.FLOW_CONTROL_ERROR)
            self.widened = True
            return
        stream.send_window += more
        if self._initial_window + stream.send_window > MAX_WINDOW:
            raise StreamError(stream.number, "a window wider than HTTP/2 allows", ErrorCode.FLOW_CONTROL_ERROR)
        self._widest = max(self._widest, stream.send_window)

    def take_widened(self) -> list[Stream]:
        """Return the streams with pending data, to try again because a window that they share is wider."""
        self.widened = False
        # Copied, because sending removes streams from the set. Without window of the connection none can send.
        return list(self._waiting) if self._window > 0 else []

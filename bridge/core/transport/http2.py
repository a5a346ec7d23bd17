"""HTTP/2 without input or output (RFC 9113): either end of a connection, and its streams.

What is needed here are streams that are opened once and then carry bytes both ways: no priorities, no push. A frame
costs either end a fraction of what it does through the general library (docs/performance.md). Bytes go in and events
come out; `data_to_send` gives what is to be sent. What the bytes of a stream mean is the business of its reader.
"""

from __future__ import annotations

import struct

from bridge.core.transport.frames import (
    INITIAL_WINDOW,
    MAX_WINDOW,
    MIN_FRAME_SIZE,
    PREFACE,
    ErrorCode,
    Fields,
    FrameType,
    Setting,
    Stream,
)
from bridge.core.transport.http2_receiver import MAX_FRAME_SIZE, Http2Receiver
from bridge.core.transport.http2_sender import Http2Sender

__all__ = ["Http2"]


class Http2(Http2Receiver):
    """One end of a connection.

    Args:
        client: True for the end that opens the streams.
        stream_window: Flow-control window of a stream, in bytes.
        max_streams: On a server: the most streams that may be open at a time.
        max_header_bytes: The largest header block, compressed and decompressed.
        outgoing: Where to append what is to be sent; None: `data_to_send` gives it.
    """

    def __init__(
        self,
        *,
        client: bool,
        stream_window: int = 1 << 26,
        max_streams: int = 1,
        max_header_bytes: int = MIN_FRAME_SIZE,
        outgoing: list[bytes | memoryview] | None = None,
    ) -> None:
        sender = Http2Sender([] if outgoing is None else outgoing)
        super().__init__(client, stream_window, max_streams, max_header_bytes, sender)
        self.outgoing = sender.outgoing
        """Bytes to send; `data_to_send` takes them."""
        self.send_data, self.send_headers = sender.send_data, sender.send_headers
        """Send bytes, and header fields, of a stream: the methods of `Http2Sender`."""
        self.discard_pending = sender.discard_pending
        """Drops what a stream still had to send: `Http2Sender.discard_pending`."""
        settings = [
            (Setting.INITIAL_WINDOW_SIZE, stream_window),
            (Setting.MAX_FRAME_SIZE, MAX_FRAME_SIZE),
            (Setting.MAX_HEADER_LIST_SIZE, max_header_bytes),
            (Setting.ENABLE_PUSH, 0) if client else (Setting.MAX_CONCURRENT_STREAMS, max_streams),
        ]
        if client:
            sender.outgoing.append(PREFACE)
        sender.frame(FrameType.SETTINGS, 0, 0, b"".join(struct.pack(">HI", *setting) for setting in settings))
        # SETTINGS change the windows of streams only, not that of the connection (RFC 9113, 6.9.2).
        sender.update_window(0, MAX_WINDOW - INITIAL_WINDOW)

    def data_to_send(self) -> list[bytes | memoryview]:
        """Return what is to be sent now, in parts."""
        outgoing = self.outgoing[:]
        self.outgoing.clear()
        return outgoing

    def open_stream(self, fields: Fields) -> Stream:
        """Open a stream by its header fields. Raises ValueError where they are too many."""
        stream = Stream(self.streams.last + 2, self._stream_window)
        # Sent before the stream is added: it raises ValueError if the fields are too many.
        self._sender.send_headers(stream, fields)
        return self.streams.open(stream)

    def end_stream(self, stream: Stream, trailers: Fields | None = None) -> None:
        """End the stream once all its data is sent, by trailers if there are some."""
        if not stream.local_closed:
            stream.local_closed = True
            stream.trailers = None if trailers is None else list(trailers)
            self._send_pending(stream)

    def ping(self) -> None:
        """Send PING."""
        self._sender.frame(FrameType.PING, 0, 0, bytes(8))

    def go_away(self, code: int = ErrorCode.NO_ERROR, reason: str = "") -> None:
        """Send GOAWAY: no further streams are accepted, and those that are open go on."""
        self.goaway_sent = True
        # A server opens no streams, so a client names stream 0 as the last one.
        payload = struct.pack(">II", self.streams.last if not self._client else 0, code) + reason.encode()[:1000]
        self._sender.frame(FrameType.GOAWAY, 0, 0, payload)

    def acknowledge_data(self, stream: Stream, size: int) -> None:
        """Give the peer the window again for bytes that were `deferred`."""
        stream.deferred -= size
        # `receive_data` raises the error for a window below 0. The caller here has served a request, and could not
        # handle it.
        if stream.reader is not None and 0 <= stream.recv_window < self._stream_window >> 1 and self._recv_window >= 0:
            self._send_window_update(stream)

    def connection_lost(self) -> None:
        """Free what the streams hold, at once and without the garbage collector."""
        for stream in list(self.streams.values()):
            self._forget(stream, reset=True)
            # A call and its stream refer to each other. Both would stay until the garbage collector runs, although
            # their memory is no longer counted.
            stream.owner = None
        self.frame = None
        self._rest = b""
        self.paused = False

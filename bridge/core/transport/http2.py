"""HTTP/2 without input or output (RFC 9113): either end of a connection, and its streams. `http2_sender.py` sends.

It supports what gRPC needs: streams that are opened once and then carry bytes both ways, without priorities and push. A
frame costs either end a fraction of its cost in the general library (docs/performance.md). Bytes go in, events come
out, and `data_to_send` returns the bytes to send. The reader of a stream interprets its bytes.
"""

from __future__ import annotations

import struct
from typing import Any

from bridge.core.transport.frames import (
    FRAME,
    INITIAL_WINDOW,
    MAX_WINDOW,
    MIN_FRAME_SIZE,
    PREFACE,
    ErrorCode,
    Event,
    Fields,
    Flag,
    FrameType,
    HeadersReceived,
    Http2Error,
    Setting,
    Stream,
    StreamEnded,
    StreamError,
    StreamReset,
    StreamTable,
    check_greeting,
    check_length,
    check_settings,
    check_size,
    has_preface,
    header_fragment,
    padding_of,
    read_goaway,
)
from bridge.core.transport.header_fields import HeaderReader, MalformedHeadersError, check_fields
from bridge.core.transport.http2_sender import Http2Sender

__all__ = ["MAX_FRAME_SIZE", "Http2", "Http2Receiver"]

# The most that RFC 9113 allows. Data is passed on as it arrives, so a large frame takes no more memory than a small
# one, and a large message needs fewer headers.
MAX_FRAME_SIZE = (1 << 24) - 1
"""The most bytes that the peer may send in a DATA frame."""
# The windows of streams limit what a peer may send. With a narrow window for the connection, one call with waiting
# requests would stop all other calls.
_CONNECTION_WINDOW = MAX_WINDOW
_DATA = FrameType.DATA  # each frame is compared with it
# No data has the length -1, so the comparison in `receive_data` fails without a check for None.
_OTHER = (-1, b"", Stream(0, 0))


class _DataFrame:
    """A DATA frame that is not complete."""

    __slots__ = ("end_stream", "left", "padding", "stream")

    def __init__(self, stream: Stream, left: int, padding: int, end_stream: bool) -> None:
        self.stream, self.left, self.padding, self.end_stream = stream, left, padding, end_stream

    def receive_data(self, data: bytes, at: int, events: list[Any]) -> int:
        """Read the frame's bytes from `at` on; return where they end."""
        stream = self.stream
        stop = min(len(data), at + self.left)
        if stream.reader is not None and stop > at:
            stream.reader.receive_data(stream, data, at, stop, events)
        self.left -= stop - at
        # Padding follows the data, and may arrive in later pieces.
        skipped = 0 if self.left else min(self.padding, len(data) - stop)
        self.padding -= skipped
        return stop + skipped


class Http2Receiver:
    """Reads what the peer sends, and sends the answers that HTTP/2 itself requires.

    Args:
        client: True for the end that opens the streams.
        stream_window: Flow-control window of a stream, in bytes.
        max_streams: On a server: the most streams that may be open at a time.
        max_header_bytes: The largest header block, compressed and decompressed.
        sender: The sending half.
    """

    def __init__(
        self, client: bool, stream_window: int, max_streams: int, max_header_bytes: int, sender: Http2Sender
    ) -> None:
        self._client = client
        self._stream_window = stream_window
        self.streams = StreamTable(client=client, max_open=max_streams)
        """The open streams, by number."""
        self.goaway_received: str | None = None
        """The reason why the peer accepts no more streams, if it said so; open streams may continue."""
        self.goaway_sent = False
        """True if this end accepts no more streams."""
        self.replies = 0
        """Frames sent only in answer to the peer's. A client closes the connection if a server reads none of 10,000."""
        self.settings_received = False
        """True if the peer is known to speak HTTP/2."""
        self.resets = 0
        """The number of streams that the peer reset, or that this end reset because of the peer's mistakes."""
        # Unlimited until a setting says otherwise (RFC 9113, 6.5.2).
        self.max_peer_streams = 1 << 31
        """The most streams that the peer accepts at a time, as far as is known."""
        self.error: Http2Error | None = None
        """The error in the bytes after those whose events `receive_data` returned."""
        self.paused = False
        """True if `receive_data(b"")` must be called after the events are handled: there are more bytes."""
        self._headers = HeaderReader(max_header_bytes)
        self._preface = not client
        self._rest = b""
        """The bytes of an incomplete frame."""
        self.frame: _DataFrame | None = None
        """An incomplete DATA frame; None: there is none."""
        self._recv_window = _CONNECTION_WINDOW
        self._sender = sender
        # If the last bytes received were exactly one DATA frame: its size, header and stream. Otherwise a size of -1.
        self._last_frame = _OTHER

    # The ends of streams

    def reset_stream(self, stream: Stream, code: int) -> None:
        """Reset a stream, and drop its pending data. Do nothing if it has ended."""
        if self.streams.get(stream.number) is stream:
            self._sender.reset_stream(stream.number, code)
            self._forget(stream, reset=True)

    def _forget(self, stream: Stream, *, reset: bool) -> None:
        self.streams.close(stream.number, reset=reset)
        # Otherwise `_last_frame` would keep the closed stream, and its call, in memory until the next frame.
        self._last_frame = _OTHER
        self._sender.discard_pending(stream)
        stream.remote_closed = stream.local_closed = True
        stream.trailers = None
        stream.discard()

    def _send_pending(self, stream: Stream) -> None:
        if self._sender.send_pending(stream):
            if stream.remote_closed:
                self._forget(stream, reset=False)
            elif not self._client:  # all is sent; more bytes from the client are not needed
                # With NO_ERROR the client stops sending, and keeps the answer that it got (RFC 9113, 8.1).
                self.reset_stream(stream, ErrorCode.NO_ERROR)

    # Receiving

    @property
    def receives_large(self) -> bool:
        """True if the bytes of a large message are being received. (A large frame may contain many small messages.)"""
        frame = self.frame
        return frame is not None and frame.stream.reader is not None and frame.stream.reader.receives_large

    def get_buffer(self) -> memoryview | None:
        """Return the memory to receive the next bytes into, for `buffer_updated`; None: pass them to `receive_data`.

        The caller must release it before any other call.
        """
        frame = self.frame
        if frame is None or not frame.left or frame.stream.reader is None:
            return None
        buffer = frame.stream.reader.get_buffer()
        # The bytes after the frame are the header of the next one, which must not get into the message's memory.
        return None if buffer is None else buffer[: frame.left]

    def buffer_updated(self, count: int) -> list[tuple[Stream, Event]]:
        """Note that `count` bytes were received into the buffer; return the events that they complete.

        Raises:
            Http2Error: The peer broke the rules of HTTP/2.
        """
        events: list[tuple[Stream, Event]] = []
        frame = self.frame
        if frame is not None:
            frame.left -= count
            if frame.stream.reader is not None:
                frame.stream.reader.buffer_updated(frame.stream, count, events)
            self._on_data_taken(frame, events)
        return events

    def receive_data(self, data: bytes) -> list[tuple[Stream, Event]]:
        """Read bytes; return the events that they complete, each with its stream, in order.

        A server must handle the events up to a new stream before more bytes are read: see `paused`.

        Raises:
            Http2Error: The peer broke the rules of HTTP/2. If there are events before the error, it is set as `error`
                instead.
        """
        events: list[tuple[Stream, Event]] = []
        self.paused = False
        size, head, stream = self._last_frame
        try:
            # This path saves each end 120 of some 1,500 bytecodes per step. It may skip the checks of `_read`: only
            # `_read` sets `_last_frame`, after it checked a frame that left nothing incomplete, and `_read` clears it
            # before it reads other bytes.
            if len(data) == size and data.startswith(head) and stream.reader is not None:
                # One frame with the same header as the one before: the usual case when one step follows the other.
                self._recv_window -= size - 9
                stream.recv_window -= size - 9
                stream.reader.receive_data(stream, data, 9, size, events)
                if stream.recv_window < self._stream_window >> 1 or self._recv_window < _CONNECTION_WINDOW >> 1:
                    self._send_window_update(stream)
                return events
            if self._rest:
                # Joining is cheap: the rest is at most the header of a DATA frame, or another frame within
                # `check_size`.
                data, self._rest = self._rest + data, b""
            if self._preface and has_preface(data):
                self._preface, data = False, data[len(PREFACE) :]
            if self._preface:
                self._rest = data
            elif data:
                self._read(data, events)
        except Http2Error as error:
            # Requests before the mistake are complete, and are served first. Otherwise it would depend on TCP's
            # segments whether they are served.
            if not events:
                raise
            self.error = error
        # Done once per read, not once per frame: a client may send many SETTINGS frames, each with a wider window, and
        # all waiting streams would be tried for each of them.
        if self._sender.widened:
            for stream in self._sender.take_widened():
                self._send_pending(stream)
        return events

    def _read(self, data: bytes, events: list[tuple[Stream, Event]]) -> None:
        size, at = len(data), 0
        self._last_frame = _OTHER
        frame = self.frame
        if frame is not None:
            at = frame.receive_data(data, 0, events)
            self._on_data_taken(frame, events)
        streams, narrow = self.streams, self._stream_window >> 1
        while size - at >= 9 and not self.paused:
            high, low, kind, flags, number = FRAME.unpack_from(data, at)
            length = high << 16 | low
            start = at + 9
            stop = start + length
            # Each condition sends a rarer case to the slower path below, which counts it or finds the error: a closed
            # stream, data before the header fields, a content-length, a frame within a header block.
            if kind == _DATA and not flags and stop <= size:  # nearly all frames
                stream = streams.get(number)
                if (
                    stream is not None
                    and (reader := stream.reader) is not None
                    and stream.headers_received
                    and stream.expected_bytes is None
                    and self._headers.number is None
                ):
                    self._recv_window -= length
                    stream.recv_window -= length
                    reader.receive_data(stream, data, start, stop, events)
                    if start == 9 and stop == size:
                        self._last_frame = size, data[:9], stream
                    if stream.recv_window < narrow or self._recv_window < _CONNECTION_WINDOW >> 1:
                        self._send_window_update(stream)
                    at = stop
                    continue
            # The highest bit is reserved, and ignored (RFC 9113, 4.1).
            number &= MAX_WINDOW
            if not self.settings_received:
                check_greeting(data[at:], kind, flags)
                self.settings_received = True
            # Frames of other types are stored until they are complete, so a frame that is too long is refused by its
            # header.
            if kind != _DATA:
                check_size(kind, length, self._headers.max_bytes)
            self._check_order(kind, number)
            try:
                if kind == _DATA:
                    if flags & Flag.PADDED and size == start:
                        break  # the next byte says how much is padding
                    at = self._begin_data(data, start, length, flags, number, events)
                    continue
                if stop > size:
                    break
                # Set before the frame is handled, so that the loop continues with the next frame after a StreamError.
                at = stop
                self._on_frame(kind, flags, number, data[start:stop], events)
            except StreamError as error:
                self._on_stream_error(error, events)
        self._rest = data[at:]
        # A TLS alert has 7 bytes, less than a frame's header. Without this check the client would wait for more.
        if self._rest and not self.settings_received and self._client:
            check_greeting(self._rest, None, 0)

    def _check_order(self, kind: int, number: int) -> None:
        if self._headers.number is not None and (kind != FrameType.CONTINUATION or number != self._headers.number):
            raise Http2Error("another frame stands within a header block")
        if kind in FrameType.OF_STREAMS:
            if not number:
                raise Http2Error("a frame of a stream names none")
            # A client's HEADERS open a stream, and its PRIORITY may name an idle one (RFC 9113, 5.1).
            if number not in self.streams and (self._client or kind in (FrameType.DATA, FrameType.RST_STREAM)):
                self._check_opened(number)
        elif number and kind in FrameType.OF_CONNECTIONS:
            raise Http2Error(f"a frame about the connection names the stream {number}")

    def _check_opened(self, number: int) -> None:
        if self.streams.is_idle(number):
            raise Http2Error(f"a frame of stream {number}, which was never opened")

    def _on_stream_error(self, error: StreamError, events: list[tuple[Stream, Event]]) -> None:
        """Reset the stream on which the peer broke a rule."""
        # Count it like a reset by the peer: streams that the client makes the server reset ("MadeYouReset") are
        # limited like streams that the client resets itself ("rapid reset").
        self.resets += 1
        self.replies += 1
        self._sender.reset_stream(error.number, error.code)
        stream = self.streams.get(error.number)
        if stream is None:
            # The peer may send more frames on it before it knows: they are ignored, not answered one by one.
            self.streams.note_closed(error.number, reset=True)
        else:
            self._forget(stream, reset=True)
            events.append((stream, StreamReset(error.code, str(error))))

    # Data

    def _begin_data(self, data: bytes, start: int, length: int, flags: int, number: int, events: list[Any]) -> int:
        """Begin a DATA frame whose header ends at `start`; return where the bytes read end."""
        # Padding and dropped data count for flow control too (RFC 9113, 6.9.1).
        self._recv_window -= length
        padding = padding_of(data, start, length) if flags & Flag.PADDED else 0
        start += bool(padding)
        stream = self.streams.get(number)
        if stream is None or stream.remote_closed:
            if not self._client and not self.streams.was_reset(number):
                error = StreamError(number, f"data came on stream {number}, which has ended", ErrorCode.STREAM_CLOSED)
                self._on_stream_error(error, events)
            stream = Stream(number, length)  # data sent before the peer knew of the reset is dropped
            stream.remote_closed = True
        elif not stream.headers_received:
            raise Http2Error("data came before the header fields")
        elif stream.expected_bytes is not None:
            stream.expected_bytes -= length - padding
        stream.recv_window -= length
        # `padding` includes its length byte, which was read already.
        frame = self.frame = _DataFrame(stream, length - padding, max(0, padding - 1), bool(flags & Flag.END_STREAM))
        stop = frame.receive_data(data, start, events)
        self._on_data_taken(frame, events)
        return stop

    def _on_data_taken(self, frame: _DataFrame, events: list[Any]) -> None:
        """Note that bytes of a DATA frame were read; after the last of them the stream may end."""
        stream = frame.stream
        # Wait until half of a window is used: otherwise each frame with data would be answered by a WINDOW_UPDATE.
        if stream.recv_window < self._stream_window >> 1 or self._recv_window < _CONNECTION_WINDOW >> 1:
            self._send_window_update(stream)
        if frame.left or frame.padding:
            return
        self.frame = None
        if (stream.expected_bytes or 0) < 0:
            self._on_stream_error(StreamError(stream.number, "more data came than content-length says"), events)
        # The stream is closed already if it was reset between two pieces of the frame, or is the dummy of
        # `_begin_data`.
        elif frame.end_stream and not stream.remote_closed:
            self._end_remote(stream, events)

    def _end_remote(self, stream: Stream, events: list[Any], trailers: HeadersReceived | None = None) -> None:
        """Note that the peer sends nothing more on a stream."""
        if stream.expected_bytes:
            self._on_stream_error(StreamError(stream.number, "less data came than content-length says"), events)
            return
        stream.remote_closed = True
        if stream.reader is not None:
            stream.reader.end(stream, events)
        stream.discard()
        events.append((stream, trailers or StreamEnded()))
        if stream.local_closed and not stream.pending:
            self._forget(stream, reset=False)

    def _send_window_update(self, stream: Stream) -> None:
        """Give the peer windows for the bytes that were read."""
        # This is the only check: a window below 0 is also below its half, so every overrun gets here.
        if stream.recv_window < 0 or self._recv_window < 0:
            raise Http2Error("more data came than the flow-control window allows", ErrorCode.FLOW_CONTROL_ERROR)
        if self._recv_window < _CONNECTION_WINDOW >> 1:
            more = _CONNECTION_WINDOW - self._recv_window
            self._recv_window += more
            self._sender.update_window(0, more)
        more = self._stream_window - stream.recv_window - stream.deferred
        # If most of the window is deferred, the rest would be returned in small pieces, frame by frame. A stream
        # without a reader needs no window.
        if more >= self._stream_window >> 2 and stream.reader is not None:
            stream.recv_window += more
            self._sender.update_window(stream.number, more)

    # Other frames

    def _on_frame(self, kind: int, flags: int, number: int, payload: bytes, events: list[Any]) -> None:
        # Frames of types that RFC 9113 does not define are ignored, as it requires (5.5).
        if kind in (FrameType.HEADERS, FrameType.CONTINUATION):
            self._on_headers(kind, flags, number, payload, events)
        elif kind == FrameType.SETTINGS:
            self._on_settings(flags, payload)
        elif kind == FrameType.PING:
            check_length("PING", payload, 8)
            if not flags & Flag.ACK:
                self.replies += 1
                self._sender.frame(FrameType.PING, Flag.ACK, 0, payload)
        elif kind == FrameType.WINDOW_UPDATE:
            self._on_window_update(number, payload)
        elif kind == FrameType.RST_STREAM:
            self._on_reset(number, payload, events)
        elif kind == FrameType.GOAWAY:
            self._on_goaway(payload, events)
        elif kind == FrameType.PRIORITY:
            if len(payload) != 5:
                self._fail(number, f"a PRIORITY frame of {len(payload)} bytes", ErrorCode.FRAME_SIZE_ERROR)
        elif kind == FrameType.PUSH_PROMISE:
            raise Http2Error("the peer pushes, which was switched off")

    def _fail(self, number: int, text: str, code: int = ErrorCode.PROTOCOL_ERROR) -> None:
        if number in self.streams:
            raise StreamError(number, text, code)
        raise Http2Error(text, code)

    def _on_settings(self, flags: int, payload: bytes) -> None:
        if flags & Flag.ACK:
            check_length("acknowledgement of SETTINGS", payload, 0)
            return
        settings = check_settings(payload, self._client)
        self.max_peer_streams = settings.get(Setting.MAX_CONCURRENT_STREAMS, self.max_peer_streams)
        self.replies += 1
        self._sender.on_settings(payload, self.streams.values())

    def _on_window_update(self, number: int, payload: bytes) -> None:
        check_length("WINDOW_UPDATE", payload, 4)
        more = int.from_bytes(payload, "big") & MAX_WINDOW
        if number:
            self._check_opened(number)
        if not more:
            self._fail(number, "a window is widened by nothing")
        stream = self.streams.get(number)
        if number and stream is None:
            return  # the stream has ended
        self._sender.on_window_update(stream, more)
        if stream is not None and stream.pending:  # otherwise the stream's end was sent already, if it has one
            self._send_pending(stream)

    def _on_reset(self, number: int, payload: bytes, events: list[Any]) -> None:
        check_length("RST_STREAM", payload, 4)
        self.resets += 1
        stream = self.streams.get(number)
        if stream is not None:
            self._forget(stream, reset=False)
            events.append((stream, StreamReset(int.from_bytes(payload, "big"))))
        else:
            # After its own reset the peer must send nothing: frames that follow break the rules.
            self.streams.note_peer_reset(number)

    def _on_goaway(self, payload: bytes, events: list[Any]) -> None:
        last, self.goaway_received = read_goaway(payload)
        if self._client:
            # The server has not processed these and will not (RFC 9113, 6.8): their calls may go to another server.
            for stream in [stream for at, stream in self.streams.items() if at > last]:
                self._forget(stream, reset=False)
                events.append((stream, StreamReset(ErrorCode.REFUSED_STREAM)))

    def _on_headers(self, kind: int, flags: int, number: int, payload: bytes, events: list[Any]) -> None:
        headers = self._headers
        if kind == FrameType.CONTINUATION:
            if headers.number is None:
                raise Http2Error("a header block goes on that never began")
            headers.go_on(payload)
        else:
            headers.begin(number, header_fragment(flags, payload), end_stream=bool(flags & Flag.END_STREAM))
        if flags & Flag.END_HEADERS:
            # The block is decompressed even if its stream has ended: it changes the table that all streams share.
            self._on_fields(number, headers.finish(), headers.end_stream, events)

    def _on_fields(self, number: int, fields: list[tuple[str, str]], last: bool, events: list[Any]) -> None:
        stream = self.streams.get(number)
        was_reset = self.streams.was_reset(number)
        if stream is None and self._client:
            return  # the stream has ended
        if stream is None and not was_reset:
            stream = self._accept(number)
            if stream is None:
                return
        elif stream is not None and stream.remote_closed:
            raise StreamError(
                number, f"header fields came on stream {number}, which has ended", ErrorCode.STREAM_CLOSED
            )
        # On a stream that this end has reset, they can only be trailers that were sent before the peer knew.
        trailers = was_reset or (stream is not None and stream.headers_received)
        if trailers and not last:
            raise Http2Error("a second header block that does not end the stream")
        try:
            found = check_fields(fields, request=not self._client, trailers=trailers)
        except MalformedHeadersError as error:
            raise StreamError(number, str(error)) from error
        # Ignore trailers of a stream that was reset, and informational answers (1xx), which precede the final one.
        if stream is None or (self._client and not last and found[":status"][0] == "1"):
            return
        if "content-length" in found and not trailers:
            stream.expected_bytes = int(found["content-length"])
        stream.headers_received = True
        # The stream gets its reader when the server handles this event. Until then, data from the same bytes would be
        # dropped.
        self.paused = not self._client and not trailers
        if last:
            self._end_remote(stream, events, HeadersReceived(found, True))
        else:
            events.append((stream, HeadersReceived(found, False)))

    def _accept(self, number: int) -> Stream | None:
        """Begin a stream that the client opens; None: it is refused."""
        streams = self.streams
        streams.check_new(number)
        # REFUSED_STREAM says that nothing was done (RFC 9113, 8.7), so that the client may send the call elsewhere.
        if self.goaway_sent or streams.full:
            self._sender.reset_stream(number, ErrorCode.REFUSED_STREAM)
            streams.refuse(number)
            return None
        return streams.open(Stream(number, self._stream_window))


class Http2(Http2Receiver):
    """One end of a connection.

    Args:
        client: True for the end that opens the streams.
        stream_window: Flow-control window of a stream, in bytes.
        max_streams: On a server: the most streams that may be open at a time.
        max_header_bytes: The largest header block, compressed and decompressed.
        outgoing: The list to append bytes to send to; None: `data_to_send` returns them.
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
        self.send_data, self.send_grpc_message, self.send_headers = (
            sender.send_data,
            sender.send_grpc_message,
            sender.send_headers,
        )
        """Methods of `Http2Sender` that send the bytes, a gRPC message, or the header fields of a stream."""
        self.discard_pending = sender.discard_pending
        """Drops the unsent bytes of a stream: `Http2Sender.discard_pending`."""
        settings = [
            (Setting.INITIAL_WINDOW_SIZE, stream_window),
            (Setting.MAX_FRAME_SIZE, MAX_FRAME_SIZE),
            (Setting.MAX_HEADER_LIST_SIZE, max_header_bytes),
            (Setting.ENABLE_PUSH, 0) if client else (Setting.MAX_CONCURRENT_STREAMS, max_streams),
        ]
        if client:
            sender.outgoing.append(PREFACE)
        sender.frame(FrameType.SETTINGS, 0, 0, b"".join(struct.pack(">HI", *setting) for setting in settings))
        # SETTINGS change only the windows of streams, not that of the connection (RFC 9113, 6.9.2).
        sender.update_window(0, MAX_WINDOW - INITIAL_WINDOW)

    def data_to_send(self) -> list[bytes | memoryview]:
        """Return the bytes to send now, in parts."""
        outgoing = self.outgoing[:]
        self.outgoing.clear()
        return outgoing

    def open_stream(self, fields: Fields) -> Stream:
        """Open a stream by its header fields. Raises ValueError if they are too large."""
        stream = Stream(self.streams.last + 2, self._stream_window)
        # Sent before the stream is added, because it raises ValueError if the fields are too large.
        self._sender.send_headers(stream, fields)
        return self.streams.open(stream)

    def end_stream(self, stream: Stream, trailers: Fields | None = None) -> None:
        """End the stream after all its data is sent, by trailers if there are any."""
        if not stream.local_closed:
            stream.local_closed = True
            stream.trailers = None if trailers is None else list(trailers)
            self._send_pending(stream)

    def ping(self) -> None:
        """Send PING."""
        self._sender.frame(FrameType.PING, 0, 0, bytes(8))

    def go_away(self, code: int = ErrorCode.NO_ERROR, reason: str = "") -> None:
        """Send GOAWAY: no more streams are accepted, and open streams continue."""
        self.goaway_sent = True
        # A server opens no streams, so a client gives stream 0 as the last one.
        payload = struct.pack(">II", self.streams.last if not self._client else 0, code) + reason.encode()[:1000]
        self._sender.frame(FrameType.GOAWAY, 0, 0, payload)

    def acknowledge_data(self, stream: Stream, size: int) -> None:
        """Give the peer window again for bytes that were `deferred`."""
        stream.deferred -= size
        # `receive_data` raises the error for a window below 0. The caller here has served a request, and could not
        # handle it.
        if stream.reader is not None and 0 <= stream.recv_window < self._stream_window >> 1 and self._recv_window >= 0:
            self._send_window_update(stream)

    def connection_lost(self) -> None:
        """Free the memory of the streams at once, without the garbage collector."""
        for stream in list(self.streams.values()):
            self._forget(stream, reset=True)
            # A call and its stream refer to each other. Both would stay until the garbage collector runs, although
            # their memory is no longer counted.
            stream.owner = None
        self.frame = None
        self._rest = b""
        self.paused = False

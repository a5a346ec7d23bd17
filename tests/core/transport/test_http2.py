"""HTTP/2, against the public h2 and hpack libraries as the other end; no sockets here."""

import contextlib
import random
import struct

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.core.client.wire.grpc_client import GrpcClient
from bridge.core.transport.frames import HeadersReceived, Http2Error
from bridge.core.transport.http2 import Http2
from bridge.errors import Code
from tests.http2_tools import MessageReader, pack_prefix
from tests.inside import parse_address

HEADERS = [(":status", "200"), ("content-type", "application/grpc"), ("gymnasium-bridge", "1")]


def message(data):
    return b"\0" + struct.pack(">I", len(data)) + data


class Call:
    """A client's connection with one call, and what came of it."""

    def __init__(self, max_message_bytes):
        self.grpc = GrpcClient(parse_address("grpc://host:1"), max_message_bytes)
        self.http = self.grpc.http
        self.stream = self.http.open_stream(self.grpc._fields)
        self.stream.reader = MessageReader(max_message_bytes)
        self.metadata = self.status = None

    def take(self):
        return b"".join(self.http.data_to_send())

    def pack(self, data):
        self.http.send_data(self.stream, [pack_prefix(0, len(data)), data[:3], data[3:]], len(data) + 5)
        return self.take()

    def finish(self):
        self.http.end_stream(self.stream)
        return self.take()

    def ping(self):
        self.http.ping()
        return self.take()

    def get_buffer(self):
        return self.http.get_buffer()

    def noted(self, events):
        messages = []
        for stream, event in events:
            assert stream is self.stream
            if self.status is not None:
                continue
            if type(event) in (bytes, bytearray):
                messages.append(event)
                continue
            if isinstance(event, HeadersReceived) and self.metadata is None:
                self.metadata = event.fields
            status = self.grpc._look_at(stream, event)
            if status is not None:
                self.status = status
        return messages

    def receive_data(self, data):
        messages = self.noted(self.http.receive_data(data))
        if self.http.error is not None:
            raise self.http.error
        return messages

    def buffer_updated(self, count):
        return self.noted(self.http.buffer_updated(count))

    @property
    def waiting(self):
        return sum(map(len, self.stream.pending))


class Peer:
    """A server on h2, joined to a call by two buffers which deliver in pieces of any size."""

    def __init__(self, max_message_bytes=1 << 24, seed=0, **changed):
        self.call = Call(max_message_bytes)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        if changed:
            self.h2.local_settings = h2.settings.Settings(
                client=False, initial_values={getattr(h2.settings.SettingCodes, k): v for k, v in changed.items()}
            )
            self.h2.max_inbound_frame_size = self.h2.local_settings.max_frame_size
        self.h2.initiate_connection()
        self.random = random.Random(seed)
        self.headers, self.body, self.ended, self.events, self.got = None, b"", False, [], []
        self.credits = True
        self.to_server(self.call.take())
        self.settle()

    def to_server(self, data):
        for event in self.h2.receive_data(data):
            self.events.append(event)
            if isinstance(event, h2.events.RequestReceived):
                self.headers = dict(event.headers)
            elif isinstance(event, h2.events.DataReceived):
                self.body += event.data
                if self.credits and event.flow_controlled_length:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, 1)
            elif isinstance(event, h2.events.StreamEnded):
                self.ended = True

    def to_client(self, data):
        """Feed the call piece by piece, as a socket would."""
        at = 0
        while at < len(data):
            count = self.random.choice((1, 3, 8, 9, 10, 100, 5000, 100_000))
            buffer = self.call.get_buffer()
            if buffer is None:
                piece = data[at : at + count]
                self.got += self.call.receive_data(piece)
            else:
                with buffer:
                    piece = data[at : at + min(count, len(buffer))]
                    buffer[: len(piece)] = piece
                self.got += self.call.buffer_updated(len(piece))
            at += len(piece)

    def settle(self):
        """Exchange what each has to say until neither has."""
        while True:
            down, up = self.h2.data_to_send(), self.call.take()
            if not down and not up:
                return
            self.to_client(down)
            self.to_server(up)

    def answer(self, *payloads, pad=None, split=1 << 30):
        stream = b"".join(map(message, payloads))
        while stream:
            room = min(self.h2.local_flow_control_window(1), self.h2.max_outbound_frame_size, split) - (pad or 0) - 1
            assert room > 0
            self.h2.send_data(1, stream[:room], pad_length=pad)
            stream = stream[room:]
            self.settle()


def test_the_request_is_what_grpc_asks_for():
    peer = Peer()
    assert peer.headers.pop(b"user-agent").startswith(b"gymnasium-bridge/")
    assert peer.headers.pop(b"gymnasium-bridge")
    assert peer.headers == {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/dm_env_rpc.v1.Environment/Process",
        b":authority": b"host:1",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    assert any(isinstance(event, h2.events.SettingsAcknowledged) for event in peer.events)
    assert peer.h2.remote_settings.enable_push == 0


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 5, 60, 16_000, 16_379, 16_380, 70_000, 300_000]), max_size=6),
    pad=st.sampled_from([None, 0, 7, 255]),
    split=st.sampled_from([300, 16_384, 1 << 30]),
    seed=st.integers(0, 1 << 30),
)
@pytest.mark.slow
def test_answers_arrive_whole_however_they_are_cut(sizes, pad, split, seed):
    peer = Peer(seed=seed)
    peer.h2.send_headers(1, HEADERS)
    payloads = [random.Random(size).randbytes(size) for size in sizes]
    peer.answer(*payloads, pad=pad, split=split)
    peer.settle()
    assert [bytes(item) for item in peer.got] == payloads
    assert peer.call.metadata["gymnasium-bridge"] == "1"
    peer.h2.send_headers(1, [("grpc-status", "0")], end_stream=True)
    peer.settle()
    assert peer.call.status == (0, "")


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 60, 16_379, 16_380, 65_530, 65_536, 400_000]), min_size=1, max_size=5),
    window=st.sampled_from([0, 100, 65_535, 1 << 20]),
    frame=st.sampled_from([16_384, 20_000, 1 << 20]),
    seed=st.integers(0, 1 << 30),
)
@pytest.mark.slow
def test_requests_keep_to_the_room_that_the_server_gives(sizes, window, frame, seed):
    """h2 raises on a frame that is larger than it may be, and on data beyond a window."""
    peer = Peer(seed=seed, INITIAL_WINDOW_SIZE=window, MAX_FRAME_SIZE=frame)
    payloads = [random.Random(size).randbytes(size) for size in sizes]
    for payload in payloads:
        peer.to_server(peer.call.pack(payload))
        peer.settle()
    peer.to_server(peer.call.finish())
    peer.settle()
    if window == 0:
        assert (peer.body, peer.ended) == (b"", False)
        peer.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
        peer.settle()
    assert peer.body == b"".join(map(message, payloads))
    assert peer.ended
    assert peer.call.waiting == 0


def data_frame(payload):
    return struct.pack(">HBBBI", 0, len(payload), 0, 0, 1) + payload


def opened_peer():
    """A call that the server has begun to answer, by frames that a test writes."""
    peer = Peer()
    peer.h2.send_headers(1, HEADERS)
    peer.settle()
    return peer


def test_frames_with_the_header_of_the_one_before_are_read_like_any():
    call = opened_peer().call
    long = message(b"0123456789abc")  # in two frames of nine bytes, as the short ones have
    payloads = [message(b"aaaa"), message(b"bbbb"), long[:9], long[9:], message(b"cccc"), message(b"dddd")]
    got = [call.receive_data(data_frame(payload)) for payload in payloads]
    assert got == [[b"aaaa"], [b"bbbb"], [], [b"0123456789abc"], [b"cccc"], [b"dddd"]]
    assert call.receive_data(data_frame(message(b"eeee")) * 2 + data_frame(message(b"ff"))[:7]) == [b"eeee", b"eeee"]
    assert call.receive_data(data_frame(message(b"ff"))[7:] + data_frame(message(b"gggg"))) == [b"ff", b"gggg"]
    assert call.receive_data(data_frame(message(b"hhhh"))) == [b"hhhh"]


def test_a_frame_with_the_header_of_the_one_before_is_dropped_where_its_stream_was_reset():
    call = opened_peer().call
    for _ in range(3):
        assert call.receive_data(data_frame(message(b"aaaa"))) == [b"aaaa"]
    call.http.reset_stream(call.stream, 8)
    assert call.http.receive_data(data_frame(message(b"aaaa"))) == []


def test_frames_with_the_same_header_count_for_the_windows():
    call = opened_peer().call
    http, stream = call.http, call.stream
    stream.deferred = stream.recv_window  # so that the server gets no further window
    left, frame = stream.recv_window, data_frame(message(b"aaaa"))
    for _ in range(3):
        assert call.receive_data(frame) == [b"aaaa"]
    assert stream.recv_window == left - 3 * 9
    stream.recv_window = 8
    with pytest.raises(Http2Error, match="more data came than the flow-control window allows"):
        call.receive_data(frame)
    assert http.error is not None


def test_a_server_without_room_stops_us_and_nothing_is_lost():
    peer = Peer(INITIAL_WINDOW_SIZE=10)
    peer.credits = False
    peer.to_server(peer.call.pack(b"x" * 100))
    peer.settle()
    assert peer.body == message(b"x" * 100)[:10]
    assert peer.call.waiting == 95
    peer.h2.increment_flow_control_window(1000, 1)
    peer.settle()
    assert peer.body == message(b"x" * 100)


def test_the_end_of_requests_is_said_once_however_often_the_window_is_widened():
    peer = Peer()
    peer.to_server(peer.call.pack(b"x") + peer.call.finish())
    peer.settle()
    assert peer.ended
    peer.to_client(struct.pack(">HBBBII", 0, 4, 8, 0, 1, 1000))  # WINDOW_UPDATE, which may be on its way by then
    assert peer.call.take() == b""


def test_the_server_gets_room_again_for_what_was_taken():
    peer = Peer(1 << 28)
    peer.h2.send_headers(1, HEADERS)
    big = bytes(70 << 20)  # more than the window
    peer.answer(big)
    assert len(peer.got) == 1
    assert len(peer.got[0]) == len(big)


def test_pings_go_both_ways():
    peer = Peer()
    peer.h2.ping(b"abcdefgh")
    peer.settle()
    assert [e.ping_data for e in peer.events if isinstance(e, h2.events.PingAckReceived)] == [b"abcdefgh"]
    peer.to_server(peer.call.ping())
    peer.settle()
    assert sum(isinstance(event, h2.events.PingReceived) for event in peer.events) == 1
    assert peer.call.http.error is None


def test_a_server_may_widen_the_window_of_the_connection_before_the_first_call():
    http = Http2(client=True)
    assert http.receive_data(SETTINGS + frame(8, 0, 0, (1 << 20).to_bytes(4, "big"))) == []
    with pytest.raises(Http2Error, match="stream 1, which was never opened"):
        http.receive_data(frame(8, 0, 1, (1 << 20).to_bytes(4, "big")))


def test_long_header_blocks_go_on_in_further_frames():
    peer = Peer()
    peer.h2.send_headers(1, [*HEADERS, *((f"x-{index}", "y" * 1000) for index in range(40))])
    peer.settle()
    assert len(peer.call.metadata) == 43


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([*HEADERS, ("grpc-status", "12"), ("grpc-message", "no%20such %C3%A9")], (12, "no such é")),
        ([*HEADERS, ("grpc-status", "soup")], (int(Code.UNKNOWN), "")),
        ([*HEADERS, ("grpc-status", "1" * 5000)], (int(Code.UNKNOWN), "")),
        ([(":status", "503")], (int(Code.UNAVAILABLE), "the answer has the HTTP status 503")),
        ([(":status", "400")], (int(Code.INTERNAL), "the answer has the HTTP status 400")),
        ([(":status", "401")], (int(Code.UNAUTHENTICATED), "the answer has the HTTP status 401")),
        ([(":status", "403")], (int(Code.PERMISSION_DENIED), "the answer has the HTTP status 403")),
        ([(":status", "421")], (int(Code.PERMISSION_DENIED), "the answer has the HTTP status 421")),
        ([(":status", "429")], (int(Code.UNAVAILABLE), "the answer has the HTTP status 429")),
        ([(":status", "500")], (int(Code.UNKNOWN), "the answer has the HTTP status 500")),
        ([(":status", "404"), ("content-type", "text/html")], (12, "the answer has the HTTP status 404")),
    ],
)
def test_an_answer_that_is_only_a_status(headers, status):
    peer = Peer()
    peer.h2.send_headers(1, headers, end_stream=True)
    peer.settle()
    assert peer.call.status == status


def test_a_page_in_place_of_grpc():
    peer = Peer()
    peer.h2.send_headers(1, [(":status", "200"), ("content-type", "text/html")])
    peer.h2.send_data(1, b"<html>" * 10)
    peer.settle()
    assert peer.call.status[0] == Code.UNKNOWN
    assert "text/html" in peer.call.status[1]
    assert peer.got == []


def test_informational_headers_are_passed_over():
    peer = Peer()
    peer.h2.send_headers(1, [(":status", "103")])
    peer.h2.send_headers(1, HEADERS)
    peer.answer(b"a")
    peer.settle()
    assert peer.got == [b"a"]


def test_messages_that_are_too_large_or_compressed_end_the_call():
    for sent, code in ((message(bytes(101)), Code.RESOURCE_EXHAUSTED), (b"\1" + message(b"a")[1:], Code.INTERNAL)):
        peer = Peer(max_message_bytes=100)
        peer.h2.send_headers(1, HEADERS)
        peer.h2.send_data(1, message(bytes(100)) + sent + message(b"late"))
        peer.settle()
        assert peer.call.status[0] == code
        assert peer.got == [bytes(100)]


def test_the_ways_in_which_a_stream_ends():
    peer = Peer()
    peer.h2.send_headers(1, HEADERS)
    peer.h2.send_data(1, message(b"a"), end_stream=True)
    peer.settle()
    assert (peer.got, peer.call.status[0]) == ([b"a"], Code.INTERNAL)
    for error, code in ((8, Code.CANCELLED), (7, Code.UNAVAILABLE), (11, Code.UNAVAILABLE), (2, Code.INTERNAL)):
        peer = Peer()
        peer.h2.reset_stream(1, error)
        peer.settle()
        assert peer.call.status[0] == code
    peer = Peer()
    peer.h2.close_connection(h2.errors.ErrorCodes.ENHANCE_YOUR_CALM, b"too_many_pings", last_stream_id=0)
    peer.settle()
    assert peer.call.status[0] == Code.UNAVAILABLE
    assert "too_many_pings" in peer.call.status[1]
    peer = Peer()
    peer.h2.send_headers(1, HEADERS)
    data = peer.h2.data_to_send()
    peer.h2.close_connection(last_stream_id=1)  # a server that stops lets open calls go on
    peer.to_client(data + peer.h2.data_to_send())
    assert peer.call.status is None
    assert "no further calls" in peer.call.http.goaway_received


def frame(kind, flags, stream, payload=b""):
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def encode(fields):
    return hpack.Encoder().encode(fields)


SETTINGS = frame(4, 0, 0)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak HTTP/2"),
        (b"\x15\x03\x03\x00\x02\x02\x28", "TLS"),
        (b"\0\0\0\x04\x01\0\0\0\0", "settings first"),
        (b"\xff" * 40, "settings first"),
        (SETTINGS + frame(0, 0, 1, message(b"a")), "before the header fields"),
        (SETTINGS + frame(1, 4, 3, encode(HEADERS)), "stream 3"),
        (SETTINGS + b"\xff\xff\xff" + frame(1, 0, 1)[3:], "header block of more than"),
        (SETTINGS + b"\xff\xff\xff" + frame(6, 0, 0)[3:], "larger than"),
        (SETTINGS + frame(5, 4, 1, b"\0\0\0\2"), "pushes"),
        (SETTINGS + frame(9, 4, 1, b""), "never began"),
        (SETTINGS + frame(1, 0, 1, encode(HEADERS)) + frame(6, 0, 0, bytes(8)), "within a header block"),
        (SETTINGS + frame(1, 4, 1, b"\x80"), "cannot be decompressed"),
        (SETTINGS + frame(1, 4, 1, b"\x00\x7f"), "cannot be decompressed"),
        (SETTINGS + frame(1, 12, 1, b"\x09abc"), "shorter than its frame says"),
        (SETTINGS + frame(6, 0, 0, b"abc"), "PING of 8 bytes, got 3"),
        (SETTINGS + frame(8, 0, 0, bytes(4)), "widened by nothing"),
        (SETTINGS + frame(8, 0, 0, b"\x7f\xff\xff\xff"), "wider than"),
        (SETTINGS + frame(4, 0, 0, b"abc"), "SETTINGS frame of 3 bytes"),
        (frame(4, 0, 0, struct.pack(">HI", 4, 1 << 31)), "a window of"),
        (frame(4, 0, 0, struct.pack(">HI", 5, 100)), "frames of at most 100"),
        (SETTINGS + frame(7, 0, 0, b"abc"), "GOAWAY frame of 3 bytes"),
        (SETTINGS + frame(1, 4, 1, encode(HEADERS)) + frame(0, 8, 1, b"\x09abc"), "all padding"),
        (SETTINGS + frame(1, 0, 1, b"") + frame(9, 0, 1, bytes(1 << 17)) * 3, "header block of more than"),
    ],
)
def test_what_no_server_sends_is_refused(data, text):
    with pytest.raises(Http2Error, match=text):
        Call(1000).receive_data(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.lists(st.tuples(st.integers(0, 10), st.integers(0, 255), st.binary(max_size=40))))
def test_random_frames_are_taken_or_refused(tail, frames):
    """Nothing but Http2Error comes of any bytes, and no message out of thin air."""
    call = Call(1000)
    data = SETTINGS + b"".join(frame(kind, flags, 1 if kind in (0, 1, 9) else 0, item) for kind, flags, item in frames)
    with contextlib.suppress(Http2Error):
        for item in call.receive_data(data + tail):
            assert len(item) <= 1000

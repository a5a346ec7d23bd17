"""HTTP/2 at the server's end, without a socket: streams and windows."""

import struct

import pytest

from bridge.core.transport.frames import HeadersReceived, Http2Error, StreamReset
from bridge.core.transport.http2 import Http2
from tests.http2_tools import (
    DATA,
    END_HEADERS,
    HEADERS,
    HELLO,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Codes,
    MessageReader,
    block,
    frame,
)


def test_fields_that_came_several_times_are_joined():
    http = Http2(client=False)
    twice = block() + b"\0\1a\1b" + b"\0\1a\1c"
    ((_, event),) = http.receive_data(HELLO + frame(HEADERS, END_HEADERS, 1, twice))
    assert event.fields["a"] == "b, c"


def test_frames_that_were_on_their_way_when_a_stream_was_reset_are_ignored():
    http = Http2(client=False)
    ((stream, event),) = http.receive_data(HELLO + frame(HEADERS, END_HEADERS, 1, block()))
    assert isinstance(event, HeadersReceived)
    http.reset_stream(stream, Codes.CANCEL)
    http.data_to_send()
    late = frame(DATA, 0, 1, b"abc") + frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1") + frame(HEADERS, 5, 1, b"\0\1a\1b")
    assert http.receive_data(late) == []
    assert http.resets == 0
    assert not http.outgoing


def test_streams_that_the_server_resets_for_what_the_client_did_are_counted():
    http = Http2(client=False, max_streams=10)
    data = HELLO
    for number in range(1, 11, 2):
        data += frame(HEADERS, END_HEADERS, number, block()) + frame(WINDOW_UPDATE, 0, number, bytes(4))
    events = http.receive_data(data)
    while http.paused:
        events += http.receive_data(b"")
    assert [event.code for _, event in events if isinstance(event, StreamReset)] == [1] * 5
    assert http.resets == 5


def test_streams_beyond_what_the_settings_grant_are_refused():
    http = Http2(client=False, max_streams=2)
    http.data_to_send()
    http.receive_data(HELLO + b"".join(frame(HEADERS, END_HEADERS, number, block()) for number in (1, 3, 5)))
    while http.paused:
        http.receive_data(b"")
    assert sorted(http.streams) == [1, 3]
    assert http.data_to_send()[-1] == frame(RST_STREAM, 0, 5, struct.pack(">I", Codes.REFUSED_STREAM))


def test_settings_change_the_windows_of_all_streams_without_a_loop_over_them():
    http = Http2(client=False, max_streams=10)
    http.receive_data(HELLO + frame(HEADERS, END_HEADERS, 1, block()))
    stream = http.streams[1]
    http.data_to_send()
    http.receive_data(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 3)))
    http.send_data(stream, [b"abcdef"], 6)
    assert http.data_to_send()[1:] == [frame(DATA, 0, 1)[:2] + b"\3" + frame(DATA, 0, 1)[3:], b"abc"]
    http.receive_data(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 4)))
    assert http.data_to_send()[-1] == b"d"
    http.receive_data(frame(WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xf0"))
    assert http.data_to_send()[-1] == b"ef"
    with pytest.raises(Http2Error) as caught:
        http.receive_data(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 20)))
    assert caught.value.code == Codes.FLOW_CONTROL_ERROR


def test_the_window_of_a_stream_that_is_gone_does_not_limit_the_settings():
    http = Http2(client=False, max_streams=10)
    http.receive_data(HELLO + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 10)))
    widen = struct.pack(">I", (1 << 31) - 11)
    http.receive_data(frame(HEADERS, END_HEADERS, 1, block()) + frame(WINDOW_UPDATE, 0, 1, widen))
    http.receive_data(frame(RST_STREAM, 0, 1, bytes(4)))
    http.receive_data(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 20)))
    http.receive_data(frame(HEADERS, END_HEADERS, 3, block()))
    http.receive_data(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 10)) + frame(WINDOW_UPDATE, 0, 3, widen))
    with pytest.raises(Http2Error) as caught:
        http.receive_data(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 11)))
    assert caught.value.code == Codes.FLOW_CONTROL_ERROR


def test_bytes_that_resume_a_stream_raise_nothing_after_too_many_came():
    http = Http2(client=False, stream_window=1000)
    ((stream, _),) = http.receive_data(HELLO + frame(HEADERS, END_HEADERS, 1, block()))
    stream.reader = MessageReader(1 << 20)
    stream.deferred = 900
    with pytest.raises(Http2Error, match="more data came"):
        http.receive_data(frame(DATA, 0, 1, b"\0\0\1\0\0" + bytes(2000)))
    http.acknowledge_data(stream, 900)

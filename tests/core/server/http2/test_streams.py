"""Streams of one connection, and header fields, over real sockets: RFC 9113, 4 and 5."""

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import hpack
import pytest

from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from tests.http2_tools import (
    ACK,
    BEGIN,
    CHECK,
    CONTINUATION,
    CREATE,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    HELLO,
    LEAVE,
    PING,
    SETTINGS,
    STEP,
    Codes,
    Hand,
    block,
    farewell_of,
    fields,
    frame,
    message,
    raw,
)
from tests.support import until


def test_sessions_on_one_connection_go_on_while_others_are_cut_and_half_closed(server):
    with Hand(server) as hand:
        first, second, third, fourth = [hand.play() for _ in range(4)]
        for number in (first, second, third, fourth):
            hand.step(number, BEGIN)
        assert server.connections == 4
        for number in (third, first, second, fourth):
            hand.say(number, STEP, STEP)
        for number in (first, second, third, fourth):
            assert [hand.response(number).step.state for _ in range(2)] == [pb.RUNNING] * 2
        hand.say(first, STEP)
        hand.cut(first)
        hand.say(second, STEP, STEP, end=True)
        assert [hand.response(second).step.state for _ in range(2)] == [pb.RUNNING] * 2
        assert hand.status(second) == (0, "")
        until(lambda: server.connections == 2)
        assert hand.step(third).state == hand.step(fourth).state == pb.RUNNING
        fifth = hand.play()
        assert hand.step(fifth, BEGIN).state == pb.RUNNING
        assert second not in hand.resets


def test_what_a_client_says_no_more_on_ends_with_a_status_though_it_does_not_half_close(server):
    with Hand(server) as hand:
        number = hand.open()
        hand.raw(number, message(b"x", flag=7))
        assert hand.status(number)[0] == Code.INTERNAL
        hand.until(lambda: number in hand.resets)
        assert hand.resets[number] == Codes.NO_ERROR


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_requests_come_out_of_any_cut_with_padding_continuation_and_huffman(server, size):
    name = "x-" + "a" * 60
    coded = hpack.Encoder().encode([*fields(), (name, "b" * 90)], huffman=True)
    third = len(coded) // 3
    stream = (
        HELLO
        + frame(SETTINGS, ACK)
        + frame(HEADERS, 0, 1, coded[:third])
        + frame(CONTINUATION, 0, 1, coded[third : 2 * third])
        + frame(CONTINUATION, 0, 1)
        + frame(CONTINUATION, END_HEADERS, 1, coded[2 * third :])
    )
    body = message(LEAVE) * 3 + message(CREATE)
    for at in range(0, len(body), 4):
        part = body[at : at + 4]
        pad = at % 5
        stream += frame(DATA, 8, 1, bytes((pad,)) + part + bytes(pad))
        stream += frame(DATA, 8, 1, bytes((pad,)) + bytes(pad)) + frame(PING, 0, 0, b"abcdefgh") + frame(99, 7, 1, b"?")
    stream += frame(HEADERS, END_HEADERS | END_STREAM | 8 | 32, 3, b"\2\0\0\0\0\7" + block(CHECK) + b"\0\0")
    stream += frame(DATA, END_STREAM, 1)
    with raw(server) as sock:
        for at in range(0, len(stream), size):
            sock.sendall(stream[at : at + size])
        peer = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        peer.initiate_connection()
        for number in (1, 3):
            peer.send_headers(number, fields())
        got, ended = b"", set()
        while ended != {1, 3}:
            data = sock.recv(65536)
            assert data, "the server closed"
            for event in peer.receive_data(data):
                if isinstance(event, h2.events.DataReceived) and event.stream_id == 1:
                    got += event.data
                elif isinstance(event, h2.events.StreamEnded):
                    ended.add(event.stream_id)
    kinds = []
    while got:
        end = 5 + int.from_bytes(got[1:5], "big")
        kinds.append(pb.EnvironmentResponse.FromString(got[5:end]).WhichOneof("payload"))
        got = got[end:]
    assert kinds == ["leave_world"] * 3 + ["create_world"]


def test_a_client_that_wants_no_header_table_gets_none(server):
    with Hand(server) as hand:
        hand.h2.update_settings({h2.settings.SettingCodes.HEADER_TABLE_SIZE: 0})
        hand.send()
        hand.until(lambda: hand.acks == 2)
        for _ in range(2):
            number = hand.open(CHECK)
            hand.say(number, b"", end=True)
            assert hand.status(number) == (0, "")
        hand.h2.update_settings({h2.settings.SettingCodes.HEADER_TABLE_SIZE: 4096})
        hand.send()
        assert hand.ask(hand.open(), CREATE).create_world.world_name


def test_the_clients_own_table_may_change_its_size(server):
    encoder = hpack.Encoder()
    with raw(server, HELLO) as sock:
        for number, size in ((1, 4096), (3, 100), (5, 0), (7, 4096), (9, 4096)):
            encoder.header_table_size = size
            sock.sendall(frame(HEADERS, END_HEADERS | END_STREAM, number, encoder.encode(fields("/nothing"))))
        sock.sendall(frame(PING, 0, 0, b"last one"))
        data = b""
        while b"last one" not in data:
            got = sock.recv(65536)
            assert got, data
            data += got
        assert data.count(bytes((HEADERS, END_HEADERS | END_STREAM))) >= 5  # a status each
        encoder.header_table_size = 8192
        sock.sendall(frame(HEADERS, END_HEADERS | END_STREAM, 11, encoder.encode(fields("/nothing"))))
        assert farewell_of(sock) == Codes.COMPRESSION_ERROR


def test_the_reserved_bit_before_a_stream_s_number_is_ignored(server):
    """RFC 9113, 4.1."""
    bit = 1 << 31
    opened = frame(HEADERS, END_HEADERS, bit | 1, block(CHECK)) + frame(DATA, END_STREAM, bit | 1, message(b""))
    with raw(server, HELLO + opened + frame(PING, 0, bit, b"last one")) as sock:
        data = b""
        while b"last one" not in data or b"grpc-status" not in data:
            got = sock.recv(65536)
            assert got, "the server closed"
            data += got

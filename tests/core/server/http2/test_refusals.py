"""What a server refuses, and its ends: calls of something else, too large, too many, and a stop."""

import contextlib
import struct
import threading

import grpc
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as public_pb2
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bridge import Limits, serve_gym
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from tests.core.server.http2.envs import long, playing
from tests.http2_tools import (
    ACK,
    BEGIN,
    CHECK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    HELLO,
    LEAVE,
    PATH,
    PING,
    PREFACE,
    REFLECT,
    RST_STREAM,
    SETTINGS,
    WATCH,
    Codes,
    Hand,
    block,
    farewell_of,
    frame,
    frames_of,
    message,
    raw,
)
from tests.peers import Stream
from tests.support import until


@pytest.mark.parametrize(
    ("changed", "http", "code"),
    [
        ({"path": "/dm_env_rpc.v1.Environment/Other"}, "200", Code.UNIMPLEMENTED),
        ({"path": "/"}, "200", Code.UNIMPLEMENTED),
        ({"path": "/grpc.health.v1.Health/Nothing"}, "200", Code.UNIMPLEMENTED),
        ({"__method": "GET"}, "405", None),
        ({"content_type": "text/html"}, "415", None),
        ({"content_type": None}, "415", None),
    ],
)
def test_a_call_of_something_else_is_refused_and_the_connection_goes_on(server, changed, http, code):
    with Hand(server) as hand:
        for end in (False, True):
            number = hand.open(end=end, **changed)
            hand.until(lambda number=number: number in hand.ended)
            assert hand.heads[number][":status"] == http
            assert hand.heads[number].get("grpc-status") == (code and str(int(code)))
        assert hand.ask(hand.open(), LEAVE).WhichOneof("payload") == "leave_world"


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nnot a settings frame at all",
        PREFACE + frame(SETTINGS, ACK),
        PREFACE + frame(PING, 0, 0, bytes(8)),
    ],
)
def test_what_is_no_http2_is_told_so_and_closed(server, first):
    with playing(server), raw(server, first) as sock:
        assert farewell_of(sock) == Codes.PROTOCOL_ERROR


def test_a_request_that_is_too_large_ends_its_call_alone():
    with serve_gym(long, limits=Limits(max_message_bytes=200_000)) as server, Hand(server) as hand:
        other, number = hand.play(), hand.open()
        hand.step(other, BEGIN)
        hand.raw(number, message(bytes(200_001))[:30_000])
        code, details = hand.status(number)
        assert code == Code.RESOURCE_EXHAUSTED
        assert "max_message_bytes=200000" in details
        hand.say(other, b"\xff" * 200_000)
        assert hand.response(other).error.code == Code.INVALID_ARGUMENT
        assert hand.step(other).state == pb.RUNNING
        until(lambda: server.connections == 1)


def test_each_stream_shows_the_token_and_health_needs_none():
    with serve_gym(long, token="secret") as server, Hand(server) as hand:
        for shown in (None, "Bearer wrong", "secret"):
            for path in (PATH, REFLECT, "/nothing"):
                assert hand.status(hand.open(path, authorization=shown))[0] == Code.UNAUTHENTICATED
        number = hand.open(CHECK)
        hand.say(number, b"")
        assert hand.status(number)[0] == 0
        number = hand.play(authorization="Bearer secret")
        assert hand.status(hand.open(authorization="Bearer other"))[0] == Code.UNAUTHENTICATED
        assert hand.step(number, BEGIN).state == pb.RUNNING
        assert server.connections == 1


def test_the_last_header_fields_of_a_refused_call_open_none():
    with serve_gym(long, token="secret") as server:
        shown = block(authorization="Bearer secret")
        first = HELLO + frame(HEADERS, END_HEADERS, 1, block()) + frame(HEADERS, END_HEADERS | END_STREAM, 1, shown)
        with raw(server, first + frame(CONTINUATION)) as sock:
            heads = [number for kind, _, number, _ in frames_of(sock) if kind == HEADERS]
            assert heads == [1]


def test_calls_beyond_max_connections_are_refused_by_its_name_and_later_ones_served():
    with serve_gym(long, limits=Limits(max_connections=2)) as server, Hand(server) as hand, Hand(server) as other:
        first, second = hand.play(), other.play()
        for one in (hand, other):
            number = one.open()
            one.say(number, LEAVE)
            code, details = one.status(number)
            assert code == Code.RESOURCE_EXHAUSTED
            assert "max_connections=2" in details
        hand.cut(first)
        until(lambda: server.connections == 1)
        hand.play()
        assert other.step(second, BEGIN).state == pb.RUNNING


@pytest.mark.parametrize("path", [WATCH, REFLECT])
def test_a_connection_has_few_calls_of_grpcs_own_services_at_a_time(server, path):
    with Hand(server) as hand:
        numbers = [hand.open(path) for _ in range(17)]
        code, details = hand.status(numbers[-1])
        assert code == Code.RESOURCE_EXHAUSTED
        assert "16" in details
        hand.cut(numbers[0])
        hand.say(hand.open(CHECK), b"")
        other = hand.open(CHECK)
        hand.say(other, b"")
        assert hand.status(other)[0] == 0


# gRPC's own services


def test_health_and_reflection_are_served_beside_calls(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        stream = Stream(server).join()
        for name in ("", "dm_env_rpc.v1.Environment"):
            asked = health_pb2.HealthCheckRequest(service=name)
            assert health.Check(asked, timeout=20).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=20)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        watches = [health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", "other")]
        assert [next(watch).status for watch in watches] == [
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
        ]
        listed = health.List(health_pb2.HealthListRequest(), timeout=20)
        assert set(listed.statuses) == {"", "dm_env_rpc.v1.Environment"}
        reflects = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="dm_env_rpc.v1.Environment"),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.such"),
        ]
        answers = list(reflects.ServerReflectionInfo(iter(asked), timeout=20))
        kinds = [answer.WhichOneof("message_response") for answer in answers]
        assert kinds == ["list_services_response", "file_descriptor_response", "error_response"]
        v1 = channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        assert list(v1(iter(asked), timeout=20)) == answers
        pool = descriptor_pool.DescriptorPool()
        for file in reversed(answers[1].file_descriptor_response.file_descriptor_proto):
            with contextlib.suppress(TypeError):  # the same file again
                pool.AddSerializedFile(file)
        method = pool.FindServiceByName("dm_env_rpc.v1.Environment").methods_by_name["Process"]
        theirs = public_pb2.DESCRIPTOR.services_by_name["Environment"].methods_by_name["Process"]
        for ours, public in ((method.input_type, theirs.input_type), (method.output_type, theirs.output_type)):
            assert ours.full_name == public.full_name
            assert {f.name: f.number for f in ours.fields} == {f.name: f.number for f in public.fields}
        for watch in watches:
            watch.cancel()
        stream.close()


def test_open_calls_get_their_grace_when_the_server_stops_and_then_a_status():
    with (
        serve_gym(long) as server,
        raw(server, HELLO) as idle,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stream = Stream(server).join()
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        stopping = threading.Thread(target=server.stop, args=(1.0,))
        stopping.start()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert farewell_of(idle) == Codes.NO_ERROR
        assert stream.ask(leave_world=pb.LeaveWorldRequest()).WhichOneof("payload") == "leave_world"
        with pytest.raises(grpc.RpcError) as caught:
            stream.take()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "the server was stopped" in caught.value.details()
        stopping.join(20.0)
        assert not stopping.is_alive()
        stream.close()


def test_no_new_call_is_taken_in_the_grace_of_a_stop(server):
    with raw(server, HELLO + frame(HEADERS, END_HEADERS, 1, block())) as sock:
        until(lambda: server.connections == 1)
        stopping = threading.Thread(target=server.stop, args=(0.5,))
        stopping.start()
        data = b""
        while b"stopping" not in data:
            data += sock.recv(65536)
        sock.sendall(frame(HEADERS, END_HEADERS, 3, block()) + frame(DATA, 0, 1, message(LEAVE)))
        found = frames_of(sock)
        assert (RST_STREAM, 0, 3, struct.pack(">I", Codes.REFUSED_STREAM)) in found
        assert [len(payload) for kind, _, number, payload in found if kind == DATA and number == 1] == [7]
        assert any(kind == HEADERS and b"the server was stopped" in payload for kind, _, _, payload in found)
        stopping.join(20.0)
        assert not stopping.is_alive()

"""Requests that are compressed, as gRPC has it: read, refused, counted."""

import contextlib
import gzip
import random
import threading
import zlib

import grpc
import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest

from bridge import Limits, Observer, errors, make_remote, serve_gym
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv
from tests.core.server.http2.envs import LargeEnv, long, without_threads
from tests.http2_tools import (
    BEGIN,
    CHECK,
    CREATE,
    LEAVE,
    PATH,
    Hand,
    message,
    request,
)
from tests.support import until


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests_are_read(server, compression):
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", compression=compression) as channel:
        call = channel.stream_stream(PATH, response_deserializer=pb.EnvironmentResponse.FromString)
        settings = {"x": pack_tensor("y" * 100_000)}
        made = request(create_world=pb.CreateWorldRequest(settings=settings))
        answers = list(call(iter([made, LEAVE]), timeout=20))
        assert [answer.WhichOneof("payload") for answer in answers] == ["error", "leave_world"]
        assert "x" in answers[0].error.message


@pytest.mark.parametrize(
    ("encoding", "data", "code", "why"),
    [
        ("gzip", gzip.compress(bytes(2_000_000)), Code.RESOURCE_EXHAUSTED, "max_message_bytes=1000000"),
        ("deflate", zlib.compress(bytes(2_000_000)), Code.RESOURCE_EXHAUSTED, "max_message_bytes=1000000"),
        ("gzip", gzip.compress(b"x" * 100)[:-9], Code.INTERNAL, "cut off"),
        ("gzip", gzip.compress(random.Random(0).randbytes(2_000_000))[:-9], Code.INTERNAL, "cut off"),
        ("gzip", b"no gzip", Code.INTERNAL, "cannot be read"),
        ("gzip", b"", Code.INTERNAL, "cut off"),
        (None, gzip.compress(LEAVE), Code.INTERNAL, "name no compression"),
        ("snappy", LEAVE, Code.UNIMPLEMENTED, "identity, deflate, gzip"),
    ],
    ids=range(8),  # gzip writes the time
)
def test_what_is_compressed_and_cannot_be_read_ends_its_call_alone(encoding, data, code, why):
    most = 1_000_000 if "max_message" in why else 3_000_000
    with serve_gym(long, limits=Limits(max_message_bytes=most)) as server, Hand(server) as hand:
        other = hand.play()
        hand.step(other, BEGIN)
        number = hand.open(grpc_encoding=encoding)
        with contextlib.suppress(h2.exceptions.StreamClosedError):
            hand.raw(number, message(data, flag=1))
        status, details = hand.status(number)
        assert status == code
        assert why in details
        assert hand.step(other).state == pb.RUNNING
        until(lambda: server.connections == 1)


def test_a_request_that_grows_too_much_ends_its_call(server):
    with Hand(server) as hand:
        number = hand.open(grpc_encoding="gzip")
        hand.raw(number, message(gzip.compress(bytes(5_000_000)), flag=1))
        code, details = hand.status(number)
        assert code == Code.RESOURCE_EXHAUSTED
        assert "50 times" in details
        until(lambda: server.status()["queued_bytes"] == 0)


def test_where_no_thread_is_left_answers_stay_as_they_are_and_compressed_requests_are_refused(server, monkeypatch):
    packed = message(gzip.compress(CREATE), flag=1)
    with Hand(server) as hand, make_remote(server.url, compression="gzip", timeout=20) as env:
        number = hand.open(grpc_encoding="gzip")
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", without_threads("bridge-helper"))
            hand.raw(number, packed * 2)
            for _ in range(2):
                error = hand.response(number).error
                assert error.code == Code.RESOURCE_EXHAUSTED
                assert "no thread left" in error.message
            # An answer that is worth to be compressed.
            with pytest.raises(errors.RefusedError, match=r"x{4000}"):
                env.unwrapped.call("x" * 4000)
        hand.raw(number, packed)
        assert hand.response(number).WhichOneof("payload") == "create_world"


def test_hundreds_of_compressed_requests_that_wait_are_refused_together():
    class Busy(Observer):
        def start(self, background):
            self.background = background

    class SlowReset(CountingEnv):
        def reset(self, **keywords):
            door.wait(20)
            return super().reset(**keywords)

    busy, door, inflates = Busy(), threading.Event(), threading.Event()
    limits = Limits(max_connections=600, max_requests_in_flight=1)
    with (
        contextlib.ExitStack() as stack,
        serve_gym(lambda: SlowReset(1000), limits=limits, observers=[busy]) as server,
        Hand(server) as slow,
    ):
        stack.callback(inflates.set)
        number = slow.play()
        busy.background.submit(lambda: inflates.wait(20), lambda result: None)
        hands = [stack.enter_context(Hand(server)) for _ in range(20)]
        calls = [(hand, [hand.open(grpc_encoding="gzip") for _ in range(25)]) for hand in hands]
        until(lambda: server.connections == 501)
        for hand, numbers in calls:
            for other in numbers[1:]:
                hand.h2.send_data(other, message(gzip.compress(LEAVE), flag=1))
            hand.raw(numbers[0], message(gzip.compress(LEAVE), flag=1))
        slow.say(number, BEGIN)
        until(lambda: server.status()["requests"] == 1)
        inflates.set()
        for hand, numbers in calls:
            for other in numbers:
                assert "max_requests_in_flight=1" in hand.response(other).error.message
        door.set()
        slow.response(number)


def test_nothing_is_inflated_for_who_has_shown_no_token():
    with serve_gym(long, token="secret") as server, Hand(server) as hand:
        number = hand.open(CHECK, grpc_encoding="gzip")
        hand.raw(number, message(gzip.compress(b""), flag=1))
        assert hand.status(number)[0] == Code.UNIMPLEMENTED
        other = hand.open(CHECK, grpc_encoding="gzip")
        hand.say(other, b"")  # plain, though it names a compression
        assert hand.status(other)[0] == 0
        assert hand.status(hand.open(grpc_encoding="gzip"))[0] == Code.UNAUTHENTICATED
        assert not any(thread.name == "bridge-helper" for thread in threading.enumerate())


def test_requests_behind_one_that_is_inflated_keep_their_order_and_a_reset_frees_all(server):
    with Hand(server) as hand:
        number = hand.open(grpc_encoding="gzip")
        packed = message(gzip.compress(CREATE), flag=1)
        hand.raw(number, message(LEAVE) + packed + message(LEAVE) + packed, end=True)
        kinds = [hand.response(number).WhichOneof("payload") for _ in range(4)]
        assert kinds == ["leave_world", "create_world", "leave_world", "create_world"]
        assert hand.status(number) == (0, "")
        number = hand.open(grpc_encoding="gzip")
        hand.raw(number, message(gzip.compress(random.Random(0).randbytes(3_000_000)), flag=1) + message(LEAVE))
        hand.cut(number)
        until(lambda: (server.status()["queued_bytes"], server.connections) == (0, 0))


def test_compressed_requests_that_wait_are_counted_as_large_as_they_are():
    with serve_gym(LargeEnv) as server, Hand(server, INITIAL_WINDOW_SIZE=20_000) as hand:
        hand.credits = False
        number = hand.play(grpc_encoding="gzip")
        bomb = message(gzip.compress(b"\xff" * 1_000_000), flag=1)
        hand.raw(number, message(BEGIN) + bomb * 10)
        until(lambda: server.status()["queued_bytes"] > 10_000_000)
        hand.room(1 << 24)
        hand.room(1 << 24, number)
        assert hand.response(number).step.state == pb.RUNNING
        for _ in range(10):
            assert hand.response(number).error.code == Code.INVALID_ARGUMENT
        until(lambda: server.status()["queued_bytes"] == 0)

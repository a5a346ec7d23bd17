"""Windows of streams and of a connection, and large requests: RFC 9113, 5.2."""

import select
import socket
import time

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from bridge import serve_gym
from bridge.errors import Code
from tests.core.server.http2.envs import LargeEnv, playing
from tests.http2_tools import (
    BEGIN,
    CHECK,
    CREATE,
    DATA,
    END_HEADERS,
    HEADERS,
    LEAVE,
    PREFACE,
    REFLECT,
    SETTINGS,
    STEP,
    WATCH,
    WINDOW_UPDATE,
    Codes,
    Hand,
    block,
    frame,
    message,
    raw,
)
from tests.support import until


def test_an_answer_for_which_there_is_no_room_waits_alone_and_arrives_whole():
    with serve_gym(LargeEnv) as server, Hand(server, INITIAL_WINDOW_SIZE=10_000) as hand:
        hand.credits = False
        small, large = hand.play(), hand.play()
        hand.say(large, BEGIN, STEP)
        hand.until(lambda: len(hand.bodies[large]) > 5000)
        until(lambda: server.status()["queued_bytes"] > 290_000)
        for _ in range(3):
            assert hand.ask(small, LEAVE).WhichOneof("payload") == "leave_world"
        hand.credits = True
        hand.room(5_000_000)
        hand.room(1_000_000, large)
        answers = [hand.response(large).step for _ in range(2)]
        for answer in answers:
            assert answer.observations[1].uint8s.array == bytes([7]) * 300_000
        until(lambda: server.status()["queued_bytes"] == 0)


def test_the_room_that_is_left_may_shrink_below_nothing_and_grow_again():
    with serve_gym(LargeEnv) as server, Hand(server) as hand:
        number = hand.play()
        hand.credits = False
        hand.room(1 << 24)
        hand.say(number, BEGIN)
        hand.until(lambda: len(hand.bodies[number]) >= 65_000)
        hand.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
        hand.send()
        hand.until(lambda: hand.acks == 2)
        hand.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
        hand.send()
        assert len(hand.response(number).step.observations[1].uint8s.array) == 300_000


def test_a_client_that_cuts_a_call_whose_answer_waits_frees_everything():
    with serve_gym(LargeEnv) as server, Hand(server, INITIAL_WINDOW_SIZE=1000) as hand:
        hand.credits = False
        number = hand.play()
        hand.say(number, BEGIN, STEP, STEP)
        until(lambda: server.status()["queued_bytes"] > 290_000)
        hand.cut(number)
        until(lambda: (server.status()["queued_bytes"], server.connections) == (0, 0))
        assert hand.ask(hand.open(), LEAVE).WhichOneof("payload") == "leave_world"


def test_requests_that_waited_are_served_before_those_that_come_with_the_room():
    with serve_gym(LargeEnv) as server, Hand(server, INITIAL_WINDOW_SIZE=30_000) as hand:
        hand.credits = False
        number = hand.play()
        hand.say(number, BEGIN, STEP, LEAVE)
        until(lambda: server.status()["queued_bytes"] > 290_000)
        hand.h2.increment_flow_control_window(1 << 24)
        hand.h2.increment_flow_control_window(1 << 24, number)
        hand.h2.send_data(number, message(CREATE), end_stream=True)
        hand.send()
        kinds = [hand.response(number).WhichOneof("payload") for _ in range(4)]
        assert kinds == ["step", "step", "leave_world", "create_world"]
        assert hand.status(number) == (0, "")


@pytest.mark.parametrize("pad", [None, 100])
def test_a_large_request_goes_beyond_the_streams_window_and_others_are_served_meanwhile(server, pad):
    with Hand(server) as hand:
        large, small = hand.open(), hand.open()
        body = message(b"\xff" * 5_500_000)
        hand.raw(large, body[:4_500_000], pad=pad)
        assert hand.ask(small, LEAVE).WhichOneof("payload") == "leave_world"
        hand.raw(large, body[4_500_000:], pad=pad)
        assert hand.response(large).error.code == Code.INVALID_ARGUMENT
        assert hand.ask(large, LEAVE).WhichOneof("payload") == "leave_world"
        until(lambda: server.status()["queued_bytes"] == 0)


def test_a_large_request_that_is_cut_off_gives_its_room_back(server):
    with Hand(server) as hand:
        number = hand.open()
        hand.raw(number, message(bytes(1_000_000))[:70_000])
        until(lambda: 69_000 < server.status()["queued_bytes"] < 200_000)  # what came, not what was announced
        hand.cut(number)
        until(lambda: (server.status()["queued_bytes"], server.connections) == (0, 0))


@pytest.mark.parametrize("path", [CHECK, WATCH, REFLECT])
def test_a_large_request_to_grpcs_own_services_is_refused_and_gives_its_room_back(server, path):
    with Hand(server) as hand:
        number = hand.open(path)
        hand.say(number, bytes(100_000))
        assert hand.status(number)[0] == Code.RESOURCE_EXHAUSTED
        until(lambda: server.status()["queued_bytes"] == 0)


def test_a_watch_is_one_request(server):
    with Hand(server) as hand:
        number = hand.open(WATCH)
        hand.say(number, b"")
        assert hand.answer(number)
        hand.say(number, b"")
        assert hand.status(number)[0] == Code.INVALID_ARGUMENT


@pytest.mark.parametrize("path", [WATCH, REFLECT])
def test_many_small_requests_in_a_large_frame_of_grpcs_own_services_are_charged(server, path):
    """A Watch ends with its second request, and the rest of the frame is dropped: that is cheap, but not free."""
    windows = frame(SETTINGS, 0, 0, b"\0\4\x7f\xff\xff\xff") + frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\0\0")
    begin = PREFACE + windows + frame(HEADERS, END_HEADERS, 1, block(path))
    data = memoryview(frame(DATA, 0, 1, bytes((1 << 22) - 1)))  # 838,860 empty messages
    with raw(server) as sock, playing(server):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        sock.sendall(begin)
        for start in range(0, 3 * 65536, 65536):
            charged = server.status()["charged_stranger"]
            pieces, deadline = data[start : start + 65536], time.monotonic() + 30.0
            while pieces or server.status()["charged_stranger"] == charged:
                assert time.monotonic() < deadline, "it was not charged, or not read"
                readable, writable, _ = select.select([sock], [sock] if pieces else [], [], 0.01)
                if readable:
                    assert sock.recv(1 << 20), "the server closed"
                if writable:
                    pieces = pieces[sock.send(pieces) :]


def test_who_asks_and_asks_reflection_and_takes_no_answers_is_ended(server):
    path = REFLECT
    ask = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    with Hand(server, INITIAL_WINDOW_SIZE=0) as hand, playing(server):
        number = hand.open(path)
        hand.say(number, *[ask] * 3)
        hand.room(10_000, number)
        assert hand.answer(number) == hand.answer(number) == hand.answer(number)
        other = hand.open(path)
        hand.say(other, *[ask] * 1000)
        hand.until(lambda: other in hand.resets)
        assert hand.resets[other] == Codes.ENHANCE_YOUR_CALM


def test_an_ended_calls_answers_that_nobody_takes_are_dropped():
    with serve_gym(LargeEnv) as server, Hand(server, INITIAL_WINDOW_SIZE=20_000) as hand:
        hand.credits = False
        number = hand.play()
        hand.say(number, BEGIN)
        until(lambda: server.status()["queued_bytes"] > 270_000)
        hand.raw(number, b"\7\0\0\0\0")
        assert hand.status(number)[0] == Code.INTERNAL
        until(lambda: (server.status()["queued_bytes"], server.connections) == (0, 0))

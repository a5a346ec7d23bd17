"""Calls whose environment is slow hold up nobody else."""

import threading

import grpc
import pytest

from bridge import serve_gym
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv
from tests.core.server.http2.envs import SlowEnv
from tests.http2_tools import (
    BEGIN,
    CHECK,
    DATA,
    LEAVE,
    STEP,
    Hand,
    frame,
    message,
)
from tests.inside import (
    calls_of,
    look_at_sockets_after,
    server_signs_of_life,
)
from tests.peers import Stream
from tests.support import until


@pytest.mark.parametrize("safe", [False, True])
def test_a_slow_environment_holds_up_nobody_else(door, safe):
    with (
        serve_gym(lambda: SlowEnv(door), thread_safe=safe) as server,
        Hand(server) as slow,
        Hand(server) as hand,
    ):
        number, other = slow.play(), hand.play()
        slow.step(number, BEGIN)
        hand.step(other, BEGIN)
        door.shut.set()
        slow.say(number, STEP)
        until(lambda: door.waiting == 1)
        door.shut.clear()
        if safe:
            for _ in range(3):
                assert hand.step(other).state == pb.RUNNING
        checks = hand.open(CHECK)
        hand.say(checks, b"")
        assert hand.status(checks)[0] == 0
        hand.h2.ping(b"12345678")
        hand.send()
        hand.until(lambda: hand.pongs == 1)
        slow.h2.ping(b"12345678")
        slow.send()
        slow.until(lambda: slow.pongs == 1)  # on the same connection too
        assert slow.ask(slow.open(), LEAVE).WhichOneof("payload") == "leave_world"
        with Hand(server) as third:
            assert third.ask(third.open(), LEAVE).WhichOneof("payload") == "leave_world"
        assert not slow.has_answer(number)
        door.open.set()
        assert slow.response(number).step.state == pb.RUNNING


def test_answers_to_requests_that_came_together_with_a_slow_one_do_not_wait_for_it(door, monkeypatch):
    server_signs_of_life(monkeypatch, 3600.0)
    with serve_gym(lambda: SlowEnv(door)) as server, Hand(server) as hand:
        slow, quick = hand.play(), hand.open()
        hand.step(slow, BEGIN)
        door.shut.set()
        hand.h2.send_data(quick, message(LEAVE))
        hand.h2.send_data(slow, message(STEP))
        hand.send()
        assert hand.response(quick).WhichOneof("payload") == "leave_world"
        assert not hand.has_answer(slow)
        door.open.set()
        assert hand.response(slow).step.state == pb.RUNNING


@pytest.mark.slow
def test_no_more_is_read_of_a_connection_whose_requests_are_behind(monkeypatch):
    look_at_sockets_after(monkeypatch, 0.0005)
    held = []

    class Watched(CountingEnv):
        def step(self, action):
            held.append(len(calls_of(server).ready))
            return super().step(action)

    with serve_gym(lambda: Watched(1_000_000)) as server, Hand(server) as hand:
        number = hand.play()
        hand.step(number, BEGIN)
        hand.room(1 << 30)
        hand.room(1 << 30, number)
        count = 4 * 65536 // len(message(STEP))
        sender = threading.Thread(target=hand.sock.sendall, args=(frame(DATA, 0, number, message(STEP)) * count,))
        sender.start()
        while len(held) < count:
            assert hand.sock.recv(65536)
        sender.join(20.0)
        assert max(held) <= 2 * 65536 // len(message(STEP))
        hand.sock.close()
        until(lambda: server.connections == 0)


@pytest.mark.parametrize("how", ["cut", "close", "half-close"])
def test_a_client_that_goes_during_a_slow_step_frees_its_world_afterwards(door, how):
    with serve_gym(lambda: SlowEnv(door)) as server, Hand(server) as hand:
        number = hand.play()
        hand.step(number, BEGIN)
        door.shut.set()
        hand.say(number, STEP, b"\xff" * 100_000)
        until(lambda: door.waiting == 1)
        until(lambda: server.status()["requests"] == 1)
        if how == "cut":
            hand.cut(number)
        elif how == "half-close":
            hand.h2.end_stream(number)
            hand.send()
        else:
            hand.sock.close()
        assert door.closed == 0
        door.open.set()
        until(lambda: (server.connections, door.closed) == (0, 1))
        if how == "half-close":
            assert hand.response(number).step.state == pb.RUNNING
            assert hand.response(number).error.code == Code.INVALID_ARGUMENT
            assert hand.status(number) == (0, "")
        until(lambda: (server.status()["requests"], server.status()["queued_bytes"]) == (0, 0))


def test_the_server_stops_during_a_slow_step_once_that_is_over(door):
    with serve_gym(lambda: SlowEnv(door)) as server:
        stream = Stream(server).join()
        stream.ask(step=pb.StepRequest(requested_observations=[1]))
        door.shut.set()
        stream.send(step=pb.StepRequest(actions={1: pack_tensor(1)}))
        until(lambda: door.waiting == 1)
        stopping = threading.Thread(target=server.stop, args=(0.1,))
        stopping.start()
        with pytest.raises(grpc.RpcError) as caught:
            stream.take()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        door.open.set()
        stopping.join(20.0)
        assert not stopping.is_alive()
        assert door.closed == 1
        stream.close()


def test_the_server_stops_though_environments_are_slow_to_close():
    class SlowToClose(CountingEnv):
        def close(self):
            closing.append(self)
            assert go_on.wait(20.0)

    closing, go_on = [], threading.Event()
    with serve_gym(lambda: SlowToClose(1000)) as server, Hand(server) as first, Hand(server) as second:
        first.step(first.play(), BEGIN)
        second.step(second.play(), BEGIN)
        stopping = threading.Thread(target=server.stop, args=(0.0,))
        stopping.start()
        until(lambda: closing)
        go_on.set()
        stopping.join(20.0)
        assert not stopping.is_alive()
        assert len(closing) == 2


def test_many_slow_calls_at_once_are_all_answered_and_leave_no_thread(door):
    with serve_gym(lambda: SlowEnv(door), thread_safe=True) as server, Hand(server) as hand:
        numbers = [hand.play() for _ in range(20)]
        for number in numbers:
            hand.step(number, BEGIN)
        door.shut.set()
        for number in numbers:
            hand.say(number, STEP)
        until(lambda: door.waiting == 20)
        assert hand.ask(hand.open(), LEAVE).WhichOneof("payload") == "leave_world"
        door.open.set()
        for number in numbers:
            assert hand.response(number).step.state == pb.RUNNING
        for number in numbers:
            hand.cut(number)
        until(lambda: server.connections == 1)
        until(lambda: server.status()["requests"] == 0)
        until(lambda: sum(t.name.startswith("bridge-world") for t in threading.enumerate()) <= 1)

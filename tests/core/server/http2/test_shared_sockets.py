"""Remotes that share a socket, and what a connection holds until it ends."""

import contextlib
import gc
import struct
import threading

import numpy as np
import pytest

from bridge import Limits, errors, make_remote, make_vec_remote, serve_gym
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import Proxy
from bridge.wrappers import BlockingReset
from tests.core.server.http2.envs import LargeEnv, long, playing, without_threads
from tests.frame_proxy import FrameProxy
from tests.http2_tools import (
    BEGIN,
    HELLO,
    LEAVE,
    WATCH,
    Hand,
    frame,
    message,
    raw,
)
from tests.inside import (
    Call,
    as_another_machine,
    connections_of,
    objects_at,
)
from tests.support import until


def sockets_and_streams(server):
    status = server.status()
    return status["sockets"], status["connections"]


def zeros(envs):
    return np.zeros(envs.num_envs, np.int64)


def running(envs):
    return [report.state for report in envs.remotes()] == ["running"] * len(envs.remotes())


@pytest.mark.parametrize("over", ["grpc", "unix"])
def test_remotes_at_one_place_share_a_socket(tmp_path, over):
    with serve_gym(long, unix_path=str(tmp_path / "s")) as server:
        (url,) = [url for url in server.urls if url.startswith(over)]
        envs = make_vec_remote(url, num_envs=4, timeout=20)
        BlockingReset(envs).reset(seed=0)
        assert sockets_and_streams(server) == (1, 4)
        for _ in range(3):
            envs.step(zeros(envs))
        assert server.connections == 4
        envs.close()
        until(lambda: server.connections == 0)
        until(lambda: server.status()["sockets"] == 0)


def test_a_shared_socket_that_is_cut_truncates_all_slots_and_they_come_back():
    with serve_gym(long) as server, Proxy(server.port) as proxy:
        envs = make_vec_remote(f"grpc://127.0.0.1:{proxy.port}", num_envs=4, timeout=20)
        BlockingReset(envs).reset(seed=0)
        envs.step(zeros(envs))
        assert proxy.connections == 1
        proxy.cut()
        cut = np.zeros(4, bool)
        while not cut.all():
            cut |= envs.step(zeros(envs))[3]
        while not running(envs):
            envs.step(zeros(envs))
        assert proxy.connections == 1
        for report in envs.remotes():
            assert report.steps_asked == report.steps_received + report.steps_lost
        envs.close()
        until(lambda: server.connections == 0)


def test_a_slot_whose_call_ends_leaves_the_others_on_the_socket(server):
    with FrameProxy(server.port) as proxy:
        envs = make_vec_remote(proxy.url, num_envs=3, timeout=20)
        BlockingReset(envs).reset(seed=0)
        proxy.end_stream(grpc_status=str(int(Code.UNAVAILABLE)), grpc_message="enough")
        truncated = np.zeros(3, bool)
        while not truncated.any():
            truncated |= envs.step(zeros(envs))[3]
        assert truncated.sum() == 1
        while not running(envs):
            assert envs.step(zeros(envs))[3].sum() == 0
        assert sockets_and_streams(server) == (1, 3)
        assert proxy.accepted == 1
        envs.close()


def test_a_slot_that_is_refused_leaves_the_others_on_the_socket():
    with serve_gym(long, limits=Limits(max_connections=2)) as server:
        first = Call(server.url, shared=True)
        lines = [first, *(Call(server.url, neighbour=first, shared=True) for _ in range(2))]
        assert len({line.connection for line in lines}) == 1
        for line in lines:
            line.send(LEAVE)
        came = [first.get(20.0) for _ in range(3)]
        assert [isinstance(what, errors.RefusedError) for line, what in came if line is lines[2]] == [True]
        assert not any(isinstance(what, Exception) for line, what in came if line is not lines[2])
        first.send(LEAVE)
        assert first.get(20.0)[0] is first
        for line in lines:
            line.close(1.0)
        until(lambda: server.status()["sockets"] == 0)


def test_another_machines_name_is_not_shared(server, monkeypatch):
    first = Call(server.url, shared=True)
    lines = [first, Call(server.url, neighbour=first, shared=True)]
    as_another_machine(monkeypatch, "core.client.wire.connection")
    lines += [Call(server.url, neighbour=first, shared=True) for _ in range(2)]
    assert len({line.connection for line in lines}) == 3
    for line in lines:
        line.close(0.0)


def test_a_single_remote_plays_over_what_is_left_of_a_broken_neighbour(server):
    with playing(server):
        env = make_remote(server.url)
        env.reset(seed=0)
        env.step(1)
        env.close()


def test_a_world_is_refused_where_no_thread_is_left_for_it_and_made_later(monkeypatch):
    with serve_gym("CartPole-v1", thread_safe=True) as server:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", without_threads("bridge-world"))
            with pytest.raises(errors.RefusedError, match="no thread left") as caught:
                make_remote(server.url, timeout=20)
            assert caught.value.code == errors.Code.RESOURCE_EXHAUSTED
        env = make_remote(server.url, timeout=20)
        env.reset(seed=0)
        env.close()


# What a connection holds


@pytest.mark.slow
def test_everything_of_a_connection_is_freed_when_it_closes_without_the_garbage_collector():
    """Objects that wait for the garbage collector are memory that nobody counts."""
    with serve_gym(LargeEnv) as server:
        with Hand(server) as first:
            first.step(first.play(), BEGIN)
        until(lambda: (server.status()["sockets"], server.status()["worlds"]) == (0, 0))
        gc.collect()
        before = objects_at(server, "bridge.core.server", "bridge.core.transport")
        with Hand(server, INITIAL_WINDOW_SIZE=10_000) as hand:
            hand.credits = False
            number = hand.play()
            hand.say(number, BEGIN)  # an answer that waits
            half = hand.open(grpc_timeout="1H")
            hand.raw(half, message(bytes(1_000_000))[:300_000])  # a request that is not complete
            hand.open(WATCH)
            until(lambda: server.status()["queued_bytes"] > 500_000)
            assert (
                objects_at(server, "bridge.core.server", "bridge.core.transport") - before
            ).total() >= 5  # the connection, its protocol, HTTP/2, two calls
            gc.collect()
            gc.disable()
        try:
            until(lambda: (server.connections, server.status()["queued_bytes"]) == (0, 0))
            until(lambda: not objects_at(server, "bridge.core.server", "bridge.core.transport") - before)
        finally:
            gc.enable()


def test_memory_is_taken_for_what_came_and_not_for_what_was_announced():
    with serve_gym(long) as server, Hand(server) as hand:
        for _ in range(20):
            number = hand.open()
            hand.raw(number, message(b"")[:1] + struct.pack(">I", 512 << 20) + bytes(1000))
        other = hand.play()  # by which the server has seen the others
        assert hand.step(other, BEGIN).state == pb.RUNNING
        assert 0 < server.status()["queued_bytes"] < 50_000


def test_a_message_that_is_cut_off_by_the_end_of_its_stream_is_an_error(server):
    with Hand(server) as hand:
        for part in (message(LEAVE)[:3], message(LEAVE)[:-1]):
            number = hand.open()
            hand.raw(number, part, end=True)
            code, details = hand.status(number)
            assert code == Code.INTERNAL
            assert "in the midst of a message" in details


def test_a_call_ends_when_the_time_of_its_client_is_over(server):
    with Hand(server) as hand:
        number, other = hand.open(grpc_timeout="50m"), hand.open(grpc_timeout="2H")
        assert hand.status(number)[0] == Code.DEADLINE_EXCEEDED
        assert hand.ask(other, LEAVE).WhichOneof("payload") == "leave_world"
        code, details = hand.status(hand.open(grpc_timeout="soon"))
        assert code == Code.INTERNAL
        assert "grpc-timeout" in details
        until(lambda: server.connections == 1)


# Fairness


def test_a_connection_that_floods_is_read_later_and_in_smaller_pieces(server):
    with playing(server), raw(server, HELLO) as sock:
        sock.setblocking(False)

        def flood():
            with contextlib.suppress(BlockingIOError):
                sock.send(frame(99) * 1000)
            return server.status()["throttled"] == 1

        until(flood)
        assert not any(connection.account.productive for connection in connections_of(server) if not connection.calls)
    until(lambda: server.status()["throttled"] == 0)


# Streams that a server, or a proxy before it, does not take


def test_slots_beyond_the_streams_of_a_connection_go_over_further_ones():
    with serve_gym(long) as server, FrameProxy(server.port, streams=2) as proxy:
        envs = make_vec_remote(proxy.url, num_envs=7)
        envs = BlockingReset(envs)
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(zeros(envs))
        assert server.status()["sockets"] == 4
        assert server.connections == 7
        envs.close()


def test_slots_that_are_refused_without_an_announcement_go_over_further_connections():
    with serve_gym(long) as server, FrameProxy(server.port, streams=2, announced=False) as proxy:
        envs = BlockingReset(make_vec_remote(proxy.url, num_envs=7))
        envs.reset(seed=0)
        for _ in range(3):
            assert not envs.step(zeros(envs))[3].any()
        assert server.connections == 7
        assert 4 <= len(proxy.connections) <= 7
        assert sum(report.losses for report in envs.remotes()) == 0
        envs.close()


def test_a_request_that_was_too_large_to_be_sent_is_not_sent_by_a_further_connection(server):
    line = Call(server.url, max_message_bytes=100)
    with pytest.raises(errors.SettingError, match="a request of 101 bytes"):
        line.send(bytes(101))
    line.send(LEAVE)
    assert line.call.unconfirmed == [LEAVE]
    line.close(5.0)


def test_a_stream_that_is_refused_for_ever_is_a_connect_error():
    refused = pytest.raises(errors.ConnectError, match="error 7")
    with serve_gym(long) as server, FrameProxy(server.port, streams=0) as proxy, refused:
        make_remote(proxy.url, timeout=10.0)


@pytest.mark.parametrize("code", [0, 1, 2, 11, None])
def test_a_stream_that_is_cut_is_a_lost_connection_and_a_blocking_loop_goes_on(code):
    """As proxies do: by RST_STREAM of some number, or by the end of the stream without a status."""
    with serve_gym(long) as server, FrameProxy(server.port) as proxy:
        envs = BlockingReset(make_vec_remote(proxy.url, num_envs=2))
        envs.reset(seed=0)
        envs.step(zeros(envs))
        if code is None:
            proxy.end_stream()
        else:
            proxy.reset_stream(code)
        truncated = 0
        for _ in range(50):
            *_, truncations, _ = envs.step(zeros(envs))
            truncated += int(truncations.sum())
            if truncated:
                break
        assert truncated == 1
        for _ in range(5):
            envs.step(zeros(envs))
        (report,) = [remote for remote in envs.unwrapped.remotes() if remote.losses]
        assert "the connection was lost" in report.reason
        envs.close()

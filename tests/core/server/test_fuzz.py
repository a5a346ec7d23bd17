"""Garbled requests of several clients in one server's worlds, and garbled bytes over real connections."""

from __future__ import annotations

import random
import socket
from typing import Any

import grpc
import pytest

from benchmarks import fuzz_http2, fuzz_websocket
from benchmarks.fuzz import garbled, run, valid_requests
from bridge import make_remote, serve_gym
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv
from tests.websocket_tools import PATH, WebSocketChannel


def test_each_request_has_one_answer_and_memory_does_not_grow() -> None:
    report = run(6000, seed=1)
    assert sum(report.answers.values()) == 6000
    assert {"create_world", "join_world", "step", "leave_world", "destroy_world", "error 3"} <= set(report.answers)
    assert report.grown < 30_000_000


@pytest.mark.parametrize("over", ["grpc", "websocket"])
def test_over_a_connection_garbled_requests_have_one_answer_each_and_the_server_goes_on(over: str) -> None:
    rng = random.Random(2)
    pool = valid_requests([])
    requests = [garbled(rng.choice(pool), rng) if rng.random() < 0.5 else rng.randbytes(30) for _ in range(1500)]
    with serve_gym(lambda: CountingEnv(5), web=True) as server:
        channel: Any = grpc.insecure_channel(f"127.0.0.1:{server.port}")
        if over == "websocket":
            channel = WebSocketChannel(server.port)
        call = channel.stream_stream(PATH, request_serializer=None, response_deserializer=None)
        answers = [pb.EnvironmentResponse.FromString(data) for data in call(iter(requests), timeout=60)]
        channel.close()
        assert len(answers) == len(requests)
        assert all(answer.WhichOneof("payload") for answer in answers)
        env = make_remote(server.url)
        env.reset()
        env.close()


def test_header_blocks_of_any_bytes_have_one_defined_outcome_each() -> None:
    outcomes = fuzz_http2.header_blocks(5000, seed=5)
    assert sum(outcomes.values()) == 5000
    assert set(outcomes) <= {"accepted", "stream error", "connection error 9", "connection error 11"}
    assert min(outcomes["accepted"], outcomes["stream error"], outcomes["connection error 9"]) > 100


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="this platform has no Unix sockets")
@pytest.mark.parametrize("connect", [fuzz_http2.connection, fuzz_websocket.connection], ids=["http2", "websocket"])
@pytest.mark.slow
def test_whatever_is_spoken_the_server_lives_on_and_nothing_grows(connect: Any) -> None:
    report = fuzz_http2.run(10_000, seed=4, connect=connect)
    assert {"ended by the server", "closed"} <= set(report.ends)
    assert report.frames >= 10_000
    assert report.grown < 30_000_000
    assert report.files == 0
    assert report.threads <= 1  # the helper thread, which starts with the first compressed request

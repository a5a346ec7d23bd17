"""Garbled requests of several clients in one server's worlds, and garbled bytes over real connections."""

from __future__ import annotations

import random
import socket

import grpc
import pytest

from benchmarks import fuzz_http2
from benchmarks.fuzz import garbled, run, valid_requests
from bridge import make_remote, serve_gym
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv
from bridge.transport.service import METHOD, SERVICE


def test_each_request_has_one_answer_and_memory_does_not_grow() -> None:
    report = run(6000, seed=1)
    assert sum(report.answers.values()) == 6000
    assert {"create_world", "join_world", "step", "leave_world", "destroy_world", "error 3"} <= set(report.answers)
    assert report.grown < 30_000_000


def test_over_a_connection_garbled_requests_have_one_answer_each_and_the_server_goes_on() -> None:
    rng = random.Random(2)
    pool = valid_requests([])
    requests = [garbled(rng.choice(pool), rng) if rng.random() < 0.5 else rng.randbytes(30) for _ in range(1500)]
    with serve_gym(lambda: CountingEnv(5)) as server:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")
            answers = [pb.EnvironmentResponse.FromString(data) for data in call(iter(requests), timeout=60)]
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
def test_whatever_http2_is_spoken_the_server_lives_on_and_nothing_grows() -> None:
    report = fuzz_http2.run(10_000, seed=4)
    assert {"ended by the server", "closed"} <= set(report.ends)
    assert report.frames >= 10_000
    assert report.grown < 30_000_000
    assert report.files == 0
    assert report.threads <= 1  # the helper thread, which starts with the first compressed request

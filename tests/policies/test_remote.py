"""`RemotePolicy` on servers written from openpi's wire alone, well and hostile."""

from __future__ import annotations

import subprocess
import sys
import threading

import msgpack
import numpy as np
import pytest

from bridge.errors import (
    AddressError,
    ConnectError,
    PeerError,
    RefusedError,
    RemoteTimeoutError,
    SettingError,
)
from bridge.policies import RemotePolicy
from tests.policy_peers import METADATA, array, bytes_served, numbers, served


def chunks_of(seen, horizon=3):
    """A policy whose chunk for an observation x is [x, x + 1, …]."""

    def serve(connection):
        connection.send(METADATA)
        for data in connection:
            message = msgpack.unpackb(data)
            seen.append(message)
            first = numbers(message["observation"])[0]
            connection.send(msgpack.packb({"actions": array([[first + step] for step in range(horizon)])}))

    return serve


def answers(*messages):
    """A server that says these messages one after the other, one a request, after its metadata."""

    def serve(connection):
        connection.send(METADATA)
        for message in messages:
            connection.recv()
            connection.send(message)
        for _ in connection:
            pass

    return serve


def test_a_chunk_is_executed_before_the_policy_is_asked_again():
    seen = []
    with served(chunks_of(seen)) as url, RemotePolicy(url) as policy:
        taken = [float(policy(np.array([10.0 * at]))[0]) for at in range(4)]
        assert policy.metadata == {"robot": "arm"}
    assert taken == [0.0, 1.0, 2.0, 30.0]
    assert len(seen) == 2


@pytest.mark.parametrize(("horizon", "asked"), [(1, 6), (2, 3), (3, 2), (9, 2)])
def test_the_execution_horizon_says_how_much_of_a_chunk_is_executed(horizon, asked):
    seen = []
    with served(chunks_of(seen)) as url, RemotePolicy(url, execution_horizon=horizon) as policy:
        for _ in range(6):
            policy(np.zeros(1))
    assert len(seen) == asked


def test_each_slot_has_its_own_chunk_and_a_reset_drops_it():
    seen = []
    with served(chunks_of(seen)) as url, RemotePolicy(url) as policy:
        first = policy(np.array([[1.0], [2.0]]), slots=[4, 7])
        policy.reset([7])
        second = policy(np.array([[100.0], [200.0]]), slots=[4, 7])
    assert first.tolist() == [[1.0], [2.0]]
    assert second.tolist() == [[2.0], [200.0]]
    assert len(seen) == 3


def test_a_dict_of_arrays_and_text_travels_as_openpi_has_it():
    seen = []

    def serve(connection):
        connection.send(METADATA)
        for data in connection:
            seen.append(msgpack.unpackb(data))
            connection.send(msgpack.packb({"actions": array([[1, 2]], "<i8")}))

    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)[:, ::-1]
    with served(serve) as url, RemotePolicy(url) as policy:
        action = policy({"image": image, "prompt": "pick"})
    assert action.tolist() == [1, 2]
    assert seen[0]["prompt"] == "pick"
    assert (numbers(seen[0]["image"]) == image).all()
    assert set(seen[0]) == {"image", "prompt"}


def test_a_lost_connection_is_made_again_and_the_question_asked_again():
    connections = []

    def serve(connection):
        connections.append(connection)
        connection.send(METADATA)
        connection.recv()
        if len(connections) > 1:
            connection.send(msgpack.packb({"actions": array([[5.0]])}))

    with served(serve) as url, RemotePolicy(url) as policy:
        assert policy(np.zeros(1)).tolist() == [5.0]
    assert len(connections) == 2


def test_nobody_there_is_told_with_what_to_start():
    with bytes_served(b"") as url:
        pass
    with pytest.raises(ConnectError, match=r"no policy server: .* Start one: `gymnasium-bridge policy"):
        RemotePolicy(url, reconnect=0)(np.zeros(1))


def test_who_waits_for_a_server_that_is_away_is_told(caplog):
    with bytes_served(b"") as url:
        pass
    with pytest.raises(ConnectError):
        RemotePolicy(url, reconnect=0.3)(np.zeros(1))
    assert [record.getMessage().endswith("; trying again, for at most 0.3 s") for record in caplog.records] == [True]


HOSTILE = {
    "no actions": (msgpack.packb({"action": 1}), "expected actions as an array of numbers.* got None"),
    "text as actions": (msgpack.packb({"actions": "left"}), "expected actions as an array of numbers"),
    "one action, no chunk": (msgpack.packb({"actions": 3}), "expected actions as an array of numbers"),
    "an empty chunk": (msgpack.packb({"actions": []}), "expected actions as an array of numbers"),
    "a ragged list": (msgpack.packb({"actions": [[1.0], [1.0, 2.0]]}), "expected actions as an array of numbers"),
    "NaN": (msgpack.packb({"actions": array([[np.nan]])}), "expected finite actions"),
    "infinity": (msgpack.packb({"actions": array([[np.inf]])}), "expected finite actions"),
    "garbage": (b"\xc1\xff\x00", "expected a message of msgpack"),
    "a number": (msgpack.packb(7), "expected a map with text as keys, got a int"),
    "numbers as keys": (msgpack.packb({1: 2}), "expected a map with text as keys"),
    "objects": (
        msgpack.packb({"actions": {b"__ndarray__": True, b"dtype": "|O", b"data": b"", b"shape": [0]}}),
        "got the dtype '.O'",
    ),
    "a shape that does not fit": (
        msgpack.packb({"actions": {**array([1.0]), b"shape": [2**40]}}),
        "expected a message of msgpack: TypeError: buffer is too small",
    ),
    "a negative shape": (msgpack.packb({"actions": {**array([1.0]), b"shape": [-1]}}), "whose shape fits its 4 bytes"),
    "many values": (msgpack.packb({"x": [[0] * 9_999] * 11}), "at most 100000 values"),
    "deep": (b"\x81\xa1x" + b"\x91" * 100_000, "expected a message of msgpack"),
    "an announced array": (b"\x81\xa1x\xdd\xff\xff\xff\xff", "expected a message of msgpack"),
    "an extension": (msgpack.packb({"x": msgpack.ExtType(1, b"cos")}), "expected a message of msgpack"),
    "a huge message": (bytes(64 * 2**20 + 1), "larger than max_message_bytes=67108864"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_answer_is_named(kind):
    message, text = HOSTILE[kind]
    with (
        served(answers(message)) as url,
        RemotePolicy(url) as policy,
        pytest.raises(PeerError, match=text),
    ):
        policy(np.zeros(1))


def test_an_error_of_the_policy_is_told_and_the_connection_serves_on():
    with served(answers("no CUDA", msgpack.packb({"actions": array([[1.0]])}))) as url, RemotePolicy(url) as policy:
        with pytest.raises(RefusedError, match="the policy failed: no CUDA"):
            policy(np.zeros(1))
        assert policy(np.zeros(1)).tolist() == [1.0]


def test_a_policy_that_was_never_closed_does_not_hold_up_the_end_of_the_program():
    program = """
import sys
import numpy as np
from bridge.policies import RemotePolicy
policy = RemotePolicy(sys.argv[1])
policy(np.zeros(1))
policy.cycle = policy
"""
    with served(chunks_of([])) as url:
        subprocess.run([sys.executable, "-c", program, url], check=True, timeout=30)


def test_a_silent_policy_is_given_up_and_its_late_answer_is_never_taken():
    ask = threading.Event()
    connections = []

    def serve(connection):
        connections.append(connection)
        number = len(connections)
        connection.send(METADATA)
        for _ in connection:
            if number == 1:
                ask.wait(10)
            connection.send(msgpack.packb({"actions": array([[float(number)]])}))

    with served(serve) as url, RemotePolicy(url, timeout=0.5) as policy:
        with pytest.raises(RemoteTimeoutError, match=r"no answer of the policy within 0\.5 s"):
            policy(np.zeros(1))
        ask.set()
        assert policy(np.zeros(1)).tolist() == [2.0]


@pytest.mark.parametrize(
    ("said", "error"),
    [(b"", RemoteTimeoutError), (b"SSH-2.0-OpenSSH_9\r\n", PeerError), (b"HTTP/1.1 403 No\r\n\r\n", RefusedError)],
)
def test_a_server_of_another_kind_is_told(said, error):
    with bytes_served(said) as url, pytest.raises(error):
        RemotePolicy(url, timeout=0.5, reconnect=0)(np.zeros(1))


def test_what_cannot_be_meant_is_refused():
    for url in ("grpc://localhost:1", "http://localhost:1", "localhost:1"):
        with pytest.raises(AddressError, match=r"served over WebSocket\. Expected ws://HOST:PORT") as caught:
            RemotePolicy(url)
        assert "grpc://HOST" not in str(caught.value)
    for query, text in (
        ("timeout=soon", "the timeout 'soon' is no number of seconds"),
        ("tls_ca=ca.pem", "a CA's certificate is for wss:// URLs"),
        ("horizon=3", "'horizon' means nothing to a policy"),
    ):
        with pytest.raises(AddressError, match=rf"{text}\. Expected ws://HOST:PORT or wss://HOST:PORT, optionally"):
            RemotePolicy(f"ws://localhost:1?{query}")
    with pytest.raises(SettingError, match="expected timeout to be a positive number of seconds"):
        RemotePolicy("ws://localhost:1?timeout=-1")
    with pytest.raises(SettingError, match="expected execution_horizon to be a positive integer, got 0"):
        RemotePolicy("ws://localhost:1", execution_horizon=0)
    with pytest.raises(SettingError, match="expected timeout to be a positive number of seconds"):
        RemotePolicy("ws://localhost:1", timeout=float("nan"))
    with served(answers()) as url, RemotePolicy(url) as policy:
        with pytest.raises(SettingError, match="expected a row for each of 2 slots, got"):
            policy(np.zeros((3, 1)), slots=[0, 1])
        with pytest.raises(SettingError, match="expected arrays of bools, numbers or text, got the dtype object"):
            policy(np.array([object()]))

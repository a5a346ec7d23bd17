"""`serve_policy`: one call for many requests, hostile clients, tokens, TLS, and `gymnasium-bridge policy`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import msgpack
import numpy as np
import psutil
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from bridge import TLS
from bridge.cli import main
from bridge.errors import Code, ConnectError, RefusedError, RemoteError, SettingError
from bridge.policies import RemotePolicy, by_rows, serve_policy
from tests.policy_peers import array, numbers
from tests.preloaded import Program
from tests.support import until


def double(batch):
    return np.asarray(batch) * 2


def test_sixty_four_slots_cost_one_call():
    batch = np.arange(128.0, dtype=np.float32).reshape(64, 2)
    with serve_policy(double) as server, RemotePolicy(server.url) as policy:
        actions = policy(batch, slots=range(64))
        assert server.calls == 1
    assert actions.dtype == np.float32
    assert (actions == 2 * batch).all()


def test_more_rows_than_max_batch_are_asked_for_in_parts():
    with serve_policy(double, max_batch=10) as server, RemotePolicy(server.url) as policy:
        assert policy(np.arange(25)[:, None], slots=range(25)).ravel().tolist() == [2 * at for at in range(25)]
        assert server.calls == 3


def greeted(stack, server):
    """A client written from the wire alone, which the server serves by now."""
    client = stack.enter_context(connect(server.url, compression=None))
    assert "bridge/max_batch" in msgpack.unpackb(client.recv(10))
    return client


def test_requests_of_several_clients_that_wait_share_a_call():
    with serve_policy(double, max_wait=10.0) as server, contextlib.ExitStack() as stack:
        clients = [greeted(stack, server) for _ in range(9)]
        for at, client in enumerate(clients):
            client.send(msgpack.packb({"observation": array([at])}))
        answers = [numbers(msgpack.unpackb(client.recv(10))["actions"]).tolist() for client in clients]
        assert answers == [[[2.0 * at]] for at in range(9)]
        assert server.calls == 1


def test_texts_of_different_lengths_share_a_call():
    seen = []

    def note(batch):
        seen.append(batch.tolist())
        return np.zeros(len(batch))

    with serve_policy(note, max_wait=10.0) as server, contextlib.ExitStack() as stack:
        clients = [greeted(stack, server) for _ in range(2)]
        for client, prompt in zip(clients, ("go", "stop"), strict=True):
            client.send(msgpack.packb({"observation": prompt}))
        for client in clients:
            client.recv(10)
    assert sorted(seen[0]) == ["go", "stop"]


def test_observations_of_different_layouts_do_not_share_a_call():
    seen = []

    def note(batch):
        seen.append(sorted(batch))
        return np.zeros(1)

    with serve_policy(note) as server, RemotePolicy(server.url) as policy:
        policy({"a": np.zeros(2)})
        policy({"b": np.zeros(2), "prompt": "go"})
    assert seen == [["a"], ["b", "prompt"]]


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_one_request_that_makes_the_policy_fail_spoils_no_other(error):
    def picky(batch):
        if (batch < 0).any():
            raise error("negative")
        return np.sqrt(batch)

    with serve_policy(picky, max_wait=10.0) as server, contextlib.ExitStack() as stack:
        clients = [greeted(stack, server) for _ in range(3)]
        for client, value in zip(clients, (4.0, -1.0, np.nan), strict=True):
            client.send(msgpack.packb({"observation": array([value])}))
        good, bad, nan = (client.recv(10) for client in clients)
    assert numbers(msgpack.unpackb(good)["actions"]).tolist() == [[2.0]]
    assert bad == f"{error.__name__}: negative"
    assert "expected finite actions, got NaN or infinity" in nan


@pytest.mark.parametrize("returned", ["left", [1, 2, 3], [object()], None])
def test_what_are_no_actions_is_told(returned):
    with (
        serve_policy(lambda batch: returned) as server,
        RemotePolicy(server.url) as policy,
        pytest.raises(RefusedError, match=r"expected actions as an array of numbers, \(1, horizon, …\)"),
    ):
        policy(np.zeros(1))


def test_chunks_of_the_function_are_executed_one_by_one():
    def plan(batch):
        return np.stack([batch, batch + 1], axis=1)

    with serve_policy(plan, chunked=True) as server, RemotePolicy(server.url) as policy:
        assert [policy(np.array([x]), slots=[0]).tolist() for x in (3, 0, 7)] == [[3], [4], [7]]
        assert server.calls == 2


def test_a_policy_of_single_observations_is_called_for_each_row():
    with serve_policy(by_rows(lambda seen: int(seen["x"][0] > 0))) as server, RemotePolicy(server.url) as policy:
        assert policy({"x": np.array([[1.0], [-1.0]])}, slots=[0, 1]).tolist() == [1, 0]


def test_a_client_written_from_the_wire_alone_is_served():
    with serve_policy(lambda batch: batch["state"] + 1, metadata={"robot": "arm"}) as server:
        with connect(server.url, compression=None) as client:
            assert msgpack.unpackb(client.recv(10))["robot"] == "arm"
            client.send(msgpack.packb({"state": array([1.0, 2.0]), "prompt": "go"}))
            answer = msgpack.unpackb(client.recv(10))
        assert numbers(answer["actions"]).tolist() == [[2.0, 3.0]]
        assert answer["server_timing"]["infer_ms"] >= 0


HOSTILE = {
    "garbage": (b"\xc1", "expected a message of msgpack"),
    "text": ("hello", "expected a message of msgpack: TypeError: a bytes-like object is required, not 'str'"),
    "no observation": (msgpack.packb({}), "rows in every part of the observation"),
    "too many rows": (
        msgpack.packb({"observation": array(np.zeros((99, 1))), "bridge/batch": 99}),
        "expected bridge/batch to be 1 to max_batch=64, got 99",
    ),
    "rows that are no number": (msgpack.packb({"x": array([1.0]), "bridge/batch": True}), "got True"),
    "rows that are not there": (
        msgpack.packb({"observation": array(np.zeros((2, 1))), "bridge/batch": 3}),
        "expected 3 rows in every part of the observation, got {2}",
    ),
    "objects": (
        msgpack.packb({"x": {b"__ndarray__": True, b"dtype": "|O", b"data": b"12345678", b"shape": [1]}}),
        "got the dtype '|O'",
    ),
    "nil": (msgpack.packb({"x": None}), "expected observations of arrays, numbers and text"),
    "bytes": (
        msgpack.packb({"x": b"zeros at the end are lost\0"}),
        "expected observations of arrays, numbers and text",
    ),
    "lists of different lengths": (msgpack.packb({"x": [[1], [1, 2]]}), "inhomogeneous"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_request_is_told_and_the_connection_serves_on(kind):
    message, text = HOSTILE[kind]
    with serve_policy(double) as server, connect(server.url, compression=None) as client:
        client.recv(10)
        client.send(message)
        assert text in client.recv(10)
        client.send(msgpack.packb({"observation": array([1.0])}))
        assert numbers(msgpack.unpackb(client.recv(10))["actions"]).tolist() == [[2.0]]


def test_a_message_that_is_too_large_ends_its_connection_alone():
    with serve_policy(double, max_message_bytes=1000) as server, RemotePolicy(server.url) as other:
        assert other(np.ones(1)).tolist() == [2.0]
        with connect(server.url, compression=None) as client:
            client.recv(10)
            client.send(b"\0" * 2000)
            with pytest.raises(ConnectionClosed):
                client.recv(10)
        assert other(np.ones(1)).tolist() == [2.0]
        for _ in range(2):
            with pytest.raises(RefusedError, match="larger than the server takes"):
                other(np.zeros(1000))
            assert other(np.ones(1)).tolist() == [2.0]


def test_clients_that_say_nothing_delay_nobody():
    with serve_policy(double) as server, contextlib.ExitStack() as stack:
        port = int(server.url.rpartition(":")[2])
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))  # no handshake
            stack.enter_context(connect(server.url, compression=None))  # no request
        with RemotePolicy(server.url) as policy:
            assert policy(np.ones(1)).tolist() == [2.0]


@pytest.mark.skipif(sys.platform == "win32", reason="limits the files of a process")
def test_strangers_that_use_up_all_files_do_not_end_the_server(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\ndef act(seen):\n    return seen\n"
    )
    command = [sys.executable, "-m", "bridge", "policy", "mine:act", "--port", "0"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        url = process.stdout.readline().split()[-1]
        address = "127.0.0.1", int(url.rpartition(":")[2])
        with contextlib.ExitStack() as last, contextlib.ExitStack() as stack:
            last.callback(process.kill)
            for _ in range(150):
                stack.enter_context(socket.create_connection(address, 20.0))
            until(lambda: len(psutil.Process(process.pid).net_connections()) > 20)
            stack.close()
            with RemotePolicy(url, timeout=20.0) as policy:
                assert policy(np.ones(1)).tolist() == [1.0]


def test_the_oldest_of_many_that_say_nothing_goes_for_a_further_one():
    with serve_policy(double) as server, contextlib.ExitStack() as stack:
        address = "127.0.0.1", int(server.url.rpartition(":")[2])
        with RemotePolicy(server.url) as policy:
            assert policy(np.ones(1)).tolist() == [2.0]
            callers = [stack.enter_context(socket.create_connection(address, 5.0)) for _ in range(70)]
            # Within less than the ten seconds that `websockets` gives to each.
            assert callers[0].recv(1) == b""
            assert policy(np.ones(1)).tolist() == [2.0]  # a client is none of them


def test_no_more_clients_are_taken_than_max_connections():
    with serve_policy(double, max_connections=1) as server, RemotePolicy(server.url) as first:
        assert first(np.ones(1)).tolist() == [2.0]
        with pytest.raises(RefusedError, match="expected at most max_connections=1 clients"):
            RemotePolicy(server.url)(np.ones(1))
        assert first(np.ones(1)).tolist() == [2.0]


def test_a_page_of_another_site_cannot_reach_a_policy():
    with serve_policy(double, max_connections=1) as server:
        for _ in range(3):
            with pytest.raises(InvalidStatus, match="403"), connect(server.url, origin="http://evil.example"):
                pass
        with RemotePolicy(server.url) as policy:  # those who were refused have taken no place
            assert policy(np.ones(1)).tolist() == [2.0]


def test_a_token_is_asked_for_in_both_spellings(caplog):
    with serve_policy(double, token="secret-token") as server:
        with pytest.raises(RefusedError, match="give the server's token=") as caught:
            RemotePolicy(server.url, token="another")(np.ones(1))
        assert caught.value.code == Code.UNAUTHENTICATED
        for url, token in ((server.url, "secret-token"), (f"{server.url}?token=secret-token", None)):
            with RemotePolicy(url, token=token) as policy:
                assert policy(np.ones(1)).tolist() == [2.0]
        assert "the token is wrong" in caplog.text  # as the logs of all servers say
        assert "another" not in caplog.text
        for scheme in ("Api-Key", "bearer"):
            with connect(server.url, additional_headers={"Authorization": f"{scheme} secret-token"}) as client:
                assert msgpack.unpackb(client.recv(10))
        with pytest.raises(InvalidStatus) as refused:
            connect(server.url)
        assert b"a token is required" in refused.value.response.body


def test_a_server_beyond_loopback_makes_a_token():
    with serve_policy(double, host="0.0.0.0") as server:
        assert server.token
    with serve_policy(double, host="0.0.0.0", insecure=True) as server:
        assert server.token is None


def test_tls_protects_the_way(tmp_path):
    assert main(["cert", "--name", "localhost", "--out", str(tmp_path)]) == 0
    own = TLS(certificate=tmp_path / "server.pem", key=tmp_path / "server.key")
    with serve_policy(double, tls=own, token="secret-token") as server:
        url = server.url.replace("127.0.0.1", "localhost")
        assert url.startswith("wss://")
        with RemotePolicy(url, tls=TLS(ca=tmp_path / "ca.pem"), token="secret-token") as policy:
            assert policy(np.ones(1)).tolist() == [2.0]


def test_a_server_beyond_loopback_may_ask_for_certificates_in_a_tokens_place(tmp_path):
    assert main(["cert", "--name", "localhost", "--out", str(tmp_path)]) == 0
    ca = tmp_path / "ca.pem"
    own = TLS(certificate=tmp_path / "server.pem", key=tmp_path / "server.key", client_ca=ca)
    with serve_policy(double, host="0.0.0.0", tls=own) as server:
        assert server.token is None
        url = server.url.replace("0.0.0.0", "localhost")
        shown = TLS(ca=ca, certificate=tmp_path / "client.pem", key=tmp_path / "client.key")
        with RemotePolicy(url, tls=shown) as policy:
            assert policy(np.ones(1)).tolist() == [2.0]
        for _ in range(5):  # the refusal or the end of the connection comes first
            with RemotePolicy(url, tls=TLS(ca=ca), reconnect=0) as policy, pytest.raises(ConnectError):
                policy(np.ones(1))


def test_a_server_that_was_stopped_and_started_again_answers_the_same_call():
    server = serve_policy(double)
    port = int(server.url.rpartition(":")[2])
    with RemotePolicy(server.url) as policy:
        assert policy(np.ones(1)).tolist() == [2.0]
        server.stop()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(policy, np.ones(1))
            with serve_policy(double, port=port):
                assert answer.result(30).tolist() == [2.0]


def test_a_function_that_does_not_return_does_not_hold_up_stop():
    asked, go = threading.Event(), threading.Event()

    def hang(batch):
        asked.set()
        go.wait(60)
        return double(batch)

    server = serve_policy(hang)
    with RemotePolicy(server.url, reconnect=0) as policy, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(policy, np.ones(1))
        assert asked.wait(10)
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 30
        go.set()
        with pytest.raises(RemoteError):
            answer.result(10)


def test_a_batch_without_rows_is_refused_and_the_connection_goes_on():
    with serve_policy(double) as server, connect(server.url) as client:
        client.recv()
        client.send(msgpack.packb({"bridge/batch": 1, "observation": 3.0}))
        assert client.recv() == "expected 1 rows in every part of the observation, got {-1}"
        client.send(msgpack.packb({"observation": 3.0}))
        assert isinstance(client.recv(), bytes)


def test_a_connection_whose_request_breaks_its_thread_gives_its_place_back():
    nested = 3.0
    for _ in range(508):
        nested = {"a": nested}
    with serve_policy(double, max_connections=1) as server:
        with connect(server.url) as client:
            client.recv()
            client.send(msgpack.packb(nested))
            with contextlib.suppress(ConnectionClosed):
                client.recv()
        until(lambda: policy_answers(server.url))


def policy_answers(url):
    with connect(url) as client:
        return isinstance(client.recv(), bytes)


def test_settings_out_of_their_range_are_refused():
    for keyword, value in (("max_batch", 0), ("max_wait", -1), ("max_connections", True), ("max_message_bytes", 1.5)):
        with pytest.raises(SettingError, match=f"expected {keyword} to be"):
            serve_policy(double, **{keyword: value})
    for port in (-1, 65536):
        with pytest.raises(SettingError, match=f"expected a port from 0 to 65535, got {port}"):
            serve_policy(double, port=port)
    with pytest.raises(SettingError, match="expected a policy that takes observations, got 'random'"):
        serve_policy("random")
    with (
        serve_policy(double) as server,
        pytest.raises(SettingError, match=r"cannot listen on port=.* Choose another port"),
    ):
        serve_policy(double, port=int(server.url.rpartition(":")[2]))


@pytest.mark.slow
def test_the_command_serves_a_function_of_a_module(tmp_path):
    (tmp_path / "mine.py").write_text("def act(seen):\n    return int(seen[0] > 0)\n")
    command = ("-m", "bridge", "policy", "mine:act", "--rows", "--port", "0")
    with Program(*command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}) as process:
        line = process.stdout.readline()
        url = line.split()[-1]
        assert "mine:act" in line
        with RemotePolicy(url) as policy:
            assert policy(np.array([1.0])) == 1
        with urllib.request.urlopen(url.replace("ws://", "http://") + "/healthz", timeout=10) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="the system has no SIGSTOP")
def test_a_client_that_left_while_the_process_was_stopped_is_a_line_not_a_traceback(tmp_path):
    (tmp_path / "mine.py").write_text("def act(seen):\n    return seen\n")
    command = ("-m", "bridge", "policy", "mine:act", "--port", "0")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    request = (
        b"GET / HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    with (tmp_path / "log").open("w+") as log, Program(*command, cwd=tmp_path, env=environ, stderr=log.fileno()) as one:
        url = one.stdout.readline().split()[-1]
        one.send_signal(signal.SIGSTOP)
        for _ in range(8):
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 10) as caller:
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # end by a reset
                caller.sendall(request)
        one.send_signal(signal.SIGCONT)
        with RemotePolicy(url) as policy:
            assert policy(np.array([1.0])) == 1
        until(lambda: "a client disconnected before" in (tmp_path / "log").read_text())
        one.send_signal(signal.SIGINT)
        assert one.wait(30) == 0
        assert "Traceback" not in (tmp_path / "log").read_text()

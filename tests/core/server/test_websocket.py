"""dm_env_rpc over WebSocket, at the port of gRPC: our client, the public library's, and hands that break the rules."""

from __future__ import annotations

import contextlib
import gc
import gzip
import logging
import re
import socket
import ssl
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from websockets.frames import Opcode
from websockets.sync.client import connect as public_connect
from websockets.utils import accept_key

import bridge
from bridge import TLS, Limits, Web, errors, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.cli import main
from bridge.core.transport.credentials import write_secret
from bridge.core.transport.frames import PREFACE
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv, SlowResetEnv, check_server, make_certificates
from bridge.wrappers import BlockingReset
from tests import side_by_side
from tests.inside import (
    Call,
    charge_each_time,
    connections_of,
    in_serving_thread,
    let_wait_at_websockets,
    objects_at,
    server_waits,
    set_websocket_clock,
)
from tests.large_frames import step_large_frames
from tests.parallel_envs import Relay
from tests.peers import METHOD, SERVICE
from tests.preloaded import Program, run
from tests.support import SERVE, LargeArrays, sampled, server_process, until
from tests.websocket_tools import KEY, PATH, SUBPROTOCOL, Hand, frame, handshake, request, token_subprotocol

SECRET = "correct-horse/battery+staple"
LEAVE = request(leave_world=pb.LeaveWorldRequest())
JOIN = request(join_world=pb.JoinWorldRequest())
BEGIN = request(step=pb.StepRequest(requested_observations=[1]))
AGAIN = b"".join(frame(Opcode.BINARY, data) for data in (BEGIN, LEAVE, JOIN))


def long():
    return CountingEnv(1_000_000)


def ws(server):
    return next(url for url in server.urls if url.startswith("ws"))


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certs"))


@pytest.fixture
def server():
    with serve_gym(long, web=True) as server:
        yield server


# Our client


@pytest.fixture
def over_websocket(monkeypatch):
    """Let the tests of fidelity serve over WebSocket."""

    @contextmanager
    def serve(function, **kwargs):
        with serve_gym(function, web=True, **kwargs) as server:
            yield SimpleNamespace(url=ws(server))
            until(lambda: server.connections == 0)
            assert server.worlds in ([], [""])

    monkeypatch.setattr(side_by_side, "serve_gym", serve)


@pytest.mark.parametrize("name", sampled(["CartPole", "Taxi", "MiniGrid"], 3))
@pytest.mark.usefixtures("over_websocket")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_remote_equals_local(name):
    function, steps, vector_steps = side_by_side.ZOO[name]
    side_by_side.compare_one(function, min(steps, 150))
    side_by_side.compare_many(function, 3, 1, min(vector_steps, 25))


@pytest.mark.slow
def test_large_frames_go_both_ways_with_and_without_tls(certs):
    with serve_gym(LargeArrays, web=True) as server:
        step_large_frames(ws(server))
    with serve_gym(LargeArrays, web=True, tls=TLS(certificate=certs["server.pem"], key=certs["server.key"])) as server:
        assert ws(server).startswith("wss://")
        step_large_frames(ws(server), tls=TLS(ca=certs["ca.pem"]))
        until(lambda: server.connections == 0)


def test_a_server_that_is_killed_and_comes_back_is_met_again():
    script = SERVE.replace("serve_gym(", "serve_gym(web=True, port=int(sys.argv[3]), env=").replace(
        "print(server.url", "print(server.urls[1]"
    )
    with server_process(script, "CartPole-v1", "1", "0") as (process, url):
        envs = BlockingReset(make_vec_remote(url, num_envs=2))
        envs.reset(seed=0)
        envs.step([0, 1])
        process.kill()
        process.wait(20)
        with server_process(script, "CartPole-v1", "1", url.rpartition(":")[2]):
            truncated = 0
            for _ in range(300):
                *_, truncations, _ = envs.step([0, 1])
                truncated += int(truncations.sum())
                if truncated >= 2:
                    break
            assert truncated >= 2
            envs.step([0, 1])
            envs.close()


def test_slots_of_grpc_and_websocket_mix_and_each_websocket_has_a_connection_of_its_own(server):
    envs = BlockingReset(make_vec_remote([server.url, ws(server), ws(server)]))
    first, _ = envs.reset(seed=[4, 4, 4])
    after, *_ = envs.step(np.ones(3, np.int64))
    for observations in (first, after):
        assert all(np.array_equal(one, observations[0]) for one in observations)
    assert server.status()["sockets"] == 3
    envs.close()
    until(lambda: server.status()["sockets"] == 0)


def test_steps_are_sent_ahead_over_websocket_too(server):
    env = make_remote(ws(server))
    env.reset(seed=0)
    assert len(list(env.rollout([1] * 300, window=32))) == 300
    env.close()


def test_the_environment_s_own_failure_and_an_unknown_world_are_told_as_over_grpc(server):
    with pytest.raises(errors.RefusedError, match="there is no world"):
        make_remote(f"{ws(server)}?world=nowhere")


def test_several_agents_play_over_websocket():
    with serve_parallel(Relay, web=True) as server:
        from bridge import make_parallel_remote

        env = make_parallel_remote(ws(server))
        env.reset(seed=0)
        env.step({agent: env.action_space(agent).sample() for agent in env.agents})
        env.close()


@pytest.mark.parametrize("keywords", [{"tls": "ca.pem"}, {"transport": "grpcio"}])
def test_settings_that_do_not_fit_a_websocket_are_refused(keywords, server, certs):
    if "tls" in keywords:
        keywords = {"tls": TLS(ca=certs["ca.pem"])}
    with pytest.raises(errors.SettingError, match=r"wss://|speaks gRPC alone"):
        make_remote(ws(server), **keywords)


def test_without_web_a_websocket_client_is_told_what_to_do():
    with (
        serve_gym(long) as server,
        pytest.raises(errors.ConnectError, match=r'protocols=\["websocket"\] \(--protocol websocket\).*grpc://'),
    ):
        make_remote(f"ws://127.0.0.1:{server.port}", timeout=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 4\r\n\r\nnope", "HTTP status 403: nope"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nlater", "HTTP status 503"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "HTTP status 200"),
        (b"SSH-2.0-OpenSSH\r\n", "no WebSocket server"),
        (b"", "closed the connection"),
        (b"\x15\x03\x01\x00\x02\x02\x28", "no WebSocket server"),
    ],
)
def test_whatever_answers_a_client_is_told(answer, said):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        call = Call(f"ws://127.0.0.1:{listener.getsockname()[1]}", 1000)
        peer, _ = listener.accept()
        with peer:
            peer.recv(4096)
            peer.sendall(answer)
            peer.shutdown(socket.SHUT_WR)
            ending = call.receive()
        assert isinstance(ending, (errors.ConnectError, errors.RefusedError))
        assert said in str(ending)
        call.close(0.0)


def test_an_answer_that_is_too_large_ends_the_connection_by_name(server):
    call = Call(ws(server), 40)
    call.send(JOIN)
    ending = call.receive()
    assert isinstance(ending, errors.RefusedError)
    assert "larger than max_message_bytes=40" in str(ending)
    call.close(1.0)


@pytest.mark.parametrize(
    ("sent", "code"), [(frame(Opcode.BINARY, bytes(2000), masked=False), 1009), (frame(3, b"x", masked=False), 1002)]
)
def test_a_server_is_told_why_its_connection_is_ended(sent, code):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        call = Call(f"ws://127.0.0.1:{listener.getsockname()[1]}", 1000)
        peer, _ = listener.accept()
        with peer:
            peer.settimeout(20.0)
            key = re.search("Sec-WebSocket-Key: (.*)\r\n", peer.recv(4096).decode())[1]
            fields = f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {accept_key(key)}\r\n"
            fields += f"Sec-WebSocket-Protocol: {SUBPROTOCOL}\r\n\r\n"
            peer.sendall(b"HTTP/1.1 101 Switching Protocols\r\n" + fields.encode() + sent)
            assert isinstance(call.receive(), errors.RemoteError)
            opcode, _, *mask = peer.recv(6)
            data = bytes(byte ^ mask[index % 4] for index, byte in enumerate(peer.recv(4096)))
            assert (opcode, int.from_bytes(data[:2], "big")) == (0x80 | Opcode.CLOSE, code)
        call.close(0.0)


# The token, and who may come


def test_the_token_lets_in_over_websocket_and_stands_in_no_log(caplog):
    caplog.set_level(logging.DEBUG)
    with serve_gym(long, web=True, token=SECRET) as server:
        env = make_remote(ws(server), token=SECRET)
        env.reset(seed=0)
        env.close()
        for wrong, said in ((None, "a token is required, and none was sent"), ("guess", "the token is wrong")):
            with pytest.raises(errors.RefusedError, match=said) as caught:
                make_remote(ws(server), token=wrong, timeout=20)
            assert caught.value.code == errors.Code.UNAUTHENTICATED
        with Hand(server).open(Sec_WebSocket_Protocol=f"{SUBPROTOCOL}, {token_subprotocol('guess')}") as hand:
            code, reason = hand.closed()
        assert (code, reason[:18]) == (4016, "the token is wrong")
        with Hand(server).open(Sec_WebSocket_Protocol=f"{SUBPROTOCOL}, bridge.token.!") as hand:
            assert hand.closed()[0] == 4016
        assert server.connections == 0
    assert "refused" in caplog.text
    for text in (SECRET, token_subprotocol(SECRET), "guess", token_subprotocol("guess")):
        assert text not in caplog.text


def test_beyond_loopback_a_token_is_made_for_websocket_too():
    with pytest.warns(RuntimeWarning, match="without TLS"):
        server = serve_gym(long, host="0.0.0.0", web=True)
    with server:
        url = f"ws://127.0.0.1:{server.port}"
        with pytest.raises(errors.RefusedError, match="token"):
            make_remote(url, timeout=20)
        token = ws(server).partition("?token=")[2]
        make_remote(f"{url}?token={token}", timeout=20).close()


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "file://", "https://["])
def test_a_page_of_another_site_is_refused_in_words(server, origin):
    with Hand(server).open(Origin=origin) as hand:
        code, reason = hand.closed()
    assert code == 4007
    assert "serves its own page only" in reason
    assert server.connections == 0


def test_the_server_s_own_page_is_let_in_whatever_the_scheme(server):
    for origin in (f"http://127.0.0.1:{server.port}", f"https://127.0.0.1:{server.port}"):
        with Hand(server).open(Origin=origin) as hand:
            assert hand.ask(leave_world=pb.LeaveWorldRequest()).WhichOneof("payload") == "leave_world"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 101),
        ("LOCALHOST:50051", 101),
        ("[::1]:50051", 101),
        ("192.0.2.7", 101),
        (socket.gethostname(), 101),
        ("play.example.org", 101),
        ("rebound.example:50051", 421),
        ("localhost.rebound.example", 421),
        ("[", 421),
        ("", 421),
        (None, 400),
    ],
)
def test_a_name_that_the_server_does_not_know_is_refused(host, status):
    """DNS rebinding: a site has its own name resolve to this machine."""
    with serve_gym(long, web=Web(hosts="play.example.org")) as server, Hand(server) as hand:
        hand.send(handshake(None, Host=host))
        found, _ = hand.head()
        assert found == status
        if status == 421:
            assert b"web=Web(hosts=" in hand.body()
        with Hand(server) as other:
            named = f"Host: {host}\r\n" if host is not None else ""
            other.send(f"GET / HTTP/1.1\r\n{named}\r\n".encode())
            assert (other.head()[0] == 421) is (status == 421)


def test_a_second_host_field_is_refused(server):
    with Hand(server) as hand:
        hand.send(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert hand.head()[0] == 400


def test_a_server_that_drains_says_so_by_a_pong_and_the_stream_goes_on(server):
    with Hand(server).open() as hand:
        hand.send(frame(Opcode.BINARY, JOIN))
        assert hand.frame()[0] is Opcode.BINARY
        server.drain(20.0)
        assert hand.frame() == (Opcode.PONG, b"draining")
        hand.send(frame(Opcode.BINARY, BEGIN))
        opcode, data = hand.frame()
        assert opcode is Opcode.BINARY
        assert pb.EnvironmentResponse.FromString(data).WhichOneof("payload") == "step"


def test_a_file_comes_also_where_its_request_has_used_up_the_connection_s_processor_time(server, monkeypatch):
    charge_each_time(monkeypatch, 0.05)
    with Hand(server) as hand:
        hand.send(b"GET /app.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert hand.head()[0] == 200
        assert hand.body().endswith(b"lobby();\n")


@pytest.mark.parametrize("hosts", ["http://x", ["a:1"], "a,,b"])
def test_web_hosts_are_names(hosts):
    with pytest.raises(errors.SettingError, match="web_hosts to be names"):
        serve_gym(long, web=Web(hosts=hosts))


# The first bytes


def test_the_server_says_nothing_before_the_client_has_begun(server):
    with Hand(server) as hand:
        hand.sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            hand.sock.recv(1)
        hand.sock.settimeout(20.0)
        for byte in handshake(hand.host):
            hand.send(bytes((byte,)))
        assert hand.head()[0] == 101


def test_grpc_that_comes_byte_by_byte_is_grpc(server):
    with Hand(server) as hand:
        for byte in PREFACE + b"\0\0\0\4\0\0\0\0\0":
            hand.send(bytes((byte,)))
        assert hand.sock.recv(9)[3] == 4  # SETTINGS
    make_remote(server.url).close()


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00", b"garbage", b"\0" * 50, b"PRX * HTTP/2.0\r\n\r\n"])
def test_what_is_neither_is_closed(server, data):
    with Hand(server) as hand:
        hand.send(data + b"\r\n\r\n")
        hand.body()
    make_remote(ws(server)).close()


def test_without_web_the_port_speaks_grpc_alone():
    with serve_gym(long) as server, Hand(server) as hand:
        assert not any(url.startswith("ws") for url in server.urls)
        hand.send(handshake(hand.host))
        assert b"HTTP/1.1 101" not in hand.body()


def test_under_tls_http11_is_chosen_where_it_is_offered_and_h2_else(certs):
    with serve_gym(long, web=True, tls=TLS(certificate=certs["server.pem"], key=certs["server.key"])) as server:
        for offered, chosen in ((["h2", "http/1.1"], "http/1.1"), (["h2"], "h2"), (["grpc-exp", "h2"], "h2")):
            context = ssl.create_default_context(cafile=certs["ca.pem"])
            context.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python does by itself from 3.13 on
            context.set_alpn_protocols(offered)
            with (
                socket.create_connection(("127.0.0.1", server.port)) as plain,
                context.wrap_socket(plain, server_hostname="localhost") as sock,
            ):
                assert sock.selected_alpn_protocol() == chosen
                if chosen == "http/1.1":
                    hand = Hand(server, sock).open(Origin=f"https://127.0.0.1:{server.port}")
                    assert hand.ask(leave_world=pb.LeaveWorldRequest()).WhichOneof("payload") == "leave_world"
        credentials = grpc.ssl_channel_credentials(certs["ca.pem"].read_bytes())
        with grpc.secure_channel(f"localhost:{server.port}", credentials) as channel:
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")
            (answer,) = call(iter([LEAVE]), timeout=20)
        assert pb.EnvironmentResponse.FromString(answer).WhichOneof("payload") == "leave_world"
        make_remote(server.url, tls=TLS(ca=certs["ca.pem"])).close()
        make_remote(ws(server), tls=TLS(ca=certs["ca.pem"])).close()


# HTTP/1.1


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"GET / HTTP/3\r\nHost: localhost\r\n\r\n", 400),
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET /" + b"x" * 20_000, 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 500 + b"\r\n", 400),
        (f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), 426),
        (handshake("localhost", Sec_WebSocket_Version="8"), 400),
        (handshake("localhost", Sec_WebSocket_Key="short"), 400),
        (handshake("localhost", Sec_WebSocket_Protocol=None), 400),
        (handshake("localhost", Sec_WebSocket_Protocol="chat"), 400),
        (handshake("localhost").replace(b"GET", b"PUT", 1), 405),
        (handshake("localhost", path="/chat"), 404),
    ],
)
def test_requests_that_are_none_are_answered_in_words_and_closed(server, sent, status):
    with Hand(server) as hand:
        hand.send(sent)
        found, head = hand.head()
        body = hand.body()
    assert found == status
    assert body
    assert "Connection: close" in head
    assert "Content-Security-Policy: default-src 'none'" in head
    until(lambda: server.status()["sockets"] == 0)


def test_whoever_begins_to_speak_and_does_not_go_on_is_closed():
    with serve_gym(long, web=True, limits=Limits(hello_timeout=0.1)) as server:
        for begun in (b"", b"GET / HTTP/1.1\r\n", b"P"):
            with Hand(server) as hand:
                hand.send(begun)
                assert hand.body() == b""


# WebSocket


def test_frames_of_any_size_and_cut_are_one_message(server):
    with Hand(server).open() as hand:
        hand.send(frame(Opcode.BINARY, LEAVE[:1], fin=False) + frame(Opcode.PING, b"x"))
        hand.send(frame(Opcode.CONT, b"", fin=False) + frame(Opcode.CONT, LEAVE[1:]))
        assert hand.frame() == (Opcode.PONG, b"x")
        assert hand.answer().WhichOneof("payload") == "leave_world"
        for byte in frame(Opcode.BINARY, LEAVE):
            hand.send(bytes((byte,)))
        assert hand.answer().WhichOneof("payload") == "leave_world"
        hand.send(frame(Opcode.BINARY, b"\xff" * 200_000))
        answer = hand.answer()
        assert answer.error.code == errors.Code.INVALID_ARGUMENT
        assert "200000 bytes" in answer.error.message
        hand.send(frame(Opcode.PONG) + frame(Opcode.BINARY, b""))
        assert hand.answer().error.code == errors.Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(Opcode.TEXT, b"{}"), 1003),
        (frame(Opcode.TEXT, b"{", fin=False), 1003),
        (frame(Opcode.CONT, b"x"), 1002),
        (frame(3, b"x"), 1002),
        (frame(Opcode.BINARY, LEAVE, masked=False), 1002),
        (frame(Opcode.BINARY, LEAVE, flags=0x40), 1002),
        (frame(Opcode.PING, b"x" * 126), 1002),
        (frame(Opcode.PING, fin=False), 1002),
        (frame(Opcode.BINARY, fin=False) + frame(Opcode.BINARY), 1002),
        (frame(Opcode.CLOSE, b"\x03"), 1002),
        (b"\x82\xff" + (1 << 63).to_bytes(8, "big") + b"mask", 4008),
    ],
    ids=range(11),  # the frames have random masks
)
def test_what_is_no_websocket_ends_this_connection_alone(server, sent, code):
    with Hand(server).open() as other, Hand(server).open() as hand:
        hand.send(sent)
        assert hand.closed()[0] == code
        assert other.ask(leave_world=pb.LeaveWorldRequest()).WhichOneof("payload") == "leave_world"


def test_requests_before_a_close_are_served_and_the_close_is_answered_after_them():
    with serve_gym(long, web=True) as server, Hand(server).open() as hand:
        create = request(create_world=pb.CreateWorldRequest())
        hand.send(frame(Opcode.BINARY, create) + frame(Opcode.BINARY, create) + frame(Opcode.CLOSE, b"\x03\xe8bye"))
        assert hand.closed() == (1000, "bye")
        assert len(server.worlds) == 2
        assert server.connections == 0


def test_a_message_beyond_the_limit_is_refused_by_its_name():
    with serve_gym(long, web=True, limits=Limits(max_message_bytes=1000)) as server:
        for sent in (frame(Opcode.BINARY, bytes(1001)), frame(2, bytes(600), fin=False) + frame(0, bytes(600))):
            with Hand(server).open() as hand:
                hand.send(sent)
                assert hand.closed() == (4008, "a request is larger than max_message_bytes=1000")


def test_memory_is_counted_for_what_came_and_given_back():
    with serve_gym(long, web=True, limits=Limits(max_queued_bytes=1_000_000)) as server:
        with Hand(server).open() as hand:
            hand.send(frame(Opcode.BINARY, bytes(900_000))[:500_000])
            until(lambda: server.status()["queued_bytes"] > 400_000)
        until(lambda: server.status()["queued_bytes"] == 0)
        with Hand(server).open() as hand:
            hand.send(frame(Opcode.BINARY, bytes(700_000), fin=False))
            with contextlib.suppress(ConnectionError):
                hand.send(frame(Opcode.CONT, bytes(700_000)))
            code, reason = hand.closed()
            assert code == 4008
            assert "max_queued_bytes=1000000"[:20] in reason or "requests and answers would take" in reason
        until(lambda: server.status()["queued_bytes"] == 0)
        with Hand(server).open() as hand:
            hand.send(b"\x82\xff" + (900_000).to_bytes(8, "big"))
            hand.send(b"mask" + bytes(1000))
            make_remote(ws(server)).close()
            assert server.status()["queued_bytes"] == 0


def test_of_a_client_of_which_much_waits_nothing_more_is_read(monkeypatch):
    let_wait_at_websockets(monkeypatch, 2000)
    release = threading.Event()
    with serve_gym(lambda: SlowResetEnv(release), web=True) as server, Hand(server).open() as hand:
        hand.send(frame(Opcode.BINARY, JOIN))
        hand.answer()
        (connection,) = connections_of(server)
        hand.send(frame(Opcode.BINARY, BEGIN) + frame(Opcode.BINARY, LEAVE[:1] + bytes(1500)) * 3)
        until(lambda: connection.paused)
        assert connection.protocol.check_keepalive(1e9)  # what it says is not read: it is not taken for dead
        release.set()
        kinds = [hand.answer().WhichOneof("payload") for _ in range(4)]
        assert kinds == ["step", "error", "error", "error"]
        assert not connection.paused
        assert hand.ask(leave_world=pb.LeaveWorldRequest()).WhichOneof("payload") == "leave_world"


def test_a_client_that_sends_and_does_not_read_costs_no_more_than_its_buffers():
    with serve_gym(LargeArrays, web=True) as server, Hand(server).open() as hand:
        hand.ask(join_world=pb.JoinWorldRequest())
        sending = threading.Thread(target=hand.send, args=(AGAIN * 30,))
        sending.start()
        until(lambda: server.status()["queued_bytes"] > 0)  # an answer that the socket does not take
        assert server.status()["queued_bytes"] < 10_000_000
        sending.join(20)
        kinds = [hand.answer().WhichOneof("payload") for _ in range(90)]
        assert kinds == ["step", "leave_world", "join_world"] * 30
        until(lambda: server.status()["queued_bytes"] == 0)


def test_beyond_the_connections_a_client_is_told():
    with serve_gym(long, web=True, limits=Limits(max_connections=1)) as server, Hand(server).open() as first:
        first.ask(leave_world=pb.LeaveWorldRequest())
        with Hand(server).open() as second:
            second.send(frame(Opcode.BINARY, request(leave_world=pb.LeaveWorldRequest())))
            code, reason = second.closed()
        assert code == 4008
        assert "max_connections=1" in reason
        with pytest.raises(errors.RefusedError, match="max_connections=1"):
            make_remote(ws(server), timeout=20)


def test_a_quiet_client_is_asked_for_a_sign_of_life_and_cut_without_one(server, monkeypatch):
    now, (quiet, patience) = [0.0], server_waits()
    set_websocket_clock(monkeypatch, lambda: now[0])
    with Hand(server).open() as hand:
        hand.ask(leave_world=pb.LeaveWorldRequest())
        (connection,) = connections_of(server)

        def check(when):
            found = []

            def run():
                found.append(connection.protocol.check_keepalive(when))
                connection.flush()

            in_serving_thread(server, run)
            until(lambda: found)
            return found[0]

        assert check(quiet + 1)
        assert hand.frame() == (Opcode.PING, b"")
        assert check(quiet + patience)
        now[0] = quiet + 5
        hand.send(frame(Opcode.PONG))
        hand.ask(leave_world=pb.LeaveWorldRequest())
        assert check(quiet + patience + 2)
        assert check(2 * quiet + 6)
        assert not check(3 * quiet + 60)


def test_a_server_that_stops_says_so_to_each_client(server):
    with (
        Hand(server).open() as hand,
        public_connect(f"ws://127.0.0.1:{server.port}{PATH}", subprotocols=[SUBPROTOCOL]) as public,
    ):
        hand.ask(leave_world=pb.LeaveWorldRequest())
        public.send(LEAVE)
        public.recv(20)
        server.stop()
        assert hand.frame() == (Opcode.PONG, b"draining")
        assert hand.closed()[0] == 4014


def test_a_client_that_goes_without_a_word_leaves_its_world(server):
    with Hand(server).open() as hand:
        hand.ask(join_world=pb.JoinWorldRequest())
        assert server.connections == 1
    until(lambda: server.connections == 0)
    until(lambda: server.status()["sockets"] == 0)


@pytest.mark.slow
def test_everything_of_a_connection_is_freed_when_it_closes_without_the_garbage_collector():
    with serve_gym(LargeArrays, web=True) as server:
        with Hand(server).open() as first:
            first.ask(join_world=pb.JoinWorldRequest())
        until(lambda: server.status()["sockets"] == 0)
        gc.collect()
        before = objects_at(server, "bridge.core.server", "bridge.core.transport")
        with Hand(server).open() as hand, Hand(server) as half:
            half.send(b"GET / HTTP/1.1\r\n")
            hand.ask(join_world=pb.JoinWorldRequest())
            hand.send(AGAIN * 20)  # answers that wait
            until(lambda: server.status()["queued_bytes"] > 0)
            assert (
                objects_at(server, "bridge.core.server", "bridge.core.transport") - before
            ).total() >= 5  # two connections, their protocols, a call
            gc.collect()
            gc.disable()
        try:
            until(lambda: (server.connections, server.status()["queued_bytes"]) == (0, 0))
            until(lambda: not objects_at(server, "bridge.core.server", "bridge.core.transport") - before)
        finally:
            gc.enable()


def test_our_own_protocol_s_key_is_answered_as_the_rfc_says(server):
    with Hand(server) as hand:
        hand.send(handshake(hand.host, gymnasium_bridge="1"))
        status, head = hand.head()
    assert status == 101
    assert KEY == "dGhlIHNhbXBsZSBub25jZQ=="
    assert "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head  # RFC 6455, section 1.3
    assert "gymnasium-bridge: " in head


# The command line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "http://127.0.0.1:PORT/\n"),
        pytest.param(["--host", "0.0.0.0", "--web-hosts", "a.example,b.example"], "/#token=", marks=pytest.mark.slow),
        (["--token-file", "token"], "http://127.0.0.1:PORT/ (it asks for the token)\n"),
        pytest.param(["--processes", "2"], "http://127.0.0.1:PORT/\n", marks=pytest.mark.slow),
    ],
)
def test_the_command_prints_the_url_of_the_page(options, said, tmp_path):
    write_secret(tmp_path / "token", b"secret\n")
    command = ["-W", "ignore", "-m", "bridge", "serve", "CartPole-v1", "--web", "--exit-on-eof", *options]
    with Program(*command, pipe=True, cwd=tmp_path) as process:
        lines = iter(process.stdout.readline, "")
        line = next(line for line in lines if line.startswith("In a browser: "))
        url = line.removeprefix("In a browser: ")
        port = url.partition("//")[2].partition("/")[0].rpartition(":")[2]
        assert said.replace("PORT", port) in url
        with socket.create_connection(("127.0.0.1", int(port)), 20) as sock:
            sock.sendall(b"GET /app.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in sock.recv(4096)
        process.stdin.close()
        assert process.wait(30) == 0


# Without the package


def test_without_the_package_the_extra_is_named():
    code = (
        "import sys; sys.modules['websockets'] = None\n"  # as where it is not installed
        "import bridge\n"
        "for call in (lambda: bridge.serve_gym('CartPole-v1', web=True), lambda: bridge.make_remote('ws://localhost:1')):\n"
        "    try:\n        call()\n"
        "    except bridge.errors.SettingError as error:\n        print(error)\n"
    )
    done = run("-c", code, bare=True)
    assert done.stdout.count("pip install -e '.[web]'") == 2


@pytest.mark.slow
def test_the_conformance_checks_pass_over_websocket_with_a_token_and_tls(certs):
    with serve_gym("CartPole-v1", web=True, token=SECRET, tls=TLS(certs["server.pem"], certs["server.key"])) as server:
        report = check_server(f"wss://localhost:{server.port}", token=SECRET, tls=TLS(ca=certs["ca.pem"]), strict=True)
        assert report.ok, str(report)
        with pytest.raises(errors.ConnectError, match="the token is wrong"):
            check_server(f"wss://localhost:{server.port}", token="wrong", tls=TLS(ca=certs["ca.pem"]))
    until(lambda: server.connections == 0)


def test_the_command_checks_over_websocket_and_says_where_nobody_is(server, capsys):
    assert main(["check", ws(server), "--only", "D-9,D-25"]) == 0
    assert "D-25" in capsys.readouterr().out
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    assert main(["check", f"ws://127.0.0.1:{port}"]) == 3
    assert "no connection" in capsys.readouterr().err


def test_grpcio_has_no_port_for_browsers():
    with pytest.raises(errors.SettingError, match="web=True with transport='http2'"):
        serve_gym(long, web=True, transport="grpcio")


def test_head_is_answered_without_a_body_and_every_file_of_the_page_has_its_type(server):
    kinds = {}
    for path in ("/", "/index.html", "/app.js", "/style.css", "/icon.svg"):
        with Hand(server) as hand:
            hand.send(f"GET {path}?x=1 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            status, head = hand.head()
            body = hand.body()
        assert status == 200
        size = int(head.partition("Content-Length: ")[2].partition("\r\n")[0])
        assert len(body) == size > 100
        kinds[path] = head.partition("Content-Type: ")[2].partition("\r\n")[0].partition(";")[0]
        with Hand(server) as hand:
            hand.send(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert f"Content-Length: {size}" in hand.head()[1]
            assert hand.body() == b""
    assert list(kinds.values()) == ["text/html", "text/html", "text/javascript", "text/css", "image/svg+xml"]


@pytest.mark.parametrize(
    ("accepted", "packed"), [("gzip, deflate, br, zstd", True), ("br,gzip", True), ("br", False), ("gzip;q=0", False)]
)
def test_files_of_the_page_are_compressed_for_those_who_take_it(server, accepted, packed):
    bodies = []
    for more in ("", f"Accept-Encoding: {accepted}\r\n"):
        with Hand(server) as hand:
            hand.send(f"GET /app.js HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode())
            head = hand.head()[1]
            bodies.append(hand.body())
    plain, sent = bodies
    assert ("Content-Encoding: gzip" in head) is packed
    assert "Vary: Accept-Encoding" in head
    assert (gzip.decompress(sent) if packed else sent) == plain
    assert (len(sent) < len(plain) / 2) is packed


def test_the_page_names_all_of_its_scripts_so_that_a_browser_asks_for_them_at_once(server):
    with Hand(server) as hand:
        hand.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        hand.head()
        page = hand.body().decode()
    scripts = {path.name for path in (Path(bridge.__file__).parent / "web" / "page").glob("*.js")}
    assert scripts == set(re.findall(r'<link rel="modulepreload" href="([a-z]+\.js)">', page))

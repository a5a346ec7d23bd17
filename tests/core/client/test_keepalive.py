"""Connections that nobody takes answers from for a while, as when a policy is trained between two rollouts."""

import queue
import selectors
import socket
import threading
import time

import h2.config
import h2.connection
import h2.events
import pytest

from bridge.core.client.wire import keepalive
from bridge.errors import ConnectError, ConnectionLostError, PeerError
from tests.inside import Call, new_poller, sign_of_life_after
from tests.support import until

HEADERS = [(":status", "200"), ("content-type", "application/grpc"), ("gymnasium-bridge", "1")]
ANSWER = b"\0\0\0\0\2\x22\0"


class Server:
    """An HTTP/2 server with one client, turned by hand."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"grpc://127.0.0.1:{self.listener.getsockname()[1]}"
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self.seen = []
        self.sock = None

    def accept(self):
        self.sock, _ = self.listener.accept()
        self.sock.settimeout(20.0)
        self.h2.initiate_connection()
        self.read_until(h2.events.RequestReceived)

    def send(self):
        self.sock.sendall(self.h2.data_to_send())

    def read_until(self, kind):
        self.send()
        while not any(isinstance(event, kind) for event in self.seen):
            data = self.sock.recv(65536)
            assert data, f"the client closed, and {kind.__name__} never came"
            self.seen += self.h2.receive_data(data)
            self.send()
        self.seen.clear()

    def until_closed(self):
        """Wait until the client has closed its end."""
        while self.sock.recv(65536):
            pass

    def close(self):
        if self.sock is not None:
            self.sock.close()
        self.listener.close()


@pytest.fixture
def server(monkeypatch):
    sign_of_life_after(monkeypatch, 0.5)
    server = Server()
    yield server
    server.close()


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "bridge-keepalive"]


def test_a_server_that_asks_for_a_sign_gets_it_though_nobody_waits_for_answers(server):
    call = Call(server.url, 1000)
    assert len(threads()) == 1
    server.accept()
    server.h2.send_headers(1, HEADERS)
    server.h2.ping(b"abcdefgh")
    server.read_until(h2.events.PingAckReceived)
    server.h2.send_data(1, ANSWER)
    server.send()
    assert bytes(call.receive()) == ANSWER[5:]
    call.close(0.0)
    until(lambda: not threads())


@pytest.mark.parametrize("waits", [True, False])
def test_a_server_that_gives_no_sign_is_given_up_whether_or_not_somebody_waits(server, waits):
    call = Call(server.url, 1000)
    server.accept()
    server.h2.send_headers(1, HEADERS)
    server.h2.send_data(1, ANSWER)
    server.send()
    assert bytes(call.receive()) == ANSWER[5:]
    server.read_until(h2.events.PingReceived)  # its answer is sent; the next one's is not
    if not waits:
        server.until_closed()
    ending = call.receive()
    assert isinstance(ending, ConnectionLostError)
    assert "keepalive ping" in str(ending)
    call.close(0.0)
    with pytest.raises(queue.Empty):
        call.receive(0.0)
    until(lambda: not threads())


def test_inboxes_share_one_thread_which_ends_with_the_last_of_them(server):
    calls = [Call(server.url, 1000) for _ in range(3)]
    assert len(threads()) == 1
    for call in calls:
        call.close(0.0)
    until(lambda: not threads())
    again = Call(server.url, 1000)
    assert len(threads()) == 1
    again.close(0.0)
    until(lambda: not threads())


def test_a_connection_that_cannot_be_looked_after_takes_no_thread_from_the_others(caplog):
    class Poller:
        def __init__(self, fails):
            self.fails, self.polls = fails, 0

        def poll_nowait(self):
            self.polls += 1
            if self.fails:
                raise MemoryError("all is used")
            return 0.01

    one, other = Poller(True), Poller(False)
    for poller in (one, other):
        keepalive.add(poller)
    try:
        until(lambda: one.polls > 2 and other.polls > 2)
    finally:
        for poller in (one, other):
            keepalive.remove(poller)
    until(lambda: not threads())
    assert "all is used" in caplog.text


def test_a_large_first_answer_that_ends_the_stream_is_delivered_and_so_is_the_end(server):
    call = Call(server.url)
    server.accept()
    server.h2.send_headers(1, HEADERS)
    large = bytes(79_000)
    sent = b"\0" + len(large).to_bytes(4, "big") + large
    for start in range(0, len(sent), 16_000):
        server.h2.send_data(1, sent[start : start + 16_000], end_stream=start + 16_000 >= len(sent))
    data = server.h2.data_to_send()
    server.sock.sendall(data[:-100])
    http = call.connection.protocol.http
    until(lambda: http.frame is not None and http.frame.left == 100)
    server.sock.sendall(data[-100:])
    assert bytes(call.receive()) == large
    assert "without a status" in str(call.receive())
    call.close(0.0)


def test_what_the_other_thread_took_while_a_taker_waited_for_it_is_taken_at_once(monkeypatch):
    """Else the taker would wait for what has come already."""
    poller, slept = new_poller(), []

    class Lock:
        def __enter__(self):
            poller.items.append("here")  # by the thread that held it until now

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(poller, "lock", Lock())
    monkeypatch.setattr(time, "sleep", slept.append)
    assert (poller.get(20.0), slept) == ("here", [])


def test_a_connection_is_looked_after_though_another_one_never_pauses(monkeypatch):
    sign_of_life_after(monkeypatch, 0.0)
    poller, looked = new_poller(), []

    class Quiet:
        def check_keepalive(self):
            looked.append(self)

    near, far = socket.socketpair()
    with near, far:
        far.send(b"x")
        poller._registered.add(Quiet())
        poller.watch(near, selectors.EVENT_READ, poller.items.append)
        assert poller.get(20.0) == selectors.EVENT_READ
        poller.forget(near)
    assert looked


def test_the_garbage_collector_may_close_a_connection_that_is_being_looked_after(server):
    """It runs in whatever thread makes objects, also in the one that holds the lock, and calls `__del__`."""
    call = Call(server.url, 1000, deliver=lambda what: call.close(0.0))
    server.accept()
    server.h2.send_headers(1, HEADERS)
    server.h2.send_data(1, ANSWER)
    server.send()
    server.until_closed()
    until(lambda: not threads())


def test_the_last_inbox_does_not_wait_for_a_thread_that_another_one_needs(monkeypatch):
    sign_of_life_after(monkeypatch, 0.1)  # looks every tenth of it
    keeper = keepalive._Keeper()
    looked, free = threading.Event(), threading.Event()

    class Busy:
        def poll_nowait(self):
            looked.set()
            free.wait(20.0)
            return 60.0

    first, second = Busy(), Busy()
    keeper.add(first)
    assert looked.wait(20.0)
    sign_of_life_after(monkeypatch, 600.0)
    leaving = threading.Thread(target=keeper.remove, args=(first,))
    leaving.start()
    until(lambda: first not in keeper._all)
    keeper.add(second)
    leaving.join(10.0)
    waited = leaving.is_alive()
    free.set()
    keeper.remove(second)
    until(lambda: not threads())
    leaving.join(20.0)
    assert not waited


def test_an_environment_that_is_collected_while_the_thread_starts_does_not_block_it(monkeypatch):
    """The garbage collector may run in the thread that starts, and close an environment there."""

    class Pool:
        def poll_nowait(self):
            return 1.0

    plain = threading.Thread

    class Starting(plain):
        def start(self):
            collected = plain(target=keeper.remove, args=(Pool(),))
            collected.start()
            collected.join(5.0)
            blocked.append(collected.is_alive())
            super().start()

    blocked = []
    keeper, pool = keepalive._Keeper(), Pool()
    monkeypatch.setattr(threading, "Thread", Starting)
    keeper.add(pool)
    monkeypatch.undo()
    keeper.remove(pool)
    assert blocked == [False]


@pytest.mark.parametrize("answered", [False, True])
def test_a_server_is_told_by_which_rule_of_http2_its_connection_is_ended(server, answered):
    call = Call(server.url)
    server.accept()
    if answered:
        server.h2.send_headers(1, HEADERS)
        server.h2.send_data(1, ANSWER)
        server.send()
        assert isinstance(call.receive(), (bytes, bytearray))
    server.sock.sendall(b"\0\0\1" + bytes(5) + b"\0x")  # DATA outside of all streams
    assert isinstance(call.receive(), PeerError if answered else ConnectError)
    seen = server.seen
    while data := server.sock.recv(65536):
        seen += server.h2.receive_data(data)
    assert [event.error_code for event in seen if isinstance(event, h2.events.ConnectionTerminated)] == [1]
    call.close(0.0)

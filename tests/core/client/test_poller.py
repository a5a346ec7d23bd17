"""The queue that a client takes answers from, which looks after sockets meanwhile."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from typing import Any

import pytest

from bridge.core.client.wire.poller import Poller
from bridge.core.transport.http2 import Http2
from tests.http2_tools import MessageReader, pack_prefix
from tests.inside import Call, sign_of_life_after


def test_an_inbox_gives_what_comes_at_its_sockets_and_then_what_is_there() -> None:
    poller: Poller[str] = Poller()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        poller.watch(ours, 1, lambda events: poller.items.append(ours.recv(10).decode()))
        with pytest.raises(queue.Empty):
            poller.get(0.0)
        timer = threading.Timer(0.05, theirs.send, [b"by socket"])
        timer.start()
        assert poller.get(10.0) == "by socket"
        timer.join()
        poller.forget(ours)
        poller.items.append("without sockets")
        assert poller.get(1.0) == "without sockets"


def test_the_only_socket_of_a_poller_is_waited_for_by_its_own_recv() -> None:
    poller: Poller[str] = Poller()
    ours, theirs = socket.socketpair()
    other, other_end = socket.socketpair()
    with ours, theirs, other, other_end:
        poller.watch(
            ours,
            1,
            lambda events: poller.items.append(f"selector: {ours.recv(10)!r}"),
            lambda: poller.items.append("alone"),
        )
        with pytest.raises(queue.Empty):
            poller.get(0.0)  # the first look checks keepalives, and asks the selector
        assert poller.get(10.0) == "alone"
        theirs.send(b"1")
        assert poller.get(0.02) == "selector: b'1'", "recv would wait for too long"
        poller.watch(other, 1, lambda events: poller.items.append(f"other: {other.recv(10)!r}"))
        other_end.send(b"2")
        assert poller.get(10.0) == "other: b'2'", "there are two sockets now"
        poller.forget(other)
        assert poller.get(10.0) == "alone"
        with poller.lock:
            timer = poller.call_later(0.0, lambda: poller.items.append("timer"))
        assert poller.get(10.0) == "timer"
        timer.cancel()
        poller.forget(ours)


def test_sending_to_a_server_that_reads_nothing_is_no_deadlock() -> None:
    """Bytes that the socket does not take are kept, and sent while answers are received."""
    got: list[Any] = []
    http = Http2(client=False, stream_window=1 << 26)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"grpc://127.0.0.1:{listener.getsockname()[1]}"
        connection = Call(url, 1 << 26, deliver=got.append)
        poller = connection.poller
        server, _ = listener.accept()
        with server:
            with contextlib.suppress(queue.Empty):
                poller.get(0.0)  # the client is connected, and sends the head of its call
            stream = None
            while stream is None:
                for stream, _ in http.receive_data(server.recv(65536)):  # noqa: B007 - the call
                    pass
            stream.reader = MessageReader(1 << 26)
            http.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
            server.sendall(b"".join(http.data_to_send()))
            inbox_thread_sees = threading.Event()
            answer = b"\0" * 3_000_000
            http.send_data(stream, [pack_prefix(0, len(answer)), answer], len(answer) + 5)
            received: list[Any] = []

            def read_late() -> None:
                inbox_thread_sees.wait(10.0)
                server.sendall(b"".join(http.data_to_send()))
                while not received:
                    received.extend(event for _, event in http.receive_data(server.recv(1 << 18)))

            reader = threading.Thread(target=read_late)
            reader.start()
            timer = threading.Timer(0.1, inbox_thread_sees.set)
            timer.start()
            connection.send(b"z" * 8_000_000)
            while not got:
                with contextlib.suppress(queue.Empty):
                    poller.get(0.1)
            reader.join(10.0)
            assert not reader.is_alive()
            assert [len(message) for message in (*received, *got)] == [8_000_000, 3_000_000]
            connection.close(0.0)
            timer.join()


def post(poller: Poller[str], item: str) -> None:
    """Add an item as another thread does."""
    poller.items.append(item)
    poller.wake()


def test_the_garbage_collector_may_end_a_connection_while_its_thread_posts(monkeypatch: pytest.MonkeyPatch) -> None:
    poller: Poller[str] = Poller()
    watched, real = socket.socketpair()

    class Interrupted:
        """As if the collector ran in `send`, and closed the connection."""

        close = real.close

        def send(self, data: bytes) -> int:
            poller.remove_poster()
            return real.send(data)

        setblocking = real.setblocking

    monkeypatch.setattr(socket, "socketpair", lambda: (watched, Interrupted()))
    poller.add_poster()
    post(poller, "posted")
    assert poller.get(0.0) == "posted"
    assert real.fileno() == watched.fileno() == -1, "closed, and nothing waits at them any more"


def test_an_item_that_another_thread_posts_wakes_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    sign_of_life_after(monkeypatch, 600.0)  # it looks at its sockets once a minute anyway
    poller: Poller[str] = Poller()
    poller.add_poster()
    began = time.monotonic()
    timer = threading.Timer(0.05, post, [poller, "posted"])
    timer.start()
    assert poller.get(60.0) == "posted"
    assert time.monotonic() - began < 30
    timer.join()
    poller.remove_poster()
    post(poller, "after the end")
    assert poller.get(0.0) == "after the end"

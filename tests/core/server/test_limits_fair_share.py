"""Processor time, shared fairly: sums over simulated time, and a client that goes on after it was refused."""

import contextlib
import gzip
import select
import socket
import time

import pytest
from websockets.frames import Opcode

from bridge import make_remote, serve_gym
from bridge.core.server import limits
from bridge.core.server.limits import BURST, MESSAGE_SHARE, REFILL, SHARE, FairShare, ProcessorAccount
from bridge.errors import RefusedError
from bridge.testing import CountingEnv
from tests.http2_tools import (
    CREATE,
    DATA,
    END_HEADERS,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    STEP,
    WINDOW_UPDATE,
    Hand,
    block,
    frame,
    message,
    raw,
)
from tests.inside import charge_each_time, linger, read_soon
from tests.support import until
from tests.websocket_tools import Hand as Upgraded
from tests.websocket_tools import frame as websocket_frame
from tests.websocket_tools import handshake


@pytest.fixture
def no_share(monkeypatch):
    """Read again after hours who has used more than a little."""
    monkeypatch.setattr(limits, "SHARE", 1e-9)


def test_a_little_at_once_costs_no_wait():
    account = ProcessorAccount(FairShare(), 0.0)
    assert account.charge(BURST / 5, 0.0) == 0.0
    assert account.charge(BURST / 5, 0.0) > 0.0
    assert account.charge(BURST / 2, 10.0) == 0.0  # it has rested


def test_what_stays_below_the_refill_never_waits():
    account = ProcessorAccount(FairShare(), 0.0)
    assert not any(account.charge(REFILL / 250, tick / 100) for tick in range(1, 10_000))


def test_what_is_charged_while_it_waits_makes_it_wait_longer():
    """Of requests of a viewer that came together each is charged when it is served."""
    account = ProcessorAccount(FairShare(), 0.0)
    account.charge(BURST, 0.0)
    waits = [account.charge(0.003, 0.001 * tick) + 0.001 * tick for tick in range(100)]
    assert waits[-1] - waits[0] == pytest.approx(99 * 0.003 / SHARE)


def used_by_flooders(count, share):
    """Return the seconds a second that so many flooders use, in turns of 2 ms of processor time."""
    share.connections = count
    accounts = [ProcessorAccount(share, 0.0) for _ in range(count)]
    due, used, now, end = dict.fromkeys(range(count), 0.0), 0.0, 0.0, 200.0
    waiting = set()
    while True:
        index = min(due, key=due.get)
        now = max(now, due[index])
        if now > end:
            return used / end
        if index in waiting:
            waiting.discard(index)
            share.waiting -= 1
        now += 0.002 / share.speed
        used += 0.002
        wait = accounts[index].charge(0.002, now)
        due[index] = now + wait
        if wait:
            waiting.add(index)
            share.waiting += 1


@pytest.mark.parametrize("count", [1, 4, 50])
def test_flooders_use_their_share_of_the_time_together_however_many_they_are(count):
    assert used_by_flooders(count, FairShare()) < SHARE + REFILL + 0.02


def test_beside_other_programs_flooders_use_their_share_of_what_the_server_gets():
    share = FairShare()
    for _ in range(1000):
        share.note_turn(0.001, 0.004)
    assert share.speed == pytest.approx(0.25, abs=0.01)
    assert used_by_flooders(4, share) < (SHARE + REFILL + 0.02) / 4


@pytest.mark.parametrize("connections", [1, 5])
def test_small_messages_without_end_take_their_part_of_the_time_and_no_more(connections):
    """Each connection sends the next as soon as it is read again, while somebody else waits each time."""
    share, count = FairShare(), 20_000
    share.connections = connections + 1
    accounts = [ProcessorAccount(share, 0.0) for _ in range(connections)]
    due, now, waiting = [0.0] * connections, 0.0, set()
    for _ in range(count):
        at = due.index(min(due))
        if at in waiting:
            waiting.remove(at)
            share.waiting -= 1
        now = max(now, due[at]) + 0.001
        wait = accounts[at].charge(0.001, now, share=MESSAGE_SHARE)
        due[at] = now + wait
        if wait:
            waiting.add(at)
            share.waiting += 1
    assert count * 0.001 / now < MESSAGE_SHARE + REFILL + 0.02


def test_one_long_pause_says_little_of_the_servers_speed():
    share = FairShare()
    share.note_turn(0.001, 0.02)
    assert share.speed > 0.9
    for _ in range(1000):
        share.note_turn(0.001, 0.001)
    assert share.speed == pytest.approx(1.0, abs=0.02)


def test_a_clock_that_stands_still_makes_neither_requests_nor_the_server_worthless():
    share = FairShare()
    share.note_fastest(0.0)
    assert share.worth > 0
    share.note_turn(0.0, 1000.0)
    assert share.speed > 0.01


def test_of_a_long_turn_its_requests_are_not_charged_and_a_large_one_is_reception():
    share = FairShare()
    account = ProcessorAccount(share, 0.0)
    account.judge(0.005, 5000, 3, receives_large=False)
    assert account.excess == pytest.approx(0.005 - 3 * share.worth)
    account.judge(0.005, 50, 0, receives_large=False)
    assert account.excess == pytest.approx(50e-6), "no more than so few bytes explain"
    account.judge(0.001, 65536, 0, receives_large=True)
    assert account.productive
    account.judge(0.001, 65536, 0, receives_large=False)
    assert not account.productive


def test_who_was_refused_and_goes_on_is_not_read_without_end(no_share, monkeypatch):
    linger(monkeypatch, 3600.0)
    with serve_gym(lambda: CountingEnv(5)) as server, socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while client.recv(65536):  # what it says of the refusal, up to its end
            pass
        client.settimeout(1.0)
        with pytest.raises(TimeoutError):
            client.sendall(bytes(1 << 28))


def test_connections_that_come_and_go_are_accepted_later_and_who_steps_goes_on(no_share):
    with serve_gym(lambda: CountingEnv(5)) as server, make_remote(server.url) as env:
        env.reset(seed=0)

        def accepts_later():
            for visitor in [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]:
                visitor.close()
            until(lambda: server.status()["sockets"] == 1)
            with raw(server, HELLO) as newcomer:
                for _ in range(20):  # in each of them the server looks who connects
                    if env.step(env.action_space.sample())[2]:
                        env.reset()
                waits = server.status()["sockets"] == 1
                assert newcomer.recv(9)
            return waits

        until(accepts_later, 60.0)


HELLO = PREFACE + frame(SETTINGS, 0, 0, b"\0\4\x7f\xff\xff\xff") + frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\0\0")
PINGS = frame(PING, 0, 0, bytes(8)) * 120
# A WebSocket message of 70 kB of which all but the end has come.
BEGUN = b"\x02\xff" + (70_000).to_bytes(8, "big") + bytes(4) + bytes(70_000)
FRAGMENT = b"\x00\x80\0\0\0\0"
CALL = HELLO + frame(HEADERS, END_HEADERS, 1, block())
# A field of 200 kB that no message has.
PADDING = b"\xc2\x3e\xc0\x9a\x0c" + bytes(200_000)
EMPTY = frame(DATA, 0, 1, bytes(5))


def flood(server, first, piece):
    """Send a piece again and again until the server reads it later; whoever steps beside it goes on."""
    with make_remote(server.url) as env:
        env.reset(seed=0)
        for _ in range(10):
            env.step(0)
        flood_alone(server, first, piece, lambda: env.step(0))


def flood_alone(server, first, piece, meanwhile=lambda: None):
    """Send a piece again and again until the server reads it later."""
    with raw(server, first) as sock:
        sock.setblocking(False)
        data, sent = piece * 16, 0
        deadline = time.monotonic() + 20.0
        while server.status()["throttled"] == 0:
            assert time.monotonic() < deadline, "it was never read later"
            readable, writable, _ = select.select([sock], [sock], [], 1.0)
            if readable:
                assert sock.recv(1 << 20), "the server closed"
            if writable:
                sent = (sent + sock.send(data[sent:])) % len(data)
            meanwhile()


def test_a_request_beside_other_frames_does_not_make_them_free():
    with serve_gym(lambda: CountingEnv(1 << 30)) as server:
        flood(server, CALL, PINGS + EMPTY)


@pytest.mark.parametrize("flooding", [flood, flood_alone])
def test_fragments_of_a_large_websocket_message_that_hold_nothing_are_charged(flooding):
    """Also where no request has come yet that shows how long one takes."""
    with serve_gym(lambda: CountingEnv(1 << 30), web=True) as server:
        flooding(server, handshake("127.0.0.1:0") + BEGUN, FRAGMENT * 64)


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (HELLO, frame(99)),
        (CALL, frame(DATA, 0, 1)),
        (CALL + frame(DATA, 0, 1, message(bytes(70_000))[:10_000]), frame(DATA, 0, 1)),
        (handshake("127.0.0.1:0") + BEGUN, FRAGMENT),
    ],
    ids=["unknown frames", "empty DATA", "empty DATA in a large message", "fragments"],
)
def test_what_a_closed_connection_had_sent_is_dropped(no_share, first, piece):
    """Also if nothing was ever sent to it, so that it closes without a reset, behind all that it had sent."""
    with serve_gym(lambda: CountingEnv(5), web=True) as server:
        with raw(server, first) as sock:
            sock.setblocking(False)
            data, full = piece * 4000, False
            while not full or server.status()["throttled"] == 0:
                readable, writable, _ = select.select([sock], [sock], [], 0.1)
                if readable:
                    assert sock.recv(1 << 20), "the server closed"
                full = not writable
                with contextlib.suppress(BlockingIOError):
                    data = data[sock.send(data) :] or piece * 4000
        # The serving thread may be between the two.
        until(lambda: (server.status()["sockets"], server.status()["throttled"]) == (0, 0), 20.0)


def test_an_honest_client_that_is_read_later_is_not_closed(monkeypatch):
    """A burst of resets and pings, and a large request of which a part has come: it is pinged, and read later."""
    request = message(STEP + PADDING)
    with serve_gym(lambda: CountingEnv(5)) as server, Hand(server) as hand:
        number = hand.play()
        with monkeypatch.context() as patch:
            charge_each_time(patch, 3600.0)
            for _ in range(50):
                hand.cut(hand.open())
                hand.h2.ping(bytes(8))
            hand.send()
            hand.until(lambda: hand.pings >= 2)
            hand.raw(number, request[:100_000])
            read_soon(server)
            hand.until(lambda: hand.pings >= 5)
            assert server.status()["throttled"] == 1
        read_soon(server)
        hand.raw(number, request[100_000:])
        assert hand.response(number).WhichOneof("payload") == "step"


def test_an_honest_websocket_client_that_is_read_later_is_not_closed(monkeypatch):
    with serve_gym(lambda: CountingEnv(5), web=True) as server, Upgraded(server).open() as hand:
        hand.ask(create_world={})
        with monkeypatch.context() as patch:
            charge_each_time(patch, 3600.0)
            hand.send(websocket_frame(Opcode.PING) * 50)
            asked = 0
            while asked < 3:
                asked += hand.frame()[0] is Opcode.PING
            assert server.status()["throttled"] == 1
        read_soon(server)
        hand.send(websocket_frame(Opcode.BINARY, CREATE))
        while (answer := hand.frame())[0] is Opcode.PING:  # it may be pinged once more before
            pass
        assert answer[0] is Opcode.BINARY


def charged_for(body):
    """Return the seconds that a client is charged for ten requests, each the first of a call, that cannot be read."""
    with serve_gym(lambda: CountingEnv(5)) as server, Hand(server) as hand:
        for _ in range(10):
            number = hand.open(grpc_encoding="gzip")
            hand.raw(number, message(body, flag=1))
            assert hand.status(number)[0] != 0
        return server.status()["charged_client"]


def test_a_compressed_request_that_is_refused_is_charged():
    """Another thread decompresses requests; its time is charged too, or bombs would be free."""
    bomb = gzip.compress(bytes(64 << 20))
    # What cannot be inflated at all costs its reception, which was measured to be a tenth of what the bomb costs. On a
    # busy machine either may cost several times as much.
    assert charged_for(bomb) > 2 * min(charged_for(bytes(len(bomb))) for _ in range(3))


def test_a_websocket_client_that_takes_no_answers_costs_little_memory():
    """Each ping is answered: what its client does not take would be kept without end."""
    ping = b"\x89\xfd\0\0\0\0" + bytes(125)
    with serve_gym(lambda: CountingEnv(5), web=True) as server, Upgraded(server).open() as hand:
        hand.sock.settimeout(0.5)
        sent = 0
        with contextlib.suppress(TimeoutError):  # the server reads no more, or not now
            while sent < 1 << 28:
                sent += hand.sock.send(ping * 500)
        assert sent < 1 << 28
        assert server.status()["queued_bytes"] < 1 << 20


@pytest.mark.slow
def test_an_invalid_request_is_charged_to_its_client():
    """Else a client with the token could have a server look through invalid options without end."""
    with serve_gym(lambda: CountingEnv(5)) as server, make_remote(server.url) as env:
        env.reset(options={"valid": [0] * 9_000})
        valid = server.status()["charged_client"]
        with pytest.raises(RefusedError, match="at most 100000 values"):
            env.reset(options={"too many": [0] * 110_000})
        assert server.status()["charged_client"] > 10 * valid

"""Processor time, shared fairly: sums over simulated time, and a client that goes on after it was refused."""

import socket

import pytest

from bridge import serve_gym
from bridge.server import fair_share
from bridge.server.fair_share import BURST, REFILL, SHARE, FairShare, ProcessorAccount
from bridge.testing import CountingEnv
from tests.inside import linger


def test_a_little_at_once_costs_no_wait():
    account = ProcessorAccount(FairShare(), 0.0)
    assert account.charge(BURST / 5, 0.0) == 0.0
    assert account.charge(BURST / 5, 0.0) > 0.0
    assert account.charge(BURST / 2, 10.0) == 0.0  # it has rested


def test_what_stays_below_the_refill_never_waits():
    account = ProcessorAccount(FairShare(), 0.0)
    assert not any(account.charge(0.0004, tick / 100) for tick in range(1, 10_000))


def test_flooders_use_their_share_of_the_time_together_however_many_they_are():
    for count in (1, 4, 50):
        share = FairShare()
        share.connections = count
        accounts = [ProcessorAccount(share, 0.0) for _ in range(count)]
        due, used, now, end = dict.fromkeys(range(count), 0.0), 0.0, 0.0, 200.0
        waiting = set()
        while True:
            index = min(due, key=due.get)
            now = max(now, due[index])
            if now > end:
                break
            if index in waiting:
                waiting.discard(index)
                share.waiting -= 1
            now += 0.002
            used += 0.002
            wait = accounts[index].charge(0.002, now)
            due[index] = now + wait
            if wait:
                waiting.add(index)
                share.waiting += 1
        assert used / end < SHARE + REFILL + 0.02


def test_who_was_refused_and_goes_on_is_not_read_without_end(monkeypatch):
    monkeypatch.setattr(fair_share, "SHARE", 1e-9)  # who has used more than a little is read again after hours
    linger(monkeypatch, 3600.0)
    with serve_gym(lambda: CountingEnv(5)) as server, socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while client.recv(65536):  # what it says of the refusal, up to its end
            pass
        client.settimeout(1.0)
        with pytest.raises(TimeoutError):
            client.sendall(bytes(1 << 28))

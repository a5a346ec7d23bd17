"""The network itself does what its tests rely on."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import time

import pytest

from bridge.testing import Conditions
from tests.network.machines import PATIENCE, ROOT, ProgramError
from tests.network.network import BLACK_HOLE, NOBODY, Network
from tests.network.programs import serve, steps
from tests.network.relay import Line

SILENCE = 0.3  # seconds without an answer, after which a program here says that there was none


def echo(family, kind=socket.SOCK_STREAM, port=7000):
    """Give back what comes in: over one connection, or in datagrams."""
    with socket.socket(family, kind) as listener:
        listener.bind(("", port))
        if kind == socket.SOCK_DGRAM:
            yield "ready"
            while True:
                listener.sendto(*listener.recvfrom(2000))
        listener.listen()
        yield "ready"
        accepted, _ = listener.accept()
        with accepted:
            while data := accepted.recv(65536):
                accepted.sendall(data)


def connect(host, port=7000, timeout=SILENCE):
    """Return what becomes of a connection, in a word."""
    try:
        socket.create_connection((host, port), timeout).close()
    except TimeoutError:
        return "silence"
    except OSError as error:
        return errno.errorcode[error.errno]
    return "connected"


def round_trip(host):
    """Return the seconds from a message to its echo."""
    with socket.create_connection((host, 7000), PATIENCE) as sock:
        begun = time.monotonic()
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
        return time.monotonic() - begun


def talk(host):
    """Send a word, stand, send a second one; say what comes back in a moment, then what in the end."""
    with socket.create_connection((host, 7000), PATIENCE) as sock:
        sock.sendall(b"one")
        yield sock.recv(3).decode()
        sock.sendall(b"two")
        sock.settimeout(SILENCE)
        try:
            yield sock.recv(3).decode()
        except TimeoutError:
            yield "silence"
        except ConnectionError:
            yield "reset"
        sock.settimeout(PATIENCE)
        yield sock.recv(3).decode()


def datagrams(host, count, size):
    """Send datagrams, and say when they are under way; return how many came back until a pause."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(2.0)
        for _ in range(count):
            sock.sendto(bytes(size), (host, 7000))
        yield "sent"
        back = 0
        try:
            while sock.recv(2000):
                back += 1
        except TimeoutError:
            return back


def look_up(name):
    return sorted({address[4][0] for address in socket.getaddrinfo(name, 80)})


def own_name():
    return socket.gethostname()


def fail():
    raise LookupError("no such thing")


def test_a_far_environment_steps(network):
    game, trainer = network.machine("game-pc"), network.machine("trainer", Conditions(delay=0.04))
    server = game.start(serve, "CartPole-v1")
    server.next()  # it serves
    assert trainer.run(steps, "grpc://game-pc:50051", 10) == 10


def test_a_machine_has_a_name_and_two_addresses(network):
    first, second = network.machine("first"), network.machine("second", Conditions())
    assert second.run(own_name) == "second"
    assert second.run(look_up, "first") == sorted([first.ipv4, first.ipv6])
    assert first.run(look_up, "second") == sorted([second.ipv4, second.ipv6])
    network.name("either", first.ipv4, second.ipv4)
    assert first.run(look_up, "either") == sorted([first.ipv4, second.ipv4])


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_line_takes_its_time_both_ways(network, family):
    near, far = network.machine("near"), network.machine("far", Conditions(delay=0.03), Conditions(delay=0.05))
    server = near.start(echo, family)
    server.next()
    server.go_on()
    assert far.run(round_trip, near.ipv4 if family == socket.AF_INET else near.ipv6) >= 0.08


def test_two_machines_on_the_switch_reach_each_other_and_far_ones_too(network):
    machines = [network.machine("a"), network.machine("b"), network.machine("c", Line()), network.machine("d", Line())]
    for target in machines:
        for source in machines:
            if source is not target:
                assert source.run(connect, target.ipv4, 9, PATIENCE) == "ECONNREFUSED"
                assert source.run(connect, target.ipv6, 9, PATIENCE) == "ECONNREFUSED"


def test_datagrams_are_lost_by_chance_and_the_line_counts_them(network):
    near, far = network.machine("near"), network.machine("far", Conditions(loss=0.3), Conditions())
    server = near.start(echo, socket.AF_INET, socket.SOCK_DGRAM)
    server.next()
    server.go_on()
    program = far.start(datagrams, near.ipv4, 200, 100)
    program.next()
    back = program.result()
    there, _ = network.counts(far)
    assert there.lost > 20
    assert back >= 200 - there.lost, "what was not lost has come back"
    assert back < 180


def test_a_full_queue_loses_what_does_not_fit_and_a_rate_takes_its_time(network):
    slow = Line(rate=20_000, queue=10_000)
    near, far = network.machine("near"), network.machine("far", slow, Line())
    server = near.start(echo, socket.AF_INET, socket.SOCK_DGRAM)
    server.next()
    server.go_on()
    program = far.start(datagrams, near.ipv4, 100, 1000)
    begun = time.monotonic()
    program.next()
    back = program.result()
    there, _ = network.counts(far)
    assert there.dropped > 0
    assert back >= 9, "what the queue holds comes through"
    assert time.monotonic() - begun >= (back - 1) * 1028 / 20_000


def test_a_cut_is_silent_and_a_connection_lives_on_when_it_is_mended(network):
    near, far = network.machine("near"), network.machine("far", Line())
    for source, target in ((near, far), (far, near)):
        server = target.start(echo, socket.AF_INET)
        server.next()
        server.go_on()
        client = source.start(talk, target.ipv4)
        assert client.next() == "one"
        network.cut(near)
        assert client.next() == "silence"
        network.mend(near)
        assert client.next() == "two", "TCP sends again what was lost"


def test_two_machines_on_the_switch_can_be_cut_off_each_other(network):
    first, second = network.machine("first"), network.machine("second")
    network.cut(first)
    assert second.run(connect, first.ipv4) in ("silence", "EHOSTUNREACH")
    network.mend(first)
    assert second.run(connect, first.ipv4, 7000, PATIENCE) == "ECONNREFUSED"


def test_a_firewall_drops_or_rejects(network):
    first, second = network.machine("first"), network.machine("second")
    server = first.start(echo, socket.AF_INET)
    server.next()
    server.go_on()
    first.firewall("tcp dport 7000 drop")
    assert second.run(connect, first.ipv4) == "silence"
    first.firewall("tcp dport 7000 reject with tcp reset")
    assert second.run(connect, first.ipv4, 7000, PATIENCE) == "ECONNREFUSED"
    first.firewall()
    assert second.run(connect, first.ipv4, 7000, PATIENCE) == "connected"


@pytest.mark.parametrize("side", [0, 1], ids=["IPv4", "IPv6"])
def test_a_black_hole_swallows_and_an_address_of_nobody_is_unreachable_in_the_end(network, side):
    machine = network.machine("one")
    assert machine.run(connect, BLACK_HOLE[side]) == "silence"
    assert machine.run(connect, NOBODY[side], 7000, PATIENCE) == "EHOSTUNREACH"


def test_networks_do_not_meet(nursery, tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    one, two = (Network(nursery, folder) for folder in folders)
    try:
        server = one.machine("same").start(echo, socket.AF_INET)
        server.next()
        two.machine("same")
        assert two.machine("other").run(connect, "same", 7000, PATIENCE) == "ECONNREFUSED"
        assert one.machine("other").run(connect, "same", 7000, PATIENCE) == "connected"
    finally:
        one.close()
        two.close()


def test_what_a_program_raises_fails_its_test_by_name(nursery, tmp_path):
    network = Network(nursery, tmp_path)
    machine = network.machine("here")
    with pytest.raises(ProgramError, match="fail on here raised LookupError: no such thing"):
        machine.run(fail)
    unnoticed = machine.start(fail)
    unnoticed.ended()
    with pytest.raises(ProgramError, match="LookupError"):
        network.close()


def test_a_command_runs_on_its_machine(network):
    machine = network.machine("here")
    done = machine.command("python", "-c", "import socket; print(socket.gethostname()); raise SystemExit(3)")
    assert done.ended() == 3
    assert done.output == "here\n"


def test_a_machine_that_ends_closes_its_connections(network):
    near, far = network.machine("near"), network.machine("far")
    server = near.start(echo, socket.AF_INET)
    server.next()
    server.go_on()
    client = far.start(talk, near.ipv4)
    assert client.next() == "one"
    near.close()
    assert client.next() in ("", "reset"), "the end of a connection is no silence"


MAKE = """
import sys, tempfile, pathlib
from tests.network.machines import Nursery
from tests.network.network import Network
network = Network(Nursery(), pathlib.Path(tempfile.mkdtemp(dir=sys.argv[1])))
machines = [network.machine("one"), network.machine("two")]
for machine in machines:
    machine.command("sleep", "1000")
print(*(machine.pid for machine in machines), flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_of_a_killed_run(tmp_path):
    made = subprocess.Popen(
        [sys.executable, "-c", MAKE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    with made:
        died = [os.pidfd_open(int(pid)) for pid in made.stdout.readline().split()]
        assert len(died) == 2
        made.send_signal(signal.SIGKILL)
        made.wait()
    for descriptor in died:
        # Process 1 is only gone when all processes of its machine are; the kernel sees to it.
        assert select.select([descriptor], [], [], PATIENCE)[0]
        os.close(descriptor)

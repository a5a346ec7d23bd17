"""`grpc+dns://`: a DNS server inside the test answers real queries, and changes its answer while slots are stepped."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dnslib
import dnslib.server
import numpy as np
import pytest

from bridge import TLS, DnsDirectory, errors, make_remote, make_vec_remote, serve_gym
from bridge.testing import CountingEnv, make_certificates
from bridge.wrappers import BlockingReset
from tests.planned_env import Episodes, planned_process
from tests.support import sampled, until

NAME = "envs.example"
DEADLINE = 60.0


class Zone(dnslib.server.BaseResolver):  # type: ignore[misc]
    """Answers with its addresses, and with NXDOMAIN where it has none."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.queries = 0

    def resolve(self, request: Any, handler: Any) -> Any:
        self.queries += 1
        reply = request.reply()
        if not self.addresses:
            reply.header.rcode = dnslib.RCODE.NXDOMAIN
        for address in self.addresses:
            reply.add_answer(dnslib.RR(request.q.qname, dnslib.QTYPE.A, rdata=dnslib.A(address), ttl=0))
        return reply


class Dns:
    """A zone on a UDP port, and what looks names up there, in the place of `socket.getaddrinfo`."""

    def __init__(self) -> None:
        self.zone = Zone()
        log = dnslib.server.DNSLogger(logf=lambda line: None)
        self.server = dnslib.server.DNSServer(self.zone, address="127.0.0.1", port=0, logger=log)
        self.port = self.server.server.server_address[1]
        self.server.start_thread()

    def look_up(self, host: str, port: int, **_: Any) -> Any:
        answer = dnslib.DNSRecord.parse(dnslib.DNSRecord.question(host).send("127.0.0.1", self.port, timeout=10))
        if answer.header.rcode != dnslib.RCODE.NOERROR:
            raise socket.gaierror(socket.EAI_NONAME, dnslib.RCODE[answer.header.rcode])
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (str(record.rdata), port)) for record in answer.rr]

    def close(self) -> None:
        self.server.stop()
        self.server.server.server_close()
        self.server.thread.join(10)


@pytest.fixture
def dns() -> Iterator[Dns]:
    found = Dns()
    yield found
    found.close()


def play_until(episodes: Episodes, condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        episodes.step()


@pytest.mark.slow
@pytest.mark.parametrize("lanes", sampled([1, 2], 2))
def test_slots_follow_a_name_whose_addresses_change(dns: Dns, lanes: int) -> None:
    with ExitStack() as stack:
        first, url = stack.enter_context(planned_process(lanes, "127.0.0.2"))
        port = int(url.rpartition(":")[2])
        dns.zone.addresses = ["127.0.0.2"]
        directory = DnsDirectory(f"grpc+dns://{NAME}:{port}", dns.look_up)
        envs = BlockingReset(make_vec_remote(directory, num_envs=4, timeout=DEADLINE))
        stack.callback(envs.close)
        episodes = Episodes(envs)
        assert set(envs.env.urls) == {f"grpc://127.0.0.2:{port}"}
        # A rolling update: the next one is named, and the first one is not any more.
        second, _ = stack.enter_context(planned_process(lanes, "127.0.0.3", port))
        dns.zone.addresses = ["127.0.0.3"]
        first.send_signal(signal.SIGTERM)
        play_until(episodes, lambda: first.poll() is not None)
        assert set(envs.env.urls) == {f"grpc://127.0.0.3:{port}"}
        # The name does not resolve any more: what was known stays.
        dns.zone.addresses = []
        queries = dns.zone.queries
        play_until(episodes, lambda: dns.zone.queries > queries)
        for _ in range(50):
            episodes.step()
        assert set(envs.env.urls) == {f"grpc://127.0.0.3:{port}"}
        assert not episodes.lost.any()
        # It resolves again, to two; the one that had all slots is killed.
        stack.enter_context(planned_process(lanes, "127.0.0.4", port))
        dns.zone.addresses = ["127.0.0.3", "127.0.0.4"]
        second.kill()
        play_until(episodes, lambda: set(envs.env.urls) == {f"grpc://127.0.0.4:{port}"})
        for _ in range(50):
            episodes.step()
        episodes.check_counts()
        # A slot whose episode had just ended, and whose next one had not begun, has lost none.
        assert episodes.lost.max() == 1
        envs.close()


def test_a_name_that_does_not_resolve_at_the_start_is_an_error(dns: Dns) -> None:
    with pytest.raises(
        errors.SettingError, match=r"the directory grpc\+dns://envs.example:1 cannot be read: .*NXDOMAIN"
    ):
        make_vec_remote(DnsDirectory(f"grpc+dns://{NAME}:1", dns.look_up), num_envs=1)


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server's certificate for the name, and not for 127.0.0.2."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, [NAME])
    return folder


def served(folder: Path) -> Any:
    return serve_gym(lambda: CountingEnv(1000), host="127.0.0.2", tls=TLS(folder / "server.pem", folder / "server.key"))


def test_certificates_of_a_name_are_checked_behind_its_addresses(dns: Dns, certificates: Path) -> None:
    dns.zone.addresses = ["127.0.0.2"]
    with served(certificates) as server:
        directory = DnsDirectory(f"grpcs+dns://{NAME}:{server.port}", dns.look_up)
        envs = BlockingReset(make_vec_remote(directory, num_envs=2, tls=TLS(ca=certificates / "ca.pem"), timeout=20))
        envs.reset()
        assert envs.step(np.zeros(2, np.int64))[1].tolist() == [1.0, 1.0]
        envs.close()
        with pytest.raises(errors.ConnectError, match="not for this name"):
            make_vec_remote(
                directory, num_envs=1, tls=TLS(ca=certificates / "ca.pem", server_name="other.example"), timeout=20
            )


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
def test_tls_server_name_is_what_the_certificate_must_hold(certificates: Path, transport: Any) -> None:
    ca = certificates / "ca.pem"
    given: dict[str, Any] = {"timeout": 20, "transport": transport}
    with served(certificates) as server:
        env = make_remote(server.url, tls=TLS(ca=ca, server_name=NAME), **given)
        env.reset()
        assert env.spec.kwargs["tls"].server_name == NAME
        env.close()
        for name in (None, "other.example"):
            with pytest.raises(errors.ConnectError):
                make_remote(server.url, tls=TLS(ca=ca, server_name=name), **given)


def test_a_wrong_tls_server_name_says_what_to_pass(certificates: Path) -> None:
    with (
        served(certificates) as server,
        pytest.raises(errors.ConnectError, match=r"pass that as tls=TLS\(server_name=…\)"),
    ):
        make_remote(server.url, tls=TLS(ca=certificates / "ca.pem"), timeout=20)


@pytest.mark.parametrize("name", ["", "host:1", "a b", "x" * 70, 5])
def test_a_tls_server_name_that_is_none_is_refused(name: Any) -> None:
    with pytest.raises(errors.SettingError, match=r"expected tls=TLS\(server_name=…\) to be the name"):
        make_remote("grpcs://127.0.0.1:1", tls=TLS(server_name=name))
    with pytest.raises(errors.SettingError, match="tls= is for URLs with TLS"):
        make_remote("grpc://127.0.0.1:1", tls=TLS(server_name=NAME))


def test_the_dns_server_of_these_tests_changes_its_answer(dns: Dns) -> None:
    dns.zone.addresses = ["127.0.0.2", "127.0.0.3"]
    assert [target[0] for *_, target in dns.look_up(NAME, 5)] == ["127.0.0.2", "127.0.0.3"]
    dns.zone.addresses = []
    until(lambda: dns.zone.queries == 1)
    with pytest.raises(socket.gaierror, match="NXDOMAIN"):
        dns.look_up(NAME, 5)

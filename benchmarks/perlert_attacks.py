"""Attacks on a PERLERT server over real sockets, and what they achieve: the table in docs/perlert.md.

    python -m benchmarks.perlert_attacks [--seconds 5]

Datagrams in a client's name are sent through its own socket, which the server cannot tell from spoofed ones; the
victims of reflection have loopback addresses that the server is told not to trust.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import socket
import time
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.alone import add_busy, measuring
from bridge.perlert import GuardConfig, PerlertEnv, PerlertServer, serve_perlert
from tests.perlert.test_attacks import KEY, Recorder, heard, record, rollout_of, sock_of, udp

WARY = GuardConfig(trusted=())


@contextlib.contextmanager
def playing(seconds: float, key: str | None = None) -> Iterator[tuple[PerlertServer, PerlertEnv, Recorder]]:
    recorder = Recorder(round(seconds * 30))
    with (
        serve_perlert(lambda: recorder, name="count", fps=30, guard=WARY, key=key) as server,
        PerlertEnv(server.url, tag="joe", key=key) as env,
    ):
        yield server, env, recorder


def play(env: PerlertEnv, attack: Callable[[], int]) -> tuple[int, dict]:
    env.reset()
    sent, done, info = 0, False, {}
    while not done:
        sent += attack()
        _, _, terminated, truncated, info = env.step(np.int64(7))
        done = terminated or truncated
    return sent, {**info, "ended": truncated}


def say(attack: str, sent: int, recorder: Recorder, info: dict, more: str = "") -> None:
    foreign = sum(action not in (0, 7) for action in recorder.episodes[-1])
    steps = len(recorder.episodes[-1])
    ends = f"foreign actions applied {foreign} of {steps}; ended by it {info['ended']}; return {info['return']:g}"
    print(f"{attack}: {sent} datagrams; {ends}{more}")


def spoofed_client(seconds: float) -> None:
    texts = ["register=agent0,joe", "register=agent0,joe+b1", "ready=agent0,false", "ready=agent0,true", "action=666"]
    texts += ["register=agent0,joe+b1.000000000000.9999.l", "action=000000000000,%d,9999,666"]
    with playing(seconds) as (server, env, recorder):

        def attack() -> int:
            for text, port in itertools.product(texts, (server.port, rollout_of(env))):
                text = text % port if "%" in text else text
                sock_of(env).sendto(f"count:0;{text}".encode(), ("127.0.0.1", port))
            return 2 * len(texts)

        sent, info = play(env, attack)
        kept = next(iter(server.host.instances.values())).lobby.clients
        say("spoofed client", sent, recorder, info, f"; slot kept {[c.tag for c in kept.values()] == ['joe']}")


def flood(seconds: float) -> None:
    with playing(seconds) as (_, env, recorder):

        def attack() -> int:
            for _ in range(40):
                sock_of(env).sendto(b"count:0;action=666", ("127.0.0.1", rollout_of(env)))
            return 40

        sent, info = play(env, attack)
        say("flood in a client's name", sent, recorder, info, f"; own actions lost {info['perlert']['actions_lost']}")


def replayed(seconds: float) -> None:
    with playing(seconds, KEY) as (server, env, recorder):
        env.reset()
        env.close()
        with PerlertEnv(server.url, tag="joe", key=KEY) as client:
            tap = record(client)

            def attack() -> int:
                again = [*tap.sent[:10], *tap.sent[-10:]]
                for (datagram, _), port in itertools.product(again, (server.port, rollout_of(client))):
                    tap.sock.sendto(datagram, ("127.0.0.1", port))
                return 2 * len(again)

            sent, info = play(client, attack)
        say("replayed, with the key", sent, recorder, info)


def reflected(seconds: float) -> None:
    with (
        serve_perlert(lambda: Recorder(10**6), name="count", fps=30, spectators=8, guard=WARY) as server,
        udp("127.0.0.2") as victim,
    ):
        spoofed = got = 0
        begun = time.monotonic()
        while time.monotonic() < begun + seconds:
            ports = [run.port for instance in server.host.instances.values() for run in instance.lobby.runs]
            for text in ("lobby", "register=agent0,v", "ready=agent0,true", "register=agent0,v+b1"):
                spoofed += victim.sendto(f"count:0;{text}".encode(), ("127.0.0.1", server.port))
            for port in ports:
                spoofed += victim.sendto(b"count:0;action=1", ("127.0.0.1", port))
            time.sleep(0.1)
            got += sum(map(len, heard(victim)))
        print(f"reflected to a silent address: {spoofed / seconds:.0f} bytes/s sent, {got / seconds:.0f} bytes/s got")
        spoofed, got, begun = victim.sendto(b"count:0;action=1", ("127.0.0.1", ports[0])), 0, time.monotonic()
        while time.monotonic() < begun + 20:
            time.sleep(0.5)
            got += sum(map(len, heard(victim)))
        print(f"one datagram of {spoofed} bytes in its run: {got} bytes in 20 s")


def sprayed() -> None:
    with serve_perlert(Recorder, name="count", spectators=20, guard=WARY) as server, contextlib.ExitStack() as stack:
        victims = [stack.enter_context(udp("127.0.0.2")) for _ in range(64)]
        for victim in victims:
            victim.sendto(b"count:0;lobby", ("127.0.0.1", server.port))
        time.sleep(0.5)
        print(f"sprayed over 64 ports of a host: {sum(bool(heard(victim)) for victim in victims)} were answered")


def spoofed_server(seconds: float) -> None:
    with playing(seconds) as (server, env, recorder):
        fake = [
            b"count:0:9999999999999:99;obs=1;reward=9;done=true",
            b"count:0;start=port:9",
            b"count:0;agent0=open,k,,ready",
        ]
        fake += [b'count:0;message=bridge/1 {"token":"000000000000"}', b"count:0;registered=agent0"]
        receive = env._client.player.receive

        def attack() -> int:
            for datagram, port in itertools.product(fake, (server.port, rollout_of(env))):
                receive(datagram, ("127.0.0.1", port), time.monotonic())
            return 2 * len(fake)

        sent, info = play(env, attack)
        say("spoofed server", sent, recorder, info)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.perlert_attacks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    add_busy(parser)
    arguments = parser.parse_args()
    with measuring(parser, arguments.busy):
        socket.setdefaulttimeout(30.0)
        for attack in (spoofed_client, spoofed_server, flood, replayed, reflected):
            attack(arguments.seconds)
        sprayed()


if __name__ == "__main__":
    main()

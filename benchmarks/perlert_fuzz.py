"""Random datagrams and random sequences against both ends of PERLERT, in this process and without a wait.

    python -m benchmarks.perlert_fuzz [--datagrams 1000000] [--sequences 100000]

Datagrams go to the ports of a server's host, half of them as random bytes, half as messages of the grammar with faults;
while a client plays. Sequences are the Hypothesis tests of `tests/perlert/test_simulated.py` with more examples. Prints
how many there were, what was counted, and the growth of the process's memory.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import time

import psutil

from benchmarks.alone import add_busy, measuring
from bridge.perlert.protocol.guard import GuardConfig
from bridge.perlert.protocol.packet import Header
from bridge.perlert.rollout import RolloutConfig
from tests.perlert_simulation import LOBBY_PORT, SERVER, CountWorld, Simulation

H = Header("count", 0)
WORDS = [
    *("lobby", "register=", "ready=", "action=", "agent0", "agent1", "spectator0", "x+b1", "+b1.", "true", "false"),
    *(",", ";", ":", "=", "-1", "0", "1", "7", "0123456789ab", ".1.r", ".2.w", ".3.l", "e400", "nan", "\x00", "\u20ac"),
]


def datagram(chance: random.Random) -> bytes:
    kind = chance.random()
    if kind < 0.5:
        return chance.randbytes(chance.randrange(120))
    text = "count:0;" + "".join(chance.choices(WORDS, k=chance.randrange(1, 9)))
    if kind < 0.6:
        return text.encode()[: chance.randrange(60)]
    return text.encode()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.perlert_fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--datagrams", type=int, default=1_000_000)
    parser.add_argument("--sequences", type=int, default=100_000)
    add_busy(parser)
    arguments = parser.parse_args()
    with measuring(parser, arguments.busy):
        chance, begun = random.Random(1), time.monotonic()
        simulation = Simulation(1, guard=GuardConfig(trusted=("10.0.0.0/8",), max_addresses=256))
        instance = simulation.publish(
            H, CountWorld(2, 10**9), spectators=1, bots={"agent1": "random"}, rollout=RolloutConfig(fps=10)
        )
        visitor = simulation.join(H, agent="agent0")
        simulation.run(5.0)
        process, early = psutil.Process(), 0
        for number in range(arguments.datagrams):
            source = (f"203.0.{chance.randrange(9)}.{chance.randrange(250)}", chance.randrange(1, 99))
            run = instance.lobby.runs[-1].port if instance.lobby.runs else LOBBY_PORT
            simulation.deliver(datagram(chance), source, (SERVER, chance.choice((LOBBY_PORT, run))))
            if number % 100 == 0:
                simulation.run(0.01)
            if number == arguments.datagrams // 10:
                early = process.memory_info().rss
        grown = (process.memory_info().rss - early) / 1e6
        steps = len(visitor.steps[0])
        print(f"{arguments.datagrams} datagrams in {time.monotonic() - begun:.0f} s; memory grew by {grown:.1f} MB")
        print(
            f"  the client saw {steps} steps, still plays: {not visitor.finished}; "
            f"counted {dict(simulation.host.counts)}"
        )
        os.environ["PERLERT_EXAMPLES"] = str(arguments.sequences // 2)
        sequences = importlib.import_module("tests.perlert.test_simulated")
        for name in (
            "test_no_datagram_raises_out_of_the_server_and_its_promises_hold",
            "test_no_datagram_raises_out_of_the_client_and_done_comes_once_a_run",
        ):
            begun, before = time.monotonic(), process.memory_info().rss
            getattr(sequences, name)()
            grown = (process.memory_info().rss - before) / 1e6
            print(f"{arguments.sequences // 2} sequences of {name} in {time.monotonic() - begun:.0f} s; {grown:.1f} MB")


if __name__ == "__main__":
    main()

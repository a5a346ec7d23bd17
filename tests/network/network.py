"""A network of machines: what each is called, how they reach each other, and what goes wrong on the way.

Each machine has a network, processes, a host name and a hosts file of its own, by the kernel's namespaces; the files
are this computer's. None of it has a name outside of the test's process, so networks of several processes never meet,
and all of it ends with that process, even if it is killed: `tests/network/agent.py` says how.

```text
game-pc  10.77.0.1  fd77::1 ──┐
node-2   10.77.0.2  fd77::2 ──┤ switch, and the gateway 10.77.0.254, fd77::fffe
                              ├──(TUN)── relay: delay, loss, rate ──(TUN)── trainer  10.77.1.3  fd77:0:0:1::3
```
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from bridge.testing import Conditions
from tests.network.machines import Machine, Nursery, Program
from tests.network.relay import Counts, Line, relay

GATEWAY = "10.77.0.254", "fd77::fffe"
BLACK_HOLE = "10.77.9.1", "fd77:0:0:9::1"
"""Addresses behind the gateway, IPv4 and IPv6, of which never anything comes back."""
NOBODY = "10.77.0.200", "fd77::200"
"""Addresses on the switch that nobody has: their neighbours find out within some seconds."""

SWITCH = [
    "link add switch type bridge stp_state 0 mcast_snooping 0",
    "link set switch up",
    f"address add {GATEWAY[0]}/24 dev switch",
    f"address add {GATEWAY[1]}/64 dev switch nodad",
    *(f"route add blackhole {address}" for address in BLACK_HOLE),
]
FORWARDING = ("net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
# What is cut off loses its packets in both directions, and nobody is told: no ICMP, no closed connection. A bridge's
# chains see what machines on the switch send and get, ARP too; the gateway's see what comes from and goes to far ones.
CUTS = [
    f"""add table {family} cuts
    add set {family} cuts off {{ type ifname; }}
    add chain {family} cuts incoming {{ type filter hook prerouting priority -300; }}
    add chain {family} cuts outgoing {{ type filter hook postrouting priority 300; }}
    add rule {family} cuts incoming iifname @off drop
    add rule {family} cuts outgoing oifname @off drop"""
    for family in ("bridge", "inet")
]


class Network:
    """Machines on a switch, and far ones behind slow lines.

    Args:
        nursery: What machines are forked from.
        folder: For the machines' files.
        seed: Of what happens by chance on the lines.
    """

    def __init__(self, nursery: Nursery, folder: Path, seed: int = 0) -> None:
        self.folder, self.seed = folder, seed
        self.machines: dict[str, Machine] = {}
        self._nursery = nursery
        self._names: dict[str, tuple[str, ...]] = {}
        self._relays: dict[str, Program] = {}
        self._numbers: dict[str, int] = {}
        self._switch = Machine(nursery, folder, "switch", *GATEWAY)
        self._switch.ip(*SWITCH)
        self._switch.configure("sysctl", "-qw", *FORWARDING)
        self._switch.nft(*CUTS)

    def machine(
        self, name: str, there: Line | Conditions | None = None, back: Line | Conditions | None = None
    ) -> Machine:
        """Add a machine.

        Args:
            name: Its host name; all machines find its addresses, IPv4 and IPv6, by it.
            there: The line from it to all others; None: a cable to the switch. `Conditions(delay=0.04)` takes 80 ms
                there and back.
            back: The line from all others to it; None: the same.
        """
        number = len(self.machines) + 1
        self._numbers[name] = number
        far = there is not None or back is not None
        ipv4, ipv6 = (f"10.77.1.{number}", f"fd77:0:0:1::{number}") if far else (f"10.77.0.{number}", f"fd77::{number}")
        machine = self.machines[name] = Machine(self._nursery, self.folder, name, ipv4, ipv6)
        if far:
            self._connect_far(machine, there, back)
        else:
            self._connect_near(machine)
        self.name(name, ipv4, ipv6)
        return machine

    def name(self, name: str, *addresses: str) -> None:
        """Write a name, with one or more addresses, into each machine's hosts file. Without addresses: remove it."""
        self._names[name] = addresses
        for machine in self.machines.values():
            here = f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {machine.name}-itself\n"
            lines = (f"{address} {name}\n" for name, addresses in self._names.items() for address in addresses)
            machine.hosts.write_text(here + "".join(lines))  # in place: it is mounted

    def line(self, machine: Machine, there: Line | Conditions, back: Line | Conditions | None = None) -> None:
        """Change the line of a far machine, from now on."""
        self._relays[machine.name].request(as_lines(there, back))

    def counts(self, machine: Machine) -> tuple[Counts, Counts]:
        """Return what the line of a far machine has done: from it, and to it."""
        there, back = self._relays[machine.name].request("counts")
        return there, back

    def cut(self, *machines: Machine) -> None:
        """Cut machines off: their packets vanish in both directions, and nobody is told. Connections stay half open."""
        self._set_cuts("add", machines)

    def mend(self, *machines: Machine) -> None:
        """Connect machines again that were cut off."""
        self._set_cuts("delete", machines)

    def close(self) -> None:
        """Switch everything off.

        Raises:
            ProgramError: A program failed, and the test did not notice.
        """
        machines = [*self.machines.values(), self._switch]
        failures = [failure for machine in machines for failure in machine.failures()]
        for machine in machines:
            machine.close()
        if failures:
            raise failures[0]

    def _set_cuts(self, verb: str, machines: tuple[Machine, ...]) -> None:
        ports = ", ".join(f'"port{self._numbers[machine.name]}"' for machine in machines)
        self._switch.nft(*(f"{verb} element {family} cuts off {{ {ports} }}" for family in ("bridge", "inet")))

    def _connect_near(self, machine: Machine) -> None:
        port = f"port{self._numbers[machine.name]}"
        # From outside, where both have a process id; neither end ever shows up in this computer's own network.
        veth = f"ip link add {port} netns {self._switch.pid} type veth peer name eth0 netns {machine.pid}"
        subprocess.run(veth.split(), check=True, timeout=30)
        self._switch.ip(f"link set {port} master switch up")
        machine.ip(
            "link set lo up",
            "link set eth0 up",
            f"address add {machine.ipv4}/24 dev eth0",
            f"address add {machine.ipv6}/64 dev eth0 nodad",
            f"route add default via {GATEWAY[0]}",
            f"route add ::/0 via {GATEWAY[1]}",
        )

    def _connect_far(self, machine: Machine, there: Line | Conditions | None, back: Line | Conditions | None) -> None:
        port = f"port{self._numbers[machine.name]}"
        devices = self._switch.open_tun(port), machine.open_tun("line0")
        lines = as_lines(there or Conditions(), back)
        try:
            self._relays[machine.name] = self._switch.start_with(devices, relay, lines, self.seed)
        finally:
            for device in devices:
                os.close(device)
        self._switch.ip(
            f"link set {port} up", f"route add {machine.ipv4} dev {port}", f"route add {machine.ipv6} dev {port}"
        )
        machine.ip(
            "link set lo up",
            "link set line0 up",
            f"address add {machine.ipv4}/32 dev line0",
            f"address add {machine.ipv6}/128 dev line0 nodad",
            "route add default dev line0",
            "route add ::/0 dev line0",
        )


def as_lines(there: Line | Conditions, back: Line | Conditions | None) -> tuple[Line, Line]:
    """Return both directions of a line; None: the second is as the first."""
    lines = [Line(side) if isinstance(side, Conditions) else side for side in (there, there if back is None else back)]
    return lines[0], lines[1]

"""A client that reaches servers by name over a network: two namespaces, a link between them, and a file of hosts.

Loopback cannot show what this does: there a name has its addresses without a look-up, and slots share a connection.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.places import ROOT

HERE = ROOT
HOST = "servers.example"
SERVE = """
import sys
from bridge import serve_gym
server = serve_gym("CartPole-v1", host=sys.argv[1], token="secret")
print(server.url, flush=True)
sys.stdin.read()
server.stop()
"""
CONNECT = """
import sys
from bridge import make_vec_remote
from bridge.wrappers import BlockingReset
envs = BlockingReset(make_vec_remote(sys.argv[1], num_envs=int(sys.argv[2]), token="secret"))
observations, _ = envs.reset(seed=0)
print(observations.shape, flush=True)
envs.close()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class TwoMachines:
    """Two network namespaces that are linked; `HOST` is the name of the second one in the first."""

    client: str
    server: str
    address: str = "10.77.0.2"

    def run(self, machine: str, script: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a script of Python on one of them."""
        command = ["ip", "netns", "exec", machine, sys.executable, "-c", script, *arguments]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "BRIDGE_TOKEN": "secret"}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=HERE)


@pytest.fixture
def machines() -> Iterator[TwoMachines]:
    """Two machines, which are gone afterwards."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip, of the package iproute2")
    name = uuid.uuid4().hex[:6]
    made = TwoMachines(f"bridge-{name}-a", f"bridge-{name}-b")
    hosts = Path("/etc/netns") / made.client  # `ip netns exec` mounts what is in it over /etc
    with contextlib.ExitStack() as stack:
        try:
            ip("netns", "add", made.client)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")
        stack.callback(ip, "netns", "delete", made.client)
        ip("netns", "add", made.server)
        stack.callback(ip, "netns", "delete", made.server)
        hosts.mkdir(parents=True)
        stack.callback(shutil.rmtree, hosts)
        (hosts / "hosts").write_text(f"127.0.0.1 localhost\n{made.address} {HOST}\n")
        near, far = f"v{name}a", f"v{name}b"
        ip("link", "add", near, "netns", made.client, "type", "veth", "peer", "name", far, "netns", made.server)
        for machine, link, address in ((made.client, near, "10.77.0.1"), (made.server, far, made.address)):
            ip("-n", machine, "address", "add", f"{address}/24", "dev", link)
            ip("-n", machine, "link", "set", link, "up")
            ip("-n", machine, "link", "set", "lo", "up")
        yield made


@pytest.mark.slow
def test_many_slots_reach_a_server_by_its_host_name(machines: TwoMachines) -> None:
    """All slots wait for one look-up of the name, and each goes through its addresses by itself."""
    with machines.run(machines.server, SERVE, machines.address) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip().rpartition(":")[2]
        try:
            for _ in range(3):
                with machines.run(machines.client, CONNECT, f"grpc://{HOST}:{port}", "16") as client:
                    output, errors = client.communicate(timeout=60)
                assert output == "(16, 4)\n", errors
        finally:
            server.communicate(timeout=60)

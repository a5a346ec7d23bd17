"""`bridge.perlert.client`: what drives a player over a socket."""

import contextlib
import os
import socket
import time

from bridge.perlert import parse_perlert_address
from bridge.perlert.client import PerlertClient


def test_a_server_that_tells_slots_without_end_does_not_exhaust_its_client():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(5.0)
        client = PerlertClient(parse_perlert_address(f"perlert://127.0.0.1:{server.getsockname()[1]}/count:0"))
        client.pump()
        _, source = server.recvfrom(2048)
        for number in range(1500):
            slots = ";".join(f"a{number}_{i}=open,k,x,ready" for i in range(40))
            server.sendto(f"count:0;{slots}".encode(), source)
            server.sendto(f"count:0;message={number}".encode(), source)
            client.pump()
        assert client.player.said == "1499"
        assert len(client.player.slots) == len(client.player.events) == 1024
        client.close()


def test_a_client_whom_others_send_faster_than_it_reads_goes_on():
    client = PerlertClient(parse_perlert_address("perlert://127.0.0.1:9/count:0"))
    # Each datagram is sent to the socket again, so that there is always one more.
    client.player.receive = lambda datagram, sender, now, arrived: [(datagram, sender)]
    with socket.socket(fileno=os.dup(client.port.fileno())) as own, contextlib.closing(client):
        own.sendto(b"more", own.getsockname())
        client.wait(time.monotonic() + 5.0)
        assert client.port.read() is not None

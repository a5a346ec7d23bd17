"""`bridge.perlert.udp`: what a socket gives, by datagrams of each length."""

import contextlib
import os
import socket
import sys
import threading

import pytest

from bridge.perlert.udp import ClientPort, receive


@pytest.mark.parametrize(("size", "kept"), [(20, True), (21, False), (1000, False)])
def test_a_datagram_that_the_buffer_cuts_is_told_from_a_whole_one(size, kept):
    # P-19: a fixed buffer, and no plausible `12.` out of a cut `12.5`.
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(5.0)
        sender.sendto(b"x" * size, receiver.getsockname())
        datagram, address, _ = receive(receiver, 20)
        assert (datagram is not None) == kept
        assert address[0] == "127.0.0.1"


@pytest.mark.skipif(sys.platform == "win32", reason="files have other numbers")
def test_a_client_in_a_process_of_many_files_waits_for_its_datagram():
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        sender = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        sender.bind(("127.0.0.1", 0))
        # `select` takes no file of a larger number.
        while (number := os.dup(sender.fileno())) < 1024:
            stack.callback(os.close, number)
        stack.callback(os.close, number)
        port = ClientPort("perlert://127.0.0.1", *sender.getsockname())
        stack.callback(port.close)
        port.send([(b"where I am", port.server)])
        _, address = sender.recvfrom(20)
        begun = threading.Event()

        def answer():
            begun.wait(10)
            sender.sendto(b"waited for", address)

        thread = threading.Thread(target=answer)
        thread.start()
        begun.set()
        port.wait(10)
        found = port.read()
        thread.join()
        assert found is not None
        assert found[0] == b"waited for"

"""Our client on servers that ask for answers without end and never read them."""

import socket
import struct
import threading

import pytest

import bridge
from bridge.errors import RemoteError

MIB = 1 << 20


def serve_frames(frame):
    """Accept one client, send a frame without end, and never read; return the URL, a stop and what was sent."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sent, gone = [0], threading.Event()

    def run():
        with listener:
            client, _ = listener.accept()
        with client:
            client.settimeout(60)
            try:
                client.sendall(struct.pack(">HBBBI", 0, 0, 4, 0, 0))  # SETTINGS
                while sent[0] < 64 * MIB:
                    sent[0] += client.send(frame * 4096)
            except OSError:
                gone.set()

    thread = threading.Thread(target=run)
    thread.start()
    return f"grpc://127.0.0.1:{listener.getsockname()[1]}", thread, sent, gone


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(struct.pack(">HBBBI", 0, 8, 6, 0, 0) + bytes(8), id="pings"),
        pytest.param(struct.pack(">HBBBI", 0, 0, 4, 0, 0), id="settings"),
    ],
)
def test_a_server_that_asks_and_never_reads_is_left(frame):
    url, thread, sent, gone = serve_frames(frame)
    with pytest.raises(RemoteError, match="read none of 10000 answers"):
        bridge.make_remote(url, timeout=60)
    thread.join(60)
    assert not thread.is_alive()
    assert gone.is_set()
    assert sent[0] < 64 * MIB

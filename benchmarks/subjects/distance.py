"""Pixels over a slow network: 64 lanes of Atari through a link of so many bits a second, plain and compressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.loops import vector_stepping
from benchmarks.registry import Measure, goal, subject
from benchmarks.serving import Script, joined, server_on

LANES = 64
GAME = "ale_py:ALE/Pong-v5"
RATES = {"": 0, "-1g": 10**9, "-100m": 10**8}
"""Bits a second by the end of a subject's name; 0: as many as there are."""
# A token bucket, which holds 2 ms of the link's bytes, in each direction of each connection.
LINK = """
import os, socket, sys, threading, time
host, port, rate = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) / 8.0
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()

def carry(source, sink):
    tokens, at = 0.002 * rate, time.monotonic()
    while data := source.recv(65536 if not rate else max(1, min(65536, int(0.002 * rate)))):
        if rate:
            now = time.monotonic()
            tokens, at = min(0.002 * rate, tokens + (now - at) * rate) - len(data), now
            if tokens < 0:
                time.sleep(-tokens / rate)
        sink.sendall(data)
    sink.shutdown(socket.SHUT_WR)

while True:
    pair = listener.accept()[0], socket.create_connection((host, port))
    for sock, other in (pair, pair[::-1]):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=carry, args=(sock, other), daemon=True).start()
"""


def _measured(rate: int, compression: str | None) -> Callable[[], Iterator[Measure]]:
    def measured() -> Iterator[Measure]:
        with server_on("grpc", GAME, "--num-envs", str(LANES)) as url:
            host, _, port = url.removeprefix("grpc://").rpartition(":")
            with (
                Script(LINK, host, port, str(rate)) as near,
                joined(f"grpc://127.0.0.1:{near}", compression=compression) as envs,
            ):
                yield vector_stepping(envs)

    return measured


for _end, _rate in RATES.items():
    _link = f"a link of {_rate / 1e9:g} Gbit/s" if _rate else "a link without a limit"
    for _compression in (None, "zstd"):
        _name = f"atari-{_compression or 'plain'}{_end}"
        _title = f"gRPC: {LANES} lanes of Pong over {_link}, {_compression or 'plain'}"
        subject(_name, _title, group="distance")(_measured(_rate, _compression))

# Whichever of the two is smaller is the goal.
for _end in ("-1g", "-100m"):
    goal("B-13", f"atari-zstd{_end}", against=f"atari-plain{_end}", at_least=5.0)
    goal("B-13", f"atari-zstd{_end}", against="atari-plain", at_least=0.9)

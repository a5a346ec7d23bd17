"""The faults of the chaos: server processes are killed and stopped, links are cut, slow and half open."""

from __future__ import annotations

import contextlib
import random
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos_server import TALLY, open_tally
from bridge.testing import Proxy

__all__ = ["FAULTS", "Host", "Monkey"]

FAULTS = ("kill", "stop", "cut", "throttle", "half-close", "stall")
DOWN = 1.0
"""Seconds until a server that was killed is started again."""
SLOW = 4000.0
"""Bytes per second each way, on a link that is slow."""


class Host:
    """A server process that is killed and started again on one port, and the proxy that leads there.

    Args:
        folder: Where its tally is kept.
        number: Its number.
        environment: What it serves.
    """

    def __init__(self, folder: Path, number: int, environment: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._tally_path, self._environment = folder / f"tally-{number}", environment
        self._tally = open_tally(self._tally_path)
        self.proxy = Proxy(self.port)
        self.url = f"grpc://127.0.0.1:{self.proxy.port}"
        self.process: subprocess.Popen[str] | None = None
        self.metrics_port = 0

    @property
    def served(self) -> dict[str, int]:
        """The totals of all its processes together."""
        return dict(zip(TALLY, self._tally.tolist(), strict=True))

    def start(self) -> None:
        """Start it; `wait` waits until it listens."""
        module = ["-m", "benchmarks.chaos_server", str(self.port), str(self._tally_path), self._environment]
        self.process = subprocess.Popen([sys.executable, *module], stdout=subprocess.PIPE, text=True)

    def wait(self) -> None:
        """Wait until it listens."""
        assert self.process is not None
        out = self.process.stdout
        assert out is not None
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            if not selector.select(60.0):
                raise TimeoutError("a server did not start within 60 s")
        self.metrics_port = int(out.readline())

    def kill(self) -> None:
        """End it without closing its connections."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait(30)
            if process.stdout is not None:
                process.stdout.close()

    def close(self) -> None:
        """End the process, and the proxy."""
        self.kill()
        self.proxy.close()

    @property
    def listens(self) -> bool:
        """True if a port of it is still open."""
        for port in (self.port, self.metrics_port, self.proxy.port):
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.connect(("127.0.0.1", port))
                return True
        return False

    def metric(self, name: str) -> int:
        """Read a gauge."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(f"{name} "):
                    return int(float(line.split()[1]))
        raise LookupError(name)


class Monkey:
    """Lets something happen to a server or its link every `period` seconds, one at a time, and mends it.

    Args:
        hosts: The servers.
        period: Seconds.
        stays: Seconds for which a server stands still, or a link is slow or stalled.
        seed: Of what happens, and to whom; the faults come in shuffled rounds, so that each comes as often.
        counts: Where the faults are counted, by name.
        faults: Those that happen, of `FAULTS`.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        period: float,
        stays: float,
        seed: int,
        counts: dict[str, int],
        faults: Sequence[str] = FAULTS,
    ) -> None:
        self._hosts, self._period, self._stays, self._counts = hosts, period, stays, counts
        self._faults, self._random = tuple(faults), random.Random(seed)
        self._over = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        faults: list[str] = []
        wait = self._period
        try:
            while not self._over.wait(wait):
                began = time.monotonic()
                faults = faults or self._random.sample(self._faults, len(self._faults))
                fault = faults.pop()
                self._counts[fault] = self._counts.get(fault, 0) + 1
                self._strike(self._random.choice(self._hosts), fault)
                wait = max(0.0, self._period - (time.monotonic() - began))
        except BaseException as error:
            self.failure = error

    def _strike(self, host: Host, fault: str) -> None:
        if fault == "kill" or host.process is None:
            host.kill()
            self._over.wait(DOWN)
            host.start()
            host.wait()
        elif fault == "stop":
            host.process.send_signal(signal.SIGSTOP)
            self._over.wait(self._stays)
            host.process.send_signal(signal.SIGCONT)
        elif fault == "cut":
            host.proxy.cut()
        elif fault == "half-close":
            host.proxy.half_close(self._random.choice(("client", "server")))
        elif fault == "stall":
            host.proxy.stall()
            self._over.wait(self._stays)
            host.proxy.resume()
        else:
            host.proxy.rate = SLOW
            self._over.wait(self._stays)
            host.proxy.rate = None

    def stop(self) -> None:
        """Let everything come back, and strike no more."""
        self._over.set()
        self._thread.join(90.0)

"""`python -m benchmarks.attacks`: known attacks on a server, against ours, grpcio's and a gateway, with one harness.

A server runs in a process of its own, and one honest client steps in it, beside attackers in another process: flat
out, and at 0.5 MB/s of all of them together. Measured are the memory that the server takes beyond what it had with the
honest client alone, the share of its steps that the honest client keeps, of those that it makes while the same
attackers write to a socket of which nobody reads (they share the cores), and the time from their end until it is back
at 95 % of what it made before, in turns with the client of a server that is not attacked: the machine's own speed may
change meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import random
import re
import socket
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import psutil

from benchmarks.alone import add_busy, measuring
from benchmarks.attackers import ATTACKS, PATH, TOKEN, WATCH_TOKEN, Attack, Pieces
from bridge import TLS, Auth, Limits, RemoteEnv, make_remote, serve_gym
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv, make_certificates
from bridge.web.gateway import serve_gateway

SERVERS = {"http2": "ours", "grpcio": "grpcio", "gateway": "gymnasium-bridge web"}
"""Those that are attacked, by what the option `--servers` calls them."""
SLOW = 500_000
"""Bytes a second of all attackers together, in the slow variant."""
ABANDONED = 1.0
"""Seconds after which a world goes whose client went: 60 s by default, which would be long to wait for."""
_LONGEST = 20.0
"""Seconds in which a server has to be back after an attack."""
_WINDOW = 0.1
"""Seconds over which it is looked whether it is."""
_CONNECTION = 400
"""Bytes that making a connection counts as, in the slow variant: what TCP sends for it."""
_MIB = 1 << 20
# Of processes that are spawned each imports everything for a second or two, four of them in each round.
_FORKS = "forkserver" in multiprocessing.get_all_start_methods()
_SPAWN: Any = multiprocessing.get_context("forkserver" if _FORKS else "spawn")
if _FORKS:
    _SPAWN.set_forkserver_preload(["benchmarks.attackers", "bridge.web.gateway"])
_PAGE = Path(__file__).parent / "attacks.md"


# Attackers


@dataclasses.dataclass(frozen=True)
class Target:
    """The server that is attacked."""

    port: int
    served: bool = True
    """True if a server is there; False: a socket of which nobody reads."""
    tls_ca: str | None = None
    """The file of the CA by which its certificate is verified; None: no TLS."""

    def credentials(self, token: str = TOKEN) -> dict[str, Any]:
        """Return what a client of ours shows."""
        return {"token": token, **({} if self.tls_ca is None else {"tls": TLS(ca=self.tls_ca)})}

    def url(self, query: str = "") -> str:
        """Return its URL."""
        scheme, host = ("grpc", "127.0.0.1") if self.tls_ca is None else ("grpcs", "localhost")
        return f"{scheme}://{host}:{self.port}{query}"


def attack(name: str, target: Target, rate: float, ready: Any, stop: Any) -> None:
    """Run the attackers of one kind until `stop`: the whole life of their process."""
    kind = ATTACKS[name]
    learned = [] if kind.learn is None else [kind.learn(target.port) if target.served else 1]
    if kind.request is None:
        next(kind.pieces(*learned), b"")  # what takes long to make is made before the time is taken
    else:
        kind.request()
    each = rate / kind.attackers
    run = over_one if not kind.held else over_many
    if kind.request is not None:
        run = with_requests if target.served else over_one
    for _ in range(kind.attackers):
        threading.Thread(target=run, args=(kind, learned, target, each, stop), daemon=True).start()
    ready.set()
    stop.wait()


def over_one(kind: Attack, learned: list[Any], target: Target, rate: float, stop: Any) -> None:
    """Send over one connection, and over the next where the server closes it."""
    while not stop.is_set():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", target.port), 5.0) as sock:
            sock.settimeout(0.5)
            threading.Thread(target=swallow, args=(sock,), daemon=True).start()
            pieces = kind.pieces(*learned) if kind.request is None else iter(kind.request, None)
            send(sock, pieces, rate, stop)
            sock.shutdown(socket.SHUT_RDWR)
        stop.wait(_CONNECTION / rate if rate else 0.002)


def over_many(kind: Attack, learned: list[Any], target: Target, rate: float, stop: Any) -> None:
    """Keep many connections open, and replace the oldest by another one again and again."""
    held: deque[socket.socket] = deque()
    while not stop.is_set():
        with contextlib.suppress(OSError):
            sock = socket.create_connection(("127.0.0.1", target.port), 5.0)
            held.append(sock)
            sent = sum(sock.send(piece) for piece in kind.pieces(*learned))
            if rate:
                stop.wait((_CONNECTION + sent) / rate)
        if len(held) > kind.held:
            held.popleft().close()


def with_requests(kind: Attack, learned: list[Any], target: Target, rate: float, stop: Any) -> None:
    """Make a world, and send one request again and again once it was answered, the first one at a random time."""
    data = b"" if kind.request is None else kind.request()
    while not stop.is_set():
        with contextlib.suppress(grpc.RpcError), grpc.insecure_channel(f"127.0.0.1:{target.port}") as channel:
            queue: SimpleQueue[bytes] = SimpleQueue()
            queue.put(pb.EnvironmentRequest(create_world=pb.CreateWorldRequest()).SerializeToString())
            open_call: Any = channel.stream_stream(PATH)  # type: ignore[call-arg]
            call = open_call(iter(queue.get, None), metadata=[("authorization", f"Bearer {TOKEN}")])
            pause = len(data) / rate if rate else 0.0
            due = time.monotonic() + random.random() * pause
            for answer in call:
                response = pb.EnvironmentResponse.FromString(answer)
                if response.WhichOneof("payload") == "create_world":
                    join = pb.JoinWorldRequest(world_name=response.create_world.world_name)
                    queue.put(pb.EnvironmentRequest(join_world=join).SerializeToString())
                    continue
                if response.WhichOneof("payload") == "join_world" and kind.begins:
                    queue.put(pb.EnvironmentRequest(reset=pb.ResetRequest()).SerializeToString())
                    continue
                if stop.wait(max(0.0, due - time.monotonic())):
                    break
                queue.put(kind.request() if kind.request is not None else data)
                due += pause
            call.cancel()


def swallow(sock: socket.socket) -> None:
    """Take what the server says."""
    with contextlib.suppress(OSError):
        while True:
            try:
                if not sock.recv(65536):
                    return
            except TimeoutError:
                continue


def send(sock: socket.socket, pieces: Pieces, rate: float, stop: Any) -> None:
    """Send until the server closes or `stop`, at most so many bytes a second."""
    began, sent = time.monotonic(), 0
    for piece in pieces:
        view = memoryview(piece)
        while view and not stop.is_set():
            try:
                count = sock.send(view)
            except TimeoutError:
                continue
            view = view[count:]
            sent += count
            if rate:
                stop.wait(max(0.0, sent / rate - (time.monotonic() - began)))
        if stop.is_set():
            return


@contextmanager
def attacking(name: str, target: Target, rate: float) -> Iterator[None]:
    """Attack meanwhile."""
    ready, stop = _SPAWN.Event(), _SPAWN.Event()
    process = _SPAWN.Process(target=attack, args=(name, target, rate, ready, stop), daemon=True)
    process.start()
    try:
        if not ready.wait(60.0):
            raise RuntimeError(f"the attackers of {name!r} did not begin")
        yield
    finally:
        stop.set()
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()


# Servers


class DrawnEnv(CountingEnv):
    """One that counts its steps, and draws noise, of which a picture takes 360 kB."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as Gymnasium has it
    render_mode = "rgb_array"

    _picture = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)

    def __init__(self) -> None:
        super().__init__(1 << 30)

    def render(self) -> Any:
        """Draw the noise."""
        return self._picture


def serve(kind: str, certificates: str | None, pipe: Any) -> None:
    """Serve until the pipe says so: the whole life of the server's process."""
    keywords: dict[str, Any] = {"token": TOKEN, "auth": Auth(watch_token=WATCH_TOKEN)}
    if certificates is not None:
        keywords["tls"] = TLS(Path(certificates, "server.pem"), Path(certificates, "server.key"))
    limits = Limits(abandoned_timeout=ABANDONED)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if kind == "gateway":
            behind, _ = stack.enter_context(running(serve, "behind", None))
            server = serve_gateway(behind.url(f"?token={TOKEN}"), **keywords, limits=limits)
        else:
            keywords.update({"transport": "grpcio"} if kind == "grpcio" else {"web": kind == "http2"})
            server = serve_gym(DrawnEnv, **keywords, limits=limits)
        stack.enter_context(server)
        pipe.send(server.port)
        pipe.recv()


def ignore(kind: str, certificates: str | None, pipe: Any) -> None:
    """Accept connections and read nothing: what an attacker costs by itself."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        pipe.send(listener.getsockname()[1])
        held: deque[socket.socket] = deque(maxlen=4000)
        listener.settimeout(0.1)
        while not pipe.poll():
            with contextlib.suppress(TimeoutError):
                held.append(listener.accept()[0])


@contextmanager
def running(
    target: Callable[[str, str | None, Any], None], kind: str, certificates: str | None
) -> Iterator[tuple[Target, psutil.Process]]:
    """Run a server in a process of its own; give where it is, and its process."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=target, args=(kind, certificates, theirs))
    process.start()
    try:
        if not ours.poll(60.0):
            raise RuntimeError("the server did not start")
        ca = None if certificates is None else str(Path(certificates, "ca.pem"))
        yield Target(ours.recv(), target is serve, ca), psutil.Process(process.pid)
    finally:
        with contextlib.suppress(OSError):
            ours.send(None)
        process.join(10.0)
        if process.is_alive():
            process.kill()
            process.join()


# Measuring


class Watch:
    """Follows the memory of a process."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.02):
            with contextlib.suppress(psutil.Error):
                self.peak = max(self.peak, self._process.memory_info().rss)

    def close(self) -> None:
        """End it."""
        self._over.set()
        self._thread.join()


class Honest:
    """A client that steps, and connects again where it was cut."""

    def __init__(self, target: Target, query: str) -> None:
        self._target = target
        self._url = target.url(query)
        self._env: RemoteEnv | None = None

    def steps(self, seconds: float) -> int:
        """Return how many steps it makes, its connection included where there is none."""
        count, until = 0, time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                if self._env is None:
                    timeout = max(2.0, seconds)
                    self._env = make_remote(self._url, timeout=timeout, **self._target.credentials())
                    self._env.reset(seed=0)
                while time.monotonic() < until:
                    self._env.step(0)
                    count += 1
            except Exception:
                self.close()
                time.sleep(0.01)
        return count

    def close(self) -> None:
        """Disconnect."""
        env, self._env = self._env, None
        if env is not None:
            with contextlib.suppress(Exception):
                env.close()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The effects of one attack on one server."""

    grown: float
    """MiB that the server took more than with the honest client alone."""
    share: float
    """Of its steps that an honest client kept, against the same attackers writing to a socket nobody reads."""
    slow_share: float
    """The same at 0.5 MB/s."""
    recovery: float
    """Seconds from the attackers' end until the honest client was back at 95 % of what it made before; inf: never."""
    large: bool = False
    """True if the messages of the attack are large, and allowed to be: their memory is no fault."""

    @property
    def misses(self) -> tuple[bool, bool, bool, bool]:
        """Which of the figures, in their order, are worse than their goals."""
        return self.grown > 64 and not self.large, self.share < 0.5, self.slow_share < 0.8, self.recovery > 2.0


def measure(name: str, kind: str, seconds: float, rounds: int) -> Outcome:
    """Run one attack on one server; medians over the rounds, of memory and recovery the worst."""
    outcomes = []
    with contextlib.ExitStack() as stack:
        certificates = None
        if ATTACKS[name].tls:
            certificates = str(Path(stack.enter_context(tempfile.TemporaryDirectory()), "certificates"))
            make_certificates(certificates)
        for _ in range(rounds):
            with (
                running(serve, kind, certificates) as (target, process),
                running(serve, kind, certificates) as (spared, _),
                running(ignore, kind, None) as (nowhere, _),
            ):
                outcomes.append(measure_once(name, target, process, spared, nowhere, seconds))
    return Outcome(
        max(outcome.grown for outcome in outcomes),
        statistics.median(outcome.share for outcome in outcomes),
        statistics.median(outcome.slow_share for outcome in outcomes),
        max(outcome.recovery for outcome in outcomes),
        ATTACKS[name].large,
    )


def measure_once(
    name: str, target: Target, process: psutil.Process, spared: Target, nowhere: Target, seconds: float
) -> Outcome:
    """Run one attack on one server, flat out and slowly.

    Args:
        name: The attack's.
        target: The server that is attacked, whose process is `process`.
        process: As above.
        spared: Another one of its kind, which is not attacked.
        nowhere: A socket of which nobody reads.
        seconds: Of each measurement.
    """
    shares, grown, recovery = [], 0.0, 0.0
    kind = ATTACKS[name]
    query = "?world=" if kind.default_world else ""
    for rate in (0.0, SLOW):
        with contextlib.closing(Honest(target, query)) as honest, contextlib.closing(Honest(spared, query)) as other:
            before = compared(honest, other, seconds)
            base = process.memory_info().rss
            with attacking(name, nowhere, rate):
                beside = honest.steps(seconds)
            if not (kind.early or kind.default_world):
                honest.close()  # so that it has to get in beside the attackers
            watch = Watch(process)
            with attacking(name, target, rate):
                shares.append(honest.steps(seconds) / max(1, beside))
            watch.close()
            if kind.early:
                honest.close()
            recovery = max(recovery, recover(honest, other, before))
        grown = max(grown, (watch.peak - base) / _MIB)
    return Outcome(grown, shares[0], shares[1], recovery)


def compared(honest: Honest, other: Honest, seconds: float) -> float:
    """Return how many steps one client makes for each step of another one, in turns."""
    turns = [(honest.steps(_WINDOW), other.steps(_WINDOW)) for _ in range(max(1, round(seconds / _WINDOW)))]
    return sum(own for own, _ in turns) / max(1, sum(others for _, others in turns))


def recover(honest: Honest, other: Honest, before: float) -> float:
    """Return after how many seconds `compared` is back at 95 % of what it was; inf: it is not."""
    began = time.monotonic()
    while (at := time.monotonic() - began) < _LONGEST:
        if compared(honest, other, _WINDOW) >= 0.95 * before:
            return at
    return float("inf")


def table(results: dict[str, dict[str, Outcome]], kinds: Sequence[str] = tuple(SERVERS)) -> str:
    """Return the results as Markdown; in a cell: MiB more, both shares, seconds until the client is back."""
    lines = [f"| attack | {' | '.join(SERVERS[kind] for kind in kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    for name, found in results.items():
        cells = [name]
        for kind in kinds:
            outcome = found.get(kind)
            if outcome is None:
                cells.append("")
                continue
            back = f"{outcome.recovery:.1f}" if outcome.recovery < _LONGEST else "never"
            figures = [f"{outcome.grown:.0f}", f"{outcome.share:.0%}", f"{outcome.slow_share:.0%}", back]
            cells.append(
                ", ".join(f"**{text}**" if bad else text for text, bad in zip(figures, outcome.misses, strict=True))
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and print the table; the exit code is 1 where one of our goals is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description="Attacks on servers.")
    parser.add_argument("--rows", metavar="NAME,…", help=f"all, or some of: {', '.join(map(repr, ATTACKS))}")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement (default: 3)")
    parser.add_argument("--rounds", type=int, default=5, help="of which medians are shown (default: 5)")
    parser.add_argument("--servers", default=",".join(SERVERS), help="some of http2,grpcio,gateway (default: all)")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/attacks.md")
    add_busy(parser)
    arguments = parser.parse_args(argv)
    names = list(ATTACKS) if arguments.rows is None else _chosen(arguments.rows)
    kinds = arguments.servers.split(",")
    for unknown in [name for name in names if name not in ATTACKS] + [kind for kind in kinds if kind not in SERVERS]:
        parser.error(f"there is no {unknown!r}; see --help")
    if arguments.write and (len(names) < len(ATTACKS) or len(kinds) < len(SERVERS)):
        parser.error("--write needs all rows and all servers: the page quotes one whole run")
    results: dict[str, dict[str, Outcome]] = {}
    missed = []
    with measuring(parser, arguments.busy):
        how = f"{arguments.rounds} rounds of {arguments.seconds:g} s on {os.cpu_count()} cores"
        print(how, file=sys.stderr)
        for name in names:
            results[name] = {}
            for kind in kinds:
                if kind == "grpcio" and ATTACKS[name].websocket:
                    continue
                found = results[name][kind] = measure(name, kind, arguments.seconds, arguments.rounds)
                print(f"{name}, {SERVERS[kind]}: {found}", file=sys.stderr, flush=True)
                if kind != "grpcio" and any(found.misses):
                    missed.append(f"{name} ({SERVERS[kind]})")
        text = f"{table(results, kinds)}\n\n{how}. Bold figures miss their goal."
        print(text)
        print(f"goals missed: {', '.join(missed) or 'none'}", file=sys.stderr)
        if arguments.write:
            page = _PAGE.read_text("utf-8")
            pattern = re.compile(r"(<!-- attacks: [^\n]*-->\n).*?(<!-- end of attacks -->)", re.DOTALL)
            _PAGE.write_text(pattern.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page), "utf-8")
    return int(bool(missed))


def _chosen(text: str) -> list[str]:
    """Return the rows of an option; their names may hold commas."""
    found, rest = [], text
    while rest:
        name = next((name for name in ATTACKS if rest == name or rest.startswith(f"{name},")), rest.partition(",")[0])
        found.append(name)
        rest = rest[len(name) + 1 :]
    return found


if __name__ == "__main__":
    sys.exit(main())

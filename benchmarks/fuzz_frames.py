"""`python -m benchmarks.fuzz_frames`: random and garbled frames, over a real Unix socket to a server of its own.

Each frame must be answered by exactly one EnvironmentResponse that can be read, or end its connection; whatever is sent
as a hello, a length or a payload, and wherever it is cut. The server must live on, and its memory, its threads and its
files must not grow. Payloads are those of `benchmarks.fuzz`.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.fuzz import garbled, valid_requests
from bridge import make_remote, serve_gym
from bridge.errors import Code
from bridge.frames import HEADER, MAX_HELLO_BYTES, Hello, pack_frame
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv

ROOT = Path(__file__).parent.parent
MAX_MESSAGE_BYTES = 200_000
_DEADLINE = 30.0
_CLIENTS = 4
_BATCH = 32


@dataclasses.dataclass
class Report:
    """What a run gave."""

    frames: int
    seconds: float
    connections: int
    answers: Counter[str]
    """How many answers of each kind, and how many connections ended in each way."""
    grown: int
    """Bytes by which the server's memory grew after the first tenth."""
    files: int
    """Files that the server has open in the end, beside those of the beginning."""
    threads: int
    """Threads, likewise."""


def serve(path: str) -> None:
    """Serve until standard input ends: the whole life of the server's process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with serve_gym(
            lambda: CountingEnv(5),
            unix_path=path,
            max_worlds=8,
            max_lanes=8,
            max_message_bytes=MAX_MESSAGE_BYTES,
            reset_world_timeout=0.01,
        ):
            print("served", flush=True)
            sys.stdin.read()


@contextmanager
def server(path: str) -> Iterator[psutil.Process]:
    """Run a server in a process of its own.

    Raises:
        AssertionError: It did not start, or has crashed.
    """
    command = [sys.executable, "-m", "benchmarks.fuzz_frames", "--serve", path]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None or process.stdout.readline() != b"served\n":
                raise AssertionError("the server did not start")
            yield psutil.Process(process.pid)
            if process.poll() is not None:
                raise AssertionError(f"the server ended with {process.returncode}")
        finally:
            process.kill()


class Client:
    """One connection, which is let in, and a read of what comes back."""

    def __init__(self, path: str) -> None:
        self.sock = opened(path)
        self.sock.sendall(pack_frame(Hello().pack()))
        self._rest = b""
        self.left = 0
        hello = self.frame()
        if hello is None or Hello.unpack(hello).code:
            raise AssertionError(f"a client in good order was not let in: {hello!r}")

    def frame(self) -> bytes | None:
        """Return the next frame; None: the connection has ended."""
        while len(self._rest) < 4 or len(self._rest) < 4 + HEADER.unpack_from(self._rest)[0]:
            try:
                data = self.sock.recv(1 << 18)
            except ConnectionError:
                data = b""
            if not data:
                return None
            self._rest += data
        stop = 4 + HEADER.unpack_from(self._rest)[0]
        frame, self._rest = self._rest[4:stop], self._rest[stop:]
        return frame

    def answer(self) -> pb.EnvironmentResponse | None:
        """Return the next answer; None: the connection has ended."""
        frame = self.frame()
        if frame is None:
            return None
        answer = pb.EnvironmentResponse.FromString(frame)
        if answer.WhichOneof("payload") is None:
            raise AssertionError("an answer without a payload")
        return answer


def opened(path: str) -> socket.socket:
    """Connect."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(_DEADLINE)
    sock.connect(path)
    return sock


def sent(sock: socket.socket, data: bytes, rng: random.Random) -> None:
    """Send, at times in pieces that end anywhere."""
    if rng.random() < 0.8:
        sock.sendall(data)
        return
    view = memoryview(data)
    while view:
        count = rng.randint(1, max(1, len(view)))
        sock.sendall(view[:count])
        view = view[count:]


def bad_hello(rng: random.Random) -> bytes:
    """Return the beginning of a stream that lets nobody in."""
    good = pack_frame(Hello(token="x" * rng.randrange(40)).pack())
    texts = (b"{}", b"[]", b"null", b"1", b'{"gymnasium-bridge": 3}', b'{"gymnasium-bridge": null}', b"[" * 9000)
    makers: Sequence[Callable[[], bytes]] = (
        lambda: rng.randbytes(rng.randint(1, 64)),
        lambda: rng.randbytes(4) + good,
        lambda: HEADER.pack(rng.randint(0, MAX_HELLO_BYTES)) + rng.randbytes(rng.randint(0, 300)),
        lambda: HEADER.pack(rng.randint(MAX_HELLO_BYTES + 1, 2**32 - 1)),
        lambda: good[: rng.randrange(len(good))],
        lambda: pack_frame(rng.choice(texts)),
        lambda: pack_frame(b'{"gymnasium-bridge": "0", "token": %d}' % rng.randrange(9)),
        lambda: b"GET / HTTP/1.1\r\n\r\n",
        lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),
    )
    return rng.choice(makers)()


def stranger(path: str, rng: random.Random) -> str:
    """Connect with a bad hello; return how that ended.

    Raises:
        AssertionError: It was let in, or got more than one frame.
    """
    with opened(path) as sock:
        data = b""
        try:
            sent(sock, bad_hello(rng), rng)
            sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(1 << 16):
                data += part
        except ConnectionError:
            return "strangers reset"
    if not data:
        return "strangers closed"
    if len(data) != 4 + HEADER.unpack_from(data)[0] or not Hello.unpack(data[4:]).code:
        raise AssertionError(f"a stranger was told {data[:200]!r}")
    return "strangers refused"


def ended(client: Client, rng: random.Random) -> str:
    """End a connection in one of many ways; return which.

    Raises:
        AssertionError: What came back is no answer, or there is too much of it.
    """
    way = rng.randrange(6)
    with client.sock as sock:
        try:
            if way == 0:
                return "closed"
            if way == 1:
                sent(sock, HEADER.pack(rng.randint(1, 150_000)) + rng.randbytes(rng.randint(0, 90)), rng)
                return "cut in a frame"
            if way == 2:
                sent(sock, rng.randbytes(rng.randint(1, 3)), rng)
                return "cut in a length"
            if way == 3:  # who does not read what was asked for
                sent(sock, b"".join(map(pack_frame, rng.choices(valid_requests([]), k=20))), rng)
                return "cut with answers unread"
            if way == 4:
                sock.shutdown(socket.SHUT_WR)
                most = 0
            else:
                sent(sock, HEADER.pack(rng.randint(MAX_MESSAGE_BYTES + 1, 2**32 - 1)) + rng.randbytes(40), rng)
                most = 1
        except ConnectionError:
            return "reset"
        answers = []
        while (answer := client.answer()) is not None:
            answers.append(answer.error.code)
        if len(answers) > most or answers not in ([], [Code.RESOURCE_EXHAUSTED]):
            raise AssertionError(f"{answers} came after the end")
        return "refused by its length" if most else "half closed"


def run(frames: int, *, seed: int = 0, say: Callable[[str], None] | None = None) -> Report:
    """Send frames over connections that come and go, some at a time.

    Raises:
        AssertionError: A frame was not answered by one answer, or a server that was in order is not any more.
        TimeoutError: There was no answer.
    """
    rng = random.Random(seed)
    answers: Counter[str] = Counter()
    names: list[str] = []
    count = connections = grown_from = 0
    clients: list[Client] = []
    shown = began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, server(f"{folder}/s") as process:
        path = f"{folder}/s"
        play(path)
        files, threads = process.num_fds(), process.num_threads()
        while count < frames:
            if not grown_from and count >= frames // 10:
                grown_from = process.memory_info().rss
            if say is not None and time.perf_counter() - shown > 10.0:
                shown = time.perf_counter()
                say(f"{count:,} frames, {process.memory_info().rss / 1e6:.1f} MB")
            while len(clients) < _CLIENTS:
                clients.append(Client(path))
                clients[-1].left = rng.randint(1, 2000)
                connections += 1
            if rng.random() < 0.2:
                answers[stranger(path, rng)] += 1
                connections += 1
                count += 1
            client = rng.choice(clients)
            batch = payloads(rng, names, rng.randint(1, _BATCH))
            sent(client.sock, b"".join(map(pack_frame, batch)), rng)
            for data in batch:
                answer = client.answer()
                if answer is None:
                    raise AssertionError(f"the connection ended at {data!r}")
                kind = str(answer.WhichOneof("payload"))
                if kind == "create_world":
                    names = [*names[-7:], answer.create_world.world_name]
                elif kind == "destroy_world":
                    gone = pb.EnvironmentRequest.FromString(data).destroy_world.world_name
                    names = [name for name in names if name != gone]
                answers[f"error {answer.error.code}" if kind == "error" else kind] += 1
            count += len(batch)
            client.left -= len(batch)
            if client.left <= 0:
                clients.remove(client)
                names = []  # its worlds go with it
                answers[ended(client, rng)] += 1
                count += 1
        seconds = time.perf_counter() - began
        for client in clients:
            client.sock.close()
        play(path)
        deadline = time.monotonic() + _DEADLINE
        while process.num_fds() > files or process.num_threads() > threads:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)  # the server notices each end by itself
        return Report(
            count,
            seconds,
            connections,
            answers,
            process.memory_info().rss - grown_from,
            process.num_fds() - files,
            process.num_threads() - threads,
        )


def payloads(rng: random.Random, names: Sequence[str], number: int) -> list[bytes]:
    """Return requests, some of them for worlds of these names: in good order, garbled, random, empty or large."""
    batch, pool = [], valid_requests(names)
    for _ in range(number):
        way = rng.random()
        if way < 0.002:  # from then on the connection has a thread of its own
            name = rng.choice(["", *names])
            batch.append(pb.EnvironmentRequest(reset_world=pb.ResetWorldRequest(world_name=name)).SerializeToString())
        elif way < 0.6:
            batch.append(rng.choice(pool))
        elif way < 0.9:
            batch.append(garbled(rng.choice(pool), rng))
        elif way < 0.998:
            batch.append(rng.randbytes(rng.randrange(60)))
        else:
            batch.append(rng.randbytes(rng.randrange(60_000, MAX_MESSAGE_BYTES)))
    return batch


def play(path: str) -> None:
    """Play as a client in good order does."""
    env = make_remote(f"unix://{path}", timeout=_DEADLINE)
    try:
        env.reset(seed=0)
        env.step(1)
    finally:
        env.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the figures; the exit code is 1 where memory grew by more than 20 MB, or files or threads are left."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz_frames", description="Random frames: one answer each, or a closed connection."
    )
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", metavar="PATH", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.serve is not None:
        serve(arguments.serve)
        return 0
    report = run(arguments.frames, seed=arguments.seed, say=lambda text: print(text, file=sys.stderr, flush=True))
    print(
        f"{report.frames:,} frames over {report.connections:,} connections in {report.seconds:.0f} s, "
        f"{report.frames / report.seconds:,.0f} a second, one answer or a closed connection each: "
        f"{dict(report.answers.most_common())}; in the server, memory grew by {report.grown / 1e6:.1f} MB after the "
        f"first tenth, files by {report.files}, threads by {report.threads}"
    )
    return int(report.grown > 20_000_000 or report.files > 0 or report.threads > 0)


if __name__ == "__main__":
    sys.exit(main())

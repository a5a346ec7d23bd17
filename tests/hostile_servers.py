"""Servers that mean harm to a client, by name; each runs in the process that asks for it, on a port of its own."""

import base64
import functools
import hashlib
import queue
import socket
import struct
import threading
import zlib
from contextlib import contextmanager, suppress

import grpc
import gymnasium
import hpack
import numpy as np
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from gymnasium import spaces

import bridge
from bridge import serve_gym
from bridge.core.encoding import values
from bridge.core.encoding.names import PROPERTY_REQUEST_URL
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import Code
from bridge.pb import properties_pb2
from tests.scripted_server import Refuse, ScriptedServer

MIB = 1 << 20
ACTION = pb.TensorSpec(name="action", dtype=pb.INT64, min={"int64s": {"array": [0]}}, max={"int64s": {"array": [3]}})
REWARD = pb.TensorSpec(name="reward", dtype=pb.DOUBLE)
HELLO = "gymnasium-bridge"  # the header by which a server of this package is known
SETTINGS = struct.pack(">HBBBI", 0, 0, 4, 0, 0)


def specs_of(*observations):
    named = dict(enumerate(observations, start=10))
    return pb.ActionObservationSpecs(actions={1: ACTION}, observations={**named, 2: REWARD})


def observation(name="observation", shape=(), dtype=pb.FLOAT):
    return pb.TensorSpec(name=name, shape=shape, dtype=dtype)


# On sockets


def frame(kind, flags, number, payload=b""):
    """Return a frame of HTTP/2."""
    return struct.pack(">BHBBI", len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, number) + payload


def headers(*fields):
    encoder = hpack.Encoder()
    return encoder.encode([(":status", "200"), ("content-type", "application/grpc"), *fields])


def pings():
    yield SETTINGS
    while True:
        yield frame(6, 0, 0, bytes(8)) * 1000


def settings():
    while True:
        yield SETTINGS * 1000


def dribbling_answer():
    """An answer of 31 MiB, a byte at a time."""
    yield SETTINGS + frame(1, 4, 1, headers()) + frame(0, 0, 1, b"\0" + struct.pack(">I", 31 * MIB))
    while True:
        yield frame(0, 0, 1, b"\0"), 0.01


def endless_headers():
    yield SETTINGS + frame(1, 0, 1, b"")
    while True:
        yield frame(9, 0, 1, bytes(10_000))


def table_bomb():
    """A header block of 4 kB in which one field of 4 kB stands 4,000 times."""
    name = b"\x40\x01x\x7f\xa1\x1e" + b"y" * 4000
    yield SETTINGS + frame(1, 4, 1, headers() + name + b"\xbe" * 4000)
    while True:
        yield frame(6, 1, 0, bytes(8)), 0.1


@functools.cache
def zeros():
    """Return 200 MiB of zeros in gzip's 0.2 MB."""
    packer, piece = zlib.compressobj(9, wbits=zlib.MAX_WBITS | 16), bytes(MIB)
    return b"".join([*(packer.compress(piece) for _ in range(200)), packer.flush()])


def compressed_bomb():
    """An answer that is a thousand times larger once it is uncompressed."""
    data = zeros()
    body = b"\1" + struct.pack(">I", len(data)) + data
    yield SETTINGS + frame(1, 4, 1, headers(("grpc-encoding", "gzip")))
    for start in range(0, len(body), 16000):
        yield frame(0, 0, 1, body[start : start + 16000])
    while True:
        yield frame(6, 1, 0, bytes(8)), 0.1


def unasked_answers():
    """Answers without end, each of 10 kB, to requests that nobody made."""
    refusal = pb.EnvironmentResponse()
    refusal.error.code, refusal.error.message = 3, "x" * 10_000
    data = refusal.SerializeToString()
    yield SETTINGS + frame(1, 4, 1, headers())
    while True:
        yield frame(0, 0, 1, b"\0" + struct.pack(">I", len(data)) + data) * 16


def endless_frames():
    """Frames of no meaning without end."""
    yield SETTINGS
    while True:
        yield frame(99, 0, 0) * 5000


def websocket_pings(request):
    """Agree to speak WebSocket, and ping without end."""
    yield upgraded(request)
    while True:
        yield (b"\x89\x7d" + bytes(125)) * 500


def endless_http_head(request):
    """Header fields of HTTP/1.1 without end."""
    yield b"HTTP/1.1 101 Switching Protocols\r\n"
    while True:
        yield b"x: y\r\n" * 1000


def upgraded(request):
    """Return the answer that a request for a WebSocket expects."""
    key = next(line.split(b": ")[1] for line in request.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key"))
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()).decode()
    head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    return f"{head}Sec-WebSocket-Protocol: dm_env_rpc.v1\r\nSec-WebSocket-Accept: {accept}\r\n\r\n".encode()


class SocketServer:
    """Sends each client pieces, and reads at most a first request.

    Args:
        pieces: Gives the pieces, each with a pause after it or without; over WebSocket it is given the request.
        scheme: `grpc` or `ws`.
        limit: The most bytes to send.
    """

    def __init__(self, pieces, scheme="grpc", limit=1 << 30):
        self._pieces, self._limit = pieces, limit
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._web = scheme == "ws"
        self.url = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = 0
        self.left = threading.Event()
        """Set once a client has gone."""
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._clients = []

    def __enter__(self):
        self._threads[0].start()
        return self

    def __exit__(self, *_):
        self._stopped.set()
        socket.create_connection(self._listener.getsockname()).close()  # wakes `accept`
        self._threads[0].join(30)
        for client in self._clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
        self._listener.close()

    def _accept(self):
        while True:
            client, _ = self._listener.accept()
            if self._stopped.is_set():
                client.close()
                return
            self._clients.append(client)
            thread = threading.Thread(target=self._serve, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, client):
        with client, suppress(OSError):
            client.settimeout(60)
            pieces = self._pieces(client.recv(65536)) if self._web else self._pieces()
            for piece in pieces:
                data, pause = piece if isinstance(piece, tuple) else (piece, 0.0)
                client.sendall(data)
                self.sent += len(data)
                if self._stopped.wait(pause) or self.sent > self._limit:
                    return
        self.left.set()


# On the messages


class Foreign(ScriptedServer):
    """Has no properties."""

    def answer(self, kind, request):
        if kind == "extension":
            raise Refuse(int(Code.UNIMPLEMENTED), "no extension is served here")
        return super().answer(kind, request)


class Talks(Foreign):
    """Refuses to make a world with a text of 30 MB that a terminal would obey."""

    def answer(self, kind, request):
        if kind == "join_world":
            raise Refuse(int(Code.INVALID_ARGUMENT), "gone \x1b[2J\u202e" + "x\x07" * 15_000_000)
        return super().answer(kind, request)


class EndlessProperties(ScriptedServer):
    """Lists properties each of which lists others."""

    def answer(self, kind, request):
        if kind != "extension":
            return super().answer(kind, request)
        asked, answer = properties_pb2.PropertyRequest.FromString(request.value), properties_pb2.PropertyResponse()
        if asked.HasField("list_property"):
            for index in range(100):
                spec = answer.list_property.values.add(is_listable=True, is_readable=True)
                spec.spec.name = f"{asked.list_property.key}.{index}".lstrip(".")
        else:
            answer.read_property.value.strings.array.append("x" * 1000)
        request.value = answer.SerializeToString()
        return request


class Pretender(Foreign):
    """Says that it is a server of this package, and says nonsense wherever it is asked."""

    def Process(self, request_iterator, context):  # noqa: N802
        context.send_initial_metadata(((HELLO, bridge.__version__),))
        yield from super().Process(request_iterator, context)

    def answer(self, kind, request):
        if kind != "extension":
            return super().answer(kind, request)
        asked, answer = properties_pb2.PropertyRequest.FromString(request.value), properties_pb2.PropertyResponse()
        if asked.HasField("list_property"):
            for key in ("server.web", "world.num_envs", "world.agents", "world.observation_space"):
                answer.list_property.values.add(is_readable=True).spec.name = key
        elif asked.read_property.key == "server.environments":
            answer.read_property.value.CopyFrom(pack_tensor(np.frombuffer(values.encode([]), np.uint8)))
        else:
            answer.read_property.value.CopyFrom(pack_tensor("[" * 100_000))
        request.value = answer.SerializeToString()
        return request


class Relay(ScriptedServer):
    """Passes everything on to a server of this package, and changes what it answers.

    Args:
        url: That server's.
        change: Called with each answer, which it changes: `change(kind, response)`; of a property, `kind` is its key,
            and of a call "extension".
    """

    def __init__(self, url, change):
        super().__init__(pb.ActionObservationSpecs())
        self._target, self._change = url.removeprefix("grpc://"), change

    def Process(self, request_iterator, context):  # noqa: N802
        hello = ((HELLO, bridge.__version__),)
        context.send_initial_metadata(hello)
        requests = queue.SimpleQueue()
        with grpc.insecure_channel(self._target) as channel:
            process = channel.stream_stream(
                "/dm_env_rpc.v1.Environment/Process",
                pb.EnvironmentRequest.SerializeToString,
                pb.EnvironmentResponse.FromString,
            )
            call = process(iter(requests.get, None), metadata=hello)
            for request in request_iterator:
                requests.put(request)
                kind, response = request.WhichOneof("payload"), next(call)
                if kind == "extension" and request.extension.type_url == PROPERTY_REQUEST_URL:
                    kind = properties_pb2.PropertyRequest.FromString(request.extension.value).read_property.key
                self._change(kind, response)
                yield response
            requests.put(None)


def misdescribed(url, key, value):
    """Relay a server, and lie about one property of its worlds; a dict or list is of the values codec."""

    def change(kind, response):
        if kind == key:
            packed = pack_tensor(np.frombuffer(values.encode(value), np.uint8) if isinstance(value, list) else value)
            answer = properties_pb2.PropertyResponse()
            answer.read_property.value.CopyFrom(packed)
            response.extension.value = answer.SerializeToString()

    return Relay(url, change)


def misreported(url, name, value):
    """Relay a server, and give in each Step after the first ones a value, or its bytes, as an observation."""
    uids, steps = [], []

    def change(kind, response):
        if kind == "join_world":
            specs = response.join_world.specs.observations
            uids.extend(uid for uid, spec in specs.items() if spec.name == name)
        elif kind == "step":
            steps.append(kind)
            if len(steps) > 3:
                data = value if isinstance(value, bytes) else values.encode(value)
                tensor = pb.Tensor(uint8s={"array": data}, shape=[len(data)])
                response.step.observations[uids[0]].CopyFrom(tensor)

    return Relay(url, change)


class InfoEnv(gymnasium.Env):
    """One whose info is large."""

    observation_space = spaces.Box(0, 1, ())
    action_space = spaces.Discrete(4)

    def __init__(self, info):
        self._info = info

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, self._info


def keys():
    return {str(number): 0 for number in range(10**6)}


def nested():
    value = 0
    for _ in range(25):
        value = [value]
    return {"nested": [value] * 30_000}


def scripted(*observations):
    return lambda: Foreign(specs_of(*observations))


HOSTILE = {
    "a spec of shape [10⁸]": scripted(observation(shape=[10**8])),
    "200,000 specs": lambda: Foreign(specs_of(*(observation(f"x{index}") for index in range(200_000)))),
    "an error of 30 MB": lambda: Talks(specs_of(observation())),
    "properties without end": lambda: EndlessProperties(specs_of(observation())),
    "nonsense": lambda: Pretender(specs_of(observation())),
    "an info of 10⁶ keys": lambda: serve_gym(lambda: InfoEnv(keys())),
    "nested infos": lambda: serve_gym(lambda: InfoEnv(nested())),
    "pings, never reads": lambda: SocketServer(pings),
    "SETTINGS, never reads": lambda: SocketServer(settings),
    "WebSocket pings, never reads": lambda: SocketServer(websocket_pings, "ws"),
    "an HTTP head without end": lambda: SocketServer(endless_http_head, "ws"),
    "header fields without end": lambda: SocketServer(endless_headers),
    "a table bomb": lambda: SocketServer(table_bomb),
    "a compressed bomb": lambda: SocketServer(compressed_bomb),
    "an answer that dribbles": lambda: SocketServer(dribbling_answer),
    "answers to nothing": lambda: SocketServer(unasked_answers),
    "frames of no meaning": lambda: SocketServer(endless_frames),
}
"""The maker of each of them: a context manager with `url`."""


@contextmanager
def hostile(name):
    """Run one; give its URL."""
    with HOSTILE[name]() as server:
        yield server.url

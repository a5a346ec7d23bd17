"""HTTP/2 for tests: a client on the h2 library, turned by hand, and frames of any kind."""

import contextlib
import socket
import struct

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings

from bridge.core.encoding.tensors import pack_tensor
from bridge.core.transport.messages import MessageReader as MessageReader
from bridge.core.transport.messages import pack_prefix as pack_prefix
from bridge.pb import dm_env_rpc_pb2 as pb

PATH = "/dm_env_rpc.v1.Environment/Process"
WATCH = "/grpc.health.v1.Health/Watch"
CHECK = "/grpc.health.v1.Health/Check"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
Codes = h2.errors.ErrorCodes


def message(data, flag=0):
    return bytes((flag,)) + struct.pack(">I", len(data)) + data


def request(**payload):
    return pb.EnvironmentRequest(**payload).SerializeToString()


CREATE = request(create_world=pb.CreateWorldRequest())
BEGIN = request(step=pb.StepRequest(requested_observations=[1]))
STEP = request(step=pb.StepRequest(actions={1: pack_tensor(1)}, requested_observations=[1]))
LEAVE = request(leave_world=pb.LeaveWorldRequest())


def join(name):
    return request(join_world=pb.JoinWorldRequest(world_name=name))


def fields(path=PATH, **changed):
    found = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    found.update({name.replace("__", ":").replace("_", "-"): value for name, value in changed.items()})
    return [(name, value) for name, value in found.items() if value is not None]


class Hand:
    """A client on h2, turned by hand."""

    def __init__(self, server, **initial):
        self.sock = socket.create_connection(("127.0.0.1", server.port), 10.0)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        if initial:
            values = {getattr(h2.settings.SettingCodes, name): value for name, value in initial.items()}
            self.h2.local_settings = h2.settings.Settings(client=True, initial_values=values)
        self.credits = True
        self.bodies, self.heads, self.trailers, self.resets, self.ended = {}, {}, {}, {}, set()
        self.acks = 0
        self.settled, self.pings, self.pongs, self.farewell, self.gone = False, 0, 0, None, False
        self.h2.initiate_connection()
        self.send()
        self.until(lambda: self.settled)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()

    def send(self):
        data = self.h2.data_to_send()
        if data:
            self.sock.sendall(data)

    def read(self):
        data = self.sock.recv(65536)
        self.gone = not data
        for event in self.h2.receive_data(data) if data else []:
            self.note(event)
        if not self.gone:
            self.send()

    def note(self, event):
        kind, number = type(event), getattr(event, "stream_id", None)
        if kind is h2.events.RemoteSettingsChanged:
            self.settled = True
        elif kind is h2.events.SettingsAcknowledged:
            self.acks += 1
        elif kind is h2.events.ResponseReceived:
            self.heads[number] = dict(event.headers)
        elif kind is h2.events.TrailersReceived:
            self.trailers[number] = dict(event.headers)
        elif kind is h2.events.DataReceived:
            self.bodies[number] = self.bodies.get(number, b"") + event.data
            if self.credits and event.flow_controlled_length:
                self.h2.acknowledge_received_data(event.flow_controlled_length, number)
        elif kind is h2.events.StreamEnded:
            self.ended.add(number)
        elif kind is h2.events.StreamReset:
            self.resets[number] = event.error_code
        elif kind is h2.events.PingReceived:
            self.pings += 1
        elif kind is h2.events.PingAckReceived:
            self.pongs += 1
        elif kind is h2.events.ConnectionTerminated:
            self.farewell = event.error_code

    def until(self, condition):
        while not condition():
            assert not self.gone, "the server closed"
            self.read()

    def open(self, path=PATH, *, end=False, **changed):
        number = self.h2.get_next_available_stream_id()
        self.h2.send_headers(number, fields(path, **changed), end_stream=end)
        self.send()
        return number

    def raw(self, number, data, *, end=False, pad=None):
        while data:
            count = min(len(data), self.h2.local_flow_control_window(number) - 300, self.h2.max_outbound_frame_size)
            if count <= 0:
                self.read()
                continue
            self.h2.send_data(number, data[:count], pad_length=pad)
            self.send()
            data = data[count:]
        if end:
            self.h2.end_stream(number)
            self.send()

    def say(self, number, *payloads, end=False, pad=None):
        self.raw(number, b"".join(map(message, payloads)), end=end, pad=pad)

    def has_answer(self, number):
        body = self.bodies.get(number, b"")
        return len(body) >= 5 and len(body) >= 5 + int.from_bytes(body[1:5], "big")

    def answer(self, number):
        self.until(lambda: self.has_answer(number))
        body = self.bodies[number]
        size = 5 + int.from_bytes(body[1:5], "big")
        self.bodies[number] = body[size:]
        return body[5:size]

    def response(self, number):
        return pb.EnvironmentResponse.FromString(self.answer(number))

    def ask(self, number, payload):
        self.say(number, payload)
        return self.response(number)

    def play(self, **changed):
        """Open a session in a world of its own, with a sequence begun."""
        number = self.open(**changed)
        name = self.ask(number, CREATE).create_world.world_name
        self.ask(number, join(name))
        return number

    def step(self, number, payload=STEP):
        return self.ask(number, payload).step

    def status(self, number):
        """The code of a call that ended, and why."""
        self.until(lambda: number in self.ended or number in self.resets)
        found = self.trailers.get(number) or self.heads[number]
        return int(found["grpc-status"]), found.get("grpc-message", "")

    def cut(self, number):
        self.h2.reset_stream(number, Codes.CANCEL)
        self.send()

    def room(self, more, number=None):
        self.h2.increment_flow_control_window(more, number)
        self.send()


def frame(kind, flags=0, number=0, payload=b""):
    size = len(payload)
    return struct.pack(">BHBBI", size >> 16, size & 0xFFFF, kind, flags, number) + payload


HELLO = PREFACE + frame(SETTINGS)


@contextlib.contextmanager
def raw(server, first=b""):
    # A client that is charged is read later, on a slow machine much later.
    with socket.create_connection(("127.0.0.1", server.port), 60.0) as sock:
        sock.sendall(first)
        yield sock


def frames_of(sock):
    """All frames until the server closes: kind, flags, stream, payload."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while got := sock.recv(65536):
            data += got
    found = []
    while len(data) >= 9:
        high, low, kind, flags, number = struct.unpack_from(">BHBBI", data)
        size = high << 16 | low
        found.append((kind, flags, number, data[9 : 9 + size]))
        data = data[9 + size :]
    return found


def farewell_of(sock):
    """The error with which the server ended a connection."""
    found = [payload for kind, _, _, payload in frames_of(sock) if kind == GOAWAY]
    assert found
    return int.from_bytes(found[-1][4:8], "big")


def sent_all(sock, data):
    """Send, to a server that may close meanwhile."""
    with contextlib.suppress(ConnectionError):
        sock.sendall(data)


def block(path=PATH, **changed):
    """A header block of literals, which may come on any connection at any time."""
    return b"".join(
        b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
        for name, value in fields(path, **changed)
    )

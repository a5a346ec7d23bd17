"""A plain dm_env_rpc connection for the conformance checks.

It is not this library's client: it can send invalid requests, and returns responses unchanged.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from bridge.core.transport.http_proxies import HttpProxy, grpc_options
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["METHOD", "NoAnswerError", "ProcessStream", "StreamEndedError", "describe", "open_channel"]

METHOD = "/dm_env_rpc.v1.Environment/Process"


class NoAnswerError(Exception):
    """No response came within the deadline."""


class StreamEndedError(Exception):
    """The server ended the stream, or it broke; `code` is the gRPC status code, or None."""

    def __init__(self, reason: str, code: grpc.StatusCode | None) -> None:
        super().__init__(reason, code)
        self.reason, self.code = reason, code

    def __str__(self) -> str:
        return self.reason


def describe(response: pb.EnvironmentResponse) -> str:
    """Return a short description of a response."""
    kind = response.WhichOneof("payload")
    if kind is None:
        return "an answer with no payload set"
    if kind == "error":
        text = response.error.message.strip()
        text = text if len(text) <= 200 else text[:200] + "…"
        return f"the error {Code.named(response.error.code)} {text!r}"
    if kind == "step":
        state = response.step.state
        name = pb.EnvironmentStateType.Name(state) if state in pb.EnvironmentStateType.values() else str(state)
        return f"a step answer with the state {name} and the observations {sorted(response.step.observations)}"
    return f"a {kind} answer"


def open_channel(
    target: str,
    credentials: grpc.ChannelCredentials | None,
    server_name: str | None = None,
    proxy: HttpProxy | None = None,
) -> grpc.Channel:
    """Return a channel without limits on the size of messages.

    Args:
        target: The server, in gRPC's syntax.
        credentials: None: without TLS.
        server_name: The name to verify in the server's certificate; None: that of the target.
        proxy: The proxy to use; None: none.
    """
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        *grpc_options(proxy).items(),
    ]
    if server_name is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
    if credentials is None:
        return grpc.insecure_channel(target, options)
    return grpc.secure_channel(target, credentials, options)


class ProcessStream:
    """A call of `Process`, and so a connection of the protocol. Close it, or use it in a `with` block.

    Args:
        channel: A channel of grpcio, or an object with its method `stream_stream`.
        metadata: The gRPC metadata to send.
        timeout: Seconds to wait for a response.
    """

    def __init__(self, channel: Any, metadata: Sequence[tuple[str, str]], timeout: float) -> None:
        self.timeout = timeout
        self._requests: queue.SimpleQueue[pb.EnvironmentRequest | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[pb.EnvironmentResponse | StreamEndedError] = queue.SimpleQueue()
        self._ended: StreamEndedError | None = None
        call = channel.stream_stream(
            METHOD,
            request_serializer=pb.EnvironmentRequest.SerializeToString,
            response_deserializer=pb.EnvironmentResponse.FromString,
        )
        self._call: Any = call(iter(self._requests.get, None), metadata=tuple(metadata))
        self._reader = threading.Thread(
            target=self._read, args=(self._call,), name="bridge-conformance-reader", daemon=True
        )
        self._reader.start()

    def _read(self, answers: Iterator[pb.EnvironmentResponse]) -> None:
        try:
            for answer in answers:
                self._answers.put(answer)
            self._answers.put(StreamEndedError("the server ended the stream", None))
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            # Escaped: a server's text must neither control the terminal nor look like lines of the report.
            self._answers.put(StreamEndedError(f"the stream ended with {code.name}: {details!r:.300}", code))

    def send(self, request: pb.EnvironmentRequest) -> None:
        """Send a request without waiting."""
        self._requests.put(request)

    def receive(self, timeout: float | None = None) -> pb.EnvironmentResponse:
        """Return the next response.

        Args:
            timeout: Seconds to wait; None: the stream's own.

        Raises:
            NoAnswerError: No response came in time.
            StreamEndedError: The stream has ended.
        """
        if self._ended is not None:
            raise self._ended
        wait = self.timeout if timeout is None else timeout
        try:
            answer = self._answers.get(timeout=wait)
        except queue.Empty:
            raise NoAnswerError(f"no answer within {wait:g} s") from None
        if isinstance(answer, StreamEndedError):
            self._ended = answer
            raise answer
        return answer

    def ask(self, request: pb.EnvironmentRequest) -> pb.EnvironmentResponse:
        """Send a request and return the next response; raise like `receive`."""
        self.send(request)
        return self.receive()

    def drain(self, timeout: float) -> list[pb.EnvironmentResponse]:
        """Half-close the stream; return the responses that arrive until it ends or the time is over."""
        self._requests.put(None)
        deadline = time.monotonic() + timeout
        left = []
        try:
            while True:
                left.append(self.receive(max(0.0, deadline - time.monotonic())))
        except (NoAnswerError, StreamEndedError):
            return left

    def close(self) -> None:
        """End the stream at once, as if the client had died, and wait for its threads."""
        self._call.cancel()
        self._requests.put(None)
        self._reader.join(self.timeout)

    def __enter__(self) -> ProcessStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

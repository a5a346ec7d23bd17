"""The second stream of a remote whose Steps are in flight: it carries the actions, which the server applies at once."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable

from google.protobuf.message import DecodeError

from bridge.core.client.realtime.answer_buffer import AnswerBuffer
from bridge.core.client.wire.call import Deliver
from bridge.core.client.wire.connection import AnyCall
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.core.ownership import leak
from bridge.errors import RefusedError, RemoteError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["ActingStream"]

# Steps whose answers have not come; of the actions beyond, the newest alone is sent.
_MOST_OUTSTANDING = 64
# Seconds until a stream that was lost is opened again.
_PAUSE = 1.0
# The one observation that such a stream has: when a Step was received and answered.
_TIMING = 1


@dataclasses.dataclass(eq=False)
class ActingStream:
    """Sends actions, and measures round trips."""

    connect: Callable[[Deliver], AnyCall]
    """Opens a connection whose answers go to a function."""
    join: bytes
    """The request that joins the world, serialized, with the key of the agent that acts."""
    deliver: Deliver
    """Called with what comes; puts into the poller what leads to `receive`."""
    now: Callable[[], float]
    """Tells the time, seconds."""
    answers: AnswerBuffer
    """Learns from each Step's times, and says which episodes the actions are for."""
    _call: AnyCall | None = None
    _sent: deque[float] = dataclasses.field(default_factory=deque)
    _episode_uid: int = 0
    _waiting: bytes | None = None
    _retry_at: float = -math.inf

    def open(self) -> None:
        """Connect, and join."""
        self._sent, self._episode_uid, self._waiting = deque(), 0, None
        self._retry_at = self.now() + _PAUSE
        self._call = self.connect(self.deliver)
        self._send(self.join)

    def _send(self, data: bytes) -> None:
        if self._call is not None:
            self._sent.append(self.now())
            self._call.send(data)

    def act(self, step: pb.StepRequest) -> bool:
        """Send an action for the episodes that were told last; return whether that is possible.

        Args:
            step: Its `actions` are those of the agent.
        """
        if self._call is None and self.now() >= self._retry_at:
            self.open()
        # Not joined yet, or lost: the caller then sends the action behind the Steps in flight, where it comes later.
        if not self._episode_uid:
            return False
        request = pb.EnvironmentRequest(step=step)
        request.step.requested_observations[:] = [_TIMING]
        # U-5: an action that comes after the end of its episode must not be applied in the next one.
        if len(request.step.actions):
            request.step.actions[self._episode_uid].CopyFrom(pack_tensor(self.answers.episodes))
        data = request.SerializeToString()
        # On a stream that stalls, the actions that wait would be applied late, one after the other: only the newest is
        # kept.
        if len(self._sent) < _MOST_OUTSTANDING:
            self._send(data)
        else:
            self._waiting = data
        return True

    def receive(self, what: bytes | bytearray | RemoteError, arrived: float) -> None:
        """Take an answer, or the end of the stream. A stream that is refused is not opened again."""
        if self._call is None:
            return
        if isinstance(what, RemoteError):
            self._end(for_good=isinstance(what, RefusedError))
            return
        try:
            message = pb.EnvironmentResponse.FromString(bytes(what))
            sent = self._sent.popleft()
            self._take(message, sent, arrived)
        # A server that sends this would send it again. Its world still takes actions, behind the Steps in flight.
        except (DecodeError, IndexError, KeyError, TensorError, ValueError):
            self._end(for_good=True)

    def _take(self, message: pb.EnvironmentResponse, sent: float, arrived: float) -> None:
        kind = message.WhichOneof("payload")
        if kind == "error":
            self._end(for_good=True)
        elif kind == "join_world":
            specs = message.join_world.specs.actions
            (self._episode_uid,) = (uid for uid, spec in specs.items() if spec.name == "episode")
            # D-9: the first Step ignores its actions.
            first = pb.EnvironmentRequest(step=pb.StepRequest(requested_observations=[_TIMING]))
            self._send(first.SerializeToString())
        else:
            received, answered = unpack_tensor(message.step.observations[_TIMING], "timing").tolist()
            self.answers.latency.answered(sent, received, answered, arrived)
            self.answers.note_round_trip(arrived - sent - (answered - received))
            if self._waiting is not None:
                data, self._waiting = self._waiting, None
                self._send(data)

    def _end(self, *, for_good: bool) -> None:
        self.close()
        self._retry_at = math.inf if for_good else self.now() + _PAUSE

    def close(self) -> None:
        """End the stream, without waiting."""
        call, self._call = self._call, None
        self._episode_uid = 0
        if call is not None:
            call.close(0.0)

    def disown(self) -> None:
        """In a forked process: leave the connection to the parent process, untouched."""
        if self._call is not None:
            leak(self._call)
        self._call = None

"""The client's protocol state of one stream, without input or output: the mirror of `bridge.core.server.session`.

Requests are made by methods, and `data_to_send` returns their bytes. Answers are passed to `receive`, the stream's end
to `connection_lost`; frozen events are returned. All rules about the state are in `TRANSITIONS`. The driver decides how
long an answer may take. dm_env_rpc answers requests in order, so an answer belongs to the oldest request without one.
`JoinSequence` makes the requests that join a world.

In a real-time world that is far away, Steps are in flight: the server holds each until there is a new frame. The
world's `AnswerBuffer` stores the answers, and `due` returns them.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf.message import DecodeError

from bridge.core.client.world.extensions import property_write, refusal
from bridge.core.client.world.join_sequence import JoinSequence
from bridge.core.client.world.joined_world import JoinedWorld, changes_of
from bridge.core.client.world.session_states import (
    ONLINE,
    TRANSITIONS,
    ClientState,
    Event,
    Joined,
    Lost,
    Refused,
    Replied,
    StepAnswered,
    Trigger,
)
from bridge.core.client.world.steps import BegunAnswer, StepMessage
from bridge.core.client.world.world_request import WorldInfo, WorldRequest
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.core.logs import warn
from bridge.errors import UNREADABLE, Code, PeerError, RefusedError, RemoteError
from bridge.pb import dm_env_rpc_pb2 as pb

if TYPE_CHECKING:
    from bridge.core.client.realtime.answer_buffer import AnswerBuffer

__all__ = ["ENDED_CODES", "ClientSession"]

ENDED_CODES = (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)
"""The codes with which a Step or Reset is refused if the world has ended."""
# The most consecutive Resets that may give the specs other UIDs before a Step is answered. UIDs are stable until a
# Reset (D-7): a server that numbers them anew each time would be reset for ever.
_MAX_RENUMBERED = 3
# The most action-only Steps in flight: more of them wait only if the network stalls.
_MOST_ACTS = 64


class RequestKind(enum.Enum):
    """The kind of a request, by the use of its answer."""

    JOINING = "joining"
    RESET = "reset"
    STEP = "step"
    IN_FLIGHT = "step in flight"
    ACT = "act"
    QUESTION = "question"


class OpenRequest(NamedTuple):
    """A request whose answer is outstanding."""

    kind: RequestKind
    number: int
    """The episode in which it was made; -1: an abandoned question."""
    sent: float
    """The time of sending, seconds."""


class Answer(NamedTuple):
    """The answer to a request."""

    request: OpenRequest
    message: pb.EnvironmentResponse
    error: RefusedError | None
    """The error, if the answer is one."""
    now: float
    """The time of its arrival, seconds."""


class ClientSession:
    """The state of one stream to a server, and of each later stream after a loss.

    Args:
        request: The world wanted.
        info: The known facts about the world, such as those of a copy; None: nothing is known.
    """

    def __init__(self, request: WorldRequest, info: WorldInfo | None = None) -> None:
        self.request = request
        self.state = ClientState.OFFLINE
        self.world: JoinedWorld | None = None
        """The world that was joined, even after its loss; None: none was joined yet."""
        self.server_version: str | None = None
        """The version of a server of this package, from its metadata; set by the driver before `receive`."""
        self.error: RemoteError | None = None
        """The reason why the stream was lost; None: it was not."""
        self._url = request.address.url
        self.info = info
        """The description of the world, even after leaving it; None: nothing is known yet."""
        self.out: list[bytes] = []
        """Requests that were made but not sent."""
        self._pending: deque[OpenRequest] = deque()
        self._episode = 0
        self._joining = JoinSequence(request)
        self._waits_for_all = False
        self._settings: Mapping[str, pb.Tensor] = {}
        self._renumbered = 0
        self._acts = 0  # action-only Steps in flight
        self._newest_act: pb.EnvironmentRequest | None = None  # it waits for one of these answers

    def _move(self, trigger: Trigger) -> None:
        try:
            self.state = TRANSITIONS[self.state, trigger]
        except KeyError:
            raise PeerError(self._url, f"{trigger.value!r} is not possible while {self.state.value}") from None

    @property
    def answers(self) -> AnswerBuffer | None:
        """The results of Steps in flight; None: each Step waits for its own answer."""
        return None if self.world is None else self.world.answers

    @property
    def world_name(self) -> str | None:
        """The name of the world that was last requested."""
        return self._joining.world_name

    @property
    def asking(self) -> bool:
        """True if the server has not decided yet which form of world to make, even if the stream has ended since."""
        return self._joining.asking

    @property
    def agreed_on_lanes(self) -> bool:
        """True if the server said that lanes are as good as worlds, and so was asked for lanes."""
        return self._joining.agreed_on_lanes

    @property
    def outstanding(self) -> bool:
        """True if an answer is outstanding."""
        return bool(self._pending)

    @property
    def foreign(self) -> bool:
        """True if the joined world is on another package's server."""
        return self.info is not None and self.info.server_version is None

    # Requests

    def data_to_send(self) -> list[bytes]:
        """Return the requests made since the last call, each serialized."""
        out, self.out = self.out, []
        return out

    def _send(self, kind: RequestKind, request: pb.EnvironmentRequest | bytes, now: float) -> None:
        data = request if isinstance(request, bytes) else self.write(request)  # raises before any change
        # Only the order of these two queues matches answers to requests: dm_env_rpc has no request ids (D-1).
        # KeyboardInterrupt may come between them, and must not leave a request whose answer is not expected.
        self._pending.append(OpenRequest(kind, self._episode, now))
        self.out.append(data)

    def connect(self, now: float) -> None:
        """Begin a new stream: create the world and join it, or join an existing one.

        Raises:
            SettingError: A setting cannot be sent.
        """
        # Requests on the stream before get no answer on this one.
        self._pending.clear()
        self.out.clear()
        self._acts, self._newest_act = 0, None
        self.error = None
        self._joining = JoinSequence(self.request)
        self._go_on(self._joining.first(), now)

    def _go_on(self, following: tuple[Trigger, pb.EnvironmentRequest], now: float) -> None:
        trigger, request = following
        self._move(trigger)
        self._send(RequestKind.JOINING, request, now)

    def write_reset(self, settings: Mapping[str, pb.Tensor]) -> bytes:
        """Return a Reset; raises as `write`."""
        return self.write(pb.EnvironmentRequest(reset=pb.ResetRequest(settings=settings)))

    def write(self, request: pb.EnvironmentRequest) -> bytes:
        """Return a request's bytes; raises SettingError if it is too large to be sent."""
        data = request.SerializeToString()
        if len(data) > self.request.max_message_bytes:
            raise self.request.too_large(len(data))
        return data

    def begin(self, settings: Mapping[str, pb.Tensor] | None, now: float, *, reset: bool = True) -> None:
        """Request the first Step of the next episode, and drop further answers of the current one.

        With Steps in flight, a single environment enters a new episode only by a Reset, so a Reset is sent that
        restarts nothing. Lanes enter new episodes automatically: nothing is sent, because the answer has come, or is in
        flight.

        Args:
            settings: The settings of a Reset before it.
            now: The time.
            reset: True: send a Reset. After an episode's end, a Step alone begins the next one (D-9).
        """
        world = self._require_world()
        answers = world.answers
        if answers is not None and not reset:
            settings, reset = {"restart": pack_tensor(False)}, True
        # Before anything changes: a Reset that is too large leaves the episode as it is.
        request = self.write_reset(settings or {}) if reset else b""
        # SAME_STEP in real time: lanes that ended enter the episodes that run by now.
        goes_on = self.state is ClientState.RUNNING and settings is not None and "restart" in settings
        self._move(Trigger.BEGIN)
        if answers is not None and world.info.lanes is not None and goes_on:
            answers.asked = 1
            return
        # From here on, answers to earlier requests are stale: they have a lower number.
        self._episode += 1
        self._newest_act = None
        self._settings = settings or {}
        # The Step is sent without waiting for the answer to the Reset, which saves a round trip (D-25).
        if reset:
            self._send(RequestKind.RESET, request, now)
        if answers is None:
            self._send(RequestKind.STEP, world.writer.first_step, now)
            return
        mask = self._settings.get("reset_mask")
        answers.begin(self._episode, None if mask is None else unpack_tensor(mask, "reset_mask"))
        # At least this one, even if as many as wanted are still in flight from the episode before.
        self._send_in_flight(world, answers, now, 1)
        self.ask_for_frame(now)

    def ask_for_frame(self, now: float) -> None:
        """Request the results of Steps in flight; `due` or the next answer returns them."""
        world = self._require_world()
        if world.answers is not None:
            world.answers.asked += 1
            self._send_in_flight(world, world.answers, now, world.answers.may_send)

    def _send_in_flight(self, world: JoinedWorld, answers: AnswerBuffer, now: float, count: int) -> None:
        for _ in range(count):
            self._send(RequestKind.IN_FLIGHT, world.writer.first_step, now)
        answers.in_flight += count

    def step(self, request: bytes, now: float) -> None:
        """Send a Step that `StepWriter` wrote."""
        # As `_require_world` and `_send`, in fewer calls: this runs in each step of each slot. The writer has checked
        # the size.
        if self.state not in ONLINE:
            self._require_world()
        self._pending.append(OpenRequest(RequestKind.STEP, self._episode, now))
        self.out.append(request)

    def act(self, request: bytes, now: float) -> None:
        """Send an action-only Step in a real-time world; a later Step requests the results.

        If the stream stalls, waiting actions would be applied late, one after the other: only the newest is kept.
        """
        act = self._require_world().as_act(request)
        if self._acts < _MOST_ACTS:
            self._acts += 1
            self._send(RequestKind.ACT, act, now)
        else:
            self._newest_act = act

    def step_in_flight(self, request: bytes, now: float) -> None:
        """Send the action of a Step that `StepWriter` wrote, and request the results of Steps in flight."""
        # The server refuses Steps in flight after the end of an episode until a Reset comes, which `begin` sends.
        if self.state is ClientState.ENDED:
            self.begin(None, now, reset=False)
            return
        self.ask_for_frame(now)
        # Without an action there is nothing to send: the last one stays in force.
        if self.world is not None and request != self.world.writer.first_step:
            self.act(request, now)

    def ask(self, request: pb.EnvironmentRequest | bytes, now: float) -> None:
        """Ask for a property or a method call; the event `Replied` has the answer."""
        self._require_world()
        self._send(RequestKind.QUESTION, request, now)

    def placed(self, step: pb.StepResponse) -> StepAnswered:
        """Enter a sequence that a message has begun, in another situation; return its first answer."""
        world = self._require_world()
        self._move(Trigger.BEGIN)
        # Further answers of the episode before are stale.
        self._episode += 1
        return self._step_answered(world, pb.EnvironmentResponse(step=step), step.state)

    def set_autoreset(self, *, same_step: bool, now: float) -> None:
        """Let ended lanes of a world begin their next episodes in the same Step, or in the next one.

        This applies to the following Steps. A server that does not support it continues as before: `begun_in_step`
        shows whether lanes began in the same Step.
        """
        world = self._require_world()
        reader = world.reader
        if reader.begins_in_step is same_step or self.foreign or world.info.lanes is None or world.realtime is not None:
            return
        reader.begins_in_step = same_step
        data = self.write(property_write("world.autoreset", pack_tensor("same_step" if same_step else "next_step")))
        # The answer is dropped.
        self._pending.append(OpenRequest(RequestKind.QUESTION, -1, now))
        self.out.append(data)

    def begun_in_step(self, answer: StepMessage, lanes: list[int]) -> StepAnswered | Refused | Lost | None:
        """Return how lanes began their next episodes in the Step that ended the last ones; None: they did not.

        Args:
            answer: The answer to that Step, which was read last.
            lanes: The lanes that ended. If there are none, an answer that says how some began breaks the protocol.
        """
        world = self._require_world()
        begun = world.reader.take_begun()
        if begun is None or isinstance(answer, BegunAnswer):
            return None
        if begun.lanes != lanes or not lanes:
            got = f"{list(begun.lanes)!s:.80}"
            return self._break(f"it says how the lanes {got} began, where {lanes!s:.80} have ended")
        if begun.code:
            # As if a Reset were refused.
            error = refusal(self._url, pb.Status(code=begun.code, message=begun.message))
            if error.code in ENDED_CODES:
                return self.connection_lost(error)
            self._move(Trigger.REFUSED)
            return Refused(error)
        return StepAnswered(BegunAnswer(answer, begun), world.reader)

    def leave(self, now: float) -> None:
        """Leave the world, and destroy it if it was created for this session."""
        # Without a world there is nothing to leave. If one was created but not joined, a server of this package ends
        # it.
        if self.state not in ONLINE:
            return
        self._send(RequestKind.QUESTION, pb.EnvironmentRequest(leave_world=pb.LeaveWorldRequest()), now)
        if self._joining.made_world:
            destroy = pb.DestroyWorldRequest(world_name=self.world_name)
            self._send(RequestKind.QUESTION, pb.EnvironmentRequest(destroy_world=destroy), now)

    def abandon_episode(self) -> None:
        """Drop the answers to the Steps in flight. The next episode begins by `begin`."""
        self._move(Trigger.ABANDON)
        self._episode += 1
        if self.answers is not None:
            self.answers.begin(self._episode)

    def abandon_questions(self) -> None:
        """Drop the outstanding answers to questions."""
        pending = self._pending
        self._pending = deque(
            request._replace(number=-1) if request.kind is RequestKind.QUESTION else request for request in pending
        )

    def wait_for_all(self) -> None:
        """Delay answers until every lane has an observation, in a real-time world of lanes."""
        self._waits_for_all = True
        if self.world is not None:
            self.world.wait_for_all()

    def _require_world(self) -> JoinedWorld:
        if self.world is None or self.state not in ONLINE:
            raise PeerError(self._url, "there is no connection")
        return self.world

    # Answers

    def receive(self, data: bytes | bytearray, now: float) -> Event | None:
        """Read an answer; return its event, or None if the caller does not need it.

        Args:
            data: A serialized EnvironmentResponse.
            now: The time of arrival.
        """
        pending, world = self._pending, self.world
        if pending and pending[0].kind is RequestKind.STEP and world is not None and world.codec is not None:
            answer = world.codec.read_response(data)
            # The codec reads a Step's answer only if each constant byte is as expected. Any other answer, such as an
            # error, or one of a server of another version, is read by protobuf below.
            if answer is not None:
                request = pending.popleft()
                if request.number != self._episode:
                    world.salvage(answer)
                    return None
                if answer.state == pb.RUNNING and self.state is ClientState.RUNNING:
                    self._renumbered = 0
                    return StepAnswered(answer, world.reader)
                return self._step_answered(world, answer, answer.state)
        # The stream was abandoned, and the server had answered before it knew.
        if self.state is ClientState.OFFLINE or self.state is ClientState.LOST:
            return None
        try:
            message = pb.EnvironmentResponse.FromString(bytes(data))
        except DecodeError as problem:
            return self._break(f"it sent {len(data)} bytes that are no EnvironmentResponse: {problem}")
        if not pending:
            return self._break("it sent an answer to no request")
        request = pending.popleft()
        error = refusal(self._url, message.error) if message.WhichOneof("payload") == "error" else None
        try:
            return self._ON_ANSWER[request.kind](self, Answer(request, message, error, now))
        except RemoteError as problem:
            return self.connection_lost(problem)
        except UNREADABLE as problem:
            return self._break(f"its answer cannot be read: {problem}")

    def due(self, now: float) -> StepAnswered | Refused | Lost | None:
        """Return the event for a call that waits for the results of Steps in flight; None: it must wait."""
        world = self._require_world()
        try:
            # Before an episode has begun there is no observation that could be repeated.
            repeats = self.state is ClientState.RUNNING
            found = None if world.answers is None else world.answers.take(now, repeats=repeats)
        except UNREADABLE as problem:
            return self._break(f"its answers cannot be read: {problem}")
        if isinstance(found, RemoteError):
            self._move(Trigger.REFUSED)
            return Refused(found)
        if found is None or world.answers is None:
            return None
        answered = self._step_answered(world, found, found.step.state)
        # A caller waits already for the next episode, as in a rollout.
        if self.state is ClientState.ENDED and (asked := world.answers.asked):
            self.begin(None, now, reset=False)
            world.answers.asked = asked
        return answered

    def connection_lost(self, error: RemoteError) -> Lost:
        """Note that the stream ended, or abandon it: no more answers are read."""
        # For counts: a world that was joined and lost, or an attempt that failed.
        established = self.state in ONLINE
        # The end of the stream arrives also after it was abandoned.
        if self.state is not ClientState.LOST and self.state is not ClientState.OFFLINE:
            self._move(Trigger.END)
        self.error = error
        self._pending.clear()
        return Lost(error, established)

    def know(self, other: ClientSession) -> None:
        """Before a world is joined: copy the facts that `other`, whose slots it takes over, knows about its world."""
        self.world, self.info = other.world, other.info

    def _break(self, reason: str) -> Lost:
        return self.connection_lost(PeerError(self._url, f"it broke the protocol: {reason}"))

    # The facts about the world

    def _on_joining(self, answer: Answer) -> Event | None:
        took = answer.now - answer.request.sent
        following = self._joining.following(self.state, answer.message, answer.error, took, self.server_version)
        if following is not None:
            self._go_on(following, answer.now)
            return None
        self._learn(self._joining.specs, self._joining.properties, self.server_version)
        # Whether it has lanes is decided, and stays so when the world is made again after a loss.
        self.request = self._joining.request
        self._move(Trigger.READY)
        return Joined()

    def _learn(self, specs: pb.ActionObservationSpecs, properties: Mapping[str, Any], version: str | None) -> None:
        rewards = any(spec.name == "reward" for spec in specs.observations.values())
        # Only once: the facts about a world that is joined again, or copied, are known.
        if version is None and self.info is None and not rewards:
            warn(f"{self._url} gives no observation named reward: every reward is 0.0")
        before, world = self.world, JoinedWorld(self.request, specs, properties, version)
        if world.realtime is not None and before is not None and before.realtime is not None:
            # The count belongs to the session, which outlives its worlds.
            world.realtime.stale = before.realtime.stale
        if self._waits_for_all:
            world.wait_for_all()
        self.world, self.info = world, world.info

    # Answers in a world

    def _step_answered(self, world: JoinedWorld, answer: StepMessage, state: int) -> StepAnswered:
        self._renumbered = 0
        # Lanes begin their next episodes automatically.
        ran = state == pb.RUNNING or world.info.lanes is not None
        if not ran or self.state is not ClientState.RUNNING:  # STEP_RAN leads from RUNNING to RUNNING
            self._move(Trigger.STEP_RAN if ran else Trigger.STEP_ENDED)
        return StepAnswered(answer, world.reader, ended=not ran)

    def _on_step_in_flight(self, answer: Answer) -> Event | None:
        world, (request, message, error, now) = self._require_world(), answer
        answers = world.answers
        if answers is None or (error is None and message.WhichOneof("payload") != "step"):
            return self._break("it answered a Step by something else")
        # Before the error is checked, because a refused Step is not in flight any more either.
        answers.in_flight -= 1
        current = request.number == self._episode
        if error is not None:
            # As below: connecting again makes another world.
            if error.code in ENDED_CODES and current:
                return self.connection_lost(error)
            if current:
                # In order: earlier observations are returned first.
                answers.push_error(error)
            return self.due(now)
        if not answers.push(message, request.number, request.sent, now):
            world.dropped()
        # One for each that was answered, so that as many are in flight as there are frames in a round trip.
        self._send_in_flight(world, answers, now, answers.may_send)
        return self.due(now)

    def _on_step_or_reset(self, answer: Answer) -> Event | None:
        world, (request, message, error, now) = self._require_world(), answer
        if request.number != self._episode:
            world.salvage(message)
            return None
        if error is not None:
            if not self.foreign and error.code in ENDED_CODES:
                # Connecting again makes another world; at other servers an error ends nothing (D-2).
                return self.connection_lost(error)
            if request.kind is RequestKind.RESET:
                self.abandon_episode()  # a Step sent after it may have begun another episode
            self._move(Trigger.REFUSED)
            return Refused(error)
        kind = message.WhichOneof("payload")
        if kind != request.kind.value:
            return self._break(f"it answered a {request.kind.value} by {kind}")
        if request.kind is RequestKind.RESET:
            return self._compare(world, message.reset.specs, now)
        if world.realtime is not None:
            world.realtime.timed(request.sent, now)
        return self._step_answered(world, message, message.step.state)

    def _compare(self, world: JoinedWorld, specs: pb.ActionObservationSpecs, now: float) -> Event | None:
        """Compare the specs that came with a Reset: another package's server may change them (D-14, D-24)."""
        # Specs of our own servers never change in a world. An answer without specs says nothing about a change.
        if not self.foreign or specs == world.specs or not specs.ByteSize():
            return None
        changes = changes_of(world.specs, specs)
        if changes:
            self.abandon_episode()
            return Refused(PeerError(self._url, f"its specs changed at Reset: {changes}; connect anew"))
        self._renumbered += 1
        if self._renumbered > _MAX_RENUMBERED:
            return self._break("it gives its specs other UIDs at every Reset")
        # The Step in flight asks for the old UIDs: begin again with the new ones.
        self._learn(specs, {}, None)
        self.begin(self._settings, now)
        return None

    def _on_act(self, answer: Answer) -> Event | None:
        self._acts -= 1
        if self._newest_act is not None:
            request, self._newest_act = self._newest_act, None
            self._acts += 1
            self._send(RequestKind.ACT, request, answer.now)
        # A later Step returns the results of an action, so only a refusal matters here. With Steps in flight not even
        # that: it came after an episode's end, or the Steps in flight are refused as well.
        if self.answers is not None or answer.error is None or answer.request.number != self._episode:
            return None
        self._move(Trigger.REFUSED)
        return Refused(answer.error)

    def _on_reply(self, answer: Answer) -> Event | None:
        if answer.request.number < 0:
            return None
        return Replied(answer.message, answer.error)

    _ON_ANSWER: Mapping[RequestKind, Callable[..., Event | None]] = {
        RequestKind.JOINING: _on_joining,
        RequestKind.RESET: _on_step_or_reset,
        RequestKind.STEP: _on_step_or_reset,
        RequestKind.IN_FLIGHT: _on_step_in_flight,
        RequestKind.ACT: _on_act,
        RequestKind.QUESTION: _on_reply,
    }

"""One connection's protocol state, without input or output: a request goes in, its one response comes out (D-1).

All rules about the state are in `TRANSITIONS`. A request that has no event in the table for the current state is
refused with FAILED_PRECONDITION. A request that fails for any other reason changes nothing either (D-2).
"""

from __future__ import annotations

import enum
import functools
import re
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError

from bridge.core.encoding import values
from bridge.core.encoding.names import (
    ANNOUNCED,
    CALL_REQUEST_URL,
    CALL_RESPONSE_URL,
    CLIENT_KEY,
    NAMES,
    PROPERTY_REQUEST_URL,
    PROPERTY_RESPONSE_URL,
)
from bridge.core.encoding.properties import NUMBER, TEXT, Property, PropertyTree, encoded
from bridge.core.encoding.step_codec import StepCodec
from bridge.core.encoding.tensors import Array
from bridge.core.encoding.values import check_count
from bridge.core.server.auth import (
    as_look,
    attribute_in,
    no_message,
    no_right,
    refuse_acting,
    refuse_method,
    refuse_requests,
)
from bridge.core.server.messages import ClientMessage, ServedMessage
from bridge.core.worlds.base import Agent, World, fill_observations
from bridge.core.worlds.environment import Environment
from bridge.core.worlds.messages import SessionMessage
from bridge.core.worlds.resets import ResetOrder
from bridge.core.worlds.scheduling import Executor
from bridge.core.worlds.settings import read_text
from bridge.errors import Code, RequestError, TensorError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb

if TYPE_CHECKING:
    from bridge.core.server.registry import Registry, WorldUser

__all__ = ["TRANSITIONS", "Session", "SessionEvent", "SessionState", "error_response"]


class SessionState(enum.Enum):
    """The state of a connection."""

    UNJOINED = "unjoined"
    JOINED = "joined"
    """In a world; no sequence has begun."""
    RUNNING = "running"
    """In a sequence."""
    TERMINATED = "terminated"
    """The sequence ended; the next Step begins another."""
    INTERRUPTED = "interrupted"
    """The sequence was cut off; the next Step begins another."""
    CLOSED = "closed"
    """The stream ended."""


class SessionEvent(enum.Enum):
    """An event of a connection. A Step is one of four events, depending on its outcome."""

    CREATE_WORLD = "CreateWorld"
    JOIN_WORLD = "JoinWorld"
    STEP_BEGAN = "Step, first of a sequence"
    STEP_RAN = "Step, running on"
    STEP_TERMINATED = "Step, terminated"
    STEP_INTERRUPTED = "Step, interrupted"
    RESET = "Reset"
    RESET_WORLD = "ResetWorld"
    PLACED = "placed"
    ALL_PLACED = "all agents placed"
    LEAVE_WORLD = "LeaveWorld"
    DESTROY_WORLD = "DestroyWorld"
    EXTENSION = "extension"
    END = "end of stream"


_U, _J, _R, _T, _I, _C = SessionState  # in the order of their definition

# A state says two things: whether the connection is in a world, and the phase of its sequence there. Requests change
# it, and so do the environment's results: a Step is one of four events, of which the last three are distinguished only
# after the environment has stepped.
#
# - A Step outside RUNNING is always STEP_BEGAN, whatever its actions (D-9), and leads to RUNNING. So no two consecutive
# answers say that a sequence is over (D-13), and a client may send Steps ahead, across ends (D-25). - UNJOINED has no
# row for Step and Reset (D-8), and only UNJOINED has a row for JoinWorld: a connection is in at most one   world (D-6).
# - ResetWorld and DestroyWorld name a world, and so are possible while unjoined. - Reset, and a ResetWorld of its own
# world, lead from RUNNING to INTERRUPTED although no Step has told the client so:   the client requested the end
# itself. A ResetWorld from another connection is no event here: this connection is told by   its next Step, as
# STEP_INTERRUPTED (D-15). - A Step that ends a sequence leads out of RUNNING even if its answer cannot be sent. The
# next Step then reports the end   without a change of state (`answer_lost`). - PLACED begins a sequence as a Step does,
# and the message's answer takes the place of the Step's: the environment   continues in a situation to which this
# sequence did not lead. In a world of several agents a client has a connection   for each, and one message is answered
# by one of them: ALL_PLACED ends the sequences of all, and their next Steps begin   new ones there. - CreateWorld,
# DestroyWorld and extensions have rows that change nothing, so that CLOSED, which has no row, refuses   them.
TRANSITIONS: Mapping[tuple[SessionState, SessionEvent], SessionState] = {
    (_U, SessionEvent.CREATE_WORLD): _U,
    (_U, SessionEvent.JOIN_WORLD): _J,
    (_U, SessionEvent.RESET_WORLD): _U,
    (_U, SessionEvent.LEAVE_WORLD): _U,  # D-16: no effect
    (_U, SessionEvent.DESTROY_WORLD): _U,
    (_U, SessionEvent.EXTENSION): _U,
    (_U, SessionEvent.END): _C,
    (_J, SessionEvent.CREATE_WORLD): _J,
    (_J, SessionEvent.STEP_BEGAN): _R,
    (_J, SessionEvent.RESET): _J,
    (_J, SessionEvent.RESET_WORLD): _J,
    (_J, SessionEvent.PLACED): _R,
    (_J, SessionEvent.ALL_PLACED): _J,
    (_J, SessionEvent.LEAVE_WORLD): _U,
    (_J, SessionEvent.DESTROY_WORLD): _J,
    (_J, SessionEvent.EXTENSION): _J,
    (_J, SessionEvent.END): _C,
    (_R, SessionEvent.CREATE_WORLD): _R,
    (_R, SessionEvent.STEP_RAN): _R,
    (_R, SessionEvent.STEP_TERMINATED): _T,
    (_R, SessionEvent.STEP_INTERRUPTED): _I,
    (_R, SessionEvent.RESET): _I,
    (_R, SessionEvent.RESET_WORLD): _I,
    (_R, SessionEvent.PLACED): _R,
    (_R, SessionEvent.ALL_PLACED): _I,
    (_R, SessionEvent.LEAVE_WORLD): _U,
    (_R, SessionEvent.DESTROY_WORLD): _R,
    (_R, SessionEvent.EXTENSION): _R,
    (_R, SessionEvent.END): _C,
    (_T, SessionEvent.CREATE_WORLD): _T,
    (_T, SessionEvent.STEP_BEGAN): _R,  # D-13: never two non-running states in a row
    (_T, SessionEvent.RESET): _T,
    (_T, SessionEvent.RESET_WORLD): _T,
    (_T, SessionEvent.PLACED): _R,
    (_T, SessionEvent.ALL_PLACED): _T,
    (_T, SessionEvent.LEAVE_WORLD): _U,
    (_T, SessionEvent.DESTROY_WORLD): _T,
    (_T, SessionEvent.EXTENSION): _T,
    (_T, SessionEvent.END): _C,
    (_I, SessionEvent.CREATE_WORLD): _I,
    (_I, SessionEvent.STEP_BEGAN): _R,
    (_I, SessionEvent.RESET): _I,
    (_I, SessionEvent.RESET_WORLD): _I,
    (_I, SessionEvent.PLACED): _R,
    (_I, SessionEvent.ALL_PLACED): _I,
    (_I, SessionEvent.LEAVE_WORLD): _U,
    (_I, SessionEvent.DESTROY_WORLD): _I,
    (_I, SessionEvent.EXTENSION): _I,
    (_I, SessionEvent.END): _C,
}

_REMEDY: Mapping[SessionEvent, str] = {
    SessionEvent.JOIN_WORLD: "this connection is in a world already; send LeaveWorld first, or use another connection",
    SessionEvent.STEP_BEGAN: "this connection is in no world; send JoinWorld first",
    SessionEvent.RESET: "this connection is in no world; send JoinWorld first",
}
_STEP_EVENTS: Mapping[int, SessionEvent] = {
    pb.RUNNING: SessionEvent.STEP_RAN,
    pb.TERMINATED: SessionEvent.STEP_TERMINATED,
    pb.INTERRUPTED: SessionEvent.STEP_INTERRUPTED,
}


# The most actions of a connection whose requests are remembered: a space may have any number of actions.
_ANNOUNCED = re.compile(r"[\w.-]+( [\w.-]+){0,99}")
_MOST_KNOWN = 256
_EPISODE_UID = "with wait=new_frame the UID of a further action: the number of the episode that a Step's action is for"
_RUNNING = pb.RUNNING


class Session:
    """Serves one connection. One request is handled at a time.

    Args:
        hub: The server's worlds.
        client_version: The version that a client of this package reports; "" for others.
        may_act: True if the client may do more than watch.
    """

    def __init__(self, hub: Registry, client_version: str = "", may_act: bool = True) -> None:
        self._hub = hub
        self._may_act = may_act
        self._client_version = client_version
        self.connection: object = self
        """An object that all sessions of one connection share."""
        self.charge: Callable[[float], None] = lambda seconds: None
        """Charges processor time, in seconds, for a message of this client; set by `Calls`."""
        self.client_key = ""
        self._state = SessionState.UNJOINED
        self._world: World | None = None
        self._agent: Agent | None = None
        self._codec: StepCodec | None = None
        self._wanted: tuple[int, ...] | None = None
        self._known: dict[bytes, Any] = {}
        self._gone = False
        self._stays_first = False  # a request is being served that no action may overtake
        self._received: float | None = None  # when the current Step arrived, if its actions were applied then
        self._untold = 0  # the state of an end that no answer has reported; 0: none
        self._waits_for: ResetOrder | None = None
        self.last_step: tuple[World, Agent, int] | None = None
        """World, agent and resulting state of the last request, if it was a Step with actions; else None."""
        self.last_error = 0
        """The code with which the last request was refused; 0: it was not."""
        self.last_reason = ""
        """The request that was refused last, and the reason, for the log."""
        self.last_failure: str | None = None
        """The answer to a request in which the environment failed; None: it did not fail."""

    @property
    def state(self) -> SessionState:
        """The state of the connection."""
        return self._state

    @property
    def world_name(self) -> str | None:
        """The name of the world that the connection is in; None: none."""
        return None if self._world is None else self._world.name

    async def handle(self, data: bytes | bytearray) -> list[bytes | memoryview]:
        """Answer a serialized EnvironmentRequest with a serialized EnvironmentResponse, whatever the bytes are.

        Returns:
            The response in parts, which must be sent before the next request is handled.
        """
        # A fast path for the requests of our own client, without protobuf and with few calls. A request that it does
        # not match byte for byte goes to `_handle_message`, which serves every client.
        codec, agent, world = self._codec, self._agent, self._world
        action: Any = None
        arrays: list[Array] | None = None
        begins = False
        if codec is not None:
            if self._state is not SessionState.RUNNING:
                # Our client sends the Step that begins a sequence without actions, so its bytes are always the same.
                # Other clients may send actions with it, which are ignored (D-9): protobuf reads those.
                begins = data == codec.first
            else:
                # A large request is a bytearray, which has no hash.
                action = self._known.get(data) if type(data) is bytes else None
                arrays = codec.read_request(data) if action is None else None
        if codec is None or agent is None or world is None or (action is None and arrays is None and not begins):
            return await self._handle_message(data)
        # The same as `_step`, for a request that was read without protobuf.
        wanted = self._wanted or ()
        self.last_step, self.last_error = None, 0
        try:
            if begins:
                state = await self._begin_sequence(agent, world)
            else:
                if action is None:
                    action = self._decode(agent, data, arrays or [])
                # The agent is prepared for these observations, as in the Step before. Each call that is saved here is
                # saved in every step.
                cut = (world.resets.orders or world.resets.closed) and self._is_cut_off(agent, world)
                state = pb.INTERRUPTED if cut else await agent.apply(action)
                self.last_step = world, agent, state
                if state != pb.RUNNING:
                    self._end_sequence(agent, world, state)
            values = agent.values(wanted)
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # D-1
            return [self._refused("step", error).SerializeToString()]
        # The codec's constant bytes contain no info, whose size varies: it is written last, separately.
        info: Any = values.pop() if codec.has_info else None
        parts = codec.write_response(state, values, info)
        return self._write_step(agent, state, values, info) if parts is None else parts

    def read_step(self, data: bytes, executor: Executor) -> tuple[Callable[[Any], Any], Any] | None:
        """Read a request for a step that this executor can make in a row with those of other sessions.

        Returns:
            The function that the executor must call, and its argument; `answer_step` takes the result. None: `handle`
            must answer the request.
        """
        codec, agent = self._codec, self._agent
        if codec is None or agent is None or not agent.steps_at_once or self._state is not SessionState.RUNNING:
            return None
        world: Any = self._world
        env: Environment = world.env
        step, resets = env.step_in_row, world.resets
        if step is None or env.executor is not executor or resets.orders or resets.closed:
            return None
        action = self._known.get(data)
        if action is None:
            # Any error, also of a user's own space, is found again by `handle`, which refuses the request.
            with suppress(Exception):
                arrays = codec.read_request(data)
                action = None if arrays is None else self._decode(agent, data, arrays)
        return None if action is None else (step, action)

    def answer_step(self, result: Any, error: BaseException | None) -> list[bytes | memoryview]:
        """Answer the request that `read_step` has read, given the result or the exception of the call."""
        codec: Any = self._codec  # `read_step` has checked it, like the next two
        agent: Any = self._agent
        world: Any = self._world
        self.last_step, self.last_error = None, 0
        # Not raised again: its traceback would refer to this frame, and this frame to it.
        if error is not None:
            return [self._refused("step", error).SerializeToString()]
        try:
            state = agent.take_step(result)
            self.last_step = world, agent, state
            if state != _RUNNING:
                self._end_sequence(agent, world, state)
            values = agent.values(self._wanted or ())
        except (Exception, KeyboardInterrupt, SystemExit) as problem:  # D-1
            return [self._refused("step", problem).SerializeToString()]
        info: Any = values.pop() if codec.has_info else None
        parts = codec.write_response(state, values, info)
        return self._write_step(agent, state, values, info) if parts is None else parts

    def _write_step(self, agent: Agent, state: int, values: list[Any], info: Any) -> list[bytes | memoryview]:
        """Return the response to a Step that the codec cannot write; `info`: None if it was not requested.

        An integer beyond 127, for example, takes more bytes than the codec has for it. The agent is not asked again,
        because it reports the notes and the form in the info only once.
        """
        wanted = self._wanted or ()
        if info is not None:
            values.append(info)
        message = pb.EnvironmentResponse()
        message.step.state = state  # type: ignore[assignment]
        specs = agent.observations
        fill_observations(
            message.step,
            {
                uid: np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value, specs[uid].dtype)
                for uid, value in zip(wanted, values, strict=True)
            },
        )
        return [message.SerializeToString()]

    def arrive(
        self, data: bytes | bytearray, overtakes: bool
    ) -> Callable[[], Coroutine[Any, Any, list[bytes | memoryview]]] | None:
        """Apply the actions of a Step that waits for the answers to earlier ones, if its world supports this.

        In a real-time world these may be held until there are new frames, and an action behind them would come late.

        Args:
            data: A request that has to wait.
            overtakes: True if all requests that wait before it are Steps that this method has begun.

        Returns:
            The function that answers the Step in its turn; None: nothing was done, `handle` must be called in its turn.
        """
        agent, world = self._agent, self._world
        if agent is None or world is None or not agent.acts_on_arrival:
            return None
        try:
            request = pb.EnvironmentRequest.FromString(bytes(data))
            if request.WhichOneof("payload") != "step":
                return None
            # Otherwise the Step begins a sequence, or is for another one than the running one, unless it says itself
            # which episode its actions are for.
            runs = self._state is SessionState.RUNNING and not world.resets.is_due(agent)
            applies = (runs or _names_episode(agent, request.step)) and overtakes and not self._stays_first
            # For a Step without actions only its arrival is recorded.
            if request.step.actions and not applies:
                return None
            self._check_wanted(agent, request.step.requested_observations)
            received = agent.act(self._read_actions(agent, request.step.actions))
        # It is refused in its turn, with the same error, and has changed nothing (D-2).
        except (DecodeError, ValueError, RequestError, TensorError):
            return None
        request.step.ClearField("actions")
        return functools.partial(self._answer_arrived, request, received)

    async def _answer_arrived(self, request: pb.EnvironmentRequest, received: float) -> list[bytes | memoryview]:
        """Answer a Step whose actions were applied when it arrived."""
        self._received = received
        try:
            return [(await self.answer(request)).SerializeToString()]
        finally:
            self._received = None

    async def _handle_message(self, data: bytes | bytearray) -> list[bytes | memoryview]:
        """Answer a request that protobuf reads."""
        self.last_step = None
        try:
            request = pb.EnvironmentRequest.FromString(bytes(data))
        except (DecodeError, ValueError) as error:
            problem = RequestError(
                Code.INVALID_ARGUMENT, f"expected an EnvironmentRequest, got {len(data)} bytes that are none: {error}"
            )
            return [self._refused("request", problem).SerializeToString()]
        return [(await self.answer(request)).SerializeToString()]

    def _decode(self, agent: Agent, data: bytes | bytearray, arrays: list[Array]) -> Any:
        """Return the action in the form that the agent applies, and remember it if the agent allows that."""
        actions: dict[int, Array] = {}
        for (uid, spec), array in zip(agent.actions.items(), arrays, strict=True):
            spec.check_range(array)
            actions[uid] = array if array.flags.writeable else array.copy()  # the environment may write into it
        action = agent.decode(actions)
        if agent.keeps_actions:
            # All at once: keeping an order of use would cost time in each step.
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[bytes(data)] = action
        return action

    def _is_cut_off(self, agent: Agent, world: World) -> bool:
        """Interrupt the agent if a ResetWorld waits for it; return True if so. Raises in a world that has ended."""
        if world.resets.closed:  # D-17
            raise _destroyed(world)
        if not world.resets.take(agent):
            return False
        agent.interrupt()  # D-15: once, with its observations
        return True

    async def _begin_sequence(self, agent: Agent, world: World) -> int:
        """Begin a sequence; return its state."""
        if world.resets.closed:  # D-17
            raise _destroyed(world)
        # Before the reset, during which the deputy may serve a ResetWorld, which then concerns this sequence.
        world.resets.start(agent)
        try:
            state = await agent.begin()
        # The sequence did not begin (D-2), whatever the error: no ResetWorld may wait for a Step of it.
        except BaseException:
            world.resets.end(agent)
            raise
        self._move(SessionEvent.STEP_BEGAN)
        return state

    def _end_sequence(self, agent: Agent, world: World, state: int) -> None:
        """Apply the end of a sequence. STEP_RAN leads from RUNNING to RUNNING."""
        self._move(_STEP_EVENTS[state])
        world.resets.end(agent)

    def _remember(self, agent: Agent, wanted: tuple[int, ...]) -> None:
        """Make the codec for further Steps like this one, as our own client sends them."""
        self._wanted = wanted
        # Remembered requests ask for the earlier observations, and would be answered with these.
        self._known.clear()
        specs = agent.observations
        self._codec = StepCodec.make(list(agent.actions.items()), [(uid, specs[uid]) for uid in wanted])

    async def answer(self, request: pb.EnvironmentRequest) -> pb.EnvironmentResponse:
        """Answer one request."""
        kind = request.WhichOneof("payload")
        response = pb.EnvironmentResponse()
        self.last_step, self.last_error = None, 0
        try:
            if kind is None:
                raise RequestError(
                    Code.INVALID_ARGUMENT,
                    "expected a request of one of the protocol's kinds, got one without a payload",
                )
            # The fast path of `handle` needs no such check: a client that may only watch may send Steps.
            if not self._may_act:
                self._refuse_acting(kind, request)
            self._stays_first = kind != "step"
            await self._SERVE[kind](self, request, response)
        # D-1: whatever the error, this request is answered, with the cause; even after sys.exit() in an observer.
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            return self._refused(str(kind), error)
        finally:
            self._stays_first = False
        return response

    def _refuse_acting(self, kind: str, request: pb.EnvironmentRequest) -> None:
        """Raise if a request does more than watch."""
        costs = False
        if self._agent is not None and request.extension.type_url == PROPERTY_REQUEST_URL:
            asked, tree = properties_pb2.PropertyRequest.FromString(request.extension.value), self._agent.properties()
            costs = tree.runs_environment(asked) and attribute_in(asked, tree) is None
        refuse_acting(kind, request, costs, shared_control=self._hub.shared_control)

    @property
    def plays(self) -> bool:
        """True if the session takes part in a world, and does not only watch."""
        return self._agent is not None and self._agent.unwrapped.plays

    def _may_change(self) -> bool:
        """True if the client may call methods of the environment, and set its attributes."""
        world, hub = self._world, self._hub
        if world is None or hub.shared_control or (world.steered_by_all and self._may_act):
            return True
        if not (self._may_act and self.plays):
            return False
        # Agents of one client, such as those of `make_parallel_remote`, have the world alone.
        others = [other for other in hub.inside(world) if other is not self and other.plays]
        return all(self._is_same_client(other, world) for other in others)

    def _is_same_client(self, other: WorldUser, world: World) -> bool:
        """True if another session in the same world is of the same client."""
        if self.client_key:
            return self.client_key == other.client_key
        # Older clients of this package send no key. Their agents share a connection, and a world that one of them made
        # for them alone. A shared connection alone proves nothing: proxies send the calls of many clients over one.
        maker = self._hub.maker(world)
        return maker is not None and self.connection is other.connection is maker.connection

    def _refused(self, kind: str, problem: BaseException) -> pb.EnvironmentResponse:
        """Return the answer to a request of this kind that raised an exception."""
        self.answer_lost()
        if isinstance(problem, RequestError):
            error = problem
        elif isinstance(problem, TensorError):
            error = RequestError(Code.INVALID_ARGUMENT, str(problem))
        else:
            frames = "".join(traceback.format_exception(problem))
            # A fault of this package: an environment's own exceptions arrive as RequestError. The traceback is all that
            # a user can report.
            error = RequestError(Code.INTERNAL, f"the server failed at {kind}: {problem!r}\n{frames}")
        self.last_error = int(error.code)
        self.last_reason = f"{kind}: {error.message}"
        self.last_failure = error.message if error.code is Code.INTERNAL else None
        return _error(error)

    def answer_lost(self) -> None:
        """Note that an error was sent in place of the last answer: the next Step reports the end again, if there was
        one.

        The environment has stepped, which no error can undo. Otherwise the client would take the first observation of
        the next episode for one of the episode that has ended (D-13).
        """
        if self.last_step is not None and self.last_step[2] != pb.RUNNING:
            self._untold = self.last_step[2]
            # The fast path would begin the next sequence.
            self._codec = self._wanted = None

    def hang_up(self) -> None:
        """End the wait of the current request with CANCELLED, because the client is gone."""
        self._gone = True
        if self._agent is not None:
            self._agent.hang_up()
        # Otherwise the request would wait for up to `reset_world_timeout`, and keep the session open as long.
        if self._waits_for is not None:
            self._waits_for.cancel()

    def close(self) -> None:
        """Note that the stream has ended: the agent leaves, and the connection's worlds are destroyed."""
        if self._state is SessionState.CLOSED:
            return
        try:
            # The registry must be told even if the agent fails to leave: otherwise the connection's worlds stay.
            self._leave(lost=True)
        finally:
            self._move(SessionEvent.END)
            self._hub.messages.closed(self)
            self._hub.disconnected(self)

    def _require(self, event: SessionEvent) -> None:
        if (self._state, event) not in TRANSITIONS:
            # All other events are possible in all states but CLOSED.
            remedy = _REMEDY.get(event, "the connection is closed")
            raise RequestError(
                Code.FAILED_PRECONDITION, f"{event.value} is not possible in the state {self._state.value}: {remedy}"
            )

    def _move(self, event: SessionEvent) -> None:
        self._require(event)
        self._untold = 0
        self._state = TRANSITIONS[self._state, event]

    async def _create_world(self, request: pb.EnvironmentRequest, response: pb.EnvironmentResponse) -> None:
        self._require(SessionEvent.CREATE_WORLD)
        # If a client of this package disconnects before joining its world, the world is destroyed.
        for_others = not self._client_version
        name = await self._hub.create_world(request.create_world.settings, self, for_others=for_others)
        response.create_world.world_name = name
        response.create_world.SetInParent()

    async def _join_world(self, request: pb.EnvironmentRequest, response: pb.EnvironmentResponse) -> None:
        self._require(SessionEvent.JOIN_WORLD)
        world = await self._hub.find_world(request.join_world.world_name)
        settings = dict(request.join_world.settings)
        announced = self._announced(settings.pop(ANNOUNCED, None))
        agent = self._hub.admit(world, settings, ours=bool(self._client_version))
        self._world, self._agent = world, agent
        # UIDs and specs are those of one world: the same bytes may mean something else here.
        self._codec = self._wanted = None
        self._known.clear()
        self._hub.joined(world, self)
        self._move(SessionEvent.JOIN_WORLD)
        response.join_world.specs.CopyFrom(agent.specs())
        for served in announced:
            await self._announce(served, agent, world)

    def _announced(self, setting: pb.Tensor | None) -> list[ServedMessage]:
        """Return the messages that a client announces in JoinWorld.

        Raises:
            RequestError: INVALID_ARGUMENT: the setting is no text; UNIMPLEMENTED: there is no such message.
        """
        if setting is None:
            return []
        found = []
        expected = "expected names of messages, separated by spaces"
        for name in read_text({ANNOUNCED: setting}, ANNOUNCED, "JoinWorld", _ANNOUNCED, expected).split():
            served = self._hub.messages.named(name)
            if served is None:
                known = ", ".join(self._hub.messages.names) or "none"
                raise RequestError(Code.UNIMPLEMENTED, f"no message {name!r:.80} is served here; there are: {known}")
            found.append(served)
        return found

    async def _announce(self, served: ServedMessage, agent: Agent, world: World) -> None:
        """Tell the handler of a message that this client will send the message."""
        if not (self._may_act and self.plays and self._may_change()):
            return
        client = self.client_key or self.connection
        self._hub.messages.asked(client, self)
        asked = ClientMessage(served.message, agent.unwrapped, client, world.name)
        try:
            await asked.announce(served.handler)
        finally:
            self._charge_for(served.message, asked.seconds)

    def _charge_for(self, message: SessionMessage, seconds: float) -> None:
        """Charge the processor time of a message."""
        self.charge(max(0.0, seconds - message.free_seconds))

    async def _step(self, request: pb.EnvironmentRequest, response: pb.EnvironmentResponse) -> None:
        agent, world = self._agent, self._world
        if agent is None or world is None:
            self._require(SessionEvent.STEP_BEGAN)  # D-8
            return
        if world.resets.closed:  # D-17
            raise _destroyed(world)
        step = request.step
        wanted = list(dict.fromkeys(step.requested_observations))
        self._check_wanted(agent, wanted)
        # Both are set before anything is refused: otherwise the fast path would answer the next Step with the
        # observations that the codec knows, from an agent that was prepared for this one (D-2).
        agent.prepare(wanted)
        if agent.acts_on_arrival:
            agent.unwrapped.received = self._received
            # Such Steps request different observations in turn, and hardly ever have the form that the codec knows.
            self._codec = self._wanted = None
        elif self._wanted != tuple(wanted):
            self._remember(agent, tuple(wanted))
        if self._untold and agent.reports:
            # Its action was for the sequence that has ended; the next Step begins another.
            state, self._untold = self._untold, 0
            self.last_step = world, agent, state
        elif self._state is SessionState.RUNNING:
            if agent.acts_on_arrival:
                state = await self._report(agent, world, step)
            else:
                action = agent.decode(self._read_actions(agent, step.actions))
                state = pb.INTERRUPTED if self._is_cut_off(agent, world) else await agent.apply(action)
            self.last_step = world, agent, state
            if state != pb.RUNNING:
                self._end_sequence(agent, world, state)
        else:
            # An action that was sent before the end was seen is counted as too late.
            if self._received is None and _names_episode(agent, step):
                agent.act(self._read_actions(agent, step.actions))
            state = await self._begin_sequence(agent, world)  # D-9: whatever actions it came with
        response.step.state = state  # type: ignore[assignment]
        fill_observations(response.step, agent.observe(wanted))

    async def _report(self, agent: Agent, world: World, step: pb.StepRequest) -> int:
        """Answer a Step whose actions are applied as it arrives; return the state of the sequence."""
        # A Step without observations must not take the report of the end from the Step that has them.
        if agent.reports and self._is_cut_off(agent, world):
            return pb.INTERRUPTED
        if self._received is None:  # it has arrived just now
            agent.act(self._read_actions(agent, step.actions))
        return await agent.report()

    def _read_actions(self, agent: Agent, actions: Mapping[int, pb.Tensor]) -> dict[int, Array]:
        read: dict[int, Array] = {}
        for uid, tensor in actions.items():
            if (spec := agent.actions.get(uid) or agent.unlisted_actions.get(uid)) is None:
                known = ", ".join(f"{number} ({spec.name})" for number, spec in agent.actions.items()) or "none"
                raise RequestError(Code.INVALID_ARGUMENT, f"unknown action UID {uid}; there are {known}")  # D-11
            array = spec.read(tensor)
            spec.check_range(array)
            read[uid] = array
        return read

    async def _reset(self, request: pb.EnvironmentRequest, response: pb.EnvironmentResponse) -> None:
        agent, world = self._agent, self._world
        if agent is None or world is None:
            self._require(SessionEvent.RESET)  # D-8
            return
        # Before the state changes: settings that are refused change nothing (D-2).
        agent.reset(request.reset.settings, self._state is SessionState.RUNNING)
        self._move(SessionEvent.RESET)
        world.resets.end(agent)
        response.reset.specs.CopyFrom(agent.specs())

    async def _reset_world(self, request: pb.EnvironmentRequest, response: pb.EnvironmentResponse) -> None:
        self._require(SessionEvent.RESET_WORLD)
        name = request.reset_world.world_name
        inside = self._is_in(name)
        # If it is another world than its own, this connection's sequence continues.
        agent = self._agent if inside else None
        try:
            await self._hub.reset_world(name, request.reset_world.settings, agent, self._wait_for)
        finally:
            self._waits_for = None
        if inside:
            self._move(SessionEvent.RESET_WORLD)
        response.reset_world.SetInParent()

    def _wait_for(self, order: ResetOrder) -> None:
        self._waits_for = order
        # The client may have disconnected while the default world was being made, when there was no order to cancel.
        if self._gone:
            order.cancel()

    def _is_in(self, name: str) -> bool:
        """True if the connection is in the world that has this name now, not in a destroyed one that had it."""
        return self._world is not None and self._world.name == name and not self._world.resets.closed

    async def _leave_world(self, request: pb.EnvironmentRequest, response: pb.EnvironmentResponse) -> None:
        # First, so that an agent that raises while it leaves is out of the world all the same.
        self._move(SessionEvent.LEAVE_WORLD)
        self._leave()
        response.leave_world.SetInParent()

    def _leave(self, lost: bool = False) -> None:
        agent, world = self._agent, self._world
        # First, so that an agent that raises while it leaves is not asked again.
        self._agent = self._world = None
        if agent is not None and world is not None:
            world.resets.end(agent)
            kept = False
            try:
                # Without LeaveWorld the client is lost, and may come back to its seat. If a user's observer ends its
                # thread here, the seat is not kept.
                kept = lost and self._hub.keep(world, agent)
            finally:
                if not kept:
                    agent.leave()
                self._hub.left(world, self)

    async def _destroy_world(self, request: pb.EnvironmentRequest, response: pb.EnvironmentResponse) -> None:
        self._require(SessionEvent.DESTROY_WORLD)
        name = request.destroy_world.world_name
        if self._is_in(name):
            raise RequestError(
                Code.FAILED_PRECONDITION,
                f"this connection is in the world {name!r}; send LeaveWorld before DestroyWorld",
            )  # D-17
        await self._hub.destroy_world(name)
        response.destroy_world.SetInParent()

    async def _answer_property(self, request: properties_pb2.PropertyRequest) -> bytes:
        text = "the client's version, as the server knows it; empty for a client that is not of this package"
        own = Property("connection.client_version", TEXT, text, lambda: self._client_version)  # U-12
        text = "a secret that the connections of one client have in common, as it was written; empty: none was"
        key = Property(CLIENT_KEY, TEXT, text, lambda: self.client_key, self._set_client_key)
        tree = self._hub.properties().merged(PropertyTree([own, key]))
        if (agent := self._agent) is not None:
            tree = tree.merged(agent.properties())
            if uid := agent.unwrapped.episode_uid:
                tree = tree.merged(PropertyTree([Property("world.episode_uid", NUMBER, _EPISODE_UID, lambda: uid)]))
            if (name := attribute_in(request, tree)) is not None:
                return (await self._answer_attribute(agent, name, request)).SerializeToString()
            # All other properties are answered here, even while the environment is in a long call.
            if tree.runs_environment(request):
                return (await agent.answer_property(request)).SerializeToString()
            if request.read_property.key == NAMES and (names := tree.get(NAMES)) is not None:
                agent.unwrapped.follow_names(names)
        return tree.answer(request).SerializeToString()

    def _set_client_key(self, key: str) -> None:
        if key and not 16 <= len(key) <= 64:
            text = f"expected {CLIENT_KEY} to be a secret of 16 to 64 characters, got {len(key)}"
            raise RequestError(Code.INVALID_ARGUMENT, text)
        self.client_key = key

    async def _answer_attribute(
        self, agent: Agent, name: str, request: properties_pb2.PropertyRequest
    ) -> properties_pb2.PropertyResponse:
        """Read or write an attribute of the environment."""
        # Reading a method would call it.
        refuse_requests(name)
        if self._may_change():
            return await agent.answer_property(request)
        if request.WhichOneof("payload") == "write_property":
            raise no_right(name)
        found = await self._call(agent, bridge_pb2.CallRequest(name=name))
        response = properties_pb2.PropertyResponse()
        response.read_property.value.CopyFrom(encoded([values.from_value(result) for result in found.results]))
        return response

    async def _call(self, agent: Agent, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a method of the environment, or read an attribute."""
        if request.look:
            return await agent.call(request)
        refuse_requests(request.name)
        if self._may_change():
            return await agent.call(request)
        response = await agent.call(as_look(request))
        refuse_method(request, response)
        return response

    async def _extension(self, request: pb.EnvironmentRequest, response: pb.EnvironmentResponse) -> None:
        self._require(SessionEvent.EXTENSION)
        url, data = request.extension.type_url, request.extension.value
        try:
            if url == PROPERTY_REQUEST_URL:
                asked = properties_pb2.PropertyRequest.FromString(data)
                # Otherwise a client could make a server read a value of any size.
                check_count(asked.write_property.value.uint8s.array)
                answer = await self._answer_property(asked)
                response.extension.type_url, response.extension.value = PROPERTY_RESPONSE_URL, answer
            elif url == CALL_REQUEST_URL:
                if self._agent is None:
                    raise RequestError(Code.FAILED_PRECONDITION, "a method call needs a world; send JoinWorld first")
                # Before protobuf makes objects of it, which take many times the memory of the bytes.
                check_count(data, bridge_pb2.CallRequest)
                called = await self._call(self._agent, bridge_pb2.CallRequest.FromString(data))
                answer = called.SerializeToString()
                response.extension.type_url, response.extension.value = CALL_RESPONSE_URL, answer
            elif (served := self._hub.messages.find(url)) is not None:
                response.extension.value = await self._answer_message(served, data)
                response.extension.type_url = served.message.form.response_url
            else:
                known = ", ".join([PROPERTY_REQUEST_URL, CALL_REQUEST_URL, *self._hub.messages.urls])
                raise RequestError(Code.UNIMPLEMENTED, f"unknown extension {url!r}; this server has {known}")
        except (DecodeError, TensorError) as error:
            raise RequestError(Code.INVALID_ARGUMENT, f"the extension {url!r} cannot be read: {error}") from error

    async def _answer_message(self, served: ServedMessage, data: bytes) -> bytes:
        """Answer a message of a feature, or of another package. A refused message changes nothing."""
        message, agent, world, hub = served.message, self._agent, self._world, self._hub
        form = message.form
        form.check_size(len(data))
        if agent is None or world is None:
            raise RequestError(Code.FAILED_PRECONDITION, f"a message {form.name!r} needs a world; send JoinWorld first")
        if world.resets.closed:  # D-17
            raise _destroyed(world)
        # As for method calls, and never for clients that only watch.
        if not (self._may_act and self.plays and self._may_change()):
            raise no_message(form.name)
        request, wanted = form.unwrap(data)
        self._check_wanted(agent, wanted)
        client = self.client_key or self.connection
        hub.messages.asked(client, self)
        asked = ClientMessage(message, agent.unwrapped, client, world.name)
        try:
            with agent.unwrapped.held() if form.places else nullcontext():
                answer = await asked.answer(served.handler, request)
        finally:
            self._charge_for(message, asked.seconds)
            if asked.placed == pb.RUNNING:
                self._place(agent, world, wanted)
            elif asked.placed is not None:
                self._place_all(world)
        if not form.places:
            return answer
        response = bridge_pb2.PlacingResponse(response=answer)
        if asked.placed is not None:
            response.step.state = asked.placed  # type: ignore[assignment]
        if asked.placed == pb.RUNNING:
            fill_observations(response.step, agent.observe(wanted))
        return response.SerializeToString()

    def _place(self, agent: Agent, world: World, wanted: Sequence[int]) -> None:
        """Follow an agent into the sequence that continues in another situation."""
        # A ResetWorld need not wait any longer for this agent's next Step: the sequence that it concerned is over.
        world.resets.end(agent)
        world.resets.start(agent)
        self._move(SessionEvent.PLACED)
        agent.prepare(wanted)
        if wanted and self._wanted != tuple(wanted):
            self._remember(agent, tuple(wanted))

    def _place_all(self, world: World) -> None:
        """End the sequences of all agents of this client: their next Steps begin others in the new situation."""
        # Agents of other clients are told of the end by their next Steps, as of any end that they did not request.
        for user in self._hub.inside(world):
            if user is self or (user.plays and self._is_same_client(user, world)):
                user.end_placed()

    def end_placed(self) -> None:
        """End the sequence, because the environment was put into another situation; the next Step begins one there."""
        if self._world is not None and self._agent is not None:
            self._world.resets.end(self._agent)
        self._move(SessionEvent.ALL_PLACED)

    def _check_wanted(self, agent: Agent, wanted: Iterable[int]) -> None:
        """Raise INVALID_ARGUMENT if a UID is not that of an observation."""
        observations = agent.observations
        for uid in wanted:
            if uid not in observations:
                known = ", ".join(f"{number} ({spec.name})" for number, spec in observations.items())
                raise RequestError(Code.INVALID_ARGUMENT, f"unknown observation UID {uid}; there are {known}")  # D-10

    _SERVE: Mapping[str, Callable[[Session, pb.EnvironmentRequest, pb.EnvironmentResponse], Awaitable[None]]] = {
        "create_world": _create_world,
        "join_world": _join_world,
        "step": _step,
        "reset": _reset,
        "reset_world": _reset_world,
        "leave_world": _leave_world,
        "destroy_world": _destroy_world,
        "extension": _extension,
    }


def _names_episode(agent: Agent, step: pb.StepRequest) -> bool:
    """True if a Step says which episode its actions are for, so that they can be applied in no other one."""
    return agent.acts_on_arrival and agent.unwrapped.episode_uid in step.actions


def error_response(error: RequestError) -> bytes:
    """Return the answer to a refused request."""
    return _error(error).SerializeToString()


def _error(error: RequestError) -> pb.EnvironmentResponse:
    return pb.EnvironmentResponse(error=pb.Status(code=int(error.code), message=error.message))


def _destroyed(world: World) -> RequestError:
    return RequestError(
        Code.FAILED_PRECONDITION,
        f"the world {world.name!r} was destroyed; send LeaveWorld, and create or join another",
    )

"""One remote world: its session, and the call that carries it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from bridge.core.client.wire.connection import AnyCall, Deliver, connect
from bridge.core.client.wire.poller import Poller
from bridge.core.client.world.client_session import ClientSession
from bridge.core.client.world.joined_world import JoinedWorld
from bridge.core.client.world.session_states import (
    CONNECTING,
    ONLINE,
    ClientState,
    Event,
    Joined,
    Lost,
    Refused,
    StepAnswered,
)
from bridge.core.client.world.steps import StepMessage, StepWriter
from bridge.core.client.world.world_request import WorldInfo, WorldRequest
from bridge.core.encoding.names import KnownNames
from bridge.core.encoding.tensors import Array
from bridge.core.ownership import leak
from bridge.errors import ClosedError, ConnectionLostError, PeerError, RemoteError, RemoteTimeoutError
from bridge.pb import dm_env_rpc_pb2 as pb

if TYPE_CHECKING:
    from bridge.core.client.realtime.answer_buffer import AnswerBuffer
    from bridge.core.client.realtime.reader import RealtimeReader

__all__ = ["Delivery", "Remote"]

Delivery: TypeAlias = "tuple[Remote, int, bytes | bytearray | RemoteError, float]"
"""An item in a poller: the remote, the number of its connection, the data, and the time of arrival."""
# In place of a connection's number: the item means that something is due by the clock.
_DUE = 0
_WHY_RESET: Mapping[ClientState, str] = {
    ClientState.JOINED: "no episode has begun, or the last one was given up",
    ClientState.OFFLINE: "it is a copy, or this process was forked, and has no connection yet",
    ClientState.ENDED: "the episode has ended",
    ClientState.LOST: "the connection was lost, or a call was interrupted",
}
_SILENT = "nothing has come from there at all: are host and port right, and does a firewall stand between?"


@dataclasses.dataclass(eq=False, repr=False)
class Remote:
    """A place in a world: of one environment, of one agent, or of all lanes."""

    request: WorldRequest
    """The world wanted."""
    poller: Poller[Delivery]
    """Gets this remote, its connection's number, the data and the time."""
    known: dataclasses.InitVar[WorldInfo | None] = None
    """The description of the world if it is known already, such as that of a copy."""
    shared: bool = False
    """True if there are other remotes to the same server."""
    together: bool = False
    """True if they must reach the same server, and so share a connection."""
    now: Callable[[], float] = time.monotonic
    """The clock."""
    _call: AnyCall | None = None
    _number: int = 0
    _in_flight: bool = False  # True if Steps are

    def __post_init__(self, known: WorldInfo | None) -> None:
        self.url = self.request.address.url
        self.session = ClientSession(self.request, known)
        """The protocol state."""

    def options(self, options: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return the reset options to send. Servers of other packages, which may not support any, get no empty ones."""
        return options if options or not self.session.foreign else None

    # State

    @property
    def info(self) -> WorldInfo | None:
        """The description of the world; None: nothing is known yet."""
        return self.session.info

    def known_info(self) -> WorldInfo:
        """Return the description of the world; raises ClosedError if none was ever joined."""
        if self.session.info is None:
            raise ClosedError("this environment never joined a world")
        return self.session.info

    @property
    def world(self) -> JoinedWorld:
        """The world that the remote is in, or was in last.

        Raises:
            PeerError: It was never in one.
        """
        world = self.session.world
        if world is None:
            raise PeerError(self.url, "there is no connection")
        return world

    @property
    def writer(self) -> StepWriter:
        """Writes the Steps of that world; raises as `world`."""
        world = self.session.world
        return (self.world if world is None else world).writer  # saves a call for each slot of a step

    @property
    def running_world(self) -> JoinedWorld | None:
        """The world, if a Step would continue an episode there; None: it would begin one, or is not possible."""
        session = self.session
        return session.world if session.state is ClientState.RUNNING else None

    @property
    def wanted(self) -> Sequence[int]:
        """The UIDs of the observations that its Steps request."""
        return self.world.reader.wanted

    @property
    def was_opened(self) -> bool:
        """True if it has, or had, a connection; False for a copy, and in a forked process."""
        return self.session.state is not ClientState.OFFLINE

    @property
    def outstanding(self) -> bool:
        """True if an answer is outstanding."""
        return self.session.outstanding

    @property
    def world_name(self) -> str | None:
        """The name of the world that it is in; empty for the server's default world; None: it is in none yet."""
        return self.session.world_name

    def why_reset_is_needed(self) -> str:
        """Return why no Step is possible, or none that continues an episode."""
        session = self.session
        if session.state is ClientState.LOST and isinstance(session.error, RemoteTimeoutError):
            return "the last call timed out"
        return _WHY_RESET.get(session.state, "the last reset was not answered")

    @property
    def names(self) -> KnownNames | None:
        """The names of the environment's attributes and methods; None: they are not known."""
        return None if self.session.world is None else self.session.world.names

    @property
    def reads_columns(self) -> bool:
        """True if its current or last server can read long lists of similar items as columns."""
        return self.session.world is not None and self.session.world.reads_columns

    @property
    def allowance(self) -> float:
        """Seconds by which a step may exceed a deadline, so that a person who has taken over can follow it."""
        return 0.0 if self.session.world is None else self.session.world.allowance

    @property
    def realtime(self) -> RealtimeReader | None:
        """Reads the signals of a real-time world; None: this is none."""
        return None if self.session.world is None else self.session.world.realtime

    @property
    def resetting(self) -> Array | None:
        """The lanes without an observation in the last answer, bools `(lanes,)`; None: answers do not tell."""
        world = self.session.world
        return None if world is None or world.realtime is None else world.realtime.resetting

    def latency_summary(self) -> Mapping[str, Mapping[str, float]] | None:
        """Return percentiles of the times of a real-time world, seconds; None: this is none."""
        realtime = self.realtime
        return None if realtime is None else realtime.latency.summary()

    @property
    def answers(self) -> AnswerBuffer | None:
        """The results of Steps in flight in a far real-time world; None: each Step waits for its own answer."""
        return self.session.answers

    @property
    def asking(self) -> bool:
        """True if it is not decided yet which form of world to make, even if the stream has ended since."""
        return self.session.asking

    @property
    def agreed_on_lanes(self) -> bool:
        """True if the server said that lanes are as good as worlds, and so was asked for lanes."""
        return self.session.agreed_on_lanes

    @property
    def slots(self) -> int:
        """The number of slots that this remote fills."""
        return 1 if self.info is None else self.info.lanes or 1

    @property
    def single(self) -> bool:
        """True if its world is a single environment, not lanes, as far as is known."""
        return self.info is None or self.info.lanes is None

    @property
    def agent(self) -> str | None:
        """The name of the agent to join as, in a world of several; None: the world has its own single agent."""
        return self.request.agent

    @property
    def connected(self) -> bool:
        """True if there is a connection, joined or not."""
        return self._call is not None

    @property
    def silent(self) -> bool:
        """True if no byte has come over its connection yet."""
        return self._call is not None and self._call.silent

    @property
    def draining(self) -> bool:
        """True if the server has said that it is stopping. Its worlds continue until then."""
        return self._call is not None and self._call.draining

    def late(self, purpose: str, timeout: float) -> RemoteTimeoutError:
        """Return the error for an answer that did not come within `timeout` seconds, with a reason if one is known."""
        hint = _SILENT if self.silent else "is the environment stuck, or timeout= too short?"
        return RemoteTimeoutError(self.url, f"no answer {purpose} within {timeout:g} s; {hint}")

    def know(self, other: Remote) -> None:
        """Before a world is joined: copy the facts that `other`, whose slots it takes over, knows about its world."""
        self.session.know(other.session)

    def wait_for_all(self) -> None:
        """Delay answers until every lane has an observation, in a real-time world of lanes."""
        self.session.wait_for_all()

    # Requests

    def open(self) -> None:
        """Start to connect; `receive` returns `Joined` when the world is joined."""
        # Deliveries wait in the poller: the number distinguishes those of an earlier connection.
        self._number += 1
        address, most, transport = self.request.address, self.request.max_message_bytes, self.request.transport
        deliver, shared, together = self._deliver(self._number), self.shared, self.together
        self._call = connect(address, self.poller, deliver, most, transport, shared=shared, together=together)
        # Before any answer: the transport sends the requests as soon as it is connected.
        self.session.connect(self.now())
        self._flush()

    def _deliver(self, number: int) -> Deliver:
        """Return the function that puts a connection's deliveries into the poller."""
        # The time is taken on arrival: a loop that computes takes the delivery later, which is no latency.
        now, put = self.now, self.poller.items.append
        return lambda what: put((self, number, what, now()))

    def _flush(self) -> None:
        """Send the session's requests."""
        for data in self.session.data_to_send():
            # Without a connection they are dropped, because there is no server to answer.
            if self._call is not None:
                self._call.send(data)

    def begin(self, settings: Mapping[str, pb.Tensor] | None = None, *, reset: bool = True) -> None:
        """Request the first Step of the next episode; see `ClientSession.begin`."""
        self.session.begin(settings, self.now(), reset=reset)
        self._flush()
        self._expect()

    def step(self, action: Any) -> None:
        """Send a Step with an action of a single environment.

        Raises:
            InvalidActionError: The action is not in the action space; nothing was sent.
        """
        self.send_step(self.writer.write_action(action))

    def send_step(self, request: bytes) -> None:
        """Send a Step that `StepWriter` wrote."""
        session = self.session
        if self._in_flight:
            session.step_in_flight(request, self.now())
            self._flush()
            self._expect()
            return
        session.step(request, self.now())
        out = session.out
        while out:  # as `_flush`, with two calls less in each step
            data = out.pop(0)
            if self._call is not None:
                self._call.send(data)

    def set_autoreset(self, *, same_step: bool) -> None:
        """Set when ended lanes begin their next episodes; see the session. It is sent with the next request."""
        world = self.session.world
        if world is not None and world.reader.begins_in_step is same_step:
            return  # the usual case
        self.session.set_autoreset(same_step=same_step, now=self.now())

    def begun_in_step(self, answer: StepMessage, lanes: list[int]) -> StepAnswered | Refused | Lost | None:
        """Return how lanes began their next episodes in the Step that ended the last ones; see the session."""
        event = self.session.begun_in_step(answer, lanes)
        if isinstance(event, Lost):
            self.finish(0.0)
        return event

    def act(self, request: bytes) -> None:
        """Send an action-only Step in a real-time world; a later Step requests the results."""
        self.session.act(request, self.now())
        self._flush()

    def _expect(self) -> None:
        """Have `receive` called when a call has a result, even if nothing arrives. For Steps in flight."""
        answers = self.answers
        if answers is None:
            return
        # A call can be due without a new answer: an answer may be here already, or the last observation is to be
        # repeated.
        put, due = self.poller.items.append, (self, _DUE, b"", 0.0)
        wait = answers.wait(self.now(), repeats=self.session.state is ClientState.RUNNING)
        if wait <= 0.0:
            put(due)
        elif wait < math.inf:
            # The keepalive thread runs the same timers.
            with self.poller.lock:
                self.poller.call_later(wait, lambda: put(due))

    def write(self, request: pb.EnvironmentRequest) -> bytes:
        """Return a request's bytes; raises SettingError if it is too large to be sent."""
        return self.session.write(request)

    def check_reset(self, settings: Mapping[str, pb.Tensor]) -> None:
        """Raise SettingError if a Reset with these settings is too large to be sent."""
        self.session.write_reset(settings)

    def abandon_questions(self) -> None:
        """Drop the outstanding answers to questions."""
        self.session.abandon_questions()

    def abandon_episode(self) -> None:
        """Drop the answers to the Steps in flight, if there are any. The next episode begins by `begin`."""
        if self.session.state in ONLINE:
            self.session.abandon_episode()

    def placed(self, step: pb.StepResponse) -> StepAnswered:
        """Enter a sequence that a message has begun, in another situation; return its first answer."""
        return self.session.placed(step)

    def ask(self, request: pb.EnvironmentRequest | bytes) -> None:
        """Ask for a property or a method call, by a request of `bridge.core.client.world.extensions`."""
        self.session.ask(request, self.now())
        self._flush()

    def salvage(self, message: StepMessage | None) -> None:
        """Store the ends of episodes from an unread answer to a Step."""
        if self.session.world is not None:
            self.session.world.salvage(message)

    # Answers

    def receive(self, number: int, what: bytes | bytearray | RemoteError, arrived: float) -> Event | None:
        """Process a delivery; return its event, or None if the caller does not need it any more."""
        call = self._call
        if number != self._number or call is None:
            return self._take_due(number)
        if isinstance(what, RemoteError):
            lost = self.session.connection_lost(what)
            # The stream has ended: nothing more would come.
            self.finish(0.0)
            return lost
        if self.session.state in CONNECTING:
            # The version is known before the first answer, and decides what the join asks for.
            self.session.server_version = call.server_version
        event = self.session.receive(what, arrived)
        # The usual case, in which the session has nothing to send.
        if isinstance(event, StepAnswered) and not self._in_flight:
            return event
        self._flush()
        if isinstance(event, Joined):
            self.request = self.session.request
            if self.answers is not None:
                self._in_flight = True
                # Between calls too, the session sends a Step for each answer: otherwise the frames of a long pause
                # would not arrive.
                self.poller.look_every(self.answers.frame / 2)
        if isinstance(event, Lost):
            self.finish(0.0)
        return event

    def _take_due(self, number: int) -> Event | None:
        """Return the event that is due by the clock; None: there is none, or an earlier connection delivered it."""
        if number != _DUE or self._call is None or self.answers is None or self.session.state not in ONLINE:
            return None
        event = self.session.due(self.now())
        if isinstance(event, Lost):
            self.finish(0.0)
        elif self.answers.asked:
            self._expect()
        return event

    # The end

    def give_up(self, error: RemoteError) -> Lost:
        """End the connection without waiting, because of `error`; return the event for it."""
        # A late server may still be well: it is told that the client has left the world.
        self.session.leave(self.now())
        event = self.session.connection_lost(error)
        self._flush()
        self.finish(0.0)
        return event

    def disown(self) -> None:
        """In a forked process: leave the connection to the parent process, untouched. Another remote replaces it."""
        if self._call is not None:
            # The garbage collector would close it, and with it the parent's connection.
            leak(self._call)
            leak(self.poller)
        self._call = None

    def leave(self) -> None:
        """Leave the world, destroy it if it was created for this remote, and send no more; `finish` then waits."""
        call = self._call
        if call is None:
            return
        self.session.leave(self.now())
        self._flush()
        # Here, not in `finish`, so that all remotes of a pool leave before the first of them is waited for. The garbage
        # collector closes in any thread, so another thread may have ended the connection by now: then this does
        # nothing.
        call.finish()

    def close(self, timeout: float) -> None:
        """Leave the world and end the connection, within `timeout` seconds."""
        self.leave()
        self.finish(timeout)

    def finish(self, timeout: float) -> None:
        """End the connection, if there is one, within `timeout` seconds."""
        # Before closing, so that deliveries meanwhile find no connection, and are dropped.
        call, self._call = self._call, None
        self._in_flight = False
        if self.session.state not in (ClientState.OFFLINE, ClientState.LOST):
            self.session.connection_lost(ConnectionLostError(self.url, "the connection was closed"))
        if call is not None:
            call.close(timeout)

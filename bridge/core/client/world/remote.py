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
"""An event in a poller: for whom, the number of the connection, the data, and when it came."""
# In place of a connection's number: something is due by the clock.
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
    """Gets this remote, its connection's number, and what came."""
    known: dataclasses.InitVar[WorldInfo | None] = None
    """The description of the world where it is known already, as of a copy."""
    shared: bool = False
    """True if there are other remotes to the same place."""
    together: bool = False
    """True if they have to reach the same server, and so share a connection."""
    now: Callable[[], float] = time.monotonic
    """The clock."""
    _call: AnyCall | None = None
    _number: int = 0
    _in_flight: bool = False  # Steps are

    def __post_init__(self, known: WorldInfo | None) -> None:
        self.url = self.request.address.url
        self.session = ClientSession(self.request, known)
        """The protocol state."""

    def options(self, options: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return the reset options to send: another server than ours, which may know none, gets no empty ones."""
        return options if options or not self.session.foreign else None

    # State

    @property
    def info(self) -> WorldInfo | None:
        """The description of the world; None: nothing is known yet."""
        return self.session.info

    def known_info(self) -> WorldInfo:
        """Return the description of the world; raises ClosedError where none was ever joined."""
        if self.session.info is None:
            raise ClosedError("this environment never joined a world")
        return self.session.info

    @property
    def world(self) -> JoinedWorld:
        """The world that it is in, or was in last.

        Raises:
            PeerError: It never was in one.
        """
        world = self.session.world
        if world is None:
            raise PeerError(self.url, "there is no connection")
        return world

    @property
    def writer(self) -> StepWriter:
        """Writes the Steps of that world; raises as `world`."""
        world = self.session.world
        return (self.world if world is None else world).writer  # a call less for each slot of a step

    @property
    def running_world(self) -> JoinedWorld | None:
        """The world, if a Step would go on with an episode there; None: it would begin one, or is not possible."""
        session = self.session
        return session.world if session.state is ClientState.RUNNING else None

    @property
    def wanted(self) -> Sequence[int]:
        """The UIDs of the observations that its Steps ask for."""
        return self.world.reader.wanted

    @property
    def was_opened(self) -> bool:
        """True if it has, or had, a connection; False for that of a copy, or of a forked process."""
        return self.session.state is not ClientState.OFFLINE

    @property
    def outstanding(self) -> bool:
        """True if an answer is still to come."""
        return self.session.outstanding

    @property
    def world_name(self) -> str | None:
        """The name of the world that it is in; empty for the server's default world; None: it is in none yet."""
        return self.session.world_name

    def why_reset_is_needed(self) -> str:
        """Say why no Step is possible, or none that goes on with an episode."""
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
        """True if the server that it is at, or was at last, takes long lists of what is alike as columns."""
        return self.session.world is not None and self.session.world.reads_columns

    @property
    def allowance(self) -> float:
        """Seconds that a step may take beyond a deadline, since a person who has taken over is to follow it."""
        return 0.0 if self.session.world is None else self.session.world.allowance

    @property
    def realtime(self) -> RealtimeReader | None:
        """Reads what only a real-time world answers; None: this is none."""
        return None if self.session.world is None else self.session.world.realtime

    @property
    def resetting(self) -> Array | None:
        """The lanes without an observation in the answer read last, bools `(lanes,)`; None: answers tell of none."""
        world = self.session.world
        return None if world is None or world.realtime is None else world.realtime.resetting

    def latency_summary(self) -> Mapping[str, Mapping[str, float]] | None:
        """Return percentiles of times of a real-time world, seconds; None: this is none."""
        realtime = self.realtime
        return None if realtime is None else realtime.latency.summary()

    @property
    def answers(self) -> AnswerBuffer | None:
        """The results of Steps in flight in a far real-time world; None: each Step waits for its own answer."""
        return self.session.answers

    @property
    def asking(self) -> bool:
        """True if the server has not said yet which form of world to make, also where the stream has ended since."""
        return self.session.asking

    @property
    def agreed_on_lanes(self) -> bool:
        """True if the server has said that lanes are as good as worlds, and so was asked for them."""
        return self.session.agreed_on_lanes

    @property
    def slots(self) -> int:
        """The number of slots that this remote fills."""
        return 1 if self.info is None else self.info.lanes or 1

    @property
    def single(self) -> bool:
        """True if its world is a single environment rather than lanes, as far as is known."""
        return self.info is None or self.info.lanes is None

    @property
    def agent(self) -> str | None:
        """The name of the agent that it is to be, where there are several; None: of the world's own."""
        return self.request.agent

    @property
    def connected(self) -> bool:
        """True if there is a connection, joined or not."""
        return self._call is not None

    @property
    def silent(self) -> bool:
        """True if not a byte has come over its connection yet."""
        return self._call is not None and self._call.silent

    @property
    def draining(self) -> bool:
        """True if the server has said that it is stopping; what there is goes on until then."""
        return self._call is not None and self._call.draining

    def late(self, purpose: str, timeout: float) -> RemoteTimeoutError:
        """Return the error of what has not come within `timeout` seconds; it says why, as far as that can be known."""
        hint = _SILENT if self.silent else "is the environment stuck, or timeout= too short?"
        return RemoteTimeoutError(self.url, f"no answer {purpose} within {timeout:g} s; {hint}")

    def know(self, other: Remote) -> None:
        """Before a world is joined: know of it what `other`, whose slots it takes over, knows of its own."""
        self.session.know(other.session)

    def wait_for_all(self) -> None:
        """Make answers wait until every lane has an observation, in a real-time world of lanes."""
        self.session.wait_for_all()

    # Requests

    def open(self) -> None:
        """Start to connect; `receive` returns `Joined` when the world is joined."""
        # Deliveries wait in the poller: by the number, those of an earlier connection are told from this one's.
        self._number += 1
        address, most, transport = self.request.address, self.request.max_message_bytes, self.request.transport
        deliver, shared, together = self._deliver(self._number), self.shared, self.together
        self._call = connect(address, self.poller, deliver, most, transport, shared=shared, together=together)
        # Before anything has come: the transport sends the requests as soon as it has a connection.
        self.session.connect(self.now())
        self._flush()

    def _deliver(self, number: int) -> Deliver:
        """Return what puts into the poller what comes over a connection."""
        # The time is taken on arrival: a loop that computes takes the delivery later, which is no latency.
        now, put = self.now, self.poller.items.append
        return lambda what: put((self, number, what, now()))

    def _flush(self) -> None:
        """Send what the session has to send."""
        for data in self.session.data_to_send():
            # Without a connection they are dropped: nobody is there to answer.
            if self._call is not None:
                self._call.send(data)

    def begin(self, settings: Mapping[str, pb.Tensor] | None = None, *, reset: bool = True) -> None:
        """Ask for the first Step of the next episode, as `ClientSession.begin`."""
        self.session.begin(settings, self.now(), reset=reset)
        self._flush()
        self._expect()

    def step(self, action: Any) -> None:
        """Ask a single environment for a Step with an action.

        Raises:
            InvalidActionError: It is not in the action space; nothing was sent.
        """
        self.send_step(self.writer.write_action(action))

    def send_step(self, request: bytes) -> None:
        """Ask for a Step that `StepWriter` wrote."""
        session = self.session
        if self._in_flight:
            session.step_in_flight(request, self.now())
            self._flush()
            self._expect()
            return
        session.step(request, self.now())
        out = session.out
        while out:  # as `_flush`, in each step two calls less
            data = out.pop(0)
            if self._call is not None:
                self._call.send(data)

    def set_autoreset(self, *, same_step: bool) -> None:
        """Say when lanes that ended begin their next episodes; as of the session. It leaves with the next request."""
        world = self.session.world
        if world is not None and world.reader.begins_in_step is same_step:
            return  # as in nearly every step
        self.session.set_autoreset(same_step=same_step, now=self.now())

    def begun_in_step(self, answer: StepMessage, lanes: list[int]) -> StepAnswered | Refused | Lost | None:
        """Return how lanes began their next episodes in the Step that ended the last ones; as of the session."""
        event = self.session.begun_in_step(answer, lanes)
        if isinstance(event, Lost):
            self.finish(0.0)
        return event

    def act(self, request: bytes) -> None:
        """Leave the actions of a Step in a real-time world; what comes of them is asked for by a later Step."""
        self.session.act(request, self.now())
        self._flush()

    def _expect(self) -> None:
        """Have `receive` called when a call has something to return, whatever arrives. For Steps in flight."""
        answers = self.answers
        if answers is None:
            return
        # Nothing need arrive for a call to be due: an answer may be here already, or the last observation is to be
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
        """Return a request's bytes; raises SettingError where it is too large to be sent."""
        return self.session.write(request)

    def check_reset(self, settings: Mapping[str, pb.Tensor]) -> None:
        """Raise SettingError where a Reset with these settings is too large to be sent."""
        self.session.write_reset(settings)

    def abandon_questions(self) -> None:
        """Drop the answers to questions that are still to come."""
        self.session.abandon_questions()

    def abandon_episode(self) -> None:
        """Drop the answers to the Steps that are on their way, if any are; the next episode begins by `begin`."""
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
        """Keep the ends of episodes out of a Step's answer that nobody will read."""
        if self.session.world is not None:
            self.session.world.salvage(message)

    # Answers

    def receive(self, number: int, what: bytes | bytearray | RemoteError, arrived: float) -> Event | None:
        """Take what was delivered; return what it means, or None where it means nothing any more."""
        call = self._call
        if number != self._number or call is None:
            return self._take_due(number)
        if isinstance(what, RemoteError):
            lost = self.session.connection_lost(what)
            # The stream has ended: nothing more would come.
            self.finish(0.0)
            return lost
        if self.session.state in CONNECTING:
            # The metadata that has it comes before the first answer, and decides what the join asks for.
            self.session.server_version = call.server_version
        event = self.session.receive(what, arrived)
        # As in nearly every step: then the session has nothing to send.
        if isinstance(event, StepAnswered) and not self._in_flight:
            return event
        self._flush()
        if isinstance(event, Joined):
            self.request = self.session.request
            if self.answers is not None:
                self._in_flight = True
                # Between calls too, the session sends a Step for each answer: else the frames of a long pause would
                # not arrive.
                self.poller.look_every(self.answers.frame / 2)
        if isinstance(event, Lost):
            self.finish(0.0)
        return event

    def _take_due(self, number: int) -> Event | None:
        """Return what is due by the clock; None: nothing, or it was delivered by an earlier connection."""
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
        """End the connection without waiting, because of `error`; return the event that says so."""
        # A server that is late may still be well: it is told that nobody is in the world any more.
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
        """Leave the world, destroy it where it was made for this remote, and send no more; `finish` then waits."""
        call = self._call
        if call is None:
            return
        self.session.leave(self.now())
        self._flush()
        # Here, not in `finish`: so all remotes of a pool leave before the first of them is waited for. The garbage
        # collector closes in any thread, so another one may have ended the connection by now: then this does nothing.
        call.finish()

    def close(self, timeout: float) -> None:
        """Leave the world and end the connection, within `timeout` seconds."""
        self.leave()
        self.finish(timeout)

    def finish(self, timeout: float) -> None:
        """End the connection, if there is one, within `timeout` seconds."""
        # Before it is closed: what is delivered meanwhile finds no connection, and is dropped.
        call, self._call = self._call, None
        self._in_flight = False
        if self.session.state not in (ClientState.OFFLINE, ClientState.LOST):
            self.session.connection_lost(ConnectionLostError(self.url, "the connection was closed"))
        if call is not None:
            call.close(timeout)

"""Whole sessions of several clients on one server, in any order: each answer, state and world is as a model says.

`BRIDGE_SESSIONS=2000` tries more of them than the usual number.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
from gymnasium.spaces import Discrete
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bridge import Limits
from bridge.core.encoding.names import CALL_REQUEST_URL, PROPERTY_REQUEST_URL
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.core.server.session_states import TRANSITIONS, SessionEvent, SessionState
from bridge.errors import Code
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv
from tests.support import direct_registry, direct_session, gym_source

pytestmark = pytest.mark.slow

CLIENTS, MOST_WORLDS, LENGTH = 3, 3, 3
EXAMPLES = int(os.environ.get("BRIDGE_SESSIONS", "100"))
MADE: list[CountingEnv] = []
WHOLE = {"gymnasium": pack_tensor(True)}
GOOD, BAD = {"seed": pack_tensor(1)}, {"seed": pack_tensor(-1)}


class Touchy(CountingEnv):
    """Raises at the action 2, and is as it was."""

    def __init__(self, truncates: bool = False) -> None:
        super().__init__(LENGTH, truncates=truncates)
        self.action_space = Discrete(3)
        MADE.append(self)

    def step(self, action: Any) -> Any:
        if action == 2:
            raise RuntimeError("not this one")
        return super().step(action)


@dataclasses.dataclass
class Place:
    """A world of the model."""

    name: str
    owner: int | None = None
    truncates: bool = False
    goes_with_owner: bool = False
    agent: int | None = None
    destroyed: bool = False
    episode: int = 0
    steps: int = 0


@dataclasses.dataclass
class Client:
    """A connection of the model."""

    session: Any
    state: SessionState = SessionState.UNJOINED
    place: Place | None = None
    gone: bool = False
    ours: bool = False
    """True if it says that it is a client of this package, which makes worlds for itself alone."""


WHO = st.integers(0, CLIENTS - 1)
WHERE = st.integers(0, 99)


class Sessions(RuleBasedStateMachine):
    """Clients that come, play, break rules, hang up and go."""

    @initialize()
    def start(self) -> None:
        MADE.clear()
        self.now = 0.0
        limits = Limits(max_worlds=MOST_WORLDS, idle_timeout=60.0, reset_world_timeout=0.001)
        self.hub = direct_registry(gym_source(Touchy), limits)
        self.clients = [Client(direct_session(self.hub)) for _ in range(CLIENTS)]
        self.places: dict[str, Place] = {}
        self.names = ["", "nowhere"]

    # What is asked

    def ask(self, who: int, expected: Code | None = None, **payload: Any) -> Any:
        """Send a request; hold its one answer against the model's code, None: it succeeds; return the answer."""
        request = pb.EnvironmentRequest(**payload)
        response = pb.EnvironmentResponse.FromString(self.clients[who].session.handle(request.SerializeToString()))
        (kind,) = payload
        if expected is None:
            assert response.WhichOneof("payload") == kind, response
            return getattr(response, kind)
        assert response.WhichOneof("payload") == "error", (expected, response)
        assert response.error.code == expected, (expected, response.error)
        assert response.error.message
        return None

    def may(self, who: int, event: SessionEvent) -> Code | None:
        return None if (self.clients[who].state, event) in TRANSITIONS else Code.FAILED_PRECONDITION

    def move(self, who: int, event: SessionEvent) -> None:
        client = self.clients[who]
        client.state = TRANSITIONS[client.state, event]

    def name(self, where: int) -> str:
        return self.names[where % len(self.names)]

    def default(self, name: str) -> None:
        """The default world is made when it is first asked for (D-4)."""
        if name == "" and "" not in self.places:
            self.places[""] = Place("")

    def full(self) -> bool:
        """True if so many worlds as there may be are in use."""
        return sum(name != "" or place.agent is not None for name, place in self.places.items()) >= MOST_WORLDS

    def destroyed(self, place: Place) -> None:
        del self.places[place.name]
        place.destroyed = True

    # Rules

    @rule(who=WHO, truncates=st.booleans())
    def create(self, who: int, truncates: bool) -> None:
        full = self.full()
        wish = pb.CreateWorldRequest(settings={"kwargs.truncates": pack_tensor(truncates)})
        expected = self.may(who, SessionEvent.CREATE_WORLD) or (Code.RESOURCE_EXHAUSTED if full else None)
        answer = self.ask(who, expected, create_world=wish)
        if answer is not None:
            name = answer.world_name
            assert name not in self.names
            self.names.append(name)
            self.places[name] = Place(name, who, truncates, goes_with_owner=self.clients[who].ours)
            self.move(who, SessionEvent.CREATE_WORLD)

    @rule(who=WHO, where=WHERE)
    def join(self, who: int, where: int) -> None:
        name, expected = self.name(where), self.may(who, SessionEvent.JOIN_WORLD)
        # The default world counts while somebody plays in it, and is not made where there is no room for it.
        unused = name == "" and (name not in self.places or self.places[name].agent is None)
        if expected is None and unused and self.full():
            expected = Code.RESOURCE_EXHAUSTED
        if expected is None:
            self.default(name)
        place = self.places.get(name)
        if expected is None and place is None:
            expected = Code.NOT_FOUND
        elif expected is None and place is not None and place.agent is not None:
            expected = Code.RESOURCE_EXHAUSTED
        answer = self.ask(who, expected, join_world=pb.JoinWorldRequest(world_name=name, settings=WHOLE))
        if answer is not None and place is not None:
            assert {spec.name for spec in answer.specs.actions.values()} == {"action"}
            place.agent = who
            place.goes_with_owner |= place.owner == who
            self.clients[who].place = place
            self.move(who, SessionEvent.JOIN_WORLD)

    @rule(
        who=WHO,
        actions=st.sampled_from([{1: 0}, {1: 0}, {1: 1}, {1: 2}, {1: 9}, {}, {7: 0}]),
        uid=st.sampled_from([1, 1, 1, 99]),
    )
    def step(self, who: int, actions: dict[int, int], uid: int) -> None:
        client = self.clients[who]
        place, running = client.place, client.state is SessionState.RUNNING
        wish = pb.StepRequest(
            actions={key: pack_tensor(value) for key, value in actions.items()}, requested_observations=[uid, 3]
        )
        expected: Code | None = None
        if place is None or place.destroyed:
            expected = Code.FAILED_PRECONDITION
        elif uid == 99 or (running and actions not in ({1: 0}, {1: 1}, {1: 2})):
            expected = Code.INVALID_ARGUMENT
        elif running and actions == {1: 2}:
            expected = Code.INTERNAL
        answer = self.ask(who, expected, step=wish)
        if answer is None or place is None:
            return
        if running:
            place.steps += 1
            over = place.steps == LENGTH
            how = SessionEvent.STEP_INTERRUPTED if place.truncates else SessionEvent.STEP_TERMINATED
            self.move(who, how if over else SessionEvent.STEP_RAN)
        else:
            place.episode, place.steps = place.episode + 1, 0
            self.move(who, SessionEvent.STEP_BEGAN)
        assert answer.state == getattr(pb, client.state.name)
        assert unpack_tensor(answer.observations[1]).tolist() == [place.episode, place.steps]
        assert unpack_tensor(answer.observations[3]) == float(client.state is not SessionState.TERMINATED)  # D-21

    @rule(who=WHO, good=st.booleans())
    def reset(self, who: int, good: bool) -> None:
        expected = self.may(who, SessionEvent.RESET) or (None if good else Code.INVALID_ARGUMENT)
        if self.ask(who, expected, reset=pb.ResetRequest(settings=GOOD if good else BAD)) is not None:
            self.move(who, SessionEvent.RESET)

    @rule(who=WHO, where=WHERE, good=st.booleans())
    def reset_world(self, who: int, where: int, good: bool) -> None:
        client, name = self.clients[who], self.name(where)
        expected = self.may(who, SessionEvent.RESET_WORLD)
        if expected is None and name == "" and name not in self.places and self.full():
            expected, inside = Code.RESOURCE_EXHAUSTED, False
        elif expected is None:
            self.default(name)
            place = self.places.get(name)
            if place is None:
                expected = Code.NOT_FOUND
            elif not good:
                expected = Code.INVALID_ARGUMENT
            elif place.agent not in (None, who) and self.clients[place.agent].state is SessionState.RUNNING:
                expected = Code.CANCELLED if client.gone else Code.DEADLINE_EXCEEDED
            inside = place is not None and client.place is place
        wish = pb.ResetWorldRequest(world_name=name, settings=GOOD if good else BAD)
        if self.ask(who, expected, reset_world=wish) is not None and inside:
            self.move(who, SessionEvent.RESET_WORLD)

    @rule(who=WHO)
    def leave(self, who: int) -> None:
        if self.ask(who, self.may(who, SessionEvent.LEAVE_WORLD), leave_world=pb.LeaveWorldRequest()) is not None:
            self.vacate(who)
            self.move(who, SessionEvent.LEAVE_WORLD)

    def vacate(self, who: int) -> None:
        place, self.clients[who].place = self.clients[who].place, None
        if place is not None:
            place.agent = None

    @rule(who=WHO, where=WHERE)
    def destroy(self, who: int, where: int) -> None:
        name = self.name(where)
        expected, place = self.may(who, SessionEvent.DESTROY_WORLD), self.places.get(name)
        if expected is None and place is None:
            expected = Code.NOT_FOUND
        elif expected is None and place is not None and place.agent == who:
            expected = Code.FAILED_PRECONDITION
        if self.ask(who, expected, destroy_world=pb.DestroyWorldRequest(world_name=name)) is not None:
            assert place is not None
            self.destroyed(place)

    @rule(who=WHO, key=st.sampled_from(["server.worlds", "world.name", "world.attributes.length", "no"]))
    def read(self, who: int, key: str) -> None:
        client, question = self.clients[who], properties_pb2.PropertyRequest(read_property={"key": key})
        expected = self.may(who, SessionEvent.EXTENSION)
        if expected is None and (key == "no" or (client.place is None and key.startswith("world."))):
            expected = Code.NOT_FOUND
        elif expected is None and key == "world.attributes.length" and client.place and client.place.destroyed:
            expected = Code.FAILED_PRECONDITION
        answer = self.extend(who, expected, PROPERTY_REQUEST_URL, question)
        if answer is None:
            return
        value = properties_pb2.PropertyResponse.FromString(answer.value).read_property.value
        if key == "server.worlds":
            assert unpack_tensor(value) == len(self.places)
        elif key == "world.name":
            assert client.place is not None
            assert str(unpack_tensor(value)) == client.place.name

    @rule(who=WHO, private=st.booleans())
    def call(self, who: int, private: bool) -> None:
        place, expected = self.clients[who].place, self.may(who, SessionEvent.EXTENSION)
        if expected is None and place is None:
            expected = Code.FAILED_PRECONDITION
        elif expected is None and private:
            expected = Code.PERMISSION_DENIED
        elif expected is None and place is not None and place.destroyed:
            expected = Code.FAILED_PRECONDITION
        name = "_secret" if private else "length"
        self.extend(who, expected, CALL_REQUEST_URL, bridge_pb2.CallRequest(name=name))

    def extend(self, who: int, expected: Code | None, url: str, question: Any) -> Any:
        wish = pb.EnvironmentRequest()
        wish.extension.type_url, wish.extension.value = url, question.SerializeToString()
        return self.ask(who, expected, extension=wish.extension)

    @rule(who=WHO, data=st.sampled_from([b"", b"\xff", b"\x12\xff\xff", b"\x0a\x02\x0a"]))
    def garble(self, who: int, data: bytes) -> None:
        answer = pb.EnvironmentResponse.FromString(self.clients[who].session.handle(data))
        assert answer.error.code == Code.INVALID_ARGUMENT

    @rule(who=WHO)
    def hang_up(self, who: int) -> None:
        self.clients[who].session.hang_up()
        self.clients[who].gone = True

    @rule(who=WHO)
    def close(self, who: int) -> None:
        client = self.clients[who]
        client.session.close()
        if client.state is SessionState.CLOSED:
            return
        self.vacate(who)
        self.move(who, SessionEvent.END)
        for place in list(self.places.values()):
            if place.owner == who:
                place.owner = None
                if place.goes_with_owner and place.agent is None:
                    self.destroyed(place)

    @rule(who=WHO, ours=st.booleans())
    def connect(self, who: int, ours: bool) -> None:
        """Another client takes the place of one whose stream ended."""
        if self.clients[who].state is SessionState.CLOSED:
            self.clients[who] = Client(direct_session(self.hub, "1.0" if ours else ""), ours=ours)

    @rule()
    def wait_for_an_hour(self) -> None:
        self.hub.reap(self.now)
        self.now += 3600.0
        self.hub.reap(self.now)
        for place in list(self.places.values()):
            if place.agent is None:
                self.destroyed(place)

    # What always holds

    @invariant()
    def states_and_worlds_are_the_models(self) -> None:
        if not hasattr(self, "clients"):
            return
        assert [client.session.state for client in self.clients] == [client.state for client in self.clients]
        assert sorted(self.hub.names) == sorted(self.places)
        for world in self.hub.worlds:
            assert world.agents == (self.places[world.name].agent is not None)
        assert sum(not env.closed for env in MADE) == len(self.places)

    def teardown(self) -> None:
        if not hasattr(self, "clients"):
            return
        for who in range(CLIENTS):
            self.close(who)
        self.wait_for_an_hour()
        self.states_and_worlds_are_the_models()
        self.hub.close()
        assert self.hub.names == []
        assert all(env.closed for env in MADE)


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=EXAMPLES, stateful_step_count=60, deadline=None)

"""The protocol's states: a session does what the table says, and the table what the protocol says."""

import pytest

from bridge.core.encoding.names import PROPERTY_REQUEST_URL
from bridge.core.server.session_states import TRANSITIONS, SessionEvent, SessionState
from bridge.errors import Code, RequestError
from bridge.pb import properties_pb2
from tests.core.server.sessions.peers import MOVES, brought_to

STEPS = {SessionEvent.STEP_BEGAN, SessionEvent.STEP_RAN, SessionEvent.STEP_TERMINATED, SessionEvent.STEP_INTERRUPTED}


@pytest.mark.parametrize("state", SessionState)
@pytest.mark.parametrize("event", SessionEvent)
def test_every_pair_of_state_and_event_is_as_the_table_says(state, event):
    # D-6, D-8, D-13, D-14, D-15, D-16: a pair that is not in the table is refused with FAILED_PRECONDITION
    lengths = {SessionEvent.STEP_RAN: 9, SessionEvent.STEP_TERMINATED: 1, SessionEvent.STEP_INTERRUPTED: 1}
    length = lengths.get(event, 1) if state is SessionState.RUNNING else 1
    server, peer, other = brought_to(state, length)
    if event is SessionEvent.STEP_INTERRUPTED and state is SessionState.RUNNING:
        server.envs[-1].truncates = True
    if event is SessionEvent.END:
        peer.session.close()
        assert peer.state is SessionState.CLOSED
        assert state is SessionState.CLOSED or TRANSITIONS[state, event] is SessionState.CLOSED
        return
    if event is SessionEvent.ALL_PLACED:
        if (state, event) in TRANSITIONS:
            peer.session.end_placed()
            assert peer.state is TRANSITIONS[state, event]
        else:
            with pytest.raises(RequestError, match=f"not possible in the state {state.value}"):
                peer.session.end_placed()
        return
    own = other if peer.session.world_name is None else peer.session.world_name
    request = {
        SessionEvent.CREATE_WORLD: {"create_world": {}},
        SessionEvent.JOIN_WORLD: {"join_world": {"world_name": other}},
        SessionEvent.RESET: {"reset": {}},
        SessionEvent.RESET_WORLD: {"reset_world": {"world_name": own}},
        SessionEvent.LEAVE_WORLD: {"leave_world": {}},
        SessionEvent.DESTROY_WORLD: {"destroy_world": {"world_name": other}},
        SessionEvent.PLACED: {"extension": {"type_url": MOVES.form.request_url, "value": b""}},
        SessionEvent.EXTENSION: {
            "extension": {
                "type_url": PROPERTY_REQUEST_URL,
                "value": properties_pb2.PropertyRequest(list_property={"key": ""}).SerializeToString(),
            }
        },
    }.get(event)
    if request is None:
        allowed = {after for (before, step), after in TRANSITIONS.items() if before is state and step in STEPS}
        response = peer.step() if peer.actions else peer.ask(step={})
        if not allowed:
            assert response.error.code == Code.FAILED_PRECONDITION
            assert peer.state is state
        elif (state, event) in TRANSITIONS:
            assert response.WhichOneof("payload") == "step"
            assert peer.state is TRANSITIONS[state, event]
        else:  # another of the four outcomes of a Step
            assert peer.state in allowed
        return
    response = peer.ask(**request)
    if (state, event) not in TRANSITIONS:
        assert response.error.code == Code.FAILED_PRECONDITION
        if event is SessionEvent.PLACED and state is SessionState.UNJOINED:
            assert "a message 'moves' needs a world" in response.error.message
            return
        event = SessionEvent.EXTENSION if event is SessionEvent.PLACED else event
        assert f"{event.value} is not possible in the state {state.value}" in response.error.message
        assert peer.state is state
    else:
        assert not response.HasField("error"), response.error.message
        assert peer.state is TRANSITIONS[state, event]


def test_the_table_leads_from_the_first_state_to_every_other_and_ends_in_closed():
    reached, before = {SessionState.UNJOINED}, set()
    while reached != before:
        before = set(reached)
        reached |= {after for (state, _), after in TRANSITIONS.items() if state in reached}
    assert reached == set(SessionState)
    assert not [pair for pair in TRANSITIONS if pair[0] is SessionState.CLOSED]
    assert all(
        TRANSITIONS[state, SessionEvent.END] is SessionState.CLOSED
        for state in SessionState
        if state is not SessionState.CLOSED
    )


def test_the_table_holds_what_the_protocol_says_and_no_more():
    # D-6, D-8, D-9, D-13, D-14, D-15, D-16
    said = {}
    idle = {SessionState.JOINED, SessionState.TERMINATED, SessionState.INTERRUPTED}
    for state in {SessionState.UNJOINED, SessionState.RUNNING} | idle:
        said |= {
            (state, event): state
            for event in (SessionEvent.CREATE_WORLD, SessionEvent.DESTROY_WORLD, SessionEvent.EXTENSION)
        }
        said |= {
            (state, SessionEvent.LEAVE_WORLD): SessionState.UNJOINED,
            (state, SessionEvent.END): SessionState.CLOSED,
        }
        said[state, SessionEvent.RESET_WORLD] = SessionState.INTERRUPTED if state is SessionState.RUNNING else state
    said[SessionState.UNJOINED, SessionEvent.JOIN_WORLD] = SessionState.JOINED
    said |= {(state, SessionEvent.STEP_BEGAN): SessionState.RUNNING for state in idle}
    said |= {(state, SessionEvent.RESET): state for state in idle} | {
        (SessionState.RUNNING, SessionEvent.RESET): SessionState.INTERRUPTED
    }
    said |= {(state, SessionEvent.PLACED): SessionState.RUNNING for state in {SessionState.RUNNING} | idle}
    said |= {(state, SessionEvent.ALL_PLACED): state for state in idle}
    said[SessionState.RUNNING, SessionEvent.ALL_PLACED] = SessionState.INTERRUPTED
    said[SessionState.RUNNING, SessionEvent.STEP_RAN] = SessionState.RUNNING
    said[SessionState.RUNNING, SessionEvent.STEP_TERMINATED] = SessionState.TERMINATED
    said[SessionState.RUNNING, SessionEvent.STEP_INTERRUPTED] = SessionState.INTERRUPTED
    assert said == TRANSITIONS


def test_no_two_states_in_a_row_are_not_running():
    # D-13
    ended = {SessionState.TERMINATED, SessionState.INTERRUPTED}
    for (state, event), after in TRANSITIONS.items():
        if state in ended and event in STEPS:
            assert after is SessionState.RUNNING

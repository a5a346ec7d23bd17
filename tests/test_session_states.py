"""The table of the states of a client's stream."""

from __future__ import annotations

from bridge.client.world.session_states import CONNECTING, ONLINE, TRANSITIONS, ClientState, Trigger


def test_the_table_leads_everywhere_and_out_of_everywhere() -> None:
    reached, todo = {ClientState.OFFLINE}, [ClientState.OFFLINE]
    while todo:
        here = todo.pop()
        for (state, _), after in TRANSITIONS.items():
            if state is here and after not in reached:
                reached.add(after)
                todo.append(after)
    assert reached == set(ClientState)
    assert {state for state, _ in TRANSITIONS} == set(ClientState)
    assert {trigger for _, trigger in TRANSITIONS} == set(Trigger)
    for state in (*CONNECTING, *ONLINE):
        assert TRANSITIONS[state, Trigger.END] is ClientState.LOST

"""The table of the states of a client's stream."""

from __future__ import annotations

from bridge.core.client.world.session_states import CONNECTING, ONLINE, TRANSITIONS, ClientState, Trigger


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


def test_in_a_world_each_answer_and_a_new_episode_lead_to_the_same_state_from_everywhere() -> None:
    for state in ONLINE:
        # D-2: a refusal changes nothing, and of a reset leaves a world in which no episode is known to run.
        refused = ClientState.JOINED if state is ClientState.RESETTING else state
        assert TRANSITIONS[state, Trigger.REFUSED] is refused
        assert TRANSITIONS[state, Trigger.ABANDON] is ClientState.JOINED
        assert TRANSITIONS[state, Trigger.BEGIN] is ClientState.RESETTING
        assert TRANSITIONS[state, Trigger.STEP_RAN] is ClientState.RUNNING
        assert TRANSITIONS[state, Trigger.STEP_ENDED] is ClientState.ENDED

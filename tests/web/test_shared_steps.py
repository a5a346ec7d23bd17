"""Spectators are told what happened since they looked, whatever the others do."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bridge.web.watching.shared_steps import SharedSteps

READERS = 4
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(-8, 8), st.sampled_from(["", "", "", "terminated", "truncated"])),
        st.tuples(st.sampled_from(["begin", "look", "leave"]), st.integers(0, READERS - 1), st.just("")),
    ),
    max_size=60,
)


class Naive:
    """What each spectator is to be told, added up for it alone."""

    def __init__(self, batched):
        self.batched = batched
        self.told = None

    def stepped(self, result):
        observation, reward, terminated, truncated, info = result
        if self.told is None:
            self.told = result
        elif self.batched or not (self.told[2] or self.told[3]):
            _, before, ends, cuts, _ = self.told
            self.told = (
                observation,
                before + reward,
                np.logical_or(ends, terminated),
                np.logical_or(cuts, truncated),
                info,
            )


def stretches(steps):
    count, one = 0, steps.begin()
    steps.leave(one)
    while one is not None:
        count, one = count + 1, one.before
    return count


@given(ACTS, st.booleans())
def test_each_spectator_is_told_what_happened_since_it_looked(acts, batched):
    steps = SharedSteps(None, batched)
    naive, held = {}, {}
    for number, (act, value, end) in enumerate(acts):
        if act == "step":
            flags = [end == "terminated", end == "truncated"]
            reward = float(value)
            if batched:
                reward, flags = np.array([reward, 1.0]), [np.array([flag, False]) for flag in flags]
            result = (number, reward, *flags, {"number": number})
            steps.stepped(None, None, result)
            for one in naive.values():
                one.stepped(result)
        elif act == "begin" and value not in held:
            held[value], naive[value] = steps.begin(), Naive(batched)
        elif act == "leave" and value in held:
            steps.leave(held.pop(value))
            del naive[value]
        elif act == "look" and value in held:
            found, wanted = steps.look(held[value]), naive[value].told
            steps.leave(held[value])
            held[value], naive[value].told = steps.begin(), None
            assert (found is None) == (wanted is None)
            for one, other in zip(found or (), wanted or (), strict=True):
                assert np.array_equal(one, other) if batched else one == other
        assert stretches(steps) <= len(held) + 2


def test_arrays_that_an_environment_writes_into_again_are_not_added_twice():
    steps = SharedSteps(None, True)
    begun = steps.begin()
    reward, flags = np.zeros(2), np.zeros(2, np.bool_)
    for number in range(1, 4):
        reward[:] = number
        flags[:] = number == 2
        steps.stepped(None, None, (0, reward, flags, np.zeros(2, np.bool_), {}))
    _, total, terminated, _, _ = steps.look(begun)
    assert total.tolist() == [6.0, 6.0]
    assert terminated.tolist() == [True, True]

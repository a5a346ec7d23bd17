"""`InfoWriter` of `bridge.core.worlds.agent`: what an agent's infos tell beside themselves, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from bridge.core.encoding import values
from bridge.core.worlds.agent import NO_INFO, InfoWriter
from tests.support import layout_of

SPACE = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Discrete(3)})
PLAIN = {"a": np.int64(1), "b": np.int64(2)}
TURNED = {"b": np.int64(2), "a": np.int64(1)}


def writer(plain_type: type | None = float) -> InfoWriter:
    return InfoWriter(layout_of(SPACE), plain_type)


def told(infos: InfoWriter, info: Any = None, observation: Any = PLAIN, remarks: list[str] | None = None) -> Any:
    return values.decode_step_info(infos.write(info or {}, observation, [] if remarks is None else remarks))


def test_where_there_is_nothing_to_tell_the_info_is_the_empty_one() -> None:
    assert writer().write({}, PLAIN, []) == NO_INFO


def test_a_form_is_told_when_it_changes() -> None:
    infos = writer()
    forms = [told(infos, observation=seen).form for seen in (PLAIN, TURNED, TURNED, PLAIN, PLAIN)]
    assert [form is values.UNCHANGED for form in forms] == [True, False, True, False, True]


def test_a_remark_is_taken_and_told_once() -> None:
    infos, remarks = writer(), ["it is cold"]
    assert told(infos, remarks=remarks).notes == ["it is cold"]
    assert remarks == []
    assert not told(infos, {"k": 1}, remarks=["it is cold"]).notes


def test_a_reward_is_told_until_the_client_knows_its_type() -> None:
    infos = writer()
    seen = []
    for reward in (1.0, 2, 3, 4.0, np.float32(0.5), np.float32(0.25)):
        if type(reward) is not infos.plain_type:
            infos.take_reward(reward)
        seen.append(told(infos).reward is not values.UNCHANGED)
    assert seen == [False, True, False, True, True, False]


def test_names_are_told_where_they_differ_from_those_that_the_client_has_read() -> None:
    infos = writer()
    assert not infos.follows_names
    infos.follow_names("length")
    infos.take_names("length")
    infos.take_names(None)
    assert not told(infos, {"k": 1}).notes
    infos.take_names("length mass")
    assert told(infos, {"k": 1}).notes == ["length mass"]


def test_what_an_info_elsewhere_lacks_the_next_one_tells() -> None:
    infos = writer()
    assert infos.write_apart({"k": 1, "f": print}) == {"k": 1}
    assert "f" in "".join(told(infos).notes)

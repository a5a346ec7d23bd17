"""Some of `make zoo`: environments of packages that the tests need anyway, by Python and by the command line."""

import pytest

from benchmarks.zoo import OK, ZOO, Entry, installed, play_apart, table


@pytest.mark.parametrize("name", ["MiniGrid-DoorKey-5x5-v0", "mpe2.simple_spread_v3"])
@pytest.mark.slow
def test_an_environment_of_the_zoo_is_played_in_every_way(name):
    (entry,) = (entry for entry in ZOO if name in (entry.env_id, entry.module))
    outcomes = play_apart(entry)
    ways = ("python", "vector", "lanes", "frames", "cli") if entry.env_id else ("python", "frames")
    assert {way: outcomes[way] for way in ways} == dict.fromkeys(ways, OK)


def test_what_is_not_installed_or_goes_wrong_stands_in_the_table():
    missing = Entry("no-such-package", "nothing", "Nothing-v0")
    assert not installed(missing)
    broken = Entry("minigrid", "nothing", "Nothing-v0", note="a note")
    outcomes = {**dict.fromkeys(("python", "vector", "lanes", "frames"), OK), "cli": "ValueError: it broke"}
    lines = table([(missing, play_apart(missing)), (broken, outcomes)]).splitlines()
    assert lines[2].endswith("| Nothing-v0 | not installed |")
    assert lines[3].endswith("| Nothing-v0 | **CLI failed** (1): a note |")
    assert lines[-1] == "1. Nothing-v0, cli: ValueError: it broke"

"""`bridge.client.slots.results`: what the slots tell, put together."""

from bridge.client.slots.results import InfoJoiner


def test_infos_of_slots_whose_types_differ_become_objects() -> None:
    """One slot's seed is a number and another's None, where both begin an episode in one step."""
    joiner = InfoJoiner(3)
    joiner.add({"seed": 4, "kept": 1.5}, 0)
    joiner.add({"seed": None, "kept": 2.5}, 1)
    assert joiner.infos["seed"].tolist() == [4, None, None]
    assert joiner.infos["_seed"].tolist() == [True, True, False]
    assert joiner.infos["kept"].tolist() == [1.5, 2.5, 0.0]

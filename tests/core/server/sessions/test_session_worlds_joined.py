"""Worlds that a session makes, joins, leaves and destroys, and their properties."""

import numpy as np

from bridge.core.encoding import values
from bridge.core.encoding.names import PROPERTY_REQUEST_URL, PROPERTY_RESPONSE_URL
from bridge.core.encoding.tensors import pack_tensor
from bridge.core.server.session_states import SessionState
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2


def test_created_worlds_have_unique_names_and_are_joined_from_any_connection(server):
    # D-3
    first, second = server.connect(), server.connect()
    names = [peer.ask(create_world={}).create_world.world_name for peer in (first, second, first)]
    assert len({*names, ""}) == 4
    second.join(names[0])
    assert second.play()[0] == "RUNNING"


def test_unknown_and_invalid_settings_of_create_world_are_errors(peer):
    # D-3
    peer.refused(
        Code.INVALID_ARGUMENT,
        "unknown CreateWorld settings flavour; the settings here are: env_id",
        create_world={"settings": {"flavour": pack_tensor("sweet")}},
    )
    for tensor in (pack_tensor("four"), pack_tensor(0), pack_tensor([1, 2]), pack_tensor(1.0), pb.Tensor()):
        peer.refused(Code.INVALID_ARGUMENT, "num_envs", create_world={"settings": {"num_envs": tensor}})
    encoded = pack_tensor(np.frombuffer(values.encode([1]), np.uint8))
    peer.refused(Code.INVALID_ARGUMENT, "kwargs to be a dict", create_world={"settings": {"kwargs": encoded}})


def test_the_default_world_is_joined_without_create_world(server, peer):
    # D-4
    assert not server.envs
    peer.join("")
    assert len(server.envs) == 1
    assert peer.play() == ("RUNNING", [1, 0], 0.0, 1.0)


def test_worlds_are_independent_of_each_other(server):
    # D-5
    peers = [server.connect() for _ in range(3)]
    for peer in peers:
        peer.join(peer.ask(create_world={}).create_world.world_name)
    for count, peer in enumerate(peers, 1):
        for _ in range(count):
            peer.play()
    assert [peer.play()[1] for peer in peers] == [[1, 1], [1, 2], [1, 3]]
    peers[0].refused(Code.INVALID_ARGUMENT, step={"actions": {1: pack_tensor(9)}})
    peers[1].session.close()
    assert peers[2].play()[1] == [1, 4]


# D-6, D-7: joining


def test_joining_twice_an_unknown_world_a_full_world_and_invalid_settings_are_errors(server, peer):
    # D-6
    peer.refused(Code.NOT_FOUND, "no world 'nope'; create one with CreateWorld", join_world={"world_name": "nope"})
    peer.refused(
        Code.INVALID_ARGUMENT,
        "unknown JoinWorld settings team; the settings here are: none",
        join_world={"settings": {"team": pack_tensor("red")}},
    )
    peer.join()
    beside = peer.ask(create_world={}).create_world.world_name
    for name in ("", beside):
        peer.refused(
            Code.FAILED_PRECONDITION, "in a world already; send LeaveWorld first", join_world={"world_name": name}
        )
    other = server.connect()
    other.join(beside)  # the join that was refused took no seat
    other.ask(leave_world={})
    assert peer.play()[0] == "RUNNING"
    other.refused(Code.RESOURCE_EXHAUSTED, "full: it has 1 agent of at most 1", join_world={})
    assert other.ask(create_world={}).create_world.world_name


def test_specs_and_uids_are_stable_until_leave_or_reset(peer):
    # D-7: over the ends of episodes too
    specs = peer.join()
    assert [peer.play()[0] for _ in range(13)].count("TERMINATED") == 2
    again = peer.ask(reset={}).reset.specs
    assert again == specs
    for side in (specs.actions, specs.observations):
        names = [spec.name for spec in side.values()]
        assert len(names) == len(set(names))
    assert set(peer.observations) == {"observation", "reward", "discount", "terminated", "truncated", "info"}


# D-16, D-17: leaving and destroying


def test_leave_when_not_joined_is_a_success_and_join_works_again_afterwards(server, peer):
    # D-16
    assert peer.ask(leave_world={}).WhichOneof("payload") == "leave_world"
    name = peer.ask(create_world={}).create_world.world_name
    for round_ in (1, 2):
        peer.join(name)
        assert peer.play()[1] == [round_, 0]
        peer.ask(leave_world={})
        assert peer.state is SessionState.UNJOINED
    other = server.connect()
    other.join(name)  # leaving does not destroy the world
    assert len(server.envs) == 1


def test_destroy_of_the_own_or_an_unknown_world_is_an_error(peer):
    # D-17
    name = peer.ask(create_world={}).create_world.world_name
    peer.join(name)
    peer.refused(Code.FAILED_PRECONDITION, "send LeaveWorld before DestroyWorld", destroy_world={"world_name": name})
    peer.ask(leave_world={})
    assert peer.ask(destroy_world={"world_name": name}).WhichOneof("payload") == "destroy_world"
    peer.refused(Code.NOT_FOUND, f"no world {name!r}", destroy_world={"world_name": name})
    peer.refused(Code.NOT_FOUND, f"no world {name!r}", join_world={"world_name": name})


def test_agents_of_a_destroyed_world_get_an_error_on_their_next_step(server, peer):
    # D-17
    name = peer.ask(create_world={}).create_world.world_name
    peer.join(name)
    peer.play()
    server.connect().ask(destroy_world={"world_name": name})
    assert server.envs[0].closed
    peer.refused(
        Code.FAILED_PRECONDITION,
        "was destroyed; send LeaveWorld, and create or join another",
        step={"actions": {1: pack_tensor(0)}},
    )
    assert peer.ask(leave_world={}).WhichOneof("payload") == "leave_world"
    peer.join()
    assert peer.play()[0] == "RUNNING"


# D-18 and the extension


def test_world_properties_are_there_after_join_only(peer):
    # D-18
    def listed():
        answer = properties_pb2.PropertyResponse.FromString(peer.property(list_property={"key": ""}).extension.value)
        return [spec.spec.name for spec in answer.list_property.values]

    assert "server" in listed()
    assert "world" not in listed()
    peer.refused(
        Code.NOT_FOUND,
        "no property 'world.name'",
        extension={"type_url": PROPERTY_REQUEST_URL, "value": b"\n\x0c\n\nworld.name"},
    )
    peer.join()
    assert {"server", "world"} <= set(listed())
    response = peer.property(read_property={"key": "world.num_envs"})
    assert response.extension.type_url == PROPERTY_RESPONSE_URL
    peer.ask(leave_world={})
    assert "world" not in listed()

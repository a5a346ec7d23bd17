"""`bridge.core.encoding.properties`: the tree that a server lists, reads and writes (D-18)."""

import numpy as np
import pytest
from dm_env_rpc.v1.extensions import properties as public_properties
from dm_env_rpc.v1.extensions import properties_pb2 as public

from bridge.core.encoding import values
from bridge.core.encoding.properties import ENCODED, NUMBER, TEXT, Family, Property, PropertyTree, read_encoded
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import Code, RequestError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2


class Store:
    """The values that the properties below read and write."""

    def __init__(self):
        self.speed, self.title, self.facts, self.attributes = 3, "a title", {"k": [1, None]}, {"gravity": 9.8}


def make_tree():
    store = Store()

    def find(name):
        if name not in store.attributes:
            raise RequestError(Code.NOT_FOUND, f"no attribute {name}")

    def setter(name):
        return lambda value: setattr(store, name, value)

    return store, PropertyTree(
        [
            Property("server.title", TEXT, "what it is called", lambda: store.title, setter("title")),
            Property("server.limits.speed", NUMBER, "how fast", lambda: store.speed, setter("speed")),
            Property("server.limits.count", NUMBER, "how many", lambda: 7),
            Property("server.facts", ENCODED, "anything", lambda: store.facts, setter("facts")),
            Property("server.secret", TEXT, "write only", None, setter("title")),
        ],
        [
            Family(
                "attributes",
                "of the environment",
                store.attributes.__getitem__,
                store.attributes.__setitem__,
                lambda: store.attributes,
                find,
            )
        ],
    )


def request(**fields):
    return properties_pb2.PropertyRequest.FromString(properties_pb2.PropertyRequest(**fields).SerializeToString())


def refused(tree, **fields):
    with pytest.raises(RequestError) as caught:
        tree.answer(request(**fields))
    return caught.value


def family(key, read):
    """A family whose names are not known."""
    return Family(key, "", read, print, list, print)


def encoded(value):
    return pack_tensor(np.frombuffer(values.encode(value), np.uint8))


def test_the_root_is_the_empty_key_and_every_key_is_found_once_from_there():
    # D-18
    _, tree = make_tree()
    found, waiting = [], [""]
    while waiting:
        for spec in tree.list(waiting.pop()):
            found.append(spec.spec.name)
            if spec.is_listable:
                waiting.append(spec.spec.name)
    assert len(found) == len(set(found))
    assert set(found) == {
        *("server", "server.title", "server.limits", "server.limits.speed", "server.limits.count", "server.facts"),
        *("server.secret", "attributes", "attributes.gravity"),
    }


def test_a_listing_says_type_permissions_and_description():
    # D-18
    _, tree = make_tree()
    listed = {spec.spec.name: spec for spec in tree.list("server")}
    title, limits, facts, secret = (listed[f"server.{name}"] for name in ("title", "limits", "facts", "secret"))
    assert (title.is_readable, title.is_writable, title.is_listable) == (True, True, False)
    assert title.description == "what it is called"
    assert title.spec.dtype == pb.STRING
    assert (limits.is_readable, limits.is_writable, limits.is_listable) == (False, False, True)
    assert (facts.spec.dtype, list(facts.spec.shape)) == (pb.UINT8, [-1])
    assert (secret.is_readable, secret.is_writable) == (False, True)
    (gravity,) = tree.list("attributes")
    assert (gravity.is_readable, gravity.is_writable, gravity.is_listable) == (True, True, False)
    assert (gravity.spec.dtype, gravity.description) == (pb.UINT8, "of the environment")
    (speed, count) = tree.list("server.limits")
    assert (speed.spec.dtype, list(speed.spec.shape)) == (pb.INT64, [])
    assert not count.is_writable


def test_values_are_read_and_written_by_key():
    store, tree = make_tree()
    assert unpack_tensor(tree.read("server.title"))[()] == "a title"
    assert unpack_tensor(tree.read("server.limits.speed")) == 3
    assert read_encoded(tree.read("server.facts")) == {"k": [1, None]}
    assert read_encoded(tree.read("attributes.gravity")) == 9.8
    tree.write("server.title", pack_tensor("another"))
    tree.write("server.limits.speed", pack_tensor(5))
    tree.write("server.limits.speed", pack_tensor(np.int32(6)))
    tree.write("server.facts", encoded([None]))
    tree.write("attributes.wind", encoded(0.5))
    assert (store.title, store.speed, store.facts, store.attributes["wind"]) == ("another", 6, [None], 0.5)


def test_every_request_gets_an_answer_of_its_kind():
    # D-1: an empty answer sets its member too
    _, tree = make_tree()
    title = pack_tensor("x")
    for kind, fields in (
        ("read_property", {"read_property": {"key": "server.title"}}),
        ("write_property", {"write_property": {"key": "server.title", "value": title}}),
        ("list_property", {"list_property": {"key": "attributes"}}),
    ):
        answer = tree.answer(request(**fields))
        assert public.PropertyResponse.FromString(answer.SerializeToString()).WhichOneof("payload") == kind


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({}, Code.INVALID_ARGUMENT, "to read, write or list; got an empty one"),
        ({"read_property": {"key": "no.such"}}, Code.NOT_FOUND, "no property 'no.such'; there are server.title, "),
        ({"read_property": {"key": "server.titles"}}, Code.NOT_FOUND, "attributes.NAME"),
        ({"read_property": {"key": "server.tit"}}, Code.NOT_FOUND, "no property"),
        ({"write_property": {"key": "no"}}, Code.NOT_FOUND, "no property 'no'"),
        ({"list_property": {"key": "no"}}, Code.NOT_FOUND, "no property 'no'"),
        ({"list_property": {"key": "serve"}}, Code.NOT_FOUND, "no property 'serve'"),
        ({"read_property": {"key": ""}}, Code.PERMISSION_DENIED, "'' cannot be read, only listed"),
        ({"read_property": {"key": "server"}}, Code.PERMISSION_DENIED, "'server' cannot be read, only listed"),
        ({"read_property": {"key": "attributes"}}, Code.PERMISSION_DENIED, "cannot be read"),
        ({"read_property": {"key": "attributes."}}, Code.NOT_FOUND, "no property"),
        ({"read_property": {"key": "server.secret"}}, Code.PERMISSION_DENIED, "cannot be read"),
        ({"write_property": {"key": "server.limits.count"}}, Code.PERMISSION_DENIED, "cannot be written"),
        ({"write_property": {"key": "server"}}, Code.PERMISSION_DENIED, "cannot be written"),
        ({"list_property": {"key": "server.title"}}, Code.PERMISSION_DENIED, "has no children to list; read it"),
        ({"list_property": {"key": "attributes.gravity"}}, Code.PERMISSION_DENIED, "has no children to list; read it"),
        ({"list_property": {"key": "attributes.wind"}}, Code.NOT_FOUND, "no attribute wind"),
        ({"list_property": {"key": "attributes."}}, Code.NOT_FOUND, "no property"),
        ({"write_property": {"key": "server.title"}}, Code.INVALID_ARGUMENT, "holds nothing"),
        ({"write_property": {"key": "server.title", "value": pack_tensor(5)}}, Code.INVALID_ARGUMENT, "scalar text"),
        (
            {"write_property": {"key": "server.title", "value": pack_tensor(["a"])}},
            Code.INVALID_ARGUMENT,
            "scalar text",
        ),
        (
            {"write_property": {"key": "server.limits.speed", "value": pack_tensor("fast")}},
            Code.INVALID_ARGUMENT,
            "expected a scalar number, got 'fast'",
        ),
        (
            {"write_property": {"key": "server.limits.speed", "value": pack_tensor(1.5)}},
            Code.INVALID_ARGUMENT,
            "expected a scalar number",
        ),
        ({"write_property": {"key": "server.facts", "value": pack_tensor(5)}}, Code.INVALID_ARGUMENT, "uint8 bytes"),
        (
            {"write_property": {"key": "server.facts", "value": pack_tensor(np.uint8([255, 255]))}},
            Code.INVALID_ARGUMENT,
            "expected an encoded value",
        ),
        ({"write_property": {"key": "attributes.x", "value": pack_tensor(1)}}, Code.INVALID_ARGUMENT, "uint8 bytes"),
    ],
    ids=lambda value: str(value)[:50].replace("\n", " "),
)
def test_what_a_key_does_not_allow_is_refused_with_the_code_of_the_protocol(fields, code, message):
    # D-18
    store, tree = make_tree()
    before = dict(vars(store))
    error = refused(tree, **fields)
    assert error.code == code
    assert message in error.message
    assert vars(store) == before


def test_a_value_that_cannot_be_sent_is_an_error_of_the_server():
    tree = PropertyTree(
        [
            Property("a", NUMBER, "", lambda: "text"),
            Property("b", ENCODED, "", object),
            Property("c", NUMBER, "", lambda: 1.5),
        ]
    )
    for key in "abc":
        error = refused(tree, read_property={"key": key})
        assert error.code == Code.INTERNAL
        assert f"{key!r} has a value that cannot be sent" in error.message


def test_merged_trees_have_the_keys_of_both():
    # D-18: world-specific ones are added after join
    tree = PropertyTree([Property("server.a", NUMBER, "", lambda: 1)])
    world = PropertyTree([Property("world.b", NUMBER, "", lambda: 2)], [family("world.attributes", lambda name: name)])
    both = tree.merged(world)
    assert [spec.spec.name for spec in both.list("")] == ["server", "world"]
    assert unpack_tensor(both.read("server.a")) == 1
    assert unpack_tensor(both.read("world.b")) == 2
    assert read_encoded(both.read("world.attributes.x")) == "x"
    assert [spec.spec.name for spec in tree.list("")] == ["server"]


def test_a_family_that_has_no_such_name_tells_so_itself():
    def read(name):
        raise RequestError(Code.NOT_FOUND, f"no attribute {name}")

    tree = PropertyTree([], [family("f", read)])
    error = refused(tree, read_property={"key": "f.x"})
    assert (error.code, error.message) == (Code.NOT_FOUND, "no attribute x")
    assert tree.list("f") == []


def test_the_public_library_reads_our_specs():
    _, tree = make_tree()
    for spec in (*tree.list("server"), *tree.list("server.limits")):
        theirs = public_properties.PropertySpec(public.PropertySpec.FromString(spec.SerializeToString()))
        assert theirs.key == spec.spec.name
        assert (theirs.readable, theirs.writable, theirs.listable) == (
            spec.is_readable,
            spec.is_writable,
            spec.is_listable,
        )


def test_what_is_not_encoded_is_refused():
    with pytest.raises(TensorError, match=r"expected uint8 bytes of the values codec, got int64 of shape \[\]"):
        read_encoded(pack_tensor(5))

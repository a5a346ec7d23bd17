"""Checks of the property extension (D-18)."""

from __future__ import annotations

from google.protobuf import any_pb2

from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2
from bridge.testing import samples
from bridge.testing.bench import UNKNOWN_NAME, Bench, CheckedAgent, Failed, Skip, check
from bridge.testing.wire import describe

__all__: list[str] = []

PREFIX = "type.googleapis.com/dm_env_rpc.v1.extensions.properties."
_UNKNOWN = "type.googleapis.com/conformance.check.Unknown"
MOST = 300
"""The most properties to check."""


def _ask(agent: CheckedAgent, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse | pb.Status:
    """Send a property request; return the response, or the error."""
    extension = any_pb2.Any(type_url=f"{PREFIX}PropertyRequest", value=request.SerializeToString())
    answer = agent.ask(extension=extension)
    if answer.WhichOneof("payload") == "error":
        return answer.error
    if answer.extension.type_url != f"{PREFIX}PropertyResponse":
        raise Failed(f"an extension of the type {PREFIX}PropertyResponse", repr(answer.extension.type_url))
    response = properties_pb2.PropertyResponse.FromString(answer.extension.value)
    asked, got = request.WhichOneof("payload"), response.WhichOneof("payload")
    if got != asked:
        raise Failed(f"a {asked} answer", f"{got}")
    return response


def _list(key: str) -> properties_pb2.PropertyRequest:
    return properties_pb2.PropertyRequest(list_property=properties_pb2.ListPropertyRequest(key=key))


def _read(key: str) -> properties_pb2.PropertyRequest:
    return properties_pb2.PropertyRequest(read_property=properties_pb2.ReadPropertyRequest(key=key))


def _write(key: str, value: pb.Tensor) -> properties_pb2.PropertyRequest:
    return properties_pb2.PropertyRequest(write_property=properties_pb2.WritePropertyRequest(key=key, value=value))


def _good(agent: CheckedAgent, what: str, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
    answer = _ask(agent, request)
    if isinstance(answer, pb.Status):
        raise Failed(f"an answer to {what}", describe(pb.EnvironmentResponse(error=answer)))
    return answer


def _bad(agent: CheckedAgent, what: str, request: properties_pb2.PropertyRequest, code: Code) -> None:
    answer = _ask(agent, request)
    if not isinstance(answer, pb.Status):
        raise Failed(f"the error {code.name} to {what}", f"a {answer.WhichOneof('payload')} answer")
    if answer.code != code:
        raise Failed(f"the error {code.name} to {what}", describe(pb.EnvironmentResponse(error=answer)))


def _tree(agent: CheckedAgent) -> list[properties_pb2.PropertySpec]:
    """List everything below the root, at most MOST properties.

    Raises:
        Skip: The server has no properties, or another check has reported why it lists none.
        Failed: A key occurs twice, or a listable property cannot be listed.
    """
    root = _root(agent)
    found: dict[str, properties_pb2.PropertySpec] = {}
    waiting = list(root.list_property.values)
    while waiting and len(found) < MOST:
        spec = waiting.pop(0)
        key = spec.spec.name
        if key in found:
            raise Failed("a tree of properties with unique keys", f"{key!r} twice")
        if not key:
            raise Failed("properties with keys", 'one with the key "", which is the root')
        found[key] = spec
        if spec.is_listable:
            waiting += _good(agent, f"a list of the listable property {key!r}", _list(key)).list_property.values
    return list(found.values())


def _root(agent: CheckedAgent) -> properties_pb2.PropertyResponse:
    """List the root. Each check begins with this; only the first one reports a failure."""
    cache = agent.bench.cache
    if "unlisted" in cache:
        raise Skip(cache["unlisted"])
    cache["unlisted"] = "the properties of the root are not listed, as the first check of D-18 tells"
    root = _ask(agent, _list(""))
    if isinstance(root, pb.Status):
        refusal = describe(pb.EnvironmentResponse(error=root))
        if root.code == Code.UNIMPLEMENTED:
            cache["unlisted"] = "the server has no properties: UNIMPLEMENTED, which is lawful"
        elif _is_refused_as_unknown(agent, root):
            # Minimal servers have a single response for everything unknown.
            cache["unlisted"] = f"the server has no properties: {refusal}, as to any extension that it does not know"
        else:
            raise Failed('the properties of the root, key ""', refusal)
        raise Skip(cache["unlisted"])
    del cache["unlisted"]
    return root


def _is_refused_as_unknown(agent: CheckedAgent, refusal: pb.Status) -> bool:
    """Return True if an unknown extension gets the same error, apart from the name of its type."""
    answer = agent.ask(extension=any_pb2.Any(type_url=_UNKNOWN, value=b"\x08\x01"))
    if answer.WhichOneof("payload") != "error" or answer.error.code != refusal.code:
        return False
    return answer.error.message.replace(_UNKNOWN, "") == refusal.message.replace(f"{PREFIX}PropertyRequest", "")


@check("D-18", 'properties are a tree with unique keys, listed from the root ""')
def tree(bench: Bench) -> None:
    """List all properties."""
    with bench.connection() as agent:
        _tree(agent)


@check("D-18", "readable properties can be read, at the right time, and are what their specs say")
def readable(bench: Bench) -> None:
    """Read all properties."""
    with bench.connection() as agent:
        _read_all(agent)
    if not bench.no_world:
        with bench.joined() as agent:
            _read_all(agent)


def _read_all(agent: CheckedAgent) -> None:
    for spec in _tree(agent):
        if not spec.is_readable:
            continue
        key = spec.spec.name
        answer = _ask(agent, _read(key))
        if isinstance(answer, pb.Status):
            if answer.code == Code.FAILED_PRECONDITION:
                continue  # the world decides when a property can be read
            got = describe(pb.EnvironmentResponse(error=answer))
            raise Failed(f"the value of the readable property {key!r}, or FAILED_PRECONDITION", got)
        value = answer.read_property.value
        expected, payload = samples.PAYLOAD.get(spec.spec.dtype), value.WhichOneof("payload")
        if payload != expected:
            raise Failed(f"the property {key!r} as {expected}, as its spec says", f"{payload}")
        wrong = samples.shape_fits(spec.spec, value)
        if wrong:
            raise Failed(f"the property {key!r} to fit its spec", wrong)


@check("D-18", "a writable property takes its own value back, and no other type")
def writable(bench: Bench) -> None:
    """Write back the values that were read, and write to read-only properties."""
    with bench.connection() as agent:
        found = False
        for spec in _tree(agent):
            key = spec.spec.name
            if not (spec.is_writable and spec.is_readable):
                continue
            answer = _ask(agent, _read(key))
            if isinstance(answer, pb.Status):  # unavailable at the moment, or wrongly so: another check reports that
                continue
            found = True
            value = answer.read_property.value
            _good(agent, f"a write of the writable property {key!r}", _write(key, value))
            wrong = samples.pack(pb.STRING, [""]) if spec.spec.dtype != pb.STRING else samples.pack(pb.INT32, [1])
            what = f"a write of another type to the property {key!r}"
            _bad(agent, what, _write(key, wrong), Code.INVALID_ARGUMENT)
        if not found:
            raise Skip("no property can be read and written")


@check("D-18", "an unknown key is NOT_FOUND")
def unknown_key(bench: Bench) -> None:
    """Read, write and list a key that does not exist."""
    with bench.connection() as agent:
        _tree(agent)
        value = samples.pack(pb.INT32, 1)
        for what, request in (
            ("a read of an unknown property", _read(UNKNOWN_NAME)),
            ("a write of an unknown property", _write(UNKNOWN_NAME, value)),
            ("a list of an unknown property", _list(UNKNOWN_NAME)),
        ):
            _bad(agent, what, request, Code.NOT_FOUND)


@check("D-18", "what is not readable, writable or listable is PERMISSION_DENIED")
def denied(bench: Bench) -> None:
    """Read, write and list properties that do not allow it."""
    with bench.connection() as agent:
        found = False
        for spec in _tree(agent):
            key = spec.spec.name
            value = samples.lawful(spec.spec, bench.generator) if spec.spec.dtype in samples.PAYLOAD else None
            value = samples.pack(pb.INT32, 1) if value is None else value
            for allowed, what, request in (
                (spec.is_readable, "read", _read(key)),
                (spec.is_writable, "write", _write(key, value)),
                (spec.is_listable, "list", _list(key)),
            ):
                if not allowed:
                    found = True
                    _bad(agent, f"a {what} of the property {key!r}", request, Code.PERMISSION_DENIED)
        if not found:
            raise Skip("every property can be read, written and listed")


@check("D-18", "joining a world adds properties and takes none away")
def after_join(bench: Bench) -> None:
    """List the properties before and after joining."""
    with bench.connection() as agent:
        before = {spec.spec.name for spec in _tree(agent)}
    with bench.joined() as agent:
        lost = before - {spec.spec.name for spec in _tree(agent)}
        if lost and len(before) < MOST:
            raise Failed("the universal properties after JoinWorld too", f"these are gone: {sorted(lost)}")


@check("D-18", "an unknown extension is UNIMPLEMENTED")
def unknown_extension(bench: Bench) -> None:
    """Send a message that no server knows."""
    extension = any_pb2.Any(type_url=_UNKNOWN, value=b"\x08\x01")
    with bench.connection() as agent:
        status = agent.bad("to an unknown extension", extension=extension)
        if status.code != Code.UNIMPLEMENTED:
            bench.note(f"UNIMPLEMENTED would fit an unknown extension better than {Code.named(status.code)}")

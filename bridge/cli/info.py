"""`bridge info`: what a server is, what it publishes, and what a client gets there."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from bridge.cli.program import OK, positive
from bridge.client.inspector import Inspector
from bridge.client.world_request import WorldRequest
from bridge.encoding.properties import read_encoded
from bridge.encoding.space_json import space_from_json
from bridge.encoding.space_specs import space_from_specs
from bridge.encoding.tensors import Spec, unpack_tensor
from bridge.errors import Code, ConnectionLostError, RefusedError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2
from bridge.transport.credentials import ClientCredentials, add_credential_options, credential_keywords
from bridge.version import __version__

__all__ = ["register"]

_EPILOG = """examples:
  bridge info grpc://localhost:50051
  bridge info localhost:50051/CartPole-v1?num_envs=8   one of several environments; CreateWorld settings
  bridge info grpcs://gpu-box.lan:50051 --token-file token --tls-ca certs/ca.pem

It creates a world, joins it, steps nothing, and destroys it.
"""
_SIGNALS = ("reward", "discount")
_OWN_SIGNALS = (*_SIGNALS, "terminated", "truncated", "info")

Properties = dict[str, "tuple[properties_pb2.PropertySpec, str]"]


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "info",
        description="Print a dm_env_rpc server's version, environments, limits, specs, spaces and properties.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "url", metavar="URL", help="grpc://HOST:PORT, optionally with an environment id as its path; unix:///PATH"
    )
    parser.add_argument(
        "--timeout", type=positive, default=10.0, metavar="S", help="seconds to wait for each answer (default: 10)"
    )
    add_credential_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what there is to know."""
    url, timeout = arguments.url, arguments.timeout
    credentials = ClientCredentials.of(**credential_keywords(arguments))
    properties, version, environments = _before_joining(url, timeout, credentials)
    request = WorldRequest.of(url)
    print(request.address.url)
    if version is None:
        _row("server", "not a Gymnasium Bridge server; it speaks dm_env_rpc")
        _row("spaces", "made of the specs: bounded integers are Discrete, other numbers Box, strings Text")
    else:
        same = "as this client" if version == __version__ else f"this client: {__version__}"
        _row("server", f"gymnasium-bridge {version} ({same})")
        _row("environments", ", ".join(environments) or "one, without an id")
        _row("worlds", f"{properties['server.worlds'][1]} now, before this look")
        limits = {key.rpartition(".")[2]: value for key, (_, value) in properties.items() if ".limits." in key}
        _row("limits", ", ".join(f"{name}={value}" for name, value in limits.items()))
        named = request.env_id or request.address.world is not None or "env_id" in dict(request.address.settings)
        if len(environments) > 1 and not named:
            print(f"\nTo see one of the environments, name it: bridge info {_named(request, environments[0])}")
            _print_properties(properties)
            return OK
    with Inspector(url, timeout, credentials) as inspector:
        specs = inspector.join()
        if properties:
            properties = _properties(inspector)
        _print_world(specs, properties, version)
    _print_properties(properties)
    return OK


def _named(request: WorldRequest, env_id: str) -> str:
    """The URL with an environment's id in it, for a shell."""
    url = request.address.url
    if request.address.scheme != "unix":
        base, mark, query = url.partition("?")
        return f"{base.rstrip('/')}/{env_id}{mark}{query}"
    return f"{url}{'&' if '?' in url else '?'}env_id={env_id}"


def _before_joining(
    url: str, timeout: float, credentials: ClientCredentials
) -> tuple[Properties, str | None, list[str]]:
    """Return the properties of the server itself, and of one of ours its version and environment ids."""
    with Inspector(url, timeout, credentials) as inspector:
        try:
            properties = _properties(inspector)
        except (RefusedError, ConnectionLostError) as error:
            # A server that has no properties says so, or ends the stream.
            if isinstance(error, RefusedError) and error.code in (Code.RESOURCE_EXHAUSTED, Code.UNAUTHENTICATED):
                raise
            return {}, inspector.server_version, []
        version = inspector.server_version
        ids = read_encoded(inspector.read_property("server.environments")) if version is not None else []
        return properties, version, list(ids)


def _properties(inspector: Inspector) -> Properties:
    """Return all properties by key, with their values as text; what draws a frame is left unread."""
    found: Properties = {}
    for item in inspector.list_properties():
        key = item.spec.name
        value = ""
        if item.is_readable and not key.endswith(".frame"):
            try:
                tensor = inspector.read_property(key)
                if inspector.server_version is not None and item.spec.dtype == pb.UINT8:
                    value = repr(read_encoded(tensor))
                else:
                    value = str(unpack_tensor(tensor, key).tolist())
            except (RefusedError, TensorError) as error:
                value = f"({error})"
        found[key] = (item, value)
    return found


def _print_world(specs: pb.ActionObservationSpecs, properties: Properties, version: str | None) -> None:
    observations = {uid: Spec.from_proto(spec) for uid, spec in sorted(specs.observations.items())}
    actions = {uid: Spec.from_proto(spec) for uid, spec in sorted(specs.actions.items())}
    signals = _SIGNALS if version is None else _OWN_SIGNALS
    if version is None:
        lanes = 0
        parts = [spec for spec in observations.values() if spec.name not in signals]
        observation_space = space_from_specs(parts, "observation")
        action_space = space_from_specs(actions.values(), "action")
        title = "a world"
    else:
        texts = {key: value for key, (_, value) in properties.items()}
        lanes = int(texts["world.num_envs"])
        observation_space = space_from_json(texts["world.observation_space"])
        action_space = space_from_json(texts["world.action_space"])
        title = texts["world.env_id"] or "an environment without an id"
    agent = properties["world.agent"][1] if version is not None and "world.agent" in properties else ""
    seat = f"as the agent {agent}" if agent else f"{lanes} lanes" if lanes else "a single environment"
    print(f"\n{title}, {seat}")
    _row("observations", _shortened(observation_space, 300))
    _row("actions", _shortened(action_space, 300))
    print("\nspecs")
    rows = [("UID", "name", "type", "shape", "range")]
    for kind, group in (("action", actions), ("observation", observations)):
        for uid, spec in group.items():
            rows.append((f"{kind} {uid}", spec.name, *_described(spec)))
    _table(rows)


def _described(spec: Spec) -> tuple[str, str, str]:
    name, shape = spec.describe().split(", min ")[0].split(", max ")[0].split(" of shape ")
    bounds = [
        f"{side} {_shortened(np.array2string(bound, precision=4, threshold=8, separator=', '), 32)}"
        for side, bound in (("min", spec.minimum), ("max", spec.maximum))
        if bound is not None
    ]
    return name.lower(), shape, ", ".join(bounds)


def _print_properties(properties: Properties) -> None:
    if not properties:
        print("\nproperties\n  none: the server does not serve the property extension")
        return
    print("\nproperties (r: read, w: write, l: list)")
    rows = []
    for key, (item, value) in properties.items():
        allowed = "".join(
            letter if allowed else "-"
            for letter, allowed in zip("rwl", (item.is_readable, item.is_writable, item.is_listable), strict=True)
        )
        rows.append((key, allowed, _shortened(value, 48), item.description))
    _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(name: str, text: str) -> None:
    print(f"  {name:13} {text}")


def _shortened(value: Any, most: int) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[: most - 1]}…"

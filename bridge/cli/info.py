"""`gymnasium-bridge info`: describe a server, its environments, and how to connect."""

from __future__ import annotations

import argparse
import ast
import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

from bridge.cli.hints import as_python, connecting_lines, naming_url
from bridge.cli.program import OK, add_wait_option, positive, say
from bridge.core.back_off import until_up
from bridge.core.client.world.inspector import Inspector
from bridge.core.client.world.world_request import WorldRequest
from bridge.core.encoding.properties import read_encoded
from bridge.core.encoding.space_json import space_from_json
from bridge.core.encoding.space_specs import space_from_specs
from bridge.core.encoding.tensors import Spec, unpack_tensor
from bridge.core.extras import feature
from bridge.core.transport.credentials import ClientCredentials, add_credential_options, credential_keywords
from bridge.errors import Code, ConnectionLostError, PeerError, RefusedError, TensorError, shown_url
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2
from bridge.version import __version__

__all__ = ["register"]

_EPILOG = """examples:
  gymnasium-bridge info grpc://localhost:50051
  gymnasium-bridge info "localhost:50051/CartPole-v1?num_envs=8"   one of several environments; CreateWorld settings
  gymnasium-bridge info localhost:50051 --all                      also specs and properties, limits among them
  gymnasium-bridge info grpcs://gpu-box.lan:50051 --token-file token --tls-ca certs/ca.pem

It creates a world, joins it, and destroys it without a step.
"""
_SIGNALS = ("reward", "discount")
_CHECK_TIMEOUT = 120.0
"""The timeout of a first save, in seconds."""
_KEYS = frozenset(
    {"server.messages"}
    | {f"server.{key}" for key in ("environments", "web", "worlds", "lanes", "limits.max_worlds")}
    | {f"world.{key}" for key in ("env_id", "num_envs", "observation_space", "action_space", "agent", "agents")}
    | {"world.states"}
)
"""The properties in the short form of the output."""

Properties = dict[str, "tuple[properties_pb2.PropertySpec, str]"]


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "info",
        description="Print what a dm_env_rpc server is and serves, and how to connect to it.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "url",
        metavar="URL",
        help="grpc://HOST:PORT, optionally with an environment id as its path; unix:///PATH; listen://HOST:PORT waits "
        "for a server that dials",
    )
    parser.add_argument(
        "--timeout", type=positive, default=10.0, metavar="S", help="seconds to wait for each answer (default: 10)"
    )
    parser.add_argument(
        "--check-states",
        action="store_true",
        help="reset the environment and save a state, which tries out its kind; the first time takes some seconds",
    )
    parser.add_argument("--all", action="store_true", help="also show the specs and all properties, including limits")
    add_wait_option(parser)
    add_credential_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the short form, or everything with `--all`."""
    held = credential_keywords(arguments)
    if not arguments.url.strip().startswith("listen://"):
        return _run(arguments, arguments.url, ClientCredentials.of(**held))
    with feature("dial", "a URL of listen://"):
        from bridge.dial.listener import first_dialed
    with first_dialed(arguments.url, max(arguments.timeout, arguments.wait_for_server), **held) as url:
        return _run(arguments, url, None)  # the dialing server has shown the token; it does not ask for its own


def _run(arguments: argparse.Namespace, url: str, credentials: ClientCredentials | None) -> int:
    timeout = arguments.timeout
    keys = None if arguments.all else _KEYS
    properties, version, environments = until_up(
        lambda: _before_joining(url, timeout, credentials, keys), arguments.wait_for_server
    )
    request = WorldRequest.of(url)
    with _reading(url):
        _print_server(request.address.url, properties, version, environments)
    named = request.env_id or request.address.world is not None or "env_id" in dict(request.address.settings)
    if len(environments) > 1 and not named:
        name = f"gymnasium-bridge info {shlex.quote(naming_url(request.address.url, environments[0]))}"
        print()
        say(f"To see one of the environments, name it: {name}")
    else:
        with Inspector(url, timeout, credentials) as inspector:
            specs = inspector.join()
            if properties:
                properties = _properties(inspector, keys)
        with _reading(url):
            kind = _print_world(specs, properties, version)
            states = _states(properties) if version is not None else ""
        if states and arguments.check_states and not request.address.dialed:
            states = _checked_states(arguments, url)
        if states:
            _row("states", states)
        shown = [request.address.url]
        if request.address.dialed:
            shown, kind = [arguments.url], "dialed"
        lines = connecting_lines(shown, [] if named else environments, kind, _given(arguments))
        _row("connect", "; ".join(lines).partition("  #")[0])
        if arguments.all:
            _print_specs(specs)
    if arguments.all:
        _print_properties(properties)
    else:
        print("--all shows the specs and all properties too, limits among them.")
    return OK


@contextmanager
def _reading(url: str) -> Iterator[None]:
    """Raise PeerError for malformed properties of a server: it may be hostile."""
    try:
        yield
    except (TensorError, LookupError, TypeError, ValueError, SyntaxError, RecursionError) as error:
        raise PeerError(shown_url(url), f"what it says of its world cannot be read: {error}") from error


def _print_server(url: str, properties: Properties, version: str | None, environments: Sequence[str]) -> None:
    """Print the server's version and what it serves."""
    if version is None:
        say(f"{url}: not a Gymnasium Bridge server; it speaks dm_env_rpc")
        return
    same = "as this client" if version == __version__ else f"this client: {__version__}"
    say(f"{url}: gymnasium-bridge {version} ({same})")
    overview = _overview(properties)
    pace = "in lock-step: it waits for each action"
    if overview.get("realtime"):
        pace = f"in real time: {overview['fps']:g} frames a second"
    _row("serves", f"{', '.join(environments) or overview.get('title') or 'an environment without an id'}, {pace}")
    most = properties.get("server.limits.max_worlds")
    _row("worlds", f"{properties['server.worlds'][1]} now{f', at most {most[1]}' if most else ''}")


def _overview(properties: Properties) -> dict[str, Any]:
    """Return the overview of a Gymnasium Bridge server and its default world."""
    found = properties.get("server.web")
    overview: dict[str, Any] = json.loads(found[1]) if found is not None else {}
    return overview


def _before_joining(
    url: str, timeout: float, credentials: ClientCredentials | None, keys: Collection[str] | None
) -> tuple[Properties, str | None, list[str]]:
    """Return the server's properties; for a Gymnasium Bridge server also its version and environment ids."""
    with Inspector(url, timeout, credentials) as inspector:
        try:
            properties = _properties(inspector, keys)
        except (RefusedError, ConnectionLostError) as error:
            # A server without properties refuses the request, or ends the stream.
            if isinstance(error, RefusedError) and error.code in (Code.RESOURCE_EXHAUSTED, Code.UNAUTHENTICATED):
                raise
            return {}, inspector.server_version, []
        version = inspector.server_version
        ids = read_encoded(inspector.read_property("server.environments")) if version is not None else []
        return properties, version, list(ids)


def _properties(inspector: Inspector, keys: Collection[str] | None) -> Properties:
    """Return all properties by key, with their values as text. Properties that draw a frame are not read.

    Args:
        inspector: The connection.
        keys: The properties to read; None: all.
    """
    found: Properties = {}
    for item in inspector.list_properties():
        key = item.spec.name
        value = ""
        if item.is_readable and not key.endswith(".frame") and (keys is None or key in keys):
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


def _print_world(specs: pb.ActionObservationSpecs, properties: Properties, version: str | None) -> str:
    """Print what a client gets; return the kind of the world, for `connecting_lines`."""
    texts = {key: value for key, (_, value) in properties.items()}
    agents: list[str] = ast.literal_eval(texts["world.agents"]) if texts.get("world.agents") else []
    lanes, kind = 0, "agents" if len(agents) > 1 else "one"
    if version is None:
        observations = [Spec.from_proto(spec) for _, spec in sorted(specs.observations.items())]
        parts = [spec for spec in observations if spec.name not in _SIGNALS]
        observation_space = space_from_specs(parts, "observation")
        action_space = space_from_specs([Spec.from_proto(spec) for _, spec in sorted(specs.actions.items())], "action")
    else:
        lanes = int(texts["world.num_envs"])
        observation_space = space_from_json(texts["world.observation_space"])
        action_space = space_from_json(texts["world.action_space"])
    if lanes:
        kind = "lanes"
    elif agents and _overview(properties).get("match"):
        kind = "match"
    _row("world", _title(texts, agents, lanes) + (_vector_form(texts) if kind == "one" and not agents else ""))
    _row("observations", _shortened(observation_space, 300))
    _row("actions", _shortened(action_space, 300))
    if version is None:
        _row("", "spaces made of the specs: bounded integers are Discrete, other numbers Box, strings Text")
    return kind


def _states(properties: Properties) -> str:
    """Describe how the server would save a state, as far as it knows without trying."""
    if "states" not in properties.get("server.messages", (None, ""))[1].split():
        return "none: the server takes no message of states"
    if _overview(properties).get("realtime"):
        return "none: in real time"
    way = properties["world.states"][1] if "world.states" in properties else "none: the server does not say"
    return way if way.startswith("none: ") else f"saved by {way}, as far as a look shows; --check-states tries it"


def _checked_states(arguments: argparse.Namespace, url: str) -> str:
    """Save a state in a new world; describe how it was saved, or why it could not be."""
    from bridge.facade.make import make_vec_remote

    # The server first checks the kind of environment in separate processes, which may take a minute.
    timeout = max(arguments.timeout, _CHECK_TIMEOUT)
    envs = make_vec_remote(url, timeout=timeout, blocking=True, **credential_keywords(arguments))
    try:
        envs.reset(seed=0)
        (state,) = cast(Any, envs).save_state(slots=[0])
        state.release()
    except RefusedError as error:
        return f"none: {error.reason}"
    finally:
        envs.close()
    return f"saved by {state.how}, checked; {state.bytes} bytes each"


def _title(texts: Mapping[str, str], agents: Sequence[str], lanes: int) -> str:
    """Describe the joined world and its agents."""
    if agents:
        return f"{len(agents)} agents: {', '.join(agents)}; these are the spaces of {texts['world.agent']}"
    title = texts.get("world.env_id") or "an environment without an id"
    return f"{title}, {f'{lanes} lanes' if lanes else 'a single environment'}"


def _vector_form(texts: Mapping[str, str]) -> str:
    """Describe the worlds of a vector environment, if the server's properties tell; older servers do not."""
    if "server.name" not in texts or texts.get("server.limits.max_worlds") == "0":
        return ""  # there is only the default world, such as a robot
    most = int(texts.get("server.lanes") or 0)
    form = f"one world of N lanes (up to {most})" if most > 1 else "N worlds"
    return f"; num_envs=N with blocking=True gets {form}"


def _given(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the credentials of the command line as keywords in Python, without the token itself."""
    found = credential_keywords(arguments)
    return {name: "…" if name == "token" else as_python(value) for name, value in found.items()}


def _print_specs(specs: pb.ActionObservationSpecs) -> None:
    print("\nspecs")
    rows = [("UID", "name", "type", "shape", "range")]
    for kind, group in (("action", specs.actions), ("observation", specs.observations)):
        for uid, spec in sorted(group.items()):
            rows.append((f"{kind} {uid}", spec.name, *_described(Spec.from_proto(spec))))
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
        say("  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(name: str, text: str) -> None:
    say(f"  {name:13} {text}")


def _shortened(value: Any, most: int) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[: most - 1]}…"

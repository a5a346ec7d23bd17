"""`gymnasium-bridge serve`: publish environments until Ctrl-C or SIGTERM.

Its options are the keywords of `serve_gym`, and of `serve_parallel` for environments of several agents.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from bridge.cli.hints import connecting_lines, joining_url
from bridge.cli.program import OK, bytes_count, port_number, say, seconds
from bridge.cli.running import add_running_options, read_key, run_server, server_logging, stop_on_eof
from bridge.cli.short_help import add_short_help
from bridge.cli.target import ENV_HELP, Target, find_policies, find_target
from bridge.core.extras import has_feature
from bridge.core.keywords import flat_names, group_classes
from bridge.core.signals import sigterm_as_interrupt
from bridge.core.transport.credentials import TOKEN_VARIABLE
from bridge.errors import SettingError, shown_url
from bridge.facade.options import GROUPS
from bridge.facade.process_group import ServerGroup
from bridge.facade.serve import serve_gym
from bridge.facade.serve_parallel import serve_parallel
from bridge.facade.server import Server

__all__ = [
    "SERVED_AT",
    "OtherWay",
    "add_sections",
    "announce",
    "flag_of",
    "grouped_keywords",
    "keyword_options",
    "read_pairs",
    "register",
    "serve_options",
]

SERVED_AT = " served at "
"""In the first line of output: what stands between the environment and its URLs, which are separated by spaces."""
_OTHER_WAYS = {"perlert": "bridge.perlert.serve_command"}
"""The features that serve in another way than by gRPC, each with the `OtherWay` that it has."""
_READ: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
_PATH = "str | None"
"""How a command line gives a PEM file."""
_SECTIONS = {
    "environment": "num_envs vectorization_mode env_kwargs time_action array device world",
    "address": "host port unix_path transport protocols metrics_port metrics_host dial dial_ca dial_name",
    "access": "token token_file allow_env_factories",
    "processes and threads": "processes isolation thread_safe",
    "real time": "fps default_action",
    "several agents": "missing_agent agent_timeout agents match countdown patience",
    "page in a browser": "web web_hosts openenv",
    "recording": "",
    "other packages": "observers messages message_options",
    "states of environments": "",
    "limits": "",
}
"""The sections of the help, in order, and the keywords in each."""
_SECTION_OF_GROUP = {
    "limits": "limits",
    "realtime": "real time",
    "tls": "access",
    "auth": "access",
    "record": "recording",
    "web": "page in a browser",
    "states": "states of environments",
}
_METAVARS = {
    "unix_path": "PATH",
    "web_hosts": "NAMES",
    "action_names": "NAMES",
    "host": "HOST",
    "metrics_host": "HOST",
    "port": "PORT",
    "dial": "URL",
    "dial_name": "NAME",
    "device": "DEVICE",
    "world": "NAME",
    "record": "FOLDER",
}
_ENV: dict[str, Any] = {
    "nargs": "+",
    "metavar": "ENV_ID",
    "help": f"{ENV_HELP}; clients choose among several ids or patterns",
}
"""The positional argument."""
_USUAL: tuple[str, ...] = (
    "env",
    "--num-envs",
    "--env-kwargs",
    "--host",
    "--port",
    "--token-file",
    "--tls-certificate",
    "--tls-key",
)
_USUAL += ("--processes", "--isolation", "--fps", "--web", "--record", "--metrics-port")
"""What `--help` shows, in order."""
_NAMED = {"protocols": "--protocol", "observers": "--observer", "messages": "--message"}
"""The keywords that list names, each with its option, which is given once for each of them."""
_NAMED_TEXTS = {
    "protocols": "also speak this protocol at the port: one that another package has, or websocket, for ws:// clients "
    "without a page",
    "observers": "have this observer of another package told of the worlds and of what environments do",
    "messages": "let clients send this message of another package about their environments",
}
_KIND = {True: "an environment of several agents", False: "a Gymnasium environment"}

_EPILOG = """examples:
  gymnasium-bridge serve CartPole-v1 --port 50051
  gymnasium-bridge serve CartPole-v1 --num-envs 64             64 lanes: one message steps them all
  gymnasium-bridge serve FrozenLake-v1 --env-kwargs map_name=8x8 is_slippery=False
  gymnasium-bridge serve my_package.envs:MyEnv-v0              imports the module that registers the environment
  gymnasium-bridge serve my_package.envs:make_env              calls what makes the environment
  gymnasium-bridge serve mpe2:simple_tag_v3 --fps 30           several agents (PettingZoo), each a client, in real time
  gymnasium-bridge serve mpe2:simple_tag_v3 --fps 30 --web --match --agents random   people play in a browser, in rounds
  gymnasium-bridge serve CartPole-v1 --perlert 32322           in real time over UDP, with a lobby
  gymnasium-bridge serve CartPole-v1 Taxi-v4 "MountainCar*"    several environments: each client chooses one
"""


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "serve",
        usage="%(prog)s ENV_ID [ENV_ID ...] [options]",
        description="Serve environments of Gymnasium or PettingZoo over dm_env_rpc until Ctrl-C or SIGTERM.",
        epilog=_EPILOG,
        add_help=False,
        allow_abbrev=False,  # else `--prot 5`, of somebody who means the port, would name a protocol
    )
    add_short_help(parser, _USUAL, lambda: {"env": _ENV, **dict(serve_options())})
    parser.add_argument("env", **_ENV)
    add_sections(parser, serve_options())
    for way in _other_ways():
        way.add_options(parser)
    add_running_options(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="log nothing, also not what environments raise")
    parser.set_defaults(run=run, lacking=_lacking_options())


class OtherWay(Protocol):
    """A way to serve that is no `Server`, such as PERLERT: a module of the feature that has it."""

    OPTION: str
    """The option that chooses it, which names a port, as the parsed arguments have it."""
    OTHER_OPTIONS: Sequence[str]
    """The options that are given with it alone."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add all of these; those that are not given are None."""

    def function(self) -> Callable[..., Any]:
        """Return the function that serves, of an environment and keywords, until `stop` of what it returns."""

    def keywords(
        self, arguments: argparse.Namespace, env: Any, read_key: Callable[[Path | None], bytes | None]
    ) -> dict[str, Any]:
        """Return the keywords of the function that the options stand for."""

    def lines(self, server: Any, arguments: argparse.Namespace) -> list[str]:
        """Return what is printed once the server runs."""


def _other_ways() -> list[OtherWay]:
    """Import the other ways of this installation."""
    ways: list[Any] = [importlib.import_module(place) for name, place in _OTHER_WAYS.items() if has_feature(name)]
    return ways


def _lacking_options() -> dict[str, str]:
    """Return what the options begin with of features that this installation lacks, each with the feature."""
    places = {keyword: place for keyword, place in GROUPS.items() if isinstance(place, str)}
    features = {keyword: place.split(".")[1] for keyword, place in places.items()} | {
        name: name for name in _OTHER_WAYS
    }
    return {f"--{keyword}": name for keyword, name in features.items() if not has_feature(name)}


def add_sections(parser: argparse.ArgumentParser, options: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Add options to a parser, each in its section of the help."""
    given = dict(options)
    for title, flags in sections(given).items():
        section = parser.add_argument_group(title)
        for flag in flags:
            section.add_argument(flag, **given[flag])


def sections(flags: Iterable[str]) -> dict[str, list[str]]:
    """Return flags by the title of their section, without sections that are empty."""
    places = {name: title for title, names in _SECTIONS.items() for name in names.split()}
    for keyword, group in group_classes(GROUPS).items():
        places.update(dict.fromkeys(flat_names(keyword, group), _SECTION_OF_GROUP[keyword]))
    found: dict[str, list[str]] = {title: [] for title in _SECTIONS}
    for flag in flags:
        found[places[_keyword_of(flag)]].append(flag)
    return {title: names for title, names in found.items() if names}


def _keyword_of(flag: str) -> str:
    names = {option: keyword for keyword, option in _NAMED.items()}
    return names.get(flag, flag.removeprefix("--").replace("-", "_"))


def flag_of(keyword: str) -> str:
    """Return the option that a keyword is."""
    return _NAMED.get(keyword, f"--{keyword.replace('_', '-')}")


def serve_options() -> Iterator[tuple[str, dict[str, Any]]]:
    """Give each keyword of `serve_gym`, and those of `serve_parallel` alone, as options; as `keyword_options`."""
    return keyword_options(serve_gym, serve_parallel)


def keyword_options(*functions: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give the keywords of functions as options.

    Keywords that a dataclass groups, such as `Limits`, are an option for each of its fields. The help is the keyword's
    line in the docstring of the first function that has it. Keywords that a command line cannot say, such as
    callables, are left out.

    Args:
        functions: Those that a command line stands for.

    Returns:
        Pairs of a flag and the arguments of `add_argument`.
    """
    found: dict[str, _Keyword] = {}
    for function in functions:
        found = {**found, **{name: keyword for name, keyword in _keywords(function).items() if name not in found}}
    for name, keyword in found.items():
        options = _option(name, keyword, found)
        if options is not None:
            yield flag_of(name), options


def _option(name: str, keyword: _Keyword, known: Mapping[str, _Keyword]) -> dict[str, Any] | None:
    """Return the arguments of `add_argument` for a keyword; None: a command line cannot say it."""
    default, annotation, text = keyword.default, keyword.annotation, _help(keyword, known)
    kind = _plain_type(annotation)
    shown = "" if default is None or isinstance(default, bool) or default == () else f" (default: {default})"
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": f"{text}{shown}"}
    if name in _NAMED:
        text = f"{_NAMED_TEXTS[name]}; may be given several times"
        return {**options, "help": text, "dest": name, "action": "append", "metavar": "NAME"}
    if name == "default_action":  # any element of the action space
        return {**options, "type": read_value, "metavar": "ACTION"}
    if name == "message_options":
        return {**options, "nargs": "+", "metavar": "NAME.KEY=VALUE", "action": "extend"}
    choices = re.fullmatch(r"(bool \| )?Literal\[(.*)\]( \| None)?", annotation)
    if "Policy" in annotation:
        text = f"{text}. A function is given as MODULE:FUNCTION"
        return {**options, "help": text, "nargs": "+", "metavar": "[AGENT=]POLICY"}
    if choices:
        alone = {"nargs": "?", "const": True} if choices.group(1) else {}
        return {**options, **alone, "choices": [choice.strip(" '\"") for choice in choices.group(2).split(",")]}
    if kind == "bool":
        return {**options, "action": argparse.BooleanOptionalAction if default else "store_true"}
    if kind in _READ:
        read, metavar = _READ[kind], _METAVARS.get(name, {"int": "N", "float": "X"}.get(kind, "FILE"))
        if kind == "int" and name.endswith("_bytes"):
            read, metavar = bytes_count, "BYTES"
        elif kind == "int" and re.search(r"(^|_)port$", name):
            read = port_number
        elif kind == "float" and re.search(r"\bseconds\b", keyword.text, re.IGNORECASE):
            read, metavar = seconds, "SECONDS"
        return {**options, "type": _or_none(read) if "None" in annotation else read, "metavar": metavar}
    if kind == "Mapping":
        return {**options, "nargs": "+", "metavar": "KEY=VALUE", "action": "extend"}
    return None


def _help(keyword: _Keyword, known: Mapping[str, _Keyword]) -> str:
    """Return what a docstring says of a keyword in the words of a command line: flags, and no code."""
    flags = {other.field: name for name, other in known.items() if other.group == keyword.group and other.field}
    said = {name: name for name, other in known.items() if _plain_type(other.annotation)}
    flags = {name: flag_of(flat) for name, flat in {**flags, **said}.items()}
    groups = {group.__name__: flat_names(name, group) for name, group in group_classes(GROUPS).items()}
    fields = {
        f"{title}({field.name}=…)": flag_of(flat) for title, names in groups.items() for flat, field in names.items()
    }
    flags = {**flags, **fields, **{f"{name}=True": flag for name, flag in flags.items()}}
    text = re.sub(r"`([^`]*)`", lambda found: flags.get(found.group(1), found.group(1)), keyword.text)
    # A default that is None is that of an option which is left out; another one is replaced by the word none.
    none = "without it: " if keyword.default is None else "none: "
    text = re.sub(r"[;.] None: ", f"; {none}", text)
    text = re.sub(r"[;.] False: ", "; without it: ", text).removesuffix(".").replace("%", "%%")
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


@dataclasses.dataclass(frozen=True)
class _Keyword:
    """A keyword of a function that a server's start can be given."""

    annotation: str
    default: Any
    text: str
    """Its description, from the docstring."""
    group: str = ""
    """The keyword that takes it in a dataclass; empty: it is the function's own."""
    field: str = ""
    """Its name there."""


def _keywords(function: Callable[..., Any]) -> dict[str, _Keyword]:
    """Return the keywords of a function that a server's start can be given, by their names on a command line."""
    found: dict[str, _Keyword] = {}
    texts = _keyword_texts(inspect.getdoc(function) or "")
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "web":
            found[name] = _Keyword("bool", False, texts[name])
        if name in GROUPS:
            found.update(_fields(name))
        elif parameter.kind is parameter.KEYWORD_ONLY and name != "start":
            found[name] = _Keyword(str(parameter.annotation), parameter.default, texts.get(name, ""))
    return found


def _fields(keyword: str) -> Iterator[tuple[str, _Keyword]]:
    """Give the fields of a dataclass that groups keywords, without those of a client's `TLS`."""
    group = group_classes(GROUPS).get(keyword)
    if group is None:  # it is of a feature that this installation lacks
        return
    texts = _keyword_texts(inspect.getdoc(group) or "")
    for flat, field in flat_names(keyword, group).items():
        if flat not in ("tls_ca", "tls_server_name"):
            kind = _PATH if keyword == "tls" or flat == "record" else str(field.type)
            default = None if field.default is dataclasses.MISSING else field.default
            yield flat, _Keyword(kind, default, texts[field.name], keyword, field.name)


def grouped_keywords(keywords: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Return keywords of the command line as a function takes them: fields in their dataclasses."""
    known = _keywords(function)
    found = {name: value for name, value in keywords.items() if not known[name].group}
    for keyword, group in group_classes(GROUPS).items():
        fields = {known[name].field: value for name, value in keywords.items() if known[name].group == keyword}
        if keyword == "record" and fields and "folder" not in fields:
            raise SettingError("what is recorded needs a folder: give --record FOLDER too")
        if fields:
            found[keyword] = group(**fields)
    return found


def _plain_type(annotation: str) -> str:
    """Read an annotation, such as `int | None`, as a type that a command line can say; "" where there is none."""
    members = [member.strip().partition("[")[0] for member in annotation.split("|")]
    return next((member for member in members if member in ("bool", "int", "float", "str", "Mapping")), "")


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Read what `kind` reads, and the word none as None."""

    def read(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    read.__name__ = kind.__name__  # argparse names it where it refuses
    return read


def _keyword_texts(doc: str) -> dict[str, str]:
    """Read what a docstring's section `Args:` says of each keyword."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", doc, re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^    (\w+): (.*(?:\n(?!    \w+: ).*)*)", section.group(1) if section else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def read_value(text: str) -> Any:
    """Return the Python literal that a text is, such as `0,0.5` or `{'gripper': 1}`, otherwise the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def read_pairs(pairs: Sequence[str], option: str = "--env-kwargs") -> dict[str, Any]:
    """Read KEY=VALUE pairs; a value is a Python literal where it reads as one, otherwise text.

    Raises:
        SettingError: A pair has no `=`, or a key is no name.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise SettingError(f"expected {option} to be KEY=VALUE, e.g. gravity=9.8, got {pair!r}")
        found[key] = read_value(text)
    return found


def _read_named_pairs(pairs: Sequence[str], option: str) -> dict[str, Any]:
    """Read NAME.KEY=VALUE pairs, each value as `read_pairs` does; return a dict for each name."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, dot, rest = pair.partition(".")
        if not dot or "=" in name:
            raise SettingError(f"expected {option} to be NAME.KEY=VALUE, got {pair!r}")
        found.setdefault(name, {}).update(read_pairs([rest], option))
    return found


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    names = {*_keywords(serve_gym), *_keywords(serve_parallel)}
    keywords = {name: value for name, value in vars(arguments).items() if name in names}
    if "agents" in keywords:
        keywords["agents"] = find_policies(keywords["agents"])
    for name, value in keywords.items():
        if isinstance(value, list) and name not in _NAMED and name != "default_action":
            read = _read_named_pairs if name == "message_options" else read_pairs
            keywords[name] = read(value, flag_of(name))
    with server_logging(arguments.verbose, arguments.quiet):
        return _serve(arguments, keywords)


def _serve(arguments: argparse.Namespace, keywords: dict[str, Any]) -> int:
    target = find_target(arguments.env)
    for way in _other_ways():
        if getattr(arguments, way.OPTION) is not None:
            return _run_other_way(way, target, keywords, arguments)
        for name in way.OTHER_OPTIONS:
            if getattr(arguments, name) is not None:
                raise SettingError(f"{flag_of(name)} is for {flag_of(way.OPTION)} PORT: give that too")
    if target.several_agents and "default_action" in keywords:  # there it is a function, of each agent's own space
        raise SettingError("--default-action is for one agent: for several give --agents [AGENT=]POLICY")
    serve: Callable[..., Server] = serve_parallel if target.several_agents else serve_gym
    _refuse(keywords, _keywords(serve), f"for {arguments.env[0]}, {_KIND[target.several_agents]}")
    lanes = keywords.get("num_envs", 1) > 1 or keywords.get("vectorization_mode", "sync") != "sync"
    kind = "lanes" if lanes else "one"
    if target.several_agents:
        kind = "match" if keywords.get("match") else "agents"
    credentials = client_credentials(keywords)

    def tell(server: Server) -> None:
        more = [f"Dials {shown_url(keywords['dial'])} until it is stopped."] if "dial" in keywords else []
        if keywords.get("openenv") and server.web_url is not None:
            more.append(f'In OpenEnv: base_url="{server.web_url.partition("#")[0].rstrip("/")}"')
        announce(server, arguments.env, kind, credentials, more)

    run_server(
        lambda: serve(target.env, start=False, **grouped_keywords(keywords, serve)),
        tell,
        exit_on_eof=arguments.exit_on_eof,
    )
    say("stopped: connections and environments are closed")
    return OK


def _refuse(keywords: Collection[str], known: Collection[str], why: str) -> None:
    """Raise SettingError for options that do not apply."""
    unknown = sorted(name for name in keywords if name not in known)
    if unknown:
        flags = ", ".join(map(flag_of, unknown))
        raise SettingError(f"{flags} cannot be given {why}")


def _run_other_way(way: OtherWay, target: Target, keywords: dict[str, Any], arguments: argparse.Namespace) -> int:
    """Serve in another way until a signal; the options are those of `serve_gym` that it has too, and its own."""
    own = way.keywords(arguments, target.env, read_key)
    serve = way.function()
    _refuse(keywords, set(_keywords(serve)) - {"port"}, f"with {flag_of(way.OPTION)}, which names its own port")
    with sigterm_as_interrupt():
        server = serve(target.env, **{**grouped_keywords(keywords, serve), **own})
        try:
            for line in way.lines(server, arguments):
                say(line)
            say("Ctrl-C stops.")
            if arguments.exit_on_eof:
                stop_on_eof(server.stop)
            server.wait()
        except KeyboardInterrupt:
            pass
        finally:
            server.stop()
    return OK


def announce(
    server: Server,
    ids: Sequence[str],
    kind: str,
    credentials: Mapping[str, str] | None = None,
    more: Sequence[str] = (),
) -> None:
    """Print where the environments are, and how to connect.

    Args:
        server: What serves them.
        ids: What the command line named.
        kind: As for `connecting_lines`.
        credentials: What a client gives beside the URL.
        more: Further lines.
    """
    say(f"{', '.join(ids)} {'is' if len(ids) == 1 else 'are'}{SERVED_AT}{' '.join(server.urls)}")
    say("Connect from Python:")
    # The URLs of one server lead to the same worlds; those of several processes are joined as one vector.
    urls = server.urls if isinstance(server, ServerGroup) else [server.url]
    watched = server.web_url is not None
    for line in connecting_lines(urls, server.env_ids, kind, credentials or {}, watched=watched):
        say(f"  {line}")
    if kind == "match":
        say(f"In a terminal: gymnasium-bridge play {shlex.quote(joining_url(server.url))}")
    if server.web_url is not None:
        asks = "#" not in server.web_url and bool({"token", "token_file"} & set(credentials or {}))
        say(f"In a browser: {server.web_url}{' (it asks for the token)' if asks else ''}")
    for line in more:
        say(line)
    say("Ctrl-C stops.")


def client_credentials(keywords: Mapping[str, Any]) -> dict[str, str]:
    """Return what a client needs beside the URL: keywords of `make_remote`, as they stand in Python.

    Paths are those of this machine. `gymnasium-bridge cert` puts the authority beside the certificate, and the
    client's own certificate beside the authority.
    """
    found: dict[str, str] = {}
    if "token_file" in keywords:
        found["token_file"] = repr(keywords["token_file"])
    elif "token" in keywords or os.environ.get(TOKEN_VARIABLE):
        found["token"] = "…"
    tls: dict[str, str] = {}
    if "tls_certificate" in keywords:
        authority = Path(keywords["tls_certificate"]).with_name("ca.pem")
        if authority.exists():
            tls["ca"] = repr(str(authority))
    if "tls_client_ca" in keywords:
        own = Path(keywords["tls_client_ca"]).with_name("client.pem")
        tls["certificate"] = repr(str(own)) if own.exists() else "…"
        tls["key"] = repr(str(own.with_suffix(".key"))) if own.exists() else "…"
    if tls:
        found["tls"] = f"TLS({', '.join(f'{name}={value}' for name, value in tls.items())})"
    return found

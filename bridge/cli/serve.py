"""`gymnasium-bridge serve`: publish environments until Ctrl-C or SIGTERM.

Its options are the keywords of `serve_gym` and, for environments with several agents, of `serve_parallel`.
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

from bridge.cli.hints import as_python, connecting_lines, joining_url
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
"""The text between the environment and its URLs in the first line of output. Spaces separate the URLs."""
_OTHER_WAYS = {"perlert": "bridge.perlert.serve_command"}
"""The features that serve in another way than gRPC, each with the module of its `OtherWay`."""
_READ: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
_PATH = "str | None"
"""The annotation of options that name a file or folder."""
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
"""The options in `--help`, in order."""
_NAMED = {"protocols": "--protocol", "observers": "--observer", "messages": "--message"}
"""The keywords that are lists of names, with the option that is given once for each name."""
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
        allow_abbrev=False,  # otherwise `--prot 5`, a misspelled port, would name a protocol
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
    """A way to serve without a `Server`, such as PERLERT: a module of that feature."""

    OPTION: str
    """The option that chooses this way and gives its port, as an attribute of the parsed arguments."""
    OTHER_OPTIONS: Sequence[str]
    """The options that require `OPTION`."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add all of these options, with None as the default."""

    def function(self) -> Callable[..., Any]:
        """Return the function that serves: it takes an environment and keywords, and returns an object with `stop`."""

    def keywords(
        self, arguments: argparse.Namespace, env: Any, read_key: Callable[[Path | None], bytes | None]
    ) -> dict[str, Any]:
        """Return the function's keywords for the given options."""

    def lines(self, server: Any, arguments: argparse.Namespace) -> list[str]:
        """Return the lines to print once the server runs."""


def _other_ways() -> list[OtherWay]:
    """Import and return the other ways of this installation."""
    ways: list[Any] = [importlib.import_module(place) for name, place in _OTHER_WAYS.items() if has_feature(name)]
    return ways


def _lacking_options() -> dict[str, str]:
    """Return the prefixes of options whose feature this installation lacks, each with the feature."""
    places = {keyword: place for keyword, place in GROUPS.items() if isinstance(place, str)}
    features = {keyword: place.split(".")[1] for keyword, place in places.items()} | {
        name: name for name in _OTHER_WAYS
    }
    return {f"--{keyword}": name for keyword, name in features.items() if not has_feature(name)}


def add_sections(parser: argparse.ArgumentParser, options: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Add options to a parser, grouped by the sections of the help."""
    given = dict(options)
    for title, flags in sections(given).items():
        section = parser.add_argument_group(title)
        for flag in flags:
            section.add_argument(flag, **given[flag])


def sections(flags: Iterable[str]) -> dict[str, list[str]]:
    """Return flags by the title of their section, without empty sections."""
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
    """Return the option of a keyword."""
    return _NAMED.get(keyword, f"--{keyword.replace('_', '-')}")


def serve_options() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the keywords of `serve_gym`, and further ones of `serve_parallel`, as options; see `keyword_options`."""
    return keyword_options(serve_gym, serve_parallel)


def keyword_options(*functions: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the keywords of functions as options.

    A keyword that takes a dataclass, such as `Limits`, gives an option for each field. The help text comes from the
    docstring of the first function with the keyword. Keywords without a form on a command line, such as callables, are
    left out.

    Args:
        functions: The functions that the command line may call.

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
    """Return the arguments of `add_argument` for a keyword; None: it has no form on a command line."""
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
    """Return the text of a keyword's docstring for a command line: with flags, and without code."""
    flags = {other.field: name for name, other in known.items() if other.group == keyword.group and other.field}
    said = {name: name for name, other in known.items() if _plain_type(other.annotation)}
    flags = {name: flag_of(flat) for name, flat in {**flags, **said}.items()}
    groups = {group.__name__: flat_names(name, group) for name, group in group_classes(GROUPS).items()}
    fields = {
        f"{title}({field.name}=…)": flag_of(flat) for title, names in groups.items() for flat, field in names.items()
    }
    flags = {**flags, **fields, **{f"{name}=True": flag for name, flag in flags.items()}}
    text = re.sub(r"`([^`]*)`", lambda found: flags.get(found.group(1), found.group(1)), keyword.text)
    # None as the default means that the option is left out; otherwise the user writes the word none.
    none = "without it: " if keyword.default is None else "none: "
    text = re.sub(r"[;.] None: ", f"; {none}", text)
    text = re.sub(r"[;.] False: ", "; without it: ", text).removesuffix(".").replace("%", "%%")
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


@dataclasses.dataclass(frozen=True)
class _Keyword:
    """A keyword of a function, as an option of the command line."""

    annotation: str
    default: Any
    text: str
    """Its description, from the docstring."""
    group: str = ""
    """The keyword of the dataclass that it is a field of; empty: it is a keyword of the function."""
    field: str = ""
    """The name of that field."""


def _keywords(function: Callable[..., Any]) -> dict[str, _Keyword]:
    """Return the keywords of a function by their names on the command line."""
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
    """Yield the fields of a dataclass that groups keywords, without the fields of `TLS` for clients."""
    group = group_classes(GROUPS).get(keyword)
    if group is None:  # this installation lacks its feature
        return
    texts = _keyword_texts(inspect.getdoc(group) or "")
    for flat, field in flat_names(keyword, group).items():
        if flat not in ("tls_ca", "tls_server_name"):
            kind = _PATH if keyword == "tls" or flat == "record" else str(field.type)
            default = None if field.default is dataclasses.MISSING else field.default
            yield flat, _Keyword(kind, default, texts[field.name], keyword, field.name)


def grouped_keywords(keywords: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keywords of a function from those of the command line, with fields put into their dataclasses."""
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
    """Return the type of an annotation, such as `int | None`, for a command line; "": it has no such form."""
    members = [member.strip().partition("[")[0] for member in annotation.split("|")]
    return next((member for member in members if member in ("bool", "int", "float", "str", "Mapping")), "")


def _or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function that reads like `kind`, and reads the word none as None."""

    def read(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    read.__name__ = kind.__name__  # argparse shows this name in its errors
    return read


def _keyword_texts(doc: str) -> dict[str, str]:
    """Return the texts of the keywords in a docstring's section `Args:`."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", doc, re.MULTILINE | re.DOTALL)
    entries = re.findall(r"^    (\w+): (.*(?:\n(?!    \w+: ).*)*)", section.group(1) if section else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def read_value(text: str) -> Any:
    """Return the value of a Python literal, such as `0,0.5` or `{'gripper': 1}`; otherwise return the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def read_pairs(pairs: Sequence[str], option: str = "--env-kwargs") -> dict[str, Any]:
    """Read KEY=VALUE pairs. A value is read as a Python literal if possible, otherwise as text.

    Raises:
        SettingError: A pair has no `=`, or a key is not an identifier.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise SettingError(f"expected {option} to be KEY=VALUE, e.g. gravity=9.8, got {pair!r}")
        found[key] = read_value(text)
    return found


def _read_named_pairs(pairs: Sequence[str], option: str) -> dict[str, Any]:
    """Read NAME.KEY=VALUE pairs with values like those of `read_pairs`; return a dict for each name."""
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
    if target.several_agents and "default_action" in keywords:  # `serve_parallel` takes a function
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
    """Serve in another way until a signal, with its own options and those that it shares with `serve_gym`."""
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
    """Print the URLs of the environments, and how to connect.

    Args:
        server: The server.
        ids: The environments as given on the command line.
        kind: See `connecting_lines`.
        credentials: The further keywords of a client, as Python text.
        more: Further lines.
    """
    say(f"{', '.join(ids)} {'is' if len(ids) == 1 else 'are'}{SERVED_AT}{' '.join(server.urls)}")
    say("Connect from Python:")
    # All URLs of one server lead to the same worlds, so show one. Processes are joined as one vector environment.
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
    """Return the keywords of `make_remote` that a client needs beside the URL, as Python text.

    Paths are paths on this machine. `gymnasium-bridge cert` writes the CA certificate beside the server's certificate,
    and the client's certificate beside the CA.
    """
    found: dict[str, str] = {}
    if "token_file" in keywords:
        found["token_file"] = as_python(keywords["token_file"])
    elif "token" in keywords or os.environ.get(TOKEN_VARIABLE):
        found["token"] = "…"
    tls: dict[str, str] = {}
    if "tls_certificate" in keywords:
        authority = Path(keywords["tls_certificate"]).with_name("ca.pem")
        if authority.exists():
            tls["ca"] = as_python(str(authority))
    if "tls_client_ca" in keywords:
        own = Path(keywords["tls_client_ca"]).with_name("client.pem")
        tls["certificate"] = as_python(str(own)) if own.exists() else "…"
        tls["key"] = as_python(str(own.with_suffix(".key"))) if own.exists() else "…"
    if tls:
        found["tls"] = f"TLS({', '.join(f'{name}={value}' for name, value in tls.items())})"
    return found

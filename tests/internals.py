"""Count what tests know of the inside: `python -m tests.internals` (`--help` for the options).

A rebuild of a module should change its own tests and no others. So four things are counted in the files of `tests/`:
access to private attributes, imports of internal modules by the tests of other modules, the imports of `HELPERS`, which
know internals so that tests need not, and patches of internals. The ceilings in `tests/internals.txt` only go down:
`test_internals.py` fails when a count is above its ceiling.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CEILINGS = ROOT / "tests" / "internals.txt"
KINDS = ("private", "imports", "helpers", "patches")
IMPORTS = KINDS[1:3]

PUBLIC_MODULES = ("bridge", "bridge.cli", "bridge.perlert", "bridge.recording")
"""Modules that users import, not counting what is in their folders: `bridge.cli` is the command's entry point."""
PUBLIC_PACKAGES = ("bridge.errors", "bridge.pb", "bridge.testing", "bridge.wrappers")
"""Packages that users import, with all that is in them. What the reference or an example names is public too."""

VOCABULARY = {
    "bridge.core.worlds.environment": "what worlds and environments tell each other: facts, jobs, transitions",
    "bridge.core.worlds.scheduling": "results that are awaited, as a runtime gives them that a test makes",
    "bridge.core.encoding.names": "the names of observations, actions and extensions on the wire",
    "bridge.core.encoding.tensors": "arrays to and from tensors: how a test that speaks raw messages writes them",
    "bridge.core.encoding.values": "values to and from bytes: how such a test reads an info",
    "bridge.core.encoding.properties": "the names and values of the documented properties",
    "bridge.perlert.protocol.packet": "PERLERT's packets, as fields and as bytes",
    "bridge.perlert.protocol.profile": "the values that its specs have on the wire",
    "bridge.core.rounds": "the states of players who gather and play, of a lobby and of a match",
    "bridge.core.transport.frames": "HTTP/2's frames and events",
    "bridge.core.transport.credentials": "the variable that holds a token, and how a secret is written",
}
"""Internal modules that any test may import, each with the reason: names and values as they are on the wire."""

HELPERS = {
    "tests/inside.py": (
        "what is behind the public objects of a server and a client",
        """cli.program core.client.slots core.client.wire.connection core.client.world.session_states
        core.client.wire.poller core.client.envs.vector_env
        core.server.limits
        core.server.connection core.server.connections core.server.grpc_server
        core.server.grpc_services core.server.http_protocol core.server.serving
        core.transport.address
        core.client.wire.keepalive recording.library recording.replay_world web.watching.takeovers""",
    ),
    "tests/support.py": (
        "worlds, registries and sessions without a server; spaces as tensors, with any Gymnasium",
        """core.encoding.space_json core.encoding.spaces core.gymnasium_versions
        core.server.registry core.server.session core.worlds.base
        core.worlds.multi_agent.joint_steps core.worlds.sources.parallel_source
        core.worlds.realtime_options core.worlds.sources.source""",
    ),
    "tests/realtime_tools.py": (
        "remotes and sessions joined by a link in virtual time",
        """core.client.wire.connection core.client.world.session_states core.client.wire.poller core.client.world.remote
        core.client.world.steps
        core.client.world.world_request
        core.worlds.world""",
    ),
    "tests/far_network.py": (
        "the same with the second stream of an agent, and timers",
        """core.client.wire.poller core.client.world.remote core.client.world.session_states
        core.client.world.world_request""",
    ),
    "tests/perlert_simulation.py": (
        "PERLERT's server and its clients joined by a link",
        """perlert.protocol.guard perlert.host perlert.player perlert.player_run
        perlert.perlert_server""",
    ),
    "tests/recording_tape.py": (
        "rows of a made-up environment",
        "recording.facts recording.rows recording.tape",
    ),
    "tests/core/client/test_client_session.py": (
        "what the session takes and gives: who wants which world, events, extensions",
        "core.client.world.session_states core.client.world.extensions core.client.world.world_request",
    ),
    "tests/core/client/policy_fleet.py": (
        "the policy and its tables, which it plays on fleets of servers",
        "core.client.slots.endpoint core.client.slots.policy core.client.slots.slot",
    ),
    "tests/core/client/test_pool.py": ("the events that a pool hands out", "core.client.world.session_states"),
    "tests/core/transport/test_http2.py": (
        "a call of gRPC, by which HTTP/2 is used",
        "core.client.wire.grpc_client",
    ),
    "tests/http2_tools.py": ("the framing of the messages of a stream", "core.transport.messages"),
    "tests/states/right_or_refused.py": (
        "what copies environments, without a server",
        "states.check states.graph states.history states.replay",
    ),
    "tests/core/client/test_poller.py": (
        "a server of HTTP/2 without sockets",
        "core.transport.http2",
    ),
    "tests/core/transport/test_token.py": ("the address that a token is shown to", "core.transport.address"),
    "tests/perlert/lobbies.py": (
        "lobbies in virtual time, and the run that they hand their players to",
        "perlert.lobby perlert.rollout",
    ),
    "tests/core/server/sessions/peers.py": ("a session, brought to each of its states", "core.server.session"),
    "tests/perlert/test_draft.py": (
        "the draft's example session, played on the machines without input or output",
        "perlert.lobby perlert.player perlert.rollout",
    ),
    "tests/project/test_state_charts.py": (
        "the tables that the pages draw",
        "core.client.world.session_states perlert.lobby perlert.player core.server.session",
    ),
    "tests/core/test_access.py": (
        "the keywords that ways to connect and to listen share, which users give one by one",
        "core.server.auth",
    ),
    "tests/project/test_protocol_docs.py": ("the end of a stream in the server's table", "core.server.session"),
    "tests/core/server/test_session_fast.py": (
        "the codec with which our client writes Steps",
        "core.encoding.step_codec",
    ),
    "tests/ray/test_ray.py": (
        "the names of a fleet's actors, and the table that reads it",
        "fleet.ray_actors fleet.top",
    ),
    "tests/ends/test_realtime_multi_agent.py": (
        "what stands in for an agent that does nothing",
        "core.worlds.group",
    ),
    "tests/versions/play.py": ("exact spaces as text, compared between versions", "core.encoding.space_json"),
}
"""For files that must know further internals the reason, and the modules, without `bridge`.

The first six are helpers: each is the one place that knows what many tests need.
"""

THIRD_PARTY = {
    ("tests/peers.py", "_stream"): "dm_env_rpc's connection",
    ("tests/peers.py", "_requests"): "dm_env_rpc's connection",
    ("tests/ends/test_public_client.py", "_dm_env_rpc_specs"): "dm_env_rpc's adaptor",
    ("tests/project/test_readme.py", "_actions"): "argparse's parser",
    ("tests/ends/test_realtime.py", "_add_info"): "Gymnasium's VectorEnv",
    ("tests/core/client/test_vector_contract.py", "_add_info"): "Gymnasium's VectorEnv",
}
"""Private attributes of other projects' objects, which no rebuild of ours changes."""

NAMEDTUPLE = {"_asdict", "_fields", "_field_defaults", "_make", "_replace"}
"""Public names of Python's named tuples, in spite of their underscore."""


class Finding(NamedTuple):
    """One use of an internal.

    Attributes:
        kind: One of `KINDS`.
        file: The file, relative to the project.
        line: Its line.
        what: The attribute, module or target.
    """

    kind: str
    file: str
    line: int
    what: str


@functools.cache
def modules() -> frozenset[str]:
    """The dotted names of all modules and packages of `bridge`."""
    files = [*ROOT.glob("bridge/**/*.py"), *ROOT.glob("wrappers/**/*.py")]
    names = (".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files)
    return frozenset(re.sub(r"^wrappers\b", "bridge.wrappers", name) for name in names)


@functools.cache
def documented() -> frozenset[str]:
    """The modules and packages whose names `docs/reference.in.md` lists, or that an example imports."""
    texts = (file.read_text(encoding="utf-8") for file in ROOT.glob("docs/reference.in.md"))
    names = itertools.chain.from_iterable(re.findall(r"^::: (\S+)", text, re.MULTILINE) for text in texts)
    programs = (file.read_text(encoding="utf-8") for file in ROOT.glob("examples/**/*.py"))
    used = itertools.chain.from_iterable(re.findall(r"^from (bridge\.\S+)", text, re.MULTILINE) for text in programs)
    return frozenset(module_of(name) for name in (*names, *used))


def module_of(name: str) -> str:
    """The longest beginning of a dotted name that is a module of ours, or ''."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name


def is_public(module: str) -> bool:
    """True for a module that users import by its name."""
    if module in {*PUBLIC_MODULES, *documented()}:
        return True
    return any(module == name or module.startswith(f"{name}.") for name in PUBLIC_PACKAGES)


def is_own(file: str, module: str) -> bool:
    """True if a test file is that of the module: `test_lobby.py` or `test_perlert_lobby.py` of `bridge.perlert.lobby`.

    The name may leave out folders, but not the module's own name; `test_session_fast.py` is a second file of `session`.
    """
    stem = re.sub(r"^test_", "", Path(file).stem)
    if not Path(file).name.startswith("test_") or module.count(".") == 0:
        return False
    *folders, last = module.split(".")[1:]
    for count in range(len(folders) + 1):
        for chosen in itertools.combinations(folders, count):
            name = "_".join([*chosen, last])
            if stem == name or stem.startswith(f"{name}_"):
                return True
    return False


class Reader(ast.NodeVisitor):
    """Collects the findings of one file, or of a program that the file holds in a string."""

    def __init__(self, file: str, first_line: int = 0) -> None:
        self.file, self.first_line = file, first_line
        self.names: dict[str, str] = {}
        """The full name of each name that is imported, or that is a class of the file itself."""
        self.findings: list[Finding] = []

    def add(self, kind: str, node: ast.AST, what: str) -> None:
        line = self.first_line + getattr(node, "lineno", 0)
        self.findings.append(Finding(kind, self.file, line, what))

    def full_name(self, node: ast.AST) -> str:
        """The dotted name of an expression whose root is an import; '' where the root is something else."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, "")
        if isinstance(node, ast.Attribute) and (base := self.full_name(node.value)):
            return f"{base}.{node.attr}"
        return ""

    def is_foreign(self, node: ast.AST) -> bool:
        """True for an attribute of the standard library or of a third party's module."""
        name = self.full_name(node)
        return bool(name) and name.partition(".")[0] not in ("bridge", "tests", "benchmarks", "examples")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names[node.name] = f"tests.{node.name}"
        self.generic_visit(node)

    def imported(self, node: ast.AST, name: str) -> None:
        """Count the import of a dotted name, which may be that of something inside a module."""
        module = module_of(name)
        if not module or module in VOCABULARY or is_public(module) or is_own(self.file, module):
            return
        known = module.removeprefix("bridge.") in HELPERS.get(self.file, ("", ""))[1].split()
        self.add("helpers" if known else "imports", node, module)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.names[alias.asname or alias.name.partition(".")[0]] = (
                alias.name if alias.asname else alias.name.partition(".")[0]
            )
            self.imported(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        found = set()
        for alias in node.names:
            self.names[alias.asname or alias.name] = f"{base}.{alias.name}"
            found.add(module_of(f"{base}.{alias.name}"))
            if alias.name.startswith("_") and base.partition(".")[0] == "bridge" and not alias.name.endswith("__"):
                self.add("private", node, alias.name)
        for module in sorted(found):
            self.imported(node, module)

    def private(self, node: ast.AST, owner: ast.AST, name: str) -> None:
        """Count an attribute if it is private, and not one that the class defines for itself."""
        if not name.startswith("_") or name.endswith("__") or name in NAMEDTUPLE:
            return
        if isinstance(owner, ast.Name) and owner.id in ("self", "cls"):
            return
        if not self.is_foreign(owner) and (self.file, name) not in THIRD_PARTY:
            self.add("private", node, f".{name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.private(node, node.value, node.attr)
        # Assigned to without `monkeypatch`: a patch all the same, unless it is an object's and not a module's.
        if isinstance(node.ctx, (ast.Store, ast.Del)) and module_of(self.full_name(node.value)):
            self.add("patches", node, f"{self.full_name(node.value)}.{node.attr}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        name = node.args[1] if len(node.args) > 1 else None
        text = name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""
        if function in ("getattr", "setattr", "delattr", "hasattr") and text:
            self.private(node, node.args[0], text)
        of_patch = function in ("patch", "object") and "patch" in ast.unparse(node.func)
        if node.args and (function in ("setattr", "delattr", "setitem", "delitem") or of_patch):
            self.patched(node, node.args[0], text)
        self.generic_visit(node)

    def patched(self, node: ast.Call, target: ast.expr, name: str) -> None:
        """Count a patch, unless its target is known to be another's (`sys.stdin`, "socket.socket") or a test's own."""
        if isinstance(target, ast.Constant) and isinstance(target.value, str):
            if target.value.startswith("bridge."):
                self.add("patches", node, target.value)
                self.imported(node, target.value)
                if target.value.rpartition(".")[2].startswith("_"):
                    self.add("private", node, f".{target.value.rpartition('.')[2]}")
        elif isinstance(target, ast.JoinedStr) and ast.unparse(target)[2:].startswith("bridge."):
            self.add("patches", node, ast.unparse(target))
            self.imported(node, ast.unparse(target)[2:].partition("{")[0].rstrip("."))
        elif isinstance(node.func, ast.Attribute) and not (
            self.is_foreign(target) or self.full_name(target).startswith("tests.")
        ):
            self.add("patches", node, f"{ast.unparse(target)}.{name}")

    def visit_Constant(self, node: ast.Constant) -> None:
        """Read a program in a string, which a test runs in a process of its own."""
        if isinstance(node.value, str) and re.search(r"\bimport\b[^\n]*\bbridge\b|from bridge\b", node.value):
            try:
                tree = ast.parse(textwrap.dedent(node.value))
            except SyntaxError:
                return
            inner = Reader(self.file, self.first_line + node.lineno - 1)
            inner.visit(tree)
            self.findings += inner.findings

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Read a program in an f-string, with a name in place of each value."""
        parts = [part.value if isinstance(part, ast.Constant) else "value" for part in node.values]
        self.visit_Constant(ast.Constant("".join(map(str, parts)), lineno=node.lineno))
        self.generic_visit(node)


@functools.cache
def find() -> tuple[Finding, ...]:
    """All findings in the files under `tests/`, in the order of files and lines."""
    found: list[Finding] = []
    for path in sorted(ROOT.glob("tests/**/*.py")):
        if path.name == "test_internals.py":
            continue  # its examples are programs in strings
        reader = Reader(str(path.relative_to(ROOT)))
        reader.visit(ast.parse(path.read_text(encoding="utf-8")))
        # A module that a file imports twice counts once; so do the strings of which an f-string is made.
        found += sorted({(each.what if each.kind in IMPORTS else each): each for each in reader.findings}.values())
    return tuple(found)


def counts(findings: Iterable[Finding]) -> dict[str, int]:
    """The number of findings of each kind."""
    return {kind: sum(found.kind == kind for found in findings) for kind in KINDS}


def ceilings() -> dict[str, int]:
    """The numbers in `tests/internals.txt`: a kind and its number in each line."""
    lines = (line.split() for line in CEILINGS.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return {kind: int(number) for kind, number in lines}


def main() -> None:
    """Print the counts and the findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.internals", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, help="list the findings of one kind, with their lines")
    parser.add_argument("--file", help="list the findings of files whose name contains this")
    arguments = parser.parse_args()
    findings = [found for found in find() if not arguments.file or arguments.file in found.file]
    if arguments.kind or arguments.file:
        for found in findings:
            if found.kind == (arguments.kind or found.kind):
                print(f"{found.file}:{found.line}: {found.kind} {found.what}")
    else:
        rows = {file: counts([found for found in findings if found.file == file]) for _, file, *_ in findings}
        print(f"{'':40}" + "".join(f"{kind:>9}" for kind in KINDS))
        for file, row in sorted(rows.items(), key=lambda item: -sum(item[1].values())):
            print(f"{file:40}" + "".join(f"{row[kind] or '':>9}" for kind in KINDS))
    print(*(f"{kind} {number}" for kind, number in counts(findings).items()), sep=", ")
    foreign = Counter(found.what for found in findings if found.kind in IMPORTS)
    print(f"{len({found.file for found in findings})} files; {len(foreign)} modules are imported by tests of others")


if __name__ == "__main__":
    main()

"""The installed package: names, the wheel, one direction of imports, two libraries in one process."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import types
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import yaml

import bridge
import bridge.wrappers
from tests.places import ROOT
from tests.project.modules import MODULES, source_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OURS = [name for name in MODULES if not name.startswith("bridge.pb.") and not name.endswith("__main__")]
# The version is no more than a name, `__main__` modules no more than a call.
WITHOUT_ALL = {"bridge.pb", "bridge.version"}
# Names that a module holds for another one.
HANDED_ON = {
    "bridge.cli.check": {"register"},
    "bridge.cli.lobby": {"register"},
    "bridge.testing.clock": {"Clock", "MonotonicClock"},
}
# What the tests' own extra does not bring: what an error of an import names where it is missing, a package or an extra.
EXTRAS_WITHOUT_TESTS_HERE = {"gymnasium-bridge[ray]", "stable_baselines3"}


def imported(name: str) -> types.ModuleType:
    """Import a module of ours, or skip the test where its extra is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name in EXTRAS_WITHOUT_TESTS_HERE:
            pytest.skip(f"{name} needs {error.name}, an extra")
        raise


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(source_of(name).read_text(encoding="utf-8"))


def test_every_module_is_seen():
    assert len(OURS) > 30
    assert {
        "bridge.core.encoding.tensors",
        "bridge.core.server.session",
        "bridge.core.worlds.world",
        "bridge.wrappers.blocking_reset",
    } <= set(OURS)


# Names


def defined_here(tree: ast.Module) -> set[str]:
    """The public names that a module makes at its top: classes, functions, constants with a docstring."""
    names: set[str] = set()
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if documented and isinstance(target, ast.Name))
    return {name for name in names if not name.startswith("_")}


def top_names(tree: ast.Module) -> set[str]:
    """Every name that a module makes itself at its top."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


@functools.cache
def taken_names() -> dict[str, set[str]]:
    """The names that modules of ours import from each module."""
    taken: dict[str, set[str]] = {}
    for other in OURS:
        for node in ast.walk(tree_of(other)):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                taken.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return taken


# Each holds for all modules in one test: to import and to parse them takes a second in each process that does it.


def problems_of(modules: Iterable[str], check: Callable[[str], None]) -> list[str]:
    """Return what a check says of the modules that fail it; one whose extra is not installed is left out."""
    found = []
    for name in modules:
        try:
            check(name)
        except AssertionError as error:
            found.append(f"{name}: {error}")
        except pytest.skip.Exception:
            continue
    return found


def check_names_in_all(name):
    module = imported(name)
    doc = ast.get_docstring(tree_of(name))
    assert doc, f"{name} says nothing of itself"
    if not hasattr(module, "__all__"):
        # A package that only holds modules.
        assert source_of(name).name == "__init__.py"
        assert not defined_here(tree_of(name))
        return
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        assert hasattr(module, public), f"{name}.__all__ has {public!r}, which is not there"
        value = getattr(module, public)
        assert not isinstance(value, types.ModuleType) or name == "bridge"
    if source_of(name).name != "__init__.py":
        assert set(module.__all__) - HANDED_ON.get(name, set()) <= top_names(tree_of(name)), "a name of another module"


@pytest.mark.slow
def test_the_names_in_all_are_there_and_once():
    assert problems_of((name for name in OURS if name not in WITHOUT_ALL), check_names_in_all) == []


def check_public_classes(name):
    tree = tree_of(name)
    module = imported(name)
    public = set(getattr(module, "__all__", ()))
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}
    assert not (classes & taken_names().get(name, set())) - public, "a class that others import is not in __all__"


def test_all_holds_every_public_class_that_the_module_documents():
    assert problems_of((name for name in OURS if name not in WITHOUT_ALL), check_public_classes) == []


def test_no_two_classes_have_the_same_name():
    classes = [node.name for name in OURS for node in ast.walk(tree_of(name)) if isinstance(node, ast.ClassDef)]
    assert [name for name, count in Counter(classes).items() if count > 1] == []


def test_the_public_names_of_the_package_do_what_they_say():
    assert {"make_remote", "make_vec_remote", "serve_gym", "Server", "RemoteEnv", "RemoteVectorEnv"} <= set(
        bridge.__all__
    )
    namespace: dict[str, object] = {}
    exec("from bridge import *", namespace)
    assert set(bridge.__all__) <= set(namespace)
    imported("bridge.wrappers.sb3")  # the star asks for it
    namespace = {}
    exec("from bridge.wrappers import *", namespace)
    assert set(bridge.wrappers.__all__) <= set(namespace)


@pytest.mark.parametrize("name", ["bridge", "bridge.perlert", "bridge.testing", "bridge.wrappers"])
def test_dir_shows_the_public_names_and_nothing_else(name):
    module = imported(name)
    modules = {public for public in dir(module) if isinstance(getattr(module, public), types.ModuleType)}
    assert modules == ({"errors", "perlert", "recording", "testing", "wrappers"} if name == "bridge" else set())
    assert set(dir(module)) - modules == set(module.__all__)
    with pytest.raises(AttributeError, match=rf"module '{name}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018


@pytest.mark.parametrize("name", ["bridge.perlert", "bridge.testing", "bridge.wrappers"])
def test_a_package_imports_its_names_when_they_are_asked_for(name):
    code = (
        f"import sys, {name} as package; print(sorted({{'gymnasium', 'numpy', 'grpc'}} & set(sys.modules))); "
        "print(all(getattr(package, name) for name in package.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["[]", "True"]


# The direction of imports

SANS_IO = {"grpc", "socket", "threading", "asyncio", "time"}


@functools.cache
def imports_of(name: str) -> set[str]:
    """The modules that a module names in an import, relative ones resolved; inside of functions too."""
    package = name if source_of(name).name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in MODULES)
    return found


@pytest.mark.slow  # it reads all sources
def test_no_module_imports_the_public_library_of_the_protocol():
    """Its messages and ours have the same names: both can be in one process, but nothing of ours needs it."""
    assert [name for name in OURS for found in imports_of(name) if found.split(".")[0] == "dm_env_rpc"] == []


@pytest.mark.parametrize(
    "name",
    [
        "bridge.core.server.session",
        "bridge.perlert.protocol.packet",
        "bridge.perlert.lobby",
        "bridge.perlert.rollout",
        "bridge.core.rounds",
        "bridge.web.watching.match",
    ],
)
def test_protocol_logic_names_no_io_no_thread_and_no_clock(name):
    assert name in OURS
    assert not {found.split(".")[0] for found in imports_of(name)} & SANS_IO


def test_only_the_transports_touch_the_network():
    ends = [name for name in OURS if ".server" in name or ".client" in name]
    users = [name for name in ends if "grpc" in {found.split(".")[0] for found in imports_of(name)}]
    assert users
    assert [name for name in users if "transport" not in name] == []


def test_importing_the_package_imports_no_extra_and_no_test_dependency():
    code = (
        "import sys; from bridge import make_remote, make_vec_remote, serve_gym, register_space\n"
        "heavy = {'torch', 'ray', 'rich', 'matplotlib', 'stable_baselines3', 'pettingzoo', 'hypothesis', "
        "'pytest', 'dm_env_rpc', 'dm_env', 'bridge.testing', 'bridge.wrappers'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_the_package_alone_takes_no_gymnasium_and_registers_once_it_is_imported():
    code = (
        "import sys, bridge.cli; slow = {'gymnasium', 'numpy', 'google.protobuf', 'importlib.metadata', 'tempfile'}; "
        "print(sorted(slow & set(sys.modules))); "
        "import gymnasium; print(gymnasium.spec('bridge/Remote-v0').id); "
        "print(bridge.errors.__name__, bridge.testing.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["[]", "bridge/Remote-v0", "bridge.errors bridge.testing"]


ONE_PROCESS = """
import sys
from bridge import make_remote, make_vec_remote, serve_gym

with serve_gym("CartPole-v1") as server:
    envs = make_vec_remote(server.url, num_envs=2)
    env = make_remote(server.url)
    for each in (envs, env):
        each.reset(seed=0)
        each.step(each.action_space.sample())
        each.close()
print(*sorted(name for name in sys.modules if name.split(".")[0] == "bridge"))
"""
MOST_MODULES = 120
"""The most modules of `bridge` that a server and its clients in one process load."""
LOADED_NOT_YET: set[str] = set()
"""Packages that they load without a use for them: to be mended, so none is added."""


def test_a_server_in_lock_step_and_its_clients_load_few_modules_and_none_of_what_they_do_not_use():
    done = subprocess.run([sys.executable, "-c", ONE_PROCESS], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.split()
    unused = {"bridge.core.client.realtime", "bridge.core.worlds.isolated", "bridge.core.worlds.realtime"}
    unused |= {f"bridge.{name}" for name in ("dial", "fleet", "openenv", "perlert", "policies", "recording", "testing")}
    unused |= {"bridge.cli", "bridge.core.worlds.multi_agent", "bridge.web", "bridge.wrappers"}
    assert unused.intersection(loaded) == LOADED_NOT_YET
    assert len(loaded) <= MOST_MODULES


def test_a_name_that_the_package_does_not_have_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'bridge' has no attribute 'nothing'"):
        _ = bridge.nothing
    assert set(bridge.__all__) <= set(dir(bridge))
    assert "importlib" not in dir(bridge)


@pytest.mark.parametrize("name", ["SB3VecEnv", "SB3ReportCallback"])
def test_what_needs_stable_baselines3_names_the_extra_without_it(name):
    code = (
        "import sys; sys.modules['stable_baselines3'] = None\n"  # as where it is not installed
        f"try:\n    from bridge.wrappers import {name}\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"{name} needs Stable-Baselines3")
    assert "pip install -e '.[sb3]'" in done.stdout


def test_what_to_install_is_worded_in_one_place():
    worded = "pip install -e '.["
    assert [name for name in OURS if worded in source_of(name).read_text("utf-8")] == ["bridge.core.extras"]


@pytest.mark.slow  # it reads all sources
def test_every_extra_that_an_error_names_is_one():
    asked = {
        node.args[-1].value
        for name in OURS
        if name != "bridge.core.extras"
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ("install_command", "needed")
    }
    listed = importlib.metadata.metadata("gymnasium-bridge").get_all("Provides-Extra")
    assert {"web", "ops", "zstd"} <= asked <= set(listed)


def test_the_wrappers_folder_is_not_imported_under_its_own_name():
    done = subprocess.run(
        [sys.executable, "-c", "import wrappers"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "imported as bridge.wrappers, not as wrappers" in done.stderr


# Two libraries in one process

EXCHANGE = """
import numpy as np
from bridge.pb import dm_env_rpc_pb2 as ours, properties_pb2, bridge_pb2
from dm_env_rpc.v1 import dm_env_rpc_pb2 as theirs, tensor_utils
from dm_env_rpc.v1.extensions import properties_pb2 as their_properties
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
tensor = theirs.Tensor.FromString(pack_tensor(np.arange(3)).SerializeToString())
assert tensor_utils.unpack_tensor(tensor).tolist() == [0, 1, 2]
assert unpack_tensor(ours.Tensor.FromString(tensor_utils.pack_tensor("x").SerializeToString()))[()] == "x"
for name in ("EnvironmentRequest", "EnvironmentResponse"):
    mine = getattr(ours, name).DESCRIPTOR
    other = getattr(theirs, name).DESCRIPTOR
    assert mine.full_name != other.full_name
    assert {f.number: f.name for f in mine.fields} == {f.number: f.name for f in other.fields}
request = theirs.EnvironmentRequest(step=theirs.StepRequest(requested_observations=[1, 2]))
assert list(ours.EnvironmentRequest.FromString(request.SerializeToString()).step.requested_observations) == [1, 2]
print("exchanged")
"""


@pytest.mark.parametrize(
    "order",
    [
        "import bridge\nimport dm_env_rpc.v1.connection",
        "import dm_env_rpc.v1.connection\nimport bridge",
        "import bridge.pb.dm_env_rpc_pb2\nimport dm_env_rpc.v1.dm_env_rpc_pb2",
        "import dm_env_rpc.v1.dm_env_rpc_pb2\nimport bridge.pb.dm_env_rpc_pb2",
    ],
    ids=["bridge first", "dm_env_rpc first", "our messages first", "their messages first"],
)
def test_the_public_library_and_ours_live_in_one_process(order):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{order}\n{EXCHANGE}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "exchanged"


def test_every_message_of_ours_has_the_fields_of_the_public_one():
    from dm_env_rpc.v1 import dm_env_rpc_pb2 as theirs
    from dm_env_rpc.v1.extensions import properties_pb2 as their_properties

    from bridge.pb import dm_env_rpc_pb2 as ours
    from bridge.pb import properties_pb2

    def shape(descriptor):
        fields = {
            (field.number, field.name, field.type, field.is_repeated, field.containing_oneof is not None)
            for field in descriptor.fields
        }
        return fields, {name: shape(inner) for name, inner in descriptor.nested_types_by_name.items()}

    compared = 0
    for mine, other in ((ours, theirs), (properties_pb2, their_properties)):
        for name, descriptor in other.DESCRIPTOR.message_types_by_name.items():
            assert shape(getattr(mine, name).DESCRIPTOR) == shape(descriptor), name
            compared += 1
    assert compared > 20
    for name in ("DataType", "EnvironmentStateType"):
        assert dict(getattr(ours, name).items()) == dict(getattr(theirs, name).items())


# The wheel


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The file names in a wheel and in a source archive, built of a copy of the project."""
    copy = tmp_path_factory.mktemp("project") / "source"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if listed.returncode == 0:
        for name in listed.stdout.split("\n"):
            if name and (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy / name)
    else:
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv*", "*.egg-info", "build", "dist", ".git"))
    out = copy.parent / "dist"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "build", "--no-isolation", "--outdir", out, copy],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        wheel_names = archive.namelist()
        metadata = next(archive.read(name).decode() for name in wheel_names if name.endswith("METADATA"))
    with tarfile.open(sdist) as archive:
        sdist_names = [name.partition("/")[2] for name in archive.getnames()]
    return wheel_names, sdist_names, metadata


@pytest.mark.slow
def test_the_wheel_installs_bridge_and_nothing_else(built):
    names, _, _ = built
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"bridge"}
    assert "bridge/py.typed" in names
    assert "bridge/wrappers/__init__.py" in names
    assert "bridge/wrappers/blocking_reset.py" in names
    assert {"bridge/pb/dm_env_rpc_pb2.pyi", "bridge/standalone/serve_env.py"} <= set(names)


@pytest.mark.slow
def test_the_wheel_holds_every_module(built):
    names, _, _ = built
    for module in MODULES:
        relative = source_of(module).relative_to(ROOT).as_posix()
        expected = f"bridge/{relative}" if relative.startswith("wrappers/") else relative
        assert expected in names, module


@pytest.mark.slow
def test_the_source_archive_can_be_built_from(built):
    _, names, metadata = built
    assert {"pyproject.toml", "README.md", "LICENSE", "bridge/py.typed", "wrappers/__init__.py"} <= set(names)
    assert "Name: gymnasium-bridge" in metadata
    assert f"Version: {bridge.__version__}" in metadata
    always = {
        line.split(":")[1].strip().split(">=")[0]
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist:") and "extra ==" not in line
    }
    assert always == {"gymnasium", "numpy", "grpcio", "protobuf", "cloudpickle", "hpack"}


def test_the_list_of_packages_is_that_of_the_folders():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = set(ast.literal_eval("[" + text.partition("\npackages = [")[2].partition("]")[0] + "]"))
    folders = {
        "bridge.wrappers",
        *(
            ".".join(path.parent.relative_to(ROOT).parts)
            for path in (ROOT / "bridge").rglob("*.py")
            # `standalone` is data: what `gymnasium-bridge standalone` prints.
            if not {"__pycache__", "standalone"} & set(path.relative_to(ROOT).parts)
        ),
        *(
            ".".join(("bridge", *path.parent.relative_to(ROOT).parts))
            for path in (ROOT / "wrappers").rglob("*.py")
            if "__pycache__" not in path.parts
        ),
    }
    assert listed == folders


def test_the_version_and_the_licence_are_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert project["version"] == bridge.__version__ == citation["version"]
    assert project["license"] == citation["license"]
    assert f"\n## {bridge.__version__} (" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_workflows_try_every_python_that_the_project_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))["jobs"]
    named = [line.rpartition(":: ")[2] for line in project["classifiers"] if ":: Python :: 3." in line]
    assert set(named) <= set(jobs["linux"]["strategy"]["matrix"]["python"])
    assert named[0] == project["requires-python"].removeprefix(">=")


def test_the_pythons_that_the_project_names_are_those_that_were_run():
    """The table of tests/versions/README.md, which the run writes, the classifiers, the floors and the badge agree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "tests" / "versions" / "README.md").read_text(encoding="utf-8")
    table = page.partition("<!-- versions: ")[2].partition("<!-- end of versions -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| 3.")]
    pythons = sorted({row[0].rpartition(".")[0] for row in rows}, key=lambda version: int(version.partition(".")[2]))
    named = [line.rpartition(":: ")[2] for line in project["classifiers"] if ":: Python :: 3." in line]
    assert pythons == named
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    badge = (ROOT / "docs" / "badge-python.svg").read_text(encoding="utf-8")
    assert f"![Python {named[0]} to {named[-1]}](docs/badge-python.svg)" in readme
    assert f"<title>python: {named[0]} – {named[-1]}</title>" in badge
    floors = dict(re.findall(r"^(\w+)>=([\d.]+)$", "\n".join(project["dependencies"]), re.MULTILINE))
    for column, library in enumerate(("gymnasium", "numpy", "protobuf", "grpcio"), start=1):
        run = {row[column] for row in rows}
        assert any(f"{version}.".startswith(f"{floors[library]}.") for version in run), (library, floors[library], run)


def test_the_core_tests_are_there():
    listed = (ROOT / "tests" / "core.txt").read_text(encoding="utf-8").split()
    assert [name for name in listed if not (ROOT / name).is_file()] == []
    assert len(listed) > 10


def at_import(body):
    """The absolute names that statements import when they run, but for imports that may fail."""
    for node in body:
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)
            case ast.If() if "TYPE_CHECKING" in ast.unparse(node.test):
                yield from at_import(node.orelse)
            case ast.Try() if any("ImportError" in ast.unparse(one.type or one) for one in node.handlers):
                pass
            case ast.If() | ast.For() | ast.While() | ast.Try() | ast.With() | ast.ClassDef():
                parts = (getattr(node, part, []) for part in ("body", "orelse", "finalbody"))
                yield from (name for part in parts for name in at_import(part))
                yield from (name for one in getattr(node, "handlers", []) for name in at_import(one.body))


def imports_of_tests(files, root=ROOT):
    """What files of `tests`, and the modules of it that they import, import of elsewhere: names, each with a file."""
    found, waiting = {}, [root / file for file in files]
    seen = set(waiting)
    while waiting:
        file = waiting.pop()
        for name in at_import(ast.parse(file.read_text("utf-8")).body):
            if name.split(".")[0] != "tests":
                found.setdefault(name.split(".")[0], file.relative_to(root))
                continue
            place = root.joinpath(*name.split("."))
            near = [place.with_suffix(".py"), *(folder / "__init__.py" for folder in (place, *place.parents))]
            further = {one for one in near if one.is_file() and one.is_relative_to(root / "tests")} - seen
            seen |= further
            waiting += further
    return found


def test_the_core_tests_import_what_their_extra_brings_and_no_more():
    """Else they fail where that extra alone is installed, which this environment does not show."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test-core"]]
    brought = {re.split(r"[\[<>=!~; ]", requirement)[0].lower().replace("_", "-") for requirement in wanted}
    files = (ROOT / "tests" / "core.txt").read_text("utf-8").split()
    folders = {folder for file in files for folder in Path(file).parents}
    fixtures = [folder / "conftest.py" for folder in folders if (ROOT / folder / "conftest.py").is_file()]
    distributions = importlib.metadata.packages_distributions()
    foreign = {
        name: str(file)
        for name, file in imports_of_tests([*files, *fixtures]).items()
        if name not in sys.stdlib_module_names and name != "bridge"
        if brought.isdisjoint(own.lower().replace("_", "-") for own in distributions.get(name, []))
    }
    assert foreign == {}


def test_an_import_of_a_core_test_is_found_through_the_modules_of_tests_that_it_imports(tmp_path):
    for name, text in {
        "__init__": "",
        "test_one": "import numpy\nfrom tests import near\nfrom tests.far import thing\n",
        "near": "try:\n    import optional\nexcept ImportError:\n    optional = None\n",
        "far": "def later():\n    import late\n\nif True:\n    import pettingzoo.utils\n",
    }.items():
        (tmp_path / "tests").mkdir(exist_ok=True)
        (tmp_path / "tests" / f"{name}.py").write_text(text, "utf-8")
    assert {name: file.name for name, file in imports_of_tests(["tests/test_one.py"], tmp_path).items()} == {
        "numpy": "test_one.py",
        "pettingzoo": "far.py",
    }


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "bridge" / "py.typed").exists()


NO_PETTINGZOO = """
import inspect, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pettingzoo":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from bridge import *
import bridge

assert make_remote is bridge.make_remote
assert "make_parallel_remote" not in dir(bridge)
assert "RemoteVectorEnv" in dict(inspect.getmembers(bridge))
try:
    bridge.make_parallel_remote
except ImportError as error:
    print(error)
"""


WITHOUT = """
import importlib, inspect, pydoc, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for name in ("bridge", "bridge.perlert", "bridge.testing", "bridge.wrappers", "bridge.dial", "bridge.web.gateway"):
    package = importlib.import_module(name)
    exec(f"from {name} import *")
    assert set(dict(inspect.getmembers(package))) == set(dir(package))
    assert pydoc.render_doc(package)
import bridge
try:
    bridge.recording
except ImportError as error:
    print("recording" in dir(bridge), error)
"""
EXTRAS = ["pyarrow", "pettingzoo", "cryptography", "websockets", "msgpack", "av", "pygame", "minari", "ray"]
EXTRAS += ["stable_baselines3", "torch", "jax", "pandas", "zstandard", "PIL", "prometheus_client", "grpc_health"]


@pytest.mark.parametrize("absent", [["pyarrow"], EXTRAS])
@pytest.mark.slow
def test_without_extras_tools_that_ask_for_every_name_of_a_package_get_those_that_there_are(absent):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT, *absent],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("False recordings need pyarrow: pip install")


@pytest.mark.slow
def test_without_pettingzoo_a_star_import_and_the_members_of_the_package_are_those_that_there_are():
    done = subprocess.run(
        [sys.executable, "-c", NO_PETTINGZOO], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "needs PettingZoo: pip install" in done.stdout

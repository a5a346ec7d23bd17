"""Uses of private names in tests are counted, and the counts only fall."""

import ast
import textwrap

import pytest

from tests import internals
from tests.places import ROOT


def findings(code, file="tests/test_things.py"):
    reader = internals.Reader(file)
    reader.visit(ast.parse(textwrap.dedent(code)))
    return [(found.kind, found.line, found.what) for found in reader.findings]


@pytest.mark.parametrize("kind", internals.KINDS)
@pytest.mark.slow
def test_tests_know_no_more_of_the_inside_than_before(kind):
    found = [each for each in internals.find() if each.kind == kind]
    ceiling = internals.ceilings()[kind]
    assert len(found) <= ceiling, (
        f"`python -m tests.internals --kind {kind}` lists them: test through public interfaces"
    )


def test_the_vocabulary_names_modules_that_exist():
    assert set(internals.VOCABULARY) <= internals.modules()
    assert set(internals.PUBLIC_PACKAGES) <= internals.modules()


@pytest.mark.slow  # it reads all sources
def test_each_entry_of_the_helpers_names_a_file_that_imports_it():
    found = {(each.file, each.what.removeprefix("bridge.")) for each in internals.find() if each.kind == "helpers"}
    assert found == {(file, name) for file, (_, names) in internals.HELPERS.items() for name in names.split()}


@pytest.mark.slow
def test_no_test_file_imports_another_one():
    """What several need is in a helper module, and fixtures are in the `conftest.py` of their folder."""
    found = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        own = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests"):
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                found += [
                    f"{file.relative_to(ROOT)} imports {module}"
                    for module in modules
                    if module.rpartition(".")[2].startswith("test_") and module != own
                ]
    assert found == []


def test_what_a_helper_may_import_counts_apart():
    code = """
    from bridge.perlert.protocol.guard import Guard
    from bridge.core.server.calls import Calls
    """
    kinds = [kind for kind, *_ in findings(code, "tests/perlert_simulation.py")]
    assert kinds == ["helpers", "imports"]


def test_a_private_attribute_counts_wherever_it_is_reached():
    code = """
    server._calls
    server.public._deep.more
    server._value = 3
    getattr(server, "_named")
    monkeypatch.setattr(server, "_changed", None)
    """
    kinds = [(kind, line) for kind, line, _ in findings(code)]
    assert kinds == [("private", 2), ("private", 3), ("private", 4), ("private", 5), ("private", 6), ("patches", 6)]


def test_what_a_test_defines_itself_is_not_private_nor_what_others_publish():
    code = """
    import os, sys
    class Fake:
        def method(self):
            return self._own, self.__class__.__name__
    os._exit(3)
    sys._getframe()
    point._replace(x=3)
    """
    assert findings(code) == []


def test_an_import_counts_unless_the_module_is_public_or_that_of_the_test():
    code = """
    import bridge, bridge.wrappers.throttle
    from bridge import serve_gym, errors
    from bridge.pb import dm_env_rpc_pb2
    from bridge.fleet.ray import launch
    from bridge.core.encoding.names import ACTION
    from bridge.core.server import calls
    from bridge.perlert.protocol.guard import Guard
    """
    assert findings(code) == [
        ("imports", 7, "bridge.core.server.calls"),
        ("imports", 8, "bridge.perlert.protocol.guard"),
    ]
    for own in ("guard", "perlert_guard", "guard_floods"):
        assert findings(code, f"tests/test_{own}.py") == [("imports", 7, "bridge.core.server.calls")]
    assert len(findings(code, "tests/lobby.py")) == 2  # a helper is the test of nothing
    assert len(findings(code, "tests/test_perlert.py")) == 2  # a folder is no module


def test_a_program_in_a_string_counts_as_well():
    code = '''
    SCRIPT = """
    from bridge.core.server.calls import Calls
    Calls()._open
    """
    run(f"import bridge.core.server.calls; print({name})")
    '''
    assert findings(code) == [
        ("imports", 3, "bridge.core.server.calls"),
        ("private", 4, "._open"),
        ("imports", 6, "bridge.core.server.calls"),
    ]


def test_a_patch_counts_unless_it_is_of_something_of_others():
    code = """
    import os, time
    from tests import support
    from bridge.core.server import session
    class Painted: pass
    monkeypatch.setattr(os, "fork", None)
    monkeypatch.setattr("time.sleep", None)
    monkeypatch.setitem(os.environ, "NAME", "value")
    monkeypatch.setenv("NAME", "value")
    monkeypatch.setattr(support, "until", None)
    monkeypatch.setattr(Painted, "drawn", 3)
    monkeypatch.setattr(session, "LIMIT", 3)
    monkeypatch.setattr(session.time, "monotonic", None)
    monkeypatch.setattr("bridge.core.server.session.LIMIT", 3)
    monkeypatch.setattr(f"bridge.core.server.session.{name}", 3)
    monkeypatch.setattr(server.loop, "run", None)
    mock.patch.object(session, "LIMIT", 3)
    session.LIMIT = 3
    """
    assert [line for kind, line, _ in findings(code) if kind == "patches"] == [12, 13, 14, 15, 16, 17, 18]


def test_a_patch_by_the_name_of_its_target_counts_as_an_import_too():
    code = """
    monkeypatch.setattr("bridge.core.server.calls._LIMIT", 3)
    monkeypatch.setattr(f"bridge.core.server.calls.{name}", 3)
    """
    assert findings(code) == [
        ("patches", 2, "bridge.core.server.calls._LIMIT"),
        ("imports", 2, "bridge.core.server.calls"),
        ("private", 2, "._LIMIT"),
        ("patches", 3, "f'bridge.core.server.calls.{name}'"),
        ("imports", 3, "bridge.core.server.calls"),
    ]

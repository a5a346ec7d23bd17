"""The README and the pages of docs/: what they show runs, what they name exists."""

from __future__ import annotations

import codeop
import contextlib
import inspect
import io
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import bridge
import bridge.testing
import bridge.wrappers
from bridge import serve_gym
from bridge.cli import main, make_parser
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import Inspector, ServerProcess
from tests.parallel_envs import Relay
from tests.places import ROOT
from tests.preloaded import run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CORE = ROOT / "bridge" / "core"
README = (ROOT / "README.md").read_text(encoding="utf-8")
API = (ROOT / "docs/reference.in.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "benchmarks/attacks.md",
    "benchmarks/zoo.md",
    "examples/README.md",
    "proto/recording-format.md",
    "tests/old_pythons/README.md",
    "tests/versions/README.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
LOCAL = "grpc://127.0.0.1:50051"
OTHER_MACHINE = "grpcs://gpu-box.lan:50051"


def blocks(text: str) -> list[tuple[str, str]]:
    """Return each code block's language and content."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def examples() -> list[tuple[str, str]]:
    """Return each Python block with the output that stands below it, "" where there is none."""
    found = [*blocks(README), ("", ""), *blocks(API)]
    following = [*found[1:], ("", "")]
    return [
        (content, after if kind == "text" and "→" not in after else "")
        for (language, content), (kind, after) in zip(found, following, strict=True)
        if language == "python"
    ]


def commands() -> list[list[str]]:
    """Return each line of the shell blocks as words."""
    lines = [line for language, content in blocks(README) if language == "sh" for line in content.splitlines()]
    return [shlex.split(line) for line in lines]


def serve_command(*, wide: bool) -> list[str]:
    """Return what follows `gymnasium-bridge serve`: for this machine, or for others (`wide`)."""
    (words,) = [words for words in commands() if words[1] == "serve" and ("--host" in words) == wide]
    return words[2:]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The server of the README's first command, on a free port instead of the one that is written there."""
    words = serve_command(wide=False)
    assert words[-2:] == ["--port", "50051"]
    with ServerProcess(*words[:-2]) as server:
        yield server.url


def run_code(code: str) -> str:
    """Run a block as a file, in a process of its own, warnings being errors, and return its output."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(code, encoding="utf-8")
        done = run("-W", "error", file, timeout=120.0)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    ("code", "output"),
    # tests/trainers/test_readme.py runs the block that needs PyTorch.
    [pair for pair in examples() if OTHER_MACHINE not in pair[0] and "stable_baselines3" not in pair[0]],
    ids=lambda text: "",
)
def test_the_code_of_the_readme_runs_and_prints_what_is_written_below_it(url: str, code: str, output: str) -> None:
    assert LOCAL in code or "serve_gym(" in code
    assert run_code(code.replace(LOCAL, url)) == output


def test_the_commands_of_the_readme_are_ours_and_install_extras_that_there_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for words in commands():
        if words[:3] == ["pip", "install", "-e"]:
            assert set(words[3].partition("[")[2].rstrip("]").split(",")) <= set(project["optional-dependencies"])
        elif words not in (["make", "demo"], ["source", ".venv/bin/activate"]):
            assert project["scripts"][words[0]] == "bridge.cli:main"


def test_what_the_readme_shows_between_two_machines_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (cert,) = [words for words in commands() if words[1] == "cert"]
    assert main(cert[1:]) == 0
    (token,) = [words for words in commands() if words[1] == "token"]
    assert main(token[1:]) == 0
    words = serve_command(wide=True)
    for option, value in (("--host", "0.0.0.0"), ("--port", "50051")):  # of tests: loopback, and a free port
        at = words.index(option)
        assert words[at + 1] == value
        del words[at : at + 2]
    (example,) = [(code, output) for code, output in examples() if OTHER_MACHINE in code]
    with ServerProcess(*words) as server:
        assert run_code(example[0].replace(OTHER_MACHINE, server.url)) == example[1]


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 650


def assert_can_be_pasted(block: str) -> None:
    """Expect no SyntaxError at Python's prompt: before Python 3.13 only an empty line ends a loop there."""
    compiled, lines = codeop.CommandCompiler(), []
    for line in [*block.splitlines(), ""]:
        lines.append(line)
        if compiled("\n".join(lines), "<stdin>", "single") is not None:
            lines = []
    assert not "".join(lines).strip()


def test_the_python_blocks_can_be_pasted_at_a_prompt() -> None:
    # A class has empty lines between its methods: it is for a file.
    texts = [README, *(page.read_text(encoding="utf-8") for page in pages_of_docs())]
    found = [content for text in texts for language, content in blocks(text) if language == "python"]
    found = [content for content in found if not re.search(r"^(class |def |if __name__)|\A ", content, re.MULTILINE)]
    assert len(found) > 15
    for block in found:
        assert_can_be_pasted(block)


def pages_of_docs() -> list[Path]:
    """The pages of docs/ that people write; the reference is generated."""
    return [path for path in sorted((ROOT / "docs").glob("*.md")) if not path.name.startswith("reference")]


def test_the_docs_are_at_most_20_000_words() -> None:
    # A word has a letter or a digit: the lines of a table are none.
    counts = {
        path.name: sum(any(map(str.isalnum, word)) for word in path.read_text(encoding="utf-8").split())
        for path in pages_of_docs()
    }
    assert sum(counts.values()) <= 20_000, counts


@pytest.mark.parametrize("page", [path.name for path in pages_of_docs()])
def test_a_page_begins_with_whom_it_is_for_and_what_they_will_have(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert re.match(r"# [^\n]+\n\nFor whoever [^.\n]+\. At the end you have [^.\n]+\.\n\n", text), text[:300]


def test_the_table_of_extras_names_each_that_is_for_users(capsys: pytest.CaptureFixture[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    contributors = {"bench", "check", "dist", "docs", "test", "test-core", "trainers"}
    table = API.partition("## Extras")[2].partition("## Command line")[0]
    assert re.findall(r"^\| `(\S+)` \|", table, re.MULTILINE) == sorted(extras.keys() - contributors)
    assert "reference.md#extras" in README
    for command, option in re.findall(r"`gymnasium-bridge (\w+)(?: (--\w+))?`", table):
        main([command, "--help"])
        assert option in capsys.readouterr().out, (command, option)


def test_the_demo_leaves_what_the_blocks_before_the_trainers_need() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert any("gymnasium-bridge[web,cert,play]" in requirement for requirement in extras["demo"])
    blocks_before = README.partition("stable_baselines3")[0]
    assert blocks_before.index("make demo") < blocks_before.index("gymnasium-bridge serve")
    # The trainer brings PyTorch, which nothing before it asks for: its own section says how to install it.
    assert "pip install" not in " ".join(content for _, content in blocks(blocks_before.partition("## Train")[0]))
    assert 'pip install -e ".[sb3]"' in blocks_before.partition("## Train")[2]


def test_the_readme_names_the_page_for_each_reader_and_explains_its_words() -> None:
    first = README.partition("## Connect")[0]
    for page in (
        "trainers",
        "two-machines",
        "cluster",
        "realtime",
        "policies",
        "recordings",
        "play",
        "perlert",
        "protocol",
    ):
        assert f"](docs/{page}.md)" in first
    for word in ("world", "lanes", "remote", "slot", "spare", "lock-step"):
        assert f"*{word}*" in README


def test_the_data_flow_names_an_existing_file_for_each_arrow() -> None:
    arrows = re.findall(r"^  → (\S+)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(arrows) >= 7
    assert [name for name in arrows if not any((folder / name).is_file() for folder in (ROOT, CORE))] == []


def test_contributing_names_files_that_there_are() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[\w.]+/)*[\w.]+\.(?:py|txt|md|js|toml))`", text))
    assert len(named) > 60
    # A name without a folder stands beside one with it: it is a file of that name.
    names = {path.name for folder in ("bridge", "wrappers", "tests") for path in (ROOT / folder).rglob("*.*")}
    assert [name for name in named if not (ROOT / name).is_file() and name not in names] == []


def test_pages_name_what_users_need_by_its_public_name() -> None:
    # The logger's name; and keywords, whose entries in the reference show the last part alone.
    inside = {"bridge.core.server"}
    inside |= {f"bridge.core.client.options.{name}Options" for name in ("Remote", "Env", "Vector")}
    inside |= {f"bridge.core.transport.credentials.{name}" for name in ("Access", "ClientAccess")}
    pages = [path.read_text("utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    assert {name for page in pages for name in re.findall(r"bridge\.(?:core|facade)\.[\w.]+\w", page)} == inside


def help_of(*words: str) -> str:
    """What the command line writes."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(list(words))
    return out.getvalue()


def test_the_reference_has_every_public_name() -> None:
    listed = re.findall(r"^::: (bridge[\w.]*)", API, re.MULTILINE)
    names = {f"bridge.{name}" for name in bridge.__all__ if not name.startswith("_")}
    names |= {f"bridge.wrappers.{name}" for name in bridge.wrappers.__all__}
    assert names - set(listed) == set()
    assert "bridge.errors" in listed
    assert len(listed) == len(set(listed))


def test_the_site_has_the_help_text_of_every_command() -> None:
    assert "\n<!-- command line -->\n" in API  # docs/site_hooks.py writes them there


def test_the_reference_is_readable_in_the_repository_as_it_is() -> None:
    assert ":::" not in REFERENCE
    assert "<!-- command line -->" not in REFERENCE
    for name in re.findall(r"^::: (bridge[\w.]*)", API, re.MULTILINE):
        assert name == "bridge.errors" or f'<a id="{name}"></a>`{name}`\n' in REFERENCE
    for name in bridge.errors.__all__:
        assert f"`bridge.errors.{name}`\n" in REFERENCE
    for function in (bridge.serve_gym, bridge.serve_parallel, bridge.make_remote, bridge.make_vec_remote):
        # The options of `make_vec_remote` are entries of their own in its section.
        end = "\n## " if function is bridge.make_vec_remote else "\n### "
        entry = REFERENCE.partition(f"`bridge.{function.__name__}`\n")[2].partition(end)[0]
        keywords = [
            name for name, each in inspect.signature(function).parameters.items() if each.kind != each.VAR_KEYWORD
        ]
        assert len(keywords) > 3
        assert [name for name in keywords if not re.search(rf"^- `{name}[`:]", entry, re.MULTILINE)] == []
    commands = re.findall(r"^    (\w+)", help_of("--help"), re.MULTILINE)
    assert len(commands) > 15
    for command in commands:
        assert f"### gymnasium-bridge {command}\n\n```text\nusage: gymnasium-bridge {command} " in REFERENCE
    flags = re.findall(r"^  (--[\w-]+)", help_of("serve", "--help-all"), re.MULTILINE)
    assert len(flags) > 50
    for flag in flags:
        assert re.search(rf"^  {flag}\b", REFERENCE, re.MULTILINE), flag


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse writes a help otherwise there")
def test_the_reference_is_current() -> None:
    pytest.importorskip("griffe")
    subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, check=True, timeout=120)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_that_there_are(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_that_says_what_to_install_says_it_for_a_clone_too(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    wanted = re.findall(r"pip install ['\"]gymnasium-bridge\[(\w+)\]", text)
    assert set(wanted) <= set(re.findall(r"pip install -e ['\"]\.\[(\w+)\]", text))


def test_the_folders_of_contributing_are_there_and_its_commands_are_in_the_makefile() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [name for name in re.findall(r"^\| `([\w/]+/)` \|", text, re.MULTILINE) if not (ROOT / name).is_dir()] == []
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    assert set(re.findall(r"^\| `make ([\w-]+)`", text, re.MULTILINE)) == set(targets.group(1).split()) - {"clean"}


def test_the_table_of_properties_is_the_one_that_is_served() -> None:
    """D-18."""
    text = API.partition("\n## Properties\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ((?:`[\w.]+`(?:, )?)+) \| (\w+) \| (.*) \|$", text, re.MULTILINE)
    listed = {name: kind for names, kind, _ in rows for name in re.findall(r"[\w.]+", names)}
    writable = {
        name for names, _, content in rows if "may be written" in content for name in re.findall(r"[\w.]+", names)
    }
    items = []
    for server in (serve_gym("CartPole-v1"), serve_gym("CartPole-v1", num_envs=2), bridge.serve_parallel(Relay)):
        with server, Inspector(server.url, 10.0) as inspector:
            inspector.join()
            items += [item for item in inspector.list_properties() if ".attributes." not in item.spec.name]
    types = {pb.INT64: "number", pb.UINT8: "value", pb.STRING: "text"}
    served = {item.spec.name: types[item.spec.dtype] for item in items if item.is_readable or item.is_writable}
    expected = {re.sub(r"^server\.limits\..*", "server.limits.NAME", name): kind for name, kind in served.items()}
    expected |= {f"{item.spec.name}.NAME": "value" for item in items if item.spec.name == "world.attributes"}
    missing = [key for key in expected if key not in listed]
    descriptions = {item.spec.name: item.description for item in items}
    lacking = "\n".join(f"| `{key}` | {expected[key]} | {descriptions.get(key, '')} |" for key in missing)
    assert not missing, f"docs/reference.in.md lacks these rows:\n{lacking}"
    assert {key: kind for key, kind in listed.items() if expected.get(key) != kind} == {}
    assert {item.spec.name for item in items if item.is_writable} <= writable


def commands_of_the_docs() -> Iterator[tuple[str, str]]:
    """Each line of a shell block that runs `bridge`, after the name of its page."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        for block in re.findall(r"```(?:sh|shell|bash)\n(.*?)```", text, re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith(("bridge ", "gymnasium-bridge ")):
                    yield path.name, line


@pytest.mark.parametrize(("page", "line"), list(commands_of_the_docs()))
def test_the_commands_that_the_docs_show_are_understood(page: str, line: str) -> None:
    words = shlex.split(line.rstrip("& "), comments=True)[1:]
    if ">" in words:
        words = words[: words.index(">")]
    make_parser(words[0]).parse_args(words)

"""Manifests against the schemas of Kubernetes, and the files of the image. No pod is run."""

from __future__ import annotations

import copy
import fnmatch
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement

from bridge import serve_gym
from bridge.cli import make_parser
from tests.places import ROOT
from tests.project.modules import MODULES, source_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KUBERNETES = ROOT / "deploy" / "kubernetes"
VERSIONS = ["1.33", "1.37"]
MERGED_BY = {"containers": "name", "volumes": "name", "volumeMounts": "mountPath", "ports": "port", "env": "name"}


def documents(path: Path) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(path.read_text(encoding="utf-8")) if found]


def merged(base: Any, patch: Any, name: str = "") -> Any:
    """A strategic merge, as Kustomize makes it."""
    if isinstance(patch, dict) and isinstance(base, dict):
        result = copy.deepcopy(base)
        for key, value in patch.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merged(result.get(key), value, key)
        return result
    if isinstance(patch, list) and isinstance(base, list) and name in MERGED_BY:
        by = MERGED_BY[name]
        result = [copy.deepcopy(item) for item in base]
        for item in patch:
            found = [index for index, other in enumerate(result) if other[by] == item[by]]
            if found:
                result[found[0]] = merged(result[found[0]], item)
            else:
                result.insert(0, copy.deepcopy(item))
        return result
    return copy.deepcopy(patch)


def manifests(variant: str) -> dict[str, dict[str, Any]]:
    """The resources of a variant by kind, with its patches."""
    base = yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text(encoding="utf-8"))
    found = {
        document["kind"]: document for name in base["resources"] for document in documents(KUBERNETES / "base" / name)
    }
    if variant != "base":
        overlay = yaml.safe_load((KUBERNETES / variant / "kustomization.yaml").read_text(encoding="utf-8"))
        assert overlay["resources"] == ["../base"]
        for patch in overlay["patches"]:
            (document,) = documents(KUBERNETES / variant / patch["path"])
            assert document["metadata"]["name"] == found[document["kind"]]["metadata"]["name"]
            found[document["kind"]] = merged(found[document["kind"]], document)
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("variant", ["base", "tls"])
def test_the_manifests_are_valid(variant: str, version: str) -> None:
    found = manifests(variant)
    assert set(found) == {"Deployment", "Service", "PodDisruptionBudget"}
    for document in found.values():
        kubernetes_validate.validate(document, version, strict=True)


def test_a_field_that_there_is_not_would_be_found() -> None:
    wrong = manifests("base")["Deployment"]
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which holds Kustomize, is not installed")
@pytest.mark.parametrize("variant", ["base", "tls"])
def test_kustomize_builds_what_was_validated(variant: str) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", KUBERNETES / variant], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    built = {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}
    for kind, mine in manifests(variant).items():
        kubernetes_validate.validate(built[kind], VERSIONS[-1], strict=True)
        for document in (built[kind], mine):  # what Kustomize adds, or writes otherwise
            text = yaml.safe_dump(document).replace("registry.example/bridge-env:0.1.0", "bridge-env")
            text = re.sub(r" *app.kubernetes.io/part-of: gymnasium-bridge\n", "", text)
            document.clear()
            document.update(yaml.safe_load(text))
            document["metadata"].pop("labels", None)
        assert built[kind] == mine


@pytest.mark.parametrize("variant", ["base", "tls"])
def test_pods_are_what_the_docs_say(variant: str) -> None:
    found = manifests(variant)
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = container["args"]
    arguments = vars(make_parser("serve").parse_args(command))
    assert arguments["env"] == ["CartPole-v1"]
    assert arguments["port"] == container["ports"][0]["containerPort"] == found["Service"]["spec"]["ports"][0]["port"]
    assert arguments["host"] == "0.0.0.0"
    assert pod["terminationGracePeriodSeconds"] > arguments["drain_timeout"], "else the kubelet cuts what drains"
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert found["Service"]["spec"]["clusterIP"] == "None"
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        found["Service"]["spec"]["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if variant == "base":
            assert container[probe]["grpc"]["port"] == arguments["port"]
        else:
            assert "grpc" not in container[probe]
            name, *rest = container[probe]["exec"]["command"]
            assert name == "bridge"
            probed = make_parser("health").parse_args(rest)
            assert probed.url == f"grpcs://localhost:{arguments['port']}"
            assert container[probe].get("timeoutSeconds", 1) >= probed.timeout or probe == "startupProbe"
    assert "HorizontalPodAutoscaler" not in found


# The image


def dockerfile() -> list[str]:
    """The instructions of the Dockerfile, a line each."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def copied() -> list[str]:
    """The files that the image is built of."""
    found: list[str] = []
    for line in dockerfile():
        words = line.split()
        if words[0] == "COPY" and not words[1].startswith("--from"):
            found += words[1:-1]
    return found


def ignored(name: str) -> bool:
    """True if `.dockerignore` leaves a file out: the last pattern that fits it, or a folder above it, decides."""
    result = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        keeps, pattern = pattern.startswith("!"), pattern.lstrip("!")
        parts = name.split("/")
        above = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        anywhere = pattern.startswith("**/")
        names = [each for part in above for each in ([part, part.rpartition("/")[2]] if anywhere else [part])]
        if any(
            each.count("/") == pattern.removeprefix("**/").count("/")
            and fnmatch.fnmatchcase(each, pattern.removeprefix("**/"))
            for each in names
        ):
            result = not keeps
    return result


def context(to: Path) -> None:
    """Copy what is sent for the image, as far as the Dockerfile takes it."""
    for source in copied():
        path = ROOT / source
        assert path.exists(), f"COPY {source}: there is no such file"
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            name = file.relative_to(ROOT).as_posix()
            if file.is_file() and not ignored(name):
                target = to / (file.name if path.is_file() else name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target)


def test_the_rules_of_dockerignore_are_those_of_docker() -> None:
    assert not ignored("bridge/core/server/core_server.py")
    assert not ignored("deploy/constraints.txt")
    assert ignored("bridge/__pycache__/x.cpython-311.pyc")
    assert ignored("bridge/cli/__pycache__/x.cpython-311.pyc")
    assert ignored("deploy/slurm/envs.sbatch")
    assert ignored(".git/config")
    assert ignored("tests/conftest.py")
    assert ignored(".venv/bin/python")


@pytest.mark.slow
def test_the_image_is_built_of_all_that_it_needs(tmp_path: Path) -> None:
    context(tmp_path / "source")
    assert (tmp_path / "source" / "constraints.txt").exists()
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            tmp_path / "dist",
            ".",
        ],
        cwd=tmp_path / "source",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for module in MODULES:
        relative = source_of(module).relative_to(ROOT).as_posix()
        assert (f"bridge/{relative}" if relative.startswith("wrappers/") else relative) in names


def test_the_image_is_slim_pinned_and_not_of_root() -> None:
    lines = dockerfile()
    assert re.fullmatch(r"ARG PYTHON=\d+\.\d+\.\d+-slim-\w+", lines[0])
    assert [line for line in lines if line.startswith("FROM ")] == [
        "FROM python:${PYTHON} AS build",
        "FROM python:${PYTHON}",
    ]
    (user,) = [line.split()[1] for line in lines if line.startswith("USER ")]
    pod = manifests("base")["Deployment"]["spec"]["template"]["spec"]["securityContext"]
    assert user == f"{pod['runAsUser']}:{pod['runAsGroup']}"
    assert "--constraint constraints.txt" in "\n".join(lines)


def test_the_line_that_runs_the_image_has_options_that_there_are_and_leaves_time_to_drain() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^docker run .*$", page, re.MULTILINE)
    before, image, arguments = line.partition(" bridge-env ")
    assert image
    assert "docker build -t bridge-env ." in page
    asked = make_parser("serve").parse_args(shlex.split(arguments))
    words = shlex.split(before)
    given = dict(itertools.pairwise(words))
    assert given["-p"] == f"{asked.port}:{asked.port}"
    assert asked.host == "0.0.0.0"
    assert given["-v"].split(":")[1:] == [asked.token_file, "ro"]
    assert float(given["--stop-timeout"]) > asked.drain_timeout > 2.0
    # A file that only its owner may read, as `gymnasium-bridge token` makes it.
    assert given["--user"] == "$(id -u)"


def test_the_pinned_versions_are_of_all_dependencies_and_within_their_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = {}
    for line in (ROOT / "deploy" / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pinned[name] = version
    for text in [*project["dependencies"], *project["optional-dependencies"]["ops"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[requirement.name]), text


@pytest.fixture(scope="module")
def scraped() -> str:
    """What Prometheus gets of a server."""
    with serve_gym("CartPole-v1", metrics_port=0) as server:
        url = f"http://127.0.0.1:{server.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())


def kinds_of(scraped: str) -> dict[str, str]:
    """The kind of each metric, by its name."""
    kinds = dict(re.findall(r"^# TYPE (bridge_\w+) (\w+)$", scraped, re.MULTILINE))
    # Of the library: when a counter began.
    return {name: kind for name, kind in kinds.items() if not name.endswith("_created")}


def test_the_unit_for_systemd_has_options_that_there_are_and_leaves_time_to_drain(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "systemd" / "gymnasium-bridge@.service").read_text("utf-8")
    settings = re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)
    options = dict(settings)
    program, *arguments = shlex.split(options["ExecStart"].replace("%i", "50051"))
    asked = make_parser("serve").parse_args(arguments)
    assert float(options["TimeoutStopSec"]) > asked.drain_timeout > 2.0
    loaded = {value.partition(":")[0] for name, value in settings if name == "LoadCredential"}
    assert loaded == {Path(each).name for each in arguments if "CREDENTIALS_DIRECTORY" in each}
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "gymnasium-bridge@50051.service"
    unit.write_text(text.replace(program, sys.executable), "utf-8")
    done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, timeout=60)
    assert unit.name not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


def test_the_dashboard_is_current_and_has_a_panel_for_every_metric_and_no_other(scraped: str) -> None:
    script = ROOT / "deploy" / "grafana.py"
    subprocess.run([sys.executable, script, "--check"], check=True, timeout=60)
    made = json.loads(script.with_suffix(".json").read_text("utf-8"))
    asked = [target["expr"] for panel in made["panels"] for target in panel["targets"]]
    asked += [variable["query"] for variable in made["templating"]["list"]]
    named = {re.sub("_bucket$", "", name) for text in asked for name in re.findall(r"\bbridge_\w+", text)}
    assert named == set(kinds_of(scraped))
    assert all(text.count(left) == text.count(right) for text in asked for left, right in ("()", "{}", "[]"))
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    # A title is cut off at the width of a panel, so what exactly is shown is in the description.
    assert all(len(panel["title"]) <= 36 and ";" not in panel["title"] for panel in made["panels"])
    assert all(panel["description"] for panel in made["panels"] if panel["type"] != "row")
    assert len([panel for panel in made["panels"] if panel["type"] == "row"]) > 1
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in made["panels"]}
    assert len(places) == len(made["panels"])
    check = (ROOT / "Makefile").read_text("utf-8").partition("\ncheck-python:")[2].partition("\n\n")[0]
    assert "deploy/grafana.py --check" in check


def test_the_reference_lists_every_metric_with_its_labels(scraped: str) -> None:
    page = (ROOT / "docs" / "reference.md").read_text("utf-8")
    rows = re.findall(r"^\| `(bridge_\w+)(?:\{(.*?)\})?` \| (.*) \|$", page, re.MULTILINE)
    assert len({name for name, _, _ in rows}) == len(rows)
    kinds = {}
    for name, labels, text in rows:
        kinds[name] = "counter" if name.endswith("_total") else "histogram" if "(histogram)" in text else "gauge"
        for given in re.findall(rf"^{name}{{([^}}]*)}} ", scraped, re.MULTILINE):
            assert set(re.findall(r"(\w+)=", given)) == set(labels.split(", "))
    assert kinds == kinds_of(scraped)


def test_prometheus_reads_the_port_that_the_docs_name_and_its_rules_name_metrics_that_exist(scraped: str) -> None:
    text = (ROOT / "deploy" / "prometheus.yml").read_text("utf-8")
    (job,) = yaml.safe_load(text)["scrape_configs"]
    targets = job["static_configs"][0]["targets"]
    assert {target.partition(":")[2] for target in targets} == {"9100"}
    assert "--metrics-port 9100" in (ROOT / "docs" / "cluster.md").read_text("utf-8")
    rules = yaml.safe_load("\n".join(re.findall(r"^#   ( *(?:groups|-|rules).*)$", text, re.MULTILINE)))
    asked = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    assert len(asked) == 4
    named = {name for expression in asked for name in re.findall(r"\bbridge_\w+", expression)}
    assert named <= set(kinds_of(scraped))

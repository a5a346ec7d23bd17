"""The benchmarks run, on tiny turns, and say what they measured."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import registry, runner, slots
from benchmarks.__main__ import main
from benchmarks.chart import PANELS
from benchmarks.registry import Goal, Measure, Subject
from bridge.core.transport.frames import PREFACE
from tests.support import sampled, server_process


@pytest.fixture(autouse=True)
def a_machine_without_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no measurement, of another test or of a developer, hold up those of a test: the lock is a file in TMPDIR."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.fixture
def own() -> Iterator[None]:
    """Empty registries, so that a test's own subjects are the only ones."""
    saved = dict(registry.SUBJECTS), list(registry.GOALS)
    registry.SUBJECTS.clear()
    registry.GOALS.clear()
    yield
    registry.SUBJECTS.clear()
    registry.SUBJECTS.update(saved[0])
    registry.GOALS[:] = saved[1]


def a_subject(name: str, values: list[float], log: list[str]) -> Subject:
    @registry.subject(name, name.upper(), group="test")
    def opened() -> Iterator[Measure]:
        log.append(f"open {name}")
        numbers = iter([0.0, *values])  # the first turn warms up and is not counted

        def measure(seconds: float) -> float:
            log.append(name)
            return next(numbers)

        yield measure
        log.append(f"close {name}")

    return registry.SUBJECTS[name]


@pytest.mark.usefixtures("own")
def test_rounds_are_interleaved_and_begin_with_another_subject_each() -> None:
    log: list[str] = []
    subjects = [a_subject("a", [10.0, 30.0], log), a_subject("b", [20.0, 20.0], log)]
    results = runner.run_group(subjects, 2, 0.01)
    assert log == ["open a", "open b", "a", "b", "a", "b", "b", "a", "close b", "close a"]
    assert [result.values for result in results] == [[10.0, 30.0], [20.0, 20.0]]


@pytest.mark.usefixtures("own")
def test_a_goal_is_judged_by_the_median_of_the_ratios_of_each_round() -> None:
    log: list[str] = []
    subjects = [a_subject("a", [10.0, 30.0, 90.0], log), a_subject("b", [20.0, 20.0, 30.0], log)]
    results = runner.run_group(subjects, 3, 0.01)
    goals = [Goal("B-0", "a", "b", 1.5, None), Goal("B-0", "a", "b", 1.6, None), Goal("B-0", "a", 15.0, None, 2.0)]
    verdicts = runner.judge(results, goals)
    assert [verdict.ratio for verdict in verdicts] == [1.5, 1.5, 2.0]
    assert [verdict.met for verdict in verdicts] == [True, False, True]
    table = runner.as_table(results, verdicts)
    assert "B-0   a against b: 1.50 (0.50 to 3.00), wanted ≥ 1.6: NOT met" in table


@pytest.mark.usefixtures("own")
def test_a_peer_that_is_not_installed_is_skipped_and_named() -> None:
    @registry.subject("absent", "a peer", group="test")
    def absent() -> Iterator[Measure]:
        import a_package_that_nobody_has  # noqa: F401

        yield lambda seconds: 1.0

    results = runner.run_group([registry.SUBJECTS["absent"]], 1, 0.01)
    assert "skipped: a_package_that_nobody_has is not installed" in runner.as_table(results, [])


@pytest.mark.usefixtures("own")
def test_two_subjects_of_one_name_are_refused() -> None:
    a_subject("a", [1.0], [])
    with pytest.raises(ValueError, match="two subjects named 'a'"):
        a_subject("a", [1.0], [])


def test_every_goal_names_subjects_that_there_are_in_one_group() -> None:
    registry.load()
    assert "sync-64" in registry.SUBJECTS
    assert {goal.id for goal in registry.GOALS} >= {"B-1"}
    registry.GOALS.append(Goal("B-0", "sync-64", "nothing", 1.0, None))
    try:
        with pytest.raises(ValueError, match="B-0 names nothing"):
            registry.load()
    finally:
        registry.GOALS.pop()


@pytest.mark.slow
def test_a_run_prints_a_table_and_writes_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["sync-64", "lanes-64-grpc", "worlds-8-grpc", "dm-ahead-8", "dm-blocking-8", "floor-64"]
    options = ["--rounds", "1", "--seconds", "0.05", "--busy", "--spin"]
    assert main([*names, *options, "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "gRPC: 64 lanes in one world" in printed
    assert "B-1   lanes-64-grpc against sync-64" in printed
    (path,) = tmp_path.glob("*.json")
    content = json.loads(path.read_text())
    assert list(content["subjects"]) == names
    for key in ("values", "spun"):
        assert all(len(row[key]) == 1 and row[key][0] > 0 for row in content["subjects"].values())
    (chart,) = tmp_path.glob("*.svg")
    drawn = chart.read_text()
    assert all(f"<!-- {text} -->" in drawn for text in ("SyncVectorEnv, in process", "Gymnasium Bridge, TCP"))


def test_a_busy_machine_is_refused_and_with_busy_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.__main__.busy_share", lambda: 0.37)
    options = ["sync-64", "--rounds", "1", "--seconds", "0.01", "--results", str(tmp_path)]
    with pytest.raises(SystemExit) as end:
        main(options)
    assert end.value.code == 2
    assert "expected a quiet machine; programs use 37% of its processors" in capsys.readouterr().err
    assert main([*options, "--busy"]) == 0
    assert "machine BUSY: other programs used 37%" in capsys.readouterr().out


def test_every_subject_of_the_chart_is_registered() -> None:
    registry.load()
    names = [name for panel in PANELS.values() for name in panel]
    assert [name for name in names if name not in registry.SUBJECTS] == []
    assert all(not panel[name] for panel in PANELS.values() for name in panel if name.startswith("floor-"))


def test_an_unknown_name_is_answered_by_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["nothing"])
    assert end.value.code == 2
    assert "there is no subject, group or goal 'nothing'; there are sync-64" in capsys.readouterr().err


def figures_of_servers(row: str) -> list[int]:
    """How many figures a row of the table of attacks has for each server."""
    return [len(cell.split(", ")) for cell in row.strip("| ").split(" | ")[1:]]


@pytest.mark.slow
def test_worlds_in_real_time_are_measured_beside_neighbours_that_misbehave() -> None:
    from benchmarks import realtime

    found = realtime.four_agents(7.0, 60.0, False)  # a reset takes 5 s
    assert found["killed"] == {"exit": -9, "worlds left": 0}
    assert all(found[name]["lateness"]["count"] > 0 for name in ("steady", "thinks 2 s", "resets in 5 s"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["http2", pytest.param("grpcio", marks=pytest.mark.repeat)])
def test_an_attack_is_measured_on_each_server(kind: str) -> None:
    from benchmarks import attacks

    outcome = attacks.measure("PING", kind, 0.3, 1)
    assert 0 < outcome.grown < 500
    assert outcome.share >= 0
    assert outcome.slow_share > 0
    assert outcome.recovery >= 0
    row = attacks.table({"PING": {kind: outcome, "gateway": outcome}}, [kind, "gateway"]).splitlines()[-1]
    assert row.startswith("| PING | ")
    assert figures_of_servers(row) == [4, 4]


@pytest.mark.slow
def test_all_attacks_can_begin() -> None:
    from benchmarks import attacks

    begins = (PREFACE, PREFACE[:1], b"GET ", b"\x16\x03")  # HTTP/2, a byte of it, a WebSocket, TLS
    for name, kind in attacks.ATTACKS.items():
        first = next(kind.pieces(*([1] if kind.learn else []))) if kind.request is None else PREFACE
        assert first.startswith(begins), name


@pytest.mark.slow
def test_rows_and_servers_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import attacks

    rows = "2,000 connections of one byte,256 abandoned worlds"
    attacks.main(["--rows", rows, "--seconds", "0.3", "--rounds", "1", "--servers", "gateway"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[:4:2]] == ["| attack", "| 2,000 connections of one byte"]
    assert lines[3].startswith("| 256 abandoned worlds | ")
    assert figures_of_servers(lines[3]) == [4]
    with pytest.raises(SystemExit):
        attacks.main(["--rows", "nothing"])
    assert "there is no 'nothing'" in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_slot_costs_is_measured_for_each_number_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert slots.main(["2", "6", "--servers", "2", "--seconds", "0.05"]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [row[0] for row in rows] == ["2", "6"]
    assert all(float(row[2]) > 0 for row in rows)


MEASUREMENTS = sorted(
    path.stem
    for path in Path(registry.__file__).parent.glob("*.py")
    if 'if __name__ == "__main__"' in path.read_text("utf-8") and path.stem not in ("__main__", "chaos_server")
)
MEASURE = """
import argparse, sys
from benchmarks.alone import measuring
parser = argparse.ArgumentParser(prog="python -m benchmarks.other")
with measuring(parser, False) as others:
    print("measuring", flush=True)
    sys.stdin.readline()
"""
"""A measurement that runs until it is sent a line."""


def measure(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(MEASUREMENTS, 5))
def test_a_measurement_is_refused_while_another_runs_which_is_named(name: str) -> None:
    with server_process(MEASURE, fresh=True) as (process, said):
        assert said == "measuring"
        done = measure(f"benchmarks.{name}")
    assert done.returncode == 2
    assert "expected no other measurement on this machine" in done.stderr
    assert f"python -m benchmarks.other (process {process.pid}, since " in done.stderr
    assert "--busy" in done.stderr


@pytest.mark.slow
def test_two_measurements_at_once_are_both_marked_and_one_that_was_killed_holds_nobody_up(tmp_path: Path) -> None:
    tiny = ("sync-64", "--rounds", "1", "--seconds", "0.01", "--busy", "--results", str(tmp_path))
    with server_process(MEASURE, fresh=True) as (process, _):
        beside = measure("benchmarks", *tiny)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        other = process.stdout.read()
    assert beside.returncode == 0, beside.stderr
    assert f"BUSY: beside python -m benchmarks.other (process {process.pid}" in beside.stdout
    (path,) = tmp_path.glob("*.json")
    (named,) = json.loads(path.read_text("utf-8"))["beside"]
    assert named.startswith(f"python -m benchmarks.other (process {process.pid}")
    assert "machine BUSY, do not compare these figures: python -m benchmarks (process " in other
    with server_process(MEASURE, fresh=True):
        pass  # is killed at the end
    assert "python -m benchmarks.other" not in measure("benchmarks", *tiny).stdout

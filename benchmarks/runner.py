"""Times subjects in turns, and says what came out."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.quiet import Spinner
from benchmarks.registry import GOALS, SUBJECTS, Goal, Measure, Subject

__all__ = ["Result", "Verdict", "as_table", "judge", "machine", "run_group", "write_json"]


@dataclass
class Result:
    """The numbers of one subject, one a round; or why there are none."""

    subject: Subject
    values: list[float] = field(default_factory=list)
    spun: list[float] = field(default_factory=list)
    """The same beside a loop of the lowest priority on each core, so that no core sleeps; empty: not measured."""
    skipped: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True)
class Verdict:
    """How a goal came out."""

    goal: Goal
    ratio: float
    spread: tuple[float, float]
    spun: float | None = None
    """The ratio beside a loop of the lowest priority on each core."""

    @property
    def met(self) -> bool:
        return self.goal.met(self.ratio)


def run_group(
    subjects: Sequence[Subject],
    rounds: int,
    seconds: float,
    say: Callable[[str], None] = lambda text: None,
    spinner: Spinner | None = None,
) -> list[Result]:
    """Set up all subjects of a group, then time them in turns: each round starts with another one.

    A subject that raises ImportError while it is set up is skipped: its peer is not installed. With a spinner each
    round is followed by one beside it.
    """
    results = [Result(item) for item in subjects]
    with ExitStack() as stack:
        ready: list[tuple[Result, Measure]] = []
        for result in results:
            say(f"setting up: {result.subject.title}")
            try:
                ready.append((result, stack.enter_context(result.subject.open())))
            except ImportError as error:
                result.skipped = f"{error.name} is not installed" if error.name else str(error)
        for _, measure in ready:
            measure(min(seconds, 0.2))  # the first steps of anything are slow
        for number in range(rounds):
            turn = number % max(1, len(ready))
            in_turn = ready[turn:] + ready[:turn]
            for result, measure in in_turn:
                value = measure(seconds)
                result.values.append(value)
                say(f"round {number + 1} of {rounds}: {result.subject.title}: {value:,.0f} {result.subject.unit}")
            if spinner is not None:
                say(f"round {number + 1} of {rounds}, beside a loop on each core")
                with spinner.running():
                    for result, measure in in_turn:
                        result.spun.append(measure(seconds))
    return results


def judge(results: Sequence[Result], goals: Sequence[Goal] = GOALS) -> list[Verdict]:
    """Hold the results against the goals whose subjects were both measured."""
    quiet = {result.subject.name: result.values for result in results}
    spun = {result.subject.name: result.spun for result in results}
    verdicts = []
    for item in goals:
        ratios, beside = _ratios(item, quiet), _ratios(item, spun)
        if ratios:
            spread = (min(ratios), max(ratios))
            verdicts.append(
                Verdict(item, statistics.median(ratios), spread, statistics.median(beside) if beside else None)
            )
    return verdicts


def _ratios(item: Goal, found: Mapping[str, list[float]]) -> list[float]:
    """Return the ratio of each round; none where one of the two was not measured."""
    mine = found.get(item.of, [])
    other = found.get(item.against, []) if isinstance(item.against, str) else [item.against or 1.0] * len(mine)
    return [a / b for a, b in zip(mine, other, strict=True)] if mine and other else []


def machine() -> dict[str, Any]:
    """Say what the numbers were taken on."""
    packages = {name: version(name) for name in ("gymnasium", "numpy", "grpcio", "protobuf")}
    return {"cpus": os.cpu_count(), "python": platform.python_version(), **packages}


def as_table(results: Sequence[Result], verdicts: Sequence[Verdict]) -> str:
    """Write results and goals as text; ratios are to the first of a group."""
    lines: list[str] = []
    for group in dict.fromkeys(result.subject.group for result in results):
        members = [result for result in results if result.subject.group == group]
        measured = [result for result in members if result.values]
        width = max(len(result.subject.title) for result in members)
        spun = any(result.spun for result in measured)
        unit = members[0].subject.unit
        lines += ["", f"{group}: {unit}, median over the rounds", ""]
        lines.append(
            f"{'':{width}}  {'median':>10}  {'least':>10}  {'most':>10}  {'× first':>7}" + "  cores awake" * spun
        )
        first = measured[0].median if measured else 1.0
        for result in members:
            title = f"{result.subject.title:{width}}"
            if not result.values:
                lines.append(f"{title}  skipped: {result.skipped}")
                continue
            numbers = [result.median, min(result.values), max(result.values)]
            shown = "  ".join(f"{number:>10,.4g}" if number < 100 else f"{number:>10,.0f}" for number in numbers)
            awake = f"  {statistics.median(result.spun):>11,.4g}" if spun and result.spun else ""
            lines.append(f"{title}  {shown}  {result.median / first:>7.3f}{awake}")
    if verdicts:
        lines += ["", "goals: median of the ratios of each round (least to most)", ""]
    for verdict in verdicts:
        item = verdict.goal
        against = "" if item.against is None else f" against {item.against}"
        (low, high), state = verdict.spread, "met" if verdict.met else "NOT met"
        measured = f"{verdict.ratio:.2f} ({low:.2f} to {high:.2f})"
        if verdict.spun is not None:
            measured += f", {verdict.spun:.2f} with all cores awake"
        lines.append(f"{item.id:5} {item.of}{against}: {measured}, wanted {item.text}: {state}")
    return "\n".join(lines)


def write_json(
    folder: Path,
    results: Sequence[Result],
    verdicts: Sequence[Verdict],
    rounds: int,
    seconds: float,
    busy: float,
    beside: Sequence[str] = (),
) -> Path:
    """Write everything that was measured into a new file of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "machine": machine(),
        "busy": busy,
        "beside": list(beside),  # other measurements that ran meanwhile
        "rounds": rounds,
        "seconds": seconds,
        "subjects": {
            result.subject.name: {
                "title": result.subject.title,
                "group": result.subject.group,
                "unit": result.subject.unit,
                "kind": result.subject.kind,
                "values": result.values,
                "spun": result.spun,
                "median": result.median if result.values else None,
                "skipped": result.skipped,
            }
            for result in results
        },
        "goals": [
            {
                "id": verdict.goal.id,
                "of": verdict.goal.of,
                "against": verdict.goal.against,
                "wanted": verdict.goal.text,
                "ratio": verdict.ratio,
                "spun": verdict.spun,
                "met": verdict.met,
            }
            for verdict in verdicts
        ],
    }
    path = folder / time.strftime("%Y-%m-%dT%H-%M-%S.json")
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return path


def chosen(names: Sequence[str]) -> list[Subject]:
    """Find subjects by their own names, their group's, or a goal's that needs them; none named: all.

    Raises:
        ValueError: A name is none of these.
    """
    if not names:
        return list(SUBJECTS.values())
    wanted: set[str] = set()
    for name in names:
        found = {item.name for item in SUBJECTS.values() if name in (item.name, item.group)}
        for item in GOALS:
            if item.id == name:
                found |= {item.of} | ({item.against} if isinstance(item.against, str) else set())
        if not found:
            known = ", ".join([*SUBJECTS, *dict.fromkeys(item.id for item in GOALS)])
            raise ValueError(f"there is no subject, group or goal {name!r}; there are {known}")
        wanted |= found
    return [item for item in SUBJECTS.values() if item.name in wanted]

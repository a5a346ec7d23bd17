"""The report of a conformance run, and how it is printed."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

__all__ = ["CheckResult", "Report", "Status"]


class Status(str, enum.Enum):
    """The outcome of a check, or of all checks of one requirement."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The result of one check of one requirement."""

    requirement: str
    """The requirement's id, e.g. `D-9`."""
    name: str
    """The requirement, in words."""
    status: Status
    """The outcome."""
    reason: str = ""
    """Why it failed (what was expected and what came) or was skipped; empty if it passed."""
    notes: tuple[str, ...] = ()
    """Notes on valid behaviour that could be better; with `strict` these are failures."""


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of a conformance run. `str(report)` is a text for people, `as_dict()` is for programs.

    Examples:
        >>> results = (CheckResult("D-8", "Step is refused", Status.FAILED, "expected an error, got a step answer"),)
        >>> print(Report("grpc://localhost:50051", {"D-8": "not joined: no Step, no Reset"}, results))
        dm_env_rpc conformance of grpc://localhost:50051
        FAILED   D-8   not joined: no Step, no Reset
                       failed: Step is refused: expected an error, got a step answer
        1 requirement: 0 passed, 1 failed, 0 skipped
    """

    url: str
    """The checked server."""
    titles: dict[str, str]
    """The checked requirements: a short title for each id."""
    results: tuple[CheckResult, ...]
    """The results of the checks, in the order in which they ran."""

    @property
    def ok(self) -> bool:
        """True if nothing failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return tuple(result for result in self.results if result.status is Status.FAILED)

    @property
    def exit_code(self) -> int:
        """The exit code of the command: 0 if nothing failed, otherwise 1."""
        return 0 if self.ok else 1

    def of(self, requirement: str) -> tuple[CheckResult, ...]:
        """Return the results of one requirement's checks."""
        return tuple(result for result in self.results if result.requirement == requirement)

    def status(self, requirement: str) -> Status:
        """Return the outcome of a requirement: failed if a check failed, passed if one passed, else skipped."""
        found = {result.status for result in self.of(requirement)}
        return next((status for status in (Status.FAILED, Status.PASSED) if status in found), Status.SKIPPED)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, e.g. for JSON."""
        return {
            "url": self.url,
            "ok": self.ok,
            "requirements": {
                requirement: {"title": title, "status": self.status(requirement).value}
                for requirement, title in self.titles.items()
            },
            "checks": [{**dataclasses.asdict(result), "status": result.status.value} for result in self.results],
        }

    def __str__(self) -> str:
        lines = [f"dm_env_rpc conformance of {self.url}"]
        indent = " " * 15
        counts = dict.fromkeys(Status, 0)
        for requirement, title in self.titles.items():
            status = self.status(requirement)
            counts[status] += 1
            lines.append(f"{status.value.upper():8} {requirement:5} {title}")
            lines += [indent + line for line in self._below(requirement)]
        total = len(self.titles)
        summary = ", ".join(f"{count} {status.value}" for status, count in counts.items())
        return "\n".join([*lines, f"{total} requirement{'' if total == 1 else 's'}: {summary}"])

    def _below(self, requirement: str) -> list[str]:
        """Return the lines below a requirement: failures, notes, and skips, with one line per reason for skipping."""
        lines = []
        skipped: dict[str, list[str]] = {}
        for result in self.of(requirement):
            if result.status is Status.FAILED:
                lines.append(f"failed: {result.name}: {result.reason}")
            elif result.status is Status.SKIPPED:
                skipped.setdefault(result.reason, []).append(result.name)
            lines += [f"note: {result.name}: {note}" for note in result.notes]
        for reason, names in skipped.items():
            lines.append(f"skipped: {names[0] if len(names) == 1 else f'{len(names)} checks'}: {reason}")
        return lines

"""`gymnasium-bridge top`: a live table of servers and fleets."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from bridge.cli.program import FAILED, OK, clean, in_options, positive, positive_int, say, table
from bridge.core.extras import is_installed
from bridge.core.logs import counted
from bridge.core.transport.credentials import ClientCredentials, add_credential_options, credential_keywords
from bridge.fleet.top import SERVES, ServerRow, Snapshot, Top, find_directory

__all__ = ["register", "render"]

_EPILOG = """examples:
  gymnasium-bridge top grpc://localhost:50051
  gymnasium-bridge top host-a:50051 host-b:50051           several servers
  gymnasium-bridge top file:///shared/urls.txt             a file with a URL a line, as on Slurm
  gymnasium-bridge top grpc+dns://envs.default.svc:50051   every address of a name, as of a headless Service
  gymnasium-bridge top ray://cart                          a fleet on the Ray cluster that this machine belongs to
  gymnasium-bridge top ray://cart --json --interval 10     an object a line, for other programs

Ctrl-C ends it. It exits with 1 if none of the servers answered the last time. On a terminal the table stays in its
place and has colors where the extra `top` is installed.
"""
_BARS = "▁▂▃▄▅▆▇█"
_STYLES = {"serving": "green", "full": "yellow", "draining": "yellow"}
# Screen lines that are not rows of servers, except those for problems.
_FRAME = 7
_MOST_PROBLEMS = 3
# Columns that a narrow terminal omits, the least important first: a truncated number would be a wrong one.
_DROPPED_FIRST = ("worlds", "steps", "episodes", "up", "failures", "slots")
_COLUMNS = ("worlds", "slots", "steps/s", "steps", "episodes", "failures", "up")
# The width for other outputs, enough for the whole table: nobody sees where a file's lines end.
_UNBOUNDED = 1000


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "top",
        description="Show servers, or all servers of a fleet: worlds, slots, steps per second, episodes, failures.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "targets",
        metavar="URL",
        nargs="+",
        help="grpc://HOST:PORT of a server, or several; or one of file:///PATH, grpc+dns://HOST:PORT, ray://FLEET",
    )
    parser.add_argument(
        "--interval", type=positive, default=2.0, metavar="S", help="seconds between refreshes (default: 2)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object per refresh instead of a table")
    parser.add_argument("--count", type=positive_int, metavar="N", help="stop after N refreshes (default: on Ctrl-C)")
    parser.add_argument(
        "--timeout", type=positive, default=2.0, metavar="S", help="seconds that a server has to answer (default: 2)"
    )
    add_credential_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Poll the servers until Ctrl-C, or `--count` times."""
    output = (
        _LineOutput(_json_lines)
        if arguments.json
        else _TableOutput()
        if is_installed("rich")
        else _LineOutput(_table_lines)
    )
    credentials = ClientCredentials.of(**credential_keywords(arguments))
    directory = find_directory(arguments.targets)
    answered = False
    with Top(directory, " ".join(arguments.targets), credentials, arguments.timeout) as top, output:
        looks, due = 0, time.monotonic()
        try:
            while arguments.count is None or looks < arguments.count:
                time.sleep(max(0.0, due - time.monotonic()))
                due = time.monotonic() + arguments.interval
                snapshot = _in_options(top.look(), arguments.spelled)
                answered = any(row.state in _STYLES for row in snapshot.servers)
                output.show(snapshot)
                looks += 1
        except KeyboardInterrupt:  # the normal way to stop it
            pass
    return OK if answered else FAILED


def _in_options(snapshot: Snapshot, spelled: Mapping[str, str]) -> Snapshot:
    """Return a snapshot whose problems name options of the command instead of Python keywords."""
    rows = tuple(dataclasses.replace(row, problem=in_options(row.problem, spelled)) for row in snapshot.servers)
    return dataclasses.replace(snapshot, servers=rows)


class _LineOutput:
    """An output that prints lines below the previous ones.

    Args:
        lines: Returns the lines to print for a snapshot.
    """

    def __init__(self, lines: Callable[[Snapshot], Sequence[str]]) -> None:
        self._lines = lines

    def __enter__(self) -> None:
        """Begin the output."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the output."""

    def show(self, snapshot: Snapshot) -> None:
        """Print a snapshot."""
        for line in self._lines(snapshot):
            say(line)


def _json_lines(snapshot: Snapshot) -> Sequence[str]:
    """Return a snapshot as one line of JSON."""
    return [json.dumps(snapshot.as_json())]


def _table_lines(snapshot: Snapshot) -> Sequence[str]:
    """Return a snapshot as a table without colors, which does not need the package `rich`."""
    rows = [[clean(text) for text, _ in _cells(row)] for row in snapshot.servers]
    listed = table([("server", "state", *_COLUMNS), *rows], range(2, 2 + len(_COLUMNS)))
    return [_title(snapshot), *_summary(snapshot), "", *listed, *_problems(snapshot, snapshot.servers), ""]


class _TableOutput:
    """An output as a table: redrawn in place on a terminal, otherwise one table below the other."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(soft_wrap=False, width=None if sys.stdout.isatty() else _UNBOUNDED)
        self._live = Live(console=self._console, auto_refresh=False, screen=False)

    def __enter__(self) -> None:
        """Begin the output."""
        if sys.stdout.isatty():
            self._live.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the output, and leave the last table on the screen."""
        if sys.stdout.isatty():
            self._live.stop()

    def show(self, snapshot: Snapshot) -> None:
        """Draw a snapshot."""
        if sys.stdout.isatty():
            width, height = self._console.size
            lines = sum(-(-len(problem) // width) for problem in _problems(snapshot, snapshot.servers))
            self._live.update(render(snapshot, max(1, height - _FRAME - lines), width), refresh=True)
        else:
            with self._console.capture() as printed:
                self._console.print(render(snapshot))
            # A table pads its lines with blanks, which are useless in a file.
            for line in [*printed.get().splitlines(), ""]:
                say(line.rstrip())


def render(snapshot: Snapshot, rows: int | None = None, width: int | None = None) -> Any:
    """Return a snapshot as a table of `rich`.

    Args:
        snapshot: The snapshot.
        rows: The most servers to list; if there are more, those that do not serve come first. None: all.
        width: The characters per line; columns that do not fit are left out. None: show all.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    listed, left = _listed(snapshot.servers, rows)
    # Converted to texts, because `rich` would read the host of grpc://[fe80::1]:50051 as markup.
    cells = [[Text(text, style=style) for text, style in _cells(row)] for row in listed]
    columns = _fitting(cells, width)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    # Folded if the line is still too short: the port is at the end, and may be the only difference between two servers.
    table.add_column("server", overflow="fold")
    table.add_column("state", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in cells:
        table.add_row(*row[:2], *(row[2 + _COLUMNS.index(column)] for column in columns))
    parts: list[Any] = [Text(_title(snapshot), style="bold"), *([Text(line) for line in _summary(snapshot)]), Text("")]
    parts.append(table)
    if left:
        parts.append(Text(f"… and {left} more that serve", style="dim"))
    # Wrapped, because the remedy is at the end of a text.
    parts += [Text(problem, style="red") for problem in _problems(snapshot, listed)]
    return Group(*parts)


def _problems(snapshot: Snapshot, listed: Sequence[ServerRow]) -> list[str]:
    """Return the lines that describe problems; servers with the same problem share one."""
    servers: dict[str, list[str]] = {}
    for row in listed:
        if row.problem:
            servers.setdefault(row.problem, []).append(row.name)
    problems = [f"{_some(names)}: {problem}" for problem, names in servers.items()]
    if snapshot.problem:
        problems.insert(0, f"the directory cannot be read, its servers stay as they were: {snapshot.problem}")
    if len(problems) > _MOST_PROBLEMS:
        problems[_MOST_PROBLEMS:] = [f"… and {len(problems) - _MOST_PROBLEMS} more problems"]
    return [clean(problem) for problem in problems]


def _some(names: Sequence[str]) -> str:
    """Return the names of servers; for more than three, the first one and the number of others."""
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} others"


def _fitting(rows: Sequence[Sequence[Any]], width: int | None) -> list[str]:
    """Return the number columns that fit beside the servers and their states."""
    from rich.cells import cell_len

    widths = [
        max(cell_len(str(cell)) for cell in column) + 1
        for column in zip(("server", "state", *_COLUMNS), *rows, strict=True)
    ]
    columns = list(_COLUMNS)
    for column in _DROPPED_FIRST:
        if width is None or sum(widths[:2]) + sum(widths[2 + _COLUMNS.index(each)] for each in columns) <= width + 1:
            break
        columns.remove(column)
    return columns


def _listed(servers: Sequence[ServerRow], rows: int | None) -> tuple[list[ServerRow], int]:
    """Return the servers to list, and the number of omitted ones."""
    if rows is None or len(servers) <= rows:
        return list(servers), 0
    order = sorted(range(len(servers)), key=lambda index: servers[index].state in SERVES)
    rows = max(1, rows - 1)
    return [servers[index] for index in order[:rows]], len(servers) - rows


def _title(snapshot: Snapshot) -> str:
    return f"{snapshot.target}   {time.strftime('%H:%M:%S', time.localtime(snapshot.time))}"


def _summary(snapshot: Snapshot) -> list[str]:
    total = snapshot.total()
    servers = f"{total['serving']} of {total['servers']} servers serve"
    for state, count in Counter(row.state for row in snapshot.servers if row.state != "serving").items():
        servers += f", {count} {state}"
    # If no server reports its capacity, or none serves, there is no number to show.
    known = total["slots"] is not None and total["serving"]
    used = f"{total['slots_used']:,} of " if known else ""
    slots = f"{used}{counted(total['slots'] if known else total['slots_used'], 'slot')}"
    failures = f", {counted(total['failures'], 'failure')}" if total["failures"] else ""
    rate = total["steps_per_second"]
    return [
        servers,
        f"{counted(total['worlds'], 'world')}, {slots} used, {counted(total['episodes'], 'episode')}{failures}",
        *([] if rate is None else [f"{rate:,.0f} steps/s  {_bars(snapshot.history)}".rstrip()]),
    ]


def _bars(history: Sequence[float]) -> str:
    """Return numbers as a line of bars, the largest at full height."""
    most = max(history, default=0.0)
    if len(history) < 2 or not most:
        return ""
    return "".join(_BARS[min(len(_BARS) - 1, int(number / most * len(_BARS)))] for number in history)


def _cells(row: ServerRow) -> list[tuple[str, str]]:
    """Return the cells of a row, each with its style."""
    head = [(clean(row.name), ""), (row.state, _STYLES.get(row.state, "red"))]
    slots = _count(row.slots_used)
    if row.slots_used is not None and row.slots is not None:
        slots += f"/{row.slots:,}"
    numbers = [_count(row.worlds), slots, *map(_count, (row.steps_per_second, row.steps, row.episodes, row.failures))]
    numbers.append("-" if row.uptime is None else _duration(row.uptime))
    failed = _COLUMNS.index("failures")
    return [*head, *((text, "red" if at == failed and row.failures else "") for at, text in enumerate(numbers))]


def _count(number: float | None) -> str:
    """Return a number as text; `-` if the server has not reported it."""
    return "-" if number is None else f"{number:,.0f}"


def _duration(seconds: float) -> str:
    """Return a duration in its two largest units: `2d 3h`, `5m 12s`, `42s`."""
    left = int(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts or unit == "s":
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])

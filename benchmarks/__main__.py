"""`python -m benchmarks`: measure, print a table, write the numbers to `benchmarks/results/`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from benchmarks.alone import add_busy, measuring
from benchmarks.chart import draw
from benchmarks.quiet import MOST, Spinner, busy_share
from benchmarks.registry import GOALS, SUBJECTS, load
from benchmarks.runner import as_table, chosen, judge, machine, run_group, write_json

RESULTS = Path(__file__).parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks that are named; the exit code is 0 whether goals are met or not, unless --strict."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Environments over the network, side by side with their peers; rounds are interleaved.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="subjects, groups or goals (B-1); none: everything")
    parser.add_argument("--list", action="store_true", help="list them and end")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each subject (default: 5)")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="length of a turn (default: 1)")
    parser.add_argument("--spin", action="store_true", help="measure each round also beside a loop on each core")
    add_busy(parser)
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a goal is not met")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="where the numbers go")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # of peers, whose threads a forked process cannot have
    load()
    if arguments.list:
        for item in SUBJECTS.values():
            print(f"{item.group:10} {item.name:18} {item.title}")
        for item in GOALS:
            print(f"{item.id:10} {item.of} against {item.against}: {item.text}")
        return 0
    if arguments.rounds < 1 or not arguments.seconds > 0:
        parser.error("expected at least one round of a positive number of seconds")
    try:
        subjects = chosen(arguments.names)
    except ValueError as error:
        parser.error(str(error))
    with measuring(parser, arguments.busy) as others:
        busy = busy_share()
        if busy > MOST and not arguments.busy:
            parser.error(
                f"expected a quiet machine; programs use {busy:.0%} of its processors (at most {MOST:.0%}): wait, or "
                "measure anyway with --busy, which marks the results"
            )
        results = []
        for group in dict.fromkeys(item.group for item in subjects):
            members = [item for item in subjects if item.group == group]
            with Spinner() if arguments.spin else nullcontext() as spinner:
                results += run_group(members, arguments.rounds, arguments.seconds, say, spinner)
        say("")
        verdicts = judge(results)
        facts = ", ".join(f"{name} {value}" for name, value in machine().items())
        busy = max(busy, busy_share())
        beside = others()
        state = "quiet" if busy <= MOST else f"BUSY: other programs used {busy:.0%}"
        state += f", BUSY: beside {', '.join(beside)}" if beside else ""
        title = f"{arguments.rounds} rounds of {arguments.seconds:g} s each, in turns; machine {state}; {facts}"
        print(title)
        print(as_table(results, verdicts))
        path = write_json(arguments.results, results, verdicts, arguments.rounds, arguments.seconds, busy, beside)
        print(f"\nwritten to {os.path.relpath(path)}")
        try:
            if draw(path.with_suffix(".svg"), results, title):
                print(f"drawn in {os.path.relpath(path.with_suffix('.svg'))}")
        except ImportError as error:
            print(f"not drawn: {error.name} is not installed")
        return int(arguments.strict and not all(verdict.met for verdict in verdicts))


def say(text: str) -> None:
    """Show progress: one line that changes in a terminal, a line each elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

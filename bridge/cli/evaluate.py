"""`gymnasium-bridge evaluate`: measure the returns of a policy in served environments."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from bridge.cli.program import OK, PROGRAM, add_wait_option, known_port, positive, positive_int, say, seed_number
from bridge.cli.target import find_function
from bridge.core.transport.credentials import TLS, add_credential_options, credential_keywords
from bridge.errors import SettingError

__all__ = ["EvaluationProgress", "register"]

_EPILOG = """examples:
  gymnasium-bridge evaluate grpc://localhost:50051/CartPole-v1 --policy my_module:act
  gymnasium-bridge evaluate host-a:50051 host-b:50051 --num-envs 64 --policy ws://gpu:8000 --episodes 500 --json
  gymnasium-bridge evaluate localhost:50051 --compare ws://gpu:8000 ws://gpu:8001

A policy is the URL of `gymnasium-bridge policy` or of openpi's server, with ?token=TEXT where it asks for one, or
MODULE:FUNCTION that takes a batch of observations and returns actions. --timeout counts for environments and policies,
and so do the certificates, as far as their URLs have TLS; ?timeout=S and ?tls_ca=FILE in a policy's URL are for that
policy alone.
Episode k is seeded with --seed + k. Standard error shows how far it is: a bar at a terminal, else a line now and then.
"""


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "evaluate",
        description="Play episodes with a policy; print returns and their confidence intervals.",
        epilog=_EPILOG,
    )
    parser.add_argument("urls", metavar="URL", nargs="+", help="grpc://HOST:PORT of environments, or a directory")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--policy", metavar="POLICY", help="a URL, or MODULE:FUNCTION")
    chosen.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two policies, on the same seeds")
    parser.add_argument("--episodes", type=int, default=50, metavar="N", help="how many episodes (default: 50)")
    parser.add_argument(
        "--seed", type=seed_number, default=0, metavar="N", help="seed of the first episode (default: 0)"
    )
    parser.add_argument("--num-envs", type=int, metavar="N", help="slots (default: one for each URL, or its lanes)")
    parser.add_argument("--execution-horizon", type=positive_int, metavar="N", help="actions of a chunk (default: all)")
    parser.add_argument("--rows", action="store_true", help="the function takes one observation, not a batch")
    parser.add_argument("--record", metavar="FOLDER", help="record the episodes there, with observations")
    parser.add_argument(
        "--web-port", type=known_port, metavar="PORT", help="show worlds and results at http://127.0.0.1:PORT"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--timeout", type=positive, default=10.0, metavar="S", help="seconds to answer (default: 10)")
    add_wait_option(parser)
    add_credential_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print."""
    from bridge.policies import compare, evaluate  # they need an extra, which `--help` does not

    named = arguments.compare or [arguments.policy]
    at_urls = ["://" in text for text in named]
    if arguments.rows and all(at_urls):
        raise SettingError("--rows is for a policy as MODULE:FUNCTION, got it with a URL")
    if arguments.execution_horizon is not None and not any(at_urls):
        raise SettingError("--execution-horizon is for a policy at a URL, got it with MODULE:FUNCTION")
    names = ("episodes", "seed", "num_envs", "timeout", "wait_for_server", "record", "web_port")
    given = {name: getattr(arguments, name) for name in names}
    credentials = credential_keywords(arguments)
    tls = credentials.pop("tls", None)
    # If no URL has TLS, pass the options to the environments, whose error explains it.
    if tls is not None and (any(map(_may_have_tls, arguments.urls)) or not any(map(_has_tls, named))):
        given["tls"] = tls
    given.update(credentials)
    urls = arguments.urls[0] if len(arguments.urls) == 1 else arguments.urls
    if tls is not None and "tls" in given:  # the server name is that of the environments' server
        tls = dataclasses.replace(tls, server_name=None)
    policies = [_policy(text, arguments, tls) for text in named]
    if arguments.web_port is not None:
        print(f"In a browser: http://127.0.0.1:{arguments.web_port}", file=sys.stderr)
    # Two policies are evaluated one after the other. Do not print their URLs, which may contain a token.
    titles = ["the first: ", "the second: "] if arguments.compare else [""]
    with EvaluationProgress(titles, arguments.episodes) as progress:
        found: Any = (compare if arguments.compare else evaluate)(urls, *policies, progress=progress, **given)
    for line in [json.dumps(found.summary())] if arguments.json else str(found).splitlines():
        say(line)  # line by line, because `say` replaces control characters
    return OK


def _has_tls(policy: str) -> bool:
    return policy.startswith("wss://")


def _may_have_tls(url: str) -> bool:
    """Return True if connections to the environments may use TLS; those of a directory may."""
    return "://" in url and url.partition("://")[0] not in ("grpc", "ws", "unix", "grpc+dns")


def _policy(text: str, arguments: argparse.Namespace, tls: TLS | None) -> Any:
    from bridge.policies import RemotePolicy, by_rows

    if "://" in text:
        return RemotePolicy(
            text,
            execution_horizon=arguments.execution_horizon,
            timeout=arguments.timeout,
            tls=tls if _has_tls(text) else None,
            wait_for_server=arguments.wait_for_server,
        )
    function = find_function(text, "as its ws:// URL, or ")
    return by_rows(function) if arguments.rows else function


class EvaluationProgress:
    """Writes the progress to standard error: a bar at a terminal, otherwise occasional lines.

    An episode may take minutes, so a thread updates the progress each second within the `with` block.

    Args:
        titles: The prefixes of the lines, one for each evaluation, in order.
        episodes: The number of episodes of each evaluation.
        clock: Returns the time in seconds.
    """

    period = 10.0
    """Seconds between two lines."""

    def __init__(self, titles: Sequence[str], episodes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._titles = list(titles)
        self._clock = clock
        self._began = self._told = clock()
        self._done, self._total = 0, episodes
        self._at_terminal = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="bridge-evaluate-progress", daemon=True)

    def __enter__(self) -> EvaluationProgress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(1.0):
            if not self._at_terminal:
                self.tell()

    def __call__(self, done: int, total: int) -> None:
        """Report that `done` of `total` episodes are finished."""
        with self._lock:
            self._done, self._total = done, total
        if self._at_terminal:
            last = done == total
            bar = f"\r{self._titles[0]}[{'#' * (30 * done // total):30}] {done}/{total} episodes"
            self._write(bar, end="\n" if last else "")
        else:
            self.tell()
        if done == total and len(self._titles) > 1:
            with self._lock:
                del self._titles[0]
                self._done, self._began, self._told = 0, self._clock(), self._clock()

    def tell(self) -> None:
        """Write a line, unless the last one is recent. There is no line for the end, which the result shows."""
        with self._lock:
            done, total, now = self._done, self._total, self._clock()
            if now - self._told < self.period or done == total:
                return
            self._told, took = now, now - self._began
        rest = f", some {took / done * (total - done):.0f} s to go" if done else ""
        self._write(f"{PROGRAM}: {self._titles[0]}{done} of {total} episodes in {took:.0f} s{rest}")

    def _write(self, text: str, end: str = "\n") -> None:
        with contextlib.suppress(OSError):  # the reader is gone or the disk is full: the results still count
            print(text, end=end, file=sys.stderr, flush=True)

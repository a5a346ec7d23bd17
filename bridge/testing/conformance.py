"""Conformance checks for dm_env_rpc servers in any language: `check_server(url)`.

The checks open their own connections, send valid and invalid requests, and check the responses.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from bridge.core.extras import feature, needed
from bridge.core.keywords import grouped
from bridge.core.transport.address import Address, parse_address, shown_token
from bridge.core.transport.credentials import TLS, AccessKeywords, ClientAccess, ClientCredentials
from bridge.core.transport.http_proxies import HttpProxy, find_grpc_proxy
from bridge.core.transport.service import remedy
from bridge.errors import ConnectError, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import (
    checks_agents,
    checks_properties,
    checks_specs,
    checks_steps,
    checks_stream,
    checks_worlds,
    samples,
)
from bridge.testing.bench import CHECKS, Bench, Check, CheckedAgent, Failed, Options, Skip
from bridge.testing.report import CheckResult, Report, Status
from bridge.testing.wire import NoAnswerError, ProcessStream, StreamEndedError, describe, open_channel

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["REQUIREMENTS", "check_server"]

_MODULES = (checks_agents, checks_properties, checks_specs, checks_steps, checks_stream, checks_worlds)  # fill CHECKS

REQUIREMENTS: dict[str, str] = {
    "D-1": "one answer a request, of its kind or an error, in order",
    "D-2": "a failed request changes nothing and says why",
    "D-3": "CreateWorld: unique names, no unknown settings",
    "D-4": 'the default world ""',
    "D-5": "worlds are independent of each other",
    "D-6": "JoinWorld: once, a world that exists, no unknown settings",
    "D-7": "specs: unique names, dots only nest, stable UIDs",
    "D-8": "no Step and no Reset when not joined",
    "D-9": "the first Step of a sequence ignores its actions and gives RUNNING",
    "D-10": "just the requested observations",
    "D-11": "actions that do not fit their specs are errors",
    "D-12": "a Step that lacks an action",
    "D-13": "RUNNING, TERMINATED, INTERRUPTED in a lawful order",
    "D-14": "Reset: the next Step is a first one, specs are sent back",
    "D-15": "ResetWorld: interrupts the others once, waits for that",
    "D-16": "LeaveWorld: harmless, and not for ever",
    "D-17": "DestroyWorld: not the joined one, not an unknown one",
    "D-18": "properties and other extensions",
    "D-19": "tensors have their dtype, shape and number of elements",
    "D-20": "ranges: inclusive, of the spec's type and shape",
    "D-21": "reward and discount",
    "D-22": "several agents in one world",
    "D-25": "requests sent ahead",
}
"""The requirements that are checked, by id; docs/protocol.md says what can be observed of each."""

TEXTS = ("", "a", "0")
"""The texts to try as an action: specs do not say which texts are allowed."""


@grouped(ClientAccess, tls=TLS)
def check_server(
    url: str,
    *,
    timeout: float = 10.0,
    create_settings: Mapping[str, Any] | None = None,
    join_settings: Mapping[str, Any] | None = None,
    actions: Mapping[str, Any] | None = None,
    required_actions: Sequence[str] = (),
    steps: int = 500,
    seed: int = 0,
    strict: bool = False,
    only: Sequence[str] = (),
    **keywords: Unpack[AccessKeywords],
) -> Report:
    """Check a running dm_env_rpc server against the protocol.

    It creates, plays, resets and destroys worlds, and writes properties (their own values back): the server should have
    no other clients. At the end every created world is destroyed and every connection closed. A server that does not
    answer within `timeout` fails the check. A token is sent as `authorization: Bearer …` in the metadata of each
    connection.

    Checks of optional parts of the protocol that the server does not have are skipped, with the reason.

    Examples:
        >>> report = check_server("grpc://localhost:50051")  # doctest: +SKIP
        >>> assert report.ok, str(report)                    # doctest: +SKIP

    Args:
        url: `grpc://HOST:PORT` or `grpcs://HOST:PORT`, or over WebSocket `ws://` or `wss://`; `listen://HOST:PORT`
            checks the first server that dials in over WebSocket within the timeout. A path is sent as the CreateWorld
            setting `env_id`, query parameters as further settings (numbers and booleans as such, others as text);
            `?world=NAME` joins an existing world.
        timeout: Seconds to wait for a response.
        create_settings: CreateWorld settings, by name: numbers, strings, arrays, or Tensor messages.
        join_settings: JoinWorld settings, in the same form.
        actions: Valid values of actions by name, where the spec does not say enough: texts, protos, and actions of
            variable length.
        required_actions: Names of actions that a Step in a running sequence must contain (D-12).
        steps: The most Steps to play until the end of a sequence.
        seed: The seed of the random actions.
        strict: Treat notes as failures: valid behaviour that could be better, such as an unspecific error code.
        only: The ids of the requirements to check; empty: all.
        keywords: The keywords of `ClientAccess`, which the signature lists.

    Returns:
        The report: `report.ok` is True if nothing failed, `str(report)` is a text for people.

    Raises:
        AddressError: The URL cannot be read.
        SettingError: A setting has no tensor form, the timeout or the number of steps is not positive, a requirement is
            unknown, or a token or certificate cannot be used for this URL.
        ConnectError: No server answered within the timeout.
    """
    if url.strip().startswith("listen://"):
        with feature("dial", "a URL of listen://"):
            from bridge.dial.listener import first_dialed

        if keywords.get("tls") is not None:
            raise SettingError("expected listen:// without tls= for a check, got it with TLS")
        with first_dialed(url, timeout, **keywords) as dialed:
            if not parse_address(dialed).websocket:
                text = "it dials by gRPC; expected a server that dials by WebSocket, or the URL at which it listens"
                raise SettingError(f"{url!r}: {text}")
            return check_server(
                dialed,
                timeout=timeout,
                create_settings=create_settings,
                join_settings=join_settings,
                actions=actions,
                required_actions=required_actions,
                steps=steps,
                seed=seed,
                strict=strict,
                only=only,
            )
    address = _read_address(url, ClientAccess(**keywords).credentials)
    if not 0 < timeout <= 1e6 or steps < 1 or seed < 0:
        raise SettingError(
            "expected a timeout of more than 0 s and at most a million, 1 step or more and a seed from 0 on, "
            f"got {timeout}, {steps} and {seed}"
        )
    unknown = sorted(set(only) - set(REQUIREMENTS))
    if unknown:
        raise SettingError(f"expected requirements out of {', '.join(REQUIREMENTS)}, got {', '.join(unknown)}")
    options = Options(
        timeout=timeout,
        create_settings=_tensors({**_settings_in(address), **(create_settings or {})}),
        join_settings=_tensors(join_settings or {}),
        world=address.world,
        actions=dict(actions or {}),
        required_actions=tuple(required_actions),
        steps=steps,
        seed=seed,
    )
    chosen = [check for check in CHECKS if not only or check.requirement in only]
    chosen.sort(key=lambda check: list(REQUIREMENTS).index(check.requirement))
    shown = shown_token(address)
    metadata = () if shown is None else (("authorization", f"Bearer {shown}"),)
    with _open(address, timeout) as channel:
        _see_that_somebody_is_there(channel, metadata, address, timeout)
        results = _CheckRun(Bench(channel, metadata, options), strict).all(chosen)
    titles = {requirement: title for requirement, title in REQUIREMENTS.items() if not only or requirement in only}
    return Report(address.url, titles, tuple(results))


def _read_address(url: str, given: ClientCredentials) -> Address:
    """Read a URL, with the credentials from the keywords.

    Raises:
        AddressError: The URL cannot be read.
        SettingError: The credentials cannot be used for this URL.
    """
    address = parse_address(url).with_credentials(given)
    address.check_tls()
    return address


def _settings_in(address: Address) -> dict[str, Any]:
    """Return the CreateWorld settings in a URL."""
    found: dict[str, Any] = {} if address.env_id is None else {"env_id": address.env_id}
    found.update((name, _from_text(value)) for name, value in address.settings)
    return found


def _open(address: Address, timeout: float) -> Any:
    """Return a gRPC channel, or its equivalent over WebSocket; raise SettingError if a package is missing."""
    if address.websocket:
        with needed(f"{address.scheme}:// needs the package websockets", "web"):
            from bridge.testing.websocket_wire import WebSocketChannel
        return WebSocketChannel(address, timeout)
    held, credentials = address.credentials, None
    if address.tls:
        credentials = grpc.ssl_channel_credentials(held.tls_ca, held.tls_key, held.tls_certificate)
    return open_channel(address.target, credentials, held.tls_server_name, _proxy(address))


def _proxy(address: Address) -> HttpProxy | None:
    """Return the proxy for grpcio; None for WebSocket, which does not use grpcio."""
    return None if address.websocket else find_grpc_proxy(address.host, address.port)


def _see_that_somebody_is_there(
    channel: Any, metadata: tuple[tuple[str, str], ...], address: Address, timeout: float
) -> None:
    """Check that a server accepts connections; its responses are left to the checks.

    Raises:
        ConnectError: The server accepts no connection.
    """
    proxy = _proxy(address)
    note = "" if proxy is None else proxy.note
    with ProcessStream(channel, metadata, timeout) as stream:
        try:
            stream.ask(pb.EnvironmentRequest(leave_world=pb.LeaveWorldRequest()))
        except StreamEndedError as error:
            if error.code in (
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.UNAUTHENTICATED,
                grpc.StatusCode.UNIMPLEMENTED,
            ):
                unavailable = error.code is grpc.StatusCode.UNAVAILABLE
                hint = remedy(address.scheme, str(error)) if unavailable else "Is it a dm_env_rpc server?"
                raise ConnectError(address.url, f"{error}{note}. {hint}") from None
        except NoAnswerError as error:
            if address.websocket:
                raise ConnectError(address.url, f"{error}: is the server running?") from None
            try:
                grpc.channel_ready_future(channel).result(timeout=1.0)
            except grpc.FutureTimeoutError:
                text = f"{error}, and no connection{note}: is the server running?"
                raise ConnectError(address.url, text) from None


def _from_text(text: str) -> Any:
    """Return a query parameter as a number or a boolean if it is one, otherwise as text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (bool, int, float)) else text


def _tensors(settings: Mapping[str, Any]) -> dict[str, pb.Tensor]:
    """Return settings as tensors.

    Raises:
        SettingError: A value has no tensor form.
    """
    kinds = {dtype: number for number, dtype in samples.NUMPY.items()}
    kinds[np.dtype(bool)] = pb.BOOL
    out = {}
    for name, value in settings.items():
        if isinstance(value, pb.Tensor):
            out[name] = value
            continue
        array = np.asarray(value)
        kind = pb.STRING if array.dtype.kind in "US" and not isinstance(value, bytes) else kinds.get(array.dtype)
        if kind is None:
            raise SettingError(f"expected a number, a text or an array of them for the setting {name!r}, got {value!r}")
        out[name] = samples.pack(kind, array)
    return out


class _CheckRun:
    """Runs the checks one after another, after finding out what the server supports."""

    def __init__(self, bench: Bench, strict: bool) -> None:
        self.bench, self.strict = bench, strict
        self.silent = ""  # why no more requests are sent
        self.told = False  # True if a check has failed for that reason
        self.waits = False  # True if the first Step in a world got no response

    def all(self, checks: Sequence[Check]) -> list[CheckResult]:
        try:
            self._explore()
            return [self._one(check) for check in checks]
        finally:
            self.bench.tidy()

    def _one(self, check: Check) -> CheckResult:
        bench = self.bench
        if self.silent:
            # A failure, unless a check has already reported it: the server was silent before the first check.
            status = Status.SKIPPED if self.told else Status.FAILED
            self.told = True
            return CheckResult(check.requirement, check.name, status, self.silent)
        bench.notes, bench.hung = [], False
        status, reason = Status.PASSED, ""
        try:
            check.run(bench)
        except Failed as failure:
            status, reason = Status.FAILED, str(failure)
        except Skip as skip:
            status, reason = Status.SKIPPED, str(skip)
        except SettingError:  # from `actions`: not a fault of the server
            raise
        except Exception as error:  # a response so malformed that the check could not read it
            where = traceback.extract_tb(error.__traceback__)[-1]
            raised = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
            status, reason = Status.FAILED, f"expected something that can be read, got what raised {raised}"
        notes = tuple(bench.notes)
        if self.strict and notes and status is not Status.FAILED:
            status, reason, notes = Status.FAILED, "; ".join(notes), ()
        hung, bench.hung = bench.hung, False
        bench.tidy()
        if hung or bench.hung:
            self._still_there()
            self.told = status is Status.FAILED
        return CheckResult(check.requirement, check.name, status, reason, notes)

    def _still_there(self) -> None:
        """After a missing response, send a simple request, and give up if that is not answered either."""
        self.bench.hung = False
        try:
            with self.bench.connection() as agent:
                agent.ask(step=pb.StepRequest())
        except Failed as failure:
            self.silent = f"the server stopped answering: {failure}"

    def _explore(self) -> None:
        """Find out what the server supports. Problems found here are reported by a later check."""
        bench = self.bench
        self._try(self._second_connection)
        self._try(self._worlds)
        if not bench.no_world:
            self._try(self._actions)
        if bench.hung:
            self._still_there()
        if self.waits and not self.silent:
            # Each check would wait for its first Step in vain, which takes minutes and says nothing about the server.
            self.silent = (
                "nothing could be played: the first Step in a world got no answer, though the server answers. Does the "
                "world wait for its other agents? Serve it so that it goes on without them (of this package: with "
                "missing_agent='default')"
            )

    def _try(self, explore: Any) -> None:
        try:
            explore()
        except SettingError:
            raise
        except Exception:  # a check finds it again and reports it
            pass

    def _worlds(self) -> None:
        bench, options = self.bench, self.bench.options
        bench.cache["create"] = bench.cache["default"] = "no answer"
        bench.no_world = "no world can be joined"
        with bench.connection() as agent:
            answer = agent.ask(join_world=pb.JoinWorldRequest(world_name="", settings=options.join_settings))
            refused = answer.WhichOneof("payload") == "error"
            bench.cache["default"] = describe(answer) if refused else ""
            if not refused:
                bench.no_world = ""
                agent.ask(leave_world=pb.LeaveWorldRequest())
        with bench.connection() as agent:
            answer = agent.ask(create_world=pb.CreateWorldRequest(settings=options.create_settings))
            bench.cache["create"] = describe(answer)
            if answer.WhichOneof("payload") == "create_world":
                bench.can_create, bench.no_world = True, ""
                self._try(lambda: self._shared(agent, answer.create_world.world_name))
                bench.destroy(agent, answer.create_world.world_name)
            elif options.create_settings:  # the default world is not the world to be checked
                bench.no_world = "no world can be made with the given settings"
        if options.world is not None:
            bench.no_world = ""
        if bench.no_world:
            joined = bench.cache["default"] or "a world"
            bench.no_world += f': JoinWorld of "" gave {joined}, CreateWorld gave {bench.cache["create"]}'

    def _shared(self, maker: CheckedAgent, name: str) -> None:
        """Find out whether other connections can use a world of this connection."""
        bench = self.bench
        if bench.one_connection:
            return
        join = pb.JoinWorldRequest(world_name=name, settings=bench.options.join_settings)
        with bench.connection() as other:
            answer = other.ask(join_world=join)
        if answer.WhichOneof("payload") == "error" and maker.ask(join_world=join).WhichOneof("payload") != "error":
            bench.own_worlds = (
                f"a world is there for the connection alone that created it, as D-3 tells: another one got "
                f"{describe(answer)}"
            )

    def _second_connection(self) -> None:
        bench = self.bench
        deadline = time.monotonic() + bench.options.timeout
        while True:
            with bench.connection() as first:
                try:
                    first.ask(step=pb.StepRequest())
                except Failed as failure:
                    # The connection that was opened to see whether the server accepts any may still count.
                    if "RESOURCE_EXHAUSTED" in failure.got and time.monotonic() < deadline:
                        threading.Event().wait(0.02)
                        continue
                    raise
                with bench.connection() as second:
                    try:
                        second.ask(step=pb.StepRequest())
                    except Failed as failure:
                        # A refusal is allowed, silence is not: the check of D-1 tells them apart by this mark.
                        mark = "!" if bench.hung else ""
                        bench.one_connection = f"{mark}the server takes one connection at a time: {failure.got}"
            return

    def _actions(self) -> None:
        bench = self.bench
        for number, text in enumerate(TEXTS):
            with bench.joined() as agent:
                specs = agent.changeable().values()
                has_text = any(spec.dtype == pb.STRING for spec in specs)
                # A spec does not say which texts and protos are allowed, nor what a variable length encodes.
                bench.cache["unclear"] = has_text or any(
                    spec.dtype == pb.PROTO or any(size < 0 for size in spec.shape) for spec in specs
                )
                hung, bench.hung = bench.hung, False
                try:
                    agent.start()
                finally:
                    self.waits, bench.hung = bench.hung, bench.hung or hung
                answer = agent.ask(step=pb.StepRequest(actions=agent.draw(text)))
                if answer.WhichOneof("payload") == "step":
                    bench.text, bench.unlawful = text, ""
                    return
                bench.unlawful = f"the server refused actions out of their specs: {describe(answer)}"
                if bench.cache["unclear"]:
                    bench.unlawful += "; give `actions` for those whose specs say too little"
                if not has_text or number == len(TEXTS) - 1:
                    return

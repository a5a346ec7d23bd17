"""The actors of a fleet: one for each server, and a supervisor.

Ray's control store keeps the creation arguments of an actor, in pieces that are small enough for it. So an actor can be
restarted after its creator has ended. The wanted number of servers changes later, so every server remembers it: a
restarted supervisor asks them.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import gymnasium

from bridge.core.back_off import doubling_pause
from bridge.core.client.endpoints import Endpoint
from bridge.core.extras import imported_from, provided
from bridge.core.server.auth import Auth
from bridge.core.server.core_server import SWITCH_INTERVAL
from bridge.core.transport.address import parse_address
from bridge.errors import BridgeError
from bridge.fleet.health import NOT_SERVING, SERVING, check_health
from bridge.fleet.plan import FleetStatus, ServerStatus, servers_to_drain, too_few

with imported_from("fleets on Ray need the package ray", "ray"):
    import ray
    import ray.util

__all__ = ["NAMESPACE", "FleetSettings", "ServerActor", "Supervisor", "actor_options", "server_prefix"]

NAMESPACE = "gymnasium-bridge"
"""The namespace in Ray for the names of all actors of fleets."""
_log = logging.getLogger(__name__)
_TICK = 0.25
# Seconds between two status requests to a server, between two health checks, and for one health check.
_ASK_PERIOD = 1.0
_HEALTH_PERIOD = 5.0
_HEALTH_TIMEOUT = 5.0
# Failed checks in a row after which a server is replaced.
_MOST_MISSES = 3
# Seconds that a server has to close its environments after it was told to stop.
_STOP_TIMEOUT = 15.0
# Seconds after the drain timeout at which a server that has not ended is stopped.
_DRAIN_MARGIN = 10.0
# Seconds for which a restarted supervisor waits for the servers' memory.
_RECOVERY_TIMEOUT = 30.0
# Seconds until a lost server is replaced: the first pause and the longest one; it doubles.
_RETRY = (1.0, 30.0)


def server_prefix(fleet: str) -> str:
    """Return the prefix of the names of a fleet's servers."""
    return f"{fleet}/server-"


@dataclasses.dataclass(frozen=True)
class FleetSettings:
    """The constant settings of a fleet."""

    name: str
    """Its name."""
    lanes: int
    """Environments in each world."""
    slots_per_server: int
    """The slots that a server carries, unless it must carry more."""
    token: str | None = dataclasses.field(repr=False)
    """The token that clients send; None: none."""
    drain_timeout: float
    """Seconds that clients have to leave a draining server."""
    actor_options: Mapping[str, Any]
    """Ray's options for each server's actor."""


def actor_options(name: str, **more: Any) -> dict[str, Any]:
    """Return Ray's options for an actor that outlives its creator and is restarted when it ends."""
    return {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1, **more}


class ServerActor:
    """A server in a process of Ray. A restarted one listens at another port.

    Args:
        name: Its name.
        token: The token that clients send; None: none.
        pieces: The pickled environment, the keywords of `serve_gym`, and specs of the registry, in pieces.
    """

    def __init__(self, name: str, token: str | None, *pieces: bytes) -> None:
        import ray.cloudpickle

        sys.setswitchinterval(SWITCH_INTERVAL)
        env, options, specs = ray.cloudpickle.loads(b"".join(pieces))  # the user of this cluster sent it
        for spec in specs:
            gymnasium.registry.setdefault(spec.id, spec)
        self._name = name
        self._node = ray.util.get_node_ip_address()
        self._memory: dict[str, Any] = {}
        with warnings.catch_warnings():
            if token is not None:  # otherwise every server would warn of a missing token; the client does so once
                warnings.simplefilter("ignore", RuntimeWarning)
            auth = dataclasses.replace(options.pop("auth", None) or Auth(), insecure=token is None)
            self._server = provided("serve_gym")(env, host=self._node, token=token, auth=auth, start=False, **options)
        self._url = self._server.url + ("" if token is None else f"?token={quote(token)}")
        self._thread = threading.Thread(target=self._server.wait, name="bridge-fleet-server", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Return the server's own status, with its URL and node."""
        return {
            **self._server.status(),
            "url": self._url,
            "node": self._node,
            "pid": os.getpid(),
            "ended": not self._thread.is_alive(),
            "memory": self._memory,
        }

    def remember(self, memory: dict[str, Any]) -> None:
        """Keep what a restarted supervisor needs to know."""
        self._memory = memory

    def drain(self, timeout: float) -> None:
        """Accept no new worlds, and end when the last client has left, or after `timeout` seconds."""
        self._server.drain(timeout)

    def stop(self) -> None:
        """Close the environments."""
        self._server.stop()


class _FleetServer:
    """What the supervisor knows of a server."""

    def __init__(self, name: str, handle: Any, slots: int, now: float) -> None:
        self.name = name
        self.handle = handle
        self.slots = slots
        self.state = "starting"
        self.said: dict[str, Any] = {}
        """Its last status."""
        self.said_at = now
        """When it arrived."""
        self.url = ""
        """Its URL while it answers; otherwise empty."""
        self.last_url = ""
        self.question: Any = None
        """A pending request for its status."""
        self.asked_at = -float("inf")
        self.checked_at = now
        self.check: Future[str] | None = None
        self.misses = self.checks = self.restarts = 0
        self.deadline = float("inf")
        """When a server that drains or stops is ended by force."""
        self.stopping: Any = None
        self.problem = ""

    def status(self, now: float) -> ServerStatus:
        """Return the server's status for users."""
        numbers = {name: int(self.said.get(name, 0)) for name in ("pid", "worlds", "steps", "episodes", "failures")}
        return ServerStatus(
            name=self.name,
            state=self.state,
            url=self.url,
            node=str(self.said.get("node", "")),
            slots=self.slots,
            slots_used=int(self.said.get("slots", 0)),
            checks=self.checks,
            restarts=self.restarts,
            problem=self.problem,
            age=now - self.said_at if self.said else 0.0,
            **numbers,
        )


class Supervisor:
    """The actor that keeps the wanted number of servers, in a thread of its own.

    Args:
        settings: The fleet's constants.
        wanted: The initial number of servers.
        pieces: The argument of each `ServerActor`.
    """

    def __init__(self, settings: FleetSettings, wanted: int, *pieces: bytes) -> None:
        self._settings = settings
        self._pieces = pieces
        self._servers: dict[str, _FleetServer] = {}
        self._memory = {"version": 0, "wanted": wanted, "slots": settings.slots_per_server, "next": 0}
        self._lock = threading.RLock()
        self._checks = ThreadPoolExecutor(8, thread_name_prefix="bridge-fleet-health")
        self._problem = ""
        self._failures = 0
        self._start_after = 0.0
        self._ending = False
        self._recover()
        self._thread = threading.Thread(target=self._run, name="bridge-fleet", daemon=True)
        self._thread.start()

    # The methods that users call. Ray calls them one at a time.

    def endpoints(self) -> list[Endpoint]:
        """Return the servers that answer."""
        with self._lock:
            return [
                Endpoint(server.url, server.name, draining=server.state != "serving", slots=server.slots)
                for server in self._servers.values()
                if server.url
            ]

    def status(self) -> FleetStatus:
        """Return the fleet's status."""
        with self._lock:
            now = time.monotonic()
            servers = tuple(server.status(now) for server in self._servers.values())
            return FleetStatus(self._settings.name, self._memory["wanted"], servers, self._problem)

    def scale(self, wanted: int, force: bool) -> str:
        """Change the wanted number of servers; return why it is refused, or ""."""
        lanes, slots = self._settings.lanes, self._settings.slots_per_server
        with self._lock:
            status = self.status()
            refused = too_few(wanted, status, lanes, slots)
            if refused and not force:
                return refused
            if refused:
                worlds = -(-status.slots_used // lanes)
                slots = lanes * -(-worlds // max(1, wanted))
            self._remember(wanted=wanted, slots=slots)
            self._failures, self._problem = 0, ""
            for server in self._servers.values():
                server.slots = slots
            return ""

    def shutdown(self) -> None:
        """End all servers without waiting for their clients."""
        with self._lock:
            self._ending = True
            self._memory["wanted"] = 0
        # The thread ends first, because it would replace the stopped servers.
        self._thread.join(_STOP_TIMEOUT)
        with self._lock:
            servers = list(self._servers.values())
        asked = {server.name: server.handle.stop.remote() for server in servers if server.url}
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=_STOP_TIMEOUT)
        for server in servers:
            self._end(server)
        self._checks.shutdown(wait=False, cancel_futures=True)

    # Memory

    def _remember(self, **changes: int) -> None:
        self._memory = {**self._memory, **changes, "version": self._memory["version"] + 1}

    def _recover(self) -> None:
        """Take over the existing servers, and what they remember."""
        prefix = server_prefix(self._settings.name)
        found = [
            actor["name"]
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix)
        ]
        now = time.monotonic()
        for name in sorted(found, key=lambda name: int(name[len(prefix) :])):
            try:
                handle = ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:  # it ended in the meantime
                continue
            self._servers[name] = _FleetServer(name, handle, self._settings.slots_per_server, now)
        asked = [server.handle.status.remote() for server in self._servers.values()]
        if not asked:
            return
        _log.warning("fleet %s: taking over %d servers", self._settings.name, len(asked))
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_RECOVERY_TIMEOUT)
        for question in ready:
            try:
                memory = ray.get(question)["memory"]
            except ray.exceptions.RayError:
                continue
            # Servers that missed the last change have an older memory.
            if memory and memory["version"] > self._memory["version"]:
                self._memory = memory
        numbers = [int(name[len(prefix) :]) for name in found]
        # A server may have started after the others were last updated. Its number must not be reused.
        self._memory["next"] = max(self._memory["next"], max(numbers) + 1)
        for server in self._servers.values():
            server.slots = self._memory["slots"]

    # Supervision of the servers

    def _run(self) -> None:
        while not self._ending:
            try:
                self._tick(time.monotonic())
            except Exception:
                _log.exception("fleet %s: a look at the servers failed; the next one follows", self._settings.name)
            time.sleep(_TICK)

    def _tick(self, now: float) -> None:
        self._ask(now)
        self._take_answers(now)
        self._check_health(now)
        self._end_what_is_over(now)
        self._reconcile(now)

    def _ask(self, now: float) -> None:
        for server in list(self._servers.values()):
            # One request at a time: Ray queues calls to an actor that does not answer.
            if server.question is None and now >= server.asked_at + _ASK_PERIOD:
                server.asked_at = now
                server.question = server.handle.status.remote()

    def _take_answers(self, now: float) -> None:
        asked = {server.question: server for server in self._servers.values() if server.question is not None}
        if not asked:
            return
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0.1)
        for question in ready:
            server = asked[question]
            server.question = None
            try:
                said = ray.get(question)
            except ray.exceptions.ActorUnavailableError as error:
                self._unavailable(server, str(error).partition("\n")[0])
            except ray.exceptions.RayActorError as error:
                self._dead(server, error, now)
            except ray.exceptions.RayError as error:
                self._unavailable(server, str(error).partition("\n")[0])
            else:
                self._answered(server, said, now)

    def _unavailable(self, server: _FleetServer, why: str) -> None:
        """Record that a server does not answer; Ray restarts it."""
        with self._lock:
            if server.url:
                _log.warning("fleet %s: %s does not answer", self._settings.name, server.name)
            server.url = ""
            server.problem = why
            if server.state == "serving":
                server.state = "starting"

    def _dead(self, server: _FleetServer, error: Exception, now: float) -> None:
        """Record that a server has ended for good: it could not be made, or was killed from outside."""
        with self._lock:
            self._servers.pop(server.name, None)
            # It was about to go, or enough others exist: fewer are wanted by now.
            staying = sum(other.state not in ("draining", "stopping") for other in self._servers.values())
            if server.state in ("draining", "stopping") or staying >= self._memory["wanted"]:
                return
            self._failures += 1
            self._problem = _cause(error)
            self._start_after = now + doubling_pause(self._failures, *_RETRY)
        _log.error("fleet %s: %s is gone: %s", self._settings.name, server.name, self._problem)

    def _answered(self, server: _FleetServer, said: dict[str, Any], now: float) -> None:
        with self._lock:
            if said["url"] != server.last_url:
                if server.last_url:
                    server.restarts += 1
                    _log.warning("fleet %s: %s is back at another address", self._settings.name, server.name)
                server.last_url, server.misses, server.checks, server.checked_at = said["url"], 0, 0, now
                if server.state in ("draining", "stopping"):  # its clients have lost their worlds, and no new ones come
                    server.deadline = now
            server.said, server.said_at = said, now
            server.url = "" if said["ended"] else said["url"]
            server.problem = ""
            # A serving server does not clear the problem: others may still fail to start.
            if server.state == "starting":
                server.state, self._failures, self._problem = "serving", 0, ""
            if said["draining"] and server.state == "serving":  # it began to drain before this supervisor was restarted
                self._drain(server, now, ask=False)
            if said["memory"].get("version", -1) != self._memory["version"] and server.state == "serving":
                server.handle.remember.remote(self._memory)

    def _check_health(self, now: float) -> None:
        for server in list(self._servers.values()):
            check = server.check
            if check is not None:
                if not check.done():
                    continue
                server.check = None
                self._checked(server, check, now)
            if server.state == "serving" and server.url and now >= server.checked_at + _HEALTH_PERIOD:
                server.checked_at = now
                server.check = self._checks.submit(_health, server.url)

    def _checked(self, server: _FleetServer, check: Future[str], now: float) -> None:
        problem = check.result()
        if not problem or server.state != "serving":
            server.checks += not problem
            server.misses = 0
            return
        server.misses += 1
        server.problem = f"health check: {problem}"
        server.checked_at = now - _HEALTH_PERIOD + _TICK  # the next check follows at once
        if server.misses < _MOST_MISSES:
            return
        _log.error(
            "fleet %s: %s fails its health checks and is replaced: %s", self._settings.name, server.name, problem
        )
        server.misses = 0
        # A process that hangs cannot end itself. Ray restarts it: `max_restarts` is -1.
        ray.kill(server.handle, no_restart=False)
        self._unavailable(server, server.problem)

    # The number of servers

    def _reconcile(self, now: float) -> None:
        with self._lock:
            if self._ending:
                return
            status = self.status()
            active = sum(server.active for server in status.servers)
            for name in servers_to_drain(status.servers, status.wanted):
                self._drain(self._servers[name], now)
            if active < status.wanted and now >= self._start_after:
                for _ in range(status.wanted - active):
                    self._start(now)

    def _start(self, now: float) -> None:
        number = self._memory["next"]
        self._remember(next=number + 1)
        name = f"{server_prefix(self._settings.name)}{number}"
        options = actor_options(name, scheduling_strategy="SPREAD", **self._settings.actor_options)
        handle: Any = ray.remote(ServerActor).options(**options)
        self._servers[name] = _FleetServer(
            name, handle.remote(name, self._settings.token, *self._pieces), self._memory["slots"], now
        )

    def _drain(self, server: _FleetServer, now: float, *, ask: bool = True) -> None:
        timeout = self._settings.drain_timeout
        server.deadline = now + timeout + _DRAIN_MARGIN
        # It has not reported a URL yet, so it has no clients to wait for.
        if server.state == "starting" and not server.said:
            server.state, server.deadline = "stopping", now
            return
        server.state = "draining"
        if ask:
            server.handle.drain.remote(timeout)

    def _end_what_is_over(self, now: float) -> None:
        for server in list(self._servers.values()):
            ended = bool(server.said.get("ended"))
            if server.state == "draining" and (ended or now >= server.deadline):
                with self._lock:
                    server.state, server.url, server.deadline = "stopping", "", now + _STOP_TIMEOUT
                    server.stopping = server.handle.stop.remote()
            elif server.state == "serving" and ended:  # it did not end on our request
                ray.kill(server.handle, no_restart=False)
                self._unavailable(server, "it ended by itself")
            elif server.state == "stopping" and (now >= server.deadline or _is_done(server.stopping)):
                self._end(server)

    def _end(self, server: _FleetServer) -> None:
        ray.kill(server.handle, no_restart=True)
        with self._lock:
            self._servers.pop(server.name, None)


def _is_done(question: Any) -> bool:
    return question is not None and bool(ray.wait([question], timeout=0)[0])


def _health(url: str) -> str:
    """Return what is wrong with a server; "" if it serves."""
    try:
        said = check_health(parse_address(url), _HEALTH_TIMEOUT, verify=False)
    except BridgeError as error:
        return str(error)
    return "" if said in (SERVING, NOT_SERVING) else said


def _cause(error: Exception) -> str:
    """Return why an actor died, in one line: the last line of the traceback is the constructor's exception."""
    lines: Sequence[str] = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if ": " in line), lines[-1] if lines else repr(error))

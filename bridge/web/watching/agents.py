"""Agents that receive pictures as an observation, and spectators of worlds in lock-step.

`Gallery` admits agents. The JoinWorld setting `frame` adds the observations `frame` and `watch` to any agent. With
`role=spectator`, a world in lock-step has any number of agents that receive the environment's results, but do not act,
delay nobody, and do not keep the world alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bridge.core.encoding.names import WATCH
from bridge.core.encoding.properties import PropertyTree
from bridge.core.encoding.tensors import Array, Spec
from bridge.core.image_files import QUALITY
from bridge.core.worlds.base import Agent, World
from bridge.core.worlds.observers import Background, Observer
from bridge.core.worlds.settings import ROLES, read_choice, read_scalar, refuse_unknown
from bridge.core.worlds.world import EnvWorld, env_world
from bridge.errors import Code, RequestError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.web.watching.kept_seats import SEAT_KEY, KeptSeats
from bridge.web.watching.match import finite
from bridge.web.watching.pictures import FORMATS, MAX_LANES, View
from bridge.web.watching.spectator import Spectator
from bridge.web.watching.takeover_agent import TAKEOVER, join_takeover
from bridge.web.watching.watch import REALTIME_SHARE, SHARE, Watch

__all__ = ["Gallery"]

_SETTINGS = ("frame", "lanes")
_DEFAULT_LANES = 16
_PATIENCE = 10.0


class Gallery(Observer):
    """Lets people watch and take over in all worlds of a server.

    Args:
        takeover_timeout: Seconds without input after which a person who has taken over at a limited pace loses the
            seat.
        seat_timeout: Seconds for which a seat is kept after a lost connection.
        quality: JPEG quality of pictures, 1 to 100.
    """

    def __init__(self, takeover_timeout: float, seat_timeout: float, quality: int = QUALITY) -> None:
        self._background: Background
        self._kept_seats = KeptSeats(seat_timeout)
        self._takeover_timeout = takeover_timeout
        self._quality = quality
        self._watches: dict[World, Watch] = {}

    def start(self, background: Background) -> None:
        """Start with a server; its helper thread encodes the pictures."""
        self._background = background

    def watch(self, world: EnvWorld) -> Watch:
        """Return the watch of a world, and create it if there is none."""
        if world not in self._watches:
            share = SHARE if world.fps is None else REALTIME_SHARE
            self._watches[world] = Watch(world, self._background, share, self._takeover_timeout, self._quality)
        return self._watches[world]

    def forget(self, world: EnvWorld) -> None:
        """Delete the watch of a world without viewers."""
        self._watches.pop(world, None)

    def counts(self, worlds: Sequence[World]) -> Mapping[str, float]:
        """Return the number of viewers of all worlds."""
        return {"viewers": sum(map(self._viewers, worlds))}

    def describe(self, world: World) -> Mapping[str, Any]:
        """Return a world's number of viewers, the people who have taken over, and each agent's last and mean return.

        `taken_over` maps each occupied seat to the person who has taken over. `returns` is empty if nobody watches, no
        episode has ended, or there is only one agent.
        """
        watch = self._watches.get(world)
        found = {} if watch is None else watch.returns.of_agents
        people = {} if watch is None else watch.takeovers
        taken = {seat: one.who for key, one in people.items() if not one.left for seat in _seats(world, key)}
        returns = {agent: (finite(values[-1]), finite(sum(values) / len(values))) for agent, values in found.items()}
        names = [one.who for one in people.values()]
        return {"viewers": self._viewers(world), "returns": returns, "taken_over": taken, "taken_over_by": names}

    def _viewers(self, world: World) -> int:
        return self._watches[world].viewers if world in self._watches else 0

    def join(
        self, world: World, settings: Mapping[str, pb.Tensor], join: Callable[[Mapping[str, pb.Tensor]], Agent]
    ) -> Agent:
        """Add an agent to a world: with pictures, as a spectator, for a takeover, or as the world itself does.

        Raises:
            RequestError: As for the world's `join`; FAILED_PRECONDITION: the world has no pictures, or no spectators.
        """
        return self._join(world, settings, lambda others: self._kept_seats.join(world, others, join))

    def keep(self, world: World, agent: Agent) -> bool:
        """Keep the seat of a client that has disconnected, if it may return."""
        return self._kept_seats.keep(world, agent)

    def _join(
        self, any_world: World, settings: Mapping[str, pb.Tensor], join: Callable[[Mapping[str, pb.Tensor]], Agent]
    ) -> Agent:
        if (world := env_world(any_world)) is None:
            return join(settings)
        if "role" in settings and read_choice(settings, "role", (*ROLES, TAKEOVER)) == TAKEOVER:
            return self._kept_seats.join(
                world, settings, lambda others: join_takeover(world, others, self.watch, self.forget)
            )
        # Real-time worlds implement the role themselves; those in lock-step wait for each of their agents.
        spectates = "role" in settings and world.fps is None
        if not (spectates or set(_SETTINGS) & set(settings)):
            return join(settings)
        view = _read_view(world, settings)
        rest = {name: value for name, value in settings.items() if name not in _SETTINGS}
        if spectates and read_choice(rest, "role", ROLES) == "spectator":
            refuse_unknown(rest, ("role", "wait", SEAT_KEY), "JoinWorld")
            world.refuse_if_over()
            waits = ("now", "next_frame")[:: -1 if view is None else 1]  # with pictures, wait for them by default
            wait = read_choice(rest, "wait", waits)
            return WatchingAgent(world, self, view, Spectator(world, self.watch(world), wait))
        if spectates:
            rest.pop("role")
        inner = join(rest)
        return inner if view is None else WatchingAgent(world, self, view, inner)


def _seats(world: World, key: Any) -> Sequence[str]:
    """Return the page's names for the seats of a takeover key: an agent by its id, or a lane."""
    inner = env_world(world)
    facts = None if inner is None else inner.env.facts
    if facts is None or not (facts.agents or (facts.num_envs or 1) > 1):
        return list(world.played)  # one, or all that share an environment
    return [str(key) if facts.agents else f"lane {key}"]


def _read_view(world: EnvWorld, settings: Mapping[str, pb.Tensor]) -> View | None:
    """Return the requested view; None if no pictures are requested."""
    count = world.env.facts.num_envs or 1
    if "frame" not in settings:
        if "lanes" in settings:
            text = "expected the setting lanes, which chooses the lanes of pictures, with frame=jpeg or frame=png"
            raise RequestError(Code.INVALID_ARGUMENT, text)
        return None
    lanes = tuple(range(min(count, _DEFAULT_LANES)))
    if "lanes" in settings:
        array = np.atleast_1d(np.asarray(read_scalar(settings, "lanes")))
        right = array.ndim == 1 and array.dtype.kind in "iu" and 0 < len(array) <= MAX_LANES
        if not right or (array < 0).any() or (array >= count).any() or len(set(array.tolist())) < len(array):
            raise RequestError(
                Code.INVALID_ARGUMENT,
                f"expected the setting lanes to be 1 to {MAX_LANES} different integers from 0 to {count - 1}, "
                f"got {array!r:.80}",
            )
        lanes = tuple(int(lane) for lane in array)
    return View(read_choice(settings, "frame", FORMATS), lanes)


class WatchingAgent(Agent):
    """An agent with pictures, or a spectator of a world in lock-step.

    Args:
        world: The agent's world.
        gallery: Its watches render the pictures.
        view: The requested view; None: no pictures.
        inner: The agent to which pictures are added: one of the world's, or a `Spectator`.
    """

    def __init__(self, world: EnvWorld, gallery: Gallery, view: View | None, inner: Agent) -> None:
        self._world = world
        self._gallery = gallery
        self._watch = gallery.watch(world)
        self._view = view
        self._inner = inner
        self._spectates = inner.watches
        self._in_lockstep = world.fps is None
        self.actions = inner.actions
        self.observations = dict(inner.observations)
        # All action and observation specs of the inner agent are included. It may have hidden some from a previous
        # client.
        self._first = max(self.observations, default=0) + 1
        if view is not None:
            extras = [
                # The bytes of a JPEG or PNG, of any length.
                Spec.number("frame", (-1,), np.uint8),
                Spec.number("watch", (len(WATCH),), np.float64),
            ]
            self.observations.update(enumerate(extras, start=self._first))
        self._wants_picture = False
        self._only_looks = False
        """True if the current Step asks a spectator's agent only for pictures."""
        self._entered = False
        """True if the inner agent is in an episode."""
        self._number = 0
        self._data = b""
        self._figures = np.full(len(WATCH), np.nan)
        self._gone = False
        self._left = False
        self._watch.add(self, view)

    @property
    def unwrapped(self) -> Agent:
        """The world's own agent."""
        return self._inner

    @property
    def watches(self) -> bool:
        """True if it only watches."""
        return self._spectates

    def prepare(self, uids: Sequence[int]) -> None:
        """Record whether a picture is requested, and pass the other UIDs to the inner agent."""
        # A client that does not request `frame` in this Step gets no picture, and does not wait for one.
        self._wants_picture = self._view is not None and self._first in uids
        others = [uid for uid in uids if uid < self._first]
        self._only_looks = self._wants_picture and self._spectates and self._in_lockstep and not others
        self._inner.prepare(others)

    def reset(self, settings: Mapping[str, pb.Tensor], running: bool) -> None:
        """Forward a Reset to the inner agent."""
        self._inner.reset(settings, running)

    async def begin(self) -> int:
        """Begin a sequence, and wait for a picture if one is requested."""
        self._entered = False
        resets = self._world.resets
        if self._spectates or not self._in_lockstep:
            resets.end(self)  # ResetWorld waits neither for one that only waits for pictures, nor for a spectator
        state = await self._enter()
        resets.end(self._inner)  # the inner agents of some worlds begin by themselves
        if not self._spectates:
            resets.start(self)
        await self._look()
        return state

    async def step(self, actions: Mapping[int, Array]) -> int:
        """Step, and wait for a picture if one is requested."""
        if self._spectates and (self._only_looks or not self._entered):
            state = await self._enter()
        else:
            state = await self._inner.step(actions)
        await self._look()
        return state

    async def _enter(self) -> int:
        """Let the inner agent begin an episode, unless only pictures are requested."""
        # A spectator waits until somebody plays. Pictures show the present state, even of a world that its agent has
        # left: the next episode may be hours away, and the viewer would be gone by then.
        if self._only_looks:
            return pb.RUNNING
        state = await self._inner.begin()
        self._entered = True
        return state

    @property
    def acts_on_arrival(self) -> bool:  # type: ignore[override]
        """True if its actions take effect on arrival."""
        return self._inner.acts_on_arrival

    @property
    def reports(self) -> bool:  # type: ignore[override]
        """False if the current Step returns no observations."""
        return self._inner.reports

    @property
    def unlisted_actions(self) -> Mapping[int, Spec]:  # type: ignore[override]
        """Actions that a Step may contain in addition to those of the specs."""
        return self._inner.unlisted_actions

    def act(self, actions: Mapping[int, Array]) -> float:
        """Apply the actions of a Step on arrival."""
        return self._inner.act(actions)

    async def report(self) -> int:
        """Wait for the results of the Step, and for a picture if one is requested."""
        state = await self._inner.report()
        await self._look()
        return state

    def interrupt(self) -> None:
        """End the sequence because of a ResetWorld."""
        self._inner.interrupt()

    async def _look(self) -> None:
        """Wait for a picture that is new for the viewer."""
        if not self._wants_picture or self._view is None:
            return
        # The client may disconnect between the step and the wait, when there is no wait to cancel yet.
        if self._gone:
            raise RequestError(Code.CANCELLED, "the client hung up while it waited")
        # In lock-step the world stands still until this client steps again, so no later picture would come.
        now = self._in_lockstep and not self._spectates
        picture = await self._watch.picture(self, self._view, self._number, now=now)
        watch = self._watch
        returns = watch.returns.values
        drawn = (np.nan,) * 3
        if picture is not None:
            self._number, self._data = picture.number, picture.data
            drawn = (picture.steps, self._world.scheduler.now() - picture.drawn_at, picture.cost)
        else:
            self._data = b""
        last, mean = (returns[-1], sum(returns) / len(returns)) if returns else (np.nan, np.nan)
        self._figures = np.array([self._number, *drawn, watch.viewers, watch.returns.episodes, last, mean])

    def observe(self, uids: Sequence[int]) -> Mapping[int, Array]:
        """Return the observations of the last transition, and the picture."""
        found = dict(self._inner.observe([uid for uid in uids if uid < self._first]))
        for uid in uids:
            if uid == self._first:
                found[uid] = np.frombuffer(self._data, np.uint8)
            elif uid == self._first + 1:
                found[uid] = self._figures
        return found

    def properties(self) -> PropertyTree:
        """Return the properties of the world."""
        return self._inner.properties()

    async def answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Forward a request for a property."""
        return await self._inner.answer_property(request)

    async def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Forward a call."""
        return await self._inner.call(request)

    def hang_up(self) -> None:
        """Cancel its waits."""
        self._gone = True
        self._watch.cancel(self)
        self._inner.hang_up()

    def rest(self) -> bool:
        """Let the inner agent rest, and stop watching: a returning client requests its pictures anew."""
        rests = self._inner.rest()
        if rests:
            self._stop_watching()
        return rests

    def _stop_watching(self) -> None:
        """Stop watching; the inner agent stays in the world."""
        if self._watch.remove(self):
            self._gallery.forget(self._world)

    def leave(self) -> None:
        """Leave the world, and stop watching."""
        if self._left:
            return
        self._left = True
        self._stop_watching()
        self._inner.leave()

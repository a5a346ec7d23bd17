"""The pacer of several agents whose episodes are the rounds of a match: `serve_parallel(fps=…, match=True)`.

Each seat is an agent of the environment. Clients take seats with JoinWorld. People, who join with the setting
`player=person:NAME`, declare themselves ready with the property `world.ready` or with Reset. All read the match from
the property `world.match`. `Match` decides when a round begins; the server's policies play agents without a client.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from bridge.core.encoding.properties import NUMBER, TEXT, Property, PropertyTree
from bridge.core.rounds import RoundState
from bridge.core.worlds.agent import EnvAgent
from bridge.core.worlds.base import Agent, PacedWorld
from bridge.core.worlds.group import name_of_function
from bridge.core.worlds.realtime.loop_lane import LoopAgent
from bridge.core.worlds.realtime.multi_agent import Frame, JointClock
from bridge.core.worlds.realtime_options import RealtimeOptions
from bridge.core.worlds.scheduling import Timer
from bridge.core.worlds.settings import ResetRequest
from bridge.errors import Code, RequestError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.web.watching.match import Match, MatchOptions, Order

__all__ = ["MatchPacer"]


class MatchPacer(JointClock):
    """A clock for several agents whose episodes are the rounds of a match, in which each agent is a seat.

    Args:
        options: The options of the clock.
        match: The times of the match.
    """

    allows_substitutes = False

    def __init__(self, options: RealtimeOptions, match: MatchOptions) -> None:
        # Each episode is a round, which begins when the match decides.
        super().__init__(dataclasses.replace(options, autoreset=False))
        self._match_options = match
        self._next_settings: tuple[int | None, Any] = (None, None)
        self._match_timer: Timer | None = None

    def bind(self, world: PacedWorld) -> None:
        """Attach the pacer to a world; raise SettingError like `JointClock.bind`."""
        super().bind(world)
        default = self.options.default_action
        nobody = "nobody" if default is None else name_of_function(default)
        others = {name: stand_in.name for name, stand_in in self.stand_ins.items()}
        self.match = Match({seat: others.get(seat, nobody) for seat in self.group}, self._match_options)
        """Decides which client has which seat, and when a round begins."""
        self.subscribe(self._on_frame)
        world.shown["match"] = self._describe_match

    # Seats

    def admitted(self, agent: Agent) -> None:
        """Give a playing agent its seat, unless the seat was kept for it and its client has returned."""
        super().admitted(agent)
        own = self.inside.get(agent)
        # A seat that was kept for a lost client still has its state in the match: taking it again would forget that it
        # is playing.
        if own is None or own.watches or self.match.seats[own.name].kind:
            return
        self.match.take(own.name, own.player)
        if self.match.state is RoundState.RUNNING:
            self._sit_out(own.name)
        self.start()
        self._follow_match()

    async def begin(self, agent: EnvAgent) -> int:
        """Wait until a round runs in which the seat takes part, and enter it."""
        if not agent.watches:
            self._refuse_unready(agent.name)
        return await super().begin(agent)

    def properties_of(self, agent: EnvAgent) -> PropertyTree:
        """Return an agent's properties below `world`, including the actions of its seat."""
        tree = super().properties_of(agent)
        if agent.watches:
            return tree
        text = "whether this seat is ready for the next round: 1 or 0"
        seat = self.match.seats[agent.name]

        def set_ready(value: Any) -> None:
            if int(value) not in (0, 1):
                raise RequestError(Code.INVALID_ARGUMENT, f"expected world.ready to be 1 or 0, got {int(value)}")
            self.world.refuse_if_over()
            self.match.set_ready(agent.name, bool(value))
            self._follow_match()

        ready = Property("world.ready", NUMBER, text, lambda: int(seat.ready), set_ready)
        return tree.merged(PropertyTree([ready]))

    def is_played(self, name: str) -> bool:
        """Return True if a client plays an agent in the round, so that its policy does not."""
        return self.match.is_playing(name)

    def _refuse_unready(self, name: str) -> None:
        """Raise if a person who neither plays nor is ready begins to Step, and so would wait for a round forever."""
        seat = self.match.seats[name]
        if not (seat.ready or seat.playing):
            raise RequestError(
                Code.FAILED_PRECONDITION,
                f"{seat.name!r} is not ready for the next round of this match: write 1 to the property world.ready, or "
                "send Reset, and then Step",
            )

    def ask_reset(self, loop_agent: LoopAgent, asked: ResetRequest) -> None:
        """Process a Reset: the agent becomes ready for the next round, and gives up a running round that it is in."""
        self.world.refuse_if_over()
        name = self._seat_of(loop_agent)
        # Read first: `give_up` removes the agent from the episode.
        inside = asked.restart and self.loop.is_in_episode(loop_agent)
        self.loop.give_up(loop_agent, restart=asked.restart or not (name and self.match.is_playing(name)))
        if name is not None:
            # The round belongs to all: the last seed or options that any client gave apply.
            if asked.seeds[0] is not None or asked.options:
                self._next_settings = asked.seeds[0], asked.options
            if inside:
                self.match.stand_down(name)
            self.match.set_ready(name, True)
        self._changed()
        self.start()
        self._follow_match()

    def dismiss(self, loop_agent: LoopAgent) -> None:
        """Remove an agent from the loop and from its seat, where a policy continues."""
        name = self._seat_of(loop_agent)
        self.loop.leave(loop_agent)
        if name is not None:
            self.match.leave(name)
            self._follow_match()

    def _seat_of(self, loop_agent: LoopAgent) -> str | None:
        """Return the seat of an agent; None if it has none, or no longer."""
        return next((name for name in self.group if self.loop.player_of(name) is loop_agent), None)

    def _sit_out(self, name: str) -> None:
        if (loop_agent := self.loop.player_of(name)) is not None and not self.match.is_playing(name):
            self.loop.sit_out(loop_agent)

    # Rounds

    def _follow_match(self) -> None:
        """Execute the match's orders, and schedule the next call."""
        if self._match_timer is not None:
            self._match_timer.cancel()
            self._match_timer = None
        if self.over:
            return
        order = self.match.tick(self.now())
        if order is Order.END:
            self.end_episode()
            # The environment does not report the end of an episode that was cut off.
            self.match.ended(None)
            order = self.match.tick(self.now())
        if order is Order.BEGIN:
            settings, self._next_settings = self._next_settings, (None, None)
            self.begin_episode(*settings)
        due = self.match.wake()
        # When tests advance a virtual clock, `turned` is called, which checks `wake` itself.
        if self._driver.subscribe is None and due < math.inf:
            self._match_timer = self.world.scheduler.call_later(max(0.0, due - self.now()), self._follow_match)

    def turned(self, when: float) -> bool:
        """Execute the match's orders up to a time of the virtual clock; return True if there were any."""
        if self.over or self.match.wake() > when:
            return False
        self._follow_match()
        return True

    def _on_frame(self, frame: Frame) -> None:
        if self.match.state not in (RoundState.STARTING, RoundState.RUNNING):
            return
        if frame.error is not None:
            # The page shows it to people, so it is the message without the traceback.
            self.match.failed(frame.error.partition("\nTraceback ")[0], self.now())
        elif frame.number == 0:
            self.match.started()
            for name in self.group:
                self._sit_out(name)
        elif not frame.alive:
            self.match.ended(self._returns(frame.episode))
        else:
            return
        # Deferred: the loop is processing this frame, and an order could begin or end an episode in the middle of it.
        self.world.scheduler.call_soon(self._follow_match)

    def _returns(self, episode: int) -> dict[str, float]:
        """Return the agents' returns in an episode so far, by name."""
        return {name: lane.reward for name, lane in self.loop.agent_lanes.items() if lane.episode == episode}

    @property
    def others_play(self) -> bool:
        """True: an agent that waits for a round waits for others to be ready, or to end theirs."""
        return True

    def prepare_reset(self, settings: Mapping[str, pb.Tensor], caller: Agent | None) -> Callable[[], None]:
        """Refuse a ResetWorld: no client may end a round for all others."""
        raise RequestError(
            Code.FAILED_PRECONDITION,
            f"the world {self.world.name!r} is a match, whose rounds begin once all are ready; leave out ResetWorld",
        )

    def stop(self) -> None:
        """Stop the clock, and the countdown."""
        super().stop()
        self._follow_match()

    # Properties

    def _describe_match(self) -> dict[str, Any]:
        running = self.match.state is RoundState.RUNNING
        returns = self._returns(self.loop.environment.episode) if running else {}
        return self.match.describe(self.now(), returns)

    def properties(self) -> PropertyTree:
        """Return the tree below `world`."""
        text = "the match: who sits where and is ready, the countdown, the last result, as JSON"
        match = Property("world.match", TEXT, text, lambda: json.dumps(self._describe_match()))
        return super().properties().merged(PropertyTree([match]))

"""Lock step: each Step of the one agent steps the environment, or all lanes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from gymnasium.vector import AutoresetMode

from bridge.core.encoding.properties import PropertyTree
from bridge.core.encoding.tensors import Array
from bridge.core.worlds.agent import EnvAgent
from bridge.core.worlds.base import DEFAULT_PLAYER, OTHER_WORLD, Agent, PacedWorld
from bridge.core.worlds.environment import Result
from bridge.core.worlds.group import ONE
from bridge.core.worlds.pacer import Pacer
from bridge.core.worlds.settings import Settings, masked, read_reset, reading, refuse_unknown
from bridge.errors import Code, RequestError, SettingError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["LockStep"]


class LockStep(Pacer):
    """Steps one environment, or the lanes of a vector environment, by each Step of the one agent that may be in.

    Of lanes the agent stays RUNNING: one that ended begins anew by itself, in this Step or the next.
    """

    steps_at_once = can_place = True
    SETTINGS = ("seed", "options")
    """The settings of a Reset; of lanes also `reset_mask`."""

    def bind(self, world: PacedWorld) -> None:
        """Begin with a world.

        Raises:
            SettingError: The vector environment does not reset its lanes by itself.
        """
        facts = world.env.facts
        if facts.num_envs is not None and facts.autoreset not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
            raise SettingError(
                "expected a vector environment whose autoreset mode is NEXT_STEP or SAME_STEP, got "
                f"{facts.autoreset} from {facts.kind}; the client's BlockingReset gives the other modes"
            )
        super().bind(world)
        self._facts = facts
        self._agent: EnvAgent | None = None
        self._pending: tuple[object, object] = (None, None)
        """Seed and options of the agent's next sequence; where nobody is in, of the first one of the next agent."""
        self._tried: tuple[object, object] | None = None
        """Those of the last reset of the environment, whether it failed or not."""

    # Who is in

    def join(self, settings: Settings) -> Agent:
        """Return the one agent, where nobody else has it."""
        refuse_unknown(settings, (), "JoinWorld")
        self.world.refuse_if_over()
        if self._agent is not None:
            remedy = f"wait until it leaves, or {OTHER_WORLD}"
            text = f"{self.world.title_in_messages} is full: it has 1 agent of at most 1; {remedy}"
            raise RequestError(Code.RESOURCE_EXHAUSTED, text)
        self._agent = EnvAgent(self, ONE)
        if self._agent.lanes is not None:
            from bridge.core.worlds.same_step import SameStep  # most worlds have no lanes

            self._agent.pacer_state = SameStep(self._agent)
        return self._agent

    def leave(self, agent: EnvAgent) -> None:
        """Leave the world to the next agent."""
        if self._agent is agent:
            self._agent, self._pending = None, (None, None)

    @property
    def agents(self) -> int:
        """1 while an agent is in, else 0."""
        return int(self._agent is not None)

    @property
    def players(self) -> Mapping[str, str]:
        """Who plays the one agent."""
        return {} if self._agent is None else {ONE: self._agent.player}

    def applied_by(self, lane: int) -> object:
        """Return who the action is of that the environment is stepped by now."""
        return self._agent.player if self._agent is not None else DEFAULT_PLAYER

    @property
    def newest(self) -> tuple[object, object] | None:
        """Observation and info of the running episode; None: nobody plays one."""
        return None if self._agent is None else self._agent.newest

    @property
    def ended_lanes(self) -> Array | None:
        """As of the agent that plays; None also where nobody does."""
        return None if self._agent is None else self._agent.ended_lanes

    # Requests

    def reset(self, agent: EnvAgent, settings: Settings, running: bool) -> None:
        """Keep the settings for the next `begin`, so that the environment is reset once (D-14)."""
        pending = self._read_reset(settings)
        # D-14: a plain Reset between two sequences must not take back the settings of the one before it, unless the
        # environment has had them, and failed: a Step alone tries it again with them.
        if settings or running or self._pending is self._tried:
            self._pending = pending

    def _read_reset(self, settings: Settings) -> tuple[object, object]:
        """Return the seed and the options that Reset settings give.

        Of lanes, an integer seeds lane i with itself + i; a list gives each lane's, -1 for none.
        """
        lanes = self._facts.num_envs
        asked = read_reset(settings, self.SETTINGS if lanes is None else (*self.SETTINGS, "reset_mask"), lanes)
        if lanes is None:
            return asked.seed, asked.options
        with reading("Reset"):
            seed, options = self._seed_of(asked.seed), asked.options
            if asked.mask.all():
                return seed, options
            if not self._facts.resets_lanes:
                raise TensorError(f"{self._facts.kind} cannot reset some of its lanes alone; reset all of them")
            return seed, masked(options, asked.mask)

    def _seed_of(self, seeds: int | list[int | None] | None) -> int | list[int | None] | None:
        if self._facts.resets_lanes or not isinstance(seeds, list):
            return seeds
        # Other vector environments take one integer, from which they seed all lanes.
        first = seeds[0]
        if first is not None and seeds == [first + lane for lane in range(len(seeds))]:
            return first
        if any(seed is not None for seed in seeds):
            text = f"{self._facts.kind} takes one integer seed; expected consecutive seeds, got {seeds!r:.80}"
            raise TensorError(text)
        return None

    def prepare_reset(self, settings: Settings, caller: Agent | None) -> Callable[[], None]:
        """Keep the settings for the agent's next sequence, or for the next agent's first."""
        before, asked = self._pending, self._read_reset(settings)
        self._pending = asked

        def undo() -> None:
            # Another ResetWorld, or a Reset of the agent, may have brought others since.
            if self._pending is asked:
                self._pending = before

        return undo

    async def begin(self, agent: EnvAgent) -> int:
        """Reset the environment with the settings that wait; a lane that fails begins anew in the next step."""
        pending, agent.answer = self._pending, None
        self._tried = pending
        agent.take_reset(await self.world.env.reset(seed=pending[0], options=pending[1]))
        if self._pending is pending:  # else a ResetWorld brought others meanwhile
            self._pending = (None, None)
        if agent.lanes is not None:
            agent.pacer_state.reset(pending[1])
            agent.truncated[list(agent.take_failures())] = True
        return pb.RUNNING

    def place(self, agent: EnvAgent, result: Result, lanes: Sequence[int]) -> int:
        """Have the agent's sequence begin in the situation that the environment is in; other lanes go on."""
        agent.answer = None
        agent.take_reset(result)
        agent.forget_failures()
        if agent.lanes is not None:
            agent.pacer_state.placed(lanes)
        return pb.RUNNING

    async def step(self, agent: EnvAgent, action: object) -> int:
        """Step all lanes with actions of their own. A single environment's agent does it at once."""
        begin = agent.ended_lanes
        result = await agent.world.env.step(action)
        if begin is not None:
            agent.world.begun_in_steps += int(np.count_nonzero(begin))
        failed = agent.take_failures()
        # Those that ended before: what failed is their reset, and no episode ended by it.
        unbegun = sum(bool(agent.terminated[lane] or agent.truncated[lane]) for lane in failed)
        agent.take_lanes(result)
        ended: Array = agent.terminated | agent.truncated
        lanes: list[int] = ended.nonzero()[0].tolist()
        agent.world.episodes += len(lanes) - unbegun
        agent.answer = None
        await agent.pacer_state.stepped(lanes, ended)
        return pb.RUNNING

    def properties_of(self, agent: EnvAgent) -> PropertyTree:
        """Return what an agent adds to the tree below `world`: of lanes, when its lanes begin anew."""
        return PropertyTree() if agent.lanes is None else agent.pacer_state.properties()

    def interrupt(self, agent: EnvAgent) -> None:
        """End the sequence by truncation, with the last observations."""
        agent.take_cut()

"""Lock step: each Step of a single agent steps the environment, or all lanes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from gymnasium.vector import AutoresetMode

from bridge.core.encoding.properties import PropertyTree
from bridge.core.encoding.tensors import Array
from bridge.core.worlds.agent import EnvAgent
from bridge.core.worlds.base import DEFAULT_PLAYER, Agent, PacedWorld
from bridge.core.worlds.environment import Result
from bridge.core.worlds.group import ONE
from bridge.core.worlds.pacer import Pacer
from bridge.core.worlds.settings import Settings, masked, read_reset, reading, refuse_unknown
from bridge.errors import Code, RequestError, SettingError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["LockStep"]


class LockStep(Pacer):
    """Steps one environment, or the lanes of a vector environment, with each Step of the only agent.

    With lanes the agent stays RUNNING: a lane that ended begins its next episode in this Step or the next.
    """

    steps_at_once = can_place = True
    SETTINGS = ("seed", "options")
    """The settings of a Reset; with lanes also `reset_mask`."""

    def bind(self, world: PacedWorld) -> None:
        """Attach the pacer to a world.

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
        """Seed and options of the agent's next sequence; without an agent, of the next agent's first sequence."""
        self._tried: tuple[object, object] | None = None
        """The seed and options of the environment's last reset, even if it failed."""

    # Agents

    def join(self, settings: Settings) -> Agent:
        """Return the agent, if no other client has it."""
        refuse_unknown(settings, (), "JoinWorld")
        self.world.refuse_if_over()
        if self._agent is not None:
            remedy = f"wait until it leaves, or {self.world.if_full}"
            text = f"{self.world.title_in_messages} is full: it has 1 agent of at most 1; {remedy}"
            raise RequestError(Code.RESOURCE_EXHAUSTED, text)
        self._agent = EnvAgent(self, ONE)
        if self._agent.lanes is not None:
            from bridge.core.worlds.same_step import SameStep  # only worlds with lanes need it

            self._agent.pacer_state = SameStep(self._agent)
        return self._agent

    def leave(self, agent: EnvAgent) -> None:
        """Leave the world to the next agent."""
        if self._agent is agent:
            self._agent, self._pending = None, (None, None)

    @property
    def agents(self) -> int:
        """1 while there is an agent, otherwise 0."""
        return int(self._agent is not None)

    @property
    def players(self) -> Mapping[str, str]:
        """The player of the agent, by the agent's name."""
        return {} if self._agent is None else {ONE: self._agent.player}

    def applied_by(self, lane: int) -> object:
        """Return the player whose action the current step uses."""
        return self._agent.player if self._agent is not None else DEFAULT_PLAYER

    @property
    def newest(self) -> tuple[object, object] | None:
        """Observation and info of the running episode; None: no episode is played."""
        return None if self._agent is None else self._agent.newest

    @property
    def ended_lanes(self) -> Array | None:
        """See `EnvAgent.ended_lanes`; None also without an agent."""
        return None if self._agent is None else self._agent.ended_lanes

    # Requests

    def reset(self, agent: EnvAgent, settings: Settings, running: bool) -> None:
        """Keep the settings for the next `begin`, so that the environment is reset once (D-14)."""
        pending = self._read_reset(settings)
        # D-14: a plain Reset between two sequences must not clear the settings of the Reset before it, unless the
        # environment was reset with them and failed: only a Step tries again with the same settings.
        if settings or running or self._pending is self._tried:
            self._pending = pending

    def _read_reset(self, settings: Settings) -> tuple[object, object]:
        """Return the seed and the options of Reset settings.

        With lanes, an integer n seeds lane i with n + i; a list has each lane's seed, -1 for none.
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
        # Other vector environments take one integer, and seed all lanes from it.
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
            # Another ResetWorld, or a Reset of the agent, may have replaced the settings.
            if self._pending is asked:
                self._pending = before

        return undo

    async def begin(self, agent: EnvAgent) -> int:
        """Reset the environment with the pending settings. A lane that fails is reset again in the next step."""
        pending, agent.answer = self._pending, None
        self._tried = pending
        agent.take_reset(await self.world.env.reset(seed=pending[0], options=pending[1]))
        if self._pending is pending:  # otherwise a ResetWorld has replaced them meanwhile
            self._pending = (None, None)
        if agent.lanes is not None:
            agent.pacer_state.reset(pending[1])
            agent.truncated[list(agent.take_failures())] = True
        return pb.RUNNING

    def place(self, agent: EnvAgent, result: Result, lanes: Sequence[int]) -> int:
        """Begin the agent's sequence in the environment's current state; other lanes go on."""
        agent.answer = None
        agent.take_reset(result)
        agent.forget_failures()
        if agent.lanes is not None:
            agent.pacer_state.placed(lanes)
        return pb.RUNNING

    async def step(self, agent: EnvAgent, action: object) -> int:
        """Step all lanes, each with its own action. Single environments use the fast path `steps_at_once`."""
        begin = agent.ended_lanes
        result = await agent.world.env.step(action)
        if begin is not None:
            agent.world.begun_in_steps += int(np.count_nonzero(begin))
        failed = agent.take_failures()
        # Lanes that had ended before: their reset failed, which did not end an episode.
        unbegun = sum(bool(agent.terminated[lane] or agent.truncated[lane]) for lane in failed)
        agent.take_lanes(result)
        ended: Array = agent.terminated | agent.truncated
        lanes: list[int] = ended.nonzero()[0].tolist()
        agent.world.episodes += len(lanes) - unbegun
        agent.answer = None
        await agent.pacer_state.stepped(lanes, ended)
        return pb.RUNNING

    def properties_of(self, agent: EnvAgent) -> PropertyTree:
        """Return an agent's properties, below `world`: with lanes, when lanes begin their next episodes."""
        return PropertyTree() if agent.lanes is None else agent.pacer_state.properties()

    def interrupt(self, agent: EnvAgent) -> None:
        """End the sequence by truncation, and repeat the last observations."""
        agent.take_cut()

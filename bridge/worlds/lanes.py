"""The world of N lanes: one message steps N environments, by one of Gymnasium's vector environments."""

from __future__ import annotations

import numpy as np
from gymnasium.vector import AutoresetMode

from bridge.encoding.tensors import Array
from bridge.errors import SettingError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.worlds.base import failures_in
from bridge.worlds.environment import Environment
from bridge.worlds.scheduling import Scheduler
from bridge.worlds.settings import Settings, read_reset, reading
from bridge.worlds.single import AgentsWorld, EnvAgent, EnvWorld

__all__ = ["VectorAgent", "VectorWorld"]


class VectorAgent(EnvAgent):
    """The agent of all lanes. It stays RUNNING: a lane that ended begins anew by itself, in this Step or the next."""

    SETTINGS = ("seed", "options", "reset_mask")

    def __init__(self, world: AgentsWorld) -> None:
        facts = world.env.facts
        self._count = facts.num_envs or 0
        super().__init__(world, *facts.spaces, lanes=self._count)
        self._kind, self._separable = facts.kind, facts.resets_lanes
        self._resets_at_once = facts.autoreset is not AutoresetMode.NEXT_STEP

    def read_settings(self, settings: Settings) -> tuple[object, object]:
        """Return the seed and the options that Reset settings give.

        An integer seeds lane i with itself + i; a list gives each lane's, -1 for none.
        """
        asked = read_reset(settings, self.SETTINGS, self._count)
        with reading("Reset"):
            seed, options = self._seed_of(asked.seed), asked.options
            if asked.mask.all():
                return seed, options
            if not self._separable:
                raise TensorError(f"{self._kind} cannot reset some of its lanes alone; reset all of them")
            return seed, {**(options or {}), "reset_mask": asked.mask}

    def _seed_of(self, seeds: int | list[int | None] | None) -> int | list[int | None] | None:
        if self._separable or not isinstance(seeds, list):
            return seeds
        # Other vector environments take one integer, from which they seed all lanes.
        first = seeds[0]
        if first is not None and seeds == [first + lane for lane in range(len(seeds))]:
            return first
        if any(seed is not None for seed in seeds):
            raise TensorError(f"{self._kind} takes one integer seed; expected consecutive seeds, got {seeds!r:.80}")
        return None

    @property
    def ended_lanes(self) -> Array | None:
        """Which lanes the next step resets, bools `(lanes,)`; None: it resets none."""
        return None if self._resets_at_once else super().ended_lanes

    async def apply(self, action: object) -> int:
        """Step all lanes with actions of their own."""
        result = await self._world.env.step(action)
        with failures_in("step"):
            self._observation, reward, terminated, truncated, self._info = result
            self._reward[...] = self._rewards.read_lanes(reward, self._notes)
            self._terminated[...] = terminated
            self._truncated[...] = truncated
        self._world.episodes += int(np.count_nonzero(self._terminated | self._truncated))
        return pb.RUNNING


class VectorWorld(EnvWorld):
    """The world of the lanes of a vector environment.

    Raises:
        SettingError: The vector environment does not reset its lanes by itself.
    """

    def __init__(self, name: str, env: Environment, scheduler: Scheduler) -> None:
        if env.facts.autoreset not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
            raise SettingError(
                "expected a vector environment whose autoreset mode is NEXT_STEP or SAME_STEP, got "
                f"{env.facts.autoreset} from {env.facts.kind}; the client's BlockingReset gives the other modes"
            )
        super().__init__(name, env, scheduler)

    def make_agent(self, world: AgentsWorld | None = None) -> VectorAgent:
        """Return an agent that is not in."""
        return VectorAgent(world or self)

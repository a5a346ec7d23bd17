"""The world of a PettingZoo parallel environment: each agent is a connection, and all of them step together (D-22).

`JointStepTable` decides who waits and what the environment does; this file gives it the environment and timers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bridge.core.encoding.properties import TEXT, Property, PropertyTree
from bridge.core.worlds.base import OTHER_WORLD, Agent, in_environment
from bridge.core.worlds.default_actions import default_action
from bridge.core.worlds.environment import Environment, Job
from bridge.core.worlds.multi_agent.joint_steps import JointStepTable, MissingAgent, MultiAgentOptions, Participant
from bridge.core.worlds.multi_agent.members import Members
from bridge.core.worlds.scheduling import Scheduler, Timer
from bridge.core.worlds.settings import Settings, read_reset, refuse_unknown
from bridge.core.worlds.single import EnvAgent, EnvWorld
from bridge.errors import Code, RequestError

__all__ = ["MultiAgent", "MultiAgentWorld"]


class MultiAgent(EnvAgent):
    """One agent of the environment."""

    _world: MultiAgentWorld

    def __init__(self, world: MultiAgentWorld, name: str) -> None:
        super().__init__(world, world.members.spaces[name])
        self.name = name
        self.participant = Participant(name, self)

    def reset(self, settings: Settings, running: bool) -> None:
        """Give up the running sequence; seed and options are for the next one, which begins for all."""
        seed, options = self.read_settings(settings)
        # Of a joint reset one agent sends the settings: the plain Resets of the others must not take them back.
        if seed is not None or options is not None:
            self._world.table.carried = (seed, options)
        if running or self.participant.may_enter:
            self._world.table.drop(self.participant)
            self._world.advance()

    async def begin(self) -> int:
        """Wait for the next sequence, or enter the running one."""
        state = await self._wait(begins=True)
        self._tell_names()
        return state

    async def apply(self, action: object) -> int:
        """Hand in an action and wait for the joint step."""
        return await self._wait(begins=False, action=action)

    async def _wait(self, *, begins: bool, action: object = None) -> int:
        """Wait for the table's answer, and take what it tells."""
        now = self._world.scheduler.now()
        answer = self._world.table.wait(self.participant, now, begins=begins, action=action)
        self._world.advance()
        state = await answer
        cut_off, self.participant.cut_off = self.participant.cut_off, False
        self._tell(cut_off)
        return state

    def _tell(self, cut_off: bool) -> None:
        """Take what the Step at hand tells."""
        told = self.participant.told
        self._observation, self._info = told.observation, told.info
        self._terminated[...], self._truncated[...] = told.terminated, told.truncated
        # What an earlier answer had to tell, and was asked for no info, is of no interest any more.
        self._beside = {
            name: told for name, told in (("agents", self.participant.agents), ("missing", told.missing)) if told
        }
        if cut_off:
            # The world ended the sequence, not the environment: it is truncated, with the last observation.
            super().interrupt()
            self._beside.clear()
        # After `interrupt`, which sets the reward to 0: what was earned until the end is still told.
        reward, self.participant.reward = self.participant.reward, None
        if reward is None:
            self._reward[...] = 0.0
        else:
            self._take_reward(reward)

    def interrupt(self) -> None:
        """End the sequence for this agent, with what it has seen last."""
        self._tell(True)
        self._world.table.drop(self.participant)
        self._world.advance()

    def hang_up(self) -> None:
        """End its wait."""
        self._world.table.cancel(self.participant)
        self._world.advance()

    def properties(self) -> PropertyTree:
        """Return the tree below `world`, with this agent's spaces."""
        text = "what is done where an agent is missing: wait, default or end"
        value = MissingAgent(self._world.options.missing_agent).value
        policy = Property("world.missing_agent", TEXT, text, lambda: value)
        return super().properties().merged(self._world.members.properties(self.name)).merged(PropertyTree([policy]))


class MultiAgentWorld(EnvWorld):
    """A world of as many agents as its environment has.

    Args:
        name: The world's name.
        env: An environment of several agents, owned by the world from here on.
        scheduler: Runs what the world waits for.
        options: How the agents are coordinated.
    """

    def __init__(self, name: str, env: Environment, scheduler: Scheduler, options: MultiAgentOptions) -> None:
        super().__init__(name, env, scheduler)
        self.options = options
        """How the agents are coordinated."""
        self.members = Members(env.facts.agents, env.facts.name)
        self.table = JointStepTable(name, list(self.members), options, self.resets)
        self._timer: Timer | None = None

    # Agents

    @property
    def agents(self) -> int:
        """How many agents are in."""
        return len(self.table.participants)

    @property
    def seats(self) -> Mapping[str, bool]:
        """True if somebody plays, for each agent of the environment."""
        return {name: name in self.table.participants for name in self.members}

    @property
    def players(self) -> Mapping[str, str]:
        """Who plays, by the name of the agent."""
        return {name: participant.agent.player for name, participant in self.table.participants.items()}

    def join(self, settings: Settings) -> Agent:
        """Let in the agent that the setting `agent` names, or the first that is free."""
        refuse_unknown(settings, ("agent",), "JoinWorld")
        wanted = self.members.read(settings)
        self.refuse_if_over()
        taken = self.table.participants
        name = self.members.choose(wanted, taken, self.title_in_messages, f"wait until one is free, or {OTHER_WORLD}")
        agent = MultiAgent(self, name)
        self.table.join(agent.participant)
        self.advance()
        return agent

    def vacate(self, agent: EnvAgent) -> None:
        """Free an agent whose client leaves or has died; the policy says what that means for the others."""
        if isinstance(agent, MultiAgent):
            self.table.leave(agent.participant)
            self.advance()

    def stop(self) -> None:
        """Tell those who wait for others that the world is gone."""
        self.advance()

    def applied_by(self, lane: int) -> object:
        """Return who the action of each agent is of that the environment is stepped by now."""
        return self.table.applied_by()

    # Sequences

    def prepare_reset(self, settings: Settings, caller: Agent | None) -> Callable[[], None]:
        """End the sequence for all; the settings are for the next one."""
        asked = read_reset(settings, MultiAgent.SETTINGS, None)
        undo = self.table.prepare_reset((asked.seed, asked.options))
        self.scheduler.call_soon(self.advance)
        return undo

    def restart(self, caller: Agent | None) -> None:
        """Take the caller out of its sequence; the environment itself is reset when all begin the next one."""
        if isinstance(caller, MultiAgent):
            self.table.drop(caller.participant)
            self.advance()

    def advance(self) -> None:
        """Have the table answer, and the environment do what is due, and set the timer for what is not."""
        now = self.scheduler.now()
        try:
            self.refuse_if_over()
        except RequestError as error:
            self.table.end(error)
        job = self.table.poll(now)
        if job is not None:
            self.scheduler.start(self._carry_out(job), self._carried_out)
        if self._timer is not None:
            self._timer.cancel()
        due = self.table.next_due()
        if due is not None:
            self._timer = self.scheduler.call_at(due, self.advance)

    async def _carry_out(self, job: Job) -> None:
        """Reset or step the environment, and tell the table."""
        seen, living = await self.members.carry_out(self.env, job, self.table.seen, self._default_action)
        if job.kind == "reset":
            self.table.began(seen)
            return
        # An episode of the environment ends with its last agent.
        self.episodes += not living
        self.table.stepped(seen, living)

    async def _default_action(self, name: str) -> object:
        agent, space = self.members.ids[name], self.members.spaces[name][1]
        choose = self.options.default_action or default_action
        return await self.env.executor.run(in_environment, "step", choose, agent, self.table.seen(name), space)

    def _carried_out(self, result: None, error: BaseException | None) -> None:
        if error is not None:
            self.table.failed(
                error if isinstance(error, RequestError) else RequestError(Code.INTERNAL, f"the step failed: {error!r}")
            )
        # Not at once: an environment of this thread was called by `advance`, which has not returned yet.
        self.scheduler.call_soon(self.advance)

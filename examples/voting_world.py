"""A world with a pacer of its own: three clients share an environment, and vote on each action.

    python examples/voting_world.py

The world is a class that `serve_gym(world=…)` takes: it says who joins, and when the environment is stepped. Here that
is once all three have voted. Prints the episode's return, which is the same for all of them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bridge import make_remote, serve_gym
from bridge.core.worlds.environment import Call, Environment, EnvironmentProxy, Result
from bridge.core.worlds.scheduling import PendingResult, Scheduler
from bridge.core.worlds.single import EnvAgent, EnvWorld, GymAgent
from bridge.errors import Code, RequestError
from bridge.pb import dm_env_rpc_pb2 as pb

VOTERS = 3


class Ballot(EnvironmentProxy):
    """The environment as voters see it: a reset or a step returns once all of them have asked for one."""

    def __init__(self, world: VotingWorld) -> None:
        super().__init__(world.env)
        self._world = world

    def reset(self, *, seed: object = None, options: object = None, lane: int | None = None) -> Call[Result]:
        """Ask for a reset."""
        return self._world.hand_in(None, seed)

    def step(self, action: object, lane: int | None = None) -> Call[Result]:
        """Vote for an action."""
        return self._world.hand_in(action, None)


class Booth:
    """The world as voters see it."""

    def __init__(self, world: VotingWorld) -> None:
        self.env, self.episodes, self.vacate = Ballot(world), 0, world.vacate
        self.properties, self.refuse_if_over, self.cancel = world.properties, world.refuse_if_over, world.cancel


class Voter(GymAgent):
    """A client with a vote; who hangs up ends the vote, since it would be counted without them."""

    def hang_up(self) -> None:
        """End the vote."""
        self._world.cancel(RequestError(Code.CANCELLED, "a voter has hung up; Step again"))


class VotingWorld(EnvWorld):
    """Steps the environment by the action that most voters chose; of several such by the lowest."""

    def __init__(self, name: str, env: Environment, scheduler: Scheduler) -> None:
        super().__init__(name, env, scheduler)
        self._voters: list[EnvAgent] = []
        self._votes: list[tuple[Any, Any, PendingResult[Result]]] = []
        self._running: Result | None = None
        """The first that those who enter the running episode see: its last observation and info."""

    @property
    def agents(self) -> int:
        """How many voters are in."""
        return len(self._voters)

    def make_agent(self) -> Voter:
        """Return a voter that is not in."""
        return Voter(Booth(self))

    def join(self, settings: Mapping[str, pb.Tensor]) -> EnvAgent:
        """Let a voter in."""
        if len(self._voters) == VOTERS:
            raise RequestError(Code.RESOURCE_EXHAUSTED, f"all {VOTERS} voters are in")
        self._voters.append(self.make_agent())
        return self._voters[-1]

    def vacate(self, agent: EnvAgent) -> None:
        """Let a voter go."""
        self._voters = [voter for voter in self._voters if voter is not agent]

    async def hand_in(self, action: Any, seed: Any) -> Result:
        """Take a vote, or for a reset None; return what came of the votes of all."""
        if action is None and self._running is not None:
            return self._running  # whoever comes late enters the episode that runs
        self._votes.append((action, seed, pending := PendingResult()))
        if len(self._votes) == VOTERS:
            self.scheduler.start(self._count(), lambda result, error: None)
        return await pending

    async def _count(self) -> None:
        votes, self._votes = self._votes, []
        chosen, running, self._running = [action for action, _, _ in votes], self._running, None
        try:
            if running is None:
                result = await self.env.reset(seed=next((seed for _, seed, _ in votes if seed is not None), None))
                self._running = result
            else:
                ranks = Counter(map(int, chosen))
                result = await self.env.step(min(ranks, key=lambda action: (-ranks[action], action)))
                self._running = None if result[2] or result[3] else (result[0], result[4])
        except RequestError as error:
            self._votes, votes = votes, []
            self.cancel(error)
        for _, _, pending in votes:
            pending.set_result(result)

    def cancel(self, error: RequestError) -> None:
        """Answer those who have voted with an error; they may vote again."""
        votes, self._votes = self._votes, []
        for _, _, pending in votes:
            pending.set_error(error)


def play(url: str, action: int) -> float:
    """Play an episode as one of the voters, for one action whatever happens; return its return."""
    env = make_remote(url)
    env.reset(seed=0)
    total, over = 0.0, False
    while not over:
        _, reward, terminated, truncated, _ = env.step(action)
        total, over = total + reward, terminated or truncated
    env.close()
    return total


def main() -> None:
    """Serve the world, and vote in it: two voters for 0, one for 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="CartPole-v1", help="a Gymnasium id with a Discrete action space")
    arguments = parser.parse_args()
    with serve_gym(arguments.env, world=VotingWorld) as server, ThreadPoolExecutor(VOTERS) as threads:
        totals = list(threads.map(play, [f"{server.url}?world="] * VOTERS, [0, 0, 1]))
    print(f"{VOTERS} voters played an episode: returns {totals}")


if __name__ == "__main__":
    main()

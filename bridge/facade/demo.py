"""An agent learns CartPole in environments that run in other processes: `gymnasium-bridge demo`.

The servers are started as separate processes, each a world of many lanes; the agent sees them as one vector
environment. It is a linear policy, trained by the cross-entropy method: the mean and the spread of the best policies
in a population define the next population. It only needs NumPy.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from bridge.core.extras import install_command
from bridge.core.logs import counted
from bridge.errors import SettingError
from bridge.facade.make import make_vec_remote
from bridge.testing import ServerProcess

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["SOLVED", "CrossEntropy", "Demo", "Generation", "Outcome", "draw_curve", "play", "plot_curve", "run_demo"]

ENV_ID = "CartPole-v1"
SOLVED = 475.0
"""The mean return at which CartPole-v1 counts as solved."""
LONGEST = 500
"""Steps after which an episode of CartPole-v1 is truncated."""

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Demo:
    """The settings of the demo."""

    servers: int = 2
    """Server processes."""
    lanes: int = 32
    """Environments in each process; all of them together play the population."""
    generations: int = 12
    """Rounds of training."""
    episodes: int = 2
    """Episodes that each policy plays in each round, and in the evaluation."""
    seed: int = 0
    """The seed of the environments and of the training."""
    picture: Path = Path("learning_curve.png")
    """The file for the learning curve."""

    def __post_init__(self) -> None:
        for name, least in (("servers", 1), ("lanes", 2), ("generations", 1), ("episodes", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise SettingError(f"expected {name} to be at least {least}, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class Generation:
    """The results of one round of training."""

    number: int
    """Counted from 1."""
    returns: Floats
    """The mean return of each policy's episodes, `(population,)`."""
    steps: int
    """Environment steps from the start of the training to the end of this round."""
    rate: float
    """Environment steps per second in this round."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results."""

    history: Sequence[Generation]
    """The rounds of training."""
    returns: Floats
    """The returns of the evaluation, one for each episode."""
    seconds: float
    """From the first step of training to the last one of the evaluation."""
    picture: Path | None
    """The file of the learning curve; None: matplotlib is not installed."""

    @property
    def solved(self) -> bool:
        """True if the trained policy's mean return is at least `SOLVED`."""
        return bool(self.returns.mean() >= SOLVED)


class CrossEntropy:
    """Searches for parameters by sampling from a normal distribution that follows the best samples.

    Args:
        size: The number of parameters.
        seed: The seed of the samples.
        elite: The fraction of the samples that counts as the best.
    """

    def __init__(self, size: int, seed: int, elite: float = 0.2) -> None:
        self.mean: Floats = np.zeros(size)
        self._spread: Floats = np.ones(size)
        self._elite = elite
        self._random = np.random.default_rng(seed)
        self._extra = 0.5

    def sample(self, count: int) -> Floats:
        """Return parameters to try, `(count, size)`."""
        return self.mean + self._spread * self._random.standard_normal((count, self.mean.size))

    def follow(self, tried: Floats, returns: Floats) -> None:
        """Move to the best of the samples."""
        best = tried[np.argsort(returns)[-max(1, round(len(tried) * self._elite)) :]]
        self.mean = best.mean(axis=0)
        # Spread that shrinks slowly keeps the search from settling on the luck of the first rounds.
        self._extra *= 0.7
        self._spread = best.std(axis=0) + self._extra


def act(parameters: Floats, observations: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Push the cart left (0) or right (1), each slot by its own linear policy `(num_envs, 5)`: weights and a bias."""
    scores = (parameters[:, :-1] * observations).sum(axis=1) + parameters[:, -1]
    return np.asarray(scores > 0, np.int64)


def play(
    envs: VectorEnv[Any, Any, Any],
    parameters: Floats,
    episodes: int,
    seed: int,
    on_step: Callable[[int, int], None] = lambda steps, finished: None,
) -> tuple[Floats, int]:
    """Play episodes in every slot, each by its own policy.

    Args:
        envs: A vector environment whose finished slots reset in the next step.
        parameters: A policy for each slot, `(num_envs, 5)`.
        episodes: The number of episodes in each slot.
        seed: The seed of the environments' first episodes.
        on_step: Called after each step with the numbers of environment steps and of finished episodes.

    Returns:
        The returns, `(num_envs, episodes)`, and the number of environment steps.
    """
    observations, _ = envs.reset(seed=seed)
    returns = np.zeros((envs.num_envs, episodes))
    played = np.zeros(envs.num_envs, np.int64)
    slots = np.arange(envs.num_envs)
    steps = 0
    while (playing := played < episodes).any():
        observations, rewards, terminations, truncations, _ = envs.step(act(parameters, observations))
        steps += envs.num_envs
        # A slot that begins its next episode gives the reward 0 in that step.
        returns[slots[playing], played[playing]] += rewards[playing]
        played[playing] += (terminations | truncations)[playing]
        on_step(steps, int(played.sum()))
    return returns, steps


def run_demo(demo: Demo, out: TextIO | None = None) -> Outcome:
    """Start servers, train, evaluate and draw the learning curve; report progress on `out`.

    Raises:
        ConnectError: A server could not be started.
        OSError, ValueError: The picture cannot be written, or its file name has no picture format.
    """
    screen = Screen(out or sys.stdout)
    from bridge.wrappers import BlockingReset

    with ExitStack() as stack:
        screen.line(
            f"Starting {counted(demo.servers, 'server')} of {demo.lanes} {ENV_ID} environments each, as processes …"
        )
        arguments = (ENV_ID, "--num-envs", str(demo.lanes))
        servers = [stack.enter_context(ServerProcess(*arguments)) for _ in range(demo.servers)]
        urls = [server.url for server in servers]
        for server in servers:
            screen.line(f"  {server.url}  (process {server.pid})")
        envs = BlockingReset(make_vec_remote(urls))
        stack.callback(envs.close)
        screen.line(
            f"Training a linear policy on all {envs.num_envs} by the cross-entropy method. Return: the steps that the "
            f"pole stands, at most {LONGEST}; from a mean of {SOLVED:g} on it counts as solved."
        )
        start = time.perf_counter()
        search = CrossEntropy(envs.single_observation_space.shape[0] + 1, demo.seed)
        history = _train(envs, search, demo, screen)
        policies = np.tile(search.mean, (envs.num_envs, 1))
        # Use new seeds, so that the policy is not measured on the episodes that it was chosen by.
        returns, _ = play(envs, policies, demo.episodes, demo.seed + demo.generations * envs.num_envs)
        seconds = time.perf_counter() - start
    outcome = Outcome(history, returns.ravel(), seconds, None)
    # Report before drawing: the picture's file may not be writable.
    conclude(outcome, screen)
    picture = draw_curve(history, returns.ravel(), demo.picture)
    tell_picture(picture, screen)
    return dataclasses.replace(outcome, picture=picture)


def _train(envs: VectorEnv[Any, Any, Any], search: CrossEntropy, demo: Demo, screen: Screen) -> list[Generation]:
    history: list[Generation] = []
    total = 0
    for number in range(1, demo.generations + 1):
        title = f"generation {number:2} of {demo.generations}"
        start = time.perf_counter()

        def show(
            steps: int,
            finished: int,
            start: float = start,
            title: str = title,
            most: int = envs.num_envs * demo.episodes,
        ) -> None:
            rate = steps / max(time.perf_counter() - start, 1e-9)
            screen.passing(f"{title}  {finished:4} of {most} episodes  {rate:8,.0f} steps/s")

        tried = search.sample(envs.num_envs)
        seed = demo.seed + (number - 1) * envs.num_envs
        returns, steps = play(envs, tried, demo.episodes, seed, show)
        means: Floats = returns.mean(axis=1)
        search.follow(tried, means)
        total += steps
        rate = steps / (time.perf_counter() - start)
        history.append(Generation(number, means, total, rate))
        screen.line(
            f"{title}  {screen.bar(means.mean() / LONGEST)}  mean return {means.mean():5.1f}  best {means.max():5.1f}"
            f"  {rate:7,.0f} steps/s"
        )
    return history


def conclude(outcome: Outcome, screen: Screen) -> None:
    returns, last = outcome.returns, outcome.history[-1]
    verdict = (
        f"Learned: above the {SOLVED:g} that count as solved."
        if outcome.solved
        else f"Not learned: below the {SOLVED:g} that count as solved; give it more --generations."
    )
    screen.line(
        f"The trained policy's mean return over {returns.size} new episodes is {returns.mean():.1f} "
        f"(least {returns.min():.0f}, most {returns.max():.0f}). {verdict}"
    )
    screen.line(
        f"{last.steps:,} environment steps of training, each over the network; with the evaluation it took "
        f"{outcome.seconds:.1f} s."
    )


def tell_picture(picture: Path | None, screen: Screen) -> None:
    if picture is not None:
        screen.line(f"The learning curve is in {picture}")
    else:
        screen.line(f"No learning curve was drawn: matplotlib is not installed; {install_command('demo')}")


def draw_curve(history: Sequence[Generation], evaluation: Floats, path: Path) -> Path | None:
    """Write the learning curve as a picture; return None if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    plot_curve(axes, history, evaluation)
    population = len(history[0].returns)
    axes.set_title(f"{ENV_ID} behind gRPC: cross-entropy method, {population} linear policies a generation")
    axes.set_xlabel("training (thousand environment steps, one marker a generation)")
    axes.set_ylabel("return (steps until the pole falls)")
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format=path.suffix[1:] or "png")  # without a format it would append a suffix
    return path


def plot_curve(axes: Axes, history: Sequence[Generation], evaluation: Floats) -> None:
    """Plot mean, middle half and best of the returns over the steps of training, and the evaluation, on `axes`."""
    steps = [item.steps / 1000 for item in history]
    population = len(history[0].returns)
    low, high = np.array([np.percentile(item.returns, [25, 75]) for item in history]).T
    axes.fill_between(steps, low, high, color="tab:blue", alpha=0.2, linewidth=0, label="middle half")
    axes.plot(steps, [item.returns.mean() for item in history], "o-", color="tab:blue", label=f"mean of {population}")
    axes.plot(steps, [item.returns.max() for item in history], "^:", color="tab:green", label="best")
    axes.axhline(SOLVED, color="tab:red", linestyle="--", linewidth=1.2, label=f"solved: {SOLVED:g}")
    axes.plot(
        steps[-1],
        evaluation.mean(),
        "*",
        color="black",
        markersize=13,
        label=f"final policy: {evaluation.mean():.0f}",
    )
    axes.set_xlim(left=0)
    axes.set_ylim(0, LONGEST * 1.05)
    axes.grid(alpha=0.3)


class Screen:
    """Prints permanent lines and, in a terminal only, one progress line that is overwritten."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._last = 0.0
        self._signs = "█░"
        try:
            self._signs.encode(out.encoding or "utf-8")
        except UnicodeEncodeError:
            self._signs = "#-"

    def bar(self, fraction: float, width: int = 24) -> str:
        full = round(max(0.0, min(1.0, fraction)) * width)
        return self._signs[0] * full + self._signs[1] * (width - full)

    def line(self, text: str) -> None:
        print(f"\r\x1b[K{text}" if self._live else text, file=self._out, flush=True)

    def passing(self, text: str) -> None:
        now = time.monotonic()
        if self._live and now - self._last > 0.1:
            self._last = now
            print(f"\r\x1b[K{text}", end="", file=self._out, flush=True)

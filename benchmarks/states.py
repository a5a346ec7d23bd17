"""`python -m benchmarks.states`: what a saved state costs, beside the environment's own way in the same process.

Save and restore over the network and in process, in turns, and a fork to 64 lanes beside a vector step of theirs. The
table has the median of each, in microseconds, the ratio of the two, and the memory that a state takes.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from benchmarks.alone import add_busy, measuring
from bridge import SavedState, make_remote, make_vec_remote
from bridge.testing import ServerProcess

__all__ = ["main", "measure"]

Function = Callable[[], object]
ENVS = ("CartPole-v1", "ALE/Pong-v5", "Hopper-v5")
LANES = 64


def own_way(env_id: str) -> tuple[Function, Function]:
    """Return what saves and restores an environment in this process, in the way that it has itself."""
    if env_id.startswith("ALE/"):
        import ale_py  # noqa: F401 - registers them
    env: Any = gymnasium.make(env_id)
    env.reset(seed=0)
    base = env.unwrapped
    if hasattr(base, "ale"):
        state = base.ale.cloneState(include_rng=True)
        return lambda: base.ale.cloneState(include_rng=True), lambda: base.ale.restoreState(state)
    if hasattr(base, "data"):
        import mujoco

        kept = mujoco.MjData(base.model)

        def save() -> None:
            mujoco.mj_copyData(mujoco.MjData(base.model), base.model, base.data)

        mujoco.mj_copyData(kept, base.model, base.data)
        return save, lambda: mujoco.mj_copyData(base.data, base.model, kept)
    copied = copy.deepcopy(env)
    return lambda: copy.deepcopy(env), lambda: copy.deepcopy(copied)


def in_turns(functions: Sequence[Function], seconds: float) -> list[float]:
    """Call functions in turns; return the median time of each, in microseconds."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times[0]) < 5:
        for function, own in zip(functions, times, strict=True):
            began = time.perf_counter()
            function()
            own.append(time.perf_counter() - began)
    return [statistics.median(own) * 1e6 for own in times]


def measure(env_id: str, seconds: float) -> str:
    """Measure an environment; return its row of the table."""
    # The server imports what registers them.
    served = f"ale_py:{env_id}" if env_id.startswith("ALE/") else env_id
    with ServerProcess(served) as server, contextlib.ExitStack() as stack:
        env = make_remote(server.url, timeout=120.0)
        stack.callback(env.close)
        env.reset(seed=0)
        state: SavedState = env.save_state()
        step = env.action_space.sample()

        def save() -> None:
            env.save_state().release()

        # A save alone would come to the server's bounds; what a release takes is measured and taken off.
        empty = env.save_state()
        saves, restores, releases, steps, own_save, own_restore = in_turns(
            [
                save,
                lambda: env.restore_state(state),
                empty.release,
                lambda: (env.restore_state(state), env.step(step)),
                *own_way(env_id),
            ],
            seconds,
        )
        saves, steps = saves - releases, steps - restores
        envs = make_vec_remote(server.url, num_envs=LANES, lanes=True, blocking=True, timeout=120.0)
        stack.callback(envs.close)
        envs.reset(seed=0)
        (root,) = envs.save_state(slots=[0])
        actions = np.stack([envs.single_action_space.sample()] * LANES)
        # Lanes whose episodes end begin anew in the next step; and in each turn all go back.
        forks, vector = in_turns([lambda: envs.restore_state(root), lambda: envs.step(actions)], seconds)
    return (
        f"| {env_id} | {saves:,.0f} | {own_save:,.0f} | {restores:,.0f} | {own_restore:,.0f} | {steps:,.0f} | "
        f"{forks:,.0f} | {vector:,.0f} | {forks / vector:.1f} | {state.bytes / 1000:,.0f} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.states", description=__doc__.partition("\n")[0])
    parser.add_argument("--envs", default=",".join(ENVS), help="their ids, separated by commas")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    add_busy(parser)
    options = parser.parse_args(arguments)
    with measuring(parser, options.busy):
        print(
            "| environment | save | in process | restore | in process | step | fork to 64 | step of 64 | ratio | kB |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
        for env_id in options.envs.split(","):
            print(measure(env_id, options.seconds), flush=True)


if __name__ == "__main__":
    main()

"""A real-time environment: its clock runs whether or not the agent has decided.

    python examples/real_time.py --seconds 10

CartPole runs at 30 frames per second. The agent pushes against the pole's fall and decides 15 times a second. If it
sends nothing for 0.2 s, the server applies the default action, like the safe stop of a robot whose client is lost.
Prints the number of frames, the lengths of episodes, and the age of the observations when the agent acted on them.
"""

from __future__ import annotations

import argparse

import numpy as np

from bridge import RealTime, make_vec_remote, serve_gym
from bridge.wrappers import BlockingReset, Throttle

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--seconds", type=float, default=10.0)
arguments = parser.parse_args()

with serve_gym("CartPole-v1", fps=30, default_action=0, realtime=RealTime(max_action_age=0.2)) as server:
    print(f"serving CartPole-v1 at {server.url}, 30 frames a second; playing for {arguments.seconds:g} s", flush=True)
    # Throttle waits until the next decision is due, and returns the sum of the rewards in between.
    envs = BlockingReset(Throttle(make_vec_remote(server.url), fps=15.0))
    observations, infos = envs.reset(seed=0)
    frames, lengths, ages = 0.0, [], []
    for _ in range(int(arguments.seconds * 15)):
        lean = observations[:, 2] + observations[:, 3]  # angle and angular velocity of the pole
        observations, rewards, terminations, truncations, infos = envs.step((lean > 0).astype(np.int64))
        frames += rewards[0]  # CartPole gives 1 per frame
        ages.append(infos["latency"]["observation_age"][0])  # seconds
        if terminations[0] or truncations[0]:
            lengths.append(int(frames))
            frames = 0.0
    envs.close()
    print(f"{sum(lengths) + frames:g} frames passed while the agent decided {len(ages)} times")
    ended = f"episodes ended after {lengths} frames" if lengths else "no episode ended"
    print(f"{ended}; the running one has {frames:g} frames")
    print(f"observations were {1000 * np.median(ages):.1f} ms old, in the median; a frame takes 33.3 ms")

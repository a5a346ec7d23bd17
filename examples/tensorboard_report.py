"""The health of servers and slots in TensorBoard, next to the returns of a training loop.

    python examples/tensorboard_report.py --log-dir runs
    tensorboard --logdir runs

Two servers run in this program. The first is stopped in the middle, and its slots continue on the other one, as the
curves `bridge/losses` and `bridge/servers/…` show. Use `--urls` for servers elsewhere. The loop uses random actions
instead of an agent. Prints the number of values written. Needs PyTorch and the package `tensorboard`.
"""

from __future__ import annotations

import argparse
import contextlib

from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch.utils.tensorboard import SummaryWriter

from bridge import make_vec_remote, serve_gym


def main() -> None:
    """Step environments, and write the values of `report`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--urls", nargs=2, metavar="URL", help="a server, and its spare; none: both are started here")
    parser.add_argument("--num-envs", type=int, default=4, metavar="N")
    parser.add_argument("--steps", type=int, default=2_000, metavar="N", help="of each environment")
    parser.add_argument("--every", type=int, default=100, metavar="N", help="steps between two reports")
    parser.add_argument("--log-dir", default="runs", metavar="FOLDER")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        servers = [] if arguments.urls else [stack.enter_context(serve_gym("CartPole-v1")) for _ in range(2)]
        first, spare = arguments.urls or [server.url for server in servers]
        remotes = make_vec_remote(
            first, num_envs=arguments.num_envs, spares=[spare] * arguments.num_envs, blocking=True
        )
        envs = RecordEpisodeStatistics(remotes)
        stack.callback(envs.close)
        writer = stack.enter_context(SummaryWriter(arguments.log_dir))
        written = 0
        envs.reset(seed=0)
        for step in range(1, arguments.steps + 1):
            if servers and step == arguments.steps // 2:
                servers[0].stop()
            envs.step(envs.action_space.sample())
            if step % arguments.every == 0:
                values = {f"bridge/{name}": value for name, value in remotes.report().items()}
                if envs.return_queue:
                    values["episodes/mean_return"] = sum(envs.return_queue) / len(envs.return_queue)
                for name, value in values.items():
                    writer.add_scalar(name, value, step)
                written += len(values)
        lost = remotes.report()["losses"]
        print(f"{written} values are in {arguments.log_dir}; connections lost: {lost:.0f}")


if __name__ == "__main__":
    main()

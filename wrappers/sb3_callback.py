"""The costs of failures, in the log of a Stable-Baselines3 training."""

from __future__ import annotations

from stable_baselines3.common.callbacks import BaseCallback

from bridge.errors import SettingError

from .sb3 import SB3VecEnv

__all__ = ["SB3ReportCallback"]


class SB3ReportCallback(BaseCallback):
    """A callback that writes the numbers of `SB3VecEnv.report` to Stable-Baselines3's logger; needs the extra `sb3`.

    They are recorded after each rollout, under `bridge/`, for TensorBoard and the logger's other outputs. The numbers
    of single servers are left out of the table on the terminal.

    Examples:
        >>> from bridge import make_vec_remote, serve_gym
        >>> from bridge.wrappers import SB3ReportCallback, SB3VecEnv
        >>> from stable_baselines3 import PPO
        >>> with serve_gym("CartPole-v1") as server:
        ...     envs = SB3VecEnv(make_vec_remote(server.url, num_envs=8, blocking=True))
        ...     model = PPO("MlpPolicy", envs, n_steps=32, device="cpu")
        ...     _ = model.learn(256, callback=SB3ReportCallback())
        ...     model.logger.name_to_value["bridge/losses"]
        ...     envs.close()
        0.0

    Args:
        verbose: As for every callback of Stable-Baselines3; this one prints nothing.

    Raises:
        SettingError: Training begins, and its environment neither is an `SB3VecEnv` nor wraps one.
    """

    def __init__(self, verbose: int = 0) -> None:
        super().__init__(verbose)

    def _on_training_start(self) -> None:
        self._remote()  # raises before the first rollout, not after it

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        for name, value in self._remote().report().items():
            # The table truncates the long names of servers, and raises if two become equal.
            exclude = ("stdout", "log") if name.startswith("servers/") else None
            self.logger.record(f"bridge/{name}", value, exclude=exclude)

    def _remote(self) -> SB3VecEnv:
        """Return the `SB3VecEnv` below all wrappers."""
        envs = self.training_env.unwrapped
        if not isinstance(envs, SB3VecEnv):
            raise SettingError(
                f"expected a training on SB3VecEnv(make_vec_remote(…)), wrapped or not, got one on "
                f"{type(envs).__name__}: only SB3VecEnv knows how its servers are"
            )
        return envs

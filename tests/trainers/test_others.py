"""TorchRL, skrl and loops in the manner of CleanRL over remote environments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers

from bridge import Server, make_parallel_remote, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.wrappers import BlockingReset
from tests.support import assert_identical
from tests.trainers.remarks import OWN_REMARKS

torch.set_num_threads(1)

pytestmark = OWN_REMARKS


@pytest.fixture
def server() -> Iterator[Server]:
    """Worlds of three lanes."""
    with serve_gym("CartPole-v1", num_envs=3) as made:
        yield made


def sync(mode: AutoresetMode) -> Any:
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3, autoreset_mode=mode)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED], ids=lambda mode: mode.name)
def test_torchrl_rolls_out_the_same_as_over_local_environments(server: Server, mode: AutoresetMode) -> None:
    from torchrl.envs import GymWrapper

    def rollout(envs: Any) -> Any:
        env = GymWrapper(envs, categorical_action_encoding=True)
        env.set_seed(0)
        torch.manual_seed(0)
        found = env.rollout(150, break_when_any_done=False)
        env.close()
        return found

    mine = rollout(BlockingReset(make_vec_remote(server.url), autoreset_mode=mode))
    theirs = rollout(sync(mode))
    assert set(mine.keys(True, True)) == set(theirs.keys(True, True))
    assert theirs["next", "done"].sum() > 5
    for key in theirs.keys(True, True):
        assert torch.equal(mine[key], theirs[key]), key


def test_torchrl_refuses_the_mode_that_it_does_not_take(server: Server) -> None:
    from torchrl.envs import GymWrapper

    envs = BlockingReset(make_vec_remote(server.url))
    with pytest.raises(RuntimeError, match="SAME_STEP or DISABLED"):
        GymWrapper(envs)
    envs.close()


def test_torchrl_checks_and_makes_single_environments() -> None:
    from torchrl.envs import GymEnv, GymWrapper
    from torchrl.envs.utils import check_env_specs

    with serve_gym("CartPole-v1") as server:
        env = GymWrapper(make_remote(server.url))
        check_env_specs(env)
        env.close()
        env = GymEnv("bridge:bridge/Remote-v0", url=server.url)
        assert env.rollout(20)["next", "reward"].sum() > 5
        env.close()


def test_torchrl_collects_for_its_ppo(server: Server) -> None:
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.envs import GymWrapper
    from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    envs = BlockingReset(make_vec_remote(server.url), autoreset_mode="Disabled")
    env = GymWrapper(envs, categorical_action_encoding=True)
    net = TensorDictModule(MLP(in_features=4, out_features=2), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(
        net, in_keys=["logits"], distribution_class=torch.distributions.Categorical, return_log_prob=True
    )
    critic = ValueOperator(MLP(in_features=4, out_features=1), in_keys=["observation"])
    collector = Collector(env, actor, frames_per_batch=96, total_frames=192)
    loss = ClipPPOLoss(actor, critic)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.Adam(loss.parameters(), 1e-3)
    batches = 0
    for batch in collector:
        advantage(batch)
        losses = loss(batch.reshape(-1))
        total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        assert torch.isfinite(total)
        batches += 1
    assert batches == 2
    collector.shutdown()
    envs.close()


@pytest.mark.parametrize("vector", [True, False])
def test_skrl_trains_its_ppo(server: Server, vector: bool, tmp_path: Any) -> None:
    from skrl.envs.wrappers.torch import wrap_env

    with serve_gym("CartPole-v1") as single:
        made = (
            BlockingReset(make_vec_remote(server.url), autoreset_mode="SameStep") if vector else make_remote(single.url)
        )
        local = sync(AutoresetMode.SAME_STEP) if vector else gymnasium.make("CartPole-v1")
        mine, theirs = wrap_env(made, verbose=False), wrap_env(local, verbose=False)
        assert mine.num_envs == theirs.num_envs == (3 if vector else 1)
        made.reset(seed=1)
        local.reset(seed=1)
        mine.reset()
        theirs.reset()
        actions = torch.zeros(mine.num_envs, 1, dtype=torch.int64)
        for _ in range(8):
            left, right = mine.step(actions), theirs.step(actions)
            for one, other in zip(left[:4], right[:4], strict=True):
                assert torch.equal(one, other)
        mine.close()
        theirs.close()


def rewards_of_a_loop(make: Callable[[], Any]) -> tuple[list[float], Any]:
    """A loop in the manner of CleanRL's ppo.py: its wrappers, its bookkeeping of `next_done`, one update."""
    envs = wrappers.RecordEpisodeStatistics(make())
    torch.manual_seed(1)
    policy = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    observation, _ = envs.reset(seed=1)
    done = np.zeros(envs.num_envs)
    log_probs, returns = [], []
    for _ in range(128):
        distribution = torch.distributions.Categorical(logits=policy(torch.Tensor(observation)))
        action = distribution.sample()
        weights = torch.Tensor(1 - done)
        observation, reward, terminations, truncations, infos = envs.step(action.numpy())
        done = np.logical_or(terminations, truncations)
        log_probs.append(distribution.log_prob(action) * torch.Tensor(reward) * weights)
        if "episode" in infos:
            returns += infos["episode"]["r"][infos["_episode"]].tolist()
    loss = -torch.stack(log_probs).mean()
    loss.backward()
    optimizer.step()
    envs.close()
    return returns, policy.weight.detach().numpy().copy()


def test_a_loop_in_the_manner_of_cleanrl_learns_the_same_as_locally(server: Server) -> None:
    mine = rewards_of_a_loop(lambda: BlockingReset(make_vec_remote(server.url)))
    theirs = rewards_of_a_loop(lambda: sync(AutoresetMode.NEXT_STEP))
    assert len(theirs[0]) > 5
    assert_identical(mine, theirs)


def test_numpy_to_torch_gives_tensors(server: Server) -> None:
    envs = wrappers.NumpyToTorch(BlockingReset(make_vec_remote(server.url)))
    local = wrappers.NumpyToTorch(sync(AutoresetMode.NEXT_STEP))
    mine, theirs = envs.reset(seed=1)[0], local.reset(seed=1)[0]
    assert torch.equal(mine, theirs)
    for _ in range(30):
        actions = torch.ones(3, dtype=torch.int64)
        for left, right in zip(envs.step(actions)[:4], local.step(actions)[:4], strict=True):
            assert torch.equal(left, right)
    envs.close()
    local.close()


def test_videos_are_recorded(tmp_path: Any) -> None:
    with serve_gym("CartPole-v1", num_envs=2) as server:
        envs = wrappers.RecordVideo(
            BlockingReset(make_vec_remote(server.url, render_mode="rgb_array")),
            str(tmp_path / "vector"),
            episode_trigger=lambda episode: True,
        )
        envs.reset(seed=1)
        for _ in range(30):
            envs.step(np.ones(2, np.int64))
        envs.close()
        env = gymnasium.wrappers.RecordVideo(
            make_remote(f"{server.url}?num_envs=1", render_mode="rgb_array"), str(tmp_path / "single")
        )
        env.reset(seed=1)
        while not env.step(1)[2]:
            pass
        env.close()
    for folder in ("vector", "single"):
        assert any(path.stat().st_size > 1000 for path in (tmp_path / folder).glob("*.mp4"))


def test_human_rendering_shows_the_frames_here() -> None:
    with serve_gym("CartPole-v1", num_envs=2) as server:
        remote = make_vec_remote(server.url, render_mode="rgb_array")
        envs = wrappers.HumanRendering(BlockingReset(remote), (1200, 400))
        envs.reset(seed=1)
        for _ in range(3):
            envs.step(np.ones(2, np.int64))
        assert envs.window is not None
        envs.close()
        env = gymnasium.make("bridge:bridge/Remote-v0", url=f"{server.url}?num_envs=1", render_mode="human")
        env.reset()
        env.step(0)
        env.close()


def test_supersuit_makes_copies_of_several_agents_as_of_a_local_environment() -> None:
    """The usual way from PettingZoo to Stable-Baselines3: it pickles the environment once for each copy."""
    supersuit = pytest.importorskip("supersuit")
    spread = pytest.importorskip("mpe2.simple_spread_v3")

    def local() -> Any:
        return spread.parallel_env(N=3, max_cycles=10)

    def two_of(env: Any) -> Any:
        lanes = supersuit.pettingzoo_env_to_vec_env_v1(env)
        return supersuit.concat_vec_envs_v1(lanes, 2, num_cpus=0, base_class="gymnasium")

    with serve_parallel(local) as server:
        remote = make_parallel_remote(server.url)
        mine, theirs = two_of(remote), two_of(local())
        assert_identical(mine.reset(seed=5)[0], theirs.reset(seed=5)[0])
        for step in range(25):
            actions = (np.arange(6) + step) % 5
            assert_identical(mine.step(actions)[:4], theirs.step(actions)[:4])
        mine.close()
        remote.close()

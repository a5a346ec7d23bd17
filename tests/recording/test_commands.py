"""`gymnasium-bridge runs`, `replay` and `export` as a user runs them, and episodes that are watched again."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from bridge import RealTime, Recording, make_remote, serve_gym, serve_parallel
from bridge.cli import main
from bridge.errors import RecordingError, SettingError
from bridge.recording.episodes import load_episode
from bridge.recording.player import EpisodeEnv, serve_episode
from bridge.recording.reader import open_episode, read_folder
from bridge.testing import CountingEnv, VirtualClock
from tests.parallel_envs import Relay
from tests.preloaded import Program
from tests.recording.changes import change
from tests.support import until


def record(
    folder: Path,
    *,
    seed: int | None = 3,
    episodes: int = 2,
    steps: int = 500,
    observations: bool = False,
    **keywords: Any,
) -> list[str]:
    """Record episodes of CartPole; return their ids."""
    with serve_gym("CartPole-v1", record=Recording(folder, observations=observations), **keywords) as server:
        env = make_remote(server.url, player="person:Ann")
        for number in range(episodes):
            env.reset(seed=seed if number == 0 else None)
            for step in range(steps):
                *_, terminated, truncated, _ = env.step(step % 2)
                if terminated or truncated:
                    break
        env.close()
    return [episode.id for episode in read_folder(folder).episodes()]


@pytest.mark.slow
def test_bridge_serve_records_what_its_options_say(tmp_path):
    command = ["-m", "bridge", "serve", "CartPole-v1", "--record", str(tmp_path / "runs")]
    with Program(*command, "--record-observations", "--record-max-bytes", "100000000") as process:
        url = process.stdout.readline().split(" served at ")[1].split()[0]
        env = make_remote(url)
        env.reset(seed=1)
        env.step(0)
        env.close()
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    (episode,) = read_folder(tmp_path / "runs").episodes()
    assert episode.stream.has_observations
    assert episode.end == "closed"


def test_runs_lists_the_episodes(tmp_path, capsys):
    first, second = record(tmp_path)
    assert main(["runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["episode", "environment", "began", "steps", "return", "end", "seed", "who"]
    assert lines[1].startswith(first)
    assert "CartPole-v1" in lines[1]
    assert lines[1].endswith("terminated     3  person Ann")
    assert lines[2].startswith(second)
    assert lines[3].startswith("2 episodes, ")
    assert main(["runs", str(tmp_path), "--json", "--who", "person"]) == 0
    facts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [fact["episode"] for fact in facts] == [first, second]
    assert (facts[0]["seed"], facts[1]["seed"], facts[0]["players"]) == (3, None, ["person:Ann"])
    assert main(["runs", str(tmp_path), "--who", "agent"]) == 0
    assert capsys.readouterr().out.endswith("0 episodes, 0 steps\n")


def test_export_says_which_episodes_it_leaves_out(tmp_path, capsys):
    with serve_gym("CartPole-v1", record=tmp_path / "runs") as server:
        env = make_remote(server.url)
        env.reset(seed=0)
        env.reset(seed=1)  # the first one has no step
        while not env.step(0)[2]:
            pass
        env.reset(seed=2)
        env.step(0)
        env.close()  # and the last one no end
    arguments = ["export", str(tmp_path / "runs"), "--mp4", str(tmp_path / "films"), "--who", "nobody"]
    assert main(arguments) == 1
    out = capsys.readouterr()
    assert (
        "0 of 3 episodes; left out: 2 failed or incomplete (no step, no end, or missing rows; --unfinished)\n"
        in out.out + out.err
    )
    assert "there are no such episodes with --who nobody; `gymnasium-bridge runs` lists" in out.err
    assert main([*arguments, "--unfinished"]) == 1
    out = capsys.readouterr()
    assert "0 of 3 episodes\n" in out.out + out.err
    assert main([*arguments[:-2], "--env-id", "Pong*", "--min-return", "3", "--no-intervention"]) == 1
    assert "no such episodes with --env-id Pong* --min-return 3.0 --no-intervention;" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("player", "shown"),
    [
        (None, "agent"),
        ("agent:PPO", "agent PPO"),
        ("person:person 7935", "person 7935"),
        ("person:personable", "person personable"),
        ("person:a:b", "person a:b"),
        ("person", "person"),
    ],
)
def test_players_are_called_in_one_way_in_which_they_are_found_too(tmp_path, capsys, player, shown):
    with serve_gym("CartPole-v1", record=tmp_path) as server:
        env = make_remote(server.url, player=player)
        env.reset(seed=0)
        env.step(0)
        env.close()
    assert main(["runs", str(tmp_path), "--who", shown]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith(f"  {shown}")
    assert main(["runs", str(tmp_path), "--who", player or "agent", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["players"] == [player or "agent"], "a program gets what was given"


def test_an_export_leaves_out_episodes_in_which_nobody_acted(tmp_path, capsys):
    clock, runs = VirtualClock(), str(tmp_path / "runs")
    timed = {"fps": 10, "realtime": RealTime(clock=clock)}
    with serve_gym(
        lambda: CountingEnv(2), record=Recording(runs, observations=True, unattended=True), **timed
    ) as server:
        person = make_remote(f"{server.url}?world=", player="person:Ann", wait="now")
        person.reset(seed=4)
        person.step(1)
        clock.advance(1.5)  # the rest of Ann's episode, and some that nobody plays
        person.close()
    assert main(["runs", runs]) == 0
    *rows, _ = (
        line for line in capsys.readouterr().out.splitlines()[1:] if "truncated" in line or "terminated" in line
    )
    who = [row.rsplit("  ", 1)[1] for row in rows]
    assert who[0] == "person Ann"
    assert set(who[1:]) == {"nobody"}
    sets = [["--lerobot", str(tmp_path / name)] for name in ("acted", "all")]
    assert main(["export", runs, *sets[0]]) == 0
    said = capsys.readouterr().out
    left = int(re.search(r"; left out: (\d+) in which nobody acted \(--unattended\)", said)[1])
    assert left >= len(rows) - 1 > 1
    assert "acted: 1 episode, " in said
    assert main(["export", runs, *sets[1], "--unattended"]) == 0
    said = capsys.readouterr().out
    assert "nobody" not in said
    assert f"all: {left + 1} episodes" in said
    assert main(["export", runs, "--lerobot", str(tmp_path / "none"), "--who", "agent"]) == 1
    assert "--unattended those in which nobody acted" in capsys.readouterr().err


class OfScript(CountingEnv):
    """As a class of the script that serves it, such as `serve_robot.py`."""

    __module__ = "__main__"


def test_replay_of_what_a_script_served_says_how_to_name_it(tmp_path, capsys):
    with serve_gym(OfScript, record=tmp_path) as server:
        env = make_remote(server.url)
        env.reset(seed=0)
        env.step(0)
        env.close()
    (episode,) = read_folder(tmp_path).episodes()
    assert main(["replay", f"{tmp_path}/{episode.id}", "--verify"]) == 2
    said = capsys.readouterr().err
    assert "--env MODULE:OfScript, where MODULE is the name of the script that served it, without .py" in said


def test_runs_prints_nothing_that_a_terminal_obeys(tmp_path, capsys):
    with serve_gym("CartPole-v1", record=tmp_path) as server:
        env = make_remote(server.url, player="person:\x9b2J\u202e")
        env.reset(seed=0)
        env.step(0)
        env.close()
    assert main(["runs", str(tmp_path)]) == 0
    (tmp_path / "\x1b[2J.parquet").write_bytes(b"no recording")
    assert main(["runs", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out.count("2J") == 3, "the player twice, and the name of the file"
    assert all(line.isprintable() for line in (out + err).splitlines())


def test_runs_says_what_is_damaged_and_what_is_no_folder(tmp_path, capsys):
    record(tmp_path)
    (file,) = tmp_path.glob("*.parquet")
    file.write_bytes(file.read_bytes()[:-3])
    assert main(["runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "are not those that were written" in out
    assert "2 episodes, " in out, "what is whole is listed"
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert "expected a folder with recordings, files *.parquet and *.arrow, got" in (err := capsys.readouterr().err)
    assert "which does not exist" in err
    (tmp_path / "empty").mkdir()
    assert main(["runs", str(tmp_path / "empty")]) == 2
    assert "which has none: a server writes them once somebody has played" in capsys.readouterr().err
    assert main(["replay", str(tmp_path), "--serve"]) == 2
    assert f"lists, got the folder {tmp_path}" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "none"), "--mp4", str(tmp_path / "out")]) == 1
    assert main(["export", str(tmp_path), "--mp4", str(tmp_path / "out"), "--who", "person:Zoe"]) == 1
    assert "there are no such episodes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_last_episodes_are_listed_alone(tmp_path, capsys):
    _, second = record(tmp_path)
    assert main(["runs", str(tmp_path), "--last", "1"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["episode", second, "1"]
    assert main(["runs", str(tmp_path), "--last", "0"]) == 2
    assert "expected a positive integer, got '0'" in capsys.readouterr().err


def test_replay_verifies_one_episode_or_all_of_a_folder(tmp_path, capsys):
    first, second = record(tmp_path)
    assert main(["replay", str(tmp_path / first), "--verify"]) == 0
    assert f"{first}: verified, " in capsys.readouterr().out
    assert main(["replay", str(tmp_path), "--verify"]) == 0
    out = capsys.readouterr().out
    assert f"{second}: verified, " in out
    assert "2 of 2 episodes are verified" in out


def test_the_exit_codes_of_replay_tell_what_is_wrong(tmp_path, capsys):
    """1: it differs, is damaged or cannot be verified; 2: there is no such episode, or no such environment."""
    record(tmp_path / "unseeded", seed=None, episodes=1)
    (episode,) = read_folder(tmp_path / "unseeded").episodes()
    assert main(["replay", str(tmp_path / "unseeded" / episode.id), "--verify"]) == 1
    assert "no reset with a seed was recorded before it" in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "unseeded" / f"{episode.id}9"), "--verify"]) == 2
    assert "has no episode 1.0.19" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "unseeded" / "nothing"), "--verify"]) == 2
    assert "expected FOLDER/EPISODE" in capsys.readouterr().err
    (first,) = record(tmp_path / "seeded", episodes=1)
    assert main(["replay", str(tmp_path / "seeded" / first), "--verify", "--env", "MountainCar-v0"]) == 1
    assert "the observation is not of its space now" in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "seeded" / first), "--verify", "--env", "nothing:Here-v0"]) == 2
    capsys.readouterr()
    (file,) = (tmp_path / "seeded").glob("*.parquet")
    change(file, "reward", 4)
    assert main(["replay", str(tmp_path / "seeded" / first), "--verify"]) == 1
    out = capsys.readouterr().out
    assert f"{first}: step 4: reward differs" in out


# Watched again


def test_an_episode_is_watched_with_pause_seek_and_speed(tmp_path):
    (name,) = record(tmp_path, episodes=1, observations=True)
    episode = open_episode(tmp_path / name)
    recorded = load_episode(episode).observations
    env = EpisodeEnv(episode)
    observation, info = env.reset()
    assert observation.tobytes() == recorded[0].tobytes()
    assert info == {"episode_id": name, "position": 0, "paused": False, "by": ""}
    observation, reward, terminated, truncated, info = env.step(0)
    assert (observation.tobytes(), reward, terminated, truncated) == (recorded[1].tobytes(), 1.0, False, False)
    assert (info["position"], info["by"]) == (1, "person:Ann")
    env.pause()
    assert env.step(0)[0].tobytes() == recorded[1].tobytes()
    assert env.seek(5) == 5
    assert env.step(0)[4]["position"] == 5
    env.play()
    env.speed = 0.5
    assert [env.step(0)[4]["position"] for _ in range(4)] == [5, 6, 6, 7]
    env.speed = 3
    observation, reward, *_ = env.step(0)
    assert (observation.tobytes(), reward) == (recorded[10].tobytes(), 3.0)
    assert env.seek(2) == 2
    assert env.seek(10**6) == episode.length
    assert env.step(0)[3], "at its end it is truncated"
    with pytest.raises(SettingError, match="expected a speed above 0"):
        env.speed = 0
    env.close()


def test_an_episode_without_observations_is_replayed_to_be_watched(tmp_path):
    (name,) = record(tmp_path, episodes=1, env_kwargs={"render_mode": "rgb_array"})
    env = EpisodeEnv(str(tmp_path / name), render_mode="rgb_array")
    env.reset()
    first = env.render()
    assert first.shape == (400, 600, 3)
    env.seek(8)
    eighth = env.render()
    assert (first != eighth).any()
    env.seek(0)
    assert env.render().tobytes() == first.tobytes()
    env.close()


def test_a_served_episode_is_a_real_time_world_that_spectators_see_and_steer(tmp_path):
    (name,) = record(tmp_path, episodes=1, observations=True)
    episode = open_episode(tmp_path / name)
    recorded = load_episode(episode).observations
    clock = VirtualClock()
    with serve_episode(tmp_path / name, frames=False, realtime=RealTime(clock=clock), fps=10) as server:
        watcher = make_remote(f"{server.url}?world=")
        observation, _ = watcher.reset(options={})
        assert observation.tobytes() == recorded[0].tobytes()
        clock.advance(0.3)
        observation, *_ = watcher.step(0)
        assert observation.tobytes() == recorded[3].tobytes()
        watcher.get_wrapper_attr("pause")()
        clock.advance(1.0)
        assert watcher.step(0)[0].tobytes() == recorded[3].tobytes()
        assert watcher.get_wrapper_attr("seek")(1) == 1
        watcher.set_wrapper_attr("speed", 2.0)
        watcher.get_wrapper_attr("play")()
        clock.advance(0.1)
        assert watcher.step(0)[0].tobytes() == recorded[3].tobytes()
        watcher.close()


def test_an_episode_of_several_agents_is_watched_over_the_first_ones_shoulder(tmp_path):
    from bridge import make_parallel_remote

    with serve_parallel(Relay, record=Recording(tmp_path, observations=True)) as server:
        remote = make_parallel_remote(server.url)
        remote.reset(seed=3)
        while remote.agents:
            remote.step({agent: remote.action_space(agent).sample() for agent in remote.agents})
        remote.close()
    (episode,) = read_folder(tmp_path).episodes()
    env = EpisodeEnv(episode)
    seen = [env.reset()[0]]
    ended = False
    while not ended:
        observation, _, _, ended, _ = env.step(0)
        seen.append(observation)
    assert len(seen) == episode.length + 1
    assert all(env.observation_space.contains(observation) for observation in seen)
    env.close()


@pytest.mark.slow
def test_the_command_serves_an_episode_until_a_signal(tmp_path):
    (name,) = record(tmp_path, episodes=1)
    with Program("-m", "bridge", "replay", str(tmp_path / name), "--serve", "--fps", "60") as process:
        line = process.stdout.readline()
        assert line.startswith(f"{name} served at grpc://"), line
        watcher = make_remote(f"{line.split(' served at ')[1].split()[0]}?world=", role="spectator")
        watcher.reset()
        until(lambda: watcher.step(0)[4].get("position", 0) > 0)
        watcher.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_an_episode_that_can_be_neither_shown_nor_replayed_is_refused(tmp_path):
    (name,) = record(tmp_path, seed=None, episodes=1)
    with pytest.raises(RecordingError, match="cannot be verified: no reset with a seed"):
        serve_episode(tmp_path / name)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--lerobot", "a", "--author", "Ann"), "--author is for --minari, got it with --lerobot"),
        (("--mp4", "a", "--data-format", "arrow"), "--data-format is for --minari, got it with --mp4"),
        (("--minari", "a/b-v0", "--task", "win"), "--task is for --lerobot, got it with --minari"),
        (("--minari", "a/b-v0", "--fps", "10"), "--fps is for --lerobot and --mp4, got it with --minari"),
        (("--mp4", "a", "--finite"), "--finite is for --minari and --lerobot, got it with --mp4"),
    ],
)
def test_an_option_of_another_form_is_refused_and_not_ignored(options, text, tmp_path, capsys):
    assert main(["export", str(tmp_path), *options]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--min-return", "--max-return"])
def test_a_bound_of_returns_is_a_number(option, tmp_path, capsys):
    assert main(["runs", str(tmp_path), option, "nan"]) == 2
    assert f"argument {option}: expected a number, got 'nan'" in capsys.readouterr().err

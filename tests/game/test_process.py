"""A game that is served from a process of its own: `serve_game(process=True)`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from gymnasium import spaces

from bridge import Recording, make_remote, serve_game
from bridge.errors import ClosedError, ConnectionLostError, RemoteError, SettingError
from bridge.recording.episodes import observed_rows
from bridge.recording.reader import read_folder
from tests.game.loops import ACTION, OBSERVATION, in_thread, walking
from tests.support import sampled, until

AT_START = np.zeros(2, np.float32)
# A main module without a guard, as many games are: it must not be run again.
PROGRAM = """
import sys, time
import numpy as np
from gymnasium import spaces
from bridge import serve_game
print("runs", flush=True)
game = serve_game(spaces.Box(-9, 9, (1,), np.float32), spaces.Discrete(2), process=True)
print(game.url, game.server.pid, flush=True)
while True:
    game.exchange([0.0])
    game.begins
    time.sleep(0.01)
"""


def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One whose parent has died before it may wait for its new parent to take note of its end.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return True


@pytest.mark.parametrize("wait", [False, True])
def test_the_end_of_the_server_is_told_by_exchange(wait):
    def loop():
        while True:
            game.exchange(AT_START, wait=wait)
            assert game.begins in (True, False), "read, so that rounds begin"

    with serve_game(OBSERVATION, ACTION, process=True) as game:
        pid = game.server.pid
        with (
            in_thread(lambda: os.kill(pid, signal.SIGKILL)),
            pytest.raises(ClosedError, match=r"the server's process has ended by itself, with -9"),
        ):
            loop()
        with pytest.raises(ClosedError, match="ended by itself"):
            _ = game.server.connections


@pytest.mark.slow
def test_a_program_that_is_killed_leaves_no_server_and_is_run_once(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as game:
        try:
            assert game.stdout.readline() == "runs\n"
            url, pid = game.stdout.readline().split()
            env = make_remote(url, timeout=20)
            env.reset()
            env.step(1)
            game.kill()
            until(lambda: not lives(int(pid)), 30)
            with pytest.raises(RemoteError) as lost:
                env.step(1)
            assert isinstance(lost.value, ConnectionLostError)
            env.close()
            assert game.stdout.read() == ""
        finally:
            game.kill()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.slow
def test_what_a_program_has_forked_neither_ends_its_server_nor_keeps_it(tmp_path):
    forks = """
forked = os.fork()
if not forked:
    game.close()
    time.sleep(600)
print(forked, flush=True)
while True:"""
    script = tmp_path / "program.py"
    script.write_text("import os\n" + PROGRAM.replace("\nwhile True:", forks), encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as game:
        forked = None
        try:
            assert game.stdout.readline() == "runs\n"
            url, pid = game.stdout.readline().split()
            forked = int(game.stdout.readline())
            env = make_remote(url, timeout=20)
            env.reset()
            env.step(1)
            game.kill()
            until(lambda: not lives(int(pid)), 30)
            assert lives(forked)
            env.close()
        finally:
            game.kill()
            if forked is not None:
                os.kill(forked, signal.SIGKILL)


def test_close_ends_the_process_and_a_second_one_does_nothing():
    game = serve_game(OBSERVATION, ACTION, process=True)
    pid = game.server.pid
    assert game.exchange(AT_START) is None
    game.close()
    game.close()
    assert not lives(pid)
    with pytest.raises(ClosedError, match="this game was closed"):
        game.exchange(AT_START)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_close_kills_a_process_that_does_not_run():
    game = serve_game(OBSERVATION, ACTION, process=True)
    pid = game.server.pid
    os.kill(pid, signal.SIGSTOP)
    game.close()
    assert not lives(pid)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
@pytest.mark.parametrize("several", [False, True])
def test_with_next_frame_each_action_is_taken_before_its_step_returns(several):
    def play():
        with contextlib.closing(make_remote(game.url, wait="next_frame")) as env:
            env.reset(seed=1)
            for action in range(1, 301):
                told = int(env.step(action)[0][0])
                returned.append((action, told))

    taken, returned = [], []
    own = OBSERVATION, spaces.Discrete(1000)
    with serve_game(*([{"red": own}] if several else own), process=True) as game, in_thread(play) as player:
        while player.is_alive():
            seen = [len(taken), 0.0]
            action = game.exchange({"red": seen} if several else seen)
            assert game.begins in (True, False), "read, so that rounds begin"
            taken.append(action["red"] if several and action else action)
            player.join(0.002)
    assert len(returned) == 300
    assert all(action in taken[: told + 1] for action, told in returned)


def test_exchange_does_not_wait_for_a_server_that_does_not_run():
    with serve_game(OBSERVATION, ACTION, process=True) as game:
        pid = game.server.pid
        found, told = [], []
        with in_thread(lambda: found.append(make_remote(game.url))):
            until(lambda: found or (game.exchange(AT_START), game.begins, False)[2])
        env = found[0]
        os.kill(pid, signal.SIGSTOP)
        try:
            for frame in range(200):  # more than are on their way at once
                game.exchange(np.array([frame, 0], np.float32), frame=np.zeros((40, 40, 3), np.uint8))
                assert not game.begins
        finally:
            os.kill(pid, signal.SIGCONT)
        with in_thread(lambda: told.append(env.reset(seed=4))):
            until(lambda: told or (game.exchange(AT_START), game.begins, False)[2])
        assert game.exchange(AT_START) == 0
        env.close()


@contextlib.contextmanager
def played(folder, **keywords):
    """Serve a game whose pictures are recorded, and play it from another thread; give it, and whether that is over."""
    with serve_game(OBSERVATION, ACTION, record=Recording(folder, frames=True), **keywords) as game:
        over = []

        def play():
            env = make_remote(game.url)
            env.reset()
            for _ in range(3):
                env.step(0)
            env.close()
            over.append(True)

        with in_thread(play):
            yield game, over


def pictures(folder):
    """Return the pictures that were recorded of the first episode."""
    episode = read_folder(folder).episodes()[0]
    return [picture() for _, _, picture in observed_rows(episode, frames=True)]


TURNED = {
    "rows": lambda of: of,
    "columns": lambda of: of.swapaxes(0, 1),
    "upside_down": lambda of: of[::-1],
    "colours_turned": lambda of: of[..., ::-1],
    "every_second": lambda of: of[::2, ::-2],
    "fortran": np.asfortranarray,
    "read_only": lambda of: np.frombuffer(of.tobytes(), np.uint8).reshape(of.shape),
}


@pytest.mark.parametrize("turned", sampled(TURNED, 2))
def test_pictures_arrive_in_whatever_order_their_memory_is(process, turned, tmp_path):
    picture = TURNED[turned](np.random.default_rng(0).integers(256, size=(7, 5, 3), dtype=np.uint8))
    with played(tmp_path, process=process) as (game, over):
        until(lambda: over or (game.exchange(AT_START, frame=picture), game.begins, False)[2])
    for seen in pictures(tmp_path):
        np.testing.assert_array_equal(seen, picture)


def test_pictures_may_change_their_size(process, tmp_path):
    sizes = [(4, 6), (40, 30), (1, 1)]
    with played(tmp_path, process=process) as (game, over):
        frame = iter(range(10**9))

        def turn():
            game.exchange(AT_START, frame=np.full((*sizes[next(frame) % 3], 3), 7, np.uint8))
            assert game.begins in (True, False), "read, so that rounds begin"

        until(lambda: over or (turn(), False)[1])
    assert {seen.shape[:2] for seen in pictures(tmp_path)} <= set(sizes)
    assert all((seen == 7).all() for seen in pictures(tmp_path))


def test_a_picture_that_the_program_draws_over_meanwhile_is_not_changed(process, tmp_path):
    picture = np.zeros((30, 30, 3), np.uint8)
    with played(tmp_path, process=process) as (game, over):

        def turn():
            picture[:] = 7
            game.exchange(AT_START, frame=picture)
            assert game.begins in (True, False), "read, so that rounds begin"
            picture[:] = 9

        until(lambda: over or (turn(), False)[1])
    assert np.unique(pictures(tmp_path)).tolist() == [7]


def test_an_observation_may_become_larger():
    from gymnasium import spaces

    with serve_game(spaces.Text(100_000), ACTION, process=True) as game:
        seen = []

        def play():
            env = make_remote(game.url)
            env.reset()
            until(lambda: (seen.append(len(env.step(1)[0])), seen[-1] == 90_000)[1])
            env.close()

        size = [1]

        def turn():
            game.exchange("x" * size[0])
            if not game.begins:
                size[0] = min(90_000, size[0] * 3)

        with in_thread(play) as thread:
            until(lambda: (turn(), not thread.is_alive())[1], 30)
        assert seen[-1] == 90_000


@pytest.mark.slow
def test_what_cannot_be_served_is_refused_by_its_process_and_so_is_what_cannot_be_sent_there(tmp_path):
    with serve_game(OBSERVATION, ACTION) as other, pytest.raises(SettingError, match=str(other.server.port)):
        serve_game(OBSERVATION, ACTION, process=True, port=other.server.port)
    with pytest.raises(SettingError, match="takes no fps"):
        serve_game(OBSERVATION, ACTION, process=True, fps=30)
    with (
        open(tmp_path / "file", "w", encoding="utf-8") as file,
        pytest.raises(SettingError, match="cannot be sent to another process"),
    ):
        serve_game({"red": (OBSERVATION, ACTION)}, process=True, agents={"red": lambda seen: file and 0})


def test_the_server_answers_what_a_server_is_asked():
    with walking(False, process=True) as walk:
        server = walk.game.server
        env = make_remote(walk.game.url)
        env.reset()
        env.step(1)
        assert server.status()["connections"] == server.connections == 1
        assert server.port == int(walk.game.url.rpartition(":")[2])
        assert walk.game.web_url is None
        with pytest.raises(AttributeError):
            _ = server.nothing
        env.close()


@pytest.mark.parametrize(("name", "value"), [("frozen", True), ("executable", ""), ("executable", None)])
def test_a_program_that_contains_python_is_told_that_it_has_no_interpreter(monkeypatch, name, value):
    monkeypatch.setattr(sys, name, value, raising=False)
    with pytest.raises(SettingError, match=r"got an executable that contains Python .*; leave process out"):
        serve_game(OBSERVATION, ACTION, process=True)


@pytest.mark.slow
def test_a_server_starts_where_it_may_not_choose_how_it_is_scheduled(monkeypatch, tmp_path):
    """Some sandboxes refuse the call."""
    refuses = "import os\ndef refuse(*given):\n    raise PermissionError\nos.sched_setscheduler = refuse\n"
    (tmp_path / "sitecustomize.py").write_text(refuses, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with walking(False, process=True) as walk:
        env = make_remote(walk.game.url)
        env.reset()
        env.step(1)
        env.close()


@pytest.mark.skipif(os.name != "posix", reason="needs limits of a process")
@pytest.mark.slow
def test_a_program_with_many_open_files_is_served(tmp_path):
    """Their numbers are beyond those that `select` takes."""
    opens = """
import os, resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard) if hard > 0 else (4096, hard))
opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
"""
    script = tmp_path / "program.py"
    script.write_text(opens + PROGRAM, encoding="utf-8")
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as game:
        try:
            assert game.stdout.readline() == "runs\n"
            url, _ = game.stdout.readline().split()
            env = make_remote(url, timeout=20)
            env.reset(seed=1)
            env.step(1)
            env.reset(seed=2)
            env.close()
        finally:
            game.kill()

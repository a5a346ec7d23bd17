"""The thread that writes: killed servers, full disks, files that rotate, and a queue that never makes a step wait."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bridge import Recording, make_remote, make_vec_remote, serve_gym
from bridge.cli import main
from bridge.pb import bridge_pb2
from bridge.recording.reader import read_folder
from bridge.recording.replay import verify
from bridge.recording.writer import Journal
from bridge.wrappers import BlockingReset
from tests.preloaded import run
from tests.recording_tape import Tape, fill, reset_row, step_row, tape_of
from tests.support import server_process, until

SERVE = """
import sys, resource
import bridge
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
server = bridge.serve_gym("CartPole-v1", record=sys.argv[1])
print(server.url, flush=True)
server.wait(grace=0.0)
"""


def run_script(script: str, folder: Path) -> None:
    """Run a script in a process of its own, which gets a folder."""
    done = run("-W", "ignore", "-c", script, folder)
    assert done.returncode == 0, done.stderr


class Slow:
    """A source whose rows take long to be encoded, and cannot be then."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()

    stream = 9
    schema = pa.schema([])

    def encode(self, rows: list[Any]) -> list[Any]:
        self.entered.set()
        assert self.release.wait(30.0)
        raise ValueError("on purpose")

    def rewind(self) -> None:
        """Nothing was encoded."""

    def give_up(self, rows: list[Any]) -> None:
        """Nothing is lost."""


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_every_finished_episode_and_the_running_one_so_far(tmp_path):
    with server_process(SERVE, str(tmp_path)) as (process, url):
        env = make_remote(url)
        lengths = []
        for number in range(20):
            env.reset(seed=7 if number == 0 else None)
            ended, steps = False, 0
            while not ended:
                *_, terminated, truncated, _ = env.step(steps % 2)
                ended, steps = terminated or truncated, steps + 1
            lengths.append(steps)
        env.reset()
        env.step(0)
        until(lambda: list(tmp_path.glob("*.sums")) != [])
        until(lambda: [episode.length > 0 for episode in read_folder(tmp_path).episodes()][20:] == [True])
        for _ in range(3):
            env.step(0)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        env.close()
    found = read_folder(tmp_path)
    assert [episode.length for episode in found.episodes()[:20]] == lengths
    assert all(episode.end == "terminated" and not episode.incomplete for episode in found.episodes()[:20])
    last = found.episodes()[20]
    assert last.end == "running"
    assert 1 <= last.length <= 4
    for episode in found.episodes():
        assert verify(episode).ok


@pytest.mark.slow
def test_a_server_that_is_killed_at_any_moment_leaves_a_recording_that_reads(tmp_path):
    """Killed while it writes all the time: only the last record may be cut short."""
    with server_process(SERVE, str(tmp_path)) as (process, url):
        envs = BlockingReset(make_vec_remote(url, num_envs=2, timeout=10.0), timeout=10.0)
        envs.reset(seed=1)
        stopped = threading.Event()

        def step() -> None:
            try:
                while not stopped.is_set():
                    envs.step(envs.action_space.sample())
            except Exception:
                pass  # the server is gone

        thread = threading.Thread(target=step)
        thread.start()
        until(lambda: list(tmp_path.glob("*.arrow")) != [] and len(read_folder(tmp_path).episodes()) > 50, 60)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        stopped.set()
        thread.join(90)
        envs.close()
    found = read_folder(tmp_path)
    assert all(damage.torn for damage in found.damage)
    episodes = found.episodes()
    assert sum(episode.end == "running" for episode in episodes) <= 2
    assert not any(episode.incomplete for episode in episodes)
    assert verify(episodes[-1]).ok


@pytest.mark.parametrize("size", [3_000, 40_000], ids=["too small for a record", "too small for all"])
@pytest.mark.slow
def test_files_that_may_not_grow_cost_nobody_a_step(tmp_path, size):
    """Where a record does not fit into a file, it is lost; where it fits into another file, nothing is."""
    with server_process(SERVE, str(tmp_path), str(size)) as (process, url):
        env = make_remote(url)
        env.reset(seed=1)
        for step in range(3000):
            *_, terminated, truncated, _ = env.step(step % 2)
            if terminated or truncated:
                env.reset()
        env.close()
        assert process.poll() is None
        assert all(file.stat().st_size <= size for file in tmp_path.iterdir())
        if size > 3_000:
            until(lambda: sum(episode.length for episode in read_folder(tmp_path).episodes()) == 3000)
    if size > 3_000:
        found = read_folder(tmp_path)
        assert not found.damage
        assert len(list(tmp_path.glob("*.1.*.sums"))) > 1
        assert not any(stream.gaps for stream in found.streams)


def disk_of(folder: Path, monkeypatch: pytest.MonkeyPatch, *, pause: float) -> tuple[threading.Event, list[int]]:
    """Return an event by which the disk of a folder is full while it is set, and the tries to write there then."""
    monkeypatch.setattr("bridge.recording.writer._PAUSE", pause)
    real, full, attempts = os.write, threading.Event(), list[int]()

    def write(file: int, data: Any) -> int:
        if full.is_set() and os.fstat(file).st_ino in {path.stat().st_ino for path in folder.iterdir()}:
            attempts.append(file)
            raise OSError(28, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    return full, attempts


def test_a_full_disk_is_logged_once_and_tried_again_later(tmp_path, caplog, monkeypatch):
    journal = Journal(tmp_path)
    tape = tape_of(journal)
    full, attempts = disk_of(tmp_path, monkeypatch, pause=0.05)
    full.set()
    with caplog.at_level(logging.WARNING, "bridge"):
        fill(tape, 2)
        until(lambda: "No space left" in caplog.text)
        tried = len(attempts)
        until(lambda: (fill(tape, 1), len(attempts) > tried + 2)[1])
        assert "is written again" not in caplog.text
        full.clear()
        until(lambda: _written_after(tape, tmp_path))
        until(lambda: "is written again, after" in caplog.text)
    assert caplog.text.count("No space left") == 1
    tape.end()
    journal.close()
    (stream,) = read_folder(tmp_path).streams
    lost = [count for at, count in stream.gaps if at == 0]
    assert lost
    assert lost[0] >= 22
    assert stream.first == lost[0], "rows that were lost are counted once"
    assert stream.episodes()[-1].end == "terminated"


def test_a_call_that_a_full_disk_lost_leaves_a_gap(tmp_path, caplog, monkeypatch):
    """It has no number of its own: a replay would go on as if nobody had made it."""
    journal = Journal(tmp_path)
    tape = tape_of(journal)
    full, _ = disk_of(tmp_path, monkeypatch, pause=0.0)
    tape.add(reset_row(0.0))
    tape.add(step_row(1.0))
    until(lambda: journal.queued_bytes == 0)
    full.set()
    tape.note("call", bridge_pb2.CallRequest(name="set_speed"))
    until(lambda: journal.queued_bytes == 0 and "No space left" in caplog.text)
    full.clear()
    tape.add(step_row(2.0))
    tape.add(step_row(3.0))
    tape.add(reset_row(0.0))
    tape.add(step_row(4.0, terminated=True))
    tape.end()
    journal.close()
    (stream,) = read_folder(tmp_path).streams
    assert (stream.gaps, stream.calls) == ([(2, 1)], {})
    assert [(episode.end, episode.incomplete) for episode in stream.episodes()] == [
        ("lost", True),
        ("terminated", False),
    ]


def _written_after(tape: Tape, folder: Path) -> bool:
    fill(tape, 1)
    return any(file.stat().st_size > 100 for file in folder.glob("*.arrow"))


def test_of_rows_that_do_not_fit_on_the_disk_at_once_the_first_are_written(tmp_path, monkeypatch):
    """How many are written at once depends on how fast the machine is; what a disk holds does not."""
    real = os.write
    space = 20_000

    def write(file: int, data: Any) -> int:
        if os.fstat(file).st_ino not in {path.stat().st_ino for path in tmp_path.iterdir()}:
            return real(file, data)
        if sum(path.stat().st_size for path in tmp_path.iterdir()) + len(data) > space:
            raise OSError(28, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    journal = Journal(Recording(tmp_path, observations=True))
    tape = tape_of(journal)
    slow = Slow()
    assert journal.offer(slow, step_row(0.0), 0)
    until(slow.entered.is_set)
    fill(tape, 100, steps=30)  # all of them come together
    slow.release.set()
    until(lambda: journal.queued_bytes == 0)
    tape.end()
    journal.close()
    (stream,) = read_folder(tmp_path).streams
    lengths = [episode.length for episode in stream.episodes()]
    assert 3 <= len(lengths) < 100
    assert lengths[:-1] == [30] * (len(lengths) - 1)
    assert stream.first == 0


def test_a_small_file_system_that_fills_costs_nobody_a_step(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root mounts a file system")
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        with serve_gym("CartPole-v1", record=Recording(place, observations=True)) as server:
            env = make_remote(server.url)
            env.reset(seed=1)
            for step in range(6000):
                *_, terminated, truncated, _ = env.step(step % 2)
                if terminated or truncated:
                    env.reset()
            env.close()
        found = read_folder(place)
        assert not found.damage
        assert found.episodes()[0].length > 0
        assert found.streams[0].first == 0
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_files_rotate_and_the_oldest_goes_at_the_limit(tmp_path, caplog):
    journal = Journal(Recording(tmp_path, observations=True, max_bytes=200_000))
    tape = tape_of(journal)
    with caplog.at_level(logging.WARNING, "bridge"):
        for _ in range(100):
            fill(tape, 30)
            until(lambda: journal.queued == 0)
        tape.end()
        journal.close()
    files = sorted(tmp_path.glob("*.parquet"))
    assert len(files) >= 2
    assert not files[0].name.endswith(".000001.parquet"), "the oldest segment is still there"
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 200_000
    assert "reached its limit of 200000 bytes" in caplog.text
    (stream,) = read_folder(tmp_path).streams
    episodes = stream.episodes()
    assert episodes[-1].number == 3000, "episodes are counted from the first one on, also where that is deleted"
    assert [episode.number for episode in episodes] == list(range(episodes[0].number, 3001))
    assert stream.first > 0
    assert not any(episode.incomplete for episode in episodes)


def test_a_queue_that_is_full_drops_rows_counts_them_and_marks_the_episode(tmp_path, caplog):
    journal = Journal(tmp_path, queue_bytes=4_000)
    tape = tape_of(journal)
    slow = Slow()
    assert journal.offer(slow, step_row(0.0), 0)
    until(slow.entered.is_set)
    with caplog.at_level(logging.WARNING, "bridge"):
        fill(tape, 1, steps=100)
    assert caplog.text.count("lacks rows") == 1
    slow.release.set()
    until(lambda: journal.queued_bytes == 0)
    fill(tape, 1, steps=3)
    tape.end()
    journal.close()
    (stream,) = read_folder(tmp_path).streams
    first, second = stream.episodes()
    assert (first.end, first.incomplete) == ("lost", True)
    assert (second.end, second.incomplete, second.length) == ("terminated", False, 3)
    lost = sum(count for _, count in set(stream.gaps))
    assert lost + first.length + 1 + second.length + 1 == 105


def test_steps_of_a_slow_world_are_written_within_a_moment(tmp_path):
    """Each step alone: a server that is killed loses no more than the rows of a tenth of a second."""
    journal = Journal(tmp_path)
    tape = tape_of(journal)
    tape.add(reset_row(0.0))
    for step in range(5):
        tape.add(step_row(step / 60))
        until(
            lambda wanted=step + 1: journal.queued_bytes == 0 and read_folder(tmp_path).episodes()[0].length == wanted
        )
    tape.end()
    journal.close()


def test_rows_that_cannot_be_encoded_are_logged_and_counted(tmp_path, caplog):
    journal = Journal(tmp_path)
    tape = tape_of(journal)
    tape.add(reset_row(0.0, observation="no array"))
    until(lambda: "cannot be encoded" in caplog.text)
    fill(tape, 1)
    tape.end()
    journal.close()
    (stream,) = read_folder(tmp_path).streams
    assert stream.gaps[0] == (0, 1)
    assert stream.episodes()[0].end == "terminated"


def test_a_row_that_cannot_be_encoded_costs_none_of_those_that_came_with_it(tmp_path, caplog):
    journal = Journal(tmp_path)
    tape, slow = tape_of(journal), Slow()
    assert journal.offer(slow, step_row(0.0), 0)
    until(slow.entered.is_set)
    fill(tape, 2)  # all of them come together
    tape.add(reset_row(2.0, observation="no array"))
    fill(tape, 2)
    slow.release.set()
    until(lambda: journal.queued_bytes == 0)
    tape.end()
    journal.close()
    (stream,) = read_folder(tmp_path).streams
    assert stream.gaps == [(22, 1)]
    assert [episode.length for episode in stream.episodes()] == [10] * 4
    assert caplog.text.count("cannot be encoded") == 2, "that of the slow source, and this one"


@pytest.mark.slow
def test_streams_that_are_written_side_by_side_stay_whole_and_within_the_limit(tmp_path):
    journal = Journal(Recording(tmp_path, observations=True, max_bytes=60_000))
    tapes = [tape_of(journal) for _ in range(8)]
    for _ in range(40):
        for tape in tapes:
            fill(tape, 3)
        until(lambda: journal.queued_bytes == 0)
    found = read_folder(tmp_path)
    assert not found.damage
    assert found.episodes()[-1].end == "terminated"
    for tape in tapes:
        tape.end()
    journal.close()
    found = read_folder(tmp_path)
    assert not found.damage
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 60_000
    assert {file.suffix for file in tmp_path.iterdir()} == {".parquet", ".sums"}


def test_a_row_that_is_larger_than_the_limit_costs_no_other_row(tmp_path, caplog):
    journal = Journal(Recording(tmp_path, max_bytes=30_000))
    tape = tape_of(journal)
    fill(tape, 2)
    until(lambda: journal.queued_bytes == 0)
    tape.add(reset_row(2.0)._replace(options={"map": os.urandom(40_000)}))
    until(lambda: "do not fit into the limit of 30000" in caplog.text)
    tape.end()
    journal.close()
    (stream,) = read_folder(tmp_path).streams
    assert [episode.length for episode in stream.episodes()] == [10, 10]


@pytest.mark.parametrize("limit", [None, 1 << 30])
@pytest.mark.slow
def test_a_sealed_segment_takes_no_memory_of_its_own(tmp_path, limit):
    def segments() -> int:
        gc.collect()
        return sum(type(one).__name__ == "Segment" for one in gc.get_objects())

    before, journal = segments(), Journal(Recording(tmp_path, max_bytes=limit))
    for _ in range(5):
        tape = tape_of(journal)
        fill(tape, 1)
        tape.end()
    until(lambda: len(list(tmp_path.glob("*.parquet"))) == 5 and not list(tmp_path.glob("*.arrow")))
    until(lambda: segments() == before)
    journal.close()


def test_an_episode_that_lacks_calls_in_its_midst_is_lost_and_the_rest_is_listed(tmp_path, capsys):
    journal = Journal(Recording(tmp_path, observations=True))
    tape, sizes = tape_of(journal), []
    for row in (reset_row(0.0), step_row(0.1), step_row(0.2)):
        tape.add(row)
        until(lambda: journal.queued_bytes == 0)
        (path,) = tmp_path.glob("*.arrow")
        sizes.append(path.stat().st_size)
    fill(tape, 1)
    until(lambda: journal.queued_bytes == 0)
    data = bytearray(path.read_bytes())
    data[(sizes[0] + sizes[1]) // 2] ^= 1
    path.write_bytes(data)
    found = read_folder(tmp_path)
    assert "are not those that were written" in str(found.damage[0])
    assert [(episode.end, episode.incomplete) for episode in found.episodes()] == [
        ("lost", True),
        ("terminated", False),
    ]
    assert main(["runs", str(tmp_path)]) == 0
    assert "lost" in capsys.readouterr().out
    journal.close()


def test_close_writes_what_is_queued_and_may_be_called_twice(tmp_path):
    journal = Journal(tmp_path)
    tape = tape_of(journal)
    fill(tape, 50)
    tape.end()
    journal.close()
    journal.close()
    assert len(read_folder(tmp_path).episodes()) == 50
    assert not journal.offer(Slow(), step_row(0.0), 1)


@pytest.mark.slow
def test_close_ends_the_writer_at_whatever_moment(tmp_path, caplog):
    gathers = 0.1  # seconds in which the writer waits for more rows; it must not overlook the close that comes then

    def write_and_close(part: int) -> None:
        for number in range(12):
            journal = Journal(tmp_path / f"{part}-{number}")
            fill(tape_of(journal), 1)
            threading.Event().wait(gathers - 0.001 + 0.0002 * number)
            journal.close()

    threads = [threading.Thread(target=write_and_close, args=(part,)) for part in range(24)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert caplog.text == ""


def test_a_journal_that_was_never_used_leaves_no_file_and_no_thread(tmp_path):
    journal = Journal(tmp_path / "runs")
    journal.close()
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_closes_a_journal_whose_locks_were_held(tmp_path):
    """As where another thread was waking the writer at the moment of the fork."""
    script = """
import os, signal, sys, threading
from tests.recording.test_writer import Journal
made, real = [], threading.Event
threading.Event = lambda: made.append(real()) or made[-1]
journal = Journal(sys.argv[1])
threading.Event = real
for event in made:
    event._cond.acquire()
child = os.fork()
if child == 0:
    signal.alarm(10)
    journal.close()
    os._exit(0)
assert made
assert os.waitpid(child, 0)[1] == 0
os._exit(0)  # without the end of the program, which closes the journal
"""
    run_script(script, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_records_nothing_and_leaves_the_parents_file_alone(tmp_path):
    script = """
import os, sys
from tests.recording.test_writer import Journal, fill, tape_of, until
journal = Journal(sys.argv[1])
tape = tape_of(journal)
fill(tape, 3)
until(lambda: journal.queued == 0)
child = os.fork()
if child == 0:
    fill(tape, 100)
    journal.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
fill(tape, 2)
tape.end()
journal.close()
"""
    run_script(script, tmp_path)
    found = read_folder(tmp_path)
    assert not found.damage
    assert [episode.number for episode in found.streams[0].episodes()] == [1, 2, 3, 4, 5]


def test_a_segment_whose_digests_cannot_be_written_leaves_no_file(tmp_path, caplog):
    journal = Journal(Recording(tmp_path, observations=True))
    (tmp_path / f"{journal.run}.1.000001.arrow.sums").mkdir()  # as where the disk fills between the two files
    fill(tape_of(journal), 1)
    until(lambda: "cannot be written" in caplog.text)
    journal.close()
    assert not list(tmp_path.glob("*.arrow"))


@pytest.mark.parametrize("later", [True, False], ids=["for a moment", "to the end"])
def test_where_no_thread_can_be_started_nothing_is_lost(tmp_path, monkeypatch, later):
    real, none_left = threading.Thread.start, threading.Event()
    none_left.set()

    def start(thread: threading.Thread) -> None:
        if none_left.is_set():
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    journal = Journal(tmp_path)
    tape = tape_of(journal)
    fill(tape, 1)
    if later:
        none_left.clear()
        fill(tape, 1)
        until(lambda: journal.queued == 0)
    tape.end()
    journal.close()
    journal.close()
    (stream,) = read_folder(tmp_path).streams
    assert [episode.length for episode in stream.episodes()] == [10] * (1 + later)
    assert stream.closed
    assert not stream.gaps


def test_what_is_written_while_it_is_read_is_no_damage(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "written")
    tape = tape_of(journal)
    for lines in (1, 2):  # two appends
        fill(tape, 1)
        until(lambda lines=lines: [sums for sums in journal.folder.glob("*.sums") if lines_of(sums) == lines] != [])
    ours = {path.name: path.read_bytes() for path in journal.folder.iterdir()}
    tape.end()
    journal.close()
    (sums,) = (name for name in ours if name.endswith(".sums"))
    first = int(ours[sums].split()[1])
    cut = {sums: ours[sums].splitlines(keepends=True)[0], sums.removesuffix(".sums"): ours[sums[:-5]][:first]}
    folder = tmp_path / "read"
    folder.mkdir()
    for name, data in cut.items():
        (folder / name).write_bytes(data)
    real, opened = Path.open, list[str]()

    def writes_after_the_first(path: Path, *arguments: Any, **keywords: Any) -> Any:
        if opened and path.parent == folder and opened[0] != path.name:
            for name, data in ours.items():
                with real(folder / name, "wb") as file:
                    file.write(data)
        opened.append(path.name)
        return real(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", writes_after_the_first)
    found = read_folder(folder)
    assert not found.damage
    assert [episode.length for episode in found.episodes()] == [10]
    assert [episode.length for episode in read_folder(folder).episodes()] == [10, 10]


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n")

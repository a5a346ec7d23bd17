"""The script for Slurm, run by a shell with a `srun` of this test's: what it writes, and what it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest

from bridge import make_vec_remote
from bridge.wrappers import BlockingReset
from tests.places import ROOT
from tests.support import until

SCRIPT = ROOT / "deploy" / "slurm" / "envs.sbatch"
SRUN = """#!/usr/bin/env bash
# Stands for srun: runs the tasks on this machine, and hands on SIGTERM as Slurm does, to each process of the step.
# Exits with the code of the last task that failed.
while [ "${1:0:2}" = -- ]; do shift; done
pids=()
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$task setsid "$@" &
    pids+=($!)
done
trap 'for pid in "${pids[@]}"; do kill -TERM -- "-$pid"; done' TERM
code=0
for pid in "${pids[@]}"; do
    while
        wait "$pid" && status=0 || status=$?
        kill -0 "$pid" 2> /dev/null
    do :; done
    [ "$status" = 0 ] || code=$status
done
exit "$code"
"""


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder for the PATH: srun, and `gymnasium-bridge` of this interpreter."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").write_text(SRUN)
    (folder / "gymnasium-bridge").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bridge "$@"\n')
    for file in folder.iterdir():
        file.chmod(0o755)
    return folder


@contextmanager
def job(commands: Path, urls: Path, *arguments: str, tasks: int = 2) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SLURM_NTASKS": str(tasks),
        "BRIDGE_URLS": str(urls),
        "BRIDGE_HOST": "127.0.0.1",
        "BRIDGE_DRAIN_TIMEOUT": "20",
    }
    process = subprocess.Popen(["bash", SCRIPT, *arguments], env=environment, stderr=subprocess.DEVNULL)
    family = psutil.Process(process.pid)
    try:
        yield process
    finally:
        left = [*family.children(recursive=True), family] if family.is_running() else []
        for each in left:
            each.kill()
        process.wait(30)


def lines(urls: Path) -> list[str]:
    return urls.read_text().split() if urls.exists() else []


def servers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a command of the script, which has ended
            if {"-m", "serve"} <= {*child.cmdline()}:
                found.append(child)
    return found


def test_the_script_is_shell() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True, timeout=30)
    assert os.access(SCRIPT, os.X_OK)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_script_passes_shellcheck() -> None:
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_file_has_the_urls_of_all_servers_and_follows_one_that_is_started_again(
    commands: Path, tmp_path: Path
) -> None:
    urls = tmp_path / "urls.txt"
    with job(commands, urls, "CartPole-v1", "--num-envs", "2") as process:
        until(lambda: len(lines(urls)) == 2, 60.0)
        assert stat.S_IMODE(urls.stat().st_mode) == 0o600
        envs = BlockingReset(make_vec_remote(f"file://{urls}", num_envs=4, timeout=30))
        envs.reset(seed=0)
        envs.step(np.zeros(4, np.int64))
        before = lines(urls)
        victim = next(each for each in servers(process) if _port(each) == urlsplit(before[0]).port)
        victim.kill()
        until(lambda: len(lines(urls)) == 2 and before[0] not in lines(urls), 60.0)
        for _ in range(5):
            envs.step(np.zeros(4, np.int64))
        envs.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not urls.exists()
        assert not list(tmp_path.glob("urls.txt*"))


def _port(process: psutil.Process) -> int | None:
    return next((each.laddr.port for each in process.net_connections("inet") if each.status == "LISTEN"), None)


def test_the_servers_end_with_the_job(commands: Path, tmp_path: Path) -> None:
    urls = tmp_path / "urls.txt"
    with job(commands, urls, "CartPole-v1", tasks=1) as process:
        until(lambda: len(lines(urls)) == 1, 60.0)
        (server,) = servers(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not server.is_running()


def test_a_server_that_refuses_its_settings_is_not_started_again(commands: Path, tmp_path: Path) -> None:
    urls = tmp_path / "urls.txt"
    with job(commands, urls, "NoSuchEnvironment-v0", tasks=1) as process:
        assert process.wait(60) == 2
        assert not list(tmp_path.glob("urls.txt*"))

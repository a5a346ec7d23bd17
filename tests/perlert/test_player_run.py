"""`bridge.perlert.player_run`: what a client knows and measures of the run that it is in."""

import threading
import time

import numpy as np

from bridge.perlert import PerlertEnv, serve_perlert
from bridge.perlert.player_run import Stats
from tests.perlert.recorder import Recorder


def test_what_a_client_measures_is_when_a_datagram_arrived_and_not_when_the_agent_read_it(monkeypatch):
    noted, by_reading = Stats.arrival, Stats()

    def arrival(stats, timestamp, arrived):
        noted(by_reading, timestamp, time.monotonic())
        noted(stats, timestamp, arrived)

    monkeypatch.setattr(Stats, "arrival", arrival)
    with (
        serve_perlert(lambda: Recorder(60), name="count", fps=60, max_rate=60) as server,
        PerlertEnv(server.url) as env,
    ):
        env.reset()
        thinking = threading.Event()
        for _ in range(4):
            thinking.wait(0.2)
            _, _, _, _, info = env.step(np.int64(1))
        # Steps lay in the buffer for up to 200 ms each time, and were read at once.
        assert info["skipped"] > 5
        assert info["perlert"]["jitter"] < 0.8 * by_reading.jitter

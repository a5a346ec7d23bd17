"""`bridge.core.server.memory`: worlds that nobody uses, and time in which nobody could."""

import numpy as np

from bridge.core.server.memory import IdleWorlds
from bridge.testing import LocalRuntime, VirtualClock

HOUR = 3600.0


def test_time_in_which_a_server_stood_still_makes_no_world_idle() -> None:
    clock = VirtualClock()
    scheduler = LocalRuntime(clock.now).scheduler
    told: list[float] = []
    watch = IdleWorlds(told.append, 0.04, scheduler)
    watch.start()
    for seconds in [0.01] * 5 + [HOUR] + [0.01] * 5:
        clock.advance(seconds)
        scheduler.run()
    assert len(told) == 11
    assert max(np.diff(told)) <= 0.02 + 1e-9
    assert told[-1] < 60
    watch.stop()
    clock.advance(1.0)
    scheduler.run()
    assert len(told) == 11

"""`bridge.client.slots.waiting`: what a client that waits says in its log."""

import logging
from types import SimpleNamespace

from bridge import SlotState
from bridge.client.slots.waiting import WaitLog
from bridge.errors import ConnectionLostError


def test_waiting_says_every_five_seconds_for_what(caplog):
    error = ConnectionLostError("grpc://a:1", "it closed the connection\nand more")
    slot = SimpleNamespace(
        settled=False,
        title="slots 2 to 3",
        remote=SimpleNamespace(url="grpc://a:1"),
        state=SlotState.LOST,
        error=error,
    )
    fine = SimpleNamespace(settled=True)
    log = WaitLog(60.0, 100.0)
    for now in (100.1, 104.9, 105.0, 105.1, 109.9, 110.2):
        log.tell([slot, fine], now)
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for slots 2 to 3 (grpc://a:1), lost: it closed the connection, 5 s of at most 60 s",
        "waiting for slots 2 to 3 (grpc://a:1), lost: it closed the connection, 10 s of at most 60 s",
    ]
    assert caplog.records[0].levelno == logging.WARNING

"""`RemoteRecord`: how often a remote was lost, for how long, and when it is left alone."""

from bridge.core.client.slots.slot import BREAKER_LOSSES, BREAKER_REST, BREAKER_WINDOW, RemoteRecord


def test_the_breaker_leaves_alone_a_remote_that_goes_too_often() -> None:
    record = RemoteRecord()
    now = 100.0
    for count in range(1, BREAKER_LOSSES):
        assert record.lost(now, 0.1, "gone", url="a", established=True) == now + 0.1, count
        record.back(now + 1.0)
        now += 2.0
    assert record.lost(now, 0.1, "gone", url="a", established=True) == now + BREAKER_REST
    assert record.report(now + 1.0, "url", (0,), "lost").state == "resting"
    assert record.report(now + BREAKER_REST, "url", (0,), "lost").state == "lost"
    # Attempts that fail do not count: a server that is down is tried again as soon as the backoff says.
    fresh = RemoteRecord()
    for attempt in range(50):
        assert fresh.lost(now + attempt, 0.1, "nobody", url="a", established=False) == now + attempt + 0.1
    # Nor do losses that lie far apart.
    for visit in range(50):
        moment = now + visit * BREAKER_WINDOW / (BREAKER_LOSSES - 1.5)
        assert fresh.lost(moment, 0.1, "gone", url="a", established=True) == moment + 0.1


def test_the_time_away_adds_up_over_absences() -> None:
    record = RemoteRecord()
    record.lost(10.0, 0.1, "gone", url="a", established=True)
    record.lost(12.0, 0.1, "still nobody", url="a", established=False)
    assert record.report(13.0, "url", (), "lost").away == 3.0
    record.back(15.0)
    record.back(16.0)
    record.lost(20.0, 0.1, "gone again", url="a", established=True)
    report = record.report(21.5, "url", (), "connecting")
    assert (report.seconds_away, report.away, report.losses, report.returns) == (6.5, 1.5, 2, 1)
    assert report.reason == "gone again"


def test_losses_and_absences_are_those_of_the_server_that_was_lost() -> None:
    record = RemoteRecord()
    record.lost(10.0, 0.1, "gone", url="grpc://a", established=True)
    record.lost(11.0, 0.1, "nobody there", url="grpc://b", established=False)  # where it was to go
    record.back(12.0)  # at a third one
    assert record.report(13.0, "grpc://c", (0,), "running").by_server == {"grpc://a": (1, 2.0)}
    record.lost(20.0, 0.1, "gone", url="grpc://c", established=True)
    assert record.report(25.0, "grpc://c", (0,), "lost").by_server == {"grpc://a": (1, 2.0), "grpc://c": (1, 5.0)}

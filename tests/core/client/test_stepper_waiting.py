"""`bridge.core.client.slots.stepper`: what a client that waits says in its log."""

import logging
from types import SimpleNamespace

import pytest

from bridge import SlotState
from bridge.core.client.slots.stepper import gather_all
from bridge.errors import ConnectionLostError, RemoteTimeoutError
from tests.core.client.policy_fleet import EpisodeState
from tests.inside import set_client_clock


def test_waiting_says_every_five_seconds_for_what(caplog, monkeypatch):
    error = ConnectionLostError("grpc://a:1", "it closed the connection\nand more")
    late = [
        SimpleNamespace(
            link=None,
            episode=None,
            away=True,
            lost_at=90.0,
            title=title,
            remote=SimpleNamespace(url=url),
            state=SlotState.LOST,
            error=error,
        )
        for title, url in (
            ("slots 2 to 3", "grpc://a:1"),
            ("slots 4 to 5", "grpc://a:1"),
            ("slots 6 to 7", "grpc://b:1"),
        )
    ]
    clock = SimpleNamespace(now=100.0)
    set_client_clock(monkeypatch, lambda: clock.now)

    def gather(enough, deadline):
        assert deadline == 160.0
        for clock.now in (100.1, 104.9, 105.0, 105.1, 109.9, 110.2):
            assert not enough()
        return False

    pool = SimpleNamespace(members=SimpleNamespace(filling=late), gather=gather, has_errors=False, stalled=0.0)
    with pytest.raises(RemoteTimeoutError, match=r"within 60 s: slots 2 to 3 and 1 more \(.*; slots 6 to 7 \("):
        gather_all(pool, 60.0, "wait")
    assert [record.getMessage() for record in caplog.records] == [
        f"waiting {waited} s of at most 60 s for {slots} (grpc://{host}:1), lost: it closed the connection"
        for waited in (5, 10)
        for slots, host in (("slots 2 to 3 and 1 more", "a"), ("slots 6 to 7", "b"))
    ]
    assert caplog.records[0].levelno == logging.WARNING
    assert pool.stalled == pytest.approx(10.2)


def test_a_slot_whose_step_is_not_answered_is_not_said_to_run(caplog, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    set_client_clock(monkeypatch, lambda: clock.now)
    remote, state = SimpleNamespace(url="grpc://a:1"), SlotState.RUNNING
    late = member(title="slot 1", remote=remote, state=state, error=None)

    def gather(enough, deadline):
        clock.now = 105.0
        return enough()

    pool = SimpleNamespace(members=SimpleNamespace(filling=[late]), gather=gather, has_errors=False, stalled=0.0)
    with pytest.raises(RemoteTimeoutError, match=r"within 60 s: slot 1 \(grpc://a:1\), no answer yet"):
        gather_all(pool, 60.0, "wait")
    said = "waiting 5 s of at most 60 s for slot 1 (grpc://a:1), no answer yet"
    assert [record.getMessage() for record in caplog.records] == [said]


def member(**now):
    return SimpleNamespace(link=None, episode=EpisodeState.STEPPING, away=False, lost_at=None, **now)


def stalled_by(monkeypatch, filling, on_lost, *events):
    """Return the seconds that count as lost of a wait from 100 on; events are times, and what happens then."""
    clock = SimpleNamespace(now=100.0)
    set_client_clock(monkeypatch, lambda: clock.now)

    def gather(enough, deadline):
        assert not enough()
        for clock.now, happens in events:
            happens()
            done = enough()
        return done

    pool = SimpleNamespace(members=SimpleNamespace(filling=filling), gather=gather, has_errors=False, stalled=0.0)
    gather_all(pool, 60.0, on_lost)
    return pool.stalled


@pytest.mark.parametrize("on_lost", ["wait", "continue"])
def test_the_silence_before_a_loss_counts_as_stalled(monkeypatch, on_lost):
    silent, well = member(), member()

    def answers():
        well.episode = EpisodeState.ANSWERED

    def is_lost():
        silent.lost_at, silent.episode = 109.0, EpisodeState.CUT

    assert stalled_by(monkeypatch, [silent, well], on_lost, (100.5, answers), (109.0, is_lost)) == 9.0


def test_the_silence_before_a_spare_takes_over_counts_as_stalled(monkeypatch):
    filling = [member()]

    def is_replaced():
        filling[0].lost_at = 103.0
        filling[0] = member()

    def answers():
        filling[0].episode = EpisodeState.ANSWERED

    assert stalled_by(monkeypatch, filling, "wait", (103.0, is_replaced), (104.0, answers)) == 3.0


def test_an_environment_that_takes_its_time_does_not_count_as_stalled(monkeypatch):
    slow, lost = member(), member()

    def answers():
        slow.episode = EpisodeState.ANSWERED

    def is_lost():
        lost.lost_at, lost.episode = 104.5, EpisodeState.CUT

    assert stalled_by(monkeypatch, [slow, lost], "wait", (103.0, answers), (104.5, is_lost)) == 1.5

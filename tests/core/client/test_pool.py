"""`bridge.core.client.slots.pool`: the wait for answers, with remotes that say what the test tells them to."""

from __future__ import annotations

from typing import Any

import pytest

from bridge.core.client.slots.pool import Pool
from bridge.core.client.world.session_states import Event, Joined, Lost, Refused, Replied, StepAnswered
from bridge.errors import Code, ConnectionLostError, RefusedError, RemoteError, RemoteTimeoutError
from bridge.pb import dm_env_rpc_pb2 as pb

REPLY = Replied(pb.EnvironmentResponse(), None)


class FakeRemote:
    """Takes events in the place of an answer's bytes."""

    def __init__(self, pool: Pool, url: str) -> None:
        self.pool, self.url = pool, url
        self.given_up: RemoteError | None = None
        self.allowance = 0.0

    def deliver(self, event: Event | None) -> None:
        self.pool.poller.items.append((self, 1, event, 0.0))  # type: ignore[arg-type]

    def receive(self, number: int, what: Any, arrived: float) -> Any:
        return what

    def late(self, purpose: str, timeout: float) -> RemoteTimeoutError:
        return RemoteTimeoutError(self.url, f"no answer {purpose} within {timeout:g} s")

    def give_up(self, error: RemoteError) -> None:
        self.given_up = error


@pytest.fixture
def pool() -> Pool:
    return Pool(0.05)


@pytest.fixture
def remotes(pool: Pool) -> Any:
    return [FakeRemote(pool, f"grpc://host-{number}:1") for number in range(3)]


def test_wait_returns_the_event_and_skips_what_means_nothing(pool: Pool, remotes: Any) -> None:
    remotes[0].deliver(None)
    remotes[1].deliver(Joined())  # of another remote
    remotes[0].deliver(REPLY)
    assert pool.wait(remotes[0], Replied, "to a question") is REPLY


def test_wait_raises_what_the_remote_says(pool: Pool, remotes: Any) -> None:
    refused = RefusedError(remotes[0].url, "no", Code.NOT_FOUND)
    for event in (Refused(refused), Replied(pb.EnvironmentResponse(), refused)):
        remotes[0].deliver(event)
        with pytest.raises(RemoteError) as raised:
            pool.wait(remotes[0], Replied, "to a question")
        assert raised.value is event.error


def test_wait_says_what_to_do_where_the_connection_was_lost(pool: Pool, remotes: Any) -> None:
    remotes[0].deliver(Lost(ConnectionLostError(remotes[0].url, "it is gone"), True))
    with pytest.raises(ConnectionLostError, match=r"it is gone\. Call reset\(\) to connect again$"):
        pool.wait(remotes[0], Replied, "to a question")


def test_wait_gives_a_late_remote_up(pool: Pool, remotes: Any) -> None:
    with pytest.raises(RemoteTimeoutError, match=r"no answer to reset within 0\.05 s") as raised:
        pool.wait(remotes[0], Joined, "to reset")
    assert remotes[0].given_up is raised.value


def test_wait_for_all_takes_answers_in_any_order(pool: Pool, remotes: Any) -> None:
    for remote in reversed(remotes):
        remote.deliver(REPLY)
    assert pool.wait_for_all(remotes, Replied, "to a question") == dict.fromkeys(remotes, REPLY)


def test_wait_for_all_leaves_out_what_it_tolerates_and_raises_the_rest(pool: Pool, remotes: Any) -> None:
    tolerated = RefusedError(remotes[0].url, "already dead", Code.FAILED_PRECONDITION)
    other = RefusedError(remotes[1].url, "no", Code.NOT_FOUND)
    remotes[0].deliver(Refused(tolerated))
    remotes[1].deliver(REPLY)
    found = pool.wait_for_all(remotes[:2], Replied, "to reset", tolerate=Code.FAILED_PRECONDITION)
    assert list(found) == [remotes[1]]
    remotes[0].deliver(REPLY)
    remotes[1].deliver(Refused(other))
    with pytest.raises(RefusedError) as raised:
        pool.wait_for_all(remotes[:2], Replied, "to reset", tolerate=Code.FAILED_PRECONDITION)
    assert raised.value is other


def test_wait_for_all_takes_all_answers_before_it_raises_a_refusal(pool: Pool, remotes: Any) -> None:
    refusals = [RefusedError(remote.url, "no", Code.INTERNAL) for remote in remotes]
    for remote, refused in zip(remotes, refusals, strict=True):
        remote.deliver(Refused(refused))
    with pytest.raises(RefusedError) as raised:
        pool.wait_for_all(remotes, StepAnswered, "to a step")
    assert raised.value is refusals[0]
    assert not pool.poller.items


def test_wait_for_all_tells_a_refusal_also_where_others_are_late(pool: Pool, remotes: Any) -> None:
    refused = RefusedError(remotes[0].url, "no", Code.INTERNAL)
    remotes[0].deliver(Refused(refused))
    with pytest.raises(RemoteTimeoutError) as raised:
        pool.wait_for_all(remotes, StepAnswered, "to a step")
    assert raised.value.__cause__ is refused


def test_wait_for_all_does_not_wait_on_where_a_remote_was_lost(pool: Pool, remotes: Any) -> None:
    lost = ConnectionLostError(remotes[0].url, "it is gone")
    remotes[0].deliver(Lost(lost, True))
    with pytest.raises(ConnectionLostError) as raised:
        pool.wait_for_all(remotes, StepAnswered, "to a step")
    assert raised.value is lost


def test_wait_for_all_names_those_that_are_late(pool: Pool, remotes: Any) -> None:
    remotes[1].deliver(REPLY)
    with pytest.raises(RemoteTimeoutError) as raised:
        pool.wait_for_all(remotes, Replied, "to a question")
    assert remotes[0].url in str(raised.value)
    assert remotes[2].url in str(raised.value)
    assert remotes[1].url not in str(raised.value)


def test_a_copy_of_a_pool_has_its_settings_and_a_poller_of_its_own(pool: Pool) -> None:
    copied = Pool(pool.timeout)
    assert copied.timeout == 0.05
    assert copied.poller is not pool.poller

import re
from decimal import Decimal

import pytest

from bridge.perlert import player as module
from bridge.perlert.player import Player, PlayerConfig, PlayerState
from bridge.perlert.protocol.packet import Header, Message, Start, parse_client
from tests.perlert_simulation import steps_of

H = Header("city", 7)
SERVER = ("192.0.2.1", 32322)
ROLLOUT = ("192.0.2.1", 32323)
OPEN = b"city:7;agent0=open,citizen,cpu,ready"
MINE = b"city:7;agent0=close,citizen,joe,%s"


def make(**settings):
    settings = {"tag": "joe", "action": "0", "use_profile": False, **settings}
    return Player(H, SERVER, **settings)


def sent(out, target=SERVER):
    return [datagram.decode() for datagram, address in out if address == target]


def playing(**settings):
    player = make(**settings)
    player.tick(0.0)
    player.receive(OPEN, SERVER, 0.0)
    player.receive(b"city:7;registered=agent0", SERVER, 0.1)
    player.receive(MINE % b"ready", SERVER, 0.2)
    player.receive(b"city:7;start=port:32323", SERVER, 0.3)
    assert player.state is PlayerState.JOINING
    return player


def test_a_client_asks_registers_is_ready_and_acts_at_once():
    player = make()
    assert sent(player.tick(0.0)) == ["city:7;lobby"]
    assert sent(player.receive(OPEN, SERVER, 0.1)) == ["city:7;register=agent0,joe"]
    assert sent(player.receive(b"city:7;registered=agent0", SERVER, 0.2)) == ["city:7;ready=agent0,true"]
    player.receive(MINE % b"ready", SERVER, 0.3)
    player.receive(b"city:7;message=Simulation will start...", SERVER, 0.3)
    assert sent(player.receive(b"city:7;start=port:32323", SERVER, 0.4), ROLLOUT) == ["city:7;action=0"]
    assert [type(event) for event in player.events] == [Message, Start]


@pytest.mark.parametrize("until", ["slots", "registered", "confirmed", "started"])
def test_a_message_that_is_not_answered_is_sent_again(until):
    player = make()
    answers = {"slots": [], "registered": [OPEN], "confirmed": [OPEN, b"city:7;registered=agent0"]}
    answers["started"] = [*answers["confirmed"], MINE % b"ready"]
    for datagram in answers[until]:
        player.receive(datagram, SERVER, 0.0)
    word = {"slots": "lobby", "registered": "register", "confirmed": "ready=agent0,true", "started": "lobby"}[until]
    times = []
    now = 0.0
    while now < 5.0:
        times += [now for text in sent(player.tick(now)) if word in text]
        now = max(player.wake(), now + 1e-3)
    assert len(times) >= 4


def test_the_lobby_is_asked_once_a_second_while_we_wait():
    player = make()
    for datagram in OPEN, b"city:7;registered=agent0", MINE % b"ready":
        player.receive(datagram, SERVER, 0.0)
    asked, now = 0, 0.0
    while now < 10.0:
        asked += "city:7;lobby" in sent(player.tick(now))
        now = max(player.wake(), now + 1e-3)
    assert 9 <= asked <= 12


def test_a_slot_that_was_lost_is_asked_for_again():
    player = make(agent="agent0")
    for datagram in OPEN, b"city:7;registered=agent0", MINE % b"not_ready":
        player.receive(datagram, SERVER, 0.0)
    out = player.receive(OPEN, SERVER, 20.0)
    assert "city:7;register=agent0,joe" in sent(out)


def test_the_slot_that_was_lost_is_asked_for_again_before_another_that_is_open():
    player = make()
    player.receive(b"city:7;a=close,k,x,ready;b=open,k,,not_ready", SERVER, 0.0)
    player.receive(b"city:7;registered=b", SERVER, 0.1)
    assert player.state is PlayerState.WAITING
    out = player.receive(b"city:7;a=open,k,,not_ready;b=open,k,,not_ready", SERVER, 20.0)
    assert "city:7;register=b,joe" in sent(out)
    assert player.state is PlayerState.REGISTERING


def test_a_client_that_wants_no_slot_asks_for_the_lobby_alone():
    player = make(agent="")
    player.receive(OPEN, SERVER, 0.0)
    said = [text for now in range(10) for text in sent(player.tick(float(now)))]
    assert set(said) == {"city:7;lobby"}
    assert len(said) >= 9
    assert "city:7;register=agent0,joe" in sent(player.set_agent("agent0", 10.0))


def test_a_client_may_go_for_the_next_run_without_being_ready():
    player = playing()
    player.receive(step(1, done="true"), ROLLOUT, 1.0)
    assert "city:7;ready=agent0,false" in sent(player.set_ready(False, 2.0))
    assert player.state is PlayerState.WAITING
    player.receive(MINE % b"not_ready", SERVER, 2.1)
    assert not any("ready=" in text for text in sent(player.tick(3.0)))


def test_a_slot_of_somebody_else_is_not_ours_and_the_reason_is_told():
    player = make(agent="agent0")
    player.receive(OPEN, SERVER, 0.0)
    player.receive(b"city:7;agent0=close,citizen,ann,ready", SERVER, 0.1)
    assert player.state is PlayerState.ASKING
    assert player.waits_for() == "the slot 'agent0' is held by 'ann'"
    assert make(agent="agent7").waits_for() == "the lobby has not answered"
    missing = make(agent="agent7")
    missing.receive(OPEN, SERVER, 0.0)
    assert missing.waits_for() == "there is no slot 'agent7'; the slots are agent0"


def test_the_first_open_slot_is_taken_and_another_when_it_is_refused():
    player = make()
    out = player.receive(
        b"city:7;a=close,k,x,ready;b=open,k,cpu,ready;c=open,k,,not_ready;s=open,spectator,,not_ready", SERVER, 0
    )
    assert "city:7;register=c,joe" in sent(out)
    out = player.receive(b"city:7;c=close,k,x,ready", SERVER, 1)
    out += player.receive(b"city:7;b=open,k,cpu,ready", SERVER, 1)
    assert "city:7;register=b,joe" in sent(out)


def test_a_lost_start_is_told_again_because_we_ask():
    # P-16
    player = make()
    for datagram in OPEN, b"city:7;registered=agent0", MINE % b"ready":
        player.receive(datagram, SERVER, 0.0)
    assert "city:7;lobby" in sent(player.tick(1.5))
    player.receive(b"city:7;start=port:32323", SERVER, 1.6)
    assert player.state is PlayerState.JOINING


def test_the_drafts_steps_with_a_constant_number_are_taken_in_the_order_of_their_timestamps():
    player = playing()
    for stamp, observation, reward in ((1590853116323, 45, 0), (1590853121058, 47, 0), (1590853126423, 48, 1)):
        player.receive(b"city:7:%d:0;obs=%d;reward=%d;done=false" % (stamp, observation, reward), ROLLOUT, 1.0)
    player.receive(b"city:7:1590853134833:0;obs=51;reward=1;done=true", ROLLOUT, 2.0)
    assert [step.observation for step in steps_of(player)] == ["45", "47", "48", "51"]
    assert player.state is PlayerState.OVER
    assert steps_of(player)[-1].ret == 2


def step(number, reward="1", done="false", extra=""):
    return f"city:7:{1000 + number}:{number};obs={number};reward={reward};done={done}{extra}".encode()


def test_a_step_that_comes_twice_or_late_is_not_delivered_and_its_reward_counts_once():
    player = playing()
    for number in (0, 1, 3, 2, 3, 2, 4):
        player.receive(step(number), ROLLOUT, 1.0 + number)
    assert [s.step for s in steps_of(player)] == [0, 1, 3, 4]
    assert sum(s.reward for s in steps_of(player)) == 5
    assert (player.stats.duplicates, player.stats.reordered) == (2, 1)


def test_done_is_delivered_exactly_once():
    # P-18
    player = playing()
    for datagram in (step(1), step(2, done="true"), step(2, done="true"), step(1), step(2, done="true")):
        player.receive(datagram, ROLLOUT, 1.0)
    assert [s.done for s in steps_of(player)] == [False, True]
    assert player.wake() == float("inf")


TOKEN = "00112233aabb"


def offered(**settings):
    """A client of ours that has registered with its token."""
    player = make(use_profile=True, **settings)
    player.tick(0.0)
    player.receive(OPEN, SERVER, 0.0)
    player.receive(f'city:7;message=bridge/1 {{"token":"{TOKEN}"}}'.encode(), SERVER, 0.1)
    player.receive(b"city:7;registered=agent0", SERVER, 0.2)
    told = f'{{"token":"{TOKEN}","seq":1,"slot":"agent0","fps":30.0,"decimals":6}}'
    player.receive(f"city:7;message=bridge/1 {told}".encode(), SERVER, 0.2)
    return player


def in_run(**settings):
    player = offered(**settings)
    player.receive(MINE % b"ready", SERVER, 0.3)
    player.receive(b"city:7;start=port:32323", SERVER, 0.4)
    assert player.state is PlayerState.JOINING
    return player


def test_a_client_of_ours_registers_with_its_token_and_says_there_that_it_is_ready():
    player = make(use_profile=True)
    player.tick(0.0)
    assert sent(player.receive(OPEN, SERVER, 0.0)) == ["city:7;register=agent0,joe+b1"]
    out = player.receive(f'city:7;message=bridge/1 {{"token":"{TOKEN}"}}'.encode(), SERVER, 0.1)
    assert sent(out) == [f"city:7;register=agent0,joe+b1.{TOKEN}.1.w"]
    player.receive(b"city:7;registered=agent0", SERVER, 0.2)
    told = f'{{"token":"{TOKEN}","seq":1,"slot":"agent0","fps":30.0,"decimals":6}}'
    out = player.receive(f"city:7;message=bridge/1 {told}".encode(), SERVER, 0.2)
    assert sent(out) == [f"city:7;register=agent0,joe+b1.{TOKEN}.2.r"]
    assert player.use_profile
    assert player.token == TOKEN


def test_a_server_that_confirms_before_it_told_a_token_is_a_plain_one():
    player = make(use_profile=True)
    player.tick(0.0)
    player.receive(OPEN, SERVER, 0.0)
    out = player.receive(b"city:7;registered=agent0", SERVER, 0.1)
    assert not player.use_profile
    assert sent(out) == ["city:7;ready=agent0,true"]


def test_a_tag_is_a_hint_and_the_confirmation_is_the_proof():
    player = offered()
    assert player.state is PlayerState.WAITING
    # Another client of the same tag in the slot, and our registrations are no longer confirmed.
    for now in (1.0, 2.0, 3.0):
        player.receive(MINE % b"ready", SERVER, now)
        assert player.state is PlayerState.WAITING
    player.receive(MINE % b"ready", SERVER, 3.5)
    assert player.state is PlayerState.REGISTERING
    player.receive(MINE % b"ready", SERVER, 7.0)
    assert player.waits_for() == "no slot is open"


def test_returns_of_lost_steps_are_recovered_from_the_profile():
    player = in_run()
    for number, ret, sent_count in ((0, "0", 1), (1, "0.1", 2), (5, "-3.7", 6), (9, "2.25", 10)):
        extra = f";extra=token:{TOKEN},ack:3,got:3,sent:{sent_count},ret:{ret}"
        player.receive(step(number, extra=extra), ROLLOUT, 1.0)
    assert [s.reward for s in steps_of(player)] == [Decimal(r) for r in ("0", "0.1", "-3.8", "5.95")]
    assert player.stats.lost == 6


def test_actions_carry_token_run_and_number_and_the_round_trip_is_measured_to_the_arrival():
    player = in_run()
    extra = f";extra=token:{TOKEN},ack:%d,got:0,sent:%d,ret:0"
    player.receive(step(0, extra=extra % (0, 1)), ROLLOUT, 1.0)
    assert sent(player.act("5", 2.0), ROLLOUT) == [f"city:7;action={TOKEN},32323,{player.seq},5"]
    # It lay in the buffer for 30 s, because the agent thought.
    player.receive(step(1, extra=extra % (player.seq, 2)), ROLLOUT, 32.25, 2.25)
    assert player.stats.rtt_last == pytest.approx(0.25)
    first = player.seq
    player.act("6", 33.0)
    assert player.seq == first + 1


def test_numbers_go_on_from_those_of_the_client_that_had_the_address_before():
    player = make(use_profile=True)
    player.receive(OPEN, SERVER, 0.0)
    out = player.receive(f'city:7;message=bridge/1 {{"token":"{TOKEN}","seq":41}}'.encode(), SERVER, 0.1)
    assert sent(out) == [f"city:7;register=agent0,joe+b1.{TOKEN}.42.w"]
    player = in_run()
    player.receive(step(0, extra=f";extra=token:{TOKEN},ack:17,got:0,sent:1,ret:0"), ROLLOUT, 1.0)
    assert sent(player.act("5", 2.0), ROLLOUT) == [f"city:7;action={TOKEN},32323,18,5"]


def test_nobody_who_does_not_know_the_token_ends_an_episode():
    player = in_run()
    player.receive(step(0, extra=f";extra=token:{TOKEN},ack:0,got:0,sent:1,ret:0"), ROLLOUT, 1.0)
    player.receive(step(1, done="true"), ROLLOUT, 1.1)
    player.receive(step(1, done="true", extra=";extra=token:" + "f" * 12 + ",ack:0,got:0,sent:1,ret:0"), ROLLOUT, 1.2)
    assert player.state is PlayerState.PLAYING
    assert player.stats.stale == 2
    # Nor is another token taken, as long as the server is there.
    player.receive(b'city:7;message=bridge/1 {"token":"ffffffffffff"}', SERVER, 1.3)
    assert player.token == TOKEN


def test_a_server_that_began_anew_has_told_another_token():
    player = offered()
    for now in (1.0, 2.0):
        player.receive(b'city:7;message=bridge/1 {"token":"ffffffffffff"}', SERVER, now)
        assert player.token == TOKEN
    out = player.receive(b'city:7;message=bridge/1 {"token":"ffffffffffff"}', SERVER, 4.0)
    assert player.token == "ffffffffffff"
    assert any("+b1.ffffffffffff." in text for text in sent(out))


def test_a_client_that_leaves_says_so_with_its_token():
    player = in_run()
    out = sent(player.leave())
    assert len(out) == 2
    assert all(re.fullmatch(rf"city:7;register=agent0,joe\+b1\.{TOKEN}\.\d+\.l", text) for text in out)


def test_what_a_hostile_server_tells_is_bounded():
    player = make()
    player.tick(0.0)
    for number in range(3000):
        slots = ";".join(f"a{number}_{i}=open,k,x,ready" for i in range(40))
        player.receive(f"city:7;{slots}".encode(), SERVER, 0.0)
        player.receive(f"city:7;message={number}".encode(), SERVER, 0.0)
    assert len(player.slots) <= 1024
    assert len(player.events) <= 1024


def test_a_plain_servers_client_sends_plain_actions():
    player = playing(use_profile=True)
    player.receive(step(0), ROLLOUT, 1.0)
    assert sent(player.act("5,6.78", 2.0), ROLLOUT) == ["city:7;action=5,6.78"]
    assert steps_of(player)[-1].ack is None


def test_steps_of_an_older_run_or_from_elsewhere_are_dropped_and_counted():
    # P-12, P-13
    player = playing()
    player.receive(step(0), ROLLOUT, 1.0)
    player.receive(step(1, done="true"), ROLLOUT, 1.0)
    player.set_ready(True, 2.0)
    player.receive(b"city:7;start=port:32323", SERVER, 2.1)
    assert player.state is PlayerState.WAITING
    player.receive(b"city:7;start=port:40000", SERVER, 2.2)
    assert player.state is PlayerState.JOINING
    player.receive(step(7), ROLLOUT, 2.3)
    player.receive(step(7), ("192.0.2.9", 40000), 2.3)
    player.receive(step(7), ("192.0.2.1", 40001), 2.3)
    player.receive(step(7), SERVER, 2.3)
    player.receive(b"city:8:1:9;obs=1;reward=1;done=true", ("192.0.2.1", 40000), 2.3)
    player.receive(b"city:7;start=port:50000", ROLLOUT, 2.3)
    assert player.port == 40000
    assert player.stats.stale == 6
    player.receive(step(0), ("192.0.2.1", 40000), 2.4)
    assert [s.step for s in steps_of(player)] == [0, 1, 0]


def test_a_client_keeps_contact_until_it_has_seen_the_end():
    # P-11, P-18: the same source, until done=true.
    player = playing()
    player.receive(step(0), ROLLOUT, 1.0)
    said, now = 0, 1.0
    while now < 6.0:
        said += len(sent(player.tick(now), ROLLOUT))
        now = max(player.wake(), now + 1e-3)
    assert said >= 15
    player.receive(step(1, done="true"), ROLLOUT, 6.0)
    assert player.tick(100.0) == []


def test_a_run_whose_end_never_came_is_ended_when_the_lobby_knows_of_none():
    player = playing(config=PlayerConfig(silence=12.0))
    player.receive(step(3), ROLLOUT, 1.0)
    player.receive(b"city:7;start=port:32323", SERVER, 3.0)
    for now in (5.0, 12.0, 14.0):
        player.receive(MINE % b"not_ready", SERVER, now)
        assert player.state is PlayerState.PLAYING
    player.receive(MINE % b"not_ready", SERVER, 15.0)
    assert player.state is PlayerState.OVER
    last = steps_of(player)[-1]
    assert (last.done, last.truncated, last.lost) == (True, True, True)


def test_while_the_run_is_on_for_others_the_next_one_is_waited_for():
    player = playing()
    player.receive(step(1, done="true"), ROLLOUT, 1.0)
    out = player.set_ready(True, 2.0)
    assert "city:7;ready=agent0,true" in sent(out)
    player.receive(b"city:7;start=port:32323", SERVER, 2.1)
    assert player.waits_for() == "the last run still goes on for others"
    player.receive(MINE % b"ready", SERVER, 2.2)
    assert not any("ready=" in text for text in sent(player.tick(3.0)))
    out = player.receive(MINE % b"not_ready", SERVER, 4.0) + player.tick(4.5)
    assert "city:7;ready=agent0,true" in sent(out)


def test_a_client_that_leaves_is_no_longer_ready():
    player = playing()
    assert [parse_client(datagram).ready for datagram, _ in player.leave()] == [False]
    assert make().leave() == []


@pytest.mark.parametrize("datagram", [b"", b"\xff", b"city:7;", b"x" * 5000, b"city:7:1:1;obs=1;reward=nan;done=false"])
def test_a_malformed_datagram_is_counted_and_delivers_nothing(datagram):
    player = playing()
    assert player.receive(datagram, ROLLOUT, 1.0) == []
    assert player.stats.malformed == 1
    assert steps_of(player) == []


def test_every_state_and_event_of_the_table_is_used():
    assert {state for state, _ in module.TRANSITIONS} == set(PlayerState)
    assert {event for _, event in module.TRANSITIONS} == set(module.PlayerEvent)


def test_jitter_and_delay_are_measured_from_the_timestamps():
    player = playing()
    for number, arrival in enumerate((1.0, 1.1, 1.25, 1.3)):
        stamp = 5000 + number * 100
        player.receive(f"city:7:{stamp}:{number};obs=1;reward=0;done=false".encode(), ROLLOUT, arrival)
    assert player.stats.delay == pytest.approx(0.0, abs=1e-9)
    assert player.stats.jitter == pytest.approx((0.05 / 16) * (15 / 16) + 0.05 / 16, rel=1e-6)

import itertools
import random

import pytest

from bridge.errors import PacketError, SettingError
from bridge.perlert import GuardConfig
from bridge.perlert.protocol.packet import Header, parse_client, parse_server
from bridge.perlert.protocol.profile import parse_extra
from bridge.perlert.rollout import Rollout, RolloutConfig, RunMember
from tests.perlert_simulation import guard_of, result

H = Header("city", 7)
ANN, BOB, FAR = ("127.0.0.1", 1001), ("127.0.0.1", 1002), ("203.0.113.5", 4000)
TOKEN = "00112233aabb"


def decode(key, text):
    if not text.isdigit():
        raise PacketError(f"expected digits, got {text!r}")
    return int(text)


class Recorded(Rollout):
    """A rollout that keeps the newest action of each slot."""

    def __init__(self, *arguments, **settings):
        self.acted = {}
        super().__init__(*arguments, self._keep, **settings)

    def receive(self, datagram, sender, now):
        """Do what a host does first: count the bytes, and parse the datagram."""
        return self.handle(parse_client(datagram), sender, now) if self.guard.heard(sender, datagram, now) else []

    def _keep(self, key, text):
        self.acted[key] = decode(key, text)


def make(*players, now=0.0, guard=None, **config):
    run = Recorded(H, 40000, guard_of(guard), config=RolloutConfig(**config), epoch=1_000_000.0)
    for player in players or (RunMember(ANN, "agent0"),):
        run.join(player, now)
    return run


def begin(run, now=0.0):
    for address in run.players:
        run.receive(b"city:7;action=0", address, now)


def steps(out, address=ANN):
    return [parse_server(datagram) for datagram, target in out if target == address]


def frames(run, count, *, fps, start=0.0, reward=1.0, last=False):
    out = []
    for number in range(count):
        now = start + number / fps
        done = last and number == count - 1
        out += run.frame({"agent0": result(str(number), reward, terminated=done)}, now)
    return out


def test_the_last_valid_action_is_fed_until_a_new_one_comes():
    # P-27
    run = make()
    assert run.acted == {}
    run.receive(b"city:7;action=walk", ANN, 0.0)
    assert run.acted == {}
    assert run.counts["invalid action"] == 1
    run.receive(b"city:7;action=3", ANN, 0.1)
    for now in (0.2, 5.0):
        run.receive(b"city:7;action=walk", ANN, now)
        assert run.acted == {"agent0": 3}
    run.receive(b"city:7;action=4", ANN, 6.0)
    assert run.acted == {"agent0": 4}


def test_several_clients_act_in_one_simulation_each_in_its_slot():
    # P-29
    run = make(RunMember(ANN, "agent0"), RunMember(BOB, "agent1"))
    run.receive(b"city:7;action=1", ANN, 0.0)
    run.receive(b"city:7;action=2", BOB, 0.0)
    run.receive(b"city:7;action=9", FAR, 0.0)
    assert run.acted == {"agent0": 1, "agent1": 2}
    assert run.counts["not in this run"] == 1
    out = run.frame({"agent0": result("a", 1), "agent1": result("b", 2, terminated=True)}, 0.0)
    assert [(s.observation, s.reward, s.done) for s in steps(out, ANN)] == [("a", "1", False)]
    assert [(s.observation, s.reward, s.done) for s in steps(out, BOB)] == [("b", "2", True)]
    assert run.running


def test_the_same_address_with_another_port_is_nobody():
    # P-11: a client is known by its source port.
    run = make()
    run.receive(b"city:7;action=3", (ANN[0], ANN[1] + 1), 0.0)
    assert run.acted == {}


def test_steps_are_numbered_from_zero_and_stamped_in_milliseconds():
    run = make(fps=10)
    begin(run)
    found = steps(frames(run, 3, fps=10, start=0.0))
    assert [(s.step, s.timestamp) for s in found] == [(0, 1_000_000_000), (1, 1_000_000_100), (2, 1_000_000_200)]


@pytest.mark.parametrize(
    ("fps", "seconds", "least"), [(30, 4, 119), (60, 4, 118), (45, 4, 110), (200, 2, 58), (7, 4, 28)]
)
def test_thirty_steps_a_second_go_to_a_client_and_one_more_at_once(fps, seconds, least):
    # P-21
    run = make(fps=fps)
    begin(run)
    times = []
    for number in range(fps * seconds):
        now = number / fps
        times += [now] * len(run.frame({"agent0": result("1", 1.0)}, now))
    assert len(times) >= least
    for first, length in itertools.product(times, range(1, seconds)):
        assert sum(first <= time < first + length - 1e-5 for time in times) <= 30 * length + 1
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert max(gaps) <= max(2 / 30, 1 / fps) + 2 / fps


def test_rewards_of_steps_that_were_not_sent_are_in_the_next_one():
    # P-21
    run = make(fps=90)
    begin(run)
    out = frames(run, 90, fps=90, reward=0.1, last=True)
    while not steps(out)[-1].done:
        out += run.tick(1.0)
    found = steps(out)
    assert len(found) <= 30 + 2  # one at once, and the last one
    assert sum(round(float(s.reward) * 10) for s in found) == 90
    assert found[-1].done


def test_a_step_that_the_byte_budget_held_back_is_rewarded_later():
    run = make(RunMember(FAR, "agent0"), fps=10)
    assert run.frame({"agent0": result("1", 5.0)}, 0.0) == []
    run.receive(b"city:7;action=1", FAR, 0.05)
    (step,) = steps(run.frame({"agent0": result("2", 2.0)}, 0.1), FAR)
    assert step.reward == "7"


def test_the_running_return_is_rounded_and_never_drifts():
    # P-22
    run = make(fps=10)
    begin(run)
    out = frames(run, 300, fps=10, reward=1 / 3)
    found = steps(out)
    assert all(len(s.reward) <= 8 for s in found)
    assert abs(sum(float(s.reward) for s in found) - 100) < 1e-6


def test_the_last_step_is_repeated_to_a_client_that_says_something_for_ten_seconds():
    # P-17, P-18
    run = make(fps=10, resends=())
    begin(run)
    (last,) = [datagram for datagram, _ in frames(run, 2, fps=10, last=True)][-1:]
    assert not run.running
    for after in (0.5, 5.0, 10.0):
        assert run.receive(b"city:7;action=1", ANN, 0.1 + after) == [(last, ANN)]
        assert run.receive(b"city:7;lobby", ANN, 0.1 + after + 0.05)[:1] in ([], [(last, ANN)])
    assert not run.is_closed(10.0)
    assert run.is_closed(10.2)
    assert run.receive(b"city:7;action=1", ANN, 10.3) == []


def test_the_end_is_told_again_unasked_three_times():
    # P-17
    run = make(fps=10)
    begin(run)
    (last,) = [datagram for datagram, _ in frames(run, 2, fps=10, last=True)][-1:]
    again = []
    for tenth in range(2, 102):
        assert not run.is_closed(tenth / 10 - 0.05)
        again += [(tenth, datagram) for datagram, _ in run.tick(tenth / 10 + 1e-6)]
    assert again == [(11, last), (31, last), (71, last)]
    assert run.is_closed(10.1 + 1e-6)


def test_the_port_stays_open_for_each_client_from_its_own_end():
    # P-17
    run = make(RunMember(ANN, "agent0"), RunMember(BOB, "agent1"), fps=10, resends=())
    begin(run)
    run.frame({"agent0": result("1", 0, terminated=True), "agent1": result("1", 0)}, 0.0)
    now = 0.0
    for number in range(1, 60):
        now = number / 10
        run.frame({"agent1": result("1", 0, truncated=number == 59)}, now)
    run.tick(12.0)
    assert not run.running
    assert run.receive(b"city:7;lobby", ANN, 12.0) == []
    assert len(run.receive(b"city:7;lobby", BOB, 12.0)) == 1
    assert not run.is_closed(now + 9.9)
    assert run.is_closed(now + 10.0)


def test_frames_that_come_early_and_late_are_all_sent():
    # P-21: the rate of the frames is the highest one, and no step is left out for a frame's worth of lateness.
    run, chance = make(fps=30), random.Random(1)
    begin(run)
    sent = 0
    for number in range(3000):
        now = number / 30 + chance.uniform(0, 0.03)
        sent += len(run.frame({"agent0": result("1", 1.0)}, now))
    assert sent == 3000


def test_frames_that_are_caught_up_on_are_not_all_sent():
    # P-21
    run = make(fps=30)
    begin(run)
    frames(run, 30, fps=30)
    stalled = sum(len(run.frame({"agent0": result("1", 1.0)}, 1.4)) for _ in range(12))
    assert stalled == 2
    assert run.counts["not sent, rate"] == 10


def test_the_end_is_sent_at_once_whatever_the_rate():
    run = make(fps=200, max_rate=10)
    begin(run)
    found = steps(frames(run, 10, fps=200, last=True))
    assert [step.done for step in found] == [False, False, True]
    assert sum(float(step.reward) for step in found) == 10


def test_only_newer_actions_with_the_right_token_are_applied():
    run = make(RunMember(ANN, "agent0", token=TOKEN))
    for seq, value in ((3, 30), (2, 20), (3, 31), (5, 50), (4, 40)):
        run.receive(f"city:7;action={TOKEN},40000,{seq},{value}".encode(), ANN, 0.0)
    assert run.acted == {"agent0": 50}
    assert run.counts["stale action"] == 3
    # Injected without the token, or replayed from another run's token:
    for text in ("7", "ffffffffffff,40000,9,7", f"{TOKEN},40000,x,7", f"{TOKEN},9", f"{TOKEN},9,7"):
        run.receive(f"city:7;action={text}".encode(), ANN, 0.0)
    assert run.acted == {"agent0": 50}
    assert run.counts["action without token"] == 5


def test_an_invalid_action_is_not_acknowledged_and_the_last_one_stays():
    # P-27
    run = make(RunMember(ANN, "agent0", token=TOKEN))
    run.receive(f"city:7;action={TOKEN},40000,1,5".encode(), ANN, 0.0)
    run.receive(f"city:7;action={TOKEN},40000,2,walk".encode(), ANN, 0.0)
    assert run.acted == {"agent0": 5}
    (step,) = steps(run.frame({"agent0": result("1", 0)}, 0.0))
    extra = parse_extra(step.extra)
    assert (extra.ack, extra.got, extra.sent) == (1, 2, 1)


def test_a_plain_client_gets_no_extra_and_a_client_of_ours_its_token_with_the_counts():
    # P-25
    run = make(RunMember(ANN, "agent0"), RunMember(BOB, "agent0", token=TOKEN))
    run.receive(b"city:7;action=0", ANN, 0.0)
    run.receive(f"city:7;action={TOKEN},40000,1,walk".encode(), BOB, 0.0)
    out = run.frame({"agent0": result("1", 2.5)}, 0.0)
    assert steps(out, ANN)[0].extra is None
    assert steps(out, BOB)[0].extra == f"token:{TOKEN},ack:0,got:1,sent:1,ret:2.5"
    run.receive(f"city:7;action={TOKEN},40000,1,5".encode(), BOB, 0.0)
    out = run.frame({"agent0": result("1", 0.25, truncated=True)}, 1.0)
    assert steps(out, BOB)[0].extra == f"token:{TOKEN},ack:1,got:2,sent:2,ret:2.75,end:truncated"


def test_an_action_of_another_run_is_not_applied():
    run = make(RunMember(ANN, "agent0", token=TOKEN, seq=7))
    run.receive(f"city:7;action={TOKEN},39999,8,5".encode(), ANN, 0.0)
    assert run.counts["action of another run"] == 1
    run.receive(f"city:7;action={TOKEN},40000,7,5".encode(), ANN, 0.0)
    assert run.counts["stale action"] == 1
    assert run.acted == {}
    run.receive(f"city:7;action={TOKEN},40000,8,5".encode(), ANN, 0.0)
    assert run.acted == {"agent0": 5}


def test_a_contact_without_the_token_is_none():
    run = make(RunMember(ANN, "agent0", token=TOKEN), abandoned=60.0)
    for datagram in (b"city:7;lobby", b"city:7;action=5", b"city:7;action=" + b"0" * 12 + b",40000,9,5"):
        run.receive(datagram, ANN, 30.0)
    player = run.players[ANN]
    assert (player.here, player.heard) == (False, 0.0)


def test_a_client_that_leaves_ends_no_other_ones_run_and_its_slot_is_the_servers():
    run = make(RunMember(ANN, "agent0"), RunMember(BOB, "agent1"))
    begin(run)
    run.move(BOB, None)
    assert {player.key for player in run.players.values()} == {"agent0"}
    assert run.running
    run.move(ANN, None)
    assert not run.running
    assert run.is_closed(0.0)


def test_a_spectators_actions_are_ignored_and_it_sees_the_steps():
    run = make(RunMember(ANN, "agent0"), RunMember(BOB, "agent0", watching=True))
    run.receive(b"city:7;action=1", ANN, 0.0)
    run.receive(b"city:7;action=2", BOB, 0.0)
    assert run.acted == {"agent0": 1}
    assert steps(run.frame({"agent0": result("1", 1)}, 0.0), BOB)[0].reward == "1"


def test_who_joins_late_is_not_rewarded_for_what_was_before():
    run = make(RunMember(ANN, "agent0"), fps=10)
    begin(run)
    frames(run, 3, fps=10, reward=1.0)
    run.join(RunMember(BOB, "agent0", watching=True), 0.25)
    assert steps(run.frame({"agent0": result("1", 5)}, 0.3), BOB)[0].reward == "5"


def test_who_watches_an_agent_whose_episode_is_over_is_told_so_while_the_run_goes_on():
    run = make(RunMember(ANN, "agent0"), RunMember(BOB, "agent1"), fps=10)
    begin(run)
    run.frame({"agent0": result("7", 1, terminated=True), "agent1": result("1", 0)}, 0.0)
    run.join(RunMember(FAR, "agent0", watching=True), 0.1)
    run.guard.prove(FAR)
    (step,) = steps(run.frame({"agent1": result("2", 0)}, 0.2), FAR)
    assert (step.observation, step.reward, step.done) == ("7", "0", True)
    assert run.running


def test_an_end_that_is_declared_is_a_step_of_its_own():
    run = make(fps=10)
    begin(run)
    (step,) = steps(run.frame({"agent0": result("1", 2)}, 0.0))
    run.end(0.0)
    (end,) = steps(run.tick(1.0))
    assert (end.step, end.reward, end.done, end.observation) == (step.step + 1, "0", True, "1")


def test_a_run_that_everybody_left_is_ended():
    run = make(fps=10, abandoned=60.0)
    begin(run)
    run.frame({"agent0": result("1", 0)}, 0.0)
    run.tick(59.9)
    assert run.running
    out = run.tick(60.0)
    assert steps(out)[0].done
    assert not run.running


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e21])
def test_a_reward_that_cannot_be_sent_is_an_error_of_the_environment(reward):
    # P-5
    run = make()
    begin(run)
    with pytest.raises(ValueError, match="below 1e20"):
        run.frame({"agent0": result("1", reward)}, 0.0)
    assert run.step == -1


def test_a_message_of_another_instance_is_counted_and_does_nothing():
    run = make()
    assert run.receive(b"city:8;action=1", ANN, 0.0) == []
    assert run.acted == {}
    assert run.counts["other instance"] == 1


def test_a_spoofed_player_is_sent_a_kilobyte_a_second_as_long_as_it_says_something():
    run = make(RunMember(FAR, "agent0"), fps=30, abandoned=60)
    run.guard.heard(FAR, b"x" * 90, 0.0)  # what it said in the lobby
    out = frames(run, 1000, fps=30, last=True)
    now = 34.0
    while not run.is_closed(now):
        now += 0.1
        out += run.tick(now)
    assert sum(len(datagram) for datagram, _ in out) <= 1000 * 6


def test_a_plain_client_that_plays_far_away_is_sent_most_of_its_steps():
    run = make(RunMember(FAR, "agent0"), fps=30)
    run.guard.heard(FAR, b"city:7;register=agent0,x", 0.0)
    out = []
    for number in range(300):
        run.receive(b"city:7;action=1", FAR, number / 30)
        out += run.frame({"agent0": result("0.12345,6.78901,-0.1234,5.678901", 1.0)}, number / 30 + 0.01)
    assert len(out) > 120
    assert sum(float(step.reward) for step in steps(out, FAR)) > 290


def test_a_storm_of_contacts_after_the_end_is_answered_at_the_step_rate():
    # P-18, P-21
    run = make(guard=GuardConfig(datagrams_per_second=1e6), resends=())
    begin(run)
    frames(run, 1, fps=30, last=True)
    answers = sum(len(run.receive(b"city:7;lobby", ANN, 2.0 + i / 1000)) for i in range(1000))
    assert 1 <= answers <= 31


@pytest.mark.parametrize(
    "config", [{"fps": 0}, {"fps": float("inf")}, {"max_rate": 0}, {"linger": -1}, {"decimals": -1}]
)
def test_a_configuration_that_cannot_be_is_refused(config):
    with pytest.raises(SettingError):
        RolloutConfig(**config)

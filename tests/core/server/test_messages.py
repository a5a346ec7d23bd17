"""Messages of other packages that a session answers: beside environments, in lanes and in processes of their own."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import bridge
from bridge import (
    Auth,
    Listener,
    MessageForm,
    MessageHandler,
    MessagePart,
    Observer,
    Property,
    SessionMessage,
    make_remote,
    make_vec_remote,
    serve_gym,
)
from bridge.cli import main
from bridge.core.encoding.properties import NUMBER
from bridge.core.encoding.tensors import unpack_tensor
from bridge.errors import EnvironmentFailedError, RefusedError, SettingError
from bridge.testing import Inspector
from tests.places import ROOT
from tests.support import assert_identical, check_types, server_process

DEADLINE = 60.0
STATE = [0.1, -0.2, 0.03, 0.4]


def form(name: str, **more: Any) -> MessageForm:
    return MessageForm(
        name, f"type.googleapis.com/tests.{name}.Request", f"type.googleapis.com/tests.{name}.Response", **more
    )


class Echo(MessagePart):
    """Says what it stands beside, and fails as it is told."""

    def answer(self, request: bytes) -> bytes:
        if request == b"raise":
            raise KeyError("a fault of the part")
        if request == b"exit":
            raise SystemExit(3)
        if request == b"refuse":
            raise bridge.errors.RequestError(bridge.errors.Code.NOT_FOUND, "nothing of this name")
        if request == b"nothing":
            return None  # type: ignore[return-value]
        return f"{len(self.stage.envs)} {request.decode()}".encode()


ECHO = SessionMessage(form("echo", max_bytes=100), part=Echo)


def page_blocks() -> dict[str, str]:
    """The files that docs/plugins.md shows, by name and section."""
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8").partition("\n## A message\n")[2]
    page = page.partition("\n## ")[0]
    return dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL))


@pytest.fixture
def teleport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the page's example, laid out as pip installs it."""
    blocks = page_blocks()
    (tmp_path / "bridge_teleport.py").write_text(blocks["bridge_teleport.py"], encoding="utf-8")
    info = tmp_path / "bridge_teleport-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bridge-teleport\nVersion: 1.0\n", encoding="utf-8")
    entry = re.search(r"^teleport = .*$", blocks["pyproject.toml"], re.MULTILINE)
    assert entry is not None
    line = entry.group().replace('"', "")
    (info / "entry_points.txt").write_text(f"[gymnasium_bridge.messages]\n{line}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    import importlib

    yield importlib.import_module("bridge_teleport")
    sys.modules.pop("bridge_teleport", None)


def local_from(state: Any, actions: list[int]) -> list[Any]:
    """What CartPole gives from a state on."""
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=0)
    env.unwrapped.state = np.array(state)  # type: ignore[attr-defined]
    found = [env.step(action) for action in actions]
    env.close()
    return found


@pytest.mark.parametrize("isolation", [None, "process"], ids=["here", "isolated"])
def test_the_example_of_the_page_moves_a_single_environment_also_one_that_has_ended(
    teleport: Any, isolation: Any
) -> None:
    options = {"teleport": {"limit": 0.5}}
    with (
        serve_gym("CartPole-v1", messages=["teleport"], message_options=options, isolation=isolation) as server,
        closing(make_remote(server.url)) as env,
    ):
        env.reset(seed=0)
        write = b'{"state": [0.1, -0.2, 0.03, 0.4], "lanes": [0]}'
        reply = env.send_message(teleport.FORM, write)
        observation, info = reply.began
        assert_identical(observation, np.array(STATE, np.float32))
        assert info == {"teleported": True}
        for action, theirs in zip([0, 1, 1], local_from(STATE, [0, 1, 1]), strict=True):
            assert_identical(env.step(action), theirs)
        ended = False
        while not ended:
            _, _, ended, _, _ = env.step(0)
        with pytest.raises(RefusedError, match="no episode runs"):
            env.send_message(teleport.FORM, write)
        # An episode that has ended is no episode to go on from, so the next one is moved.
        env.reset(seed=0)
        env.send_message(teleport.FORM, b'{"state": [9, 0, 0, 0], "lanes": [0]}')
        assert env.step(0)[0][0] == np.float32(0.5), "the operator's limit"


@pytest.mark.parametrize("isolation", [None, "process"], ids=["here", "isolated"])
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "slots"])
@pytest.mark.parametrize("lanes", [True, False], ids=["lanes", "worlds"])
def test_the_example_moves_some_slots_and_the_others_go_on(
    teleport: Any, isolation: Any, blocking: bool, lanes: bool
) -> None:
    options = {"teleport": {"limit": 0.5}}
    with serve_gym("CartPole-v1", messages=["teleport"], message_options=options, isolation=isolation) as server:
        twin = gymnasium.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync")
        with closing(make_vec_remote(server.url, num_envs=4, blocking=blocking, lanes=lanes)) as envs, closing(twin):
            first, _ = envs.reset(seed=3)
            theirs, _ = twin.reset(seed=3)
            now, ended = first, False
            while any(each is None for each in now) or ended:  # slots that are ready early may have ended again
                now, _, terminated, truncated, _ = envs.step([0] * 4)
                ended = bool(np.any(terminated) or np.any(truncated))
            if blocking:
                assert_identical(first, theirs)
                envs.step(np.array([0, 1, 0, 1]))
                twin.step(np.array([0, 1, 0, 1]))
            observations, infos = teleport.teleport(envs, STATE, slots=[1, 3])
            for slot in (1, 3):
                assert_identical(np.asarray(observations[slot]), np.array(STATE, np.float32))
            assert infos["_teleported"].tolist() == [False, True, False, True]
            observations, rewards, *_ = envs.step(np.array([1, 0, 1, 0]))
            (moved, *_), *_ = local_from(STATE, [0])
            assert_identical(np.asarray(observations[1]), moved)
            assert_identical(np.asarray(observations[3]), moved)
            assert np.asarray(rewards)[[1, 3]].tolist() == [1.0, 1.0]
            if blocking:
                theirs = twin.step(np.array([1, 0, 1, 0]))[0]
                assert_identical(observations[[0, 2]], theirs[[0, 2]])


def test_all_lanes_of_a_world_are_asked_by_one_request() -> None:
    seen: list[bytes] = []

    class Count(MessageHandler):
        async def answer(self, request: bytes, asked: bridge.AskedMessage) -> bytes:
            seen.append(request)
            return await asked.run(request)

    counted = SessionMessage(form("echo"), part=Echo, handler=Count)
    with (
        serve_gym("CartPole-v1", messages=[counted]) as server,
        closing(make_vec_remote(server.url, num_envs=64, blocking=True)) as envs,
    ):
        envs.reset(seed=0)
        reply = envs.send_message(counted.form, lambda target: f"{len(target.lanes)}".encode(), range(64))
        assert [answer.data for answer in reply.answers] == [b"64 64"]
        assert seen == [b"64"]
        assert reply.began is None


def test_two_servers_get_a_request_each_and_answers_stand_in_the_order_of_the_slots() -> None:
    with (
        serve_gym("CartPole-v1", messages=[ECHO]) as one,
        serve_gym("CartPole-v1", messages=[ECHO]) as other,
        closing(make_vec_remote([one.url, other.url], blocking=True)) as envs,
    ):
        envs.reset(seed=0)
        reply = envs.send_message(ECHO.form, lambda target: str(target.slots[0]).encode())
        assert [(answer.target.slots, answer.data) for answer in reply.answers] == [((0,), b"1 0"), ((1,), b"1 1")]
        assert [answer.target.url for answer in reply.answers] == [one.url, other.url]


@pytest.mark.parametrize("isolation", [None, "process"], ids=["here", "isolated"])
@pytest.mark.parametrize(
    ("request_", "error", "told"),
    [
        (b"raise", EnvironmentFailedError, "the message 'echo' raised KeyError: 'a fault of the part'"),
        (b"exit", EnvironmentFailedError, "the message 'echo' raised SystemExit: 3"),
        (b"nothing", EnvironmentFailedError, "expected bytes as the answer, got None of type NoneType"),
        (b"refuse", RefusedError, "NOT_FOUND: nothing of this name"),
    ],
)
def test_what_a_part_raises_is_told_and_ends_nobodys_episode(
    isolation: Any, request_: bytes, error: type[Exception], told: str
) -> None:
    twin = gymnasium.make("CartPole-v1")
    twin.reset(seed=5)
    with (
        serve_gym("CartPole-v1", messages=[ECHO], isolation=isolation) as server,
        closing(make_remote(server.url)) as env,
    ):
        env.reset(seed=5)
        for _ in range(2):
            with pytest.raises(error, match=re.escape(told)):
                env.send_message(ECHO.form, request_)
            assert_identical(env.step(1), twin.step(1))
        assert env.send_message(ECHO.form, b"hello").answers[0].data == b"1 hello"
    twin.close()


def test_what_a_handler_raises_is_told_and_ends_nobodys_episode() -> None:
    class Faulty(MessageHandler):
        async def answer(self, request: bytes, asked: bridge.AskedMessage) -> bytes:
            raise ValueError(f"no {request.decode()} for {asked.world!r}")

        def left(self, client: object) -> None:
            raise OSError("here too")

    faulty = SessionMessage(form("faulty"), handler=Faulty)
    with serve_gym("CartPole-v1", messages=[faulty]) as server:
        with closing(make_remote(server.url)) as env:
            env.reset(seed=5)
            with pytest.raises(
                EnvironmentFailedError, match="handler of the message 'faulty' raised ValueError: no tea"
            ):
                env.send_message(faulty.form, b"tea")
            env.step(0)
        with closing(make_remote(server.url)) as env:
            env.reset(seed=5)


def count_of(keys: list[str]) -> list[Property]:
    return [Property(key, "number", "how often", lambda: 7) for key in keys]


def raise_at_once() -> Any:
    raise ZeroDivisionError("at once")


@pytest.mark.parametrize(
    ("properties", "told"),
    [
        (raise_at_once, "ZeroDivisionError('at once')"),
        (lambda: [7], "expected bridge.Property objects"),
        (lambda: [Property("server.messages.bad.count", "integer", "of another kind")], "a kind text, number or enc"),
        (
            lambda: count_of(["server.messages.bad.one", "server.url"]),
            "begins with 'server.messages.bad.', got 'server",
        ),
        (lambda: count_of(["server.messages.badly.count"]), "begins with 'server.messages.bad.'"),
        (lambda: None, "'NoneType' object is not iterable"),
    ],
    ids=["raises", "no property", "kind", "of the server", "of another message", "none"],
)
def test_a_handler_with_bad_properties_loses_them_and_all_others_join(
    properties: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Bad(MessageHandler):
        def properties(self) -> Any:
            return properties()

    bad = SessionMessage(form("bad"), part=Echo, handler=Bad)
    with serve_gym("CartPole-v1", messages=[bad, ECHO]) as server:
        for _ in range(3):
            with closing(make_remote(server.url)) as env:
                env.reset(seed=1)
                assert env.send_message(bad.form, b"tea").answers[0].data == b"1 tea"
                assert env.send_message(ECHO.form, b"tea").answers[0].data == b"1 tea"
                env.step(0)
        with Inspector(server.url, DEADLINE) as inspector:
            names = [item.spec.name for item in inspector.list_properties()]
            assert unpack_tensor(inspector.read_property("server.version")) == bridge.__version__
    assert "server.messages" in names
    assert not [name for name in names if name.startswith("server.messages.bad")]
    told_lines = [record.getMessage() for record in caplog.records if "raised in properties" in record.getMessage()]
    assert len(told_lines) == 1, "once, and not for each client"
    assert "the message 'bad'" in told_lines[0]
    assert told in told_lines[0]


def test_a_property_that_raises_when_it_is_read_is_told_by_its_name_and_the_others_are_read() -> None:
    class Counts(MessageHandler):
        def properties(self) -> list[Property]:
            raising = Property("server.messages.count.bad", "number", "raises", raise_at_once)
            return [raising, *count_of(["server.messages.count.good"])]

    counts = SessionMessage(form("count"), handler=Counts)
    with serve_gym("CartPole-v1", messages=[counts]) as server, Inspector(server.url, DEADLINE) as inspector:
        with pytest.raises(
            RefusedError, match=r"the property 'server\.messages\.count\.bad' of the message 'count' raised ZeroDivis"
        ):
            inspector.read_property("server.messages.count.bad")
        assert unpack_tensor(inspector.read_property("server.messages.count.good")) == 7


@pytest.mark.parametrize("kind", ["sleeps", "waits for asyncio", "no coroutine", "cancelled"])
def test_a_handler_that_is_written_for_asyncio_is_told_so_and_the_connection_goes_on(kind: str) -> None:
    class Foreign(MessageHandler):
        async def answer(self, request: bytes, asked: bridge.AskedMessage) -> bytes:
            if kind == "sleeps":
                await asyncio.sleep(0)
            if kind == "cancelled":
                raise asyncio.CancelledError
            loop = asyncio.new_event_loop()
            try:
                await loop.create_future()
            finally:
                loop.close()
            return b""

    class Plain(MessageHandler):
        def answer(self, request: bytes, asked: bridge.AskedMessage) -> Any:
            return b"at once"

    told = {"no coroutine": "expected answer to be a coroutine function", "cancelled": "raised CancelledError"}
    message = SessionMessage(form("foreign"), handler=Plain if kind == "no coroutine" else Foreign)
    with serve_gym("CartPole-v1", messages=[message, ECHO]) as server, closing(make_remote(server.url)) as env:
        env.reset(seed=1)
        expected = told.get(kind, r"TypeError: expected that asked\.run\(…\) is awaited")
        with pytest.raises(EnvironmentFailedError, match=f"the handler of the message 'foreign'(?s:.*){expected}"):
            env.send_message(message.form, b"")
        env.step(0)
        assert env.send_message(ECHO.form, b"tea").answers[0].data == b"1 tea"


def test_a_handler_that_fails_for_each_client_that_leaves_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(MessageHandler):
        def left(self, client: object) -> None:
            raise OSError("in left")

    faulty = SessionMessage(form("faulty"), part=Echo, handler=Faulty)
    with serve_gym("CartPole-v1", messages=[faulty]) as server:
        for _ in range(3):
            with closing(make_remote(server.url)) as env:
                env.reset(seed=1)
                env.send_message(faulty.form, b"tea")
    lines = [record.getMessage() for record in caplog.records if "raised in left" in record.getMessage()]
    assert lines == ["the message 'faulty': its handler raised in left: OSError('in left')"]


class Busy(MessagePart):
    """Uses processor time, of which none is free."""

    def answer(self, request: bytes) -> bytes:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return b""


def test_a_message_that_takes_long_is_charged_only_where_another_client_waits() -> None:
    busy = SessionMessage(form("busy"), part=Busy, free_seconds=0.0)
    with serve_gym("CartPole-v1", messages=[busy]) as server, closing(make_remote(server.url)) as env:
        env.reset(seed=0)
        before = server.status()["charged_client"]
        for _ in range(10):
            env.send_message(busy.form, b"")
        # A reset is charged once it has been answered. Ten messages took 0.2 s.
        before_others = server.status()["charged_client"]
        assert before_others - before < 0.02, "alone, a client may use all of the server's time"
        over = threading.Event()

        def play() -> None:
            with closing(make_remote(server.url)) as other:
                while not over.is_set():
                    other.reset(seed=0)
                    other.step(0)

        thread = threading.Thread(target=play)
        thread.start()
        try:
            deadline = time.monotonic() + DEADLINE
            while server.status()["charged_client"] - before_others < 0.01:
                assert time.monotonic() < deadline, "others waited, and nobody was charged"
                env.send_message(busy.form, b"")
        finally:
            over.set()
            thread.join(DEADLINE)


def test_a_message_is_not_charged_for_clients_that_rest_or_only_watch() -> None:
    busy = SessionMessage(form("busy"), part=Busy, free_seconds=0.0)
    with (
        serve_gym("CartPole-v1", messages=[busy], token="play", auth=Auth(watch_token="watch")) as server,
        closing(make_remote(f"{server.url}?world=", token="play")) as env,
        closing(make_remote(server.url, token="play")) as other,
        closing(make_remote(f"{server.url}?world=", token="watch", role="spectator")) as watcher,
    ):

        def charged() -> bool:
            before = server.status()["charged_client"]
            env.send_message(busy.form, b"")
            return server.status()["charged_client"] - before > 0.01  # it takes 0.02 s

        env.reset(seed=0)
        other.reset(seed=0)
        assert charged(), "the other one has stepped just now"
        assert not charged(), "it has not since"
        watcher.reset()
        assert not charged()
        other.step(0)
        assert charged()
        assert not charged()


def test_a_message_too_large_or_unknown_is_refused_at_both_ends() -> None:
    with serve_gym("CartPole-v1", messages=[ECHO]) as server, closing(make_remote(server.url)) as env:
        env.reset(seed=0)
        with pytest.raises(SettingError, match="expected a message 'echo' of at most 100 bytes, got 101"):
            env.send_message(ECHO.form, b"x" * 101)
        larger = form("echo", max_bytes=1000)
        with pytest.raises(RefusedError, match="'echo' of 101 bytes came; it takes max_bytes=100") as refused:
            env.send_message(larger, b"x" * 101)
        assert refused.value.code == bridge.errors.Code.RESOURCE_EXHAUSTED
        told = r"unknown extension .*tests\.other\.Request.*tests\.echo\.Request"
        with pytest.raises(RefusedError, match=told) as refused:
            env.send_message(form("other"), b"")
        assert refused.value.code == bridge.errors.Code.UNIMPLEMENTED
        env.step(0)


def test_who_watches_and_who_shares_a_world_is_refused() -> None:
    with (
        serve_gym("CartPole-v1", messages=[ECHO], token="play", auth=Auth(watch_token="watch")) as server,
        closing(make_remote(f"{server.url}?world=", token="play")) as env,
    ):
        env.reset(seed=0)
        assert env.send_message(ECHO.form, b"").answers
        for token in ("watch", "play"):
            with closing(make_remote(f"{server.url}?world=", token=token, role="spectator")) as watcher:
                with pytest.raises(RefusedError) as refused:
                    watcher.send_message(ECHO.form, b"")
                assert refused.value.code == bridge.errors.Code.PERMISSION_DENIED
        env.step(0)


@pytest.mark.parametrize("kind", ["realtime", "async"])
def test_a_world_that_cannot_follow_refuses_in_words(kind: str) -> None:
    class Place(MessagePart):
        def answer(self, request: bytes) -> bytes:
            self.stage.place(0, None, {})
            return b""

    place = SessionMessage(form("place", places=True), part=Place)
    given: dict[str, Any] = {"fps": 100.0} if kind == "realtime" else {"num_envs": 2, "vectorization_mode": "async"}
    told = r"cannot be put into another situation|needs a lock-step world with one client"
    with (
        serve_gym("CartPole-v1", messages=[place], **given) as server,
        closing(make_vec_remote(server.url)) as envs,
    ):
        envs.reset(seed=0)
        with pytest.raises(RefusedError, match=told) as refused:
            envs.send_message(place.form, b"")
        assert refused.value.code == bridge.errors.Code.UNIMPLEMENTED


def test_a_property_says_which_messages_there_are_and_a_handler_adds_others() -> None:
    class Counts(MessageHandler):
        count = 0

        async def answer(self, request: bytes, asked: bridge.AskedMessage) -> bytes:
            self.count += 1
            return b""

        def properties(self) -> list[Property]:
            return [Property("server.messages.count.asked", NUMBER, "how often", lambda: self.count)]

    counts = SessionMessage(form("count"), handler=Counts)
    with serve_gym("CartPole-v1", messages=[ECHO, counts]) as server, closing(make_remote(server.url)) as env:
        env.reset(seed=0)
        env.send_message(counts.form, b"")
        with Inspector(server.url, DEADLINE) as inspector:
            assert unpack_tensor(inspector.read_property("server.messages")) == "echo count states"
            assert unpack_tensor(inspector.read_property("server.messages.count.asked")) == 1


def test_observers_are_told_of_another_situation(teleport: Any) -> None:
    told: list[Any] = []

    class Note(Listener):
        def placed(self, result: Any, mask: Any) -> None:
            told.append((result, mask))

    class Notes(Observer):
        def made(self, world: Any) -> Listener:
            return Note()

    with (
        serve_gym("CartPole-v1", num_envs=3, messages=["teleport"], observers=[Notes()]) as server,
        closing(make_vec_remote(server.url, blocking=True)) as envs,
    ):
        envs.reset(seed=0)
        teleport.teleport(envs, STATE, slots=[2])
        teleport.teleport(envs, STATE)
    (some, mask), (whole, everywhere) = told
    assert mask.tolist() == [False, False, True]
    assert everywhere is None
    assert_identical(whole[0], np.array([STATE] * 3, np.float32))
    assert_identical(some[0][2], np.array(STATE, np.float32))


def test_handlers_hear_of_clients_that_are_gone_and_of_worlds_that_end() -> None:
    heard: list[str] = []

    class Hears(MessageHandler):
        async def answer(self, request: bytes, asked: bridge.AskedMessage) -> bytes:
            self.client, self.home = asked.client, asked.home
            return b""

        def left(self, client: object) -> None:
            heard.append("left" if client == self.client else "someone else left")

        def ended(self, home: object) -> None:
            heard.append("ended" if home == self.home else "something else ended")

        def close(self) -> None:
            heard.append("closed")

    hears = SessionMessage(form("hears"), handler=Hears)
    with (
        serve_gym("CartPole-v1", messages=[hears], isolation="process") as server,
        closing(make_remote(server.url)) as env,
    ):
        env.reset(seed=0)
        env.send_message(hears.form, b"")
    assert sorted(heard[:-1]) == ["ended", "left"]
    assert heard[-1] == "closed"


def test_a_message_is_made_with_the_operators_keywords_or_refused_by_name(teleport: Any) -> None:
    for keywords, told in [
        ({"messages": ["nothing"]}, "no installed package has a message 'nothing'"),
        ({"messages": ["teleport"], "message_options": {"teleport": {"speed": 1}}}, "speed"),
        ({"message_options": {"teleport": {"limit": 1}}}, "name them in messages="),
        ({"messages": "teleport"}, "expected messages to be a list of names"),
        ({"messages": [3]}, "expected a message by name, or a SessionMessage, got 3"),
        ({"messages": [ECHO, ECHO]}, "got two of 'echo'"),
    ]:
        with pytest.raises(SettingError, match=told):
            serve_gym("CartPole-v1", **keywords)  # type: ignore[arg-type]


def test_a_package_that_does_not_import_is_named(teleport: Any, tmp_path: Path) -> None:
    sys.modules.pop("bridge_teleport")
    (tmp_path / "bridge_teleport.py").write_text("raise OSError('no library')", encoding="utf-8")
    with pytest.raises(SettingError, match="the message teleport of the package bridge-teleport cannot be loaded"):
        serve_gym("CartPole-v1", messages=["teleport"])
    with serve_gym("CartPole-v1") as server, closing(make_remote(server.url)) as env:
        env.reset(seed=0)


def test_the_command_line_serves_a_message_that_it_names(
    teleport: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "CartPole-v1", "--message", "nothing"]) == 2
    assert "no installed package has a message 'nothing'" in capsys.readouterr().err
    assert main(["serve", "CartPole-v1", "--message", "teleport", "--message-options", "limit=3"]) == 2
    assert "expected --message-options to be NAME.KEY=VALUE, got 'limit=3'" in capsys.readouterr().err
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    script = "import sys; from bridge.cli import main; sys.exit(main(sys.argv[1:]))"
    command = ["serve", "CartPole-v1", "--message", "teleport", "--message-options", "teleport.limit=0.5"]
    with server_process(script, *command) as (_, line):
        url = re.search(r"grpc://\S+", line)
        assert url is not None, line
        with closing(make_remote(url.group())) as env:
            env.reset(seed=0)
            reply = env.send_message(teleport.FORM, b'{"state": [2, 0, 0, 0], "lanes": [0]}')
            assert reply.began is not None
            assert reply.began[0][0] == np.float32(0.5)


@pytest.mark.slow
def test_the_example_passes_the_strict_type_checker(teleport: Any, tmp_path: Path) -> None:
    check_types(tmp_path / "bridge_teleport.py")

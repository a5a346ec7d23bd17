"""`bridge.testing.check_server`: right on a server that is right, and each check fails on a server with that fault.

Each fault of `public_server.FAULTS` stands under the requirement that it breaks: D-1 to D-22 and D-25.
"""

import functools
import json
import os
import re
import threading
import time
from concurrent import futures

import grpc
import numpy as np
import psutil
import pytest
from dm_env_rpc.v1.extensions import properties_pb2
from hypothesis import given
from hypothesis import strategies as st

from bridge import serve_parallel
from bridge.cli import main
from bridge.errors import AddressError, ConnectError, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import REQUIREMENTS, CheckResult, Report, Status, check_server, samples
from bridge.testing.bench import CHECKS
from tests.places import ROOT
from tests.public_server import EVERY_FAULT, FAULTS, PublicServer, Refused, codes, tensor_spec
from tests.support import sampled, stable_id

TIMEOUT = 10.0
# Faults that are silence: there each answer that does not come takes the whole timeout.
SILENT = {
    "silent_leave",
    "second_stream_hangs",
    "reset_world_hits_all",
    "reset_world_waits_for_dead",
    "reset_world_waits_for_leaver",
    "second_agent_silent",
}


@functools.cache
def report_on(fault, requirement):
    needs_actions = fault in ("missing_action", "missing_action_ends_stream")
    with PublicServer({fault}, actions_required=needs_actions) as server:
        return check_server(
            server.url,
            timeout=0.5 if fault in SILENT else TIMEOUT,
            only=[requirement],
            required_actions=["move"] if needs_actions else [],
        )


CASES = [(requirement, fault) for requirement, faults in FAULTS.items() for fault in faults.split()]


def test_a_correct_server_passes_every_check():
    with PublicServer(actions_required=True) as server:
        report = check_server(server.url, required_actions=["move", "arm.torque", "arm.grip", "say"], strict=True)
        assert server.worlds.keys() == {""}  # what was created is gone
    assert report.ok, str(report)
    assert {result.status for result in report.results} == {Status.PASSED}, str(report)
    assert len(report.results) == len(CHECKS)
    assert report.exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "skipped"),
    sampled(
        [
            ({"kind": "discrete"}, set()),
            ({"kind": "vector"}, set()),
            ({"kind": "bare"}, {"D-21"}),  # no reward
            ({"create": False}, {"D-3", "D-5"}),
            ({"default_world": False}, {"D-4"}),
            ({"default_world": False, "max_worlds": 1}, {"D-4", "D-5"}),
            ({"properties": False}, set()),  # of D-18, unknown extensions are left
            ({"max_agents": 1}, {"D-22"}),
            ({"max_streams": 1}, {"D-5", "D-22"}),
            ({"create": False, "max_streams": 1, "max_agents": 1}, {"D-3", "D-5", "D-22"}),
            ({"episode_length": 1}, set()),
            ({"episode_length": 10**9}, {"D-13"}),  # no end is met
        ],
        3,
    ),
    ids=stable_id,
)
def test_what_a_server_lawfully_does_not_offer_is_skipped_with_the_reason(options, skipped):
    # The checks of D-15 wait for what must not come: they run where the option bears on them.
    quick = {"kind", "properties", "episode_length"} & set(options)
    looked_at = [requirement for requirement in REQUIREMENTS if requirement != "D-15" or not quick]
    with PublicServer(**options) as server:
        report = check_server(server.url, steps=50, only=looked_at)
    assert report.ok, str(report)
    assert {requirement for requirement in looked_at if report.status(requirement) is Status.SKIPPED} == skipped
    assert all(result.reason for result in report.results if result.status is Status.SKIPPED)


@pytest.mark.parametrize(("requirement", "fault"), sampled(CASES, 3))
def test_a_fault_fails_the_requirement_it_breaks(requirement, fault):
    report = report_on(fault, requirement)
    assert report.status(requirement) is Status.FAILED, str(report)
    assert not report.ok
    if fault == "property_garbage":
        assert "got what raised DecodeError" in report.failures[0].reason
    assert all("expected " in result.reason and ", got " in result.reason for result in report.failures)
    if fault not in SILENT:
        assert "no answer within" not in str(report)


@pytest.mark.slow
def test_every_check_has_been_seen_to_fail():
    failed = {(result.requirement, result.name) for case in CASES for result in report_on(*reversed(case)).failures}
    assert {(check.requirement, check.name) for check in CHECKS} - failed == set()


def test_every_requirement_has_checks_and_faults():
    assert list(REQUIREMENTS) == list(FAULTS)
    assert {check.requirement for check in CHECKS} == set(REQUIREMENTS)
    assert len({(check.requirement, check.name) for check in CHECKS}) == len(CHECKS)
    assert len(EVERY_FAULT) >= len(CHECKS)


class PatientServer(PublicServer):
    def property_value(self, agent, key):
        if key == "world.steps" and not agent.sequences:
            raise Refused(codes.FAILED_PRECONDITION, "no sequence has begun: send Step first")
        return super().property_value(agent, key)


def test_a_property_that_cannot_be_read_yet_may_say_so():
    # D-18
    with PatientServer() as server:
        report = check_server(server.url, only=["D-18"], strict=True)
    assert report.ok, str(report)


class WorldsGoWithAgents(PublicServer):
    """Refuses a ResetWorld whose world had an agent that has died meanwhile."""

    code, goes = codes.NOT_FOUND, True

    def on_reset_world(self, agent, request):
        agents = list(self.find(request.world_name).agents)
        answer = super().on_reset_world(agent, request)
        if not all(each.alive for each in agents):
            if self.goes:
                self.worlds.pop(request.world_name, None)
            raise Refused(self.code, "the world went with its agent")
        return answer


class FailsWithAgents(WorldsGoWithAgents):
    code = codes.INTERNAL


class OnlySaysSo(WorldsGoWithAgents):
    goes = False


@pytest.mark.parametrize(
    ("kind", "status"),
    [(WorldsGoWithAgents, Status.PASSED), (FailsWithAgents, Status.FAILED), (OnlySaysSo, Status.FAILED)],
)
def test_a_reset_world_may_find_that_its_world_has_gone_with_the_agent_that_died(kind, status):
    """D-15: it is not blocked."""
    with kind() as server:
        assert check_server(server.url, only=["D-15"], timeout=5.0).status("D-15") is status


# One cause is told once.


def failures_of(server, only=()):
    """Return the names of the checks that fail, and the lines of the report below D-18."""
    report = check_server(server.url, steps=50, timeout=5.0, only=only)
    return [f"{result.requirement} {result.name}" for result in report.failures], report


class SaysLittle(PublicServer):
    """Answers every extension with one error that is not UNIMPLEMENTED, and says nothing of it."""

    def on_extension(self, agent, request):
        raise Refused(codes.INTERNAL, "Unhandled message: extension")


@pytest.mark.parametrize(
    ("make", "lawful"),
    [
        (lambda: PublicServer(properties=False), True),
        (lambda: PublicServer(properties=False, faults={"error_code_ok"}), True),  # as dm_env_rpc's own example
        (lambda: PublicServer(properties=False, faults={"error_without_message"}), True),
        (SaysLittle, True),
        (lambda: PublicServer(properties=False, faults={"extension_ends_stream"}), False),
    ],
    ids=["unimplemented", "code 0", "no message", "internal", "ends the stream"],
)
def test_a_server_without_properties_is_told_once_that_it_has_none(make, lawful):
    # D-18
    with make() as server:
        failures, report = failures_of(server, ["D-18"])
    (line,) = [line for line in str(report).splitlines() if "skipped: " in line and "checks: " in line]
    if lawful:
        assert not failures, str(report)
        assert "skipped: 6 checks: the server has no properties: " in line
    else:
        # Once that listing ends the stream, and once that an unknown extension does.
        assert len(failures) == 2, str(report)
        assert "skipped: 5 checks: the properties of the root are not listed, as the first check of D-18 tells" in line


class NoRoot(PublicServer):
    """Has properties, and a root that cannot be listed."""

    def on_extension(self, agent, request):
        message = properties_pb2.PropertyRequest()
        if request.Unpack(message) and message.WhichOneof("payload") == "list_property":
            raise Refused(codes.UNKNOWN, "the list is lost")
        return super().on_extension(agent, request)


def test_a_root_that_cannot_be_listed_is_one_failure():
    # D-18
    with NoRoot() as server:
        failures, report = failures_of(server, ["D-18"])
    assert failures == ['D-18 properties are a tree with unique keys, listed from the root ""'], str(report)
    assert 'expected the properties of the root, key "", got the error UNKNOWN' in report.failures[0].reason


def test_worlds_that_only_their_creator_can_join_are_one_failure():
    with PublicServer(faults={"join_only_by_creator"}, default_world=False, properties=False) as server:
        failures, report = failures_of(server)
    assert failures == ["D-3 a world created on one connection can be joined from another"], str(report)
    told = [result for result in report.results if "for the connection alone that created it" in result.reason]
    assert [result.requirement for result in told] == ["D-15", "D-15", "D-15", "D-16", "D-22"]
    assert all(result.status is Status.SKIPPED for result in told)


def test_a_second_join_that_succeeds_is_one_failure():
    with PublicServer(faults={"join_twice"}, properties=False) as server:
        failures, report = failures_of(server, [name for name in REQUIREMENTS if name != "D-15"])
    assert failures == ["D-6 joining twice on one connection is an error"], str(report)


# Nothing hangs, nothing stays behind.


class SilentServer(PublicServer):
    """Takes streams and answers nothing, or nothing any more after some requests."""

    def __init__(self, answers=0, **options):
        super().__init__(**options)
        self.answers = answers

    def answer(self, agent, request):
        with self.lock:
            self.answers -= 1
            if self.answers < 0:
                self.lock.wait_for(lambda: self.stopped, 60)
        return super().answer(agent, request)


@pytest.mark.parametrize("answers", [0, 1, 40])
def test_a_server_that_stops_answering_fails_and_the_rest_is_skipped(answers):
    # D-1: one answer a request
    with SilentServer(answers) as server:
        report = check_server(server.url, timeout=0.3)
    assert not report.ok
    silent = [result for result in report.results if "stopped answering" in result.reason]
    assert len(silent) > 10
    assert report.exit_code == 1


def test_the_waits_of_a_silent_server_are_few():
    with SilentServer() as server:
        began = time.monotonic()
        check_server(server.url, timeout=0.3)
        waits = (time.monotonic() - began) / 0.3
    assert waits < 60  # there are more checks than that, each with several questions


def test_a_world_that_waits_for_its_other_agents_is_told_at_once():
    pytest.importorskip("pettingzoo")
    from tests.parallel_envs import Relay

    with serve_parallel(Relay) as server:
        report = check_server(server.url, timeout=0.3)
    assert len(report.failures) == 1
    assert "missing_agent='default'" in report.failures[0].reason
    assert {result.status for result in report.results} == {Status.FAILED, Status.SKIPPED}


def test_nothing_stays_behind():
    process = psutil.Process()
    with PublicServer() as server:
        threads = {thread.name for thread in threading.enumerate()}
        check_server(server.url, only=["D-1", "D-9", "D-15"])
        assert "bridge-conformance-reader" not in {thread.name for thread in threading.enumerate()}
        assert threads >= {"MainThread"}
        with server.lock:
            assert server.lock.wait_for(lambda: server.streams == 0, 10)
        assert server.worlds.keys() == {""}
        port = server.port
    peers = [connection.raddr.port for connection in process.net_connections("tcp") if connection.raddr]
    assert port not in peers


class GarbageServer:
    """Answers each request with bytes that are no message."""

    def __enter__(self):
        self.server = grpc.server(futures.ThreadPoolExecutor(8))
        handler = grpc.stream_stream_rpc_method_handler(lambda requests, _: (b"\xff\xff\xff" for _ in requests))
        handlers = grpc.method_handlers_generic_handler("dm_env_rpc.v1.Environment", {"Process": handler})
        self.server.add_generic_rpc_handlers((handlers,))
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        return f"grpc://127.0.0.1:{port}"

    def __exit__(self, *_):
        self.server.stop(0).wait(10)


def test_answers_that_are_no_messages_fail_and_raise_nothing():
    with GarbageServer() as url:
        report = check_server(url, timeout=1.0)
    assert report.status("D-1") is Status.FAILED
    assert "stream ended" in report.failures[0].reason


def test_nobody_there_is_a_connect_error_that_names_the_url():
    with PublicServer() as server:
        url = server.url
    with pytest.raises(ConnectError, match=url):
        check_server(url, timeout=2.0)


def test_another_grpc_service_is_a_connect_error():
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(ConnectError, match="Is it a dm_env_rpc server"):
            check_server(f"127.0.0.1:{port}", timeout=5.0)
    finally:
        server.stop(0).wait(10)


def test_misuse_is_an_error_that_says_what_is_expected():
    with pytest.raises(AddressError, match="HOST:PORT"):
        check_server("nowhere")
    for wrong in ({"timeout": 0}, {"timeout": float("inf")}, {"steps": 0}, {"seed": -1}):
        with pytest.raises(SettingError, match="timeout of more than 0"):
            check_server("localhost:1", **wrong)
    with pytest.raises(SettingError, match="D-99"):
        check_server("localhost:1", only=["D-99"])
    with pytest.raises(SettingError, match="'x'"):
        check_server("localhost:1", create_settings={"x": object()})


@pytest.mark.parametrize(
    "fault",
    sampled(["odd_dtype", "no_specs", "reset_world_silent", "error_ends_stream", "uids_change"], 5, 2, slow=True),
)
def test_a_whole_run_over_a_faulty_server_comes_to_its_end(fault):
    with PublicServer({fault}) as server:
        report = check_server(server.url, timeout=2.0)
    assert not report.ok
    assert {result.requirement for result in report.results} == set(REQUIREMENTS)
    assert len(report.results) == len(CHECKS)
    assert "got what raised" not in str(report)


# What the server is told and sent.


class RecordingServer(PublicServer):
    def __init__(self, **options):
        super().__init__(**options)
        self.metadata, self.settings = [], []

    def Process(self, request_iterator, context):  # noqa: N802
        self.metadata.append(dict(context.invocation_metadata()))
        return super().Process(request_iterator, context)

    def on_create_world(self, agent, request):
        self.settings.append({name: str(tensor) for name, tensor in request.settings.items()})
        return super().on_create_world(agent, request)


def test_the_url_and_the_keywords_become_settings_and_the_token_metadata():
    with RecordingServer() as server:
        report = check_server(f"{server.url}?kind=vector", only=["D-11"], token="t0ken")
        assert {data.get("authorization") for data in server.metadata} == {"Bearer t0ken"}
        assert all("vector" in settings["kind"] for settings in server.settings)
        skipped = {result.name: result.reason for result in report.of("D-11") if result.status is Status.SKIPPED}
        assert skipped == {"two negative dimensions are an error": "no action has two dimensions"}
        server.settings.clear()
        check_server(
            f"{server.url}/CartPole-v1?lanes=2&fast=true", only=["D-4"], create_settings={"seeds": np.array([1, 2])}
        )
        first = server.settings[0]
    assert "strings" in first["env_id"]
    assert "int64s" in first["lanes"]
    assert "bools" in first["fast"]
    assert "shape: 2" in first["seeds"]


def test_a_world_that_cannot_be_made_as_asked_fails_and_no_other_one_is_checked():
    # D-3: the default world is another one than the settings ask for
    with PublicServer() as server:
        report = check_server(f"{server.url}?kind=none", only=["D-3", "D-4", "D-9"])
    assert [report.status(requirement) for requirement in ("D-3", "D-4")] == [Status.FAILED, Status.PASSED]
    assert {result.status for result in report.of("D-9")} == {Status.SKIPPED}
    assert "no world can be made with the given settings" in report.of("D-9")[0].reason


def test_an_action_that_does_not_fit_its_spec_is_misuse_and_no_fault_of_the_server():
    with PublicServer() as server, pytest.raises(SettingError, match=r"the action 'move' as INT\d+, got 'up'"):
        check_server(server.url, only=["D-9"], actions={"move": "up"})


def test_the_words_by_which_a_server_ends_the_stream_cannot_command_the_terminal():
    class RudeServer(PublicServer):
        def Process(self, request_iterator, context):  # noqa: N802
            for request in request_iterator:
                if request.WhichOneof("payload") != "leave_world":
                    context.abort(grpc.StatusCode.INTERNAL, "\x1b[2J\nPASSED   D-9   all is well")
                yield pb.EnvironmentResponse(leave_world=pb.LeaveWorldResponse())

    with RudeServer() as server:
        report = str(check_server(server.url, only=["D-8"]))
    assert "stream ended with INTERNAL" in report
    assert all(line.isprintable() for line in report.split("\n"))
    assert not any(line.startswith("PASSED") for line in report.split("\n"))


def test_an_existing_world_is_joined_where_the_url_names_it():
    with RecordingServer() as server:
        with server.lock:
            server.on_create_world(None, pb.CreateWorldRequest())
        server.settings.clear()
        report = check_server(f"{server.url}?world=world-1", only=["D-9", "D-14"])
        assert report.ok, str(report)
        assert len(server.settings) == 1  # to see whether worlds can be created
        assert "world-1" in server.worlds


class FussyServer(PublicServer):
    """Takes one text only."""

    def check_action(self, spec, tensor):
        super().check_action(spec, tensor)
        if spec.name == "say" and list(tensor.strings.array) != ["please"]:
            raise Refused(codes.INVALID_ARGUMENT, "say please")


def test_texts_that_the_specs_do_not_tell_are_asked_for_and_taken():
    with FussyServer() as server:
        report = check_server(server.url, only=["D-11", "D-25"])
        assert report.status("D-25") is Status.SKIPPED
        assert "say please" in report.of("D-25")[0].reason
        assert "give `actions`" in report.of("D-25")[0].reason
        told = check_server(server.url, only=["D-11", "D-25"], actions={"say": "please"})
    assert told.ok, str(told)
    assert told.status("D-25") is Status.PASSED


class DecodingServer(PublicServer):
    """Takes what decodes."""

    def check_action(self, spec, tensor):
        super().check_action(spec, tensor)
        if tensor.uint8s.array != b"ok":
            raise Refused(codes.INVALID_ARGUMENT, "cannot decode it")


def test_what_is_encoded_in_a_variable_length_is_asked_for_and_taken():
    with DecodingServer(kind="encoded") as server:
        report = check_server(server.url, only=["D-11", "D-25"])
        assert report.ok, str(report)
        assert "cannot decode it" in report.of("D-25")[0].reason
        told = check_server(server.url, actions={"blob": np.frombuffer(b"ok", np.uint8)})
    assert told.ok, str(told)
    assert told.status("D-25") is Status.PASSED


class RefusingServer(PublicServer):
    """Refuses lawful numbers."""

    def check_action(self, spec, tensor):
        raise Refused(codes.INVALID_ARGUMENT, "never")


def test_a_server_that_refuses_lawful_numbers_fails():
    # D-11
    with RefusingServer(kind="discrete") as server:
        report = check_server(server.url, only=["D-11"])
    assert "actions that keep to their specs are accepted" in {result.name for result in report.failures}


class OddCodesServer(PublicServer):
    def answer(self, agent, request):
        response = super().answer(agent, request)
        if response.HasField("error") and response.error.code not in (5, 7):
            response.error.code = 2
        return response


def test_ill_fitting_codes_are_noted_and_with_strict_they_fail():
    # D-2: a fitting code
    with OddCodesServer(properties=True) as server:
        lenient = check_server(server.url, only=["D-2"])
        strict = check_server(server.url, only=["D-2"], strict=True)
    assert lenient.ok
    assert "note: errors have a code and a message: FAILED_PRECONDITION would fit Step while not joined" in str(lenient)
    assert not strict.ok
    assert "FAILED_PRECONDITION would fit" in strict.failures[0].reason


def test_strict_asks_for_a_default_world():
    # D-4
    with PublicServer(default_world=False) as server:
        assert check_server(server.url, only=["D-4"]).ok
        assert not check_server(server.url, only=["D-4"], strict=True).ok


# The report.


def test_a_report_has_a_line_a_requirement_and_below_it_what_went_wrong():
    results = (
        CheckResult("D-8", "Step is refused", Status.PASSED),
        CheckResult("D-8", "Reset is refused", Status.FAILED, "expected an error, got a reset answer"),
        CheckResult("D-9", "first", Status.SKIPPED, "no world"),
        CheckResult("D-9", "second", Status.SKIPPED, "no world"),
        CheckResult("D-10", "third", Status.PASSED, notes=("could be better",)),
    )
    report = Report("grpc://h:1", {"D-8": "eight", "D-9": "nine", "D-10": "ten"}, results)
    assert str(report).splitlines() == [
        "dm_env_rpc conformance of grpc://h:1",
        "FAILED   D-8   eight",
        "               failed: Reset is refused: expected an error, got a reset answer",
        "SKIPPED  D-9   nine",
        "               skipped: 2 checks: no world",
        "PASSED   D-10  ten",
        "               note: third: could be better",
        "3 requirements: 1 passed, 1 failed, 1 skipped",
    ]
    assert [result.name for result in report.failures] == ["Reset is refused"]
    assert report.exit_code == 1
    data = json.loads(json.dumps(report.as_dict()))
    assert data["ok"] is False
    assert data["requirements"]["D-9"] == {"title": "nine", "status": "skipped"}
    assert data["checks"][1]["status"] == "failed"


# The command.


def bridge(*words):
    return main(words)


def test_the_command_prints_the_report_and_its_exit_code_says_how_it_went(capsys):
    with PublicServer() as server:
        assert bridge("check", server.url, "--only", "D-8,D-9") == 0
        out = capsys.readouterr().out
        assert "PASSED   D-8" in out
        assert out.rstrip().endswith("2 requirements: 2 passed, 0 failed, 0 skipped")
        assert bridge("check", server.url, "--only", "D-8", "--json", "--set", "kind=bare", "--action", "say=5") == 0
        assert json.loads(capsys.readouterr().out)["ok"] is True
    with PublicServer({"step_unjoined"}) as server:
        assert bridge("check", server.url, "--only", "D-8") == 1
    capsys.readouterr()
    assert bridge("check", server.url, "--timeout", "2") == 3
    assert "Is the server running there" in capsys.readouterr().err
    assert bridge("check", "nowhere") == 2
    assert "HOST:PORT" in capsys.readouterr().err
    assert bridge("check", "localhost:1", "--tls-ca", os.devnull + "/none") == 2
    assert bridge("check", "localhost:1", "--set", "kind") == 2
    assert "NAME=VALUE" in capsys.readouterr().err


# The tensors that are sent.


@st.composite
def specs(draw):
    dtype = draw(st.sampled_from(sorted(samples.NUMPY)))
    numpy_dtype = samples.NUMPY[dtype]
    shape = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    size = int(np.prod(shape))
    if numpy_dtype.kind == "f":
        element = st.floats(-(2.0**100), 2.0**100, width=32)
    else:
        info = np.iinfo(numpy_dtype)
        element = st.integers(int(info.min), int(info.max))
    bounds = {}
    for which in ("low", "high"):
        count = draw(st.sampled_from([None, 1, size]))
        if count is not None:
            bounds[which] = np.array(draw(st.lists(element, min_size=count, max_size=count)), numpy_dtype)
    if len(bounds) == 2:
        low, high = np.broadcast_arrays(bounds["low"], bounds["high"])
        both_scalar = bounds["low"].size == bounds["high"].size == 1
        bounds = {"low": np.minimum(low, high), "high": np.maximum(low, high)}
        if both_scalar:
            bounds = {name: value[:1] for name, value in bounds.items()}
    return pb.TensorSpec.FromString(tensor_spec("a", dtype, shape, **bounds).SerializeToString())


@given(specs(), st.integers(0, 2**32 - 1))
def test_lawful_actions_keep_to_their_specs_and_the_others_do_not(spec, seed):
    generator = np.random.default_rng(seed)

    def inside(tensor):
        values = samples.elements(tensor).reshape(tuple(tensor.shape))
        low, high = samples.bound(spec, "min"), samples.bound(spec, "max")
        return (low is None or bool(np.all(values >= low))) and (high is None or bool(np.all(values <= high)))

    made = samples.lawful(spec, generator)
    assert samples.shape_fits(spec, made) is None
    assert made.WhichOneof("payload") == samples.PAYLOAD[spec.dtype]
    assert inside(made)
    common = samples.common(spec)
    if common is not None:
        assert inside(samples.pack(spec.dtype, np.full(tuple(spec.shape), common)))
    for which in ("min", "max"):
        edge = samples.at_bound(spec, which)
        assert (edge is None) == (samples.bound(spec, which) is None)
        assert edge is None or inside(edge)
        for outside in samples.beyond(spec, which, generator):
            assert samples.shape_fits(spec, outside) is None
            assert not inside(outside)


def test_what_does_not_fit_a_shape_is_named():
    spec = pb.TensorSpec(name="a", dtype=pb.INT32, shape=[2, -1])
    fits = samples.pack(pb.INT32, [1, 2, 3, 4])
    for shape in ([2, 2], [2, -1], [-1, 2]):
        fits.shape[:] = shape
        assert samples.shape_fits(spec, fits) is None
    for shape, says in (
        ([4], "2 dimensions"),
        ([3, 2], r"expected the shape \[2, -1\]"),
        ([-1, -1], "at most one variable"),
        ([-1, 3], "remainder"),
        ([2, 3], "expected 6 elements"),
    ):
        fits.shape[:] = shape
        with pytest.raises(ValueError, match=says):
            raise ValueError(samples.shape_fits(spec, fits))
    scalar = pb.TensorSpec(name="a", dtype=pb.INT32)
    assert "expected 1 element" in samples.shape_fits(scalar, pb.Tensor())


# The page about it.

PAGE = ROOT / "docs" / "protocol.md"


def test_the_page_has_every_requirement_and_its_examples_run():
    page = PAGE.read_text(encoding="utf-8")
    (named,) = re.findall(r"^The requirements are (.*?)\. ", page, re.MULTILINE | re.DOTALL)
    assert re.findall(r"D-\d+", named) == list(REQUIREMENTS)
    (server_test,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    scope = {}
    exec(compile(server_test, str(PAGE), "exec"), scope)
    with PublicServer() as server:
        scope["test_our_server_keeps_to_the_protocol"](server)


def test_the_reference_that_the_page_leads_to_names_every_option_of_the_command(capsys):
    assert bridge("check", "--help") == 0
    options = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)) - {
        "--debug",
        "--help",
        "--seed",
        "--timeout",
    }
    assert "](reference.md#gymnasium-bridge-check)" in PAGE.read_text(encoding="utf-8")
    reference = (PAGE.parent / "reference.md").read_text(encoding="utf-8")
    section = reference.partition("### gymnasium-bridge check\n")[2].partition("\n### ")[0]
    assert {option for option in options if option not in section} == set()

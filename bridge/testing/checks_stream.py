"""Checks of the stream: one response per request, errors as responses, pipelined requests (D-1, D-2, D-25)."""

from __future__ import annotations

from google.protobuf import any_pb2

from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import samples
from bridge.testing.bench import UNKNOWN_NAME, Bench, CheckedAgent, Failed, Skip, check, unused
from bridge.testing.wire import NoAnswerError, StreamEndedError, describe

__all__: list[str] = []

AHEAD = 100
"""The number of Steps that are sent without reading."""


def _sent_ahead(
    agent: CheckedAgent, requests: list[tuple[pb.EnvironmentRequest, set[str]]]
) -> list[pb.EnvironmentResponse]:
    """Send all requests, then read: there must be as many responses, each of an expected kind, and no more."""
    for request, _ in requests:
        agent.stream.send(request)
    answers = []
    for number, (request, kinds) in enumerate(requests, 1):
        asked = request.WhichOneof("payload")
        expected = f"answer {number} of {len(requests)}, to {asked}, of the kind {' or '.join(sorted(kinds))}"
        try:
            answer = agent.stream.receive()
        except NoAnswerError as error:
            agent.bench.hung = True
            raise Failed(expected, str(error)) from None
        except StreamEndedError as error:
            raise Failed(expected, str(error)) from None
        if answer.WhichOneof("payload") not in kinds:
            raise Failed(expected, describe(answer))
        answers.append(answer)
    more = agent.stream.drain(min(agent.stream.timeout, 0.5))
    if more:
        raise Failed(f"{len(requests)} answers to {len(requests)} requests", f"one more: {describe(more[0])}")
    return answers


@check("D-1", "requests sent ahead get one answer each, of their kind or an error, in order")
def one_answer_each(bench: Bench) -> None:
    """Send requests of several kinds without reading."""
    leave = pb.EnvironmentRequest(leave_world=pb.LeaveWorldRequest())
    step = pb.EnvironmentRequest(step=pb.StepRequest())
    reset = pb.EnvironmentRequest(reset=pb.ResetRequest(settings={}))
    requests = [(leave, {"leave_world"}), (step, {"error"}), (reset, {"error"}), (leave, {"leave_world"})]
    with bench.connection() as agent:
        if bench.no_world:
            _sent_ahead(agent, requests * 8)
            return
        alone = bench.one_connection or bench.own_worlds
        with bench.connection() as keeper, bench.world(agent if alone else keeper) as world:
            join = pb.EnvironmentRequest(
                join_world=pb.JoinWorldRequest(world_name=world, settings=bench.options.join_settings)
            )
            requests += [
                (join, {"join_world"}),
                (step, {"step"}),
                (reset, {"reset"}),
                (step, {"step"}),
                (join, {"error", "join_world"}),  # a check of D-6 reports which
                (leave, {"leave_world"}),
            ]
            _sent_ahead(agent, requests * 8)


@check("D-1", "each kind of request gets an answer of its kind")
def kinds(bench: Bench) -> None:
    """Send requests one by one."""
    with bench.joined() as agent:
        agent.start()
        agent.reset()
        agent.leave()


@check("D-1", "a second connection is served, or refused at once")
def second_connection(bench: Bench) -> None:
    """Send requests on a second connection while the first is open."""
    if bench.one_connection.startswith("!"):
        raise Failed("a second connection to be served, or refused with an error", bench.one_connection[1:])
    if bench.one_connection:
        raise Skip(bench.one_connection)


@check("D-2", "after a failed request the stream stays open and the connection is as before, not joined")
def failed_request_unjoined(bench: Bench) -> None:
    """Send a request that fails, without having joined."""
    with bench.connection() as agent:
        agent.bad("to JoinWorld of an unknown world", join_world=pb.JoinWorldRequest(world_name=UNKNOWN_NAME))
        agent.bad("to Step after a JoinWorld that failed", step=pb.StepRequest())
        agent.good("after failed requests", leave_world=pb.LeaveWorldRequest())


@check("D-2", "after a failed request a joined connection is as before, its sequence running")
def failed_request_joined(bench: Bench) -> None:
    """Send a request that fails in the middle of a sequence."""
    with bench.joined() as agent:
        agent.start()
        agent.must_be_running("after the first Step")
        agent.must_be_running("after a failed Step")
        agent.bad_step("to an unknown observation", observations=[unused(agent.specs.observations)])
        agent.must_be_running("after a Step that asked for an unknown observation")
        again = pb.JoinWorldRequest(world_name=agent.world or "", settings=bench.options.join_settings)
        # If it does not fail, a check of D-6 reports it.
        if agent.ask(join_world=again).WhichOneof("payload") == "error":
            agent.must_be_running("after a failed JoinWorld")
            agent.reset()


@check("D-2", "a request without a payload is answered with an error")
def empty_request(bench: Bench) -> None:
    """Send an EnvironmentRequest without any field."""
    with bench.connection() as agent:
        answer = agent.ask()
        if answer.WhichOneof("payload") != "error":
            raise Failed("an error to a request without a payload", describe(answer))
        agent.good("after an empty request", leave_world=pb.LeaveWorldRequest())


@check("D-2", "errors have a code and a message")
def errors_say_why(bench: Bench) -> None:
    """Check the error messages for several mistakes."""
    argument = {Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.OUT_OF_RANGE, Code.UNIMPLEMENTED}
    state = {Code.FAILED_PRECONDITION}
    seen: list[tuple[str, pb.Status, set[Code]]] = []
    unknown = {UNKNOWN_NAME: samples.pack(pb.INT64, 1)}
    with bench.connection() as agent:
        seen.append(("Step while not joined", agent.bad("to Step, not joined", step=pb.StepRequest()), state))
        seen.append(("Reset while not joined", agent.bad("to Reset, not joined", reset=pb.ResetRequest()), state))
        lost = pb.JoinWorldRequest(world_name=UNKNOWN_NAME)
        seen.append(("JoinWorld of an unknown world", agent.bad("to it", join_world=lost), {Code.NOT_FOUND}))
        answer = agent.ask(create_world=pb.CreateWorldRequest(settings=unknown))
        if answer.WhichOneof("payload") == "error":
            seen.append(("CreateWorld with an unknown setting", answer.error, argument))
        else:
            bench.destroy(agent, answer.create_world.world_name)
    if not bench.no_world:
        with bench.joined() as agent:
            agent.start()
            uid = unused(agent.specs.observations)
            seen.append(("an unknown observation", agent.bad_step("to it", observations=[uid]), argument))
            seen.append(("an unknown action", agent.bad_step("to it", agent.nonsense()), argument))
            again = pb.JoinWorldRequest(world_name=agent.world or "", settings=bench.options.join_settings)
            answer = agent.ask(join_world=again)
            if answer.WhichOneof("payload") == "error":  # otherwise a check of D-6 reports it
                seen.append(("a second JoinWorld", answer.error, state | {Code.ALREADY_EXISTS}))
    for mistake, status, fitting in seen:
        if not 1 <= status.code <= 16:
            raise Failed(f"an error code from 1 to 16 for {mistake}", f"the code {status.code} ({status.message!r})")
        if not status.message.strip():
            raise Failed(f"a message that says what was wrong with {mistake}", "an empty message")
        if status.code not in fitting:
            names = " or ".join(sorted(code.name for code in fitting))
            bench.note(f"{names} would fit {mistake} better than {Code.named(status.code)}")


@check("D-2", "an unknown extension is answered with an error")
def unknown_extension(bench: Bench) -> None:
    """Send a message that no server knows."""
    extension = any_pb2.Any(type_url="type.googleapis.com/conformance.check.Unknown", value=b"\x08\x01")
    with bench.connection() as agent:
        agent.bad("to an unknown extension", extension=extension)
        agent.good("after an unknown extension", leave_world=pb.LeaveWorldRequest())


@check("D-25", f"{AHEAD} Steps can be sent ahead, across sequence ends, and their answers come in order")
def steps_ahead(bench: Bench) -> None:
    """Send Steps that each request different observations, so that a response shows which Step it belongs to."""
    with bench.joined() as agent:
        uids = sorted(agent.specs.observations)
        wanted = [[uid] for uid in uids] + [[]]
        steps = [
            pb.StepRequest(actions=agent.lawful(), requested_observations=wanted[number % len(wanted)])
            for number in range(AHEAD)
        ]
        answers = _sent_ahead(agent, [(pb.EnvironmentRequest(step=step), {"step"}) for step in steps])
        ended = True
        for number, (step, answer) in enumerate(zip(steps, answers, strict=True), 1):
            expected = sorted(step.requested_observations)
            if sorted(answer.step.observations) != expected:
                raise Failed(f"the observations {expected} in answer {number}, as asked", describe(answer))
            runs = answer.step.state == pb.RUNNING
            if ended and not runs:
                raise Failed(f"RUNNING in answer {number}, the first of its sequence", describe(answer))
            ended = not runs

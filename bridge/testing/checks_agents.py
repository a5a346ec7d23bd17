"""Checks of ResetWorld and of several agents in one world (D-15, D-22)."""

from __future__ import annotations

from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing.bench import QUIET, UNKNOWN_NAME, Bench, CheckedAgent, Failed, Skip, check
from bridge.testing.wire import NoAnswerError, StreamEndedError, describe

__all__: list[str] = []


def _request(world: str | None) -> pb.EnvironmentRequest:
    return pb.EnvironmentRequest(reset_world=pb.ResetWorldRequest(world_name=world or ""))


def _done(caller: CheckedAgent, why: str, *, world: str | None = None) -> None:
    """Check that the pending ResetWorld succeeds; if `world` is given, it may also fail because it has ended."""
    answer = caller.take("reset_world")
    if world and _says_gone(answer) and _says_gone(caller.ask(reset_world=pb.ResetWorldRequest(world_name=world))):
        return
    if answer.WhichOneof("payload") == "error":
        raise Failed(f"a reset_world answer {why}", describe(answer))


def _says_gone(answer: pb.EnvironmentResponse) -> bool:
    return answer.WhichOneof("payload") == "error" and answer.error.code == Code.NOT_FOUND


def _wait(caller: CheckedAgent, why: str) -> None:
    """Check that the pending ResetWorld is not answered yet."""
    try:
        answer = caller.stream.receive(QUIET)
    except NoAnswerError:
        return
    except StreamEndedError as error:
        raise Failed(f"ResetWorld to wait {why}", str(error)) from None
    raise Failed(f"ResetWorld to wait {why}", describe(answer))


@check("D-15", "resetting an unknown world is an error")
def unknown_world(bench: Bench) -> None:
    """Reset a world that nobody created."""
    with bench.connection() as agent:
        request = pb.ResetWorldRequest(world_name=UNKNOWN_NAME)
        agent.bad("to ResetWorld of an unknown world", reset_world=request)


@check("D-15", "a joined connection can reset its world and then just begins the next sequence")
def by_the_agent(bench: Bench) -> None:
    """Reset one's own world in a running sequence."""
    with bench.joined() as agent:
        agent.start()
        agent.good("to ResetWorld", reset_world=pb.ResetWorldRequest(world_name=agent.world or ""))
        agent.must_be_first("after its own ResetWorld")
        agent.must_be_running("after the first Step after ResetWorld")


@check("D-15", "ResetWorld interrupts the others once, with their observations, and waits for that")
def from_outside(bench: Bench) -> None:
    """Reset the world of an agent from a connection that has not joined."""
    bench.need_shared_world()
    with bench.joined() as agent, bench.connection() as caller:
        agent.start()
        uids = sorted(agent.specs.observations)
        caller.stream.send(_request(agent.world))
        _wait(caller, "until the joined agent has stepped")
        answer = agent.step("while its world is reset", agent.lawful(), uids)
        whole = pb.EnvironmentResponse(step=answer)
        if answer.state != pb.INTERRUPTED:
            raise Failed("INTERRUPTED to the Step of an agent whose world is reset", describe(whole))
        if sorted(answer.observations) != uids:
            raise Failed(f"the requested observations {uids} with INTERRUPTED", describe(whole))
        _done(caller, "once every agent has been interrupted")
        agent.must_be_first("after its world was reset")
        agent.must_be_running("after the first Step after the reset")


def _not_blocked(bench: Bench, *, dies: bool) -> None:
    bench.need_shared_world()
    with bench.joined() as agent, bench.connection() as caller:
        agent.start()
        caller.stream.send(_request(agent.world))
        _wait(caller, "until the joined agent has stepped, left or died")
        if dies:
            bench.kill(agent)
            # Servers whose worlds end with their last agent may notice its end first.
            _done(caller, "once the agent has died", world=agent.world)
        else:
            agent.leave()
            _done(caller, "once the agent has left")


@check("D-15", "an agent that leaves does not block ResetWorld")
def leaver(bench: Bench) -> None:
    """Leave while the world is reset."""
    _not_blocked(bench, dies=False)


@check("D-15", "an agent that dies does not block ResetWorld")
def dead(bench: Bench) -> None:
    """End the connection while the world is reset."""
    _not_blocked(bench, dies=True)


@check("D-22", "several agents in one world each have specs and a sequence of their own")
def several_agents(bench: Bench) -> None:
    """Join one world twice, step both agents at the same time, let one leave."""
    bench.need_shared_world()
    with bench.joined() as first, bench.connection() as second:
        join = pb.JoinWorldRequest(world_name=first.world or "", settings=bench.options.join_settings)
        answer = second.ask(join_world=join)
        if answer.WhichOneof("payload") == "error":
            raise Skip(f"the world takes one agent: {describe(answer)}")
        second.specs, second.world = answer.join_world.specs, first.world
        for agent, which in ((first, "first"), (second, "second")):
            if not agent.specs.observations and not agent.specs.actions:
                raise Failed(f"specs for the {which} agent", "none")
        _together(first, second, "to the first Step of an agent", first_step=True)
        _together(first, second, "to the Step of an agent in a world of two")
        second.leave()
        _goes_on(bench, first, second, join)


def _together(first: CheckedAgent, second: CheckedAgent, why: str, *, first_step: bool = False) -> None:
    """Send a Step on both connections, then read both responses: a world may wait for all of its agents."""
    starts = []
    for agent in (first, second):
        starts.append(first_step or not agent.running)
        actions = agent.nonsense() if starts[-1] else agent.lawful()
        agent.stream.send(pb.EnvironmentRequest(step=pb.StepRequest(actions=actions)))
    for agent, start in zip((first, second), starts, strict=True):
        answer = agent.take("step")
        if answer.WhichOneof("payload") == "error":
            raise Failed(f"a step answer {why}", describe(answer))
        agent.running = answer.step.state == pb.RUNNING
        if start and not agent.running:
            raise Failed(f"RUNNING {why}", describe(answer))


def _goes_on(bench: Bench, first: CheckedAgent, second: CheckedAgent, join: pb.JoinWorldRequest) -> None:
    """Check that the remaining agent gets responses, possibly only after another one has joined."""
    actions = first.lawful() if first.running else {}
    first.stream.send(pb.EnvironmentRequest(step=pb.StepRequest(actions=actions)))
    try:
        first.stream.receive(min(bench.options.timeout, 4 * QUIET))
        return
    except NoAnswerError:
        pass
    except StreamEndedError as error:
        raise Failed("the other agent's connection to stay open when one leaves", str(error)) from None
    second.good("to another agent that joins in", join_world=join)
    second.stream.send(pb.EnvironmentRequest(step=pb.StepRequest()))
    first.take("step")
    second.take("step")
    bench.note("a world that waits for a missing agent should say for how long, and what then")

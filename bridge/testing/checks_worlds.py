"""Checks of worlds and of joining them (D-3 to D-6, D-8, D-16, D-17)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import samples
from bridge.testing.bench import QUIET, UNKNOWN_NAME, Bench, CheckedAgent, Failed, Skip, check
from bridge.testing.wire import NoAnswerError, StreamEndedError, describe

__all__: list[str] = []


def _unknown_setting() -> dict[str, pb.Tensor]:
    return {UNKNOWN_NAME: samples.pack(pb.INT64, 1)}


@contextlib.contextmanager
def _second_world(bench: Bench, agent: CheckedAgent) -> Iterator[str]:
    bench.need_create()
    answer = agent.ask(create_world=pb.CreateWorldRequest(settings=bench.options.create_settings))
    if answer.WhichOneof("payload") == "error":
        raise Skip(f"one world at a time: {describe(answer)}")
    try:
        yield answer.create_world.world_name
    finally:
        bench.destroy(agent, answer.create_world.world_name)


@check("D-3", "CreateWorld gives a world that can be joined")
def create(bench: Bench) -> None:
    """Create a world and join it on one connection."""
    if not bench.can_create and not bench.no_world:
        raise Skip(f"the server does not create worlds ({bench.cache['create']}); it has a world to join without")
    if not bench.can_create:
        raise Failed("a CreateWorld answer, or a world to join without", bench.cache["create"])
    with bench.joined(new=True) as agent:
        agent.start()


@check("D-3", "world names are unique")
def unique_names(bench: Bench) -> None:
    """Create two worlds."""
    bench.need_create()
    with bench.connection() as agent, bench.world(agent, new=True) as first, _second_world(bench, agent) as second:
        if second == first:
            raise Failed("two worlds with two names", f"{first!r} twice")


@check("D-3", "an unknown CreateWorld setting is an error")
def unknown_create_setting(bench: Bench) -> None:
    """Create with a setting that no server knows."""
    bench.need_create()
    settings = {**bench.options.create_settings, **_unknown_setting()}
    with bench.connection() as agent:
        answer = agent.ask(create_world=pb.CreateWorldRequest(settings=settings))
        if answer.WhichOneof("payload") != "error":
            bench.destroy(agent, answer.create_world.world_name)
            raise Failed(f"an error to CreateWorld with the setting {UNKNOWN_NAME!r}", describe(answer))


@check("D-3", "a world created on one connection can be joined from another")
def join_from_another(bench: Bench) -> None:
    """Create a world on one connection, and join it on another."""
    bench.need_two()
    with bench.connection() as maker, bench.world(maker, new=True) as name, bench.connection() as agent:
        agent.join(name)
        agent.start()
        agent.leave()


@check("D-4", 'the default world, named "", can be joined without CreateWorld')
def default_world(bench: Bench) -> None:
    """Join "" on a fresh server."""
    refusal = bench.cache["default"]
    if refusal and not bench.can_create:
        raise Failed('a world "" to join, as no worlds can be created', refusal)
    if refusal:
        bench.note(f'there is no default world: JoinWorld of "" gave {refusal}')
        raise Skip("the server creates worlds and has none before")


@check("D-5", "resetting one world leaves another alone")
def reset_world_is_local(bench: Bench) -> None:
    """Reset one of two worlds."""
    bench.need_two()
    with bench.joined(new=True) as agent:
        agent.start()
        with bench.connection() as other, _second_world(bench, other) as name:
            other.good("to ResetWorld of a world that nobody joined", reset_world=pb.ResetWorldRequest(world_name=name))
            answer = agent.ask(step=pb.StepRequest(actions=agent.nonsense()))
            if answer.WhichOneof("payload") != "error":
                raise Failed(
                    "the other world's sequence still running, so an error to an unknown action", describe(answer)
                )
            agent.step("after another world was reset", agent.lawful())


@check("D-5", "destroying one world leaves another alone")
def destroy_is_local(bench: Bench) -> None:
    """Destroy one of two worlds."""
    bench.need_two()
    with bench.joined(new=True) as agent:
        agent.start()
        with bench.connection() as other, _second_world(bench, other):
            pass
        agent.must_be_running("after another world was destroyed")
        agent.step("after another world was destroyed", agent.lawful())


@check("D-6", "JoinWorld gives specs, and then Step works")
def join(bench: Bench) -> None:
    """Join and step."""
    with bench.joined() as agent:
        if not agent.specs.observations and not agent.specs.actions:
            raise Failed("specs of actions and observations in the JoinWorld answer", "none of either")
        agent.start()


@check("D-6", "joining twice on one connection is an error")
def join_twice(bench: Bench) -> None:
    """Join, and join again."""
    with bench.joined() as agent:
        request = pb.JoinWorldRequest(world_name=agent.world or "", settings=bench.options.join_settings)
        agent.bad("to a second JoinWorld", join_world=request)
        agent.start()


@check("D-6", "joining an unknown world is an error")
def join_unknown(bench: Bench) -> None:
    """Join a world that nobody created."""
    with bench.connection() as agent:
        agent.bad("to JoinWorld of an unknown world", join_world=pb.JoinWorldRequest(world_name=UNKNOWN_NAME))


@check("D-6", "an unknown JoinWorld setting is an error")
def unknown_join_setting(bench: Bench) -> None:
    """Join with a setting that no server knows."""
    with bench.connection() as agent, bench.world(agent) as world:
        settings = {**bench.options.join_settings, **_unknown_setting()}
        request = pb.JoinWorldRequest(world_name=world, settings=settings)
        agent.bad(f"to JoinWorld with the setting {UNKNOWN_NAME!r}", join_world=request)
        agent.bad("to Step after a JoinWorld that failed", step=pb.StepRequest())


@check("D-8", "Step and Reset before JoinWorld are errors")
def not_joined(bench: Bench) -> None:
    """Step and reset on a fresh connection."""
    with bench.connection() as agent:
        agent.bad("to Step before JoinWorld", step=pb.StepRequest())
        agent.bad("to Reset before JoinWorld", reset=pb.ResetRequest(settings={}))


@check("D-8", "Step and Reset after LeaveWorld are errors")
def left(bench: Bench) -> None:
    """Step and reset on a connection that has left."""
    with bench.joined() as agent:
        agent.start()
        agent.leave()
        agent.bad("to Step after LeaveWorld", step=pb.StepRequest())
        agent.bad("to Reset after LeaveWorld", reset=pb.ResetRequest(settings={}))


@check("D-16", "LeaveWorld when not joined succeeds and does nothing")
def leave_unjoined(bench: Bench) -> None:
    """Leave twice."""
    with bench.connection() as agent:
        agent.good("to LeaveWorld when not joined", leave_world=pb.LeaveWorldRequest())
        agent.good("to LeaveWorld when not joined", leave_world=pb.LeaveWorldRequest())


@check("D-16", "after LeaveWorld the same connection can join again and begins anew")
def rejoin(bench: Bench) -> None:
    """Leave in a running sequence, join again."""
    with bench.joined() as agent:
        agent.start()
        world = agent.world or ""
        agent.leave()
        agent.join(world)
        agent.must_be_first("after joining again")


@check("D-16", "LeaveWorld does not destroy the world: another connection can join it")
def leave_keeps(bench: Bench) -> None:
    """Leave, and join from another connection."""
    bench.need_shared_world()
    with bench.joined() as agent, bench.connection() as other:
        agent.start()
        agent.leave()
        other.join(agent.world or "")
        other.start()
        other.leave()


@check("D-17", "destroying the world that this connection has joined is an error")
def destroy_joined(bench: Bench) -> None:
    """Destroy one's own world."""
    with bench.joined() as agent:
        agent.start()
        request = pb.DestroyWorldRequest(world_name=agent.world or "")
        agent.bad("to DestroyWorld of the joined world", destroy_world=request)
        agent.must_be_running("after a DestroyWorld that failed")


@check("D-17", "destroying an unknown world is an error")
def destroy_unknown(bench: Bench) -> None:
    """Destroy a world that nobody created."""
    with bench.connection() as agent:
        request = pb.DestroyWorldRequest(world_name=UNKNOWN_NAME)
        agent.bad("to DestroyWorld of an unknown world", destroy_world=request)


@check("D-17", "a destroyed world is gone")
def destroyed_is_gone(bench: Bench) -> None:
    """Destroy, then join."""
    bench.need_create()
    with bench.connection() as agent:
        name = bench.create(agent)
        agent.good("to DestroyWorld", destroy_world=pb.DestroyWorldRequest(world_name=name))
        if name == "":
            raise Skip('the world is named "", which may be the default world again')
        request = pb.JoinWorldRequest(world_name=name, settings=bench.options.join_settings)
        agent.bad("to JoinWorld of a destroyed world", join_world=request)
        agent.bad("to a second DestroyWorld", destroy_world=pb.DestroyWorldRequest(world_name=name))


@check(
    "D-17",
    "destroying a world that others have joined is refused, waits for them to leave, or makes their Step an error",
)
def destroy_joined_by_others(bench: Bench) -> None:
    """Destroy a world from another connection; the protocol allows three outcomes."""
    bench.need_two()
    with bench.joined(new=True) as agent, bench.connection() as other:
        agent.start()
        other.stream.send(pb.EnvironmentRequest(destroy_world=pb.DestroyWorldRequest(world_name=agent.world or "")))
        try:
            answer = other.stream.receive(QUIET)
        except NoAnswerError:  # delayed until the agent leaves
            agent.leave()
            answer = other.take("destroy_world")
            if answer.WhichOneof("payload") == "error":
                raise Failed("a destroy_world answer after everybody left", describe(answer)) from None
            return
        except StreamEndedError as error:
            raise Failed("an answer to DestroyWorld", str(error)) from None
        if answer.WhichOneof("payload") == "error":  # refused
            agent.step("after a DestroyWorld that was refused", agent.lawful())
            return
        agent.bad_step("to a Step in a destroyed world")
        agent.running = False
        agent.good("after its world was destroyed", leave_world=pb.LeaveWorldRequest())

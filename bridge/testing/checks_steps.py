"""Checks of Step and Reset: sequences, observations, actions (D-9 to D-14)."""

from __future__ import annotations

import math

from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import samples
from bridge.testing.bench import Bench, CheckedAgent, Failed, Skip, check, unused
from bridge.testing.checks_specs import rollout
from bridge.testing.wire import describe

__all__: list[str] = []

# D-9: the first Step of a sequence.


def _first(agent: CheckedAgent, when: str) -> None:
    """Send a first Step with an unknown action and all observations requested."""
    uids = sorted(agent.specs.observations)
    answer = agent.step(f"{when}, its actions ignored", agent.nonsense(), uids)
    whole = pb.EnvironmentResponse(step=answer)
    if answer.state != pb.RUNNING:
        raise Failed(f"RUNNING {when}", describe(whole))
    if sorted(answer.observations) != uids:
        raise Failed(f"the requested observations {uids} {when}", describe(whole))


@check("D-9", "the first Step after JoinWorld ignores its actions, gives RUNNING and the observations")
def first_after_join(bench: Bench) -> None:
    """Join and step."""
    with bench.joined() as agent:
        _first(agent, "to the first Step after JoinWorld")


@check("D-9", "the first Step after Reset ignores its actions, gives RUNNING and the observations")
def first_after_reset(bench: Bench) -> None:
    """Reset a running sequence and step."""
    with bench.joined() as agent:
        agent.start()
        agent.reset()
        _first(agent, "to the first Step after Reset")


@check("D-9", "the first Step after a sequence's end ignores its actions, gives RUNNING and the observations")
def first_after_end(bench: Bench) -> None:
    """Play to an end and step."""
    played = rollout(bench)
    if played.after_end:
        raise Failed("RUNNING to the first Step after a sequence's end, its actions ignored", played.after_end)
    played.need_end()


# D-10: requested observations.


@check("D-10", "an unknown observation UID is an error that names it, on the first Step too")
def unknown_observation(bench: Bench) -> None:
    """Request a UID that is in no spec."""
    with bench.joined() as agent:
        uid = unused(agent.specs.observations)
        for when in ("on the first Step", "in a running sequence"):
            status = agent.bad_step(f"to the unknown observation {uid} {when}", observations=[uid])
            if str(uid) not in status.message:
                raise Failed(f"an error that names the unknown observation {uid} {when}", repr(status.message))
            agent.to_running()


@check("D-10", "what is requested comes, what is not does not, and duplicates are harmless")
def requested(bench: Bench) -> None:
    """Request no observations, each one, all, and all twice."""
    with bench.joined() as agent:
        uids = sorted(agent.specs.observations)
        for wanted in ([], *([uid] for uid in uids), uids, uids * 2):
            agent.running = False
            agent.reset()
            answer = agent.start(wanted)
            if sorted(answer.observations) != sorted(set(wanted)):
                got = describe(pb.EnvironmentResponse(step=answer))
                raise Failed(f"just the observations {sorted(set(wanted))} when {wanted} are requested", got)


# D-11: actions.


def _changed(agent: CheckedAgent, uid: int, tensor: pb.Tensor) -> dict[int, pb.Tensor]:
    return {**agent.lawful(), uid: tensor}


def _refused(agent: CheckedAgent, uid: int, tensor: pb.Tensor, what: str) -> None:
    agent.to_running()
    agent.bad_step(f"to the action {agent.specs.actions[uid].name!r} {what}", _changed(agent, uid, tensor))
    agent.must_be_running(f"after the action {agent.specs.actions[uid].name!r} {what}")


def _accepted(agent: CheckedAgent, uid: int, tensor: pb.Tensor, what: str) -> None:
    agent.to_running()
    agent.step(f"to the action {agent.specs.actions[uid].name!r} {what}", _changed(agent, uid, tensor))


def _actions(agent: CheckedAgent) -> dict[int, pb.TensorSpec]:
    if not agent.specs.actions:
        raise Skip("the world has no actions")
    agent.lawful()
    return agent.changeable()


@check("D-11", "actions that keep to their specs are accepted")
def lawful_actions(bench: Bench) -> None:
    """Send random actions within the specs."""
    with bench.joined() as agent:
        if bench.unlawful and not bench.cache.get("unclear"):
            raise Failed("actions out of their specs to be accepted", bench.unlawful)
        for _ in range(5):
            agent.to_running()
            agent.step("to lawful actions", agent.lawful())


@check("D-11", "an unknown action UID is an error")
def unknown_action(bench: Bench) -> None:
    """Send a UID that is in no spec, alone and with valid actions."""
    with bench.joined() as agent:
        agent.start()
        agent.must_be_running("in a running sequence")
        agent.bad_step("to an unknown action next to lawful ones", {**agent.lawful(), **agent.nonsense()})


@check("D-11", "an action of another dtype is an error")
def other_dtype(bench: Bench) -> None:
    """Send floats for integers, and other wrong dtypes."""
    with bench.joined() as agent:
        for uid, spec in _actions(agent).items():
            wrong = [
                pb.DOUBLE if spec.dtype != pb.DOUBLE else pb.FLOAT,
                pb.STRING if spec.dtype != pb.STRING else pb.INT32,
            ]
            for dtype in wrong:
                shape = samples.concrete(spec)
                values = [("" if dtype == pb.STRING else 0)] * math.prod(shape)
                tensor = samples.pack(dtype, values, shape)
                _refused(
                    agent, uid, tensor, f"as {samples.PAYLOAD[dtype]} instead of {samples.PAYLOAD.get(spec.dtype)}"
                )


@check("D-11", "an action of a wrong shape is an error, a scalar sent as [1] too")
def wrong_shape(bench: Bench) -> None:
    """Send one dimension too many, and one element too many."""
    with bench.joined() as agent:
        for uid, spec in _actions(agent).items():
            made = agent.lawful().get(uid)
            if made is None:
                continue
            longer = pb.Tensor()
            longer.CopyFrom(made)
            longer.shape.append(1)
            _refused(agent, uid, longer, f"of the shape {list(longer.shape)} instead of {list(spec.shape)}")
            if spec.shape and all(size > 0 for size in spec.shape) and spec.dtype != pb.PROTO:
                shape = [*spec.shape[:-1], spec.shape[-1] + 1]
                kind = made.WhichOneof("payload")
                element = list(getattr(made, kind).array)[:1] if spec.dtype not in (pb.INT8, pb.UINT8) else None
                fill = element[0] if element else samples.elements(made)[0]  # type: ignore[index]
                tensor = samples.pack(spec.dtype, [fill] * math.prod(shape), shape)
                _refused(agent, uid, tensor, f"of the shape {shape} instead of {list(spec.shape)}")


@check("D-11", "two negative dimensions are an error")
def two_variable(bench: Bench) -> None:
    """Send -1 for two dimensions."""
    with bench.joined() as agent:
        found = False
        for uid, spec in _actions(agent).items():
            made = agent.lawful().get(uid)
            if made is not None and len(spec.shape) >= 2:
                found = True
                made.shape[0] = made.shape[1] = -1
                _refused(agent, uid, made, f"of the shape {list(made.shape)}")
        if not found:
            raise Skip("no action has two dimensions")


@check("D-11", "one negative dimension that works out to the spec's shape is accepted")
def one_variable(bench: Bench) -> None:
    """Send -1 for one dimension."""
    with bench.joined() as agent:
        found = False
        for uid, spec in _actions(agent).items():
            for axis in range(len(spec.shape)):
                made = agent.lawful().get(uid)
                if made is None or not math.prod(samples.concrete(spec)):
                    continue
                found = True
                made.shape[axis] = -1
                _accepted(agent, uid, made, f"of the shape {list(made.shape)} with all of its elements")
        if not found:
            raise Skip("no action has a dimension")


@check("D-11", "a single element fills the whole shape")
def broadcast(bench: Bench) -> None:
    """Send a single element with the full shape."""
    with bench.joined() as agent:
        found = False
        for uid, spec in _actions(agent).items():
            shape = samples.concrete(spec)
            if spec.dtype == pb.PROTO or math.prod(shape) < 2:
                continue
            value = samples.common(spec, bench.text)
            if value is None:
                continue
            found = True
            _accepted(
                agent, uid, samples.pack(spec.dtype, [value], shape), f"of one element for the shape {list(shape)}"
            )
        if not found:
            raise Skip("no action has two elements that may have one value")


def _out_of_range(bench: Bench, which: str) -> None:
    with bench.joined() as agent:
        found = False
        for uid, spec in _actions(agent).items():
            for tensor in samples.beyond(spec, which, bench.generator):
                found = True
                _refused(agent, uid, tensor, f"with an element {'below' if which == 'min' else 'above'} its {which}")
        if not found:
            raise Skip(f"no action has a {which} that can be exceeded")


@check("D-11", "an action below its min is an error")
def below(bench: Bench) -> None:
    """Send one element below the range."""
    _out_of_range(bench, "min")


@check("D-11", "an action above its max is an error")
def above(bench: Bench) -> None:
    """Send one element above the range."""
    _out_of_range(bench, "max")


@check("D-12", "a Step in a running sequence that lacks an action is applied, or an error where the action is needed")
def missing_actions(bench: Bench) -> None:
    """Leave out all actions, then each alone."""
    with bench.joined() as agent:
        if not agent.specs.actions:
            raise Skip("the world has no actions")
        lawful = agent.lawful()
        needed = set(bench.options.required_actions)
        unknown = needed - {spec.name for spec in agent.specs.actions.values()}
        if unknown:
            raise Failed(f"specs of the required actions {sorted(unknown)}", "none of these names")
        for left_out in (set(lawful), *({uid} for uid in lawful)):
            names = sorted(agent.specs.actions[uid].name for uid in left_out)
            agent.to_running()
            actions = {uid: tensor for uid, tensor in agent.lawful().items() if uid not in left_out}
            request = pb.StepRequest(actions=actions)
            answer = agent.ask(step=request)
            if answer.WhichOneof("payload") == "error":
                agent.must_be_running(f"after a Step without the actions {names}")
            elif needed & set(names):
                raise Failed(f"an error to a Step without the required {sorted(needed & set(names))}", describe(answer))
            else:
                agent.running = answer.step.state == pb.RUNNING


# D-13, D-14: the end of sequences.


@check("D-13", "states are RUNNING, TERMINATED or INTERRUPTED, and never two non-RUNNING ones in a row")
def states(bench: Bench) -> None:
    """Play across the ends of sequences."""
    played = rollout(bench)
    if played.bad_state:
        raise Failed(*played.bad_state)
    if played.error:
        raise Failed("an answer to every lawful Step", played.error)
    if played.after_end and "state" in played.after_end:
        raise Failed("RUNNING after a non-RUNNING state", played.after_end)
    played.need_end()


@check("D-14", "Reset sends the specs back, the same ones as long as nothing is set")
def reset_specs(bench: Bench) -> None:
    """Compare the specs by name: UIDs may change at a Reset."""
    with bench.joined() as agent:
        agent.start()
        before = _by_name(agent.specs)
        after = _by_name(agent.reset())
        if after != before:
            raise Failed(f"the specs of JoinWorld in the Reset answer: {sorted(before)}", f"{sorted(after)}")


def _by_name(specs: pb.ActionObservationSpecs) -> dict[str, bytes]:
    return {
        f"{group} {spec.name}": spec.SerializeToString(deterministic=True)
        for group, members in (("action", specs.actions), ("observation", specs.observations))
        for spec in members.values()
    }


@check("D-14", "Reset ends the sequence: the next Step is a first one")
def reset_ends(bench: Bench) -> None:
    """Reset a running sequence, then step twice."""
    with bench.joined() as agent:
        agent.start()
        agent.reset()
        agent.must_be_first("after Reset")
        agent.must_be_running("after the first Step after Reset")


@check("D-14", "Reset when no sequence is running does nothing and succeeds, also twice")
def reset_idle(bench: Bench) -> None:
    """Reset right after JoinWorld, twice, and step."""
    with bench.joined() as agent:
        before = _by_name(agent.specs)
        for _ in range(2):
            if _by_name(agent.reset()) != before:
                raise Failed("the specs of JoinWorld in the Reset answer", "other ones")
        agent.must_be_first("after Reset")
        agent.must_be_running("after the first Step after Reset")

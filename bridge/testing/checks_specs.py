"""Checks of specs, and of observations against their specs (D-7, D-19 to D-21); they share one rollout."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter

import numpy as np

from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import samples
from bridge.testing.bench import Bench, CheckedAgent, Failed, Skip, check
from bridge.testing.wire import describe

__all__ = ["PlayedWorld", "rollout"]


@dataclasses.dataclass
class PlayedWorld:
    """The record of playing a world with valid actions and all observations requested."""

    steps: int = 0
    ends: int = 0
    terminations: int = 0
    error: str = ""  # why the play ended early
    bad_state: tuple[str, str] | None = None
    after_end: str = ""  # what was wrong with a first Step after an end
    missing: str = ""  # requested observations that were missing
    problems: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)  # the first of each kind

    def need_end(self) -> None:
        """Skip if no sequence reached its end."""
        if not self.ends:
            raise Skip(f"no sequence ended within {self.steps} steps{': ' + self.error if self.error else ''}")

    def fail_on(self, kind: str) -> None:
        """Fail if a problem of a kind was recorded."""
        if kind in self.problems:
            raise Failed(*self.problems[kind])


def rollout(bench: Bench) -> PlayedWorld:
    """Play once for all checks that need it: to the second end of a sequence, or for the maximum of steps."""
    if "rollout" not in bench.cache:
        bench.cache["rollout"] = fresh = PlayedWorld()
        with bench.joined() as agent:
            agent.lawful()  # raises Skip if there are no valid actions to play with
            try:
                _play(bench, agent, fresh)
            except Failed as failure:
                fresh.error = str(failure)
    played: PlayedWorld = bench.cache["rollout"]
    if bench.unlawful:
        raise Skip(bench.unlawful)
    return played


def _play(bench: Bench, agent: CheckedAgent, played: PlayedWorld) -> None:
    uids = sorted(agent.specs.observations)
    deadline = time.monotonic() + max(bench.options.timeout, 5.0)
    ended = False
    while played.steps < bench.options.steps and played.ends < 3 and time.monotonic() < deadline:
        first = not agent.running
        actions = agent.nonsense() if first else agent.lawful()
        answer = agent.ask(step=pb.StepRequest(actions=actions, requested_observations=uids))
        played.steps += 1
        if answer.WhichOneof("payload") == "error":
            if ended and first and not played.after_end:
                played.after_end = describe(answer)
                agent.start()
                ended = False
                continue
            raise Failed("a step answer to a lawful Step", describe(answer))
        step = answer.step
        state = step.state
        if state not in (pb.RUNNING, pb.TERMINATED, pb.INTERRUPTED):
            played.bad_state = ("the state RUNNING, TERMINATED or INTERRUPTED", describe(answer))
            return
        if first and state != pb.RUNNING:
            if ended:
                played.after_end = played.after_end or describe(answer)
                return
            raise Failed("RUNNING from the first Step of a sequence", describe(answer))
        if sorted(step.observations) != uids and not played.missing:
            played.missing = describe(answer)
        _look(agent, step, played)
        agent.running = state == pb.RUNNING
        ended = state != pb.RUNNING
        played.ends += ended
        played.terminations += state == pb.TERMINATED


def _look(agent: CheckedAgent, step: pb.StepResponse, played: PlayedWorld) -> None:
    """Compare each observation with its spec; record the first problem of each kind."""
    for uid, tensor in step.observations.items():
        spec = agent.specs.observations.get(uid)
        if spec is None:
            played.problems.setdefault("unknown", ("observations out of the specs", f"one with the UID {uid}"))
            continue
        name = f"the observation {spec.name!r}"
        expected = samples.PAYLOAD.get(spec.dtype, "")
        got = tensor.WhichOneof("payload")
        if got != expected:
            played.problems.setdefault("dtype", (f"{name} as {expected}, as its spec says", f"{got}"))
            continue
        wrong = samples.shape_fits(spec, tensor)
        if wrong:
            played.problems.setdefault("shape", (f"{name} to fit its spec", wrong))
            continue
        values = samples.elements(tensor)
        if values is not None:
            _in_range(spec, values, name, played)
        if spec.name == "discount" and not spec.shape and values is not None and values.size == 1:
            if values[0] == 0 and step.state != pb.TERMINATED:
                state = pb.EnvironmentStateType.Name(step.state)
                played.problems.setdefault("discount", ("discount 0.0 only with TERMINATED", f"0.0 with {state}"))
            if values[0] != 0 and step.state == pb.TERMINATED:
                played.problems.setdefault("terminal discount", ("discount 0.0 with TERMINATED", f"{values[0]}"))


def _in_range(spec: pb.TensorSpec, values: samples.Array, name: str, played: PlayedWorld) -> None:
    for which, beyond in (("min", np.less), ("max", np.greater)):
        edge = samples.bound(spec, which)
        if edge is None:
            continue
        if edge.ndim and values.size not in (1, edge.size):
            continue
        if np.any(beyond(values, edge.ravel() if edge.ndim else edge)):
            at = f"{values.min()} to {values.max()}"
            played.problems.setdefault("range", (f"{name} within its {which} {edge.tolist()}", at))


def _specs(bench: Bench) -> list[tuple[str, pb.TensorSpec]]:
    with bench.joined() as agent:
        return [
            (f"the {group} {spec.name!r}", spec)
            for group, members in (("action", agent.specs.actions), ("observation", agent.specs.observations))
            for spec in members.values()
        ]


@check("D-7", "names are unique among the actions and among the observations")
def unique_names(bench: Bench) -> None:
    """Check the specs."""
    twice = [name for name, times in Counter(name for name, _ in _specs(bench)).items() if times > 1]
    if twice:
        raise Failed("unique names", f"twice: {', '.join(twice)}")


@check("D-7", "a dot in a name only nests: no empty parts, and never both `a` and `a.b`")
def nesting(bench: Bench) -> None:
    """Check the names."""
    with bench.joined() as agent:
        for group, members in (("action", agent.specs.actions), ("observation", agent.specs.observations)):
            names = {spec.name for spec in members.values()}
            for name in sorted(names):
                parts = name.split(".")
                if "" in parts:
                    raise Failed(f"names of {group}s whose parts between dots are not empty", repr(name))
                for length in range(1, len(parts)):
                    parent = ".".join(parts[:length])
                    if parent in names:
                        raise Failed(f"no {group} that is also the parent of another", f"{parent!r} and {name!r}")


@check("D-7", "every spec has a dtype, and at most one variable dimension")
def whole_specs(bench: Bench) -> None:
    """Check dtypes and shapes."""
    for name, spec in _specs(bench):
        if spec.dtype not in samples.PAYLOAD:
            raise Failed(f"a dtype of {name}", str(spec.dtype))
        if sum(size < 0 for size in spec.shape) > 1:
            raise Failed(f"at most one variable dimension of {name}", f"the shape {list(spec.shape)}")


@check("D-7", "UIDs stay the same across sequences")
def stable_uids(bench: Bench) -> None:
    """Play further with the UIDs from JoinWorld."""
    with bench.joined() as agent:
        if not agent.specs.observations and not agent.specs.actions:
            raise Failed("specs of actions and observations", "none of either")
    played = rollout(bench)
    if "unknown" in played.problems:
        raise Failed(*played.problems["unknown"])
    if played.missing:
        raise Failed("all observations under the UIDs of JoinWorld", played.missing)
    if played.error:
        raise Failed("answers to Steps with the UIDs of JoinWorld", played.error)
    played.need_end()


@check("D-19", "observations have their spec's dtype")
def observation_dtypes(bench: Bench) -> None:
    """Check the observations of the play."""
    _observed(bench, "dtype")


@check("D-19", "observations have their spec's shape and as many elements; scalars have exactly one")
def observation_shapes(bench: Bench) -> None:
    """Check the observations of the play."""
    _observed(bench, "shape")


def _observed(bench: Bench, kind: str) -> None:
    played = rollout(bench)
    played.fail_on(kind)
    if not played.steps or (played.error and played.steps < 2):
        raise Skip(f"nothing could be played: {played.error}")


@check("D-19", "an action whose elements do not fill its shape is an error")
def ragged_action(bench: Bench) -> None:
    """Send one element too few, or one too many."""
    with bench.joined() as agent:
        found = False
        for uid, spec in agent.changeable().items():
            made = agent.lawful().get(uid)
            if made is None or spec.dtype == pb.PROTO:
                continue
            shape = samples.concrete(spec)
            size = math.prod(shape)
            value = samples.common(spec, bench.text)
            if value is None:
                continue
            for wrong in {size + 1, size - 1} - {0, 1}:
                found = True
                agent.to_running()
                tensor = samples.pack(spec.dtype, [value] * wrong, shape)
                what = f"of {wrong} elements for the shape {list(shape)}"
                agent.bad_step(f"to the action {spec.name!r} {what}", {**agent.lawful(), uid: tensor})
                agent.must_be_running(f"after the action {spec.name!r} {what}")
        if not found:
            raise Skip("no action can be sent ragged")


@check("D-20", "ranges are of the spec's type, scalar or of its shape, and min is not above max")
def ranges(bench: Bench) -> None:
    """Check min and max."""
    found = False
    for name, spec in _specs(bench):
        for which in ("min", "max"):
            value = getattr(spec, which)
            kind = value.WhichOneof("payload")
            if kind is None:
                continue
            found = True
            expected = samples.PAYLOAD.get(spec.dtype)
            if kind != expected:
                raise Failed(f"{which} of {name} as {expected}, the spec's type", kind)
            size = samples.count(value)
            variable = any(length < 0 for length in spec.shape)
            if variable and size != 1:
                raise Failed(f"a scalar {which} of {name}, whose shape is variable", f"{size} elements")
            if size not in (1, math.prod(samples.concrete(spec))):
                raise Failed(f"{which} of {name} as a scalar or of the shape {list(spec.shape)}", f"{size} elements")
            edge = samples.bound(spec, which)
            if edge is not None:
                _superfluous(bench, name, spec, which, edge)
        low, high = samples.bound(spec, "min"), samples.bound(spec, "max")
        if low is not None and high is not None and np.any(low > high):
            raise Failed(f"min of {name} not above its max", f"{low.tolist()} and {high.tolist()}")
    if not found:
        raise Skip("no spec has a range")


def _superfluous(bench: Bench, name: str, spec: pb.TensorSpec, which: str, edge: samples.Array) -> None:
    if edge.dtype.kind == "f":
        limit = -np.inf if which == "min" else np.inf
    else:
        limit = getattr(np.iinfo(edge.dtype), which)
        if which == "min" and edge.dtype.kind == "u":
            return
    if np.all(edge == limit):
        bench.note(f"{which} of {name} says nothing: it is the type's own limit and can be left out")


@check("D-20", "min and max are inclusive: actions exactly at them are accepted")
def inclusive(bench: Bench) -> None:
    """Send exactly the bounds."""
    with bench.joined() as agent:
        found = False
        for uid, spec in agent.changeable().items():
            for which in ("min", "max"):
                tensor = samples.at_bound(spec, which)
                if tensor is None:
                    continue
                actions = {**agent.lawful(), uid: tensor}
                found = True
                agent.to_running()
                agent.step(f"to the action {spec.name!r} at its {which}", actions)
        if not found:
            raise Skip("no action has a range")


@check("D-20", "observations are within their ranges")
def observations_in_range(bench: Bench) -> None:
    """Check the observations of the play."""
    _observed(bench, "range")


@check("D-21", "reward is a number, and discount is 0.0 only with TERMINATED")
def reward_and_discount(bench: Bench) -> None:
    """Check the observations of the play."""
    with bench.joined() as agent:
        specs = {spec.name: spec for spec in agent.specs.observations.values() if spec.name in ("reward", "discount")}
    if not specs:
        raise Skip("the world gives neither reward nor discount, which is lawful")
    for name, spec in specs.items():
        if spec.dtype not in samples.NUMPY:
            raise Failed(f"{name} as a number", samples.PAYLOAD.get(spec.dtype, f"the dtype {spec.dtype}"))
    played = rollout(bench)
    played.fail_on("discount")
    if "terminal discount" in played.problems:
        expected, got = played.problems["terminal discount"]
        bench.note(f"expected {expected}, got {got}")

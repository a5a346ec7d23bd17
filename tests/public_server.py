"""A small, correct dm_env_rpc server on the public `dm-env-rpc` messages alone, and its faults one by one.

It stands for "a server that is not ours": nested observation names, ranges, text, a variable dimension, several
worlds, properties or none. Nothing of `bridge` is imported. `PublicServer(faults={"two_answers"})` makes it wrong in
one way; `FAULTS` lists them, and `self.fault(…)` in the code marks what each does wrong.
"""

import collections
import itertools
import threading
import traceback
from concurrent import futures

import grpc
import numpy as np
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from dm_env_rpc.v1 import dm_env_rpc_pb2_grpc, tensor_utils
from dm_env_rpc.v1.extensions import properties_pb2
from google.protobuf import any_pb2
from google.rpc import code_pb2 as codes

RUNNING, TERMINATED, INTERRUPTED = 1, 2, 3
NUMERIC = {  # by DataType: (numpy dtype, field of TensorSpec.Value)
    pb.FLOAT: (np.float32, "floats"),
    pb.DOUBLE: (np.float64, "doubles"),
    pb.INT8: (np.int8, "int8s"),
    pb.INT32: (np.int32, "int32s"),
    pb.INT64: (np.int64, "int64s"),
    pb.UINT8: (np.uint8, "uint8s"),
    pb.UINT32: (np.uint32, "uint32s"),
    pb.UINT64: (np.uint64, "uint64s"),
}
PAYLOADS = {**{dtype: field for dtype, (_, field) in NUMERIC.items()}, pb.BOOL: "bools", pb.STRING: "strings"}

# What each fault breaks, by the requirement that says so.
FAULTS = {
    "D-1": "two_answers answers_swapped reset_answered_as_join unset_leave silent_leave second_stream_hangs",
    "D-2": "error_ends_stream error_code_ok error_without_message error_restarts_sequence failed_join_leaves "
    "empty_request_ends_stream",
    "D-3": "same_name_twice create_ignores_settings join_only_by_creator no_worlds",
    "D-4": "no_worlds",
    "D-5": "reset_world_hits_all destroy_hits_all",
    "D-6": "join_twice join_unknown join_ignores_settings no_specs",
    "D-7": "duplicate_names parent_has_value empty_name_part uids_change no_dtype odd_dtype no_specs",
    "D-8": "step_unjoined reset_unjoined step_after_leave",
    "D-9": "first_step_applies first_step_interrupted first_step_blind step_after_end_applies",
    "D-10": "unknown_observation unknown_observation_first error_without_uid returns_all duplicates_refused",
    "D-11": "any_action_uid any_dtype any_shape scalar_as_vector two_variable above_max below_min "
    "no_variable no_broadcast lawful_refused",
    "D-12": "missing_action missing_action_ends_stream",
    "D-13": "invalid_state two_ends",
    "D-14": "reset_without_specs reset_keeps_running reset_twice_refused reset_applies",
    "D-15": "reset_world_unknown reset_world_at_once reset_world_silent reset_world_interrupts_caller "
    "reset_world_waits_for_dead reset_world_waits_for_leaver reset_world_joined_only interrupted_twice "
    "interrupted_blind",
    "D-16": "leave_unjoined_refused no_rejoin leave_destroys",
    "D-17": "destroy_joined destroy_unknown destroyed_goes_on destroyed_joinable",
    "D-18": "property_unknown property_twice property_reads_all property_writes_all property_lists_all "
    "property_other_dtype property_lost_after_join property_any_value extension_ends_stream property_other_kind "
    "property_wrong_code unknown_extension property_garbage property_fails",
    "D-19": "ragged scalar_of_two other_dtype other_shape too_few_elements",
    "D-20": "range_exclusive range_of_other_type range_of_wrong_length range_on_variable range_upside_down "
    "observation_out_of_range",
    "D-21": "discount_zero_early discount_zero_interrupted reward_is_text",
    "D-22": "one_sequence_for_all second_agent_silent",
    "D-25": "drops_when_ahead stops_at_end",
}
EVERY_FAULT = sorted({fault for faults in FAULTS.values() for fault in faults.split()})


class Refused(Exception):  # noqa: N818 - becomes an answer
    def __init__(self, code, message):
        super().__init__(message)
        self.code, self.message = code, message


class EndStream(Exception):  # noqa: N818 - a fault
    pass


class Unanswered(Exception):  # noqa: N818 - a fault
    pass


def tensor_spec(name, dtype, shape=(), low=None, high=None):
    spec = pb.TensorSpec(name=name, dtype=dtype, shape=shape)
    for bound, field in ((low, spec.min), (high, spec.max)):
        if bound is not None:
            set_range(field, dtype, bound)
    return spec


def set_range(field, dtype, bound):
    numpy_dtype, payload = NUMERIC[dtype]
    values = np.asarray(bound, numpy_dtype).ravel()
    if dtype in (pb.INT8, pb.UINT8):
        getattr(field, payload).array = values.tobytes()
    else:
        getattr(field, payload).array[:] = values.tolist()


def get_range(field):
    payload = field.WhichOneof("payload")
    if payload is None:
        return None
    dtype = next(np_dtype for np_dtype, name in NUMERIC.values() if name == payload)
    array = getattr(field, payload).array
    return np.frombuffer(array, dtype) if isinstance(array, bytes) else np.array(list(array), dtype)


ARM = np.array([1, 2, 3], np.float32)
REWARD = {20: tensor_spec("reward", pb.DOUBLE), 21: tensor_spec("discount", pb.DOUBLE, (), 0.0, 1.0)}
# (actions, observations) by kind of world; UIDs are of all sizes on purpose.
KINDS = {
    "full": (
        {
            0: tensor_spec("move", pb.INT32, (), 0, 3),
            7: tensor_spec("arm.torque", pb.FLOAT, (3,), -ARM, ARM),
            8: tensor_spec("arm.grip", pb.DOUBLE, (2, 2)),
            2**64 - 1: tensor_spec("say", pb.STRING),
        },
        {
            0: tensor_spec("position", pb.INT64, (2,)),
            2**63: tensor_spec("camera.rgb", pb.UINT8, (4, 3, 3)),
            5: tensor_spec("camera.depth", pb.FLOAT, (4, 3), 0.0),
            6: tensor_spec("camera.pose.angles", pb.FLOAT, (3,), -ARM, ARM),
            9: tensor_spec("heard", pb.STRING),
            10: tensor_spec("events", pb.INT32, (-1,), 0, 100),
            11: tensor_spec("danger", pb.BOOL),
            12: tensor_spec("temperature", pb.INT8, (), -100, 100),
            **REWARD,
        },
    ),
    "discrete": (
        {1: tensor_spec("action", pb.INT64, (), 0, 3)},
        {1: tensor_spec("observation", pb.FLOAT, (4,), -1, 1), **REWARD},
    ),
    "vector": (
        {1: tensor_spec("action", pb.FLOAT, (2,), -1, 1)},
        {1: tensor_spec("observation", pb.DOUBLE, (2, 3)), **REWARD},
    ),
    "encoded": ({1: tensor_spec("blob", pb.UINT8, (-1,))}, {1: tensor_spec("length", pb.INT64)}),
    "bare": ({3: tensor_spec("move", pb.UINT8, (), 0, 3)}, {4: tensor_spec("position", pb.INT64, (2,))}),
}


class World:
    def __init__(self, name, kind, creator):
        self.name, self.kind, self.creator = name, kind, creator
        self.destroyed = False
        self.agents = []


class Agent:
    """One connection: joined or not, and where its sequence is."""

    def __init__(self):
        self.world = None
        self.running = False
        self.interrupted = False  # another connection reset the world
        self.interrupted_again = False  # a fault
        self.sequences = 0
        self.steps = 0
        self.ended = False  # the sequence ended by itself
        self.just_reset = False
        self.heard = ""
        self.moved = 0
        self.pending = 0  # requests that wait behind this one
        self.alive = True


class PublicServer(dm_env_rpc_pb2_grpc.EnvironmentServicer):
    """The server. Start and stop it with `with PublicServer() as server:`; `server.url` says where it is.

    Args:
        faults: Names out of FAULTS.
        kind: What worlds are like unless CreateWorld's setting `kind` says otherwise: a key of KINDS.
        episode_length: Steps of a sequence. Odd sequences end TERMINATED, even ones INTERRUPTED.
        default_world: Whether world "" is there from the start.
        create: Whether CreateWorld is served.
        max_agents: Agents a world takes.
        properties: Whether the property extension is served; else it is UNIMPLEMENTED like any extension.
        max_worlds: Worlds at once; None: any number.
        max_streams: Streams at once, the next is refused; None: any number.
        actions_required: Whether a Step that lacks an action is refused; else the action before is kept.
    """

    def __init__(
        self,
        faults=(),
        *,
        kind="full",
        episode_length=4,
        default_world=True,
        create=True,
        max_agents=2,
        properties=True,
        actions_required=False,
        max_worlds=None,
        max_streams=None,
        port=0,
    ):
        unknown = set(faults) - set(EVERY_FAULT)
        if unknown:
            raise ValueError(f"no such faults: {sorted(unknown)}")
        self.faults = frozenset(faults)
        self.kind, self.episode_length, self.max_agents = kind, episode_length, max_agents
        self.create_served, self.properties_served = create, properties
        self.actions_required = actions_required
        self.max_worlds, self.max_streams, self.streams, self.opened = max_worlds, max_streams, 0, 0
        self.volume = 0.5
        self.lock = threading.Condition()
        self.stopped = False
        self.names = itertools.count(1)
        self.worlds = {"": World("", kind, None)} if default_world else {}
        self.requests = collections.Counter()  # what was asked, for tests of clients
        self._pool = futures.ThreadPoolExecutor(1 if self.fault("second_stream_hangs") else 32)
        self._server = grpc.server(self._pool, options=[("grpc.so_reuseport", 0)])
        dm_env_rpc_pb2_grpc.add_EnvironmentServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.url = f"grpc://127.0.0.1:{self.port}"

    def fault(self, name):
        assert name in EVERY_FAULT, name
        return name in self.faults

    def start(self):
        self._server.start()
        return self

    def stop(self):
        with self.lock:
            self.stopped = True
            self.lock.notify_all()
        assert self._server.stop(0).wait(10)
        self._pool.shutdown()

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.stop()

    # One stream.

    def Process(self, request_iterator, context):  # noqa: N802 - the service's name
        agent = Agent()

        with self.lock:
            full = self.max_streams is not None and self.streams >= self.max_streams
            self.streams += not full
            self.opened += not full
        if full:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self.max_streams} streams are open already")

        def gone():
            with self.lock:
                agent.alive = False
                self.streams -= 1
                if not self.fault("reset_world_waits_for_dead"):
                    self.leave(agent)
                self.lock.notify_all()

        context.add_callback(gone)
        held = None
        for request in self.read_ahead(request_iterator, agent):
            try:
                response = self.answer(agent, request)
            except Unanswered:
                continue
            except EndStream:
                return
            if self.fault("answers_swapped") and agent.pending and held is None and response.HasField("step"):
                held = response
                continue
            yield response
            if held is not None:
                yield held
                held = None
            if self.fault("two_answers") and response.HasField("step"):
                yield response
            if self.fault("error_ends_stream") and response.HasField("error"):
                return
        if held is not None:
            yield held

    def read_ahead(self, request_iterator, agent):
        """Requests one by one; where a fault needs it, with a look at how many wait."""
        if not self.faults & {"answers_swapped", "drops_when_ahead"}:
            yield from request_iterator
            return
        waiting = collections.deque()
        arrived, done = threading.Condition(), []

        def read():
            try:
                for request in request_iterator:
                    with arrived:
                        waiting.append(request)
                        arrived.notify()
            except grpc.RpcError:
                pass  # the client went
            finally:
                with arrived:
                    done.append(True)
                    arrived.notify()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        while True:
            with arrived:
                arrived.wait_for(lambda: waiting or done, 60)
                if waiting and not done:
                    arrived.wait(0.02)  # see whether the client sends ahead
                if not waiting:
                    break
                request = waiting.popleft()
                agent.pending = len(waiting)
            yield request
        thread.join(60)

    def answer(self, agent, request):
        kind = request.WhichOneof("payload")
        with self.lock:
            self.requests[kind] += 1
            response = pb.EnvironmentResponse()
            try:
                if kind is None:
                    if self.fault("empty_request_ends_stream"):
                        raise EndStream
                    raise Refused(codes.INVALID_ARGUMENT, "expected one of the request kinds, got none: set one")
                if self.fault("drops_when_ahead") and agent.pending > 20:
                    raise EndStream
                answer = getattr(self, f"on_{kind}")(agent, getattr(request, kind))
            except Refused as refusal:
                code = codes.OK if self.fault("error_code_ok") else refusal.code
                message = "" if self.fault("error_without_message") else refusal.message
                response.error.code, response.error.message = code, message
                if self.fault("error_restarts_sequence"):
                    agent.running = False
                return response
            except (EndStream, Unanswered):
                raise
            except Exception:
                response.error.code, response.error.message = codes.INTERNAL, traceback.format_exc()
                return response
            if kind == "reset" and self.fault("reset_answered_as_join"):
                response.join_world.specs.CopyFrom(answer.specs)
            elif kind == "leave_world" and self.fault("unset_leave"):
                pass
            else:
                getattr(response, kind).CopyFrom(answer)
                getattr(response, kind).SetInParent()
            return response

    # Worlds.

    def find(self, name):
        world = self.worlds.get(name)
        if world is None:
            raise Refused(
                codes.NOT_FOUND, f"no world {name!r}; there are {sorted(self.worlds)}: send CreateWorld first"
            )
        return world

    def on_create_world(self, agent, request):
        if not self.create_served or self.fault("no_worlds"):
            raise Refused(codes.UNIMPLEMENTED, 'this server has one world: join ""')
        if self.max_worlds is not None and len(self.worlds) >= self.max_worlds:
            raise Refused(codes.RESOURCE_EXHAUSTED, f"{self.max_worlds} worlds at most: destroy one first")
        kind = self.kind
        for name, tensor in request.settings.items():
            if name == "kind" and tensor.strings.array[:1] and tensor.strings.array[0] in KINDS:
                kind = tensor.strings.array[0]
            elif not self.fault("create_ignores_settings"):
                raise Refused(
                    codes.INVALID_ARGUMENT, f"cannot serve the setting {name!r}; there is kind: {sorted(KINDS)}"
                )
        name = "world-1" if self.fault("same_name_twice") else f"world-{next(self.names)}"
        self.worlds[name] = World(name, kind, agent)
        return pb.CreateWorldResponse(world_name=name)

    def on_join_world(self, agent, request):
        if agent.world is not None and not self.fault("join_twice"):
            name = agent.world.name
            if self.fault("failed_join_leaves"):
                self.leave(agent)
            raise Refused(codes.FAILED_PRECONDITION, f"this connection has joined {name!r}: send LeaveWorld first")
        if self.fault("no_worlds"):
            raise Refused(codes.NOT_FOUND, "no world is ever there")
        if self.fault("join_unknown") and request.world_name not in self.worlds:
            self.worlds[request.world_name] = World(request.world_name, self.kind, agent)
        world = self.find(request.world_name)
        if self.fault("join_only_by_creator") and world.creator not in (None, agent):
            raise Refused(codes.PERMISSION_DENIED, "only the connection that created a world can join it")
        for name in request.settings:
            if not self.fault("join_ignores_settings"):
                raise Refused(codes.INVALID_ARGUMENT, f"unknown setting {name!r}; there are none for JoinWorld")
        if agent not in world.agents and len(world.agents) >= self.max_agents:
            raise Refused(codes.RESOURCE_EXHAUSTED, f"world {world.name!r} is full: {self.max_agents} agents")
        if self.fault("no_rejoin") and agent.sequences:
            raise Refused(codes.FAILED_PRECONDITION, "this connection has left the world: make another connection")
        if agent not in world.agents:
            world.agents.append(agent)
        agent.world, agent.running, agent.interrupted = world, False, False
        agent.ended, agent.just_reset = False, False
        agent.sequences = agent.sequences if self.fault("no_rejoin") else 0
        return pb.JoinWorldResponse(specs=self.specs(agent))

    def leave(self, agent):
        world = agent.world
        if world is not None:
            if agent in world.agents:
                world.agents.remove(agent)
            agent.world, agent.running = None, False
            if not self.fault("reset_world_waits_for_leaver"):
                agent.interrupted = False
            if self.fault("leave_destroys") and self.worlds.get(world.name) is world:
                del self.worlds[world.name]
            self.lock.notify_all()

    def on_leave_world(self, agent, request):
        if agent.world is None and self.fault("leave_unjoined_refused"):
            raise Refused(codes.FAILED_PRECONDITION, "no world is joined")
        if self.fault("silent_leave"):
            self.leave(agent)
            raise Unanswered
        if self.fault("step_after_leave"):
            return pb.LeaveWorldResponse()
        self.leave(agent)
        return pb.LeaveWorldResponse()

    def on_destroy_world(self, agent, request):
        if request.world_name not in self.worlds and self.fault("destroy_unknown"):
            return pb.DestroyWorldResponse()
        world = self.find(request.world_name)
        if agent.world is world:
            if not self.fault("destroy_joined"):
                raise Refused(codes.FAILED_PRECONDITION, "this connection has joined the world: send LeaveWorld first")
            self.leave(agent)
        for gone in list(self.worlds.values()) if self.fault("destroy_hits_all") else [world]:
            gone.destroyed = not self.fault("destroyed_goes_on")
            if not self.fault("destroyed_joinable"):
                del self.worlds[gone.name]
        return pb.DestroyWorldResponse()

    def on_reset_world(self, agent, request):
        if self.fault("reset_world_unknown") and request.world_name not in self.worlds:
            return pb.ResetWorldResponse()
        world = self.find(request.world_name)
        if self.fault("reset_world_joined_only") and agent.world is not world:
            raise Refused(codes.FAILED_PRECONDITION, "join the world before resetting it")
        worlds = list(self.worlds.values()) if self.fault("reset_world_hits_all") else [world]
        others = [other for each in worlds for other in each.agents if other is not agent and other.running]
        if agent.world is world:
            agent.running = agent.interrupted = self.fault("reset_world_interrupts_caller")
            agent.ended = agent.just_reset = False
        for other in others:
            other.interrupted = not self.fault("reset_world_silent")
        if not self.fault("reset_world_at_once"):
            self.lock.wait_for(lambda: self.stopped or not any(other.interrupted for other in others))
        return pb.ResetWorldResponse()

    # The agent.

    def specs(self, agent):
        if self.fault("no_specs"):
            return pb.ActionObservationSpecs()
        actions, observations = KINDS[agent.world.kind]
        specs = pb.ActionObservationSpecs()
        for uid, spec in actions.items():
            specs.actions[uid].CopyFrom(spec)
        for uid, spec in observations.items():
            specs.observations[uid].CopyFrom(spec)
        extra = specs.observations[1000] if self.has_extra() else None
        if self.fault("duplicate_names"):
            extra.CopyFrom(tensor_spec("position", pb.INT64, (2,)))
        elif self.fault("parent_has_value"):
            extra.CopyFrom(tensor_spec("camera", pb.INT64))
        elif self.fault("empty_name_part"):
            extra.CopyFrom(tensor_spec("camera..x", pb.INT64))
        elif self.fault("no_dtype"):
            extra.CopyFrom(pb.TensorSpec(name="extra"))
        elif self.fault("range_of_other_type"):
            extra.CopyFrom(tensor_spec("extra", pb.INT64))
            set_range(extra.min, pb.FLOAT, 0.0)
        elif self.fault("range_of_wrong_length"):
            extra.CopyFrom(tensor_spec("extra", pb.INT64, (3,), [0, 0]))
        elif self.fault("range_on_variable"):
            extra.CopyFrom(tensor_spec("extra", pb.INT64, (-1,), [0, 0]))
        elif self.fault("range_upside_down"):
            extra.CopyFrom(tensor_spec("extra", pb.INT64, (), 5, -5))
        if self.fault("odd_dtype"):
            specs.actions[1000].CopyFrom(pb.TensorSpec(name="odd", dtype=99))
        if self.fault("reward_is_text"):
            specs.observations[20].CopyFrom(tensor_spec("reward", pb.STRING))
        return specs

    def has_extra(self):
        return bool(
            self.faults
            & {
                "duplicate_names",
                "parent_has_value",
                "empty_name_part",
                "no_dtype",
                "range_of_other_type",
                "range_of_wrong_length",
                "range_on_variable",
                "range_upside_down",
            }
        )

    def on_reset(self, agent, request):
        if agent.world is None:
            if self.fault("reset_unjoined"):
                return pb.ResetResponse()
            raise Refused(codes.FAILED_PRECONDITION, "no world is joined: send JoinWorld before Reset")
        self.check_world(agent)
        for name in request.settings:
            raise Refused(codes.INVALID_ARGUMENT, f"unknown setting {name!r}; there are none for Reset")
        if agent.just_reset and self.fault("reset_twice_refused"):
            raise Refused(codes.FAILED_PRECONDITION, "the sequence has been reset already")
        if not self.fault("reset_keeps_running"):
            agent.running = False
        agent.just_reset = True
        agent.interrupted = False
        self.lock.notify_all()
        return pb.ResetResponse(specs=None if self.fault("reset_without_specs") else self.specs(agent))

    def check_world(self, agent):
        if agent.world.destroyed:
            raise Refused(codes.NOT_FOUND, f"world {agent.world.name!r} was destroyed: send LeaveWorld, join another")

    def on_step(self, agent, request):
        if agent.world is None:
            if self.fault("step_unjoined"):
                return pb.StepResponse(state=RUNNING)
            raise Refused(codes.FAILED_PRECONDITION, "no world is joined: send JoinWorld before Step")
        self.check_world(agent)
        first_agent = agent.world.agents[0] if agent.world.agents else agent
        if self.fault("second_agent_silent") and agent is not first_agent:
            raise Unanswered
        owner = first_agent if self.fault("one_sequence_for_all") else agent
        starts = not owner.running
        self.check_requested(agent, request, starts)
        if owner.interrupted:
            owner.interrupted = owner.running = False
            owner.interrupted_again = self.fault("interrupted_twice")
            self.lock.notify_all()
            blind = self.fault("interrupted_blind")
            return self.observed(agent, pb.StepRequest() if blind else request, INTERRUPTED)
        if owner.interrupted_again:
            owner.interrupted_again = False
            return self.observed(agent, request, INTERRUPTED)
        if starts:
            applies = (
                self.fault("first_step_applies")
                or (owner.ended and self.fault("step_after_end_applies"))
                or (owner.just_reset and self.fault("reset_applies"))
            )
            if applies:
                self.check_actions(agent, request)
            if owner.ended and self.fault("two_ends"):
                owner.ended = False
                return self.observed(agent, request, INTERRUPTED)
            if owner.ended and self.fault("stops_at_end") and agent.sequences > 1:
                raise EndStream
            owner.running, owner.ended, owner.just_reset = True, False, False
            agent.sequences += 1
            agent.steps = 0
            if self.fault("first_step_interrupted"):
                return self.observed(agent, request, INTERRUPTED)
            return self.observed(agent, pb.StepRequest() if self.fault("first_step_blind") else request, RUNNING)
        self.check_actions(agent, request)
        agent.steps += 1
        if agent.steps < self.episode_length:
            return self.observed(agent, request, RUNNING)
        owner.running, owner.ended = False, True
        state = TERMINATED if agent.sequences % 2 else INTERRUPTED
        return self.observed(agent, request, 0 if self.fault("invalid_state") else state)

    def check_requested(self, agent, request, starts):
        _, observations = KINDS[agent.world.kind]
        known = set(observations) | ({1000} if self.has_extra() else set())
        uids = list(request.requested_observations)
        if self.fault("duplicates_refused") and len(uids) > len(set(uids)):
            raise Refused(codes.INVALID_ARGUMENT, f"observations {uids} are asked for twice")
        if self.fault("uids_change") and agent.sequences > 1 and uids:
            raise Refused(codes.INVALID_ARGUMENT, f"no observation {uids[0]} any more")
        for uid in set(uids) - known:
            if self.fault("unknown_observation") or (starts and self.fault("unknown_observation_first")):
                continue
            name = "of that UID" if self.fault("error_without_uid") else str(uid)
            raise Refused(codes.INVALID_ARGUMENT, f"no observation {name}; there are other ones: see the specs")

    def check_actions(self, agent, request):
        if self.fault("lawful_refused") and agent.steps == 2:
            raise Refused(codes.INVALID_ARGUMENT, "not this time")
        actions, _ = KINDS[agent.world.kind]
        for uid, tensor in request.actions.items():
            if uid not in actions:
                if self.fault("any_action_uid"):
                    continue
                raise Refused(codes.INVALID_ARGUMENT, f"no action {uid}; there are {sorted(actions)}")
            self.check_action(actions[uid], tensor)
        missing = sorted(set(actions) - set(request.actions))
        if missing and self.fault("missing_action_ends_stream"):
            raise EndStream
        if missing and self.actions_required and not self.fault("missing_action"):
            raise Refused(codes.INVALID_ARGUMENT, f"actions {missing} are needed in every Step: send them")

    def check_action(self, spec, tensor):
        expected, got = PAYLOADS[spec.dtype], tensor.WhichOneof("payload")
        if got != expected:
            if self.fault("any_dtype"):
                return
            raise Refused(codes.INVALID_ARGUMENT, f"{spec.name}: expected {expected}, got {got}")
        shape, wanted = list(tensor.shape), list(spec.shape)
        array = getattr(tensor, got).array
        size = len(array)
        variable = [i for i, n in enumerate(shape) if n < 0]
        if variable and self.fault("no_variable"):
            raise Refused(codes.INVALID_ARGUMENT, f"{spec.name}: expected {wanted}, got {shape}")
        if len(variable) == 1:
            rest = int(np.prod([n for n in shape if n >= 0]))
            shape[variable[0]] = size // rest if rest else 0
            if rest == size == 1:
                shape[variable[0]] = 1
        elif len(variable) > 1:
            if self.fault("two_variable"):
                return
            raise Refused(codes.INVALID_ARGUMENT, f"{spec.name}: {shape} has {len(variable)} negative dimensions")
        if len(shape) == len(wanted):
            wanted = [have if want < 0 else want for have, want in zip(shape, wanted, strict=True)]
        if shape != wanted:
            if self.fault("any_shape") or (self.fault("scalar_as_vector") and not wanted and shape == [1]):
                return
            raise Refused(codes.INVALID_ARGUMENT, f"{spec.name}: expected the shape {wanted}, got {shape}")
        needed = int(np.prod(wanted))
        if size != needed and (size != 1 or self.fault("no_broadcast")) and not self.fault("too_few_elements"):
            raise Refused(codes.INVALID_ARGUMENT, f"{spec.name}: expected {needed} elements, got {size}")
        if spec.dtype in NUMERIC:
            dtype = NUMERIC[spec.dtype][0]
            values = np.frombuffer(array, dtype) if isinstance(array, bytes) else np.array(list(array), dtype)
            low, high = get_range(spec.min), get_range(spec.max)
            exclusive = self.fault("range_exclusive")
            if size not in (1, needed):
                return
            below = low is not None and (np.any(values < low) or (exclusive and np.any(values == low)))
            above = high is not None and (np.any(values > high) or (exclusive and np.any(values == high)))
            if (below and not self.fault("below_min")) or (above and not self.fault("above_max")):
                raise Refused(codes.INVALID_ARGUMENT, f"{spec.name}: expected {low} to {high}, got {values}")

    def observed(self, agent, request, state):
        response = pb.StepResponse(state=state)
        specs = self.specs(agent).observations
        wanted = set(specs) if self.fault("returns_all") else set(request.requested_observations)
        for uid in wanted & set(specs):
            response.observations[uid].CopyFrom(self.observe(agent, specs[uid], state))
        return response

    def observe(self, agent, spec, state):
        n = agent.sequences * 10 + agent.steps
        name = spec.name
        if name == "reward":
            return tensor_utils.pack_tensor("one") if spec.dtype == pb.STRING else tensor_utils.pack_tensor(float(n))
        if name == "discount":
            early = self.fault("discount_zero_early") and agent.steps == 1
            interrupted = self.fault("discount_zero_interrupted") and state == INTERRUPTED
            return tensor_utils.pack_tensor(0.0 if state == TERMINATED or early or interrupted else 1.0)
        if spec.dtype == pb.STRING:
            return tensor_utils.pack_tensor(f"step {agent.steps}")
        if spec.dtype == pb.BOOL:
            return tensor_utils.pack_tensor(bool(n % 2))
        dtype = NUMERIC.get(spec.dtype, (np.int64, None))[0]
        shape = [agent.steps if size < 0 else size for size in spec.shape]
        values = np.full(shape, n % 100, dtype)
        low, high = get_range(spec.min), get_range(spec.max)
        if low is not None and low.size in (1, values.size):
            values = np.maximum(values, low.reshape(shape if low.size > 1 else ()))
        if high is not None and high.size in (1, values.size):
            values = np.minimum(values, high.reshape(shape if high.size > 1 else ()))
        if self.fault("observation_out_of_range") and name == "camera.pose.angles":
            values = values * 0 + dtype(2.5)
        if self.fault("other_shape") and name == "position":
            values = values[:1]
        if self.fault("other_dtype") and name == "position":
            values = values.astype(np.int32)
        packed = tensor_utils.pack_tensor(np.asarray(values))
        if self.fault("ragged") and name == "camera.depth":
            del packed.floats.array[-1:]
        if self.fault("scalar_of_two") and name == "temperature":
            packed.int8s.array = packed.int8s.array * 2
        return packed

    # Properties: volume (read and write), server (listable): server.name, server.key (neither), world (once joined).

    def properties(self, agent):
        def leaf(name, dtype, *, read=True, write=False, **limits):
            spec = tensor_spec(name, dtype, (), **limits)
            return properties_pb2.PropertySpec(spec=spec, is_readable=read, is_writable=write, description=f"{name}.")

        def branch(name):
            return properties_pb2.PropertySpec(spec=pb.TensorSpec(name=name), is_listable=True)

        tree = {
            "": [leaf("volume", pb.FLOAT, write=True, low=0.0, high=1.0), branch("server")],
            "server": [leaf("server.name", pb.STRING), leaf("server.key", pb.STRING, read=False)],
        }
        if agent.world is not None:
            if self.fault("property_lost_after_join"):
                del tree[""][0]
            tree[""].append(branch("world"))
            tree["world"] = [leaf("world.name", pb.STRING), leaf("world.steps", pb.INT64)]
        if self.fault("property_twice"):
            tree["server"].append(leaf("volume", pb.FLOAT))
        return tree

    def property_value(self, agent, key):
        if self.fault("property_other_dtype") and key == "volume":
            return tensor_utils.pack_tensor("loud")
        if key == "volume":
            return tensor_utils.pack_tensor(np.float32(self.volume))
        values = {"server.name": "public", "server.key": "secret"}
        if agent.world is not None:
            values |= {"world.name": agent.world.name, "world.steps": agent.steps}
        return tensor_utils.pack_tensor(values.get(key, ""))

    def on_extension(self, agent, request):
        message = properties_pb2.PropertyRequest()
        if not self.properties_served or not request.Unpack(message):
            if self.fault("extension_ends_stream"):
                raise EndStream
            if self.fault("unknown_extension"):
                return request
            raise Refused(codes.UNIMPLEMENTED, f"no extension {request.type_url!r} is served here")
        kind = message.WhichOneof("payload")
        if kind is None:
            raise Refused(codes.INVALID_ARGUMENT, "expected a read, write or list of a property, got none")
        key = getattr(message, kind).key
        answer = properties_pb2.PropertyResponse()
        tree = self.properties(agent)
        spec = next((spec for specs in tree.values() for spec in specs if spec.spec.name == key), None)
        if spec is None and not (kind == "list_property" and key == ""):
            if not self.fault("property_unknown"):
                code = codes.UNKNOWN if self.fault("property_wrong_code") else codes.NOT_FOUND
                raise Refused(code, f"no property {key!r}: list them")
            spec = properties_pb2.PropertySpec()
        if kind == "list_property":
            if key not in tree and not self.fault("property_lists_all") and not self.fault("property_unknown"):
                raise Refused(codes.PERMISSION_DENIED, f"property {key!r} has none below it")
            answer.list_property.values.extend(tree.get(key, []))
            answer.list_property.SetInParent()
        elif kind == "read_property":
            if self.fault("property_fails") and key == "server.name":
                raise KeyError(key)
            if not spec.is_readable and not self.fault("property_reads_all") and not self.fault("property_unknown"):
                raise Refused(codes.PERMISSION_DENIED, f"property {key!r} cannot be read")
            answer.read_property.value.CopyFrom(self.property_value(agent, key))
        else:
            self.write_property(spec, key, message.write_property.value)
            answer.write_property.SetInParent()
        if self.fault("property_other_kind") and kind == "list_property":
            answer.write_property.SetInParent()
        out = any_pb2.Any()
        out.Pack(answer)
        if self.fault("property_garbage"):
            out.value = b"\xff\xff"
        return out

    def write_property(self, spec, key, value):
        if not spec.is_writable:
            if self.fault("property_writes_all") or self.fault("property_unknown"):
                return
            raise Refused(codes.PERMISSION_DENIED, f"property {key!r} cannot be written")
        floats = value.floats.array
        if value.WhichOneof("payload") != "floats" or len(floats) != 1 or not 0 <= floats[0] <= 1:
            if self.fault("property_any_value"):
                return
            raise Refused(codes.INVALID_ARGUMENT, f"property {key!r}: expected one float from 0 to 1, got {value}")
        self.volume = floats[0]

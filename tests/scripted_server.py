"""A dm_env_rpc server on the public messages whose answers a test writes, a function a kind of request."""

from concurrent import futures

import grpc
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb


class ScriptedServer:
    """Joins with `specs`, answers a Step by `step(request, number)` and a Reset by `reset(request, number)`.

    Each may return a response, or raise `Refuse`; `number` counts the requests of that kind. What is not given is
    answered plainly: RUNNING with the observations of `observations`, and the specs.
    """

    def __init__(self, specs, observations=None, step=None, reset=None):
        self.specs, self.observations = specs, observations or {}
        self.step, self.reset = step, reset
        self.steps, self.resets = [], []
        self.server = grpc.server(futures.ThreadPoolExecutor(8))
        process = grpc.stream_stream_rpc_method_handler(
            self.Process, self.read, pb.EnvironmentResponse.SerializeToString
        )
        handler = grpc.method_handlers_generic_handler("dm_env_rpc.v1.Environment", {"Process": process})
        self.server.add_generic_rpc_handlers([handler])
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    @property
    def url(self):
        return f"grpc://127.0.0.1:{self.port}"

    def __enter__(self):
        self.server.start()
        return self

    def __exit__(self, *_):
        self.server.stop(None).wait(10)

    def read(self, data):
        return pb.EnvironmentRequest.FromString(data)

    def Process(self, request_iterator, context):  # noqa: N802
        for request in request_iterator:
            kind = request.WhichOneof("payload")
            try:
                yield pb.EnvironmentResponse(**{kind: self.answer(kind, getattr(request, kind))})
            except Refuse as error:
                response = pb.EnvironmentResponse()
                response.error.code, response.error.message = error.args
                yield response
            except EndStream:
                return

    def answer(self, kind, request):
        if kind == "create_world":
            return pb.CreateWorldResponse(world_name="w")
        if kind == "join_world":
            return pb.JoinWorldResponse(specs=self.specs)
        if kind == "step":
            self.steps.append(request)
            if self.step is not None:
                return self.step(request, len(self.steps))
            return self.running(request)
        if kind == "reset":
            self.resets.append(request)
            if self.reset is not None:
                return self.reset(request, len(self.resets))
            return pb.ResetResponse(specs=self.specs)
        return {"leave_world": pb.LeaveWorldResponse, "destroy_world": pb.DestroyWorldResponse}[kind]()

    def running(self, request):
        found = {uid: self.observations[uid] for uid in request.requested_observations}
        return pb.StepResponse(state=1, observations=found)


class Refuse(Exception):  # noqa: N818 - becomes an answer
    """Answer by an error of this code and message."""


class EndStream(Exception):  # noqa: N818 - ends the stream
    """End the stream without an answer."""

"""Play a dm_env_rpc server with gRPC and the .proto alone: print each episode's return.

    protoc --proto_path=proto/bridge/pb --python_out=docs dm_env_rpc.proto
    python docs/plain_client.py HOST:PORT [EPISODES]

It sends the least lawful action of each number, and empty text.
"""

import queue
import sys

import dm_env_rpc_pb2 as pb  # what protoc wrote
import grpc

PAYLOADS = {
    pb.FLOAT: "floats",
    pb.DOUBLE: "doubles",
    pb.INT8: "int8s",
    pb.INT32: "int32s",
    pb.INT64: "int64s",
    pb.UINT8: "uint8s",
    pb.UINT32: "uint32s",
    pb.UINT64: "uint64s",
    pb.BOOL: "bools",
    pb.STRING: "strings",
}


class Client:
    """One stream: a request out, its answer in."""

    def __init__(self, target):
        self.channel = grpc.insecure_channel(target)
        self.requests = queue.SimpleQueue()
        process = self.channel.stream_stream(
            "/dm_env_rpc.v1.Environment/Process",
            request_serializer=pb.EnvironmentRequest.SerializeToString,
            response_deserializer=pb.EnvironmentResponse.FromString,
        )
        self.answers = process(iter(self.requests.get, None))

    def ask(self, kind, message):
        """Send a request of a kind; return the answer, or raise its error."""
        self.requests.put(pb.EnvironmentRequest(**{kind: message}))
        answer = next(self.answers)
        if answer.WhichOneof("payload") == "error":
            raise RuntimeError(f"code {answer.error.code}: {answer.error.message}")
        return getattr(answer, kind)

    def close(self):
        """End the stream."""
        self.requests.put(None)
        self.channel.close()


def least(spec):
    """A tensor of one element that fills the spec's shape: the protocol broadcasts it."""
    payload = PAYLOADS[spec.dtype]
    tensor = pb.Tensor(shape=[max(size, 1) for size in spec.shape])
    low = getattr(spec.min, payload).array if spec.min.WhichOneof("payload") == payload else []
    array = getattr(tensor, payload)
    if payload in ("int8s", "uint8s"):
        array.array = low[:1] or b"\0"
    else:
        array.array.append(low[0] if len(low) else "" if payload == "strings" else 0)
    return tensor


def main():
    """Join the default world, and play."""
    target, episodes = sys.argv[1], int((sys.argv[2:] or ["3"])[0])
    client = Client(target)
    specs = client.ask("join_world", pb.JoinWorldRequest()).specs
    names = {spec.name: uid for uid, spec in specs.observations.items()}
    wanted = [names["reward"]] if "reward" in names else []
    actions = {uid: least(spec) for uid, spec in specs.actions.items()}
    step = pb.StepRequest(actions=actions, requested_observations=wanted)
    for episode in range(episodes):
        client.ask("step", step)  # the first Step of a sequence: its actions are ignored
        total, steps, state = 0.0, 0, pb.RUNNING
        while state == pb.RUNNING and steps < 10_000:
            answer = client.ask("step", step)
            state, steps = answer.state, steps + 1
            total += sum(sum(getattr(t, t.WhichOneof("payload")).array) for t in answer.observations.values())
        print(f"episode {episode}: {steps} steps, return {total:g}, {pb.EnvironmentStateType.Name(state)}")
    client.ask("leave_world", pb.LeaveWorldRequest())
    client.close()


if __name__ == "__main__":
    main()

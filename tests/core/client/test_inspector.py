"""Questions to a server one at a time, as `gymnasium-bridge info` asks them."""

import contextlib
import signal
import threading

import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as public_pb
from google.protobuf import any_pb2

from bridge.core.client.world.inspector import Inspector
from bridge.core.encoding.names import PROPERTY_RESPONSE_URL
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import ConnectionLostError, RemoteTimeoutError
from bridge.pb import properties_pb2
from tests.scripted_server import ScriptedServer


class PropertyServer(ScriptedServer):
    """Answers each property read by the key itself; that of `slow` only once `release` is set.

    With `interrupts`, somebody presses Ctrl-C meanwhile.
    """

    def __init__(self):
        super().__init__(public_pb.ActionObservationSpecs())
        self.release = threading.Event()
        self.interrupts = False

    def answer(self, kind, request):
        if kind != "extension":
            return super().answer(kind, request)
        key = properties_pb2.PropertyRequest.FromString(request.value).read_property.key
        if key == "slow":
            if self.interrupts:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            assert self.release.wait(20.0)
        body = properties_pb2.PropertyResponse()
        body.read_property.value.CopyFrom(pack_tensor(key))
        return any_pb2.Any(type_url=PROPERTY_RESPONSE_URL, value=body.SerializeToString())


def test_a_late_answer_is_not_taken_for_the_answer_to_the_next_question():
    with PropertyServer() as server:
        inspector = Inspector(server.url, 0.2)
        for _ in range(2):
            with pytest.raises(RemoteTimeoutError, match=r"no answer to extension within 0\.2 s"):
                inspector.read_property("slow")
        inspector._timeout = 20.0
        server.release.set()
        assert unpack_tensor(inspector.read_property("quick"))[()] == "quick"
        assert unpack_tensor(inspector.read_property("again"))[()] == "again"
        inspector.close()


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals that wake a thread")
def test_the_answer_to_an_interrupted_question_is_not_taken_for_the_answer_to_the_next():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with PropertyServer() as server:
            server.interrupts = True
            inspector = Inspector(server.url, 20.0)
            with pytest.raises(KeyboardInterrupt):
                inspector.read_property("slow")
            server.release.set()
            # Where the interrupt came while frames of HTTP/2 were read, the connection is given up: no answer comes.
            with contextlib.suppress(ConnectionLostError):
                assert unpack_tensor(inspector.read_property("quick"))[()] == "quick"
            inspector.close()
    finally:
        signal.signal(signal.SIGINT, before)

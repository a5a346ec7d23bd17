"""The names that both ends must agree on, written as they stand on the wire."""

__all__ = [
    "CALL_REQUEST_URL",
    "CALL_RESPONSE_URL",
    "NO_SEED",
    "PROPERTY_REQUEST_URL",
    "PROPERTY_RESPONSE_URL",
    "TIMING",
]

PROPERTY_REQUEST_URL = "type.googleapis.com/dm_env_rpc.v1.extensions.properties.PropertyRequest"
"""The type of a property request in `EnvironmentRequest.extension`."""

PROPERTY_RESPONSE_URL = "type.googleapis.com/dm_env_rpc.v1.extensions.properties.PropertyResponse"
"""The type of its answer."""

CALL_REQUEST_URL = "type.googleapis.com/gymnasium_bridge.CallRequest"
"""The type of a method call, an extension of this package."""

CALL_RESPONSE_URL = "type.googleapis.com/gymnasium_bridge.CallResponse"
"""The type of its answer."""

NO_SEED = -1
"""In the Reset setting `seed` of a world of lanes: no seed for this lane."""

TIMING = (
    "received_at",
    "answered_at",
    "observed_at",
    "step_time",
    "action_delay",
    "episode",
    "frame",
    "actions_applied",
    "actions_replaced",
    "actions_dropped",
    "overruns",
    "frames_dropped",
    "frames_skipped",
)
"""The elements of the observation `timing` of a real-time world, float64: seconds of the server's clock, or counts."""

"""Policies at the other end, over openpi's wire: called and served; and how good they are on served environments."""

from typing import TYPE_CHECKING

from bridge.lazy import lazy_names

if TYPE_CHECKING:
    from bridge.policies.evaluation import Comparison, EvaluatedEpisode, Evaluation, compare, evaluate
    from bridge.policies.remote_policy import RemotePolicy
    from bridge.policies.rows import by_rows
    from bridge.policies.server import PolicyServer, serve_policy

__all__ = [
    "Comparison",
    "EvaluatedEpisode",
    "Evaluation",
    "PolicyServer",
    "RemotePolicy",
    "by_rows",
    "compare",
    "evaluate",
    "serve_policy",
]

_PLACES = {
    **dict.fromkeys(
        ("Comparison", "EvaluatedEpisode", "Evaluation", "compare", "evaluate"), "bridge.policies.evaluation"
    ),
    "PolicyServer": "bridge.policies.server",
    "RemotePolicy": "bridge.policies.remote_policy",
    "by_rows": "bridge.policies.rows",
    "serve_policy": "bridge.policies.server",
}
__getattr__, __dir__ = lazy_names(__name__, _PLACES)

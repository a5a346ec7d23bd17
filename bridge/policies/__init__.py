"""Call, serve and evaluate policies over openpi's wire protocol.

May be imported by the composition root.
"""

from bridge.policies import wire  # noqa: F401 - before all others: its error says what to install
from bridge.policies.evaluation import Comparison, Evaluation, compare, evaluate
from bridge.policies.policy_server import PolicyServer, serve_policy
from bridge.policies.remote_policy import RemotePolicy
from bridge.policies.rows import by_rows

__all__ = ["Comparison", "Evaluation", "PolicyServer", "RemotePolicy", "by_rows", "compare", "evaluate", "serve_policy"]

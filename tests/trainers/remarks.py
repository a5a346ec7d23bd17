"""Warnings that come of the trainers, and not of what they train on."""

from __future__ import annotations

import pytest

OWN_REMARKS = [
    pytest.mark.filterwarnings(f"ignore::{category}")
    for category in (
        "UserWarning",
        "DeprecationWarning",
        "FutureWarning",
        "pytest.PytestUnraisableExceptionWarning",
        "ResourceWarning",
    )
]
"""Marks of tests that train with them."""

"""A policy that stands still."""

from __future__ import annotations


def still(observation):
    return 0

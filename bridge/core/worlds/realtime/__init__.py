"""Worlds that advance by a clock, whether or not their agents act."""

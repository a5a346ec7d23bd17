"""Tests of the project: its packages, pages, examples, benchmarks, and of the tests themselves."""

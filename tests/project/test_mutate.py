"""The list of faults for `python -m tests.mutate`: each is one that can be planted in the source as it is."""

import ast

import pytest

from tests import mutate

FAULTS = (mutate.ROOT / "tests" / "mutants.txt").read_text()


def test_each_fault_is_found_once_in_the_source_and_leaves_it_readable():
    for mutant in mutate.read_mutants(FAULTS):
        ast.parse((mutate.ROOT / mutant.path).read_text().replace(mutant.old, mutant.new))


def test_each_fault_is_of_requirements_that_tests_name():
    named = mutate.tests_by_requirement()
    for mutant in mutate.read_mutants(FAULTS):
        for requirement in mutant.requirements:
            assert named[requirement], f"no test names {requirement}"


def test_a_fault_whose_old_text_is_gone_is_told():
    with pytest.raises(SystemExit, match=r"mutant 1 \(D-0 bridge/errors.py\): expected its old text once"):
        list(mutate.read_mutants("D-0 bridge/errors.py\n-this text is nowhere in the file\n+nor is this\n"))

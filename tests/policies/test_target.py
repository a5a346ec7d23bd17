"""`bridge.cli.target`: what a command line means by a policy."""

import pytest

from bridge.cli.target import find_function, find_policies
from bridge.errors import SettingError
from tests.parallel_envs import Relay
from tests.policies.plain import still


def test_the_command_line_names_policies_by_their_modules():
    assert find_policies(["random"]) == "random"
    assert find_policies(["tests.policies.test_policies:still"]) is still
    assert find_policies(["tests.policies.test_policies.py:still"]) is still
    assert find_policies(["a=tests.policies.test_policies:still", "b=random"]) == {"a": still, "b": "random"}
    assert find_policies(["tests.parallel_envs:Relay.step"]) is Relay.step


def test_the_command_line_takes_urls_for_all_agents_and_for_some():
    url = "ws://gpu:8000?token=abc"
    assert find_policies([url]) == url
    assert find_policies([f"ann={url}", "bob=random"]) == {"ann": url, "bob": "random"}


@pytest.mark.parametrize(
    ("items", "text"),
    [
        (["clever"], "expected a policy as random, as its ws:// URL, or as MODULE:FUNCTION .* got 'clever'"),
        (["tests.policies.test_policies:"], "got 'tests.policies.test_policies:'"),
        ([":still"], "got ':still'"),
        (["tests.policies.test_policies:nothing"], "the module tests.policies.test_policies has no 'nothing'"),
        ([".test_policies:still"], "expected MODULE:NAME with a module as Python imports it, my_package.envs, got"),
        (["./tests/policies/test_policies.py:still"], "expected MODULE:NAME with a module as Python imports it"),
        ([r"C:\games\my_game.py:Game"], "run this command in its folder, and write its name without the folder"),
        (["no_such_module_1:act"], "cannot import the module of 'no_such_module_1:act'"),
        (["random", "random"], "expected --agents with one policy for all, or AGENT=POLICY for some"),
        (["a=random", "random"], "expected --agents with one policy for all"),
    ],
)
def test_a_policy_that_the_command_line_does_not_find_is_told(items, text):
    with pytest.raises(SettingError, match=text):
        find_policies(items)


@pytest.mark.parametrize("text", ["random", "clever", "ws://gpu:8000"])
def test_what_is_no_function_is_not_proposed_where_only_a_function_is_taken(text):
    with pytest.raises(SettingError, match=r"expected a policy as MODULE:FUNCTION that takes .* got"):
        find_function(text)

"""The options that functions share: their dataclasses, and the keywords that type checkers see."""

import dataclasses
import inspect
from typing import Any

import pytest

from bridge.core.client.options import RemoteKeywords, RemoteOptions
from bridge.facade.options import ServerKeywords, ServerOptions


@pytest.mark.parametrize(("keywords", "options"), [(ServerKeywords, ServerOptions), (RemoteKeywords, RemoteOptions)])
def test_type_checkers_see_the_keywords_that_the_dataclass_takes(keywords: Any, options: type) -> None:
    taken = {field.name for field in dataclasses.fields(options) if field.init}
    assert set(inspect.get_annotations(keywords)) <= taken
    assert keywords.__optional_keys__ | keywords.__required_keys__ == taken


def test_a_token_that_was_read_is_printed_nowhere() -> None:
    assert "secret" not in repr(ServerOptions(token="secret"))

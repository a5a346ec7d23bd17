"""`bridge.errors`: the tree, what it says, and that it passes between processes."""

import copy
import inspect
import pickle
import re

import gymnasium.error
import pytest

from bridge import errors
from bridge.errors import Code, RequestError

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.BridgeError)]


def example(cls):
    """One of each class, as the library makes it."""
    if issubclass(cls, errors.RefusedError):
        return cls("grpc://h:1", "the reason", Code.NOT_FOUND)
    if issubclass(cls, (errors.RemoteError, errors.AddressError)):
        return cls("grpc://h:1", "the reason")
    if cls is errors.RequestError:
        return cls(Code.INTERNAL, "the reason")
    if cls in (errors.AlreadyPendingError, errors.NothingPendingError):
        return cls("the reason", "step")
    return cls("the reason")


every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def test_the_tree_in_the_docstring_is_that_of_the_classes():
    tree = re.findall(r"^ {4}(\S.*)$", errors.__doc__ or "", re.MULTILINE)  # indented, so that it is shown as it stands
    lines = [line for line in tree if re.match(r"(BridgeError|[│ ]*[├└]──)", line)]
    assert lines == tree
    parents, drawn = {}, {}
    for line in lines:
        name = re.search(r"\w+", line)
        assert name is not None
        depth = name.start() // 4
        parents[depth] = name[0]
        drawn[name[0]] = parents.get(depth - 1)
        also = re.search(r"\(([\w.]+)\)$", line)
        if also is not None:
            bases = {base.__name__ for base in getattr(errors, name[0]).__mro__}
            assert also[1].rpartition(".")[2] in bases
    ours = {
        cls.__name__: next((base.__name__ for base in cls.__bases__ if issubclass(base, errors.BridgeError)), None)
        for cls in CLASSES
    }
    assert drawn == ours
    assert set(errors.__all__) == {*ours, "Code", "shown_url"}


@every_class
def test_every_error_survives_pickle_and_copy_with_its_fields(cls):
    error = example(cls)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is cls
        assert str(twin) == str(error)
        assert twin.__dict__ == error.__dict__
    assert "the reason" in str(error)


@every_class
def test_every_error_can_be_raised_and_caught_as_each_of_its_bases(cls):
    for base in cls.__mro__[:-1]:
        with pytest.raises(base):
            raise example(cls)


def test_remote_errors_carry_the_url_and_say_it_first():
    error = errors.ConnectError("grpc://h:1", "nobody listens")
    assert (error.url, error.reason) == ("grpc://h:1", "nobody listens")
    assert str(error) == "grpc://h:1: nobody listens"
    assert isinstance(error, OSError)
    assert isinstance(errors.RemoteTimeoutError("u", "r"), TimeoutError)


def test_a_refusal_carries_the_code_and_names_it():
    error = errors.RefusedError("grpc://h:1", "no such world", 5)
    assert error.code == Code.NOT_FOUND
    assert str(error) == "grpc://h:1 answered NOT_FOUND: no such world"
    assert str(errors.RefusedError("u", "r", 77)) == "u answered code 77: r"
    assert str(errors.RequestError(Code.INTERNAL, "boom")) == "INTERNAL: boom"


def test_an_async_call_out_of_turn_names_the_pending_one():
    error = errors.AlreadyPendingError("call step_wait first", "step")
    assert error.name == "step"
    assert str(error) == "call step_wait first"


def test_the_address_error_shows_an_example():
    assert "e.g. grpc://localhost:50051/CartPole-v1?num_envs=8" in str(errors.AddressError("x", "it is bad"))


def test_gymnasiums_own_errors_catch_ours():
    assert issubclass(errors.ResetNeededError, gymnasium.error.ResetNeeded)
    assert issubclass(errors.ClosedError, gymnasium.error.ClosedEnvironmentError)
    assert issubclass(errors.AlreadyPendingError, gymnasium.error.AlreadyPendingCallError)
    assert issubclass(errors.NothingPendingError, gymnasium.error.NoAsyncCallError)


def test_a_request_error_has_a_text_that_can_be_sent():
    assert RequestError(Code.INTERNAL, "no such file: \udcff.rom").message == "no such file: \\udcff.rom"


def test_the_codes_are_numbered_as_in_grpc():
    import grpc

    assert {code.name: code.value for code in Code} == {code.name: code.value[0] for code in grpc.StatusCode}
    assert Code.named(3) == "INVALID_ARGUMENT"
    assert Code.named(99) == "code 99"

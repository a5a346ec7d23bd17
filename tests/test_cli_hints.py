"""The lines of Python that a server prints."""

from bridge.cli.hints import connecting_lines


def test_several_urls_are_connected_to_as_one_vector() -> None:
    lines = connecting_lines(["grpc://a:1", "grpc://b:2"], ["CartPole-v1"], "one")
    assert lines == ["from bridge import make_vec_remote", 'envs = make_vec_remote(["grpc://a:1", "grpc://b:2"])']

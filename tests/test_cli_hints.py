"""The lines of Python that a server prints."""

from bridge.cli.hints import connecting_lines


def test_several_urls_are_connected_to_as_one_vector() -> None:
    lines = connecting_lines(["grpc://a:1", "grpc://b:2"], ["CartPole-v1"], "one")
    call = 'envs = make_vec_remote(["grpc://a:1", "grpc://b:2"], blocking=True)'
    assert lines == ["from bridge import make_vec_remote", call]


def test_vectors_are_connected_to_as_trainers_expect_them_whatever_is_shown_beside() -> None:
    credentials = {"token": "…"}
    for kind, call in (
        ("lanes", 'envs = make_vec_remote("grpc://a:1", blocking=True, token=…)'),
        ("dialed", 'envs = make_vec_remote("grpc://a:1", num_envs=1, blocking=True, token=…)'),
        ("one", 'env = make_remote("grpc://a:1", token=…)'),
    ):
        assert connecting_lines(["grpc://a:1"], [], kind, credentials)[-1] == call

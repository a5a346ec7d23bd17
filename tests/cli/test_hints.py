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


def test_beside_a_page_the_client_joins_the_world_that_people_watch() -> None:
    for ids in ([], ["CartPole-v1"]):
        line = connecting_lines(["grpc://a:1?token=x"], ids, "one", watched=True)[-1]
        assert line == 'env = make_remote("grpc://a:1?token=x&world=")  # the world that the page shows'
    # Of several environments a page shows none before somebody has chosen one.
    line = connecting_lines(["grpc://a:1"], ["A-v0", "B-v0"], "one", watched=True)[-1]
    assert line == 'env = make_remote("grpc://a:1/A-v0")'

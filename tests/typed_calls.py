# pyright: strict, reportUnnecessaryTypeIgnoreComment=error
"""Calls that a type checker has to refuse, each on a line that says so; and some that it has to take.

`make check-calls` runs pyright on this file. A mistake that it does not find leaves an unnecessary comment, which is an
error here. Nothing runs this file.
"""

from __future__ import annotations

from bridge import Auth, Web, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.wrappers import BlockingReset


def mistakes(url: str) -> None:
    """Make each of them."""
    make_remote(url, tokenfile="token.txt")  # pyright: ignore[reportCallIssue]
    make_remote(url, role="viewer")  # pyright: ignore[reportArgumentType]
    make_remote(url, scheme_options=["names_file"])  # pyright: ignore[reportArgumentType]
    make_remote(url, names_file="names.json")  # pyright: ignore[reportCallIssue]
    make_vec_remote(url, scheme_options="names.json")  # pyright: ignore[reportArgumentType]
    make_vec_remote(url, num_env=4)  # pyright: ignore[reportCallIssue]
    make_vec_remote(url, on_lost="wait")  # pyright: ignore[reportCallIssue]
    make_vec_remote(url, blocking=True, on_lost="waits")  # pyright: ignore[reportArgumentType]
    serve_gym("CartPole-v1", isolation="proces")  # pyright: ignore[reportArgumentType]
    serve_gym("CartPole-v1", vectorization_mode="asink")  # pyright: ignore[reportArgumentType]
    serve_gym("CartPole-v1", fsp=30)  # pyright: ignore[reportCallIssue]
    serve_gym("CartPole-v1", transport="http3")  # pyright: ignore[reportArgumentType]
    serve_parallel(dict, prot=50051)  # pyright: ignore[reportCallIssue]
    serve_parallel(dict, web=Web(host="play.example.org"))  # pyright: ignore[reportCallIssue]
    BlockingReset(make_vec_remote(url), autoreset_mode="same_step")  # pyright: ignore[reportArgumentType]
    BlockingReset(make_remote(url))  # pyright: ignore[reportArgumentType]
    make_vec_remote(url).stepp()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    make_vec_remote(url).gravity = 2.0  # pyright: ignore[reportAttributeAccessIssue]
    BlockingReset(make_vec_remote(url)).gravity = 2.0  # pyright: ignore[reportAttributeAccessIssue]


def taken(url: str) -> None:
    """Call what is right."""
    make_remote(url, token_file="token.txt", tag="Ann")
    make_remote(url, scheme_options={"names_file": "names.json"})
    make_vec_remote(url, blocking=True, scheme_options={"names_file": "names.json"}, use_profile=False).close()
    env = make_remote(url)
    env.gravity = 2.0
    print(env.gravity, env.get_action_meanings())
    envs = BlockingReset(make_vec_remote(url, num_envs=4), autoreset_mode="SameStep", on_lost="continue")
    envs.close()
    make_vec_remote(url, blocking=True, on_lost="raise").close()
    serve_gym("CartPole-v1", isolation="process", vectorization_mode="async").stop()
    serve_parallel(dict, web=Web(play_fps=20), auth=Auth(insecure=True)).stop()

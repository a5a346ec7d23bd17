"""A server and a client on two machines, with a token and TLS.

On the machine of the environment (here two loopback addresses stand for two machines):

    python examples/two_machines.py serve --host 127.0.0.2 --port 50051 --folder secrets

Copy `secrets/token` and `secrets/ca.pem` to the machine that trains, and there:

    python examples/two_machines.py play grpcs://127.0.0.2:50051 --folder secrets

The server prints its URL, the client prints the return of an episode. A client is refused without the token or with
another server's certificate. Needs the extra `cert`, which makes the certificates.
"""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from bridge import TLS, make_remote, serve_gym


def serve(host: str, port: int, folder: Path) -> None:
    """Make a token and certificates if there are none, and serve until Ctrl-C."""
    from bridge.testing import make_certificates

    if not folder.exists():
        make_certificates(folder, [host])
        (folder / "token").touch(mode=0o600)
        (folder / "token").write_text(secrets.token_urlsafe(32))
    tls = TLS(certificate=folder / "server.pem", key=folder / "server.key")
    server = serve_gym("CartPole-v1", host=host, port=port, token_file=folder / "token", tls=tls)
    print(f"the token and certificates are in {folder}/; serving until Ctrl-C at {server.url}", flush=True)
    server.wait()


def play(url: str, folder: Path) -> None:
    """Play an episode."""
    env = make_remote(url, token_file=folder / "token", tls=TLS(ca=folder / "ca.pem"))
    env.reset(seed=0)
    total, over = 0.0, False
    while not over:
        _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        total += reward
        over = terminated or truncated
    env.close()
    print(f"played an episode with the token over TLS: return {total:g} at {url}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    server, client = commands.add_parser("serve"), commands.add_parser("play")
    server.add_argument("--host", default="127.0.0.2")
    server.add_argument("--port", type=int, default=50051)
    client.add_argument("url")
    for command in (server, client):
        command.add_argument("--folder", type=Path, default=Path("secrets"))
    arguments = parser.parse_args()
    if arguments.command == "serve":
        serve(arguments.host, arguments.port, arguments.folder)
    else:
        play(arguments.url, arguments.folder)


if __name__ == "__main__":
    main()

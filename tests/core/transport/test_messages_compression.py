"""Compressed answers: the same bits, fewer bytes on the wire, and clear errors for what cannot be read."""

from __future__ import annotations

import gzip
import importlib
import subprocess
import sys
import tracemalloc
import zlib
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge import TLS, errors, make_remote, make_vec_remote, serve_gym
from bridge.core.transport.messages import WORTHWHILE, Inflater, checked_compression, compress
from bridge.testing import Proxy, make_certificates
from bridge.wrappers import BlockingReset
from tests.http2_tools import BEGIN, STEP, Hand
from tests.support import SERVE, server_process

SHAPE = (84, 84, 3)
KINDS = ("zstd", "gzip")
ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"


class Pictures(gymnasium.Env[Any, Any]):
    """Gives pictures with a square that moves; after ten of them noise, which nothing compresses."""

    observation_space = gymnasium.spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = gymnasium.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        return self._picture(), {"at": 0}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        return self._picture(), float(action), self.at == 15, False, {"at": self.at}

    def _picture(self) -> Any:
        if self.at > 10:
            return self.np_random.integers(0, 256, SHAPE, np.uint8)
        picture = np.zeros(SHAPE, np.uint8)
        picture[self.at : self.at + 8, 20:28] = 200
        return picture


def played(env: gymnasium.Env[Any, Any]) -> list[Any]:
    """The results of an episode."""
    found: list[Any] = [env.reset(seed=3)]
    while len(found) == 1 or not (found[-1][2] or found[-1][3]):
        found.append(env.step(env.unwrapped.action_space.n - 1))
    env.close()
    return found


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one[0].dtype == other[0].dtype
        assert np.array_equal(one[0], other[0])
        assert one[1:] == other[1:]
        one[0][0] += 1  # writable, as the local one


@pytest.mark.parametrize("kind", KINDS)
def test_an_episode_is_bit_for_bit_the_same_with_fewer_bytes_on_the_wire(kind: str) -> None:
    passed = {}
    for compressed in (None, kind):
        with serve_gym(Pictures) as server, Proxy(server.port) as proxy:
            env = make_remote(f"grpc://127.0.0.1:{proxy.port}", compression=compressed)
            assert_same(played(env), played(Pictures()))
            passed[compressed] = proxy.passed
    size = int(np.prod(SHAPE))
    assert passed[None] > 16 * size
    assert 5 * size < passed[kind] < 6 * size  # the five of noise, as they are


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_and_slots_are_compressed_too(kind: str, tmp_path: Any) -> None:
    with serve_gym(Pictures, unix_path=tmp_path / "env.sock") as server:
        for url, count in ((f"{server.url}?num_envs=4", None), (server.url, 4), (f"unix://{tmp_path}/env.sock", 4)):
            plain, packed = (
                BlockingReset(make_vec_remote(url, num_envs=count, compression=how)) for how in (None, kind)
            )
            assert np.array_equal(plain.reset(seed=1)[0], packed.reset(seed=1)[0])
            for _ in range(20):
                for ours, theirs in zip(
                    *(envs.step(np.ones(4, np.int64))[:4] for envs in (packed, plain)), strict=True
                ):
                    assert np.array_equal(ours, theirs)
            plain.close()
            packed.close()


def test_the_url_asks_for_it_as_well_and_tls_carries_it(tmp_path: Any) -> None:
    certificates = make_certificates(tmp_path)
    keys: Any = {"tls": TLS(certificates["server.pem"], certificates["server.key"])}
    with serve_gym(Pictures, **keys) as server:
        url = f"grpcs://localhost:{server.port}?compression=zstd"
        assert_same(played(make_remote(url, tls=TLS(ca=certificates["ca.pem"]))), played(Pictures()))
        with pytest.raises(errors.SettingError, match="give one of them"):
            make_remote(url, tls=TLS(ca=certificates["ca.pem"]), compression="gzip")


def test_grpcio_at_either_end_speaks_gzip() -> None:
    local = played(Pictures())
    with serve_gym(Pictures, transport="grpcio") as server:
        assert_same(played(make_remote(server.url, compression="gzip")), local)
    with serve_gym(Pictures) as server, Proxy(server.port) as proxy:
        env = make_remote(f"grpc://127.0.0.1:{proxy.port}", compression="gzip", transport="grpcio")
        assert_same(played(env), local)
        assert proxy.passed < 6 * np.prod(SHAPE)
        with pytest.raises(errors.SettingError, match="transport='http2'"):
            make_remote(server.url, compression="zstd", transport="grpcio")


def test_what_is_no_compression_is_refused_with_words() -> None:
    for wrong in ("brotli", 3, ""):
        with pytest.raises(errors.SettingError, match="'zstd', 'gzip' or None"):
            make_remote("grpc://127.0.0.1:1", compression=wrong)
    with pytest.raises(errors.AddressError, match=r"in its query, expected compression="):
        make_remote("grpc://127.0.0.1:1?compression=lz4")


def test_an_end_without_zstd_says_what_to_install() -> None:
    without = f"import sys; sys.modules[{ZSTD!r}] = None\n"  # as where it is not installed
    with server_process(without + SERVE, "CartPole-v1", fresh=True) as (_, url):
        with pytest.raises(errors.RemoteError, match=r"extra `zstd` on the server"):
            make_remote(url, compression="zstd", timeout=20)
        client = without + (
            "import bridge\nfrom bridge.core.transport.messages import encodings\nprint(encodings())\n"
            "try:\n    bridge.make_remote(sys.argv[1], compression='zstd')\n"
            "except bridge.errors.SettingError as error:\n    print(error)\n"
        )
        command = [sys.executable, "-c", client, url]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.startswith("('deflate', 'gzip')\n")
    assert "pip install -e '.[zstd]'" in said


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_grows_beyond_the_limit_is_refused(kind: str) -> None:
    text = "max_message_bytes=20000 once it is uncompressed"
    with serve_gym(Pictures) as server, pytest.raises(errors.RemoteError, match=text):
        played(make_remote(server.url, compression=kind, max_message_bytes=20_000))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_client_that_leaves_in_the_midst_costs_nobody_anything(kind: str) -> None:
    with serve_gym(Pictures) as server:
        for _ in range(20):
            envs = make_vec_remote(server.url, num_envs=4, compression=kind)
            envs.reset(seed=0)
            envs.step_async(np.zeros(4, np.int64))
            envs.close()
        assert_same(played(make_remote(server.url, compression=kind)), played(Pictures()))


@given(data=st.binary(max_size=300), kind=st.sampled_from(KINDS))
def test_any_bytes_have_one_outcome_and_no_more_memory_than_asked_for(data: bytes, kind: str) -> None:
    for packed in (data, compress(kind, [data])[: len(data)]):
        reader = Inflater(kind)
        try:
            assert len(reader.take(packed, 100)) <= 100
        except (zlib.error, ValueError, OSError, _zstd_error()):
            continue


@given(parts=st.lists(st.binary(max_size=5000), max_size=5), kind=st.sampled_from(KINDS))
def test_what_was_compressed_reads_back_in_pieces(parts: list[bytes], kind: str) -> None:
    data, reader, found = b"".join(parts), Inflater(kind), b""
    packed = compress(kind, [memoryview(part) for part in parts])
    while not reader.eof:
        found += reader.take(packed, 1000)
        packed = b""
    assert found == data
    if kind == "gzip":
        assert gzip.decompress(compress(kind, [data])) == data


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_message_is_not_copied_for_each_of_its_pieces(kind: str) -> None:
    reader, read, packed = Inflater(kind), 0, compress(kind, [np.random.default_rng(1).bytes(16 << 20)])
    tracemalloc.start()
    try:
        while not reader.eof:
            read += len(reader.take(packed if not read else b"", 1 << 20))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read == 16 << 20
    assert most < 6 << 20


def test_a_window_wider_than_every_reader_takes_is_refused() -> None:
    zstd = importlib.import_module(ZSTD)
    options = {zstd.CompressionParameter.window_log: 27, zstd.CompressionParameter.enable_long_distance_matching: 1}
    packed = zstd.ZstdCompressor(options=options).compress(bytes(1 << 28), zstd.ZstdCompressor.FLUSH_FRAME)
    with pytest.raises(_zstd_error()):
        Inflater("zstd").take(packed, 1 << 20)


@pytest.mark.parametrize(("env", "compressed"), [("CartPole-v1", 0), (Pictures, 1)])
def test_small_answers_stay_as_they_are(env: Any, compressed: int) -> None:
    assert WORTHWHILE > 256
    assert checked_compression(None) is None
    with serve_gym(env) as server, Hand(server) as hand:
        number = hand.play(grpc_encoding="zstd", grpc_accept_encoding="zstd")
        for payload in [BEGIN, STEP, STEP]:
            hand.say(number, payload)
            hand.until(lambda: hand.has_answer(number))
            assert hand.bodies[number][0] == compressed  # the flag of gRPC's message
            hand.answer(number)


def _zstd_error() -> Any:
    return importlib.import_module(ZSTD).ZstdError

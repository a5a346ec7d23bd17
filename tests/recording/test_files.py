"""The files of a recording: what a stranger's folder holds is bounded, said in a line each, and hides nothing."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bridge import Recording, make_remote, serve_gym
from bridge.cli import main
from bridge.errors import RecordingError
from bridge.recording.reader import read_folder
from tests.support import sampled


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """The file of a sound recording."""
    with serve_gym("CartPole-v1", record=Recording(tmp_path, observations=True)) as server:
        env = make_remote(server.url)
        env.reset(seed=1)
        for step in range(8):
            env.step(step % 2)
        env.close()
    (file,) = tmp_path.glob("*.parquet")
    return file


def strange(folder: Path, data: bytes, suffix: str = "parquet") -> Path:
    """Write a file with the name of a recording, and digests that fit."""
    path = folder / f"20200101T000000-ffffff.1.000001.{suffix}"
    path.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    path.with_name(path.name + ".sums").write_text(f"0 {len(data)} {digest}\n")
    return path


def as_stream(table: pa.Table) -> bytes:
    with pa.ipc.new_stream(stream := io.BytesIO(), table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue()


def with_header(table: pa.Table, old: bytes, new: bytes) -> bytes:
    header = table.schema.metadata[b"bridge"]
    assert old in header
    return as_stream(table.replace_schema_metadata({b"bridge": header.replace(old, new)}))


def column(table: pa.Table, name: str, cells: Any) -> bytes:
    at, field = table.schema.get_field_index(name), table.schema.field(name)
    return as_stream(table.set_column(at, field, pa.array(cells, field.type)))


def of_shapes(table: pa.Table) -> bytes:
    """Rewards as lists of other lengths than their space says."""
    header = json.loads(table.schema.metadata[b"bridge"])
    header["reward_space"] = header["spaces"][0][0]  # four numbers of CartPole
    field = pa.field("reward", pa.list_(pa.field("element", pa.float32())))
    cells = pa.array([None, *[[1.0]] * (len(table) - 1)], field.type)
    table = table.set_column(table.schema.get_field_index("reward"), field, cells)
    return as_stream(table.replace_schema_metadata({b"bridge": json.dumps(header).encode()}))


HOSTILE: dict[str, Any] = {
    "garbage": lambda table: (b"PAR1 and nothing else", "parquet"),
    "nothing": lambda table: (b"", "arrow"),
    "another table": lambda table: (as_stream(pa.table({"a": [1]})), "arrow"),
    "a newer format": lambda table: (with_header(table, b'"format": 2', b'"format": 3'), "arrow"),
    "no header": lambda table: (as_stream(table.replace_schema_metadata({b"bridge": b"["})), "arrow"),
    "a million lanes more": lambda table: (
        with_header(table, b'"kind": "env"', b'"kind": "lanes", "lanes": 99999999999'),
        "arrow",
    ),
    "spaces that are none": lambda table: (with_header(table, b"Discrete", b"Discreet"), "arrow"),
    "a lane that is not there": lambda table: (column(table, "lane", [7] * len(table)), "arrow"),
    "calls out of order": lambda table: (column(table, "call", range(len(table), 0, -1)), "arrow"),
    "a time that is none": lambda table: (column(table, "time", [float("inf")] * len(table)), "arrow"),
    "versions that are none": lambda table: (with_header(table, b'"versions": {', b'"versions": 1, "": {'), "arrow"),
    "rewards of other shapes": lambda table: (of_shapes(table), "arrow"),
    "an event that is none": lambda table: (column(table, "event", ["{"] * len(table)), "arrow"),
    "a seed that is none": lambda table: (
        column(table, "event", ['{"seed": "os"}', *[None] * (len(table) - 1)]),
        "arrow",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_strangers_file_is_one_line_and_the_rest_is_listed(recorded, capsys, name):
    data, suffix = HOSTILE[name](pq.read_table(recorded))
    path = strange(recorded.parent, data, suffix)
    found = read_folder(recorded.parent)
    assert [len(stream.episodes()) for stream in found.streams] == [1]
    (damage,) = found.damage
    assert damage.path == path
    assert str(damage).isprintable()
    assert main(["runs", str(recorded.parent)]) == 0
    assert main(["replay", str(recorded.parent), "--verify"]) == 1
    out = capsys.readouterr().out
    assert "1 episode, 8 steps" in out
    assert "1 of 1 episodes are verified" in out


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs here")
def test_a_fifo_does_not_hang_and_what_has_no_digests_is_not_parsed(recorded):
    os.mkfifo(fifo := recorded.parent / "20200101T000000-ffffff.1.000001.parquet")
    fifo.with_name(fifo.name + ".sums").touch()
    recorded.with_name("20200101T000000-ffffff.2.000001.parquet").write_bytes(recorded.read_bytes())
    found = read_folder(recorded.parent)
    assert len(found.streams) == 1
    assert sorted("no regular file" in str(damage) for damage in found.damage) == [False, True]


def test_a_table_that_a_few_bytes_claim_is_not_made(recorded):
    """One value a million times over takes a few bytes in the file."""
    rows = (1 << 22) + 1
    table = pa.table({"call": pa.array(np.zeros(rows, np.int64))})
    pq.write_table(table, stream := io.BytesIO(), compression="zstd")
    data = stream.getvalue()
    assert len(data) < 100_000
    strange(recorded.parent, data)
    found = read_folder(recorded.parent)
    assert len(found.streams) == 1
    assert len(found.damage) >= 1


@pytest.mark.parametrize("dictionary", [False, True], ids=["batch", "dictionary"])
@pytest.mark.slow
def test_what_takes_more_memory_than_its_file_is_not_unpacked(recorded, dictionary):
    """A gigabyte of zeros is a file of kilobytes; pyarrow itself would unpack it to look at it."""
    kind = pa.dictionary(pa.int32(), pa.binary()) if dictionary else pa.binary()
    options, schema = pa.ipc.IpcWriteOptions(compression="zstd"), pa.schema([("call", kind)])
    with pa.ipc.new_stream(stream := io.BytesIO(), schema, options=options) as writer:
        for size in range(64 << 20, (64 << 20) + 17):
            cells = pa.array([bytes(size)])
            writer.write_batch(pa.record_batch([cells.dictionary_encode() if dictionary else cells], schema))
    data = stream.getvalue()
    assert len(data) < 200_000
    path = strange(recorded.parent, data, "arrow")
    folder = read_folder(recorded.parent)
    (damage,) = folder.damage
    assert str(damage).startswith(f"{path.name}: it cannot be read: its batches take 1")
    assert str(damage).endswith("bytes of memory, more than those of any recording")
    assert len(folder.episodes()) == 1
    code = (
        "import sys, pyarrow; from bridge.recording.reader import read_folder; read_folder(sys.argv[1]); "
        "print(pyarrow.default_memory_pool().max_memory())"
    )
    done = subprocess.run([sys.executable, "-c", code, recorded.parent], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16 << 20


def test_what_is_no_recording_is_refused_by_name(tmp_path):
    with pytest.raises(RecordingError, match="which does not exist"):
        read_folder(tmp_path / "nothing")
    with pytest.raises(RecordingError, match="which has none"):
        read_folder(tmp_path)


def test_a_folder_of_several_environments_is_verified_one_by_one(tmp_path, capsys):
    """The one that is registered by its own id, whatever --env says; the other by --env."""
    from tests.support import minigrid

    for make in ("CartPole-v1", minigrid):
        with serve_gym(make, record=tmp_path) as server:
            env = make_remote(server.url)
            for seed in (1, 2):
                env.reset(seed=seed)
                env.step(0)
            env.close()
    assert main(["replay", str(tmp_path), "--verify"]) == 1
    out = capsys.readouterr().out
    assert "2 of 4 episodes are verified" in out
    assert "2 episodes cannot be verified: the environment" in out
    named = re.search(r"for example --env (\S+)", out)  # what the error says works
    assert main(["replay", str(tmp_path), "--verify", "--env", named[1]]) == 0
    assert "4 of 4 episodes are verified" in capsys.readouterr().out


def lying(data: bytes) -> bytes:
    """A Parquet file whose footer claims that its pages take 100 bytes, where it says that they take many."""
    told = varint(pq.read_metadata(pa.BufferReader(data)).row_group(0).column(0).total_uncompressed_size)
    if len(told) < 4:  # there is another such number in the footer
        return data
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    assert told in data[footer:]
    return data[:footer] + data[footer:].replace(told, varint(100, len(told)))


def varint(value: int, size: int = 0) -> bytes:
    """An integer as the footer has it, in at least so many bytes."""
    value, found = value << 1, bytearray()
    while value > 127 or len(found) + 1 < size:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def with_digests(folder: Path, data: bytes) -> None:
    """Write a Parquet file of one row group with all the digests that it must have."""
    group = pq.read_metadata(pa.BufferReader(data)).row_group(0)
    chunk = group.column(group.num_columns - 1)
    end = min(filter(None, (chunk.data_page_offset, chunk.dictionary_page_offset))) + chunk.total_compressed_size
    digests = [hashlib.sha256(part).hexdigest() for part in (data[:end], data[end:])]
    copy = base64.b64encode(zlib.compress(data[end:])).decode()
    sum_of_copy = hashlib.sha256(copy.encode()).hexdigest()
    path = strange(folder, data)
    path.with_name(path.name + ".sums").write_text(
        f"0 {end} {digests[0]}\n{end} {len(data) - end} {digests[1]}\nfooter {sum_of_copy} {copy}\n"
    )


SPACES = " " * 4096
BOMBS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a list of nulls": (
        lambda: pa.table({"reward": pa.ListArray.from_arrays([0, 1 << 28], pa.nulls(1 << 28, pa.int8()))}),
        {"use_dictionary": False},
        "bytes of memory",
    ),
    "a text in a dictionary": (lambda: pa.table({"by": [SPACES] * (1 << 15)}), {}, "is encoded as none of ours"),
    "texts with one beginning": (
        lambda: pa.table({"by": [SPACES] * (1 << 15)}),
        {"use_dictionary": False, "column_encoding": {"by": "DELTA_BYTE_ARRAY"}},
        "is encoded as none of ours",
    ),
    "a huge text": (lambda: pa.table({"by": [" " * (1 << 30)]}), {"use_dictionary": False}, "bytes of memory"),
    "a wide value": (
        lambda: pa.table({"a": pa.array([b" " * (1 << 26)], pa.binary(1 << 26))}),
        {"use_dictionary": False},
        "is encoded as none of ours",
    ),
}


@pytest.mark.parametrize("name", sampled(BOMBS, 5, 1, slow=5))
def test_a_file_of_kilobytes_that_takes_a_gigabyte_is_refused_whatever_its_footer_says(recorded, name):
    make, options, said = BOMBS[name]
    pq.write_table(make(), stream := io.BytesIO(), compression="zstd", write_statistics=False, **options)
    data = lying(stream.getvalue())
    assert len(data) < 1 << 20
    with_digests(recorded.parent, data)
    code = (
        "import sys, pyarrow; from bridge.recording.reader import read_folder; found = read_folder(sys.argv[1]); "
        "print(len(found.episodes()), pyarrow.default_memory_pool().max_memory(), *found.damage)"
    )
    done = subprocess.run([sys.executable, "-c", code, recorded.parent], capture_output=True, text=True, check=True)
    episodes, most, damage = done.stdout.split(maxsplit=2)
    assert said in damage
    assert episodes == "1"
    assert int(most) < 32 << 20


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs here")
def test_runs_says_a_line_of_each_file_that_it_cannot_read_and_lists_the_rest(recorded, capsys):
    """A FIFO, another's file, one of a newer format, and one with two places that were changed."""
    folder, table = recorded.parent, pq.read_table(recorded)
    os.mkfifo(folder / "20200101T000000-fffff1.1.000001.parquet")
    (folder / "holiday.parquet").write_bytes(b"PAR1")
    strange(folder, with_header(table, b'"format": 2', b'"format": 3'), "arrow")
    changed = folder / "20200101T000000-fffff2.1.000001.parquet"
    data = bytearray(recorded.read_bytes())
    data[100] ^= 1
    changed.write_bytes(data + b"more")
    sums = recorded.with_name(recorded.name + ".sums").read_bytes()
    changed.with_name(changed.name + ".sums").write_bytes(sums)
    assert main(["runs", str(folder)]) == 0
    out = capsys.readouterr().out
    warnings = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert sorted(line.split(": ")[1] for line in warnings) == [
        "20200101T000000-fffff1.1.000001.parquet",
        "20200101T000000-fffff2.1.000001.parquet",
        "20200101T000000-ffffff.1.000001.arrow",
        "holiday.parquet",
    ]
    assert "(and 1 more)" in out
    assert "1 episode, 8 steps" in out


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux's")
@pytest.mark.slow
def test_a_recording_is_read_with_little_memory(recorded):
    """To read a file takes memory for what it holds, and not for the largest one there may be."""
    code = (
        "import resource, sys; from bridge.recording.reader import read_folder; "
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + (512 << 20); "
        "resource.setrlimit(resource.RLIMIT_AS, (size, size)); found = read_folder(sys.argv[1]); "
        "print(len(found.episodes()), *found.damage)"
    )
    done = subprocess.run([sys.executable, "-c", code, recorded.parent], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


@pytest.mark.slow
def test_the_newest_recordings_are_read_however_many_files_there_are(recorded, monkeypatch):
    real = Path.iterdir
    older = [recorded.with_name(f"00000000T000000-ffffff.{number}.tmp") for number in range(100_001)]
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([*older, *real(folder)]))
    found = read_folder(recorded.parent, 1)
    assert not found.damage
    assert [episode.length for episode in found.episodes()] == [8]

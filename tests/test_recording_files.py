"""`bridge.recording.files`: records as bytes, cut, changed and mixed with garbage, and read from the documentation."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from bridge.errors import RecordingError
from bridge.recording.files import HEAD, Damage, Record, pack_record, read_records
from bridge.recording.reader import read_folder
from tests.recording_reader import read_file


def written(path: Path, *records: bytes) -> Path:
    path.write_bytes(HEAD + b"".join(records))
    return path


RECORDS = [
    pack_record({"type": "world", "number": number}, {"a": np.arange(10, dtype=np.int16)}) for number in range(3)
]


def test_records_come_back_as_they_were(tmp_path):
    big = np.zeros((100, 100), np.uint8)
    path = written(tmp_path / "x.rec", pack_record({"type": "rows", "ü": 1}, {"a": big, "b": np.array([1.5, np.nan])}))
    (record,) = read_records(path)
    assert isinstance(record, Record)
    assert record.header["ü"] == 1
    assert record.header["columns"][0]["compression"] == "zlib"
    assert record.column("a").tobytes() == big.tobytes()
    assert record.column("b").tobytes() == np.array([1.5, np.nan]).tobytes()
    with pytest.raises(RecordingError, match="has no column 'c'; it has a, b"):
        record.column("c")
    ((header, columns),) = read_file(path)
    assert header["ü"] == 1
    assert columns["a"].tobytes() == big.tobytes()


def test_a_file_cut_anywhere_gives_its_whole_records_and_says_the_rest(tmp_path):
    whole = HEAD + b"".join(RECORDS)
    ends = [len(HEAD) + sum(map(len, RECORDS[:number])) for number in range(4)]
    for size in range(len(whole)):
        path = tmp_path / "x.rec"
        path.write_bytes(whole[:size])
        found = list(read_records(path))
        there = sum(end <= size for end in ends[1:])
        assert [record.header["number"] for record in found if isinstance(record, Record)] == list(range(there))
        damage = [item for item in found if isinstance(item, Damage)]
        assert [item.torn for item in damage] == ([] if size in ends or size < len(HEAD) else [True])


def test_bytes_that_are_no_record_are_skipped_up_to_the_next(tmp_path):
    path = written(tmp_path / "x.rec", RECORDS[0], b"garbage", RECORDS[1])
    first, damage, second = read_records(path)
    assert (first.header["number"], second.header["number"]) == (0, 1)
    assert str(damage) == f"x.rec: bytes that are no record, 7 bytes from byte {16 + len(RECORDS[0])} on, skipped"


@pytest.mark.parametrize("at", range(len(RECORDS[1])))
def test_no_byte_of_a_record_can_change_unseen(tmp_path, at):
    changed = bytearray(RECORDS[1])
    changed[at] ^= 1
    found = list(read_records(written(tmp_path / "x.rec", RECORDS[0], bytes(changed), RECORDS[2])))
    good = [item.header["number"] for item in found if isinstance(item, Record) and not item.damaged]
    assert good == [0, 2]


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "x.rec"
    path.write_bytes(b"something else, and long enough")
    with pytest.raises(RecordingError, match=r"expected .*x\.rec to be a recording of format version 1"):
        list(read_records(path))
    with pytest.raises(RecordingError, match="which does not exist"):
        read_folder(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordingError, match="which has none"):
        read_folder(tmp_path / "empty")


def test_the_page_has_the_marks_of_the_code():
    page = (Path(__file__).parent.parent / "docs" / "recordings.md").read_text(encoding="utf-8")
    assert "A9 52 45 43" in page
    payload = RECORDS[0][12:]
    assert RECORDS[0][:12] == struct.pack("<4sII", bytes.fromhex("A9524543"), len(payload), zlib.crc32(payload))

"""`bridge.recording.library`: the list of a folder's episodes, which another process reads."""

from __future__ import annotations

from bridge.recording.library import Library
from tests.support import until


def test_a_foreign_file_does_not_hide_a_folder_and_the_list_ends_with_the_server(tmp_path):
    (tmp_path / "other.parquet").write_bytes(b"something else")
    lists = []
    shelf = Library(tmp_path)

    def there() -> bool:
        lists.append(shelf.list())
        return not lists[-1]["reading"]

    until(there, 60)
    assert lists[-1] == {"episodes": [], "reading": False, "problem": ""}
    shelf = Library(tmp_path)
    assert shelf.list()["reading"]
    shelf.close()
    shelf.close()


def test_what_packages_print_when_they_are_imported_is_no_part_of_the_list(tmp_path, monkeypatch):
    """Neither text that only looks like JSON nor a line of a log that is written as JSON."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "other.parquet").write_bytes(b"something else")
    lines = "import sys\nprint('{no JSON')\nprint('{\"level\": 1}', file=sys.stderr)\n"
    (tmp_path / "sitecustomize.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    shelf = Library(tmp_path / "runs")
    until(lambda: not shelf.list()["reading"], 60)
    assert shelf.list() == {"episodes": [], "reading": False, "problem": ""}
    shelf.close()


def test_an_empty_folder_is_an_empty_list_at_once(tmp_path):
    """No process reads it: one that began before the first file was there would call that a problem."""
    shelf = Library(tmp_path)
    assert shelf.list() == {"episodes": [], "reading": False, "problem": ""}
    shelf.close()


def test_a_module_in_the_folder_is_not_imported(tmp_path):
    (tmp_path / "other.parquet").write_bytes(b"something else")
    (tmp_path / "numpy.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
    shelf = Library(tmp_path)
    until(lambda: not shelf.list()["reading"], 60)
    assert shelf.list() == {"episodes": [], "reading": False, "problem": ""}
    shelf.close()
    assert not (tmp_path / "imported").exists()

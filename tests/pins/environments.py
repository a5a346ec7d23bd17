"""Packages that pin an older Gymnasium than the newest, each installed by pip beside this one, without overrides.

`python -m tests.pins.environments` makes what is missing in `.venv-versions/pins-NAME`, and says what cannot be
installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.old_pythons.environments import Play
from tests.versions.environments import FOLDER, SIDE_BY_SIDE, Environment, editable_wheel, make

REASON = "could-not-be-installed.txt"


@dataclass(frozen=True)
class Pinned:
    """A package, and what is played of it."""

    environment: Environment
    plays: tuple[Play, ...]
    """Empty: a trainer."""
    single: tuple[Play, ...] = ()
    """Environments played without lanes: vector environments raise for infos whose arrays differ in shape."""

    @property
    def reason(self) -> str | None:
        """Why it is not there; None: it is."""
        if (FOLDER / self.environment.name / "made").is_file():
            return None
        note = FOLDER / f"{self.environment.name}-{REASON}"
        return note.read_text() if note.exists() else "it was not installed yet: make test-pins does it"


def pinned(package: str, *plays: Play, before: tuple[str, ...] = (), single: tuple[Play, ...] = ()) -> Pinned:
    """Return a package with what is installed before it."""
    name = "pins-" + package.partition("[")[0].partition("=")[0]
    return Pinned(Environment(name, "3.11", (package,), before=before, tests=()), plays, single)


# Without the CUDA libraries, which no test needs and which are gigabytes.
TORCH = (os.environ.get("TORCH", "torch==2.13.0"),)
RLLIB = pinned("ray[rllib]==2.60.0", before=TORCH)
ZOOS = (
    pinned("gymnasium-2048", Play("gymnasium_2048:gymnasium_2048/TwentyFortyEight-v0")),
    pinned(
        "gymnasium-search-race",
        Play("gymnasium_search_race:gymnasium_search_race/SearchRace-v3"),
        before=TORCH,
        single=(Play("gymnasium_search_race:gymnasium_search_race/MadPodRacingDiscrete-v2"),),
    ),
    pinned("myosuite", Play("myosuite:myoElbowPoseTaskRandom-v0"), before=TORCH),
)


def main() -> None:
    """Make what is missing."""
    wheel = editable_wheel()

    def make_or_note(each: Pinned) -> None:
        note = FOLDER / f"{each.environment.name}-{REASON}"
        note.unlink(missing_ok=True)
        try:
            make(each.environment, wheel)
        except subprocess.CalledProcessError as error:
            note.write_text(f"{' '.join(map(str, error.cmd))} ended with {error.returncode}")
            print(f"{each.environment.name} could not be installed: {note.read_text()}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        list(pool.map(make_or_note, (*ZOOS, RLLIB)))


if __name__ == "__main__":
    main()

"""Runs the code that comes over standard input, in the interpreter of an older or of today's version.

`tests.old_peer.interpreter` starts it as a script, so that `bridge` is the one that its interpreter has installed.
"""

from __future__ import annotations

import base64
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

# The script's own folder is on the path already, with `plays`; the tests' folder has `parallel_envs`.
sys.path.append(str(Path(__file__).resolve().parent.parent))


def main() -> None:
    """Answer each request by what its code assigns to `result`, or by the traceback."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what code prints must not be taken for an answer
    names: dict[str, Any] = {}
    for line in sys.stdin:
        code, values = pickle.loads(base64.b64decode(line))
        names.update(values)
        names["result"] = None
        try:
            exec(code, names)
            answer = (True, names["result"])
            data = pickle.dumps(answer)
        except Exception:
            data = pickle.dumps((False, traceback.format_exc()))
        answers.write(base64.b64encode(data).decode() + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

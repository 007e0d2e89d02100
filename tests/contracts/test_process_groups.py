"""A rank leaves its process groups whatever becomes of the collectives in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "support" / "failed_collective.py"


def test_a_collective_that_fails_while_garbage_is_collected_keeps_nobody() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "left\n", done.stderr

"""Tests that run side by side share the cores alike.

Ray starts its workers with niceness 15. Beside another test's process, which has none, they would get a thirtieth of a
core, and whatever counts on a store or a rank to go on within seconds would fail.
"""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("RAY_worker_niceness", "0")

"""Moved to ``elastic.protocol.shares``; this name goes away."""

from elastic.protocol.shares import *  # noqa: F403

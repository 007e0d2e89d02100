"""Moved to ``elastic.protocol.commit``; this name goes away."""

from elastic.protocol.commit import *  # noqa: F403

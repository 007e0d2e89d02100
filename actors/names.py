"""Names of the actors of a run, by which a new controller or a command from another process finds them."""

from __future__ import annotations

NAMESPACE = "ray-elastic"


def controller_name(run: str) -> str:
    return f"elastic:{run}:controller"


def rendezvous_name(run: str) -> str:
    return f"elastic:{run}:rendezvous"


def store_name(run: str, node: str) -> str:
    return f"elastic:{run}:store:{node}"


def member_name(run: str, member: str) -> str:
    return f"elastic:{run}:rank:{member}"

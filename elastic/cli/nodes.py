"""``elastic nodes``: what a run makes of its nodes; leave one, or use it again."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from elastic.cli.connect import run_handle
from elastic.cli.output import command, count, print_json, seconds
from elastic.errors import ConfigError

RUN = typer.Option("--run", metavar="RUN", help="Not needed where there is only one.")
ADDRESS = typer.Option("--address", help="The Ray cluster; default: the local one.")
JSON = typer.Option("--json", help="One JSON object.")
NODE = typer.Argument(metavar="NODE", help="Its id, or as much of the beginning as is clear.")


def register(app: typer.Typer) -> None:
    """Add ``nodes`` to the command line."""
    nodes = typer.Typer(help="The nodes of a run: list them, leave one, use it again.", no_args_is_help=True)
    nodes.command("list", help="What the run makes of each node.")(command(list_nodes))
    nodes.command("exclude", help="Leave a node at the next boundary, and do not use it again.")(command(exclude))
    nodes.command("readmit", help="Use a node again that was excluded, left alone or told to end.")(command(readmit))
    app.add_typer(nodes, name="nodes")


def list_nodes(
    run: Annotated[str | None, RUN] = None,
    address: Annotated[str | None, ADDRESS] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Every node that the run knows: its ranks, its failures, and whether it is used."""
    with run_handle(address, run) as handle:
        now = handle.status()
    if as_json:
        print_json({"run": now["run"], "nodes": now["node_list"]})
        return
    for node in sorted(now["node_list"], key=lambda node: node["node"]):
        state = ", ".join(node_state(node)) or ("in use" if node["members"] else "free")
        print(f"{node['node'][:12]}  {count(len(node['members']), 'rank')} of {node['capacity']}  {state}")


def exclude(
    node: Annotated[str, NODE],
    run: Annotated[str | None, RUN] = None,
    within_s: Annotated[
        float | None, typer.Option("--within", help="Seconds after which the node goes in any case; default: never.")
    ] = None,
    address: Annotated[str | None, ADDRESS] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Move the run's ranks off the node, without losing a step."""
    if within_s is not None and not within_s > 0:
        raise ConfigError("--within", within_s, "use seconds above 0")
    with run_handle(address, run) as handle:
        now = handle.status()
        found = find_node(now["node_list"], node)
        handle.exclude(found["node"], within_s)
    others = sum(other["capacity"] for other in now["node_list"] if other is not found and not node_state(other))
    if as_json:
        print_json({"run": now["run"], "node": found["node"], "excluded": True, "capacity_elsewhere": others})
        return
    print(f"run {now['run']!r} leaves node {found['node'][:12]} with {count(len(found['members']), 'rank')}")
    print(f"  the other nodes can carry {others} of the {now['target']} ranks that are wanted")
    if others < now["smallest"]:
        print(f"  the smallest mesh needs {now['smallest']}: it goes on there until another place is found")


def readmit(
    node: Annotated[str, NODE],
    run: Annotated[str | None, RUN] = None,
    address: Annotated[str | None, ADDRESS] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Take back what was said against the node; a drain is Ray's to end."""
    with run_handle(address, run) as handle:
        now = handle.status()
        found = find_node(now["node_list"], node)
        handle.readmit(found["node"])
    drains = any(word["by"] == "drain" for word in found["leaving"])
    if as_json:
        print_json({"run": now["run"], "node": found["node"], "excluded": False, "drains": drains})
        return
    print(f"run {now['run']!r} may use node {found['node'][:12]} again" + (", once Ray drains it no more" * drains))


def find_node(nodes: list[dict[str, Any]], wanted: str) -> dict[str, Any]:
    """The node whose id begins with ``wanted``. Raises ConfigError if there is none, or more than one."""
    found = [node for node in nodes if node["node"].startswith(wanted)]
    if len(found) != 1 or not wanted:
        known = ", ".join(sorted(node["node"][:12] for node in found or nodes)) or "none"
        why = "several nodes begin so" if found else "the run knows no such node"
        raise ConfigError("NODE", wanted, f"{why}: {known}")
    return found[0]


_BY = {"drain": "drains", "exclude": "excluded", "sigterm": "told to end", "straggler": "slow"}


def node_state(node: dict[str, Any]) -> list[str]:
    """Why a node is not used, or not for long, in words; nothing for one that is."""
    words = []
    for word in node["leaving"]:
        text = _BY.get(word["by"], word["by"])
        words.append(text if word["left_s"] is None else f"{text}, goes in {seconds(max(0.0, word['left_s']))}")
    if node["left_alone_s"] > 0:
        words.append(f"left alone for {seconds(node['left_alone_s'])} after {count(node['failures'], 'failure')}")
    if node["store"] == "refused":
        words.append("refused")
    return words

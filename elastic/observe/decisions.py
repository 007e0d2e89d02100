"""What a run decided and why, in sentences, from the records of its journal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def sentence(record: Mapping[str, Any]) -> str:
    """One record in a sentence; empty for what is no news for a person."""
    kind = record["kind"]
    if kind == "started":
        return f"controller {record['epoch']} starts the run"
    if kind == "adopted":
        return f"controller {record['epoch']} takes over from one that was lost"
    if kind == "begun":
        size, step = record["world_size"], record["restore_step"]
        where = f"from step {step} ({record['tier']})" if step is not None else "afresh"
        begins = f"generation {record['generation']} begins {where} with {size} ranks ({record['mesh']})"
        return f"{begins}: {record['reason']}"
    if kind == "asked":
        return f"a user asked: {record['what']}" + (f" {record['workers']}" if record.get("workers") else "")
    if kind == "notice":
        what = "stays" if record.get("over") else f"goes away: {record.get('why', '')}"
        return f"node {str(record['node'])[:12]} {what}"
    if kind == "incident":
        told = record["incident"]
        return (
            f"{told['kind']} failure: {told['why']}; {told['rung']} with {told['new_world_size']} ranks from step "
            f"{told['restored_step']}, {told['steps_lost']} steps lost, back after {told['rto_s']:.2f} s"
        )
    if kind == "alarm":
        return f"alarm: {record['reason']}"
    if kind == "ended":
        return f"{record['status']}: {record['reason']}"
    return ""

"""The journal of a run: what happened, one JSON object a line, in segments that are written once. Pure.

A record has at least ``kind`` and ``t`` (seconds since 1970, for people). The kinds that other code reads:

    segment     generation, epoch, life, state: the head of each segment (see ``resume`` and ``run_record``)
    started     the first controller of a life of the run; adopted: one that took over from another
    begun       generation, world_size, mesh, ranks, restore_step, tier, reason    before the ranks are told
    asked       what a user asked for                                              before they are answered
    snapshot    the report of a committed snapshot
    committed   attempt, step, purpose, places, ledger                             before the stores are told
    durable     attempt, step                                                      after the marker is written
    ended       status, reason, error                                              before anything is torn down
    stall, write, restore, failure, exposure                                       measurements (see policies and tune)
    metrics     generation, rank, rows: rank 0's, or another's that fill in        with the next decision, or soon
    hang        generation, members, phase, why, stacks, standing                  before the members are killed
    incident    one incident with its RTO split
    interval    the interval that was adopted, with its reason
    notice      node, by, why, left_s: a node goes away; with ``over`` that it does not
    evacuation  what notices led to: by, nodes, purpose, decided_s, out_s, stood_still_s
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from elastic import errors
from elastic.errors import CorruptSnapshot, ElasticError

PREFIX = "journal/"


def segment_key(run: str, controller: str, sequence: int) -> str:
    """The name of one segment: never used twice."""
    return f"{run}/{PREFIX}{controller}-{sequence:08d}.jsonl"


def stacks_key(generation: int, member: str) -> str:
    """Where the stacks of all ranks lie, relative to the run, that were saved before ``member`` was killed."""
    return f"{PREFIX}hang-g{generation:06d}-{member}.stacks"


def encode(records: Iterable[Mapping[str, Any]]) -> bytes:
    """The bytes of a segment."""
    return "".join(json.dumps(record, separators=(",", ":"), default=str) + "\n" for record in records).encode()


def decode(data: bytes, where: str) -> Iterator[dict[str, Any]]:
    """The records of a segment. Raises CorruptSnapshot with the line number for what is not a record."""
    for number, line in enumerate(data.splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or "kind" not in record:
            raise CorruptSnapshot("the journal holds a line that is no record", f"{where}, line {number}")
        yield record


def plain_error(error: ElasticError | None) -> dict[str, Any] | None:
    """An error as JSON has it; see ``error_of``."""
    return None if error is None else {"type": type(error).__name__, "args": list(error.args)}


def error_of(value: Mapping[str, Any] | None) -> ElasticError | None:
    """Inverse of ``plain_error``; an error of a type that is not known here becomes an ElasticError with its text."""
    if value is None:
        return None
    kind = getattr(errors, value["type"], None)
    if not (isinstance(kind, type) and issubclass(kind, ElasticError)):
        return ElasticError(*value["args"])
    return kind(*value["args"])

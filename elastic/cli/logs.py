"""``elastic logs``: what the ranks print and the controller decides, while the run goes on and afterwards."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic.cli.connect import run_handle
from elastic.cli.local_runs import local_runs
from elastic.cli.output import command
from elastic.cli.run_settings import absolute
from elastic.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from actors.launch import RunHandle
    from elastic.observe.prints import Line

POLL_S = 0.3


def register(app: typer.Typer) -> None:
    """Add ``logs`` to the command line."""
    app.command("logs", help="What the ranks print and the controller decides.")(command(logs))


def logs(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Not needed where there is only one.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", help="Only this rank's lines.")] = None,
    tail: Annotated[int | None, typer.Option("--tail", min=0, help="Only so many of the lines that are there.")] = None,
    address: Annotated[str | None, typer.Option("--address", help="The Ray cluster; default: the local one.")] = None,
    storage: Annotated[
        str | None, typer.Option("--storage", help="Where the run is stored, for when it has ended.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Lines in the order of their time. The controller's decisions have no rank."""
    try:
        with run_handle(address, run) as handle:
            reader = Reader(handle, rank)
            show(reader.read(), tail, as_json)
            result = None
            while follow and (result := handle.poll(POLL_S)) is None:
                show(reader.read(), None, as_json)
            if result is not None:
                show(reader.rest(result.storage), None, as_json)
        return
    except ClusterError:
        known = absolute(storage) if storage else _storage_of(run)
        if not known or run is None:
            raise
    show(stored(known, run, rank), tail, as_json)


class Reader:
    """Reads what is new of a run that is under way."""

    def __init__(self, handle: RunHandle, rank: int | None, *, decisions: bool = True) -> None:
        self._handle, self._rank, self._decisions = handle, rank, decisions and rank is None
        self._cursors: dict[str, dict[str, int]] = {}
        self._decided_at = 0.0
        self._newest: dict[str, float] = {}
        """When each rank process printed the last line that was read."""

    def read(self) -> list[Line]:
        """All that was printed and decided since the last call, in the order of its time."""
        found: list[Line] = []
        while more := self._handle.prints(self._cursors):
            found += [line for line in more if self._rank in (None, line.rank)]
        if self._decisions:
            for t, text in self._handle.decisions(self._decided_at):
                found.append(_decision(t, text))
                self._decided_at = t
        self._newest.update((line.member, line.t) for line in sorted(found, key=lambda line: line.t))
        return sorted(found, key=lambda line: line.t)

    def rest(self, storage: str) -> list[Line]:
        """What was printed after the last read of a run that has ended since, as its stores have left it there."""
        newest = self._newest
        lines = stored(storage, self._handle.name, self._rank)
        return [line for line in lines if line.t > newest.get(line.member, self._decided_at)]


def _decision(t: float, text: str) -> Line:
    from elastic.observe.prints import Line

    return Line(t, -1, -1, "", "decision", text)


def stored(storage: str, run: str, rank: int | None) -> list[Line]:
    """What storage holds: the lines that the stores left when the run ended, and the decisions of the journal."""
    from elastic.observe.decisions import sentence
    from elastic.observe.history import journal_records
    from elastic.observe.prints import PREFIX, decode_line
    from elastic.storage.blob_store import open_store

    store = open_store(storage)
    if not store.exists(f"{run}/run.json"):
        raise ConfigError("RUN", run, f"there is no such run in {storage}")
    found = []
    for key in store.list(f"{run}/{PREFIX}"):
        for text in store.get(key).decode(errors="replace").splitlines():
            line = decode_line(text)
            if line is not None and rank in (None, line.rank):
                found.append(line)
    if rank is None:
        told = [(record["t"], sentence(record)) for record in journal_records(store, run, [])]
        found += [_decision(t, text) for t, text in told if text]
    return sorted(found, key=lambda line: line.t)


def show(lines: Iterable[Line], tail: int | None, as_json: bool) -> None:
    """Print them."""
    for line in deque(lines, maxlen=tail) if tail is not None else lines:
        print(json.dumps(asdict(line)) if as_json else "".join(_words(line)), flush=True)


def _words(line: Line) -> Iterator[Any]:
    yield time.strftime("%H:%M:%S ", time.localtime(line.t))
    if line.stream == "decision":
        yield "controller: "
    else:
        yield f"[rank {line.rank}] " if line.rank >= 0 else f"[{line.member}] "
    yield line.text


def _storage_of(run: str | None) -> str:
    return next((record.storage for record in local_runs() if run in (None, record.run)), "")

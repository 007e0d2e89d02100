"""A cluster that grows: a head with room for one rank, and Ray's own autoscaler with nodes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import ray
from ray.cluster_utils import Cluster

STORE_BYTES = 100 << 20


@contextlib.contextmanager
def autoscaling_cluster(directory: Path, most: int) -> Iterator[str]:
    """The address of a cluster that can have ``most`` nodes of one CPU beside its head, and has none of them yet."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    config = directory / "autoscaling.json"
    config.write_text(json.dumps(_config(f"{ray.util.get_node_ip_address()}:{port}", most)))
    with mock.patch.dict(os.environ, RAY_FAKE_CLUSTER="1", AUTOSCALER_UPDATE_INTERVAL_S="1"):
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "object_store_memory": STORE_BYTES,
                "include_dashboard": False,
                "gcs_server_port": port,
                "autoscaling_config": str(config),
            },
        )
    session = cluster.head_node.get_session_dir_path()
    monitor = psutil.Process(cluster.head_node.all_processes["monitor"][0].process.pid)
    try:
        yield cluster.address
    finally:
        monitor.suspend()  # else it makes another node while its nodes are ended
        made = monitor.children(recursive=True)
        for process in made:
            with contextlib.suppress(psutil.Error):
                process.kill()
        cluster.shutdown()
        psutil.wait_procs(made, timeout=10)
        shutil.rmtree(session, ignore_errors=True)


def _config(gcs_address: str, most: int) -> dict[str, object]:
    lists = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
    lists += ("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files")
    lists += ("rsync_exclude", "rsync_filter")
    worker = {"resources": {"CPU": 1, "object_store_memory": STORE_BYTES}, "node_config": {}, "max_workers": most}
    return {
        **{name: [] for name in lists},
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        "cluster_name": "growing",
        "max_workers": most,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": 5,
        "file_mounts_sync_continuously": False,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": gcs_address,
            # Its nodes are processes here: nobody can log in to look after them, and none of them says that it lives.
            "disable_node_updaters": True,
            "worker_liveness_check": False,
            "foreground_node_launch": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "worker": worker,
        },
    }

"""Starts a cluster of one rank that can grow, and a run of two on it; stops the run when it has grown, and says as JSON
what it came to and what is still asked of the autoscaler."""

import json
import sys
from pathlib import Path

import ray
from jobs import __file__ as jobs_file
from support.autoscaling import autoscaling_cluster
from support.cluster import when

import elastic
from actors.names import NAMESPACE
from elastic.observe.history import journal_records
from elastic.storage.blob_store import open_store


def main(directory: Path) -> None:
    with autoscaling_cluster(directory, most=1) as address:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False)
        handle = elastic.ElasticTrainer(
            f"{jobs_file}:train",
            train_loop_config={"step_s": 0.05},
            scaling_config=elastic.ScalingConfig(num_workers=(1, 2)),
            run_config=elastic.RunConfig(name="growing", storage_path=str(directory)),
        ).start()
        when(handle, lambda s: s["world_size"] == 2 and s["step"] >= 5, 60, "the second rank")
        handle.stop()
        result = handle.wait()
        cluster = ray._raylet.GcsClient(address=address)
        left = cluster.internal_kv_get(b"autoscaler_resource_request", None)
        keys = cluster.internal_kv_keys(b"elastic-demand:", None)
        ray.shutdown()
    journal = list(journal_records(open_store(str(directory)), "growing"))
    told = {
        "status": result.status,
        "world_sizes": [generation.world_size for generation in result.generations],
        "steps_lost": result.steps_lost,
        "asked": [[r["ranks"], r["resources"]] for r in journal if r["kind"] == "demand"],
        "left": [json.loads(left), len(keys)],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Starts a cluster and a run on it, says when step 23 is done, and waits to be killed with all its processes."""

import signal
import sys

import ray
from jobs import __file__ as jobs_file

import elastic


def main(storage: str) -> None:
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, namespace="ray-elastic")
    handle = elastic.ElasticTrainer(
        f"{jobs_file}:train",
        train_loop_config={"steps": 40, "dropout": 0.2, "step_s": 0.3},
        scaling_config=elastic.ScalingConfig(num_workers=4),
        run_config=elastic.RunConfig(
            name="thrown-away", storage_path=storage, snapshots=elastic.SnapshotConfig(interval="5 steps")
        ),
    ).start()
    while (step := handle.status()["step"]) < 23:
        if handle.poll(0.05) is not None:
            raise SystemExit("the run ended early")
    print(step, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])

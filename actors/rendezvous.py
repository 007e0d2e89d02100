"""The key-value store in which ranks meet. Outside of the ranks, one prefix a generation, the last to exit.

It is an actor of its own, so that neither the death of a rank nor that of the controller takes it away. Where it dies
itself Ray starts it again, at another port and empty, which is enough: ranks that have met need it no more.
"""

from __future__ import annotations

from datetime import timedelta

import ray

from actors.terminate import die_of_sigterm


@ray.remote(num_cpus=0, max_concurrency=2, max_restarts=-1, max_task_retries=-1)
class Rendezvous:
    """Hosts one ``torch.distributed.TCPStore``."""

    def __init__(self) -> None:
        die_of_sigterm()
        import torch.distributed as dist  # here, so that the controller, which makes this actor, needs no torch

        self.host = ray.util.get_node_ip_address()
        self.store = dist.TCPStore(self.host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))

    def address(self) -> tuple[str, int]:
        """Host and port for ``TCPStore(host, port, is_master=False)``."""
        return self.host, self.store.port

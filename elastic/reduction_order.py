"""Fixes the order in which DistributedDataParallel sums gradients, so that a restored run adds as the first one did.

DDP packs gradients into buckets, and after its first iteration rebuilds them in the order in which gradients became
ready. A ring all-reduce sums each chunk of a bucket starting at another rank, so where a gradient lies in its bucket
decides the order of the additions, hence the last bits. A run that was restored at step k would take step k with the
first layout where the uninterrupted run took it with the rebuilt one. Measured on gloo with 4 ranks: unequal bits.

Here the rebuild happens at once, in reverse order of the parameters: what DDP assumes before it has seen a backward
pass, so communication overlaps the backward pass as usual, and the layout is the same in every generation.
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger("elastic.reduction_order")


def fix_bucket_layout(value: Any) -> bool:
    """Give a DDP module its final bucket layout now. A collective on its process group; True if it was done.

    Nothing is done for other objects, for a module that never rebuilds (``find_unused_parameters``), or one whose
    buckets were rebuilt already. Uses internals of torch 2.13; where they are missing, the trajectory after a restore
    is equal within rounding instead of bitwise, and a warning says so.
    """
    if not isinstance(value, DistributedDataParallel) or value.find_unused_parameters or value.static_graph:
        return False
    if value.mixed_precision is not None or not dist.is_initialized():
        return False
    try:
        parameters, expect_sparse = value._build_params_for_reducer()
        parameters.reverse()
        expect_sparse.reverse()
        names = value._build_debug_param_to_name_mapping(parameters)
        value._ddp_init_helper(parameters, expect_sparse, names, value.static_graph)
        value.reducer._push_all_rebuilt_params()
        return bool(value.reducer._rebuild_buckets())
    except (AttributeError, TypeError) as error:
        log.warning("DDP's bucket layout could not be fixed (%s): a restored run equals within rounding only", error)
        return False

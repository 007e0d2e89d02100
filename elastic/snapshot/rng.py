"""Generators derived from (seed, step, coordinate): the same step draws the same numbers after any restart.

Seeding anew at each boundary makes generator state something that need not be saved. It is on the path of every step
and takes some ten microseconds; numpy and CUDA are seeded only if the program uses them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch


def seed_everything(seed: int, step: int, coordinate: Mapping[str, int]) -> None:
    """Seed Python's, numpy's, torch's CPU and, once initialised, CUDA generators of this process.

    The seeds are a BLAKE2b digest of all three inputs: near ones share nothing, each generator has its own, and ranks
    at different ``coordinate`` (axis → index, in any order) draw different numbers.
    """
    key = f"{seed} {step} {sorted(coordinate.items())}"
    digest = int.from_bytes(blake2b(key.encode(), digest_size=24).digest(), "little")
    random.seed(digest >> 128)
    torch.default_generator.manual_seed(digest & 0xFFFF_FFFF_FFFF_FFFF)
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed((digest >> 64) & 0xFFFF_FFFF)
    if torch.cuda._initialized:
        torch.cuda.manual_seed((digest >> 64) & 0xFFFF_FFFF_FFFF_FFFF)


def saved_generators() -> dict[str, Any]:
    """The state of the same generators, as plain values for a tree."""
    import numpy

    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.default_generator.get_state().numpy(),
    }
    if torch.cuda._initialized:
        state["cuda"] = torch.cuda.get_rng_state().numpy()
    return state


def load_generators(state: Mapping[str, Any]) -> None:
    """Put back what ``saved_generators`` gave. A CUDA state is put back only where CUDA is in use."""
    import numpy

    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.default_generator.set_state(torch.from_numpy(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(state["cuda"]))

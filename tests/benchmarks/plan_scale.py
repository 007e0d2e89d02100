"""The real planners on the metadata of a 405B-parameter model on 16,384 ranks, in one process.

    python tests/benchmarks/plan_scale.py [--quick] [--json] [--repeats 5]

A decoder of 126 layers (hidden 16,384, feed-forward 53,248, 128 heads, 8 of keys and values, vocabulary 128,256) with
Adam's two moments, all in float32, lies on dp 128 × tp 8 × pp 16: tensor parallel cuts it as usual, FSDP cuts every
tensor once more over dp, a pipeline stage holds its own layers. Every rank's share is planned and all shares together
are proven to tile every tensor. Then 8 of the 2,048 nodes (8 ranks each, one replica on a peer) are lost, which leaves
dp 127, and one rank plans its restore: which chunks it reads, where their bytes go, and whom it asks for each.

``plan_s``: median seconds of that plan. ``peak_bytes``: most memory held meanwhile, the chunk table of the whole
snapshot included. ``chunks``: rows of that table. ``linear``: seconds of the plan of a tenth of the tensors over those
of the whole one, beside the tenth of the bytes (what a plan costs over a pass through the table is what it wants).
With ``--json`` one object on the last line.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import tracemalloc
from dataclasses import fields

import numpy as np

from elastic.mesh import Mesh
from elastic.protocol.tiers import NodeSnapshot
from elastic.snapshot.chunk_table import ChunkTable, table_of_pieces
from elastic.snapshot.index import check_coverage
from elastic.snapshot.layout import Box, Layout, TensorSpec
from elastic.snapshot.object_names import node_pack
from elastic.snapshot.restore_plan import RestorePlan, plan_restore
from elastic.snapshot.save_plan import plan_share
from elastic.snapshot.source_choice import NOWHERE, SourceChoice

LAYERS, HIDDEN, FEED, HEADS, KEY_HEADS, VOCABULARY = 126, 16_384, 53_248, 128, 8, 128_256
STAGES, TENSOR_PARALLEL, RANKS_PER_NODE = 16, 8, 8
ATTEMPT = "g00001-000001"


def model() -> list[tuple[int, str, tuple[int, ...], int | None]]:
    """(pipeline stage, name, shape, dimension that tensor parallel cuts) of every parameter."""
    keys = HIDDEN // HEADS * KEY_HEADS
    found: list[tuple[int, str, tuple[int, ...], int | None]] = [(0, "embedding", (VOCABULARY, HIDDEN), 0)]
    for layer in range(LAYERS):
        stage = layer * STAGES // LAYERS
        for name, shape, cut in (
            ("query", (HIDDEN, HIDDEN), 0),
            ("key", (keys, HIDDEN), 0),
            ("value", (keys, HIDDEN), 0),
            ("output", (HIDDEN, HIDDEN), 1),
            ("gate", (FEED, HIDDEN), 0),
            ("up", (FEED, HIDDEN), 0),
            ("down", (HIDDEN, FEED), 1),
            ("attention_norm", (HIDDEN,), None),
            ("feed_norm", (HIDDEN,), None),
        ):
            found.append((stage, f"layers.{layer}.{name}", shape, cut))
    return [*found, (STAGES - 1, "norm", (HIDDEN,), None), (STAGES - 1, "head", (VOCABULARY, HIDDEN), 0)]


def layouts() -> list[list[Layout]]:
    """The layouts of parameters and moments, by pipeline stage."""
    by_stage: list[list[Layout]] = [[] for _ in range(STAGES)]
    for prefix, suffix in (("model.", ""), ("optimizer.state.", ".exp_avg"), ("optimizer.state.", ".exp_avg_sq")):
        for stage, name, shape, cut in model():
            cuts = (*(() if cut is None else (("tp", cut),)), ("dp", 0))
            spec = TensorSpec(f"{prefix}{name}{suffix}", "float32", shape, 4)
            by_stage[stage].append(Layout(spec, cuts, (("pp", stage),)))
    return by_stage


def mesh_of(replicas: int) -> Mesh:
    return Mesh((("pp", STAGES), ("dp", replicas), ("tp", TENSOR_PARALLEL)))


def all_shares(by_stage: list[list[Layout]], mesh: Mesh) -> ChunkTable:
    """The chunk table of the whole snapshot, from the share that each rank plans for itself."""
    tables = []
    for rank in range(mesh.world_size):
        share = plan_share(by_stage[mesh.coordinate(rank)["pp"]], mesh, rank, key="made up")
        tables.append(table_of_pieces(share.pieces, node_pack(ATTEMPT, rank), "xxh3_128"))
    return ChunkTable.concat(tables)


def after_losing(nodes: int, mesh: Mesh) -> NodeSnapshot:
    """Where the shares lie, each on its node and on a peer in the other half of the cluster, without ``nodes`` nodes,
    two of which were each other's peer."""
    count = mesh.world_size // RANKS_PER_NODE
    lost = {"n0", f"n{count // 2}"} | {f"n{3 * i}" for i in range(1, nodes - 1)}
    places = {}
    for rank in range(mesh.world_size):
        node = rank // RANKS_PER_NODE
        held = (f"n{node}", f"n{(node + count // 2) % count}")
        places[rank] = tuple(name for name in held if name not in lost)
    return NodeSnapshot(ATTEMPT, 1000, places)


def wanted_by(rank: int, mesh: Mesh, by_stage: list[list[Layout]]) -> list[tuple[str, Box]]:
    held = by_stage[mesh.coordinate(rank)["pp"]]
    return [(layout.spec.name, box) for layout in held if (box := layout.box_of(mesh, rank)) is not None]


def restore_plan(
    table: ChunkTable, wanted: list[tuple[str, Box]], snapshot: NodeSnapshot, node: str
) -> tuple[RestorePlan, dict[str, int]]:
    """What a rank on ``node`` reads and copies, and the bytes it takes from own memory, from peers and from storage."""
    plan = plan_restore(table, wanted)
    chosen = SourceChoice(table.packs, snapshot.places, node).choose(table.pack_id[plan.rows])
    nbytes = table.nbytes[plan.rows]
    own, nowhere = chosen == 0, chosen == NOWHERE
    places = {"own node": own, "peer": ~(own | nowhere), "remote": nowhere}
    return plan, {place: int(nbytes[rows].sum()) for place, rows in places.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="256 ranks instead of 16,384")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    replicas = 2 if options.quick else 128
    by_stage, mesh = layouts(), mesh_of(replicas)
    started = time.perf_counter()
    table = all_shares(by_stage, mesh)
    shares_s = time.perf_counter() - started
    check_coverage(table)
    tiled_s = time.perf_counter() - started - shares_s
    table_bytes = sum(
        getattr(table, column.name).nbytes
        for column in fields(table)
        if isinstance(getattr(table, column.name), np.ndarray)
    )
    smaller = mesh_of(replicas - 1)
    rank = smaller.world_size // 2 + TENSOR_PARALLEL * (replicas // 3) + 3
    node = f"n{rank // RANKS_PER_NODE}"
    snapshot = after_losing(8, mesh)
    wanted = wanted_by(rank, smaller, by_stage)
    seconds: dict[int, list[float]] = {1: [], 10: []}
    for _ in range(options.repeats):
        for part in seconds:
            gc.collect()
            started = time.perf_counter()
            restore_plan(table, wanted[::part], snapshot, node)
            seconds[part].append(time.perf_counter() - started)
    tracemalloc.start()
    plan, places = restore_plan(table, wanted, snapshot, node)
    _, traced = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    result = {
        "plan_s": round(statistics.median(seconds[1]), 4),
        "peak_bytes": table_bytes + traced,
        "chunks": len(table),
        "plan_bytes": traced,
        "tenth_of_the_tensors_s": round(statistics.median(seconds[10]), 4),
        "chunks_read": len(plan.rows),
        "read_bytes": plan.read_bytes,
        "wanted_bytes": plan.copied_bytes,
        "bytes_from": places,
        "ranks": mesh.world_size,
        "shares_s": round(shares_s, 1),
        "tiled_s": round(tiled_s, 1),
    }
    print(f"{mesh.world_size:,} ranks on {mesh}, {table.total_bytes / 2**40:.2f} TiB in {len(table):,} chunks")
    print(f"all shares planned in {shares_s:.1f} s and proven to tile {len(table.specs):,} tensors in {tiled_s:.1f} s")
    print(
        f"one of {smaller.world_size:,} ranks on {smaller} plans {len(plan.rows):,} chunks in {result['plan_s']:.3f} s "
        f"(a tenth of the tensors in {result['tenth_of_the_tensors_s']:.3f} s), most memory "
        f"{result['peak_bytes'] / 2**20:.0f} MiB, {traced / 2**20:.0f} MiB of it for the plan"
    )
    print("   ".join(f"{place}: {nbytes / 2**20:.0f} MiB" for place, nbytes in places.items()))
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()

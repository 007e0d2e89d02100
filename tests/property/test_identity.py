"""What a tensor is called and who holds it: stages, experts, shared embeddings; and what nobody declared is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.simulated_ranks import take_snapshot
from torch import nn

import elastic
from elastic.errors import CaptureError, CommitRefused
from elastic.mesh import Mesh
from elastic.protocol.shares import PointInTime
from elastic.snapshot.capture import Attached
from elastic.snapshot.committer import commit_remote
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.object_names import attempt_prefix
from elastic.snapshot.replica_check import check_replicas
from elastic.snapshot.restore import restore
from elastic.snapshot.staging import Stager, capture_and_stage
from elastic.storage.memory_blobs import MemoryBlobs

TP2, PP2 = Mesh((("tp", 2),)), Mesh((("pp", 2),))


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[NodeTier]:
    tier = NodeTier(tmp_path / "arena")
    yield tier
    tier.close()


def attached(mesh: Mesh, build: Callable[[int], nn.Module]) -> list[Attached]:
    return [Attached({"model": build(rank)}, mesh, rank) for rank in range(mesh.world_size)]


def linear(seed: int, rows: int = 4) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(6, rows)


def commit(tier: NodeTier, ranks: list[Attached]) -> None:
    """A durable snapshot of what ``ranks`` hold."""
    sizes = {rank.rank: rank.share_bytes() for rank in ranks}
    tier.reserve(max(sizes.values()), 2)
    slots = tier.open_attempt("g00001-000001", sizes)
    assert slots is not None
    reports = [
        tier.seal(capture_and_stage(r, Stager(), slots[r.rank], attempt="g00001-000001", point=PointInTime(1, 0)))
        for r in ranks
    ]
    tier.commit("g00001-000001")
    store = MemoryBlobs()
    prefix = attempt_prefix("run", 0, "0000000001-aa", "g00001-000001")
    files = tier.upload("g00001-000001", store, prefix, node=0)
    index = tier.index("g00001-000001", snapshot_id="0000000001-aa")
    commit_remote(store, "run", index, reports, files, versions={}, has={}, write_id="w", committed_at_s=0.0)


def test_parts_that_nobody_declared_are_refused_by_name_at_the_durable_commit(tier: NodeTier) -> None:
    with pytest.raises(CommitRefused, match=r"2 tensors .*model\.bias, model\.weight .*ranks 0 and 1.*declare"):
        commit(tier, attached(TP2, linear))  # another seed on each rank


def test_stages_that_overlap_in_one_layer_are_refused_with_tensor_ranges_and_cure(tier: NodeTier) -> None:
    def build(rank: int) -> nn.Module:
        layers = nn.ModuleDict({str(number): linear(number) for number in range(8 * rank, 8 * rank + 9)})
        return elastic.declare(layers, held_at={"pp": rank})

    with pytest.raises(
        CommitRefused, match=r"'model\.8\.(weight|bias)': boxes \[0:4(, 0:6)?\] and .* overlap .*elastic\.declare"
    ):
        commit(tier, attached(PP2, build))


def test_replicas_that_drift_by_rounding_are_no_parts(tier: NodeTier) -> None:
    def build(rank: int) -> nn.Module:
        module = linear(0)
        with torch.no_grad():
            module.weight.mul_(1 + 1e-4 * rank)
        return module

    index, _ = take_snapshot(tier, attached(TP2, build))
    check_replicas(index.objects, "here")


def test_a_data_parallel_mesh_keeps_no_samples(tier: NodeTier) -> None:
    index, _ = take_snapshot(tier, attached(Mesh((("dp", 2),)), linear))
    assert all(b"replicas" not in tree for tree in index.objects.trees.values())


def test_declared_parts_are_whole_again_on_one_rank(tier: NodeTier) -> None:
    def build(rank: int) -> nn.Module:
        return elastic.declare(linear(rank), cuts={"weight": {"tp": 0}, "bias": {"tp": 0}})

    index, source = take_snapshot(tier, attached(TP2, build))
    check_replicas(index.objects, "here")
    whole = linear(5, rows=8)
    restore(Attached({"model": whole}, Mesh((("dp", 1),)), 0), index, source)
    assert torch.equal(whole.weight, torch.cat([linear(0).weight, linear(1).weight]))
    assert torch.equal(whole.bias, torch.cat([linear(0).bias, linear(1).bias]))


def test_a_shape_that_differs_between_ranks_is_refused_by_name(tier: NodeTier) -> None:
    ranks = attached(TP2, lambda rank: linear(0, rows=4 + rank))
    with pytest.raises(CommitRefused, match=r"model\.weight float32\[4, 6\].*model\.weight float32\[5, 6\].*declare"):
        take_snapshot(tier, ranks)


def test_a_stage_with_other_layers_that_nobody_declared_is_refused_by_name(tier: NodeTier) -> None:
    def build(rank: int) -> nn.Module:
        return nn.ModuleDict({f"layer{rank}": linear(rank)})

    with pytest.raises(CommitRefused, match=r"rank 0: model\.layer0\.weight .*rank 1: model\.layer1\.weight .*held_at"):
        take_snapshot(tier, attached(PP2, build))


def test_two_stages_that_call_their_layers_the_same_overlap_by_name(tier: NodeTier) -> None:
    def build(rank: int) -> nn.Module:
        return nn.Sequential(elastic.declare(linear(rank), held_at={"pp": rank}))

    with pytest.raises(CommitRefused, match=r"ranks at pp=0 and those at pp=1 .*same names: model\.0\..*names="):
        take_snapshot(tier, attached(PP2, build))


def test_a_stage_saves_its_layers_by_their_global_numbers(tier: NodeTier) -> None:
    def build(rank: int) -> nn.Module:
        layers = nn.Sequential(linear(2 * rank), linear(2 * rank + 1))
        return elastic.declare(layers, held_at={"pp": rank}, names={"0": str(2 * rank), "1": str(2 * rank + 1)})

    index, source = take_snapshot(tier, attached(PP2, build))
    names = [f"model.{n}.{kind}" for n in range(4) for kind in ("bias", "weight")]
    assert sorted(spec.name for spec in index.table.specs) == names
    whole = nn.Sequential(*(linear(9) for _ in range(4)))
    restore(Attached({"model": whole}, Mesh((("dp", 1),)), 0), index, source)
    assert all(torch.equal(whole[n].weight, linear(n).weight) for n in range(4))


def test_optimizer_options_follow_parameters_between_stages_and_their_groups_do_not_collide(tier: NodeTier) -> None:
    def build(rank: int) -> Attached:
        layer = elastic.declare(nn.Sequential(linear(rank)), held_at={"pp": rank}, names={"0": str(rank)})
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1 + rank, momentum=0.9)
        layer(torch.ones(6)).sum().backward()
        optimizer.step()
        return Attached({"model": layer, "optimizer": optimizer}, PP2, rank)

    index, source = take_snapshot(tier, [build(0), build(1)])
    both = nn.Sequential(linear(7), linear(8))
    groups = [{"params": both[1].parameters()}, {"params": both[0].parameters()}]
    optimizer = torch.optim.SGD(groups[::-1], lr=0.5, momentum=0.9)
    restore(Attached({"model": both, "optimizer": optimizer}, Mesh((("dp", 1),)), 0), index, source)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1.1]
    assert len(optimizer.state) == 4


def test_parameters_that_no_module_names_are_refused_where_stages_could_confuse_them() -> None:
    copies = [nn.Parameter(torch.zeros(3))]
    with pytest.raises(CaptureError, match=r"1 parameters of group 0 are in no attached module.*ParameterDict"):
        Attached({"model": linear(0), "optimizer": torch.optim.SGD(copies)}, PP2, 0)
    Attached({"model": linear(0), "optimizer": torch.optim.SGD(copies)}, Mesh((("dp", 2),)), 0)


def test_an_embedding_that_two_stages_share_is_one_tensor_and_one_parameter_where_it_is_tied(tier: NodeTier) -> None:
    def build(rank: int) -> nn.Module:
        name = ("embed", "head")[rank]
        stage = nn.ModuleDict({name: linear(0)})
        return elastic.declare(stage, held_at={"pp": (0, 1)}, names={"head": "embed"})

    index, source = take_snapshot(tier, attached(PP2, build))
    assert index.table.total_bytes == 4 * (4 * 6 + 4)
    tied = nn.ModuleDict({"embed": linear(1), "head": linear(2)})
    tied["head"] = tied["embed"]
    elastic.declare(tied, names={"head": "embed"})
    restore(Attached({"model": tied}, Mesh((("dp", 1),)), 0), index, source)
    assert torch.equal(tied["head"].weight, linear(0).weight)


def test_what_is_declared_of_another_coordinate_is_refused_with_the_cure() -> None:
    stage = elastic.declare(linear(0), held_at={"pp": 1})
    with pytest.raises(CaptureError, match=r"held at 1 of axis 'pp', and rank 0.*held_at=\{'pp': run\.coordinate"):
        Attached({"model": stage}, PP2, 0)
    with pytest.raises(CaptureError, match=r"held at 1 of axis 'pp', and rank 0, which is 0 of 1"):
        Attached({"model": stage}, Mesh((("dp", 1),)), 0)
    twice = elastic.declare(linear(0), cuts={"weight": {"tp": 0}}, held_at={"tp": 0})
    with pytest.raises(CaptureError, match=r"axis tp of tp2 says twice .*tp cuts dimension 0, held at 0 of tp.*once"):
        Attached({"model": twice}, TP2, 0)
    with pytest.raises(CaptureError, match=r"a cut of dimension 2 is declared of a tensor of shape \(4, 6\).*0 to 1"):
        Attached({"model": elastic.declare(linear(0), cuts={"weight": {"tp": 2}})}, TP2, 0)

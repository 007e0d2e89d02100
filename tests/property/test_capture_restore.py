"""A state that some ranks saved comes back bit for bit on any number of ranks, without Ray."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated_ranks import mesh_of, take_snapshot
from torch import nn

from elastic.errors import CaptureError, CorruptSnapshot, ModelMismatch, RestoreError
from elastic.snapshot.capture import Attached
from elastic.snapshot.committer import commit_remote
from elastic.snapshot.held_share import ShareHeader
from elastic.snapshot.index import SnapshotIndex
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.object_names import attempt_prefix
from elastic.snapshot.reader import SnapshotCatalog
from elastic.snapshot.restore import restore
from elastic.snapshot.sources import VerifiedSource
from elastic.storage import file_bytes
from elastic.storage.blob_store import BlobStore
from elastic.storage.local_blobs import LocalBlobs
from elastic.storage.memory_blobs import MemoryBlobs


class Net(nn.Module):
    """Tied weights, batch norm, a frozen and an unused parameter, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.back = nn.Linear(7, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.randn(3, 1))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("scratch", torch.randn(4), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.back(self.norm(self.body(self.embed(ids)))) + 0 * self.frozen.sum())


def build(seed: int) -> dict[str, object]:
    torch.manual_seed(seed)
    model = Net()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "lr": 0.01, "weight_decay": 0.1}, {"params": vectors}, {"params": [], "lr": 9.0}],
        lr=0.02,
        weight_decay=0.0,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(state: dict[str, object], steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, 11, (8,), generator=generator)
        state["optimizer"].zero_grad()
        nn.functional.cross_entropy(state["model"](ids), ids).backward()
        state["optimizer"].step()
        state["scheduler"].step()


def trained(seed: int, steps: int) -> dict[str, object]:
    state = build(seed)
    train(state, steps, seed)
    return state


def assert_same_state(a: dict[str, object], b: dict[str, object]) -> None:
    for (name, x), (_, y) in zip(a["model"].state_dict().items(), b["model"].state_dict().items()):
        assert torch.equal(x, y), name
    left, right = a["optimizer"].state_dict(), b["optimizer"].state_dict()
    assert left["param_groups"] == right["param_groups"]
    assert left["state"].keys() == right["state"].keys()
    for number, state in left["state"].items():
        assert state.keys() == right["state"][number].keys()
        for key, value in state.items():
            other = right["state"][number][key]
            assert value.dtype == other.dtype
            assert torch.equal(value, other), (number, key)
    assert a["scheduler"].state_dict() == b["scheduler"].state_dict()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors: threads of torch that wait for each other would be all of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[NodeTier]:
    tier = NodeTier(tmp_path / "arena")
    yield tier
    tier.close()


@settings(derandomize=True, deadline=None, max_examples=12)
@given(before=st.integers(1, 5), after=st.integers(1, 5), steps=st.integers(0, 4), seed=st.integers(0, 99))
def test_training_goes_on_bitwise_equal_after_a_restore_onto_any_number_of_ranks(
    tmp_path_factory: pytest.TempPathFactory, before: int, after: int, steps: int, seed: int
) -> None:
    tier = NodeTier(tmp_path_factory.mktemp("tier") / "arena")
    replicas = [trained(seed, steps) for _ in range(before)]
    index, source = take_snapshot(tier, [Attached(s, mesh_of(before), r) for r, s in enumerate(replicas)], step=steps)
    original, continued = replicas[0], trained(seed, steps)
    train(continued, 3, seed + 1)
    for rank in range(after):
        fresh = build(seed + 1000)
        attached = Attached(fresh, mesh_of(after), rank)
        report = restore(attached, index, source)
        assert (report.step, report.mode, report.cast, report.new, report.dropped) == (steps, "strict", (), (), ())
        assert fresh["model"].head.weight is fresh["model"].embed.weight
        assert_same_state(original, fresh)
        train(fresh, 3, seed + 1)
        assert_same_state(continued, fresh)
    tier.close()


def test_the_shares_of_all_ranks_hold_each_byte_once(tier: NodeTier) -> None:
    state = trained(0, 2)
    index, _ = take_snapshot(tier, [Attached(state, mesh_of(4), rank) for rank in range(4)])
    held = sum(t.nbytes for t in {id(t): t for t in state["model"].state_dict().values()}.values())
    held -= state["model"].head.weight.nbytes  # tied: recorded once
    held += sum(v.nbytes for s in state["optimizer"].state.values() for v in s.values())
    assert int(index.table.nbytes.sum()) == held
    assert index.table.aliases == (("model.head.weight", "model.embed.weight"),)


def test_a_parameter_without_gradient_has_no_state_after_a_restore(tier: NodeTier) -> None:
    state = trained(0, 1)
    index, source = take_snapshot(tier, [Attached(state, mesh_of(1), 0)])
    fresh = build(1)
    fresh["optimizer"].state[fresh["model"].unused] = {"step": torch.tensor(3.0)}
    restore(Attached(fresh, mesh_of(1), 0), index, source)
    assert fresh["model"].unused not in fresh["optimizer"].state
    assert fresh["optimizer"].param_groups[2]["lr"] == state["optimizer"].param_groups[2]["lr"]


@pytest.mark.parametrize("before", [True, False])
def test_moments_of_a_parameter_that_was_frozen_meanwhile_are_saved_and_come_back(tier: NodeTier, before: bool) -> None:
    """``before``: the new program freezes it before the restore, and not after."""
    state = trained(0, 3)
    state["model"].body.requires_grad_(False)
    train(state, 2, 1)  # goes on without it
    index, source = take_snapshot(tier, [Attached(state, mesh_of(2), rank) for rank in range(2)])
    fresh = build(1)
    fresh["model"].body.requires_grad_(not before)
    report = restore(Attached(fresh, mesh_of(1), 0), index, source)
    assert (report.new, report.dropped) == ((), ())
    fresh["model"].body.requires_grad_(False)
    assert float(fresh["optimizer"].state[fresh["model"].body.weight]["step"]) == 3.0
    assert fresh["optimizer"].state[fresh["model"].body.weight]["exp_avg"].any()
    assert_same_state(state, fresh)
    for one in (state, fresh):  # and thawed again
        one["model"].body.requires_grad_(True)
        train(one, 2, 2)
    assert_same_state(state, fresh)


def test_optimizer_state_keeps_its_dtype_beside_a_parameter_of_another(tier: NodeTier) -> None:
    def small() -> dict[str, object]:
        model = nn.Linear(3, 2).to(torch.bfloat16)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    state = small()
    for parameter in state["model"].parameters():
        state["optimizer"].state[parameter] = {
            "step": torch.tensor(7.0),
            "exp_avg": torch.randn(parameter.shape, dtype=torch.float32),
            "exp_avg_sq": torch.rand(parameter.shape, dtype=torch.float64),
            "master": parameter.detach().float(),
        }
    index, source = take_snapshot(tier, [Attached(state, mesh_of(2), rank) for rank in range(2)])
    fresh = small()
    restore(Attached(fresh, mesh_of(1), 0), index, source)
    for a, b in zip(state["model"].parameters(), fresh["model"].parameters()):
        for key, value in state["optimizer"].state[a].items():
            other = fresh["optimizer"].state[b][key]
            assert other.dtype == value.dtype
            assert torch.equal(other, value)


def test_another_model_is_refused_by_names_and_nothing_live_changes(tier: NodeTier) -> None:
    index, source = take_snapshot(tier, [Attached({"model": nn.Linear(3, 2)}, mesh_of(1), 0)], step=40)
    other = nn.Sequential(nn.Linear(3, 2))
    before = copy.deepcopy(other.state_dict())
    attached = Attached({"model": other}, mesh_of(1), 0)
    with pytest.raises(ModelMismatch, match=r"step 40.*2 missing.*model.0.bias.*2 not in this model.*model.bias"):
        restore(attached, index, source)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    assert attached.broken is None


def test_another_shape_is_refused_in_every_mode(tier: NodeTier) -> None:
    index, source = take_snapshot(tier, [Attached({"model": nn.Linear(3, 2)}, mesh_of(1), 0)])
    for mode in ("strict", "training", "weights"):
        with pytest.raises(ModelMismatch, match=r"model.weight is \(2, 3\) in the snapshot and \(2, 4\) here"):
            restore(Attached({"model": nn.Linear(4, 2)}, mesh_of(1), 0), index, source, mode)


def test_another_dtype_is_refused_when_strict_and_cast_and_reported_otherwise(tier: NodeTier) -> None:
    model = nn.Linear(3, 2)
    index, source = take_snapshot(tier, [Attached({"model": model}, mesh_of(1), 0)])
    half = nn.Linear(3, 2).to(torch.bfloat16)
    with pytest.raises(ModelMismatch, match="another dtype"):
        restore(Attached({"model": half}, mesh_of(1), 0), index, source)
    report = restore(Attached({"model": half}, mesh_of(1), 0), index, source, "training")
    assert report.cast == ("model.weight (float32 → bfloat16)", "model.bias (float32 → bfloat16)")
    assert torch.equal(half.weight, model.weight.to(torch.bfloat16))


def test_a_warm_start_takes_weights_only_and_reports_the_rest(tier: NodeTier) -> None:
    state = trained(0, 2)
    index, source = take_snapshot(tier, [Attached(state, mesh_of(1), 0)])
    fresh = build(1)
    fresh["model"].extra = nn.Linear(1, 1)
    report = restore(Attached({"model": fresh["model"], "optimizer": fresh["optimizer"]}, mesh_of(1), 0),
                     index, source, "weights")  # fmt: skip
    assert torch.equal(fresh["model"].body.weight, state["model"].body.weight)
    assert not fresh["optimizer"].state
    assert set(report.new) == {"optimizer", "model.extra.weight", "model.extra.bias"}
    assert set(report.dropped) == {"optimizer", "scheduler"}


def test_a_warm_start_from_a_snapshot_that_has_nothing_for_it_is_refused(tier: NodeTier) -> None:
    index, source = take_snapshot(tier, [Attached({"model": nn.Linear(3, 2)}, mesh_of(1), 0)])
    with pytest.raises(ModelMismatch, match="another model"):
        restore(Attached({"model": nn.Sequential(nn.Linear(3, 2))}, mesh_of(1), 0), index, source, "weights")


class FailsAfter:
    """A source that gives some windows and then finds a damaged chunk."""

    def __init__(self, source, calls: int) -> None:
        self.source, self.calls = source, calls

    def read(self, table, rows):
        self.calls -= 1
        if self.calls < 0:
            raise CorruptSnapshot("no good copy is left")
        return self.source.read(table, rows)


def test_a_restore_that_fails_midway_leaves_the_state_unusable_until_one_succeeds(tier: NodeTier) -> None:
    state = trained(0, 2)
    index, source = take_snapshot(tier, [Attached(state, mesh_of(1), 0)])
    fresh = build(1)
    attached = Attached(fresh, mesh_of(1), 0)
    reads = FailsAfter(source, 1_000)
    restore(Attached(build(2), mesh_of(1), 0), index, reads, window_bytes=400)
    with pytest.raises(CorruptSnapshot):
        restore(attached, index, FailsAfter(source, 999 - reads.calls), window_bytes=400)
    with pytest.raises(RestoreError, match="not whole"):
        attached.capture()
    restore(attached, index, source, window_bytes=400)
    attached.capture()
    assert_same_state(state, fresh)


def test_a_damaged_chunk_in_the_first_window_touches_nothing(tier: NodeTier) -> None:
    state = build(0)
    index, source = take_snapshot(tier, [Attached(state, mesh_of(1), 0)])
    fresh, attached = build(1), None
    before = copy.deepcopy(fresh["model"].state_dict())
    attached = Attached(fresh, mesh_of(1), 0)
    with pytest.raises(CorruptSnapshot):
        restore(attached, index, FailsAfter(source, 0))
    assert attached.broken is None
    assert all(torch.equal(value, before[name]) for name, value in fresh["model"].state_dict().items())


def test_a_damaged_chunk_of_the_optimizer_is_found_before_the_model_is_touched(tier: NodeTier) -> None:
    index, source = take_snapshot(tier, [Attached(trained(0, 2), mesh_of(1), 0)])
    fresh = build(1)
    before = copy.deepcopy(fresh["model"].state_dict())
    attached = Attached(fresh, mesh_of(1), 0)
    with pytest.raises(CorruptSnapshot):
        restore(attached, index, FailsAfter(source, 2), window_bytes=400)
    assert attached.broken is None
    assert not fresh["optimizer"].state
    assert all(torch.equal(value, before[name]) for name, value in fresh["model"].state_dict().items())


def test_what_lies_in_mapped_memory_is_verified_whole_before_the_model_is_touched(tier: NodeTier) -> None:
    """However large it is: the last chunk is the damaged one."""
    index, source = take_snapshot(tier, [Attached(trained(0, 2), mesh_of(1), 0)])
    table = index.table
    row = int(np.flatnonzero([table.specs[i].name.startswith("model.") for i in table.tensor_id])[-1])
    slot = tier.locate(table.packs[table.pack_id[row]])
    tier.arena.view(slot)[table.byte_start[row]] ^= 1
    fresh = build(1)
    before = copy.deepcopy(fresh["model"].state_dict())
    attached = Attached(fresh, mesh_of(1), 0)
    with pytest.raises(CorruptSnapshot):
        restore(attached, index, source, window_bytes=400)
    assert attached.broken is None
    assert all(torch.equal(value, before[name]) for name, value in fresh["model"].state_dict().items())


def durable(attached: list[Attached], tier: NodeTier, store: BlobStore) -> tuple[SnapshotIndex, VerifiedSource]:
    """A snapshot in ``store``."""
    index, _ = take_snapshot(tier, attached)
    reports = [ShareHeader.from_bytes(data).report({}) for data in tier.headers(index.attempt).values()]
    files = tier.upload(index.attempt, store, attempt_prefix("r", 0, "00", index.attempt), node=0)
    index = tier.index(index.attempt, snapshot_id="00")
    ref = commit_remote(store, "r", index, reports, files, versions={}, has={}, write_id="w", committed_at_s=0.0)
    catalog = SnapshotCatalog(store, "r")
    return catalog.open(ref), catalog.source(ref)


@pytest.mark.parametrize("kind", ["files, mapped", "files, read", "files, on disk alone", "memory"])
def test_a_large_state_in_storage_is_verified_chunk_by_chunk_as_it_is_copied(
    tier: NodeTier, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(300, 300), nn.Linear(500, 500).double(), nn.Linear(2, 2))

    if kind == "files, read":  # as on a kernel that cannot say beforehand whether a page can be had
        monkeypatch.setattr(file_bytes, "_POPULATE_READ", -1)
    if kind == "files, on disk alone":
        monkeypatch.setattr(file_bytes, "is_cached", lambda *_: False)
    store = MemoryBlobs() if kind == "memory" else LocalBlobs(tmp_path / "store")
    saved, fresh, cast, small = model(0), model(1), model(2).to(torch.bfloat16), model(3)
    across = model(4)
    across[0].weight = nn.Parameter(across[0].weight.detach().T.contiguous().T)
    index, source = durable([Attached({"model": saved}, mesh_of(1), 0)], tier, store)
    for other in (fresh, across):
        report = restore(Attached({"model": other}, mesh_of(1), 0), index, source, window_bytes=500_000)
        assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), other.parameters()))
    assert report.bytes_from == {"remote": 2 * index.table.total_bytes}
    restore(Attached({"model": cast}, mesh_of(1), 0), index, source, "training", window_bytes=500_000)
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(saved.parameters(), cast.parameters()))
    attached = Attached({"model": small}, mesh_of(1), 0)
    (pack,) = (key for key in store.list("") if key.endswith(".pack"))
    body = bytearray(store.get(pack))
    body[index.table.byte_start[-1]] ^= 1
    for damaged in (body, body[: len(body) // 2]):
        store.put(pack, damaged)
        with pytest.raises(CorruptSnapshot, match="no good copy is left of tensor 'model"):
            restore(attached, index, source, window_bytes=500_000)
        assert attached.broken is not None
    body[index.table.byte_start[-1]] ^= 1
    store.put(pack, body)
    restore(attached, index, source, window_bytes=500_000)
    assert attached.broken is None
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), small.parameters()))


def test_names_do_not_depend_on_wrappers(tier: NodeTier) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    class Compiled(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self._orig_mod = module

    inner, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    wrapped = Wrapper(Compiled(inner))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (wrapped, plain)]
    wrapped.module._orig_mod(torch.ones(3)).sum().backward()
    optimizers[0].step()
    index, source = take_snapshot(tier, [Attached({"model": wrapped, "optimizer": optimizers[0]}, mesh_of(1), 0)])
    restore(Attached({"model": plain, "optimizer": optimizers[1]}, mesh_of(1), 0), index, source)
    assert torch.equal(plain.weight, inner.weight)
    buffers = [o.state_dict()["state"][0]["momentum_buffer"] for o in optimizers]
    assert torch.equal(*buffers)


def test_names_that_become_one_without_wrappers_are_refused() -> None:
    model = nn.Module()
    model.weight, model.module = nn.Parameter(torch.ones(1)), nn.Module()
    model.module.weight = nn.Parameter(torch.ones(1))
    with pytest.raises(CaptureError, match=r"'weight'.*rename"):
        Attached({"model": model}, mesh_of(1), 0)


def test_a_parameter_of_no_attached_module_is_named_by_its_place_in_the_optimizer(tier: NodeTier) -> None:
    loose = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([{"params": [nn.Parameter(torch.ones(2))]}, {"params": [loose]}])
    loose.grad = torch.ones(3)
    optimizer.step()
    index, _ = take_snapshot(tier, [Attached({"optimizer": optimizer}, mesh_of(1), 0)])
    assert "optimizer.state.group1.0.exp_avg" in {spec.name for spec in index.table.specs}


def test_the_loader_keeps_its_place_in_a_training_restore(tier: NodeTier) -> None:
    class Loader:
        def __init__(self, cursor: int) -> None:
            self.cursor = cursor

        def state_dict(self):
            return {"cursor": self.cursor, "big": torch.arange(5000)}

        def load_state_dict(self, state) -> None:
            self.cursor = state["cursor"]
            assert torch.equal(state["big"], torch.arange(5000))

    index, source = take_snapshot(
        tier, [Attached({"m": nn.Linear(1, 1), "loader": Loader(7)}, mesh_of(2), r) for r in (0, 1)]
    )
    strict, training = Loader(0), Loader(0)
    restore(Attached({"m": nn.Linear(1, 1), "loader": strict}, mesh_of(3), 1), index, source)
    report = restore(Attached({"m": nn.Linear(1, 1), "loader": training}, mesh_of(3), 1), index, source, "training")
    assert (strict.cursor, training.cursor) == (7, 0)
    assert report.dropped == ("loader",)

"""Tensors of every kind come back bit for bit; what cannot be saved is refused by key and type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated_ranks import mesh_of, take_snapshot
from torch import nn

from elastic.errors import CaptureError, ModelMismatch, SnapshotError
from elastic.protocol.shares import PointInTime, SlotRef
from elastic.snapshot.capture import Attached
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.restore import restore
from elastic.snapshot.staging import Stager, capture_and_stage

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]  # fmt: skip


pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


class Buffers(nn.Module):
    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


class Holder:
    """A plain object with state."""

    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[NodeTier]:
    tier = NodeTier(tmp_path / "arena")
    yield tier
    tier.close()


def raw(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits of every kind: NaN payloads, negative zero, denormals, odd bools."""
    data = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(data.reshape(-1)))
    return tensor


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (t.detach().view(torch.uint8) if t.dtype == torch.bool else t.detach() for t in (a, b))
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def round_trip(tier: NodeTier, tensor: torch.Tensor, empty: torch.Tensor, before: int, after: int) -> torch.Tensor:
    index, source = take_snapshot(tier, [Attached({"m": Buffers(t=tensor)}, mesh_of(before), r) for r in range(before)])
    target = Buffers(t=empty)
    for rank in range(after):
        empty.view(torch.uint8).zero_() if empty.is_contiguous() and empty.dim() else None
        restore(Attached({"m": target}, mesh_of(after), rank), index, source)
    return target.t


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7, 5), (1, 1, 13)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(
    tier: NodeTier, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = raw(shape, dtype)
    back = round_trip(tier, tensor, torch.empty(shape, dtype=dtype), 3, 2)
    assert back.dtype == dtype
    assert same_bits(back, tensor)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex128, torch.float8_e5m2], ids=str
)
def test_memory_in_any_order_comes_back_bit_for_bit(tier: NodeTier, dtype: torch.dtype) -> None:
    base = raw((2, 3, 4, 5), dtype)
    for number, (view, into) in enumerate(
        [
            (base.to(memory_format=torch.channels_last), torch.empty_like(base)),
            (base, torch.empty_like(base).to(memory_format=torch.channels_last)),
            (base.permute(3, 1, 0, 2), torch.empty(5, 3, 2, 4, dtype=dtype)),
            (base[:, 1:, ::2], torch.empty(2, 2, 2, 5, dtype=dtype)),
        ]
    ):
        own = NodeTier(Path(str(tier.arena.directory) + f"-{number}"))
        assert same_bits(round_trip(own, view, into, 3, 1), view)
        own.close()


def test_a_small_view_of_a_large_storage_saves_the_view_only(tier: NodeTier) -> None:
    view = torch.randn(1 << 20)[7:263]
    index, _ = take_snapshot(tier, [Attached({"m": Buffers(t=view)}, mesh_of(1), 0)])
    assert int(index.table.nbytes.sum()) == 1024


def test_a_broadcast_tensor_is_saved_at_its_own_extent(tier: NodeTier) -> None:
    module, state = Buffers(t=torch.randn(1, 5).expand(1000, 5)), torch.randn(4000, 1).expand(4000, 9)
    attached = {"m": module, "h": Holder({"big": state})}
    index, source = take_snapshot(tier, [Attached(attached, mesh_of(1), 0)])
    assert int(index.table.nbytes.sum()) == 20 + 16000
    fresh = {"m": Buffers(t=torch.zeros(1, 5).expand(1000, 5)), "h": Holder({})}
    restore(Attached(fresh, mesh_of(1), 0), index, source)
    assert torch.equal(fresh["m"].t, module.t)
    assert torch.equal(fresh["h"].state["big"], state)


def test_lazy_conjugates_and_negatives_are_carried_out(tier: NodeTier) -> None:
    values = torch.randn(50, dtype=torch.complex64)
    stager = Stager()
    module = Buffers(conj=values.conj(), imag=values.conj().imag)
    attached = [Attached({"m": module}, mesh_of(1), 0)]
    take_snapshot(tier, attached, "g1-a1", stagers=[stager])
    values += 1  # the second snapshot must not stage what the first one worked out
    index, source = take_snapshot(tier, attached, "g1-a2", stagers=[stager])
    fresh = Buffers(conj=torch.empty(50, dtype=torch.complex64), imag=torch.empty(50))
    restore(Attached({"m": fresh}, mesh_of(1), 0), index, source)
    assert torch.equal(fresh.conj, module.conj.resolve_conj())
    assert torch.equal(fresh.imag, module.imag)


def test_tensors_tied_across_objects_are_saved_once_and_restored_to_both(tier: NodeTier) -> None:
    linear = nn.Linear(100, 100)
    index, source = take_snapshot(
        tier, [Attached({"m": linear, "average": Holder({"w": linear.weight.detach()})}, mesh_of(1), 0)]
    )
    assert index.table.aliases == (("average.w", "m.weight"),)
    fresh, average = nn.Linear(100, 100), Holder({})
    restore(Attached({"m": fresh, "average": average}, mesh_of(1), 0), index, source)
    assert torch.equal(fresh.weight, linear.weight)
    assert torch.equal(average.state["w"], linear.weight)


def test_a_tie_that_the_new_model_lacks_still_fills_both_names(tier: NodeTier) -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    tied, untied = nn.Module(), nn.Module()
    tied.a = tied.b = weight
    tied.register_parameter("b", weight)
    untied.a, untied.b = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4, 4))
    index, source = take_snapshot(tier, [Attached({"m": tied}, mesh_of(1), 0)])
    restore(Attached({"m": untied}, mesh_of(1), 0), index, source)
    assert torch.equal(untied.a, weight)
    assert torch.equal(untied.b, weight)


def test_a_tie_that_the_snapshot_lacks_is_refused_when_strict_and_noted_otherwise(tier: NodeTier) -> None:
    tied, untied = nn.Module(), nn.Module()
    tied.a = nn.Parameter(torch.zeros(4, 4))
    tied.register_parameter("b", tied.a)
    untied.a, untied.b = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.full((4, 4), 2.0))
    index, source = take_snapshot(tier, [Attached({"m": untied}, mesh_of(1), 0)])
    with pytest.raises(ModelMismatch, match=r"m\.a and m\.b are tied here"):
        restore(Attached({"m": tied}, mesh_of(1), 0), index, source)
    report = restore(Attached({"m": tied}, mesh_of(1), 0), index, source, "training")
    assert report.notes == ("m.a and m.b are tied here and not in the snapshot",)
    assert tied.a is tied.b
    assert torch.equal(tied.a, untied.a)


def test_small_tensors_of_plain_objects_stay_apart_by_rank(tier: NodeTier) -> None:
    ranks = [Attached({"rng": Holder({"state": torch.full((5056,), rank, dtype=torch.uint8)})}, mesh_of(2), rank)
             for rank in range(2)]  # fmt: skip
    index, source = take_snapshot(tier, ranks)
    for rank in range(2):
        back = Holder(None)
        restore(Attached({"rng": back}, mesh_of(2), rank), index, source)
        assert back.state["state"].unique().tolist() == [rank]


def test_a_plain_state_comes_back_with_its_keys_types_and_tensors(tier: NodeTier) -> None:
    state = {
        "a.b": torch.arange(3000), "a": {"b": torch.arange(4000.0)}, 3: [torch.ones(1), (None, b"x")], "empty": {},
        "bits": raw((9,), torch.bfloat16), "none": torch.empty(0, 2),
    }  # fmt: skip
    index, source = take_snapshot(tier, [Attached({"h": Holder(state)}, mesh_of(3), r) for r in range(3)])
    back = Holder({})
    restore(Attached({"h": back}, mesh_of(1), 0), index, source)
    assert back.state.keys() == state.keys()
    assert torch.equal(back.state["a.b"], state["a.b"])
    assert torch.equal(back.state["a"]["b"], state["a"]["b"])
    assert torch.equal(back.state[3][0], torch.ones(1))
    assert back.state[3][1] == (None, b"x")
    assert back.state["empty"] == {}
    assert same_bits(back.state["bits"], state["bits"])
    assert back.state["none"].shape == (0, 2)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_memory_are_refused_by_key_and_type(make: Callable[[], torch.Tensor], kind: str) -> None:
    tensor = make()
    with pytest.raises(CaptureError, match=rf"{kind}.*model\.t"):
        Attached({"model": Buffers(t=tensor)}, mesh_of(1), 0)
    with pytest.raises(CaptureError, match=rf"{kind}.*h\.x\.0"):
        Attached({"h": Holder({"x": [tensor]})}, mesh_of(1), 0)


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_tensor_is_refused_by_key_and_type() -> None:
    with pytest.raises(CaptureError, match=r"quantized.*h\.x"):
        Attached({"h": Holder({"x": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)})}, mesh_of(1), 0)


@pytest.mark.filterwarnings("ignore:Lazy")
def test_a_lazy_parameter_is_refused_with_the_cure() -> None:
    with pytest.raises(CaptureError, match=r"UninitializedParameter.*model\.weight.*forward"):
        Attached({"model": nn.LazyLinear(3)}, mesh_of(1), 0)


@pytest.mark.parametrize("value", [3, [1], None, torch.ones(2)])
def test_an_object_without_state_is_refused_by_name_and_type(value: object) -> None:
    with pytest.raises(CaptureError, match=r"state_dict.*thing"):
        Attached({"thing": value}, mesh_of(1), 0)


def test_an_unknown_object_in_a_state_is_refused_by_path_and_type() -> None:
    attached = Attached({"h": Holder({"x": [object()]})}, mesh_of(1), 0)
    with pytest.raises(CaptureError, match=r"builtins\.object.*\['h'\]\['state'\]\['x'\]\[0\]"):
        attached.capture()


def test_state_that_changes_after_staging_does_not_leak_into_the_snapshot(tier: NodeTier) -> None:
    module = Buffers(t=torch.ones(1000))
    index, source = take_snapshot(tier, [Attached({"m": module}, mesh_of(1), 0)])
    module.t.fill_(7)
    fresh = Buffers(t=torch.zeros(1000))
    restore(Attached({"m": fresh}, mesh_of(1), 0), index, source)
    assert fresh.t.unique().tolist() == [1.0]


@pytest.mark.parametrize("change", ["data", "attribute", "shape", "transpose", "new"])
def test_memory_that_was_replaced_is_noticed_by_the_next_snapshot(tier: NodeTier, change: str) -> None:
    model = nn.Linear(4, 4)
    attached, stager = [Attached({"m": model}, mesh_of(1), 0)], Stager()
    take_snapshot(tier, attached, "g1-a1", stagers=[stager])
    if change == "data":
        model.weight.data = torch.full((4, 4), 5.0)
    elif change == "attribute":
        model.weight = nn.Parameter(torch.full((4, 4), 5.0))
    elif change == "shape":
        model.weight.data = model.weight.data.view(2, 8)
    elif change == "transpose":
        model.weight.data = model.weight.data.t()
    else:
        model.more = nn.Linear(2, 2)
    index, source = take_snapshot(tier, attached, "g1-a2", stagers=[stager])
    fresh = nn.Linear(4, 4)
    if change == "shape":
        fresh.weight = nn.Parameter(torch.empty(2, 8))
    if change == "new":
        fresh.more = nn.Linear(2, 2)
    restore(Attached({"m": fresh}, mesh_of(1), 0), index, source)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters()))


def test_a_share_that_outgrew_its_slot_is_refused_with_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    path.write_bytes(bytes(4096))
    attached = Attached({"m": Buffers(t=torch.ones(2000))}, mesh_of(1), 0)
    with pytest.raises(SnapshotError, match=r"8000 bytes.*4096|80\d\d bytes.*4096"):
        capture_and_stage(attached, Stager(), SlotRef(str(path), 4096, 0), attempt="a", point=PointInTime(0, 0))


def test_a_slot_that_is_gone_or_cut_short_costs_a_snapshot_only(tmp_path: Path) -> None:
    attached = Attached({"m": Buffers(t=torch.ones(20))}, mesh_of(1), 0)
    (tmp_path / "short").write_bytes(bytes(100))
    for name in ("gone", "short"):
        with pytest.raises(SnapshotError, match=rf"cannot be mapped.*{name}"):
            capture_and_stage(
                attached, Stager(), SlotRef(str(tmp_path / name), 4096, 0), attempt="a", point=PointInTime(0, 0)
            )


def test_a_slot_that_the_store_made_anew_is_mapped_anew(tmp_path: Path) -> None:
    attached, stager = Attached({"m": Buffers(t=torch.arange(20))}, mesh_of(1), 0), Stager()
    slot = SlotRef(str(tmp_path / "slot"), 4096, 0)
    for _ in range(2):
        (tmp_path / "new").write_bytes(bytes(4096))
        (tmp_path / "new").replace(tmp_path / "slot")
        capture_and_stage(attached, stager, slot, attempt="a", point=PointInTime(0, 0))
        assert (tmp_path / "slot").read_bytes()[:160] == np.arange(20).tobytes()


def test_extra_state_of_a_module_goes_back_through_its_own_method(tier: NodeTier) -> None:
    class Scaled(nn.Module):
        def __init__(self, history: list[float]) -> None:
            super().__init__()
            self.weight, self.history = nn.Parameter(torch.ones(2)), history

        def get_extra_state(self) -> object:
            return {"history": self.history, "amax": torch.tensor([1.5, float("nan")])}

        def set_extra_state(self, state) -> None:
            self.history, self.amax = state["history"], state["amax"]

    index, source = take_snapshot(tier, [Attached({"m": nn.Sequential(Scaled([1.0, 2.0]))}, mesh_of(1), 0)])
    fresh = nn.Sequential(Scaled([]))
    restore(Attached({"m": fresh}, mesh_of(1), 0), index, source)
    assert fresh[0].history == [1.0, 2.0]
    assert fresh[0].amax[0] == 1.5


@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.lists(st.lists(st.sampled_from([0, 1, 2, 5, 17]), max_size=3).map(tuple), min_size=1, max_size=6),
       st.sampled_from(DTYPES), st.integers(1, 6), st.integers(1, 6))  # fmt: skip
def test_any_shapes_come_back_on_any_number_of_ranks(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], dtype: torch.dtype, before: int, after: int
) -> None:
    tier = NodeTier(tmp_path_factory.mktemp("tier") / "arena")
    state = {f"t{n}": raw(shape, dtype, n) for n, shape in enumerate(shapes)}
    index, source = take_snapshot(tier, [Attached({"m": Buffers(**state)}, mesh_of(before), r) for r in range(before)])
    for rank in range(after):
        fresh = Buffers(**{name: torch.empty_like(t) for name, t in state.items()})
        restore(Attached({"m": fresh}, mesh_of(after), rank), index, source)
        assert all(same_bits(getattr(fresh, name), t) for name, t in state.items())
    tier.close()

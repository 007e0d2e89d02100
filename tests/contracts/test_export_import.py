"""A snapshot leaves as safetensors or DCP and comes back bit for bit; other people's files come in, and nothing is run.

The readers on the other side are the public ones: the safetensors package and torch.distributed.checkpoint.
"""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file, save_model
from support.simulated_ranks import mesh_of, take_snapshot
from torch import nn
from typer.testing import CliRunner

from elastic.cli.main import build
from elastic.mesh import Mesh
from elastic.snapshot.capture import Attached
from elastic.snapshot.committer import commit_remote
from elastic.snapshot.manifest import SnapshotRef
from elastic.snapshot.node_tier import NodeTier
from elastic.snapshot.object_names import attempt_prefix
from elastic.snapshot.reader import SnapshotCatalog
from elastic.snapshot.restore import restore
from elastic.storage.local_blobs import LocalBlobs

RUN = "trained"
DTYPES = (
    *(torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


class Everything(nn.Module):
    """A tied weight, and a buffer of every dtype; a scalar, one without elements, one with bits that are no number."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(40, 16)
        self.head = nn.Linear(16, 40, bias=False)
        with torch.no_grad():
            self.embed.weight.copy_(torch.randn(40, 16, generator=generator))
        self.head.weight = self.embed.weight
        for dtype in DTYPES:
            raw = torch.randint(0, 2 if dtype is torch.bool else 256, (5, 3, dtype.itemsize), generator=generator)
            values = raw.to(torch.uint8).view(-1).view(dtype).view(5, 3)
            self.register_buffer(f"a_{str(dtype).removeprefix('torch.')}", values)
        self.register_buffer("scalar", torch.tensor(seed, dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0, 4))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(raw_bytes(a), raw_bytes(b))


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name


@pytest.fixture
def model() -> Everything:
    return Everything(3)


@pytest.fixture
def store(tmp_path: Path) -> LocalBlobs:
    return LocalBlobs(tmp_path / "store")


@pytest.fixture
def saved(model: Everything, store: LocalBlobs, tmp_path: Path) -> Iterator[SnapshotRef]:
    """The model and its optimizer, written by three ranks."""
    tier = NodeTier(tmp_path / "arena")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.embed.weight.grad = torch.ones_like(model.embed.weight)
    optimizer.step()
    ranks = [Attached({"model": model, "optimizer": optimizer}, mesh_of(3), rank) for rank in range(3)]
    take_snapshot(tier, ranks, "g00001-000001", step=7)
    files = tier.upload("g00001-000001", store, attempt_prefix(RUN, 7, "some-id", "g00001-000001"), node=0)
    yield commit_remote(
        store,
        RUN,
        tier.index("g00001-000001", snapshot_id="some-id"),
        [share.header.report({}) for share in tier.pin("g00001-000001").values()],
        files,
        versions={},
        has={"optimizer": True},
        write_id="w",
        committed_at_s=1e9,
    )
    tier.close()


@pytest.fixture
def call(tmp_path: Path) -> Any:
    """Run a sub-command with --json on the store; check its exit code and return its last line as an object."""

    def run(*arguments: object, exit_code: int = 0) -> Any:
        command = ["snapshots", *map(str, arguments), "--storage", str(tmp_path / "store"), "--json"]
        shown = CliRunner().invoke(build(), command)
        assert shown.exit_code == exit_code, shown.output
        return json.loads(shown.stdout.splitlines()[-1])

    return run


def untied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}


# ---- export to safetensors


def test_an_exported_model_is_read_by_the_safetensors_package(
    saved: SnapshotRef, model: Everything, call: Any, tmp_path: Path
) -> None:
    report = call("export", "--out", tmp_path / "out", "--model-only")
    assert report["files"] == ["model.safetensors"]
    assert report["left_out"] == 3
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), untied(model))
    from safetensors import safe_open

    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == ["model.safetensors"]


def test_everything_is_exported_under_the_names_of_the_snapshot(
    saved: SnapshotRef, call: Any, model: Everything, tmp_path: Path
) -> None:
    assert call("export", 7, "--out", tmp_path / "out")["left_out"] == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert same_bits(found["model.a_float8_e5m2"], model.a_float8_e5m2)
    assert found["optimizer.state.embed.weight.exp_avg"].shape == (40, 16)
    call("export", "--out", tmp_path / "part", "--names", "model.a_")
    part = load_file(tmp_path / "part" / "model.safetensors")
    assert sorted(part) == sorted(f"model.a_{str(dtype).removeprefix('torch.')}" for dtype in DTYPES)


def test_shards_are_cut_by_size_and_found_through_the_index(
    saved: SnapshotRef, model: Everything, call: Any, tmp_path: Path
) -> None:
    report = call("export", "--out", tmp_path / "out", "--model-only", "--shard-size", "300")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    files = report["files"][:-1]
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == report["nbytes"] == sum(t.nbytes for t in untied(model).values())
    found = {}
    for name in files:
        shard = load_file(tmp_path / "out" / name)
        assert len(shard) == 1 or sum(tensor.nbytes for tensor in shard.values()) <= 300
        assert {index["weight_map"][key] for key in shard} == {name}
        found |= shard
    assert_same(found, untied(model))


def test_a_tied_name_whose_tensor_stays_behind_takes_the_data_along(
    saved: SnapshotRef, model: Everything, call: Any, tmp_path: Path
) -> None:
    call("export", "--out", tmp_path / "out", "--names", "model.head")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), {"model.head.weight": model.head.weight})


def test_an_export_leaves_alone_what_is_there_and_leaves_nothing_when_it_fails(
    saved: SnapshotRef, store: LocalBlobs, call: Any, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    assert "holds something" in call("export", "--out", tmp_path / "full", exit_code=2)["error"]["text"]
    assert "begins so" in call("export", "--out", tmp_path / "o", "--names", "x", exit_code=2)["error"]["text"]
    key = next(key for key in store.list(saved.prefix) if key.endswith(".pack"))
    body = bytearray(store.get(key))
    body[3] ^= 1
    store.put(key, body)
    for form in ("safetensors", "dcp"):
        error = call("export", "--out", tmp_path / "out", "--to", form, exit_code=5)["error"]["text"]
        assert "no good copy" in error
        assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("x")
    assert call("export", "--out", tmp_path / "file" / "below", exit_code=4)["error"]["type"] == "StorageError"


def test_a_dtype_that_safetensors_lacks_is_refused_by_name(store: LocalBlobs, call: Any, tmp_path: Path) -> None:
    torch.save({"z": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "z.pt")
    call("import", tmp_path / "z.pt", "--run", "z")
    error = call("export", "--out", tmp_path / "out", exit_code=2)["error"]["text"]
    assert "complex128" in error
    assert "--to dcp" in error


# ---- export to DCP


def test_dcp_loads_an_exported_model_bit_for_bit(
    saved: SnapshotRef, model: Everything, call: Any, tmp_path: Path
) -> None:
    report = call("export", "--to", "dcp", "--out", tmp_path / "out", "--model-only")
    assert ".metadata" in report["files"]
    target = {name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()}
    load_dcp(target, tmp_path / "out")
    assert_same(target, model.state_dict())


def test_dcp_loads_nested_state_and_large_tensors_in_several_items(
    saved: SnapshotRef, model: Everything, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elastic.snapshot import export_dcp

    monkeypatch.setattr(export_dcp, "ITEM_BYTES", 200)
    call("export", "--to", "dcp", "--out", tmp_path / "out")
    fresh = Everything(9)
    state = {"model": fresh.state_dict()}
    load_dcp(state, tmp_path / "out")
    assert_same(state["model"], model.state_dict())
    assert fresh.head.weight is fresh.embed.weight


def load_dcp(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own classes
        dcp.load(state, checkpoint_id=path, no_dist=True)


# ---- import


def assert_imported(store: LocalBlobs, run: str, model: nn.Module, call: Any) -> None:
    """The run's newest snapshot is good to the last byte, and restores into a fresh model in the mode weights."""
    assert call("verify", "--deep", "--run", run)["ok"]
    (row,) = call("list", "--run", run)["snapshots"]
    assert (row["kind"], row["depth"], row["ranks"]) == ("weights", 0, 1)
    fresh = Everything(11)
    optimizer = torch.optim.AdamW(fresh.parameters())
    catalog = SnapshotCatalog(store, run)
    ref, index = catalog.newest_good()
    for mesh, rank in ((Mesh((("dp", 1),)), 0), (mesh_of(2), 1)):
        attached = Attached({"model": fresh, "optimizer": optimizer}, mesh, rank)
        report = restore(attached, index, catalog.source(ref), "weights")
        assert (report.dropped, report.cast) == ((), ())
        assert_same(fresh.state_dict(), model.state_dict())
        assert fresh.head.weight is fresh.embed.weight


def test_an_exported_model_comes_back_from_every_format(
    saved: SnapshotRef,
    model: Everything,
    store: LocalBlobs,
    call: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from elastic.snapshot import export_dcp

    monkeypatch.setattr(export_dcp, "ITEM_BYTES", 200)  # so that DCP has several boxes of a tensor
    out = tmp_path / "out"
    for number, flags in enumerate(
        (["--to", "safetensors"], ["--to", "safetensors", "--shard-size", "500"], ["--to", "dcp"])
    ):
        call("export", "--run", RUN, "--out", out, "--model-only", *flags)
        run = f"back-{number}"
        imported = call("import", out, "--run", run)
        assert imported["tensors"] + imported["ties"] == len(model.state_dict())
        assert_imported(store, run, model, call) if number < 2 else None
        shutil.rmtree(out)
    found = SnapshotCatalog(store, "back-2")
    loaded = found.load(found.list()[0])
    assert loaded["model.head.weight"].tobytes() == model.head.weight.detach().numpy().tobytes()


def test_a_file_of_the_safetensors_package_is_imported_with_its_ties(
    model: Everything, store: LocalBlobs, call: Any, tmp_path: Path
) -> None:
    save_model(model, str(tmp_path / "theirs.safetensors"))
    report = call("import", tmp_path / "theirs.safetensors", "--run", "theirs", "--step", 12)
    assert (report["ties"], report["step"], report["from"]) == (1, 12, "safetensors")
    assert_imported(store, "theirs", model, call)
    assert call("show", "12")["versions"]["imported_from"] == "safetensors theirs.safetensors"


@pytest.mark.parametrize("old", [False, True])
def test_a_file_of_torch_save_is_imported(
    model: Everything, store: LocalBlobs, call: Any, tmp_path: Path, old: bool
) -> None:
    state = {"module." + name: tensor for name, tensor in model.state_dict().items()}
    if old:
        state = {name: tensor for name, tensor in state.items() if tensor.dtype in IN_OLD_FILES}
    torch.save(state, tmp_path / "m.pt", _use_new_zipfile_serialization=not old)
    call("import", tmp_path / "m.pt", "--run", "theirs")
    if not old:
        assert_imported(store, "theirs", model, call)
    assert call("verify", "--deep")["ok"]


IN_OLD_FILES = {torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool}


def test_the_part_that_holds_the_weights_is_named_or_the_only_one(
    model: Everything, store: LocalBlobs, call: Any, tmp_path: Path
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model.embed.weight.grad = torch.ones_like(model.embed.weight)
    optimizer.step()
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(whole, tmp_path / "both.pt")
    error = call("import", tmp_path / "both.pt", "--run", "a", exit_code=2)["error"]["text"]
    assert f"model ({len(model.state_dict())} tensors), optimizer (1 tensor)" in error
    found = call("import", tmp_path / "both.pt", "--run", "a", "--part", "model")
    assert "epoch" in found["left_out"]
    assert_imported(store, "a", model, call)
    torch.save({"epoch": 3, "model": model.state_dict()}, tmp_path / "one.pt")
    call("import", tmp_path / "one.pt", "--run", "b")
    assert_imported(store, "b", model, call)
    assert (
        "no name begins so"
        in call("import", tmp_path / "one.pt", "--run", "c", "--part", "x", exit_code=2)["error"]["text"]
    )


def test_tensors_in_any_order_of_memory_are_imported_as_what_they_are(
    store: LocalBlobs, call: Any, tmp_path: Path
) -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    state = {"turned": base.permute(2, 0, 1), "spread": torch.tensor([1.0, 2.0]).expand(3, 2), "part": base[1, :, 1:3]}
    torch.save(state, tmp_path / "m.pt")
    call("import", tmp_path / "m.pt", "--run", "r")
    catalog = SnapshotCatalog(store, "r")
    loaded = catalog.load(catalog.list()[0])
    for name, tensor in state.items():
        assert loaded[f"model.{name}"].tolist() == tensor.tolist()


def test_a_dcp_directory_of_torch_is_imported_without_running_its_pickle(
    model: Everything, store: LocalBlobs, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"model": model.state_dict(), "epoch": 3, "optim": {"m": torch.ones(3)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pickle was run")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    report = call("import", tmp_path / "dcp", "--run", "theirs", "--part", "model")
    assert report["left_out"] == ["epoch"]
    assert call("verify", "--deep")["ok"]
    catalog = SnapshotCatalog(store, "theirs")
    loaded = catalog.load(catalog.list()[0])
    for name, tensor in model.state_dict().items():
        assert loaded[f"model.{name}"].tobytes() == raw_bytes(tensor).numpy().tobytes(), name


class Boom:
    """Makes a file if a reader runs it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def test_a_file_that_would_run_code_is_refused_and_does_not(call: Any, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "boom": Boom(tmp_path / "boomed")}, tmp_path / "m.pt")
    error = call("import", tmp_path / "m.pt", "--run", "r", exit_code=2)["error"]["text"]
    assert "weights_only" in error
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(Boom(tmp_path / "boomed")))
    call("import", tmp_path / "d", "--run", "r", exit_code=5)
    assert not (tmp_path / "boomed").exists()
    assert call("list", "--run", "r", exit_code=6)


def test_files_that_are_damaged_or_lead_elsewhere_are_refused(model: Everything, call: Any, tmp_path: Path) -> None:
    save_file({"w": torch.ones(100)}, tmp_path / "w.safetensors")
    body = (tmp_path / "w.safetensors").read_bytes()
    bad = tmp_path / "bad.safetensors"
    for content in (body[:-1], body[:5], b"\xff" * 64, body + b"x", body.replace(b"[100]", b"[101]")):
        bad.write_bytes(content)
        assert call("import", bad, "--run", "r", exit_code=5)["error"]["type"] == "CorruptSnapshot"
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../w.safetensors"}}))
    error = call("import", tmp_path / "x.safetensors.index.json", "--run", "r", exit_code=5)["error"]["text"]
    assert "'../w.safetensors'" in error
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps({"weight_map": {"v": "w.safetensors"}}))
    call("import", tmp_path / "x.safetensors.index.json", "--run", "r", exit_code=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(100)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (data,) = (tmp_path / "dcp").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:200])
    call("import", tmp_path / "dcp", "--run", "r", exit_code=5)
    (tmp_path / "text.pt").write_text("no tensors here")
    assert call("import", tmp_path / "text.pt", "--run", "r", exit_code=2)["error"]["type"] == "ConfigError"
    assert "no such file" in call("import", tmp_path / "no.pt", "--run", "r", exit_code=2)["error"]["text"]
    torch.save({"s": torch.eye(3).to_sparse()}, tmp_path / "s.pt")
    assert "sparse" in call("import", tmp_path / "s.pt", "--run", "r", exit_code=4)["error"]["text"]


def test_an_import_never_lands_in_a_run_that_is_under_way_unless_asked(
    saved: SnapshotRef, call: Any, tmp_path: Path
) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    assert "step 7" in call("import", tmp_path / "w.safetensors", "--run", RUN, exit_code=2)["error"]["text"]
    call("import", tmp_path / "w.safetensors", "--run", RUN, "--add", "--step", 8)
    assert [row["step"] for row in call("list")["snapshots"]] == [8, 7]
    for flags in (["--step", "-1"], ["--as", "a.b"], ["--as", "run"]):
        call("import", tmp_path / "w.safetensors", "--run", "new", *flags, exit_code=2)


# ---- memory

MEMORY_SCRIPT = """
import re, sys
from elastic.cli.main import build
from elastic.snapshot import export_safetensors, import_safetensors, imports
if "dcp" in sys.argv:
    from elastic.snapshot import export_dcp

def peak_mib():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

app, before = build(), peak_mib()
app(sys.argv[1:], standalone_mode=False)
print("extra MiB", peak_mib() - before)
"""
"""VmHWM begins anew with each program; what getrusage calls maxrss would begin with that of this process."""
MODEL_MIB, BUDGET_MIB = 240, 120


def extra_mib(*arguments: object) -> float:
    """Peak memory that a command takes beyond what its imports take, in a process of its own."""
    command = [sys.executable, "-c", MEMORY_SCRIPT, "snapshots", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split("extra MiB")[1])


def test_import_and_export_need_less_memory_than_the_model(tmp_path: Path) -> None:
    each = (MODEL_MIB << 20) // 3
    entries = {
        f"layer.{i}": {"dtype": "BF16", "shape": [2, each // 4], "data_offsets": [i * each, (i + 1) * each]}
        for i in range(3)
    }
    header = json.dumps(entries).encode()
    with open(tmp_path / "big.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 3 * each)
    storage = ("--storage", tmp_path / "store")
    used = {
        "import": extra_mib("import", tmp_path / "big.safetensors", "--run", "big", *storage),
        "export": extra_mib("export", "--out", tmp_path / "out", *storage),
        "export dcp": extra_mib("export", "--to", "dcp", "--out", tmp_path / "dcp", *storage),
    }
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > MODEL_MIB << 20
    assert max(used.values()) < BUDGET_MIB, used

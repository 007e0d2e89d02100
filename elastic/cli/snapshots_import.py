"""``elastic snapshots import``: weights from safetensors, ``torch.save`` or DCP become a committed snapshot."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastic import __version__
from elastic.cli.output import count, print_json, seconds
from elastic.cli.run_settings import absolute
from elastic.cli.snapshots_find import AsJson, Storage
from elastic.cli.snapshots_text import size
from elastic.errors import ConfigError
from elastic.snapshot.names import listing
from elastic.snapshot.object_names import check_part
from elastic.snapshot.safetensors_file import INDEX_SUFFIX
from elastic.storage.blob_store import open_store

if TYPE_CHECKING:
    from elastic.snapshot.foreign import Foreign


def import_snapshot(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A .safetensors or torch.save file, or a directory.")],
    run: Annotated[str | None, typer.Option("--run", help="The run to make.")] = None,
    storage: Storage = None,
    step: Annotated[int, typer.Option("--step", help="The step that the weights stand for.")] = 0,
    part: Annotated[str | None, typer.Option("--part", help="Which part of it, such as model.")] = None,
    attached_as: Annotated[str, typer.Option("--as", help="The name that run.attach gives the model.")] = "model",
    add: Annotated[bool, typer.Option("--add", help="Also to a run that has snapshots.")] = False,
    as_json: AsJson = False,
) -> None:
    """Commit weights as a snapshot of a new run, to start from. Nothing but torch's weights_only loader unpickles."""
    from elastic.snapshot.foreign import weights_of
    from elastic.snapshot.imports import import_weights
    from elastic.snapshot.reader import SnapshotCatalog

    if run is None or not storage:
        field, cure = ("--run", "name the run to make") if run is None else ("--storage", "say where to store it")
        raise ConfigError(field, None, cure)
    check_part(run)
    store = open_store(absolute(storage))
    held = SnapshotCatalog(store, run).list()
    if held and not add:
        steps = ", ".join(str(ref.step) for ref in held[:5])
        raise ConfigError("--run", run, f"it has snapshots (step {steps}); use another name, or --add")
    started = time.perf_counter()
    found = open_foreign(path)
    tensors = weights_of(found, part)
    versions = {"elastic": __version__, "imported_from": f"{found.kind} {path.name}"}
    report = import_weights(
        store, run, tensors, now_s=time.time(), step=step, attached_as=attached_as, versions=versions
    )
    took = time.perf_counter() - started
    if as_json:
        print_json(
            {
                "run": run,
                "storage": store.url,
                "step": step,
                "id": report.ref.snapshot_id,
                "from": found.kind,
                "tensors": report.tensors,
                "ties": report.ties,
                "bytes": report.nbytes,
                "left_out": list(found.left_out),
                "seconds": took,
            }
        )
        return
    ties = f" and {count(report.ties, 'tied name')}" if report.ties else ""
    print(
        f"{count(report.tensors, 'tensor')}{ties}, {size(report.nbytes)}, from {found.kind}: "
        f"step {step} of run {run!r} ({report.ref.snapshot_id}), in {seconds(took)}"
    )
    if found.left_out:
        print(f"  left out, not tensors: {listing(found.left_out)}")


def open_foreign(path: Path) -> Foreign:
    """The tensors of whatever ``path`` is. Raises ConfigError if it is nothing known."""
    if path.is_dir():
        if (path / ".metadata").is_file():
            from elastic.snapshot.import_torch import open_dcp

            return open_dcp(path)
        path = _safetensors_in(path)
    if not path.is_file():
        raise ConfigError("PATH", str(path), "there is no such file or directory")
    if path.name.endswith((".safetensors", INDEX_SUFFIX)):
        from elastic.snapshot.import_safetensors import open_safetensors

        return open_safetensors(path)
    from elastic.snapshot.import_torch import open_torch_file

    return open_torch_file(path)


def _safetensors_in(directory: Path) -> Path:
    """The index, or else the only file, of safetensors in a directory."""
    for pattern in (f"*{INDEX_SUFFIX}", "*.safetensors"):
        found = sorted(directory.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = listing(entry.name for entry in found)
            raise ConfigError("PATH", str(directory), f"it holds {names}; name one of them")
    raise ConfigError("PATH", str(directory), "it holds neither .metadata of DCP nor safetensors files")

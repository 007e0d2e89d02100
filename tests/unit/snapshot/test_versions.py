"""Versions: what differs, what is not known, and what may differ when it is accepted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from elastic.snapshot.made_with import code_of, installed, of_objects
from elastic.snapshot.versions import VersionDifference, compare, not_accepted

THERE = {"torch": "2.12.0", "python": "3.11", "elastic": "0.1.0", "code": "train.py 11", "model": "", "ray": "2.59"}
HERE = {"torch": "2.13.0", "python": "3.11", "elastic": "0.1.0", "code": "train.py 22", "model": "v3", "ray": "2.60"}


def test_versions_that_differ_are_listed_and_those_that_one_side_lacks_are_told() -> None:
    check = compare(THERE, HERE)
    assert list(map(str, check.differing)) == ["code train.py 11 → train.py 22", "torch 2.12.0 → 2.13.0"]
    assert check.unchecked == ("model", "tokenizer", "container", "dependencies", "data")
    assert list(map(str, check.told)) == ["ray 2.59 → 2.60"]


def test_a_version_that_is_accepted_may_differ_and_dependencies_stand_for_torch_and_python() -> None:
    check = compare(THERE, HERE)
    assert [d.name for d in not_accepted(check, ())] == ["code", "torch"]
    assert [d.name for d in not_accepted(check, ("dependencies",))] == ["code"]
    assert not_accepted(check, ("code", "torch")) == ()


def test_what_a_component_found_counts_as_a_version() -> None:
    found = VersionDifference("optimizer kind of optimizer", "Adam", "SGD")
    assert compare({}, {}, [found]).differing == (found,)


def test_the_version_of_the_code_follows_the_source_of_the_module(tmp_path: Path) -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    def load(text: str) -> object:
        path = tmp_path / "a_train_script.py"
        path.write_text(text)
        spec = spec_from_file_location("a_train_script", path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        sys.modules.pop("a_train_script", None)
        exec(compile(text, str(path), "exec"), module.__dict__)
        return module.train

    first = code_of(load("RATE = 1\ndef train():\n    return RATE\n"))["code"]
    again = code_of(load("RATE = 1\ndef train():\n    return RATE\n"))["code"]
    other = code_of(load("RATE = 2\ndef train():\n    return RATE\n"))["code"]
    assert first == again
    assert first.startswith("a_train_script.py ")
    assert first != other
    assert code_of(len) == {"code": "", "commit": ""}


def test_what_is_installed_is_found_out_and_a_container_may_be_named(monkeypatch) -> None:
    monkeypatch.setenv("CONTAINER_IMAGE", "registry/train@sha256:12")
    found = installed()
    assert found["container"] == "registry/train@sha256:12"
    assert found["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert "numpy" in found["dependencies"]


def test_the_objects_of_a_rank_tell_the_data_and_the_kinds_of_the_optimizers() -> None:
    optimizer, loader = {"kind": "optimizer", "class": "AdamW"}, {"kind": "loader", "state": {"fingerprint": "f"}}
    tree = {"components": {"a": optimizer, "b": loader, "c": {"kind": "model"}}}
    assert of_objects(json.dumps(tree).encode()) == {"data": "f", "optimizer": "AdamW"}
    assert of_objects(b'{"optimizer":{"lr":0.1}}') == {"data": "", "optimizer": ""}

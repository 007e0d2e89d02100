from __future__ import annotations

from pathlib import Path

import pytest

from elastic.cli.run_settings import default_name, read_file, settings_from
from elastic.errors import ConfigError

YAML = """
train_loop: jobs.py:train
train_loop_config: {lr: 1e-3, model: {width: 64, layers: 2}}
scaling_config: {num_workers: [2, 8], resources_per_worker: {CPU: 2}}
run_config:
  name: from-file
  storage_path: s3://bucket/runs
  seed: 5
  snapshots: {interval: 10m, keep: 7}
"""

TOML = """
train_loop = "jobs.py:train"
[train_loop_config]
lr = 1e-3
model = {width = 64, layers = 2}
[scaling_config]
num_workers = "2:8"
resources_per_worker = {CPU = 2}
[run_config]
name = "from-file"
storage_path = "s3://bucket/runs"
seed = 5
snapshots = {interval = "10m", keep = 7}
"""


@pytest.fixture(params=["yaml", "toml"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"run.{request.param}"
    path.write_text(YAML if request.param == "yaml" else TOML)
    return path


def test_a_file_says_all_that_the_api_says(file: Path) -> None:
    settings = settings_from(None, read_file(file))
    assert settings.target == "jobs.py:train"
    assert settings.train_loop_config == {"lr": 0.001, "model": {"width": 64, "layers": 2}}
    assert settings.scaling.num_workers == (2, 8)
    assert settings.scaling.resources == {"CPU": 2}
    assert (settings.run.name, settings.run.storage_path, settings.run.seed) == ("from-file", "s3://bucket/runs", 5)
    assert (settings.run.snapshots.interval, settings.run.snapshots.keep) == ("10m", 7)


def test_flags_beat_the_file(file: Path) -> None:
    settings = settings_from(
        "other.py:train",
        read_file(file),
        workers="3",
        storage="s3://other/runs",
        name="flag",
        resources="CPU=1,GPU=0.5",
        mesh=("dp=-1,tp=3",),
        interval="100 steps",
        replicas=0,
        keep=1,
        seed=9,
        assignments=["model.width=128", "lr=1e-4", "new=[1, 2]", "text=a: b", "flag=true"],
    )
    assert settings.target == "other.py:train"
    assert settings.train_loop_config == {
        "lr": 0.0001,
        "model": {"width": 128, "layers": 2},
        "new": [1, 2],
        "text": {"a": "b"},
        "flag": True,
    }
    assert settings.scaling.num_workers == 3
    assert settings.scaling.resources == {"CPU": 1.0, "GPU": 0.5}
    assert dict(settings.scaling.mesh) == {"dp": -1, "tp": 3}
    run = settings.run
    assert (run.name, run.storage_path, run.seed) == ("flag", "s3://other/runs", 9)
    assert (run.snapshots.interval, run.snapshots.replicas, run.snapshots.keep) == ("100 steps", 0, 1)


def test_without_anything_the_run_is_named_after_its_script_and_stored_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    settings = settings_from("jobs/my train.py:train", {})
    assert settings.run.name == "my-train"
    assert settings.run.storage_path == "/elastic-runs"
    assert settings.train_loop_config is None
    assert default_name("package.module:function") == "module"


def test_workers_may_be_a_range_with_either_sign() -> None:
    for text in ("2:8", "2-8"):
        assert settings_from("a.py:f", {}, workers=text).scaling.num_workers == (2, 8)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"workers": "many"}, "--workers = 'many': use a number, or MIN:MAX"),
        ({"workers": "4:2"}, "num_workers = (4, 2): the minimum 4 is above the maximum 2; swap them"),
        ({"workers": "0"}, "num_workers = 0: at least one worker is needed"),
        ({"workers": "5:7", "mesh": ("dp=-1,tp=4",)}, "no world size from 5 to 7 can hold it"),
        ({"mesh": ("dp",)}, "--mesh = 'dp': use NAME=NUMBER, with commas between, as dp=-1,tp=2"),
        ({"mesh": ("columns=2",)}, "unknown axis 'columns'; use pp, "),
        ({"resources": "CPU=two"}, "--resources = 'CPU=two': use NAME=NUMBER"),
        ({"resources": "CPU=0"}, "resources_per_worker['CPU'] = 0.0: use a finite number above 0"),
        ({"interval": "often"}, "interval = 'often': use auto, young, daly, seconds"),
        ({"replicas": 3}, "replicas = 3: input should be 0 or 1"),
        ({"keep": 0}, "keep = 0: use a finite number above 0"),
        ({"name": "../x"}, "name = '../x': use letters, digits"),
        ({"assignments": ["lr"]}, "--set = 'lr': use KEY=VALUE"),
        ({"assignments": ["a=1", "a.b=2"]}, "'a' is not a mapping"),
        ({"address": "head:6379"}, "--storage = None: name storage that every node of the cluster reaches"),
    ],
)
def test_a_wrong_flag_is_one_sentence(flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings_from("a.py:f", {}, **flags)  # type: ignore[arg-type]
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("none.yaml", None, "cannot be read (No such file or directory)"),
        ("a.yaml", "a: [", "is not YAML"),
        ("a.toml", "a = ", "is not TOML"),
        ("a.yaml", "scaling: {}", "has no such section; it may have train_loop, train_loop_config"),
        ("a.yaml", "run_config: 3", "must be a mapping"),
        ("a.yaml", "just text", "must hold train_loop"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, name: str, text: str | None, sentence: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_file(path)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_field_that_the_config_lacks_is_named_with_those_it_has() -> None:
    with pytest.raises(ConfigError, match="RunConfig has no such field; it has name, storage_path"):
        settings_from("a.py:f", {"run_config": {"nam": "x"}})


def test_a_second_mesh_is_another_one_that_is_allowed() -> None:
    settings = settings_from("a.py:train", {}, workers="2:4", mesh=("dp=2,tp=2", "dp=2"))
    assert settings.scaling.mesh == ({"dp": 2, "tp": 2}, {"dp": 2})

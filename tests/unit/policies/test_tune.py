"""``elastic tune`` from the outside: inputs, the answer in its forms, and every mistake a caller can make."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from elastic.cli.tune import register
from elastic.cli.tune_facts import read_run_facts
from elastic.cli.tune_units import duration, duration_text, rate_bytes_per_s, size_bytes
from elastic.errors import ConfigError

APP = typer.Typer()
register(APP)
JOB = ["--mtbf", "11134.61", "--cost", "60", "--restart", "300"]
TWO_TIERS = [
    "--mtbf",
    "11134.606",
    "--stall",
    "1.5",
    "--write",
    "20",
    "--slowdown",
    "0.05",
    "--remote-stall",
    "3",
    "--remote-write",
    "240",
    "--remote-slowdown",
    "0.02",
    "--restart-process",
    "60",
    "--restart",
    "120",
    "--restart-remote",
    "600",
]


def run(*arguments: str, code: int = 0):
    result = CliRunner().invoke(APP, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def answer(*arguments: str) -> dict:
    return json.loads(run(*arguments, "--json").stdout)


def codes(found: dict) -> set[str]:
    return {finding["code"] for finding in found["findings"]}


def write_log(path: Path, gaps, kind: str = "node") -> Path:
    now, lines = 0.0, ["time,class", "0,start"]
    for gap in gaps:
        now += gap
        lines.append(f"{now:.3f},{kind}")
    path.write_text("\n".join(lines) + "\n")
    return path


def exponential_gaps(count: int, mean_s: float = 7200.0) -> list[float]:
    rng = random.Random(1)
    return [rng.expovariate(1 / mean_s) + 700 for _ in range(count)]


def test_the_answer_is_the_golden_one():
    found = answer(*JOB, "--step-time", "7")
    assert (found["schema"], found["version"]) == ("ray-elastic/tune", 1)
    assert found["interval_s"] == pytest.approx(1116.2717960731807, rel=1e-9)
    assert found["efficiency"] == pytest.approx(0.8758293091338573, abs=1e-10)
    assert found["young_s"] == pytest.approx(1155.9209315519813)
    assert found["daly_s"] == pytest.approx(1116.2669759820817)
    assert (found["steps"], found["k"], found["period_s"]) == (159, 1, pytest.approx(1176.27, abs=0.01))
    assert sum(found["lost_time"].values()) == pytest.approx(1)
    halves = {(entry["what"], entry["factor"]): entry["efficiency"] for entry in found["sensitivity"]}
    assert halves["interval", 0.5] == pytest.approx(0.854760, abs=1e-6)
    assert halves["interval", 2.0] == pytest.approx(0.853700, abs=1e-6)


def test_durations_may_carry_units_and_mean_the_same():
    assert answer("--mtbf", "6h", "--cost", "1m", "--restart", "5m") == {
        **answer("--mtbf", "21600", "--cost", "60", "--restart", "300")
    }


def test_two_tiers_give_the_golden_interval_and_k():
    found = answer(*TWO_TIERS)
    assert (found["policy"], found["k"], found["interval_s"]) == ("two-tier", 10, pytest.approx(237.00518, rel=1e-4))
    assert answer(*TWO_TIERS, "--policy", "auto") == answer(*TWO_TIERS, "--policy", "two-tier") == found
    assert "W_SHARES" in codes(found)
    assert "W_SHARES" not in codes(answer(*TWO_TIERS, "--shares", "0.2,0.77,0.03"))
    assert found["efficiency"] == pytest.approx(0.959930283, abs=1e-7)
    remote_only = next(rival for rival in found["rivals"] if rival["name"] == "remote only")
    assert remote_only["efficiency"] == pytest.approx(0.888401, abs=1e-5)


def test_bytes_and_bandwidth_are_a_write_behind_a_stall_or_the_stall_itself():
    assert answer("--mtbf", "3h", "--bytes", "40GB", "--bandwidth", "2GB/s")["cost"]["stall_s"] == 20
    behind = answer("--mtbf", "3h", "--stall", "1", "--bytes", "40GB", "--bandwidth", "16Gbit/s")
    assert (behind["cost"]["stall_s"], behind["cost"]["write_s"]) == (1, 20)


def test_counts_without_nodes_are_the_exact_confidence_interval():
    found = answer("--failures", "3", "--hours", "72", "--cost", "30")["mtbf"]
    assert found["mtbf_s"] == 24 * 3600
    assert (found["low_s"], found["high_s"]) == (
        pytest.approx(8.21236 * 3600, rel=1e-5),
        pytest.approx(116.37828 * 3600, rel=1e-5),
    )


@pytest.mark.parametrize(("failures", "mtbf_h"), [(0, 105.692308), (2, 35.230769)])
def test_counts_with_nodes_start_from_a_weak_prior(failures, mtbf_h):
    found = answer("--failures", str(failures), "--hours", "48", "--nodes", "64", "--cost", "30")
    assert found["mtbf"]["mtbf_s"] / 3600 == pytest.approx(mtbf_h, rel=1e-6)
    assert "W_FEW_FAILURES" in codes(found)
    low, high = found["interval_confidence_s"]
    assert low < found["interval_s"] < high


def test_no_prior_means_none():
    found = answer("--failures", "2", "--hours", "48", "--nodes", "64", "--cost", "30", "--no-prior")
    assert found["mtbf"]["mtbf_s"] == 24 * 3600
    assert found["mtbf"]["prior"] is None


def test_a_preset_scales_with_the_nodes_and_says_that_it_is_not_yours():
    found = answer("--preset", "llama3-405b", "--cost", "30", "--restart", "180")
    assert found["interval_s"] == pytest.approx(797.5, abs=0.05)
    assert found["efficiency"] == pytest.approx(0.9135, abs=1e-4)
    assert "W_PRESET" in codes(found)
    assert answer("--preset", "llama3-405b", "--nodes", "1024", "--cost", "30")["mtbf"]["mtbf_s"] == pytest.approx(
        2 * 3.09308 * 3600, rel=1e-5
    )


def test_what_all_nodes_share_comes_on_top():
    alone = answer("--preset", "meta-rsc1", "--nodes", "1024", "--cost", "30")["mtbf"]["mtbf_s"]
    joined = answer("--preset", "meta-rsc1", "--nodes", "1024", "--common-mtbf", "2d", "--cost", "30")["mtbf"]["mtbf_s"]
    assert 1 / joined == pytest.approx(1 / alone + 1 / 172800)


def test_a_what_if_over_nodes_shows_where_a_faster_snapshot_stops_mattering():
    scale = answer("--preset", "meta-rsc1", "--nodes", "64,256,1024,4096", "--cost", "5", "--restart", "300")["scale"]
    assert [point["nodes"] for point in scale] == [64, 256, 1024, 4096]
    assert all(point["goodput"] < point["half_cost"] < point["free"] < 1 for point in scale)
    assert [point["goodput"] for point in scale] == sorted((point["goodput"] for point in scale), reverse=True)
    text = run("--preset", "meta-rsc1", "--nodes", "64,4096", "--cost", "5", "--restart", "300").output
    assert "restarts" in text
    assert "4096" in text


def test_an_mtbf_of_one_size_is_scaled_to_another():
    found = answer("--mtbf", "8h", "--measured-nodes", "512", "--nodes", "1024,2048", "--cost", "5")
    assert found["mtbf"]["mtbf_s"] == 4 * 3600
    assert [point["mtbf_s"] for point in found["scale"]] == [pytest.approx(4 * 3600), pytest.approx(2 * 3600)]


def test_a_binding_constraint_is_named():
    assert answer(*JOB, "--max", "10m")["binding"] == "max"
    assert answer(*JOB, "--min", "1h")["binding"] == "min"
    assert answer(*JOB, "--rpo", "600")["binding"] == "rpo"
    assert answer(*JOB, "--budget", "0.02")["binding"] == "budget"
    found = answer("--mtbf", "3600", "--stall", "2", "--write", "600", "--restart", "60")
    assert (found["binding"], found["interval_s"]) == ("in_flight", 600)
    assert "W_STORAGE_BOUND" in codes(found)
    throttled = answer("--mtbf", "3h", "--stall", "1", "--write", "9", "--bytes", "100GB", "--upload-limit", "100MB/s")
    assert (throttled["binding"], throttled["period_s"]) == ("throttle", 1000)


def test_a_named_policy_fixes_the_interval_and_leaves_k_to_the_optimum():
    found = answer(*TWO_TIERS, "--policy", "fixed:100")
    assert (found["interval_s"], found["k"]) == (pytest.approx(100), 23)
    assert found["efficiency"] == pytest.approx(0.952107904, abs=1e-7)


def test_uneven_storage_is_doubted():
    assert "W_WRITE_TAIL" in codes(answer("--mtbf", "3h", "--stall", "1", "--write", "10", "--write-p95", "30"))


def test_the_remote_rpo_sets_k():
    free, bound = answer(*TWO_TIERS), answer(*TWO_TIERS, "--rpo-remote", "20m")
    assert bound["binding"] == "rpo_remote"
    assert bound["remote_period_s"] + 240 <= 1200 * (1 + 1e-9)
    assert bound["k"] < free["k"]


def test_other_policies_stand_beside_the_exact_one():
    found = answer(*JOB, "--policy", "young")
    assert found["interval_s"] == pytest.approx(1155.92, abs=0.01)
    assert {rival["name"] for rival in found["rivals"]} == {"young", "daly", "exact"}
    assert answer(*JOB, "--policy", "fixed:600")["interval_s"] == 600
    assert answer(*JOB, "--policy", "budget:0.05")["interval_s"] == pytest.approx(60 * 19)
    lazy = answer(*JOB, "--policy", "lazy", "--shape", "0.7")
    assert [round(interval) for interval in lazy["schedule_s"][:2]] == [806, 916]
    assert lazy["efficiency"] == pytest.approx(0.882443, abs=2e-6)


def test_a_finite_job_and_broken_saves():
    finite = answer("--mtbf", "6h", "--cost", "300", "--restart", "600", "--work", "10h")["finite_job"]
    assert (finite["segments"], finite["expected_s"]) == (11, pytest.approx(43940.83168, abs=1e-4))
    assert "W_SHORT_JOB" in codes(answer("--mtbf", "6h", "--cost", "300", "--work", "10m"))
    assert answer(*JOB, "--usable", "0.9")["interval_s"] == pytest.approx(1018.757, abs=0.01)


def test_a_notice_takes_failures_out_of_the_rate_and_decides_the_final_save():
    found = answer(*TWO_TIERS, "--spot", "aws-spot", "--noticed-share", "0.5")
    assert found["mtbf"]["mtbf_s"] == pytest.approx(2 * 11134.606)
    assert found["final_save"]["target"] == "peer"
    assert "W_SPOT" in codes(found)
    assert answer(*JOB, "--notice", "30s")["final_save"]["target"] == "none"


def test_validation_reports_its_z():
    check = answer(*JOB, "--validate", "--validate-failures", "20000")["validation"]
    assert abs(check["z"]) < 4
    assert check["failures"] == 20_000
    two = "--mtbf 2h --stall 10 --remote-stall 60 --shares 0.2,0.7,0.1 --restart-process 30 --restart 60"
    two += " --restart-remote 10m"
    found = answer(*two.split(), "--validate", "--validate-failures", "5000")
    assert (found["k"], found["efficiency"]) == (7, pytest.approx(0.897574171, abs=1e-8))
    assert abs(found["validation"]["z"]) < 4


def test_a_log_gives_the_rate_and_replays_itself(tmp_path):
    log = write_log(tmp_path / "log.csv", exponential_gaps(60))
    found = answer("--log", log, "--cost", "60", "--restart", "300", "--replay", log)
    assert found["mtbf"]["mtbf_s"] == pytest.approx(7900, rel=0.3)
    replay = found["replay"]
    assert replay["failures"] == 60
    assert replay["hindsight_efficiency"] >= replay["efficiency"]
    assert abs(replay["online_efficiency"] - replay["efficiency"]) < 0.03
    assert answer("--log", log, "--cost", "60", "--policy", "trace")["policy"] == "trace"


def test_a_log_of_bursts_and_lemons_is_doubted(tmp_path):
    rng, now, lines = random.Random(2), 0.0, ["time,node,class"]
    for _ in range(40):
        now += rng.expovariate(1 / 20_000)
        first = f"n{rng.randrange(200)}"
        lines += [f"{now:.1f},{first},node", f"{now + 20:.1f},bad,node", f"{now + 40:.1f},bad,node"]
    path = tmp_path / "storms.csv"
    path.write_text("\n".join(lines))
    found = answer("--log", path, "--cost", "30", "--restart", "60", "--nodes", "256")
    assert {"W_BURSTS", "W_LEMON"} <= codes(found)
    assert found["mtbf"]["failures"] < 45


def test_a_log_with_a_trend_says_so(tmp_path):
    gaps = [20_000 * 0.93**index for index in range(60)]
    assert "W_TREND" in codes(answer("--log", write_log(tmp_path / "t.csv", gaps), "--cost", "30"))


def test_a_bad_line_of_a_log_is_named(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("time,node\n10,a\n5,b\n")
    result = run("--log", path, "--cost", "5", code=2)
    assert "line 3" in result.stderr
    assert "E_LOG_ORDER" in result.stderr


def test_the_curve_has_forty_one_points_around_the_answer(tmp_path):
    path = tmp_path / "curve.csv"
    run(*JOB, "--curve", path)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert len(rows) == 41
    assert [float(rows[index]["factor"]) for index in (0, 20, 40)] == [0.1, 1.0, 10.0]
    assert max(rows, key=lambda row: float(row["efficiency"])) == rows[20]


@pytest.mark.parametrize("ending", ["svg", "png"])
@pytest.mark.parametrize("job", [JOB, [*TWO_TIERS, "--measured-nodes", "64", "--nodes", "64,256"]], ids=["one", "two"])
def test_a_plot_is_drawn(tmp_path, ending, job):
    path = tmp_path / f"plot.{ending}"
    run(*job, "--plot", path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert len(data) > 10_000
    if ending == "svg":
        assert b"</svg>" in data


def test_a_missing_matplotlib_is_a_sentence_with_the_cure(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(*JOB, "--plot", tmp_path / "plot.png", code=2)
    assert "pip install 'ray-elastic[plot]'" in result.stderr
    assert result.stdout == ""


def test_the_answer_in_words_names_what_it_rests_on():
    text = run(*JOB, "--explain", "--max", "10m").stdout
    for part in ("Save after every", "10 min 0 s", "Young's formula", "The constraint 'max'", "How sure"):
        assert part in text


def test_the_table_holds_the_answer_and_its_rivals():
    text = run(*TWO_TIERS, "--failures", "5", "--hours", "24", code=2).stderr
    assert "give one of them" in text
    text = run(*TWO_TIERS).output
    for part in ("3 min 57 s", "every 10th of them", "95.99%", "half the interval", "Young", "Daly", "Remote only"):
        assert part in text


def test_a_run_is_read_from_its_journal(tmp_path):
    records = [
        {"kind": "begun", "t": 1.0, "generation": 1},
        {"kind": "stall", "t": 2.0, "seconds": 0.2},
        {"kind": "stall", "t": 3.0, "seconds": 0.4},
        {"kind": "write", "t": 4.0, "seconds": 8.0, "tier": "node"},
        {"kind": "exposure", "t": 5.0, "node_s": 7200.0, "nodes": 4},
        {"kind": "failure", "t": 100.0, "class": "node"},
        {"kind": "failure", "t": 101.0, "class": "process"},
        {"kind": "restore", "t": 110.0, "seconds": 3.0, "class": "node"},
        {"kind": "failure", "t": 900.0, "class": "user"},
    ]
    folder = tmp_path / "gpt" / "journal"
    folder.mkdir(parents=True)
    half = len(records) // 2
    for name, part in (("c1-00000001.jsonl", records[:half]), ("c1-00000002.jsonl", records[half:])):
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in part))
    found = answer("--run", "gpt", "--storage", tmp_path)
    assert found["cost"]["stall_s"] == pytest.approx(0.3)
    assert found["cost"]["write_s"] == 8.0
    assert found["restart"]["node_s"] == 3.0
    assert found["mtbf"]["failures"] == 1, "a second failure a second later is the same storm; a user's error is none"
    assert found["mtbf"]["exposure_node_s"] == 7200
    assert "run gpt" in found["mtbf"]["source"]


def test_facts_of_a_journal_name_a_record_that_lacks_its_number():
    with pytest.raises(ConfigError, match="needs a number 'seconds'"):
        read_run_facts([{"kind": "stall"}])
    assert read_run_facts([{"kind": "strange"}]).saves == 0


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("--cost 60", "--mtbf is missing"),
        ("--mtbf 3h", "--cost is missing"),
        ("--mtbf -3 --cost 60", "--mtbf"),
        ("--mtbf 0 --cost 60", "above 0"),
        ("--mtbf nan --cost 60", "finite"),
        ("--mtbf inf --cost 60", "finite"),
        ("--mtbf 3x --cost 60", "6h"),
        ("--mtbf 3h --cost -1", "--cost"),
        ("--mtbf 3h --cost 0", "E_FREE_SAVE"),
        ("--mtbf 3h --cost 5 --stall 5", "not both"),
        ("--mtbf 3h --cost 5 --write 60 --slowdown 0.5", "--stall"),
        ("--mtbf 3h --cost 5 --slowdown 5", "5 percent is 0.05"),
        ("--mtbf 3h --cost 5 --slowdown nan", "--slowdown"),
        ("--mtbf 3h --cost 5 --usable 0", "--usable"),
        ("--mtbf 3h --cost 5 --budget 2", "--budget"),
        ("--mtbf 3h --cost 5 --shape nan", "--shape"),
        ("--mtbf 3h --bandwidth 3GB/s", "--bytes"),
        ("--mtbf 3h --bytes 40 --bandwidth fast", "5GB/s"),
        ("--mtbf 3h --bytes many --bandwidth 3GB/s", "40GB"),
        ("--mtbf 3h --cost 5 --nodes 0", "--nodes"),
        ("--mtbf 3h --cost 5 --nodes 64,128", "--measured-nodes"),
        ("--mtbf 3h --preset meta-rsc1 --cost 5", "give one of them"),
        ("--preset nosuch --cost 5", "llama3-405b"),
        ("--preset meta-rsc1 --cost 5", "--nodes"),
        ("--failures -1 --hours 5 --cost 5", "--failures"),
        ("--failures 3 --cost 5", "--hours"),
        ("--failures 3 --hours nan --cost 5", "--hours"),
        ("--failures 0 --hours 72 --cost 5", "--nodes"),
        ("--mtbf 3h --cost 5 --min 10 --max 5", "--min"),
        ("--mtbf 3h --cost 5 --k 3", "remote tier"),
        ("--mtbf 3h --stall 1 --remote-write 60 --k 0", "--k"),
        ("--mtbf 3h --cost 5 --shares 1,2,3", "--shares"),
        ("--mtbf 3h --cost 5 --policy hourly", "E_POLICY"),
        ("--mtbf 3h --cost 5 --policy lazy", "--shape"),
        ("--mtbf 3h --cost 5 --policy trace", "--log"),
        ("--mtbf 3h --cost 5 --policy two-tier", "--remote-write"),
        ("--mtbf 3h --cost 5 --plot plot.gif", ".svg or .png"),
        ("--mtbf 3h --cost 5 --curve nosuch/curve.csv", "does not exist"),
        ("--mtbf 3h --stall 1 --remote-write 60 --usable 0.9", "one tier"),
        ("--mtbf 3h --stall 1 --remote-write 60 --policy lazy", "one tier"),
        ("--mtbf 3h --stall 1 --remote-write 60 --work 5h", "one tier"),
        ("--log nosuch.csv --cost 5", "cannot be read"),
        ("--run r --cost 5", "--storage"),
        ("--mtbf 3h --cost 5 --spot nosuch", "aws-spot"),
        ("--mtbf 3h --cost 5 --noticed-share 1", "--noticed-share"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_two(arguments, part):
    result = run(*arguments.split(), code=2)
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert part in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--mtbf 1h --cost 2h", "R_COST"),
        ("--mtbf 1h --cost 5 --restart 3h", "R_RESTART"),
        ("--mtbf 1d --stall 2 --write 60 --rpo 120", "R_RPO"),
        ("--mtbf 1d --stall 2 --write 5 --remote-write 600 --rpo-remote 1000", "R_RPO"),
    ],
)
def test_what_would_be_a_mistake_to_follow_is_refused_unless_forced(arguments, code):
    result = run(*arguments.split(), "--json", code=2)
    error = json.loads(result.stdout)
    assert (error["error"]["code"], error["exit_code"]) == (code, 2)
    assert "--force" in result.stderr
    assert code in codes(answer(*arguments.split(), "--force"))


@pytest.mark.parametrize(
    "arguments",
    ["--mtbf 6 --cost 1", "--mtbf 12h --cost 2000", "--mtbf 100000d --cost 5", "--mtbf 3h --cost 5 --step-time 700"],
)
def test_numbers_that_look_like_another_unit_are_doubted(arguments):
    assert "W_UNITS" in codes(answer(*arguments.split()))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("45s", 45),
        ("6h", 21600),
        ("3d", 259200),
        ("1h30m", 5400),
        ("250ms", 0.25),
        ("2w", 1209600),
        ("17", 17),
        ("1e3", 1000),
    ],
)
def test_durations_are_read(text, seconds):
    assert duration("--x", text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "h", "3x", "1h-30m", "--", "1,5h", "six hours"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ConfigError, match="45s"):
        duration("--x", text)


def test_sizes_and_rates_are_read():
    assert (size_bytes("--b", "16GiB"), size_bytes("--b", "40 GB"), size_bytes("--b", "7")) == (2**34, 4e10, 7)
    assert (rate_bytes_per_s("--r", "5GB/s"), rate_bytes_per_s("--r", "100Gbit/s")) == (5e9, 12.5e9)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.25 s"), (45, "45.0 s"), (1116.3, "18 min 36 s"), (11134.6, "3 h 6 min"), (300_000, "3 d 11 h")],
)
def test_durations_are_written_for_people(seconds, text):
    assert duration_text(seconds) == text


def test_the_command_needs_neither_ray_nor_torch_nor_even_numpy():
    code = (
        "import sys, typer\n"
        "from elastic.cli.tune import register\n"
        "app = typer.Typer(); register(app)\n"
        "sys.argv = ['tune', '--failures', '3', '--hours', '72', '--cost', '60', '--json']\n"
        "try:\n    app()\nfinally:\n"
        "    print(sorted({'ray', 'torch', 'numpy', 'scipy', 'matplotlib'} & set(sys.modules)))\n"
    )
    root = Path(__file__).parents[3]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"

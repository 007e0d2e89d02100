"""``elastic tune``: how often to save, from the failure rate and the cost of a save. Needs neither Ray nor torch."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from elastic.cli.output import command, print_json, say
from elastic.cli.tune_answer import SCHEMA, SCHEMA_VERSION, Answer, curve
from elastic.cli.tune_asked import Asked
from elastic.cli.tune_checks import replayed, validated
from elastic.errors import ConfigError, ElasticError
from policies.domain import PolicyError, refusals

__all__ = ["register", "tune"]

_RATE = "Failure rate (one of these)"
_COST = "Cost of a save"
_RESTART = "Restart"
_REMOTE = "Remote tier (gives the two-tier answer)"
_LIMITS = "Constraints"
_CHECK = "Check and show"


def _option(*names: str, help: str, panel: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def register(app: typer.Typer) -> None:
    """Add ``tune`` to the command line."""
    app.command("tune", help="How often to save, from the failure rate and the cost of a save.")(command(tune))


def tune(
    mtbf: Annotated[str | None, _option("--mtbf", help="Mean time between failures: 6h, 3d.", panel=_RATE)] = None,
    failures: Annotated[int | None, _option("--failures", help="Failures seen, in --hours.", panel=_RATE)] = None,
    hours: Annotated[float | None, _option("--hours", help="Hours in which they were seen.", panel=_RATE)] = None,
    nodes: Annotated[
        str | None, _option("--nodes", help="Nodes of the job; a list like 64,256,1024 asks what-if.", panel=_RATE)
    ] = None,
    measured_nodes: Annotated[
        int | None, _option("--measured-nodes", help="Nodes on which the failures were seen.", panel=_RATE)
    ] = None,
    log: Annotated[
        Path | None, _option("--log", help="Failure log: CSV with time[,node][,class][,note].", panel=_RATE)
    ] = None,
    preset_name: Annotated[
        str | None, _option("--preset", help="A published fleet: llama3-405b, meta-rsc1, ...", panel=_RATE)
    ] = None,
    run: Annotated[str | None, _option("--run", help="A run whose journal is read.", panel=_RATE)] = None,
    storage: Annotated[str | None, _option("--storage", help="Where it is stored: path or URL.", panel=_RATE)] = None,
    common_mtbf: Annotated[
        str | None,
        _option("--common-mtbf", help="MTBF of what all nodes share (fabric, storage), on top.", panel=_RATE),
    ] = None,
    prior: Annotated[
        bool, _option("--prior/--no-prior", help="Let a weak prior stand in for missing failures.", panel=_RATE)
    ] = True,
    cost: Annotated[
        str | None, _option("--cost", help="Visible cost: all training time that one save takes.", panel=_COST)
    ] = None,
    stall: Annotated[str | None, _option("--stall", help="Or only the standstill.", panel=_COST)] = None,
    write: Annotated[str | None, _option("--write", help="Background write after the stall.", panel=_COST)] = None,
    slowdown: Annotated[
        float, _option("--slowdown", help="Share of speed lost while it runs: 0.05.", panel=_COST)
    ] = 0.0,
    size: Annotated[str | None, _option("--bytes", help="Size of a snapshot: 40GB.", panel=_COST)] = None,
    bandwidth: Annotated[
        str | None, _option("--bandwidth", help="With --bytes: the write, or the stall if it blocks.", panel=_COST)
    ] = None,
    usable: Annotated[float, _option("--usable", help="Share of saves that can be read back.", panel=_COST)] = 1.0,
    restart: Annotated[
        str | None, _option("--restart", help="From a failure to the first new step.", panel=_RESTART)
    ] = None,
    restart_process: Annotated[
        str | None, _option("--restart-process", help="The same for a lost process.", panel=_RESTART)
    ] = None,
    restart_remote: Annotated[
        str | None, _option("--restart-remote", help="The same from the remote tier.", panel=_RESTART)
    ] = None,
    downtime: Annotated[
        str, _option("--downtime", help="Before it, out of reach of failures: detection, queue.", panel=_RESTART)
    ] = "0",
    remote_stall: Annotated[str | None, _option("--remote-stall", help="Stall of an upload.", panel=_REMOTE)] = None,
    remote_write: Annotated[str | None, _option("--remote-write", help="Time of an upload.", panel=_REMOTE)] = None,
    remote_slowdown: Annotated[
        float, _option("--remote-slowdown", help="Share of speed lost while it runs.", panel=_REMOTE)
    ] = 0.0,
    remote_bandwidth: Annotated[
        str | None, _option("--remote-bandwidth", help="With --bytes: the upload.", panel=_REMOTE)
    ] = None,
    shares: Annotated[
        str | None, _option("--shares", help="Failures of process, node, domain: 0.2,0.77,0.03.", panel=_REMOTE)
    ] = None,
    k: Annotated[int | None, _option("--k", help="Fix every how many saves go remote.", panel=_REMOTE)] = None,
    policy: Annotated[
        str,
        _option(
            "--policy",
            help="exact, two-tier, young, daly, continuous, lazy, trace, budget:0.05, fixed:600.",
            panel=_LIMITS,
        ),
    ] = "exact",
    shape: Annotated[float | None, _option("--shape", help="Weibull shape of the failures.", panel=_LIMITS)] = None,
    rpo: Annotated[str | None, _option("--rpo", help="Most work a failure may cost.", panel=_LIMITS)] = None,
    rpo_remote: Annotated[
        str | None, _option("--rpo-remote", help="The same for what the local tier does not survive.", panel=_LIMITS)
    ] = None,
    budget: Annotated[
        float | None, _option("--budget", help="Most time that saves may cost: 0.05.", panel=_LIMITS)
    ] = None,
    min_interval: Annotated[str | None, _option("--min", help="Least interval.", panel=_LIMITS)] = None,
    max_interval: Annotated[str | None, _option("--max", help="Greatest interval.", panel=_LIMITS)] = None,
    write_p95: Annotated[str | None, _option("--write-p95", help="p95 of the write.", panel=_LIMITS)] = None,
    remote_write_p95: Annotated[
        str | None, _option("--remote-write-p95", help="95th percentile of the upload.", panel=_LIMITS)
    ] = None,
    upload_limit: Annotated[
        str | None, _option("--upload-limit", help="Bandwidth that saves may use; needs --bytes.", panel=_LIMITS)
    ] = None,
    step_time: Annotated[
        str | None, _option("--step-time", help="A step without a save; gives the answer in steps.", panel=_LIMITS)
    ] = None,
    work: Annotated[str | None, _option("--work", help="Length of the whole job's work.", panel=_LIMITS)] = None,
    spot: Annotated[
        str | None, _option("--spot", help="Spot offer: aws-spot, gcp-spot, azure-spot.", panel=_LIMITS)
    ] = None,
    notice: Annotated[str | None, _option("--notice", help="Or the notice before a preemption.", panel=_LIMITS)] = None,
    noticed_share: Annotated[
        float, _option("--noticed-share", help="Share of the failures that announce themselves.", panel=_LIMITS)
    ] = 0.0,
    force: Annotated[bool, _option("--force", help="Answer even where it says refused.", panel=_LIMITS)] = False,
    as_json: Annotated[bool, _option("--json", help="One JSON object.", panel=_CHECK)] = False,
    explain: Annotated[bool, _option("--explain", help="The answer in words.", panel=_CHECK)] = False,
    plot: Annotated[Path | None, _option("--plot", help="Draw it: FILE.svg or FILE.png.", panel=_CHECK)] = None,
    curve_file: Annotated[
        Path | None, _option("--curve", help="Efficiency over interval as CSV.", panel=_CHECK)
    ] = None,
    validate: Annotated[
        bool, _option("--validate", help="Simulate the answer and report the z-score.", panel=_CHECK)
    ] = False,
    validate_failures: Annotated[
        int, _option("--validate-failures", help="Failures to simulate.", panel=_CHECK, min=1000)
    ] = 200_000,
    seed: Annotated[int, _option("--seed", help="Seed of the simulation.", panel=_CHECK)] = 0,
    replay: Annotated[
        Path | None, _option("--replay", help="Run the answer through this failure log.", panel=_CHECK)
    ] = None,
) -> None:
    """How often to save, from the failure rate and the cost of a save."""
    try:
        asked = Asked(**{name: value for name, value in locals().items() if name in Asked.__dataclass_fields__})
        if plot is not None:
            from elastic.cli.tune_plot import check_plot_path

            check_plot_path(plot)
        if curve_file is not None and not curve_file.absolute().parent.is_dir():
            raise ConfigError("--curve", str(curve_file), "its folder does not exist; create it first")
        found = asked.solve()
        if replay is not None:
            found = replayed(found, replay)
        if validate:
            found = validated(found, validate_failures, seed)
        refused = refusals(found.findings)
        if refused and not force:
            raise PolicyError(refused[0].code, f"refused: {refused[0].message}; --force answers all the same")
        if curve_file is not None:
            _write_curve(found, curve_file)
        if plot is not None:
            from elastic.cli.tune_plot import draw

            draw(found, plot)
    except (PolicyError, ElasticError) as problem:
        _fail(problem, as_json)
    if as_json:
        print_json(found.to_json())
        return
    from rich.console import Console

    from elastic.cli.tune_text import explain as in_words
    from elastic.cli.tune_text import print_answer

    if explain:
        typer.echo(in_words(found))
    else:
        print_answer(Console(width=None if sys.stdout.isatty() else 120, highlight=False), found)


def _write_curve(found: Answer, path: Path) -> None:
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["interval_s", "factor", "efficiency"])
            for interval, value in curve(found.problem, found.interval_s, found.k):
                rows.writerow([repr(interval), f"{interval / found.interval_s:.6g}", repr(value)])
    except OSError as problem:
        raise ConfigError("--curve", str(path), f"it cannot be written ({problem.strerror})") from None


def _fail(problem: PolicyError | ElasticError, as_json: bool) -> NoReturn:
    """Say what is wrong and how to cure it, and end with the exit code of a wrong call."""
    code = problem.code if isinstance(problem, PolicyError) else "E_CALL"
    exit_code = 2 if isinstance(problem, PolicyError) else problem.exit_code
    if as_json:
        error = {"type": type(problem).__name__, "code": code, "text": str(problem)}
        print_json({"schema": SCHEMA, "version": SCHEMA_VERSION, "error": error, "exit_code": exit_code})
    say(f"error: {problem}")
    raise typer.Exit(exit_code)

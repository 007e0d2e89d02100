"""The pictures of ``elastic tune``: goodput over the interval, and over the number of nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastic.cli.tune_answer import Answer, curve, ordinal
from elastic.cli.tune_text import scale_words
from elastic.cli.tune_units import duration_text
from elastic.errors import ConfigError

__all__ = ["check_plot_path", "draw"]

_MAIN, _REMOTE, _GREY, _BAND = "#1b6ca8", "#c8553d", "#6b6b6b", "#9ecae1"


def check_plot_path(path: Path) -> None:
    """Refuse early what cannot be drawn. Raises ``ConfigError``."""
    if path.suffix.lower() not in (".svg", ".png"):
        raise ConfigError("--plot", str(path), "give a file that ends in .svg or .png")
    if not path.absolute().parent.is_dir():
        raise ConfigError("--plot", str(path), f"its folder {path.absolute().parent} does not exist; create it first")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot", str(path), "matplotlib is missing; pip install 'ray-elastic[plot]'") from None


def draw(found: Answer, path: Path) -> None:
    """Draw the answer to ``path``: one panel over the interval and, for a what-if, a second over the nodes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    panels = 2 if found.scale else 1
    figure = Figure(figsize=(9, 5.6 * panels), layout="constrained")
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    _over_interval(axes[0], found)
    if found.scale:
        _over_nodes(axes[1], found)
    try:
        figure.savefig(path, dpi=130)
    except OSError as problem:
        raise ConfigError("--plot", str(path), f"it cannot be written ({problem.strerror})") from None


def _over_interval(axes: Any, found: Answer) -> None:
    problem = found.problem
    points = curve(problem, found.interval_s, found.k, points=161)
    intervals = [interval for interval, _ in points]
    values = [100 * value for _, value in points]
    best = 100 * found.efficiency
    two = problem.remote is not None
    axes.plot(
        intervals,
        values,
        color=_MAIN,
        linewidth=2.5,
        label=f"node memory, and every {ordinal(found.k)} save to remote storage" if two else "useful time",
    )
    if two:
        system = problem.system()
        remote = [100 * system.remote_only(interval) for interval in intervals]
        axes.plot(intervals, remote, color=_REMOTE, linewidth=2, linestyle="--", label="remote storage only")
    low, high = found.interval_low_s, found.interval_high_s
    if low is not None or high is not None:
        axes.axvspan(
            max(low or intervals[0], intervals[0]),
            min(high or intervals[-1], intervals[-1]),
            color=_BAND,
            alpha=0.35,
            linewidth=0,
            label="best interval, 95 % (from the uncertainty of the MTBF)",
        )
    axes.axvline(found.interval_s, color=_MAIN, linewidth=1, linestyle=":")
    axes.plot([found.interval_s], [best], "o", color=_MAIN, markersize=9, zorder=5)
    for rival, marker in zip(found.rivals, ("s", "D", "^"), strict=False):
        if rival.name in ("young", "daly", "exact") and intervals[0] <= rival.interval_s <= intervals[-1]:
            axes.plot(
                [rival.interval_s],
                [100 * rival.efficiency],
                marker,
                markerfacecolor="white",
                markeredgecolor=_GREY,
                markersize=9,
                markeredgewidth=1.6,
                linestyle="none",
                zorder=4,
                label=f"{rival.name.capitalize()}'s formula: {duration_text(rival.interval_s)}"
                if rival.name != "exact"
                else f"exact optimum: {duration_text(rival.interval_s)}",
            )
    axes.set_xscale("log")
    bottom = min(values[len(values) // 4], values[3 * len(values) // 4])
    floor = max(0.0, best - 2.2 * (best - bottom))
    if two:
        floor = max(0.0, min(floor, max(remote) - 0.4 * (best - max(remote))))
    axes.set_ylim(floor, min(100.0, best + 0.3 * (best - floor)))
    axes.set_xlim(intervals[0], intervals[-1])
    held = f" (held by {found.binding})" if found.binding else ""
    axes.annotate(
        f"save every {duration_text(found.interval_s)}{held}\n{best:.2f} % useful",
        (found.interval_s, best),
        xytext=(0, 14),
        textcoords="offset points",
        ha="center",
        fontweight="bold",
        color=_MAIN,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
    )
    axes.set_xticks(*_time_ticks(intervals[0], intervals[-1]))
    axes.minorticks_off()
    axes.set_xlabel("work between two saves (logarithmic)")
    axes.set_ylabel("time that is useful work, %")
    size = f" on {found.scale[0].nodes} nodes" if found.scale else ""
    axes.set_title(
        f"How often to save: a failure every {duration_text(found.rate.mtbf_s)}{size}, "
        f"{duration_text(problem.visible_s)} of training per save",
        loc="left",
        fontsize=12,
    )
    axes.text(0.01, 0.03, "too often:\nsaving costs more", transform=axes.transAxes, color=_GREY, fontsize=9)
    axes.text(
        0.99, 0.03, "too seldom:\nfailures cost more", transform=axes.transAxes, color=_GREY, fontsize=9, ha="right"
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=2, fontsize=9, frameon=False)
    _plain_look(axes)


def _over_nodes(axes: Any, found: Answer) -> None:
    points = found.scale
    nodes = [point.nodes for point in points]
    goodput = [100 * point.goodput for point in points]
    free = [100 * point.free for point in points]
    axes.plot(nodes, free, color=_GREY, linewidth=1.5, linestyle="--", marker=".", label="if saves cost nothing")
    axes.plot(
        nodes,
        [100 * point.half_cost for point in points],
        color=_REMOTE,
        marker=".",
        label="if saves cost half as much",
    )
    axes.plot(nodes, goodput, color=_MAIN, linewidth=2.5, marker="o", label="best achievable goodput")
    axes.fill_between(nodes, goodput, free, color=_BAND, alpha=0.35, linewidth=0, label="what faster saves can win")
    axes.fill_between(
        nodes, free, [100] * len(nodes), color="#e8e8e8", linewidth=0, label="lost to restarts, whatever a save costs"
    )
    for count, value in zip(nodes, goodput, strict=True):
        axes.annotate(
            f"{value:.1f}", (count, value), xytext=(-4, -17), textcoords="offset points", ha="center", fontsize=9
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, [str(count) for count in nodes])
    axes.margins(x=0.06)
    axes.set_ylim(max(0.0, min(goodput) - 0.35 * (100 - min(goodput))), 100)
    axes.set_xlabel("nodes")
    axes.set_ylabel("goodput, % of the time")
    axes.set_title(_wrapped(scale_words(found), 100), loc="left", fontsize=10)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=3, fontsize=9, frameon=False)
    _plain_look(axes)


def _time_ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    steps = [
        *(10.0**power * unit for power in range(-4, 0) for unit in (1, 3)),
        1, 3, 10, 30, 60, 180, 600, 1800, 3600, 3 * 3600, 12 * 3600, 86400, 3 * 86400, 10 * 86400, 30 * 86400,
    ]  # fmt: skip
    ticks = [step for step in steps if low <= step <= high]
    return ticks, [_short(tick) for tick in ticks]


def _short(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def _wrapped(text: str, width: int) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))


def _plain_look(axes: Any) -> None:
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)

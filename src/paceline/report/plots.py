"""Plots of quality against latency, deferral rate and rejection rate, one per temperature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.bench.schema import ORACLE, TARGET_ALONE, TARGET_BONUS
from paceline.decode.strategies import BigLittle, Speculative
from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from paceline.bench.measured_frontier import Frontier
    from paceline.bench.schema import ResultRow
    from paceline.core.bootstrap import Interval
    from paceline.report.run_folder import Section

_SIZE = (16.0, 9.0)
_DPI = 100
_AXIS_HEIGHT, _LINE_HEIGHT = 0.8, 0.26
_LINES = ("-", "--", ":", "-.")
_GREY = "0.45"
_LEGEND_COLUMNS = 6
_UNFILLED = "1234+x|_"

# One hue per kind of rule: lossless black, lossy orange, confidence blue and green, OPT red,
# token-specific purple, non-speculative brown. Every family has its own marker.
_STYLES = {
    "lossless": ("#000000", "P"),
    "lossy beta 1.0": ("#ff7f0e", "v"),
    "lossy beta tuned": ("#c49a00", "^"),
    "lenient linear": ("#ffb55a", "<"),
    "lenient square": ("#e8a0a0", ">"),
    "lenient exponential": ("#b8860b", "1"),
    "bild": ("#17becf", "X"),
    "chow": ("#1f77b4", "o"),
    "chow_log": ("#7fb3e6", "s"),
    "diff": ("#2ca02c", "D"),
    "diff_log": ("#8fd18f", "d"),
    "opt": ("#d62728", "p"),
    "opt_log": ("#ff6fa0", "h"),
    "token_v1": ("#6a3d9a", "8"),
    "token_v2": ("#b07fd8", "H"),
    "token_v3": ("#e000d0", "*"),
    "token_cascade": ("#8c564b", "2"),
    "sequence_cascade": ("#556b2f", "3"),
    "sequence_cascade normalised": ("#a0b050", "4"),
    "big_little": ("#a9745a", "+"),
}
_SPARE = (("#3b5b92", "x"), ("#00876c", "|"), ("#7a5195", "_"), ("#bc5090", "."))


class Panel(NamedTuple):
    """Horizontal axis of a panel, with the value of the target alone.

    The latency panel omits oracles, which run both models for every token.
    """

    label: str
    value: Callable[[Frontier, ResultRow], float]
    target_at: float | None
    with_oracle: bool = True


_PANELS = (
    Panel("relative latency (1 / speedup)", lambda f, row: 1 / f.speedup(row).value, 1.0, False),
    Panel("deferral rate (target passes / tokens)", lambda f, row: f.deferral_rate(row).value, 1.0),
    Panel("rejection rate (rejected / examined)", lambda f, row: f.rejection_rate(row).value, None),
)


class Curve(NamedTuple):
    """Cells that differ only in the threshold, sorted by it; `number` selects the line style."""

    name: str
    number: int
    cells: list[ResultRow]


def draw_plots(sections: Sequence[Section], folder: Path) -> None:
    """Write a PNG and an SVG for each temperature with quality scores."""
    mpl, figure_class = load_matplotlib()
    for section in sections:
        if (frontier := section.judged) is None:
            continue
        with mpl.rc_context({"svg.hashsalt": "paceline", "font.size": 11}):
            figure = figure_class(figsize=_SIZE, dpi=_DPI)
            _draw(figure, frontier, section.name)
            figure.savefig(folder / f"{section.slug}.png")
            figure.savefig(folder / f"{section.slug}.svg", metadata={"Date": None})


def load_matplotlib() -> tuple[Any, Any]:
    """Return matplotlib and its Figure class; raises UsageError if it is not installed."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "plots need matplotlib; install it with: pip install -e '.[report]'"
        ) from None
    return mpl, Figure


def curves(frontier: Frontier) -> list[Curve]:
    """Return one curve per family and gamma (or fallback), related families next to each other."""
    gammas = gammas_of(frontier)
    found: list[Curve] = []
    families = {name: rows for name, rows in frontier.families().items() if name != TARGET_ALONE}
    places = {name: place for place, name in enumerate(_STYLES)}
    ranks = {name: places.get(_rule(name), len(places)) for name in families}
    for name, cells in sorted(families.items(), key=lambda item: (ranks[item[0]], item[0])):
        lengths = sorted({_length(row) for row in cells})
        numbers = gammas if isinstance(cells[0].decoding.strategy, Speculative) else lengths
        for length in lengths:
            alike = [row for row in cells if _length(row) == length]
            found.append(Curve(name, numbers.index(length), sorted(alike, key=_threshold)))
    return found


def gammas_of(frontier: Frontier) -> list[float]:
    """Return the gammas of the cells with rules, sorted."""
    speculative = (row for row in frontier.rows if isinstance(row.decoding.strategy, Speculative))
    return sorted({_length(row) for row in speculative})


def _length(row: ResultRow) -> float:
    strategy = row.decoding.strategy
    if isinstance(strategy, Speculative):
        return strategy.num_speculative_tokens
    return strategy.fallback if isinstance(strategy, BigLittle) else 0


def _threshold(row: ResultRow) -> float:
    strategy = row.decoding.strategy
    chosen = getattr(strategy, "rule", strategy)
    given = (getattr(chosen, name, None) for name in ("alpha", "epsilon", "threshold", "rollback"))
    return next((value for value in given if value is not None), 0.0)


def style(name: str, spare: dict[str, int]) -> tuple[str, str]:
    """Return colour and marker, the same in every figure for the papers' families."""
    if (rule := _rule(name)) in _STYLES:
        return _STYLES[rule]
    if name.startswith(ORACLE):
        return _GREY, "o"
    return _SPARE[spare.setdefault(name, len(spare)) % len(_SPARE)]


def _rule(name: str) -> str:
    """The family of rules with either bonus, which have one style: a bench has one bonus."""
    return name.removesuffix(f" {TARGET_BONUS}")


def _draw(figure: Any, frontier: Frontier, name: str) -> None:
    all_axes = figure.subplots(1, len(_PANELS), sharey=True)
    drawn = curves(frontier)
    target = frontier.quality(frontier.target)
    handles: dict[str, Any] = {}
    for axes, panel in zip(reversed(all_axes), reversed(_PANELS), strict=True):
        spare: dict[str, int] = {}
        handles = _draw_target(axes, panel, target) | handles
        for curve in drawn:
            shape = style(curve.name, spare)
            if panel.with_oracle or not curve.name.startswith(ORACLE):
                line = _draw_curve(axes, panel, frontier, curve, shape)
                handles.setdefault(_label(curve.name), line)
        axes.set_xlabel(panel.label)
        axes.grid(alpha=0.25)
        axes.label_outer()
    handles |= _length_handles(all_axes[0], gammas_of(frontier))
    all_axes[0].set_ylabel(f"quality ({frontier.target.metric})")
    figure.suptitle(f"Quality against cost at {name}", fontsize=14)
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=_LEGEND_COLUMNS, frameon=False
    )
    num_lines = -(-len(handles) // _LEGEND_COLUMNS)
    bottom = (_AXIS_HEIGHT + _LINE_HEIGHT * num_lines) / _SIZE[1]
    figure.subplots_adjust(left=0.05, right=0.99, top=0.94, bottom=bottom, wspace=0.06)


def _label(name: str) -> str:
    return f"{name} (both models)" if name.startswith(ORACLE) else name


def _draw_target(axes: Any, panel: Panel, quality: Interval) -> dict[str, Any]:
    band = axes.axhspan(quality.low, quality.high, color="0.5", alpha=0.15, lw=0)
    line = axes.axhline(quality.value, color="black", ls="--", lw=1)
    handles = {"quality of the target alone": line, "its 95% interval": band}
    if panel.target_at is not None:
        star = axes.plot(
            panel.target_at, quality.value, "*", color="gold", mec="black", ms=18, zorder=5
        )
        handles["the target alone"] = star[0]
    return handles


def _draw_curve(
    axes: Any, panel: Panel, frontier: Frontier, curve: Curve, shape: tuple[str, str]
) -> Any:
    colour, marker = shape
    is_oracle = curve.name.startswith(ORACLE)
    (line,) = axes.plot(
        [panel.value(frontier, row) for row in curve.cells],
        [frontier.quality(row).value for row in curve.cells],
        ls="--" if is_oracle else _LINES[curve.number % len(_LINES)],
        marker=marker,
        color=colour,
        ms=10 if marker == "*" else 7,
        mew=1.6 if marker in _UNFILLED else 0.6,
        mec=colour if marker in _UNFILLED else "white",
        lw=1.3,
        alpha=0.9,
    )
    return line


def _length_handles(axes: Any, gammas: Sequence[float]) -> dict[str, Any]:
    """Legend entries of the line styles if there are several gammas."""
    if len(gammas) < 2:
        return {}
    return {
        f"gamma {gamma:g}": axes.plot([], [], color="0.3", ls=_LINES[number % len(_LINES)])[0]
        for number, gamma in enumerate(gammas)
    }

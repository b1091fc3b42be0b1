"""Result rows, rows of studies and a page of claims, made by hand: without models."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.bench.answers import keep, sums_of_answer
from paceline.bench.settings import setting_of
from paceline.bench.workbench import cell_key
from paceline.config import validate
from paceline.core.rules import AnyRule
from paceline.core.sampling import SamplingParams
from paceline.core.stats import DecodeStats, TimedAnswer, Times
from paceline.decode.strategies import AnyStrategy, Autoregressive, DecodingConfig, Speculative
from paceline.results.row import Row, Source, sums_of
from paceline.studies.claim_file import ClaimFile
from paceline.studies.study_file import StudyConfig
from paceline.studies.verdicts import judge
from paceline.view.page import Page
from paceline.view.study_background import Background, StageConfig
from paceline.view.study_page import study_page

ALONE = Autoregressive()
Sums = dict[str, float]


def example(
    score: float | None = 1.0,
    seconds: float = 1.0,
    num_tokens: int = 11,
    *,
    baseline_s: float | None = 1.0,
    baseline_tokens: int = 11,
    first_s: float = 0.0,
    baseline_first_s: float = 0.0,
    calls: int = 10,
    examined: int = 0,
    rejected: int = 0,
    first_tokens: int = 1,
    prefill_tokens: int = 1,
) -> Sums:
    """An answer of 11 tokens in a second, as the target alone gives it; no baseline_s: untimed."""
    stats = DecodeStats(
        num_blocks=calls,
        num_drafted=examined,
        num_accepted=examined - rejected,
        num_recovered=rejected,
        num_bonus=num_tokens - prefill_tokens - examined,
        num_prefill_tokens=prefill_tokens,
    )
    times = Times(seconds, first_s, num_tokens, first_tokens)
    sums = sums_of_answer(TimedAnswer([0] * num_tokens, times, stats), score)
    if baseline_s is None:
        return sums
    return sums | Times(baseline_s, baseline_first_s, baseline_tokens, 1).sums("target_")


def row(
    strategy: AnyStrategy | AnyRule,
    examples: Sequence[Sums] = (),
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    gamma: int = 4,
    metric: str | None = "accuracy",
    error: str = "",
    context: str = "c0ffee",
) -> Row:
    """A cell; a rule stands for speculative decoding with it."""
    if hasattr(strategy, "accept_probs"):
        strategy = Speculative(rule=strategy, num_speculative_tokens=gamma)  # pyright: ignore
    sampling = SamplingParams(temperature=temperature, top_p=top_p)
    decoding = DecodingConfig(strategy=strategy, sampling=sampling)  # pyright: ignore
    marks = {"context": context, "key": cell_key(context, decoding)}
    return Row(
        population="examples",
        units=() if error else tuple(range(len(examples))),
        setting=setting_of(decoding) | ({"metric": metric} if metric else {}),
        sums={} if error else sums_of(examples),
        error=error,
        source=Source(command="paceline bench", fingerprints=marks),
    )


def with_sums(cell: Row, **columns: Sequence[float]) -> Row:
    """The cell with these sums in place of its own, for simulations of many benches."""
    sums = {name: tuple(values) for name, values in columns.items()}
    return cell.model_copy(update={"sums": cell.sums | sums})


def steady(
    strategy: AnyStrategy | AnyRule,
    quality: float | None = 1.0,
    speedup: float = 1.0,
    count: int = 20,
    **settings: Any,
) -> Row:
    """A cell that does the same on every example, so that every resample is the data again."""
    return row(strategy, [example(quality, 1 / speedup)] * count, **settings)


def write_rows(folder: Path, rows: Sequence[Row]) -> Path:
    """A run folder that holds these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    keep(folder, rows)
    return folder


def gamma_row(gamma: int, tau: float = 2.0, count: int = 32, **totals: float) -> Row:
    """Blocks that draft gamma tokens of texts of 64 tokens and cost two target passes."""
    known = {"drafted_per_block": gamma, "break_even_acceptance": 0.5, "block_cost": 2.0}
    return Row(
        population="texts",
        units=tuple(range(count)),
        setting={"gamma": gamma},
        sums={"emitted": (64.0,) * count, "calls": (64 / tau,) * count},
        totals=known | totals,
        source=Source(command="measure"),
    )


SOURCE = Source(
    stage="tau",
    command="paceline trajectory --config tau.yaml",
    commit=None,
    modified=False,
    machine="a machine",
    versions={},
    fingerprints={},
)


def study_row(
    sums: dict[str, Sequence[float | None]],
    units: Sequence[int] | None = None,
    *,
    population: str = "prompts",
    study: str = "tiny",
    source: Source = SOURCE,
    **setting: Any,
) -> Row:
    """A row; without `units` they are counted from 0."""
    count = len(next(iter(sums.values())))
    return Row(
        study=study,
        covers=("Table 1",),
        population=population,
        units=tuple(range(count) if units is None else units),
        setting=setting,
        sums={name: tuple(values) for name, values in sums.items()},
        source=source,
    )


def claim(test: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A claim of the study `tiny` with this test."""
    values = {
        "id": "one",
        "paper": "DistillSpec",
        "item": "Table C.1",
        "says": "more",
        "size": {"text": "direction only"},
        "fixed": "2026-11-25",
        "here": "more here",
        "study": "tiny",
    }
    return values | {"test": test} | changes


_UNITS = 12
_STUDY = "pretraining"
_TASKS = ("code", "documentation")
_TEMPERATURES = (0.0, 1.0)
_PAGE_SOURCE = Source(
    stage="tau",
    command="paceline trajectory --config tau.yaml",
    commit="0123456789abcdef",
    modified=True,
    machine="a processor (avx2, 2 cores)",
    versions={"python": "3.11", "torch": "2"},
    fingerprints={"target_fingerprint": "t1"},
    date="2026-11-25",
    sizes={"target": 5_700_000, "draft": 1_155_000},
)
_CONFIG = {"target": "models/target", "draft": "models/draft"}


def claims_page() -> Page:
    """The page of two papers' claims, with the study file and the configuration of one stage."""
    rows = [*_drafts(), *_bounds()]
    file = validate(ClaimFile, {"claims": [*_gains(), *_claims_of_bounds()]})
    background = Background(
        {_STUDY: _study()}, {_PAGE_SOURCE.command: StageConfig(_CONFIG, "As it ran.")}
    )
    return study_page("Claims, tested", rows, judge(file, rows), background)


def _drafts() -> list[Row]:
    """tau at two values of gamma. `mine` has no term; only forward KL is worse on documentation."""
    taus = {("start", "", ""): 1.5, ("end", "tvd_plus_plus", "code"): 2.0}
    taus |= {("end", "forward_kl", "code"): 1.9, ("end", "mine", "documentation"): 1.7}
    rows: list[Row] = []
    for task in _TASKS:
        for temperature in _TEMPERATURES:
            for (label, draft, text), tau in taus.items():
                is_worse = draft == "forward_kl" and task == "documentation"
                names = {"draft": draft, "trained_on": text} if draft else {}
                setting = names | {"task": task, "temperature": temperature, "label": label}
                rows += _draft(tau - 0.6 * is_worse, setting)
    return rows


def _draft(tau: float, setting: dict[str, Any]) -> Iterator[Row]:
    """A row per gamma."""
    population = f"prompts of {setting['task']}"
    where: dict[str, Any] = {"study": _STUDY, "population": population, "source": _PAGE_SOURCE}
    for gamma, gain in ((3, 0.0), (5, 0.1)):
        sums = {"tokens": [20.0] * _UNITS, "acceptance": [8 + 2 * tau] * _UNITS}
        values = (tau + gain + 0.02 * (unit % 3) for unit in range(_UNITS))
        sums |= {"emitted": [20.0] * _UNITS, "calls": [20 / value for value in values]}
        yield study_row(sums, **where, gamma=gamma, **setting)


def _gains() -> list[dict[str, Any]]:
    names = {f"T={value:g}": {"as": f"t{value:g}", "t": value} for value in _TEMPERATURES}
    return [
        claim(
            {
                "kind": "paired",
                "rows": {"task": "$task", "temperature": "$t", "gamma": 5},
                "figure": "block_efficiency",
                "first": {"where": {"draft": draft}},
                "second": {"where": {"label": "start"}},
                "matters": 0.02,
            },
            id=f"{draft}-$task-$temperature".replace("_", "-"),
            paper="Direct Alignment",
            item="Figure 1",
            says=f"Distillation with {name} raises tau.",
            here=f"{name} has a larger tau than the base draft on $task; T=$t.",
            study=_STUDY,
            over={"task": list(_TASKS), "temperature": names},
        )
        for draft, name in (("tvd_plus_plus", "TVD++"), ("forward_kl", "KLD"))
    ]


def _bounds() -> list[Row]:
    """Acceptance 0.6 above a bound that is far below 0."""
    spread = [0.01 * (unit % 3) for unit in range(_UNITS)]
    sums = {"acceptance": [0.6] * _UNITS, "proven": [part - 3 for part in spread]}
    source = _PAGE_SOURCE.model_copy(update={"command": "paceline bounds --config bounds.yaml"})
    return [study_row(sums, study=_STUDY, source=source, max_new_tokens=16)]


def _claims_of_bounds() -> list[dict[str, Any]]:
    test = {"kind": "pointwise", "rows": {"max_new_tokens": 16}, "empty": 0.0}
    test |= {"first": {"over": "acceptance"}, "second": {"over": "proven"}}
    return [claim(test, id="true", says="The bound is true.", study=_STUDY)]


def _study() -> StudyConfig:
    stage = {
        "command": "trajectory",
        "set": {"target": "$target", "draft": "$draft", "output": "$output/tau"},
        "inputs": ["$target/model.safetensors", "$draft/model.safetensors"],
        "outputs": ["$output/tau/rows.jsonl"],
        "minutes": {"cpu": 4, "gpu": 1},
        "disk_mb": 1,
    }
    values = {"title": "Drafts by their objective", "output": f"runs/studies/{_STUDY}"}
    return validate(StudyConfig, values | {"variables": _CONFIG, "stages": {"tau": stage}})

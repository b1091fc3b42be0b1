"""A page of claims made by hand: drafts of three objectives on two tasks, and a bound."""

from typing import Any

from paceline.config import validate
from paceline.results.row import Source
from paceline.studies.claim_file import ClaimFile
from paceline.studies.rows import StudyRow
from paceline.studies.study_file import StudyConfig
from paceline.studies.verdicts import judge
from paceline.view.page import Page
from paceline.view.study_background import Background, StageConfig
from paceline.view.study_page import study_page
from study_rows import claim, study_row

UNITS = 12
STUDY = "pretraining"
TASKS = ("code", "documentation")
TEMPERATURES = (0.0, 1.0)
SOURCE = Source(
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
CONFIG = {"target": "models/target", "draft": "models/draft"}


def claims_page() -> Page:
    """The page of two papers' claims, with the study file and the configuration of one stage."""
    rows = [*_drafts(), *_bounds()]
    file = validate(ClaimFile, {"claims": [*_gains(), *_claims_of_bounds()]})
    background = Background({STUDY: _study()}, {SOURCE.command: StageConfig(CONFIG, "As it ran.")})
    return study_page("Claims, tested", rows, judge(file, rows, {STUDY: 1}), background)


def _drafts() -> list[StudyRow]:
    """tau at two values of gamma. `mine` has no term; only forward KL is worse on documentation."""
    taus = {("start", "", ""): 1.5, ("end", "tvd_plus_plus", "code"): 2.0}
    taus |= {("end", "forward_kl", "code"): 1.9, ("end", "mine", "documentation"): 1.7}
    rows: list[StudyRow] = []
    for task in TASKS:
        for temperature in TEMPERATURES:
            for (label, draft, text), tau in taus.items():
                is_worse = draft == "forward_kl" and task == "documentation"
                names = {"draft": draft, "trained_on": text} if draft else {}
                setting = names | {"task": task, "temperature": temperature, "label": label}
                for gamma, gain in ((3, 0.0), (5, 0.1)):
                    exact = tau - 0.6 * is_worse
                    rows.append(_draft(exact + gain, exact, setting | {"gamma": gamma}))
    return rows


def _draft(tau: float, acceptance: float, setting: dict[str, Any]) -> StudyRow:
    sums = {"tokens": [20.0] * UNITS, "acceptance": [8 + 2 * acceptance] * UNITS}
    sums["emitted"] = [20.0] * UNITS
    sums["calls"] = [20 / (tau + 0.02 * (unit % 3)) for unit in range(UNITS)]
    population = f"prompts of {setting['task']}"
    return study_row(sums, study=STUDY, population=population, source=SOURCE, **setting)


def _gains() -> list[dict[str, Any]]:
    names = {f"T={value:g}": {"as": f"t{value:g}", "t": value} for value in TEMPERATURES}
    return [
        claim(
            {
                "kind": "paired",
                "rows": {"task": "$task", "temperature": "$t", "gamma": 5},
                "over": "emitted",
                "under": "calls",
                "first": {"where": {"draft": draft}},
                "second": {"where": {"label": "start"}},
                "matters": 0.02,
            },
            id=f"{draft}-$task-$temperature".replace("_", "-"),
            paper="Direct Alignment",
            item="Figure 1",
            says=f"Distillation with {name} raises tau.",
            here=f"{name} has a larger tau than the base draft on $task; T=$t.",
            study=STUDY,
            over={"task": list(TASKS), "temperature": names},
        )
        for draft, name in (("tvd_plus_plus", "TVD++"), ("forward_kl", "KLD"))
    ]


def _bounds() -> list[StudyRow]:
    """Acceptance 0.6 above a bound that is far below 0."""
    spread = [0.01 * (unit % 3) for unit in range(UNITS)]
    sums = {"acceptance": [0.6] * UNITS, "proven": [part - 3 for part in spread]}
    source = SOURCE.model_copy(update={"command": "paceline bounds --config bounds.yaml"})
    return [study_row(sums, study=STUDY, source=source, max_new_tokens=16)]


def _claims_of_bounds() -> list[dict[str, Any]]:
    test = {"kind": "pointwise", "rows": {"max_new_tokens": 16}, "empty": 0.0}
    test |= {"first": {"over": "acceptance"}, "second": {"over": "proven"}}
    return [claim(test, id="true", says="The bound is true.", study=STUDY)]


def _study() -> StudyConfig:
    stage = {
        "command": "trajectory",
        "set": {"target": "$target", "draft": "$draft", "output": "$output/tau"},
        "inputs": ["$target/model.safetensors", "$draft/model.safetensors"],
        "outputs": ["$output/tau/rows.jsonl"],
        "minutes": {"cpu": 4, "gpu": 1},
        "disk_mb": 1,
    }
    values = {"title": "Drafts by their objective", "output": f"runs/studies/{STUDY}"}
    return validate(StudyConfig, values | {"variables": CONFIG, "stages": {"tau": stage}})

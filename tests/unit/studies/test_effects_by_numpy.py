"""Effects of the claims by numpy alone, on a small sample of rows of the studies.

Neither the code of the evidence nor the claims file is used: each claim's sides are written out
here, and its effect must be what `judge` finds on the same rows. `tools/sample_rows.py` writes the
sample, the first examples of rows; its effects are not those of the studies.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.results.row import read_rows
from paceline.studies.claim_file import read_claims
from paceline.studies.published import as_markdown, read_verdicts
from paceline.studies.verdicts import VACUOUS, Finding, judge

ROOT = Path(__file__).parents[3]
SAMPLE = Path(__file__).with_name("rows.jsonl.gz")
WHITE_BOX = ["supervised_kd", "imit_kd", "f_distill", "gkd"]
SEEDS = range(5)


@cache
def rows(study: str) -> list[dict[str, Any]]:
    lines = gzip.decompress(SAMPLE.read_bytes()).splitlines()
    return [row for row in map(json.loads, lines) if row["study"] == study]


@cache
def findings() -> dict[str, Finding]:
    found = judge(read_claims(ROOT / "docs/claims.yaml"), read_rows(SAMPLE))
    return {one.claim.id: one for one in found}


def effect(claim: str) -> float:
    """The effect that decides the claim."""
    found = findings()[claim].effect
    assert found is not None, findings()[claim].reason
    assert found.low <= found.value <= found.high
    return found.value


def test_the_published_verdicts_are_on_the_claims_of_today():
    published = ROOT / "docs/studies/verdicts.json"
    verdicts = read_verdicts(published, read_claims(ROOT / "docs/claims.yaml"))
    assert not [one.claim.id for one in verdicts if "since it was judged" in one.reason]
    assert published.with_suffix(".md").read_text(encoding="utf-8") == as_markdown(verdicts)


def sums(study: str, names: list[str], **setting: Any) -> np.ndarray:
    """Named sums of each example in the rows with this setting, [examples, names]."""
    found: dict[int, list[float]] = {}
    for row in rows(study):
        if all(row["setting"].get(key) == value for key, value in setting.items()):
            for place, unit in enumerate(row["units"]):
                values = [row["sums"][name][place] for name in names]
                if None not in values:
                    assert unit not in found, "two rows of one example"
                    found[unit] = values
    return np.array([found[unit] for unit in sorted(found)])


def ratio(study: str, over: str, under: str, **setting: Any) -> float:
    top, bottom = sums(study, [over, under], **setting).sum(0)
    return top / bottom


def tau(study: str, gamma: int, **setting: Any) -> float:
    return ratio(study, "emitted", "calls", gamma=gamma, **setting)


def gain(
    study: str, gamma: int, first: list[dict[str, Any]], second: list[dict[str, Any]]
) -> float:
    """Geometric mean of tau of the first settings over that of the second, less 1."""
    logs = [np.mean([np.log(tau(study, gamma, **one)) for one in side]) for side in (first, second)]
    return float(np.expm1(logs[0] - logs[1]))


def own(task: str, t: float, drafts: list[str], **more: Any) -> list[dict[str, Any]]:
    common = {"task": task, "temperature": t, "label": "end", "trained_on": task} | more
    return [common | {"draft": draft, "seed": seed} for draft in drafts for seed in SEEDS]


def start(task: str, t: float, **more: Any) -> list[dict[str, Any]]:
    return [{"task": task, "temperature": t, "label": "start"} | more]


def documentation(t: float, drafts: list[str], **more: Any) -> list[dict[str, Any]]:
    common = {
        "temperature": t,
        "label": "end",
        "task": "documentation",
        "part": "pretrained",
    } | more
    return [
        common | {"trained_on": "documentation", "draft": draft, "seed": seed}
        for draft in drafts
        for seed in range(3)
    ]


RECIPES, TRANSFER, ALIGNED = "distillspec_recipes", "distillspec_transfer", "direct_alignment"
QUALITY = "distillspec_quality"
LARGER = {"part": "larger target"}
GAINS = {
    **{
        f"ds-{task}-{name}": (RECIPES, 5, own(task, t, WHITE_BOX), start(task, t))
        for task in ("translation", "summaries")
        for name, t in (("greedy", 0.0), ("t1", 1.0))
    },
    **{
        f"ds-{name}-{task}": (RECIPES, 7, own(task, 1.0, [first]), own(task, 1.0, [second]))
        for task in ("translation", "summaries")
        for name, first, second in (
            ("on-policy", "gkd", "imit_kd"),
            ("f-distill", "f_distill", "imit_kd"),
            ("white-box", "supervised_kd", "seq_kd"),
            ("gkd-f-distill", "gkd", "f_distill"),
        )
    },
    "ds-transfer-to-summaries": (
        RECIPES,
        5,
        own("summaries", 1.0, ["gkd"], trained_on="translation"),
        start("summaries", 1.0),
    ),
    "ds-larger-target": (
        TRANSFER,
        5,
        own("summaries", 1.0, ["gkd"], **LARGER),
        start("summaries", 1.0, **LARGER),
    ),
    "da-tau-sampled": (
        ALIGNED,
        3,
        documentation(0.6, ["kld", "tvd"]),
        start("documentation", 0.6, part="pretrained"),
    ),
    "da-tau-greedy": (
        ALIGNED,
        3,
        documentation(0.0, ["kld", "tvd"]),
        start("documentation", 0.0, part="pretrained"),
    ),
    "da-tvdpp-kld": (
        ALIGNED,
        3,
        documentation(0.6, ["tvd_plus_plus"]),
        documentation(0.6, ["kld"]),
    ),
    "da-tvdpp-tvd": (
        ALIGNED,
        3,
        documentation(0.6, ["tvd_plus_plus"]),
        documentation(0.6, ["tvd"]),
    ),
}


@pytest.mark.parametrize("claim", GAINS)
def test_effects_on_tau_are_those_of_the_rows(claim: str):
    assert effect(claim) == pytest.approx(gain(*GAINS[claim]), rel=1e-6)


def test_runs_of_a_recipe_differ_by_what_the_claims_say():
    """The variance between seeds of the eight recipes of these texts, less that of the examples."""
    variances: list[float] = []
    errors: list[float] = []
    for draft in ("forward_kl", "reverse_kl", "jsd", "tvd"):
        for text in ("fixed", "draft"):
            own = {"draft": draft, "trained_on": text, "label": "end", "gamma": 7}
            scores_SN = np.stack([sums(QUALITY, ["score"], seed=s, **own)[:, 0] for s in SEEDS])
            variances.append(float(scores_SN.mean(1).var(ddof=1)))
            own_SN = scores_SN - scores_SN.mean(0)
            errors.append(float(own_SN.var(1).sum() / (len(SEEDS) - 1) / own_SN.shape[1]))
    deviation = np.sqrt(max(0.0, np.mean(variances) - np.mean(errors)))
    spread = "between runs not above the error of examples"
    if deviation:
        spread = f"standard deviation between runs {deviation:.2g}"
    note = findings()["ds-quality-draft-fixed"].note
    assert note == f"5 seeds; {spread}, 32 degrees of freedom"


@pytest.mark.parametrize("text", ["target", "fixed"])
def test_differences_of_quality_are_means_over_divergences_and_seeds(text: str):
    def mean(text: str) -> float:
        where = {"label": "end", "gamma": 7, "trained_on": text}
        return float(
            np.mean(
                [
                    sums(QUALITY, ["score"], draft=draft, seed=seed, **where)
                    for draft in ("forward_kl", "reverse_kl", "jsd", "tvd")
                    for seed in SEEDS
                ]
            )
        )

    expected = mean("draft") - mean(text)
    assert effect(f"ds-quality-draft-{text}") == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "study", "task", "lowest", "highest"),
    [
        ("summaries", "cascades_t5", "summarization", None, 0.95),
        ("translation", "cascades_t5", "translation", 0.7, 0.95),
        ("sums", "cascades_sums", "arithmetic", 0.1, 0.6),
    ],
)
def test_cascades_save_calls_near_the_targets_quality_and_lose_them_with_few_deferrals(
    name: str, study: str, task: str, lowest: float | None, highest: float
):
    def calls(family: str, **threshold: float) -> float:
        setting = {"part": "rules", "task": task, "temperature": 1.0} | threshold
        return ratio(study, "calls", "emitted", family=family, **setting)

    far = calls("token_cascade", alpha=highest) / calls("chow", alpha=highest) - 1
    assert effect(f"fc-sequential-{name}") == pytest.approx(far, abs=1e-6)
    if lowest is not None:  # its threshold; there is no claim of this kind on summaries
        near = calls("lossless") / calls("token_cascade", alpha=lowest) - 1
        assert effect(f"fc-cascade-calls-{name}") == pytest.approx(near, abs=1e-6)


def test_speeds_of_the_garden_are_ratios_of_rates_in_one_process():
    def speed(over: str, under: str, **setting: Any) -> float:
        return ratio("distillspec_garden", over, under, family="lossless", **setting)

    with_draft, alone = (
        speed(f"{prefix}tokens", f"{prefix}seconds", model="distilled medium")
        for prefix in ("", "target_")
    )
    assert effect("ds-garden-both") == pytest.approx(with_draft / alone - 1, abs=1e-6)
    latency = speed("reference_seconds", "seconds", model="distilled medium")
    assert effect("ds-garden-speed") == pytest.approx(latency - 1, abs=1e-6)


@pytest.mark.parametrize("length", [2, 16])
def test_theorem_4_1_is_checked_at_every_prompt(length: int):
    names = ["acceptance", "printed", "tight"]
    found = sums("bounds", names, max_new_tokens=length, theorem="4.1")
    assert (found[:, :1] >= found[:, 1:]).all()
    for place, name in enumerate(("printed", "tight"), 1):
        check = findings()[f"ds-theorem-{name}-{length}"]
        assert (check.num_units, check.second) == (
            len(found), pytest.approx(found[:, place].mean())
        )  # fmt: skip
        assert check.verdict == ("no violation" if found[:, place].mean() > 0 else VACUOUS)


@pytest.mark.parametrize("task", ["translation", "summaries"])
def test_acceptance_ranks_drafts_as_tau_does(task: str):
    recipes = [*WHITE_BOX, "seq_kd", *(["gkd_paper"] if task == "summaries" else [])]
    drafts = own(task, 1.0, recipes)
    taus = [tau(RECIPES, 5, **one) for one in drafts]
    rates = [ratio(RECIPES, "acceptance", "tokens", gamma=5, **one) for one in drafts]
    ranks = [np.argsort(np.argsort(values)) for values in (taus, rates)]
    expected = np.corrcoef(*ranks)[0, 1] - 0.8
    assert effect(f"ds-iid-ranking-{task}") == pytest.approx(expected, abs=1e-6)

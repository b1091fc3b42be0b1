"""The studies and the claims of this repository fit together."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from paceline.studies.claim_file import read_claims
from paceline.studies.plan import plan
from paceline.studies.study_file import SCALES, Scale, find_studies, read_study

ROOT = Path(__file__).parents[2]
STUDIES = find_studies(ROOT / "configs/studies")


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # studies name configurations from there


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", STUDIES)
def test_every_stage_of_a_study_fits_the_schema_of_its_command(name: str, scale: Scale):
    study = read_study(STUDIES[name])
    stages = plan(study, scale)
    assert [stage.name for stage in stages] == list(study.stages)


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_says_what_it_covers_and_what_it_costs(name: str):
    text = STUDIES[name].read_text(encoding="utf-8")
    assert text.startswith("# "), "begin with hardware and time"
    assert any(stage.covers for stage in read_study(STUDIES[name]).stages.values())


@pytest.mark.parametrize("name", STUDIES)
def test_a_stage_is_run_again_if_a_file_that_another_stage_writes_changes(name: str):
    """A path in a configuration that lies in the output of another stage is among the inputs."""
    stages = plan(read_study(STUDIES[name]))
    for stage in stages:
        for other in stages:
            if other is not stage and str(other.folder) in str(stage.config):
                assert set(other.outputs) & set(stage.inputs), (stage.name, other.name)


def test_each_claim_is_about_a_study_that_exists():
    assert {claim.study for claim in read_claims().claims} <= set(STUDIES)


def test_claims_that_were_fixed_after_the_studies_ran_say_what_was_known():
    """The studies ran on 2026-11-25."""
    late = [claim for claim in read_claims().claims if claim.fixed > "2026-11-25"]
    assert [claim.id for claim in late if not claim.known] == []
    changed = [claim for claim in read_claims().claims if claim.earlier is not None]
    assert [claim.id for claim in changed if not claim.known] == []


def test_claims_have_the_papers_sentences_over_tasks_and_temperatures():
    claims = read_claims().claims
    assert len({claim.sentence or claim.id for claim in claims}) >= 42
    assert len(claims) >= 60


README = ROOT / "docs/studies/README.md"
VERDICTS = json.loads((ROOT / "docs/studies/verdicts.json").read_text(encoding="utf-8"))
_NUMBER = r"[+-]\d+(?:\.\d+)?%?"
_INTERVAL = re.compile(rf"(?:({_NUMBER})(?:,| \())?\s?({_NUMBER}) to ({_NUMBER})")


def rounded(value: float, like: str) -> str:
    """The value as written with a sign, and with the digits and the unit of another."""
    number, is_share = like.removesuffix("%"), like.endswith("%")
    digits = len(number.partition(".")[2])
    return f"{value * (100 if is_share else 1):+.{digits}f}" + "%" * is_share


def unpublished(text: str) -> list[str]:
    """The intervals of a text that no published verdict has, with the value before them if any."""
    effects = [one["effect"] for one in VERDICTS if "effect" in one]
    return [
        found[0]
        for found in _INTERVAL.finditer(" ".join(text.split()))
        if not any(
            all(
                like is None or rounded(bound, like) == like
                for bound, like in zip(effect, found.groups(), strict=True)
            )
            for effect in effects
        )
    ]


def test_each_interval_of_the_page_of_results_is_that_of_a_verdict():
    """A mutant has one other digit; a few of them are by chance what another verdict has."""
    text = README.read_text(encoding="utf-8")
    assert unpublished(text) == []
    noticed: list[bool] = []
    for interval in (found[0] for found in _INTERVAL.finditer(" ".join(text.split()))):
        for digit in re.finditer(r"\d(?=\D|$)", interval):
            other = str((int(digit[0]) + 1) % 10)
            mutant = interval[: digit.start()] + other + interval[digit.end() :]
            noticed.append(unpublished(mutant) == [mutant])
    assert len(noticed) > 50
    assert sum(noticed) >= 0.95 * len(noticed)


def test_the_pages_count_the_verdicts_that_are_published():
    checks = {claim.id for claim in read_claims().claims if claim.is_check}
    count = Counter(one["verdict"] for one in VERDICTS if one["id"] not in checks)
    holds = count["holds"] + count["holds, but small"]
    numbers = (holds, count["does not hold"], count["too small to matter"], count["undecided"])
    wanted = r"{} hold\D* {} do not\D* {} a gain that matters is excluded\D* {} are undecided"
    for page in (README, ROOT / "README.md"):
        text = " ".join(page.read_text(encoding="utf-8").split())
        assert f"{sum(count.values())} claims" in text
        assert re.search(wanted.format(*numbers), text), (page.name, numbers)
        assert not count["no rows yet"] or f"{count['no rows yet']} await" in text

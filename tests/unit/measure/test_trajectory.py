import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.core.speed import mbsu, tokens_and_blocks
from paceline.data.tokens import last_turn
from paceline.decode import AutoregressiveDecoder
from paceline.errors import ConfigError, UsageError
from paceline.measure.acceptance import PairTexts, score_texts
from paceline.measure.trajectory import (
    TrajectoryConfig,
    checkpoints_of,
    gain_of,
    kept_logits,
    trajectory,
)
from paceline.models import HfModel, load_model, prepare_for_decoding, wrap_model
from paceline.results.figures import as_values
from paceline.results.row import Row
from paceline.tasks import build_task
from paceline.train import align
from support.configs import small
from support.data import write_lines
from support.models import tiny_hf, tiny_pair
from support.runs import align_config


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    saved = {"every_steps": 4, "keep": 9}
    align(align_config(folder, folder / "first", num_steps=8, checkpoints=saved))
    # a second stage begins with what the first one ended with
    second = align_config(folder, folder / "second", num_steps=4, checkpoints=saved)
    align(second.model_copy(update={"draft": str(folder / "first" / "draft")}))
    return folder


def config(folder: Path, output: Path, **changes: Any) -> TrajectoryConfig:
    given = {"runs": [str(folder / "first"), str(folder / "second")], "gammas": [1, 3]}
    given["samplings"] = [{"temperature": 0}, {"temperature": 0.6, "top_p": 0.9}]
    return small("trajectory", folder, output, **given | changes)


SMALL: dict[str, Any] = {"samplings": [{"temperature": 0}], "gammas": [1]}


class Measured(NamedTuple):
    config: TrajectoryConfig
    rows: list[Row]

    def continued(self, output: Path, **changes: Any) -> TrajectoryConfig:
        """In a copy of what is there."""
        shutil.copytree(self.config.output, output)
        return self.config.model_copy(update={"output": output, **changes})


@pytest.fixture(scope="module")
def begun(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """The first run alone."""
    output = tmp_path_factory.mktemp("begun") / "out"
    made = config(folder, output, runs=[str(folder / "first")])
    return Measured(made, trajectory(made))


def test_every_draft_of_the_pipeline_is_there_once_and_in_order(folder: Path):
    first = [stop.label for stop in checkpoints_of(folder / "first")]
    assert first == ["start", "step 4", "end"]
    (begun, *_, ended) = checkpoints_of(folder / "second")
    assert begun.path == folder / "first" / "draft"
    assert ended.path == folder / "second" / "draft"
    assert (ended.step, ended.label) == (4, "end")


def test_figures_are_those_of_the_texts_that_are_kept(folder: Path, tmp_path: Path):
    rows = trajectory(config(folder, tmp_path / "out"))
    # two gammas, two samplings; the second run begins with the draft that ends the first
    assert len(rows) == 2 * 2 * (3 + 2)
    row = next(r for r in rows if r.has(label="end", temperature=0.6, top_p=0.9, gamma=3))
    assert row.setting.keys() == {
        *("task", "draft", "label", "step", "parameter_ratio", "temperature", "top_p", "gamma")
    }
    (kept,) = (path for path in (tmp_path / "out" / "texts").iterdir() if "t0.6" in path.name)
    texts = json.loads(kept.read_text())
    models = folder / "target", Path(row.source.run) / "draft"
    target, draft = (load_model(path) for path in models)
    sampling = SamplingParams(temperature=0.6, top_p=0.9)
    scores = score_texts(PairTexts(target, draft, texts["prompts"], texts["completions"], sampling))
    tokens, blocks = tokens_and_blocks(*scores.drafted, 3)
    tau = float(tokens.sum() / blocks.sum())
    ratio = draft.num_parameters / target.num_parameters
    figures = as_values(row)
    interval = figures["block_efficiency"]
    assert interval.value == pytest.approx(tau, rel=1e-5)
    assert interval.low <= tau <= interval.high
    assert figures["mbsu"].value == pytest.approx(mbsu(tau, 3, ratio), rel=1e-5)
    acceptance = float(scores.acceptance_BT.sum() / scores.mask_BT.sum())
    assert figures["expected_acceptance"].value == pytest.approx(acceptance, rel=1e-5)
    begun = {"draft": "start of first", "label": "start", "temperature": 0.6, "gamma": 3}
    before = next(r for r in rows if r.has(**begun))
    gain = gain_of(row, rows)
    assert gain is not None
    assert gain.value == pytest.approx(tau / as_values(before)["block_efficiency"].value, rel=1e-5)
    assert gain.low <= gain.value <= gain.high
    trained_since = [other for other in rows if not other.has(label="start")]
    assert gain_of(row, trained_since) is None


TASK = {"a": {"task": "text", "corpus": "corpus.jsonl"}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": "nowhere"}, "nowhere"),
        ({"tasks": {"a": "nowhere.jsonl"}}, "nowhere"),
        ({"runs": ["."]}, "is not a training run"),
        ({"scored_tasks": TASK}, "the task a has no metric; move it to tasks"),
        ({"scored_tasks": {"text": TASK["a"]}}, "tasks and scored_tasks both have text; rename"),
        ({"tasks": {}}, "name tasks or scored_tasks"),
    ],
    ids=range(6),
)
def test_a_mistake_is_one_line_and_leaves_the_directory_free(
    changes: dict[str, Any],
    said: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match=said):
        trajectory(config(folder, tmp_path / "out", **changes))
    if "target" in changes:
        assert trajectory(config(folder, tmp_path / "out", **SMALL))


def test_an_output_of_other_settings_or_another_version_is_refused(begun: Measured, tmp_path: Path):
    with pytest.raises(UsageError, match="holds a run with another num_prompts"):
        trajectory(begun.config.model_copy(update={"num_prompts": 2}))
    made = begun.continued(tmp_path / "out")
    kept = tmp_path / "out" / "rows.jsonl"
    kept.write_text(kept.read_text("utf-8").replace('"schema_version": ', '"schema_version": 9'))
    with pytest.raises(UsageError, match=r"rows.jsonl row 1 has schema_version 91"):
        trajectory(made)


def test_texts_of_another_target_at_the_same_place_are_not_mixed_in(folder: Path, tmp_path: Path):
    shutil.copytree(folder / "target", tmp_path / "target")
    second = [str(folder / "second")]
    target = str(tmp_path / "target")
    made = config(folder, tmp_path / "out", target=target, runs=second, **SMALL)
    rows = trajectory(made)
    assert trajectory(made) == rows
    other = load_model(tmp_path / "target").hf
    with torch.no_grad():
        next(other.parameters()).add_(1)
    other.save_pretrained(tmp_path / "target")
    with pytest.raises(UsageError, match="with another target fingerprint: files have changed"):
        trajectory(made)


def test_other_prompts_at_the_same_place_are_not_mixed_in(folder: Path, tmp_path: Path):
    prompts = Path(shutil.copy(folder / "corpus.jsonl", tmp_path / "prompts.jsonl"))
    given = {"tasks": {"own": str(prompts)}, "runs": [str(folder / "first")], **SMALL}
    made = config(folder, tmp_path / "out", **given)
    trajectory(made)
    with prompts.open("a") as stream:
        stream.write('{"text": "one more"}\n')
    with pytest.raises(ConfigError, match=r"with another tasks\.own: files have changed"):
        trajectory(made)


def test_a_task_may_have_longer_prompts_than_the_others(folder: Path, tmp_path: Path):
    corpus = str(folder / "corpus.jsonl")
    tasks = {"short": corpus, "long": {"path": corpus, "max_prompt_tokens": 9}}
    changes = {"tasks": tasks, "max_prompt_tokens": 3, "runs": [str(folder / "second")]}
    trajectory(config(folder, tmp_path / "out", **changes, **SMALL))
    for task, longest in (("short", 3), ("long", 9)):
        (texts, *_) = (tmp_path / "out" / "texts").glob(f"{task} *.json")
        assert max(map(len, json.loads(texts.read_text())["prompts"])) == longest


def test_the_cross_entropy_is_that_of_both_models_own_distributions(folder: Path, begun: Measured):
    row = next(r for r in begun.rows if r.has(label="end", temperature=0, gamma=1))
    texts = json.loads((begun.config.output / "texts" / "text t0.json").read_text())
    models = [load_model(path).hf for path in (folder / "target", folder / "first" / "draft")]
    for number, (prompt, text) in enumerate(zip(*texts.values(), strict=True)):
        with torch.no_grad():
            logits = [model(torch.tensor([prompt + text])).logits[0].double() for model in models]
        p_TV, q_TV = (one[len(prompt) - 1 : -1].softmax(-1).numpy() for one in logits)
        nats = -(p_TV * np.log(q_TV)).sum()
        assert row.sums["cross_entropy"][number] == pytest.approx(nats, rel=1e-4)


def test_rows_that_are_there_are_not_measured_again_and_runs_of_one_draft_share_its_rows(
    folder: Path, tmp_path: Path, begun: Measured
):
    align(align_config(folder, folder / "other", num_steps=1))
    alone, runs = begun.rows, (folder / "first", folder / "other")
    both = trajectory(begun.continued(tmp_path / "out", runs=runs))
    written = (begun.config.output / "rows.jsonl").read_text()
    assert (tmp_path / "out" / "rows.jsonl").read_text().startswith(written)
    assert both[: len(alone)] == alone
    assert [row.setting["label"] for row in both[len(alone) :]] == ["end"] * 4
    assert {row.setting["draft"] for row in both[len(alone) :]} == {"other"}
    assert all("draft" not in row.setting for row in both if row.has(label="start"))
    assert all(gain_of(row, both) for row in both if row.has(label="end"))


def test_samplings_that_differ_have_texts_of_their_own(folder: Path, tmp_path: Path):
    shaped = [{"temperature": 0.6}, {"temperature": 0.6, "repetition_penalty": 1.5}]
    changes = {"samplings": shaped, "gammas": [1], "runs": [str(folder / "second")]}
    trajectory(config(folder, tmp_path / "out", **changes))
    assert len(list((tmp_path / "out" / "texts").iterdir())) == 2


def test_own_answers_of_drafts_are_scored_on_the_examples_of_a_task(folder: Path, tmp_path: Path):
    rows = [{"prompt": f"number {n}", "completion": f"{n} and {n + 1}"} for n in range(9)]
    corpus = write_lines(tmp_path / "questions.jsonl", *rows)
    task = {"task": "pairs", "corpus": str(corpus), "metric": "rouge1"}
    made = config(
        folder,
        tmp_path / "out",
        runs=[str(folder / "first")],
        scored_tasks={"questions": task},
        samplings=[{"temperature": 1.0}],
    )
    found = trajectory(made)
    scored = [row for row in found if row.has(task="questions")]
    assert len(scored) == len(found) / 2 == 3 * 2
    assert all("score" not in row.sums for row in found if row not in scored)
    places = {stop.fingerprint: stop.path for stop in checkpoints_of(folder / "first")}
    # by another road: one example after the other, in the order of the task
    built = build_task(task)
    examples = built.examples("test", 4)
    for row in scored[::2]:
        draft = load_model(places[row.source.fingerprints["draft"]])
        assert draft.tokenizer is not None
        decoder = AutoregressiveDecoder(prepare_for_decoding(draft), SamplingParams())
        decoder.forces_eos = False
        scores: list[float] = []
        for number, example in enumerate(examples):
            prompt, *_ = last_turn(example.record, draft.tokenizer)
            (answer,) = decoder.generate([prompt], 10, seed=[number])
            text = draft.tokenizer.decode(answer.tokens, skip_special_tokens=True)
            scores.append(built.score(example, str(text)))
        assert row.sums["score"] == pytest.approx(scores, abs=1e-6)
        assert as_values(row)["quality"].value == pytest.approx(sum(scores) / 4, abs=1e-6)
    assert trajectory(made) == found
    corpus.write_text(corpus.read_text("utf-8").replace("and", "or"), "utf-8")
    with pytest.raises(ConfigError, match="another task questions"):
        trajectory(made)


PROMPTS = [[5], [7, 8, 9, 4], [11, 12], [6, 6, 5], [9, 10, 11, 12, 13]]
TEXTS = [[3, 4, 5], [8, 9, 10, 11, 12, 13], [4], [20, 21, 22, 23], [3, 9]]
SAMPLING = SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "cohere", "t5_v1_1", "bart"])
def test_scores_of_every_draft_are_those_of_a_pass_of_its_own(architecture: str):
    target, draft = tiny_pair(architecture)
    kept = kept_logits(target)
    for other in (draft, target):
        texts = PairTexts(target, other, PROMPTS, TEXTS, SAMPLING)
        both = score_texts(texts), score_texts(texts, target_logits=kept)
        for wanted, got in zip(*both, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_the_target_processes_each_text_once(monkeypatch: pytest.MonkeyPatch):
    target, draft = tiny_pair()
    kept = kept_logits(target)  # compares the head with that of transformers
    passes: list[int] = []
    hidden = type(target).hidden

    def counted(self: HfModel, batch: object) -> torch.Tensor:
        passes.extend([1] * (self is target))
        return hidden(self, batch)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(type(target), "hidden", counted)
    monkeypatch.setattr("paceline.measure.acceptance._MOST_LOGITS", 0)  # four texts in a batch
    monkeypatch.setattr("paceline.measure.acceptance._MOST_LOGITS_CUDA", 0)
    for _ in range(2):
        score_texts(PairTexts(target, draft, PROMPTS, TEXTS, SAMPLING), target_logits=kept)
        assert len(passes) == 2


@pytest.mark.parametrize("architecture", ["llama", "t5_v1_1"])
def test_scores_do_not_depend_on_the_size_of_a_batch(
    architecture: str, monkeypatch: pytest.MonkeyPatch
):
    texts = PairTexts(*tiny_pair(architecture), PROMPTS, TEXTS, SAMPLING)
    assert texts.batch_size == 64, "tiny models"
    found = score_texts(texts)
    monkeypatch.setattr("paceline.measure.acceptance._MOST_TEXTS", 1)
    for together, alone in zip(found, score_texts(texts), strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keeps", [False, True])
def test_tokens_that_models_may_not_write_leave_the_cross_entropy_as_it_is(keeps: bool):
    """By transformers, without the columns of these tokens."""
    hfs = tiny_hf(seed=0), tiny_hf(seed=1, num_hidden_layers=2)
    for hf in hfs:
        hf.generation_config.suppress_tokens = [30, 41]  # pyright: ignore
    target, draft = map(wrap_model, hfs)
    texts = PairTexts(target, draft, PROMPTS, TEXTS, SamplingParams())
    kept = kept_logits(target) if keeps else None
    found = score_texts(texts, target_logits=kept, with_cross_entropy=True)
    assert found.cross_entropy_BT is not None
    allowed = [token for token in range(61) if token not in (30, 41)]
    for row, (prompt, text) in enumerate(zip(PROMPTS, TEXTS, strict=True)):
        whole = torch.tensor([[*prompt, *text]])
        with torch.no_grad():
            p_TV, q_TV = (hf(whole).logits[0, len(prompt) - 1 : -1, allowed] for hf in hfs)
        wanted_T = torch.nn.functional.cross_entropy(q_TV, p_TV.softmax(-1), reduction="none")
        got_T = found.cross_entropy_BT[row]
        torch.testing.assert_close(got_T[: len(text)], wanted_T, rtol=1e-4, atol=1e-5)
        assert not got_T[len(text) :].any()

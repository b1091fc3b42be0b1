import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.core.speed import tokens_and_blocks
from paceline.data.collate import TokenRow
from paceline.data.prompts import Record
from paceline.errors import ConfigError
from paceline.models import CausalModel
from paceline.models.loading import load_tokenizer
from paceline.progress import silent
from paceline.records import read_jsonl
from paceline.train import align
from paceline.train.align import records_of
from paceline.train.config import Evaluation
from paceline.train.evaluation import AgreementEvaluator, held_out_text
from support.data import write_lines
from support.models import tiny_pair
from support.runs import align_config, losses

Pair = tuple[CausalModel, CausalModel]
ROWS = [
    TokenRow([5, 6, 7, 8, 9, 10, 11], 2),
    TokenRow([40, 41, 42, 43], 1),
    *[TokenRow([9, 8, 7, 6, number, 4], 3) for number in range(8)],
]


def probabilities(model: CausalModel, row: TokenRow, temperature: float) -> list[list[float]]:
    """Before each token of the text: through the whole transformers model, alone, in float64."""
    with torch.no_grad():
        logits = model.hf(torch.tensor([list(row.tokens)])).logits[0].double()
    before = logits[row.trained_from - 1 : -1]
    return (before / temperature).softmax(-1).tolist()


def evaluator(
    target: CausalModel,
    rows: list[TokenRow] = ROWS,
    gamma: int = 2,
    temperature: float = 1.0,
    **settings: Any,
) -> AgreementEvaluator:
    sampling = SamplingParams(temperature=temperature)
    return AgreementEvaluator(target, rows, sampling, gamma=gamma, vocab_size=266, **settings)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_acceptance_and_agreement_are_ratios_of_sums_over_all_positions(
    pair: Pair, temperature: float
):
    target, draft = pair
    overlaps, same = [], []
    for row in ROWS:
        both = (probabilities(model, row, temperature) for model in pair)
        for p, q in zip(*both, strict=True):
            overlaps.append(sum(map(min, p, q)))
            same.append(p.index(max(p)) == q.index(max(q)))
    figures = evaluator(target, temperature=temperature).evaluate(draft)
    assert figures["num_tokens"] == len(overlaps)
    assert figures["expected_acceptance"] == pytest.approx(sum(overlaps) / len(overlaps), abs=1e-5)
    assert figures["greedy_agreement"] == pytest.approx(sum(same) / len(same))


def test_the_interval_of_a_share_does_not_exceed_1(pair: Pair):
    """Two texts, all tokens and none: Student's interval of the mean would reach far beyond."""
    target, draft = pair
    judge = evaluator(target, ROWS[:2])
    figures = judge.evaluate(draft)
    for name in ("expected_acceptance", "greedy_agreement"):
        assert 0 <= figures[f"{name}_low"] <= figures[f"{name}_high"] <= 1
    shares = torch.zeros(2, 5, dtype=torch.float64)
    for row_T, length, share in zip(shares, (5, 3), (0.9, 0.2), strict=True):
        row_T[:length] = share
    assert judge._interval(shares).high == 1  # pyright: ignore[reportPrivateUsage]


def test_block_efficiency_is_that_of_acceptance_and_survival_laid_out_by_hand(pair: Pair):
    target, draft = pair
    acceptance, survival, mask = torch.zeros(3, len(ROWS), 5, dtype=torch.float64)
    for index, row in enumerate(ROWS):
        both = zip(*(probabilities(model, row, 1.0) for model in pair), strict=True)
        text = row.tokens[row.trained_from :]
        for position, ((p, q), token) in enumerate(zip(both, text, strict=True)):
            acceptance[index, position] = sum(map(min, p, q))
            survival[index, position] = min(1.0, q[token] / p[token])
            mask[index, position] = 1
    # the first token comes with the prompt, from the target alone
    tokens, blocks = tokens_and_blocks(acceptance[:, 1:], survival[:, 1:], mask[:, 1:], 2)
    expected = float(tokens.sum() / blocks.sum())
    found = evaluator(target).evaluate(draft)
    assert found["block_efficiency"] == pytest.approx(expected, abs=1e-5)


def test_a_draft_that_is_its_target_is_always_accepted(pair: Pair):
    target = pair[0]
    figures = evaluator(target).evaluate(target)
    assert figures["expected_acceptance"] == 1
    assert figures["greedy_agreement"] == 1.0
    # Behind the first token: one text of 4 tokens, cut there, 3 and 1;
    # nine of 2 that ended, in 1 block
    assert figures["block_efficiency"] == pytest.approx((4 + 9 * 2) / (2 + 9), abs=1e-5)


def test_a_text_shorter_than_what_was_asked_for_ended_by_itself(pair: Pair):
    target = pair[0]
    for asked, gamma, blocks in ((5, 2, 2), (9, 2, 2), (None, 2, 2), (9, 4, 1)):
        judge = evaluator(target, ROWS[:1], gamma, max_new_tokens=asked)
        assert judge.evaluate(target)["block_efficiency"] == pytest.approx(4 / blocks, abs=1e-5)


def test_texts_of_one_token_have_no_block_efficiency(pair: Pair):
    rows = [TokenRow([5, 6, 7], 2), TokenRow([8, 9], 1)]
    assert "block_efficiency" not in evaluator(pair[0], rows).evaluate(pair[1])


def test_chunks_do_not_show(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    target, draft = pair
    whole = evaluator(target).evaluate(draft)
    monkeypatch.setattr("paceline.train.evaluation._CHUNK", 7)
    monkeypatch.setattr("paceline.train.evaluation._ROWS", 3)
    parts = evaluator(target).evaluate(draft)
    assert parts == pytest.approx(whole, abs=1e-6)


def test_held_out_text_is_written_once_by_the_target_and_read_ever_after(tmp_path: Path):
    target, draft = tiny_pair()
    settings = Evaluation(max_new_tokens=6, sampling=SamplingParams(temperature=0))
    prompts = [[5, 6, 7], [9, 9]]
    cache = tmp_path / "held_out.jsonl"
    rows = held_out_text(target, prompts, settings, cache, seed=0, progress=silent)
    for row, prompt in zip(rows, prompts, strict=True):
        theirs = target.hf.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=6)
        assert list(row.tokens) == theirs[0].tolist()
        assert row.trained_from == len(prompt)
    # whoever asks again gets the same text, the draft included
    assert held_out_text(draft, prompts, settings, cache, seed=9, progress=silent) == rows


def test_held_out_texts_are_in_the_order_of_their_prompts_whatever_their_lengths(tmp_path: Path):
    target, _ = tiny_pair()
    settings = Evaluation(num_prompts=20, max_new_tokens=5)
    prompts = [[7 + row] * (1 + row * 5 % 23) for row in range(20)]
    together, alone = (tmp_path / name for name in ("together.jsonl", "alone.jsonl"))
    rows = held_out_text(target, prompts, settings, together, seed=3, progress=silent)
    assert [list(row.tokens[: row.trained_from]) for row in rows] == prompts
    first = held_out_text(target, prompts[:1], settings, alone, seed=3, progress=silent)
    assert rows[:1] == first


TEXTS = [f"the {word} sat there" for word in ("cat", "hen", "man", "hat", "pan", "tin")]


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    write_lines(folder / "corpus.jsonl", *[{"text": text} for text in [*TEXTS, *TEXTS]])
    return folder


def changes(folder: Path, count: int, train: str = "corpus.jsonl", **more: Any) -> dict[str, Any]:
    data = {"train": str(folder / train), "held_out_from_train": count}
    small = {"max_prompt_tokens": 4, "max_new_tokens": 6, "gamma": 2}
    return {"data": data, "evaluation": small} | more


def test_what_is_held_out_is_not_trained_on_duplicates_included(folder: Path, tmp_path: Path):
    splits = set()
    for seed in range(8):
        config = align_config(folder, tmp_path / "run", **changes(folder, 2, seed=seed))
        train, held_out = records_of(config)
        assert held_out is not None
        trained, judged = [record.text for record in train], [record.text for record in held_out]
        assert len(set(judged)) == 2
        assert sorted(trained) == sorted(2 * list(set(TEXTS) - set(judged)))
        assert records_of(config) == (train, held_out), "a run that is resumed holds out the same"
        splits.add(frozenset(judged))
    assert len(splits) > 1


@pytest.mark.parametrize("kind", ["prompt", "chat", "tokens"])
def test_no_other_answer_to_a_prompt_that_is_held_out_is_trained_on(
    folder: Path, tmp_path: Path, kind: str
):
    """The form of generate-data with `num_per_prompt`, and of preference data."""
    rows: list[dict[str, Any]] = []
    for index, text in enumerate(TEXTS[:4]):
        for answer in range(3):
            asked = {"role": "user", "content": text}
            given = {"role": "assistant", "content": f"{answer}"}
            exact = {"prompt_tokens": [index, 7], "completion_tokens": [answer, 1]}
            forms = {
                "prompt": {"prompt": text, "completion": f"{answer}"},
                "chat": {"messages": [asked, given]},
                "tokens": exact | {"stop_reason": "eos"},
            }
            rows.append(forms[kind] | {"id": f"{text}/{answer}"})
    write_lines(folder / f"{kind}s.jsonl", *rows)

    def prompt_of(record: Record) -> str:
        return str(record.id).partition("/")[0]

    for seed in range(4):
        made = changes(folder, 2, f"{kind}s.jsonl", seed=seed)
        train, held_out = records_of(align_config(folder, tmp_path / "run", **made))
        trained, judged = map(prompt_of, train), [prompt_of(record) for record in held_out or ()]
        assert len(judged) == len(set(judged)) == 2
        assert sorted(trained) == sorted(3 * list(set(TEXTS[:4]) - set(judged)))


def test_a_run_without_held_out_prompts_is_judged_by_its_own_text(folder: Path, tmp_path: Path):
    config = align_config(folder, tmp_path / "run", **changes(folder, 2))
    run = align(config)
    _, held_out = records_of(config)
    tokenizer = load_tokenizer(folder / "target")
    wanted = [tokenizer(record.text)["input_ids"][:4] for record in held_out or ()]
    assert [row["prompt"] for row in read_jsonl(run / "held_out.jsonl")] == wanted
    result = json.loads((run / "result.json").read_text())
    for when in ("before", "after"):
        for name in ("expected_acceptance", "greedy_agreement"):
            figures = result[when]
            assert figures[f"{name}_low"] <= figures[name] <= figures[f"{name}_high"]
    assert len(losses(run)) == 10


def test_only_prompts_that_are_evaluated_are_tokenised(folder: Path, tmp_path: Path):
    """A warning, which is an error here, would count those that are too long."""
    rows = [{"prompt": text} for text in ("a", "the", *TEXTS)]
    path = write_lines(tmp_path / "prompts.jsonl", *rows)
    data = {"train": str(folder / "corpus.jsonl"), "held_out": str(path)}
    small = {"num_prompts": 2, "max_prompt_tokens": 4, "max_new_tokens": 6, "gamma": 2}
    run = align(align_config(folder, tmp_path / "run", data=data, evaluation=small, num_steps=1))
    tokenizer = load_tokenizer(folder / "target")
    wanted = [tokenizer(row["prompt"])["input_ids"] for row in rows[:2]]
    assert [row["prompt"] for row in read_jsonl(run / "held_out.jsonl")] == wanted


def test_holding_out_everything_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"is 6, but .* has 6 different prompts; set it to fewer"):
        align(align_config(folder, tmp_path / "run", **changes(folder, 6)))
    both = {"data": changes(folder, 2)["data"] | {"held_out": str(folder / "corpus.jsonl")}}
    with pytest.raises(
        ConfigError, match="got both held_out and held_out_from_train; set one of them to null"
    ):
        align_config(folder, tmp_path / "run", **both)

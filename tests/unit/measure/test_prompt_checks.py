"""A Python program gets the errors of the command line, before weights are read."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from paceline.bench import BenchConfig, bench
from paceline.bench.tune import TuneConfig, tune
from paceline.config import validate
from paceline.data.distillation_data import generate_data
from paceline.data.input_checks import InputChecks
from paceline.data.requests import GenerateDataConfig
from paceline.errors import InputNote, PromptError, UsageError
from paceline.measure import MeasureConfig, VerifyConfig, measure, verify_losslessness
from paceline.measure.analysis import AnalyzeConfig, analyze
from paceline.measure.perplexity import PerplexityConfig, perplexity
from paceline.train import AlignConfig, PretrainConfig, align, pretrain
from support.checkpoints import edit

pytestmark = pytest.mark.usefixtures("no_weights")

VERBS: dict[Callable[..., Any], type[Any]] = {
    measure: MeasureConfig,
    analyze: AnalyzeConfig,
    verify_losslessness: VerifyConfig,
    perplexity: PerplexityConfig,
    generate_data: GenerateDataConfig,
    bench: BenchConfig,
    tune: TuneConfig,
    align: AlignConfig,
    pretrain: PretrainConfig,
}


def config_of(verb: Callable[..., Any], folder: Path, output: Path, text: Path) -> Any:
    """A configuration of the verb that reads this text."""
    pair = {"target": str(folder / "target"), "draft": str(folder / "draft")}
    run = {"output": output, "num_steps": 1, "batch_size": 2, "data": {"train": str(text)}}
    task = {"task": {"task": "text", "corpus": str(text)}, "output": output}
    prompts = {"prompts": str(text), "max_prompt_tokens": 8, "max_new_tokens": 8}
    values: dict[str, Any] = {
        "perplexity": {"model": pair["target"], "text": str(text)},
        "generate_data": {"target": pair["target"], "output": output} | prompts,
        "bench": pair | task,
        "tune": pair | task | {"max_latency": 0.9},
        "align": pair | run,
        "pretrain": run | {"model": pair["target"]},
    }
    return validate(VERBS[verb], values.get(verb.__name__, pair | prompts))


def test_prompts_after_those_that_are_measured_are_not_read(folder: Path, tmp_path: Path):
    text = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": prompt}) for prompt in ("a b", "c d e", "f")]
    text.write_text("\n".join([*lines, "not json"]))
    config = config_of(measure, folder, tmp_path / "out", text)
    config = config.model_copy(update={"num_prompts": 3})
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    pair: Any = SimpleNamespace(tokenizer=tokenizer, target=SimpleNamespace(decoder_prompt=None))
    expected = [tokenizer(prompt)["input_ids"] for prompt in ("a b", "c d e", "f")]
    assert config.read_prompts(pair) == expected


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_a_text_that_is_missing_is_one_line(folder: Path, tmp_path: Path, verb: Callable[..., Any]):
    config = config_of(verb, folder, tmp_path / "out", tmp_path / "missing.jsonl")
    with pytest.raises(PromptError, match=r"missing\.jsonl") as caught:
        verb(config)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", [measure, align, bench], ids=lambda verb: verb.__name__)
def test_a_draft_that_is_missing_is_one_line(
    folder: Path, tmp_path: Path, verb: Callable[..., Any]
):
    config = config_of(verb, folder, tmp_path / "out", folder / "corpus.jsonl")
    with pytest.raises(UsageError, match=r"^no/where"):
        verb(config.model_copy(update={"draft": "no/where"}))


SERVED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 1.0, "min_p": None}


@pytest.mark.parametrize("verb", [measure, analyze], ids=lambda verb: verb.__name__)
def test_sampling_that_engines_take_from_the_model_is_noted_unless_it_is_chosen(
    folder: Path, tmp_path: Path, verb: Callable[..., Any]
):
    target = shutil.copytree(folder / "target", tmp_path / "target")
    config = config_of(verb, folder, tmp_path, folder / "corpus.jsonl")
    values = config.model_dump(exclude_unset=True) | {"target": str(target)}
    edit(target / "generation_config.json", **SERVED)
    noted = "sets temperature=0.6, top_k=20, which .* as --temperature 0.6 --top-k 20$"
    with pytest.warns(InputNote, match=noted):
        validate(VERBS[verb], values).check(InputChecks())
    for changes, sampling in ({"do_sample": False}, {}), ({"do_sample": True}, {"temperature": 1}):
        edit(target / "generation_config.json", **changes)
        chosen = {"sampling": sampling} if sampling else {}
        with warnings.catch_warnings(record=True) as caught:
            validate(VERBS[verb], values | chosen).check(InputChecks())
        assert not [each for each in caught if "generation config" in str(each.message)]

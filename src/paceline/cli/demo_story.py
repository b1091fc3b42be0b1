"""The stages of `paceline demo`. Each writes a file; a stage with an existing file is skipped."""

from __future__ import annotations

import contextlib
import functools
import json
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import ValidationError
from rich.table import Table

from paceline.cli.console import echo, progress_bars, stdout
from paceline.cli.result_tables import losslessness_lines, measurement_table, verdict_style
from paceline.cli.streaming import stream_text
from paceline.config import StrictModel, read_yaml, validate
from paceline.core.sampling import SamplingParams
from paceline.data import read_prompts
from paceline.data.prompts import Record
from paceline.data.python_docs import PythonDocs, write_python_docs
from paceline.data.tokens import encode, read_texts
from paceline.decode import SpeculativeDecoder
from paceline.measure import (
    LosslessnessReport,
    MeasureConfig,
    Measurement,
    VerifyConfig,
)
from paceline.measure.losslessness import verify_losslessness, verify_models
from paceline.measure.measurement import measure_models
from paceline.models import load_model, prepare_for_decoding
from paceline.models.answer_text import answer_text
from paceline.models.drafts.layers import subset_layers
from paceline.models.drafts.restricted_head import limit_vocabulary
from paceline.models.drafts.save import save_draft
from paceline.models.loading import load_tokenizer, stored_dtype
from paceline.models.prepare import can_read_int8
from paceline.records import atomic_write_text
from paceline.train import AlignConfig, align

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from paceline.decode import Generation
    from paceline.models import HfModel
    from paceline.progress import Progress

_PROMPT_TOKENS = 32
_NEW_TOKENS = 64
_DRAFT_VOCABULARY = 12288
_NUM_SHOWN_FROM = 32


class Story:
    """Paths, models and stages of one demo."""

    def __init__(self, target: str, out: Path, *, layers: Sequence[int]) -> None:
        self.target = target
        self.out = out
        self.layers = layers
        self._drafts: dict[str, HfModel] = {}
        self._texts: dict[float, list[list[int]]] = {}
        self.start = out / "draft-before"
        self.aligned = out / "align" / "draft"
        self.docs = PythonDocs(*(out / "data" / f"{name}.jsonl" for name in PythonDocs._fields))

    @functools.cached_property
    def _loaded(self) -> HfModel:
        return load_model(self.target)

    @functools.cached_property
    def _draft_weights(self) -> Literal["auto", "int8"]:
        return "int8" if can_read_int8(self._loaded) else "auto"

    @functools.cached_property
    def _ready(self) -> HfModel:
        return prepare_for_decoding(self._loaded)

    def prepare(self) -> None:
        """Write the corpus and the initial draft."""
        if not all(path.exists() for path in self.docs):
            _headline("Split Python's documentation into training and held-out text")
            write_python_docs(self.out / "data")
        if not self.start.exists():
            _headline(f"Create a draft from layers {','.join(map(str, self.layers))} of the target")
            target = self._loaded
            draft = subset_layers(target, self.layers)
            texts = read_texts(str(self.docs.train), load_tokenizer(self.target))
            size = min(_DRAFT_VOCABULARY, target.vocab_size)
            draft = limit_vocabulary(draft, target, texts, size)
            save_draft(draft, self.target, self.start, stored_dtype(self.target))

    def plan(self, config: Path, minutes: float) -> AlignConfig:
        """The configuration of `align`; raises ConfigError."""
        values = read_yaml(config) | {
            "target": self.target,
            "draft": str(self.start),
            "output": str(self.out / "align"),
            "max_seconds": 60 * minutes,
        }
        values["data"] = values.get("data", {}) | {"train": str(self.docs.beginnings)}
        return validate(AlignConfig, values)

    def align(self, wanted: AlignConfig) -> None:
        """Align the draft; resumes a stopped run, returns at once if the run is complete."""
        _headline(f"Align the draft with the target ({(wanted.max_seconds or 0) / 60:g} minutes)")
        with progress_bars() as progress:
            align(wanted, resume=True, progress=progress)

    def measure(
        self, name: str, draft: Path, temperature: float, *, prompts: int, timed: int
    ) -> Measurement:
        """Measure on held-out prompts, or read the result of an earlier run."""
        config = MeasureConfig(
            target=self.target,
            draft=str(draft),
            prompts=self._prompts(),
            num_prompts=prompts,
            batch_size=32,
            max_prompt_tokens=_PROMPT_TOKENS,
            max_new_tokens=_NEW_TOKENS,
            sampling=SamplingParams(temperature=temperature),
            timed_prompts=timed,
            draft_weights=self._draft_weights,
        )
        path = self.out / f"measure-{name}-t{temperature:g}.json"
        when = f"temperature {temperature:g}, held-out prompts"
        _headline(f"Measure the draft {name} alignment ({when})")
        found = _remember(path, draft, Measurement, config, self._measure)
        stdout.print(measurement_table(found))
        stdout.print(str(found.verdict), style=verdict_style(found.verdict))
        return found

    def _measure(self, config: MeasureConfig, progress: Progress) -> Measurement:
        """`measure`, with loaded models; texts are sampled once per temperature."""
        tokens = read_prompts(config.prompts, self._tokenizer, max_tokens=config.max_prompt_tokens)
        texts = self._texts.setdefault(config.sampling.temperature, [])
        draft = self._draft(config.draft)
        return measure_models(self._ready, draft, tokens, config, progress, texts)

    def _draft(self, path: str) -> HfModel:
        """Load a draft once and prepare it for decoding."""
        if path not in self._drafts:
            draft = load_model(path, dtype=self._loaded.dtype)
            self._drafts[path] = prepare_for_decoding(draft, self._draft_weights)
        return self._drafts[path]

    def verify(self, gamma: int) -> LosslessnessReport:
        """Verify losslessness, and that the test catches a broken rule."""
        config = VerifyConfig(
            target=self.target,
            draft=str(self.aligned),
            prompts=self._prompts(),
            max_prompt_tokens=_PROMPT_TOKENS,
            max_new_tokens=_NEW_TOKENS,
            gamma=gamma,
            self_test=True,
            draft_weights=self._draft_weights,
        )
        _headline("Verify that speculative decoding is lossless (float32)")
        path = self.out / "verify.json"
        report = _remember(path, self.aligned, LosslessnessReport, config, self._verify)
        for line in losslessness_lines(report):
            stdout.print(line)
        return report

    def _verify(self, config: VerifyConfig, progress: Progress) -> LosslessnessReport:
        """`verify_losslessness`, reusing the loaded models if they are float32."""
        if self._loaded.dtype != torch.float32:
            return verify_losslessness(config, progress)
        tokens = read_prompts(config.prompts, self._tokenizer, max_tokens=config.max_prompt_tokens)
        draft = self._draft(config.draft)
        return verify_models(self._ready, draft, tokens, config, progress, reference=self._loaded)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.target)

    def decode(self, gamma: int) -> None:
        """Decode the held-out prompt of median acceptance greedily, coloured by source."""
        draft, greedy = self._draft(str(self.aligned)), SamplingParams(temperature=0)
        decoder = SpeculativeDecoder(self._ready, draft, gamma=gamma, sampling=greedy)
        prompts = read_prompts(str(self.docs.prompts), self._tokenizer, max_tokens=_PROMPT_TOKENS)
        prompts = prompts[:_NUM_SHOWN_FROM]
        texts = [answer_text(self._tokenizer, tokens, ()) for tokens in prompts]
        tokens = [
            encode(Record("the prompt", "prompt", text=text), self._tokenizer)[0] for text in texts
        ]
        generations = decoder.generate(tokens, max_new_tokens=_NEW_TOKENS)
        shown = median_acceptance(generations, _NEW_TOKENS)
        _headline(
            f"Decode the one of {len(texts)} held-out prompts with median acceptance, greedily, "
            "coloured by the source of each token"
        )
        echo(texts[shown], nl=False, dim=True)
        stream_text(
            self._ready,
            decoder,
            texts[shown],
            chat=False,
            max_new_tokens=_NEW_TOKENS,
            seed=0,
            show=True,
            as_json=False,
        )

    def _prompts(self) -> Any:
        return str(self.docs.prompts)


def median_acceptance(generations: Sequence[Generation], num_tokens: int) -> int:
    """The index of the text of median acceptance among those of `num_tokens`, or among all."""
    whole = [at for at, text in enumerate(generations) if len(text.tokens) == num_tokens]
    by_rate = sorted(
        whole or range(len(generations)), key=lambda at: generations[at].stats.acceptance_rate
    )
    return by_rate[(len(by_rate) - 1) // 2]


def before_and_after(before: Sequence[Measurement], after: Sequence[Measurement]) -> Table:
    """The final table: figures before and after alignment."""
    table = Table("", "before", "after", title="Held-out Python documentation")
    for old, new in zip(before, after, strict=True):
        at = f"T={new.config.sampling.temperature:g}"
        rows: list[tuple[str, Callable[[Measurement], str]]] = [
            (f"expected acceptance, {at}", lambda m: str(m.acceptance.expected_acceptance)),
            (f"greedy agreement, text at {at}", lambda m: str(m.acceptance.greedy_agreement)),
            (f"tokens per target call, {at}", _tau),
            (f"measured speedup, {at}", _speedup),
            (f"verdict, {at}", lambda m: m.verdict.word),
        ]
        for name, figure in rows:
            table.add_row(name, figure(old), figure(new))
        table.add_section()
    return table


def _tau(found: Measurement) -> str:
    return "-" if found.speed is None else f"{found.speed.block_efficiency:.3f}"


def _speedup(found: Measurement) -> str:
    if found.speed is None:
        return "not timed"
    return f"{found.speed.speedup}x at gamma {found.speed.gamma}"


def _headline(text: str) -> None:
    stdout.print(f"\n== {text}", style="bold")


def _remember(
    path: Path, draft: Path, kind: type[Any], config: StrictModel, run: Callable[..., Any]
) -> Any:
    """Read the result of this configuration if it is newer than the draft, else run it."""
    weights = draft / "model.safetensors"
    if path.exists() and path.stat().st_mtime > weights.stat().st_mtime:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored.get("config") == config.model_dump(mode="json"):
            with contextlib.suppress(ValidationError):  # the result of another version
                return kind.model_validate(stored)
    with progress_bars() as progress:
        result = run(config, progress)
    atomic_write_text(path, result.model_dump_json(indent=2) + "\n")
    return result

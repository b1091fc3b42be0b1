"""The steps of `paceline demo`: each has a sentence and a configuration, and writes a file.

A step whose file was written with the same configuration is not run again.
"""

from __future__ import annotations

import contextlib
import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from rich.table import Table

from paceline.cli.command import styled
from paceline.cli.console import echo, progress_bars, stdout
from paceline.cli.result_tables import losslessness_lines, measurement_table
from paceline.cli.streaming import stream_text
from paceline.config import dump_yaml, read_yaml, validate
from paceline.core.sampling import SamplingParams
from paceline.data import read_prompts
from paceline.data.prompts import Record
from paceline.data.python_docs import PythonDocs, write_python_docs
from paceline.data.tokens import encode
from paceline.decode import SpeculativeDecoder
from paceline.errors import UsageError
from paceline.measure import (
    LosslessnessReport,
    MeasureConfig,
    Measurement,
    VerifyConfig,
    measure,
    verify_losslessness,
)
from paceline.measure.results import gamma_of
from paceline.models import load_model, prepare_for_decoding
from paceline.models.answer_text import answer_text
from paceline.models.drafts.save import save_draft
from paceline.models.loading import load_tokenizer, stored_dtype
from paceline.models.prepare import can_read_int8
from paceline.records import atomic_write_text
from paceline.results.figures import FIGURES
from paceline.train import AlignConfig, align
from paceline.train.initial_draft import DraftConfig, make_draft

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from paceline.config import StrictModel
    from paceline.decode import Generation
    from paceline.models import HfModel

_NEW_TOKENS = 64
_LENGTHS: dict[str, Any] = {"max_prompt_tokens": 32, "max_new_tokens": _NEW_TOKENS}
_DRAFT_VOCABULARY = 12288
_NUM_SHOWN_FROM = 32
# A weak draft shows on few texts; the final figures need narrow intervals.
_MEASURED: dict[str, dict[str, Any]] = {
    "before": {"num_prompts": 32, "timed_prompts": 8},
    "after": {"num_prompts": 64, "timed_prompts": 64},
}


class Demo:
    """Paths, models and steps of one demo."""

    def __init__(self, target: str, out: Path, layers: list[int]) -> None:
        self.target = target
        self.out = out
        self.layers = layers
        self.made = out / "draft-before.yaml"  # of which target and layers; the draft is a model
        self.drafts = {"before": out / "draft-before", "after": out / "align" / "draft"}
        self.docs = PythonDocs(*(out / "data" / f"{name}.jsonl" for name in PythonDocs._fields))

    @cached_property
    def loaded(self) -> HfModel:
        """The target."""
        return load_model(self.target)

    @cached_property
    def _common(self) -> dict[str, Any]:
        """Settings of all measurements."""
        # the drafts are stored as the target is, and int8 is for weights of bfloat16
        stored = stored_dtype(self.target) is torch.bfloat16
        weights = "int8" if stored and can_read_int8(self.loaded) else "auto"
        models = {"target": self.target, "prompts": str(self.docs.prompts)}
        return {**models, **_LENGTHS, "draft_weights": weights}

    def plan(self, config: Path, minutes: float) -> AlignConfig:
        """The configuration of `align`; raises ConfigError."""
        values = read_yaml(config)
        values |= {"target": self.target, "draft": str(self.drafts["before"])}
        values |= {"output": str(self.out / "align"), "max_seconds": 60 * minutes}
        values["data"] = values.get("data", {}) | {"train": str(self.docs.beginnings)}
        return validate(AlignConfig, values)

    @property
    def _origin(self) -> dict[str, Any]:
        return {"target": self.target, "layers": self.layers}

    def check(self) -> None:
        """Raise UsageError unless the draft that `out` holds is of this target and these layers."""
        start = self.drafts["before"]
        if not start.exists():
            return
        if not self.made.exists():
            raise UsageError(
                f"{start} does not say its target and layers, as those of older versions of "
                "Paceline; choose another --out"
            )
        made = read_yaml(self.made)
        for name, wanted in self._origin.items():
            if made.get(name) != wanted:
                raise UsageError(
                    f"{start} has the {name} {made.get(name)}, and this demo {wanted}; choose "
                    "another --out"
                )

    def prepare(self) -> None:
        """Write the corpus and the initial draft."""
        if not all(path.exists() for path in self.docs):
            headline("Split Python's documentation into training and held-out text")
            write_python_docs(self.out / "data")
        if not (start := self.drafts["before"]).exists():
            headline(f"Create a draft from layers {','.join(map(str, self.layers))} of the target")
            config = DraftConfig(
                target=self.target,
                out=start,
                layers=tuple(self.layers),
                vocabulary=min(_DRAFT_VOCABULARY, self.loaded.vocab_size),
                text=str(self.docs.train),
            )
            draft = make_draft(config, self.loaded)
            atomic_write_text(self.made, dump_yaml(self._origin))
            save_draft(draft, self.target, start, stored_dtype(self.target))

    def align(self, wanted: AlignConfig) -> None:
        """Align the draft; resumes a stopped run, returns at once if the run is complete."""
        headline(f"Align the draft with the target ({(wanted.max_seconds or 0) / 60:g} minutes)")
        with progress_bars() as progress:
            align(wanted, resume=True, progress=progress)

    def measure(self, name: str, temperature: float) -> Measurement:
        """Measure the draft before or after alignment on held-out prompts."""
        headline(
            f"Measure the draft {name} alignment (temperature {temperature:g}, held-out prompts)"
        )
        config = MeasureConfig(
            **self._common,
            **_MEASURED[name],
            draft=str(self.drafts[name]),
            batch_size=32,
            sampling=SamplingParams(temperature=temperature),
        )
        path = self.out / f"measure-{name}-t{temperature:g}.json"
        found = remember(path, self.drafts[name], Measurement, config, measure)
        stdout.print(measurement_table(found))
        stdout.print(styled(found.verdict))
        return found

    def verify(self, gamma: int) -> LosslessnessReport:
        """Verify losslessness, and that the test catches a broken rule."""
        headline("Verify that speculative decoding is lossless (float32)")
        draft = self.drafts["after"]
        config = VerifyConfig(**self._common, draft=str(draft), gamma=gamma, self_test=True)
        path = self.out / "verify.json"
        report = remember(path, draft, LosslessnessReport, config, verify_losslessness)
        for line in losslessness_lines(report):
            stdout.print(line)
        return report

    def decode(self, gamma: int) -> None:
        """Decode the held-out prompt of median acceptance greedily, coloured by source."""
        draft = load_model(self.drafts["after"], dtype=self.loaded.dtype)
        draft = prepare_for_decoding(draft, self._common["draft_weights"])
        target, greedy = prepare_for_decoding(self.loaded), SamplingParams(temperature=0)
        decoder = SpeculativeDecoder(target, draft, gamma=gamma, sampling=greedy)
        tokenizer, most = load_tokenizer(self.target), _LENGTHS["max_prompt_tokens"]
        prompts = read_prompts(str(self.docs.prompts), tokenizer, max_tokens=most)
        texts = [answer_text(tokenizer, tokens, ()) for tokens in prompts[:_NUM_SHOWN_FROM]]
        records = [Record("the prompt", "prompt", text=text) for text in texts]
        tokens = [encode(record, tokenizer)[0] for record in records]
        generations = decoder.generate(tokens, max_new_tokens=_NEW_TOKENS)
        text = texts[median_acceptance(generations, _NEW_TOKENS)]
        headline(
            f"Decode the one of {len(texts)} held-out prompts with median acceptance, greedily, "
            "coloured by the source of each token"
        )
        echo(text, nl=False, dim=True)
        stream_text(
            *(target, decoder, text),
            chat=False,
            max_new_tokens=_NEW_TOKENS,
            seed=0,
            show=True,
            as_json=False,
        )


def headline(text: str) -> None:
    """Print the sentence of a step."""
    stdout.print(f"\n== {text}", style="bold")


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
    for pair in zip(before, after, strict=True):
        at = f"T={pair[0].config.sampling.temperature:g}"
        alphas, agreements = (
            [str(found.figure(name)) for found in pair]
            for name in ("expected_acceptance", "greedy_agreement")
        )
        taus, faster = zip(*map(_timed, pair), strict=True)
        table.add_row(f"expected acceptance, {at}", *alphas)
        table.add_row(f"greedy agreement, text at {at}", *agreements)
        table.add_row(f"tokens per target call, {at}", *taus)
        table.add_row(f"measured speedup, {at}", *faster)
        table.add_row(f"verdict, {at}", *(found.verdict.word for found in pair))
        table.add_section()
    return table


def _timed(found: Measurement) -> tuple[str, str]:
    """Tokens per target call and speedup of the timed requests."""
    if (row := found.requests) is None:
        return "-", "not timed"
    speedup = f"{found.figure('speedup', row)}x at gamma {gamma_of(row)}"
    return f"{FIGURES['block_efficiency'].value(row):.3f}", speedup


def remember(
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

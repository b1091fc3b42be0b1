"""Parts of gpu.py: the alignment step, by tokens per chunk and in turns with TRL's."""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import warnings
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from alignment_vs_trl import Ours, fixed_batches, rates_in_turns
from paceline.data.collate import TokenRow
from paceline.models import wrap_model
from paceline.train import AlignConfig
from paceline.train.loss import StepPlan
from paceline.train.step import Stepper
from pairing import made_prompts, ratio, seconds, show

if TYPE_CHECKING:
    from alignment_vs_trl import Timing
    from gpu import Pair, Results
    from paceline.models import CausalModel

_TRL = "1.16.0"


def report_alignment(pair: Pair, options: argparse.Namespace, results: Results) -> None:
    """Time a forward-KL step over the whole vocabulary by tokens per chunk."""
    target, draft = pair.plain
    assert draft is not None, "an alignment needs a draft"
    student = _student(draft)
    whole = options.batch_rows * options.length
    rates = {
        chunk: alignment_rate(pair.name, target, student, chunk, options, results)
        for chunk in (256, whole, "auto")
    }
    results.add(pair.name, "auto / best chunk", rates["auto"] / max(rates[256], rates[whole]))


def alignment_rate(
    name: str,
    target: CausalModel,
    student: CausalModel,
    chunk: int | str,
    options: argparse.Namespace,
    results: Results,
) -> float:
    """Tokens per second of alignment steps with logits of `chunk` tokens at a time."""
    stepper = _stepper(target, student, chunk, options)
    size = target.vocab_size
    rows = [TokenRow(row, 1) for row in made_prompts(options.batch_rows, size, options.length)]
    step = functools.partial(stepper.step, rows, 1e-5, StepPlan(stepper.config.objective))
    step()
    on_gpu = options.device != "cpu"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    rounds = 5
    spent = seconds(lambda: [step() for _ in range(rounds)])
    rate = rounds * options.batch_rows * (options.length - 1) / spent
    results.add(name, "alignment, tokens/s", rate, chunk=chunk)
    if on_gpu:
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        results.add(name, "alignment, peak GiB", peak, chunk=chunk)
    return rate


def _student(draft: CausalModel) -> CausalModel:
    """A copy, because the draft shares embeddings and head with the target."""
    return wrap_model(copy.deepcopy(draft.hf).float().requires_grad_(True))


def _stepper(
    target: CausalModel, student: CausalModel, chunk: int | str, options: argparse.Namespace
) -> Stepper:
    settings = {
        "target": "made here",
        "draft": "made here",
        "output": "unused",
        "data": {"train": "unused"},
        "num_steps": 1,
        "chunk_tokens": chunk,
        "optimizer": {"kind": "adamw"},
    }
    config = AlignConfig.model_validate(settings)
    accelerator = Accelerator(cpu=options.device == "cpu")
    size = target.vocab_size
    return Stepper(student, target, config, accelerator, vocab_size=size, bfloat16=True)


def fault_of_trl(_: argparse.Namespace) -> str | None:
    """Why TRL cannot be compared with; None if it can."""
    try:
        importlib.import_module("trl.trainer.distillation_trainer")
    except ImportError as error:
        return f"{error}; pip install trl=={_TRL}"
    return None


def report_trl(pair: Pair, options: argparse.Namespace, results: Results) -> None:
    """Compare alignment steps with those of TRL's DistillationTrainer, on the same rows."""
    target, draft = pair.plain
    assert draft is not None, "an alignment needs a draft"
    steps = argparse.Namespace(
        batch=options.batch_rows,
        steps=5,
        warm_up=2,
        completion_tokens=options.length - 1,
        on_policy=False,
        use_cpu=options.device == "cpu",
    )
    count = steps.batch * (steps.steps + steps.warm_up)
    rows = made_prompts(count, target.vocab_size, options.length)
    texts = [(row[:1], row[1:]) for row in rows]
    memory = None if steps.use_cpu else PeakMemory()
    ours = Ours(
        _stepper(target, _student(draft), "auto", options), fixed_batches(texts, steps.batch)
    )
    our_step = ours.step if memory is None else memory.watching(ours.step)
    # TRL gives a model another forward, and the copy leaves the target as it is
    models = copy.copy(target.hf), _student(draft).hf
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rates = rates_in_turns(models, _tokenizer(), steps, texts, our_step)
    finally:  # else accelerate would keep TRL's mixed precision for what follows
        AcceleratorState._reset_state(reset_partial_state=True)
    at = {"trl": version("trl")}
    for who, rate in zip(("TRL", "ours"), rates, strict=True):
        results.add(pair.name, f"{who}, trained tokens/s", sum(rate) / len(rate), **at)
        if memory is not None:
            results.add(pair.name, f"{who}, peak GiB", memory.peaks[who] / 2**30, **at)
    found = ratio(rates[1], rates[0])
    results.add(pair.name, "ours / TRL", found.value, show(found), **at)


def _tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer that TRL asks for; it is not used for the rows."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


class PeakMemory:
    """Peak memory of TRL and of ours, whose steps take turns on one CUDA device.

    Attributes:
        peaks: Most bytes of each, with its draft and moments, but without what was there before.
    """

    def __init__(self) -> None:
        """Begin, before either has allocated anything."""
        self.peaks = {"TRL": 0, "ours": 0}
        self._before = torch.cuda.memory_allocated()
        self._ours = 0

    def watching(self, step: Any) -> Any:
        """Our step; between two of its calls, all is TRL's."""
        self._ours = torch.cuda.memory_allocated() - self._before
        torch.cuda.reset_peak_memory_stats()

        def watched() -> Timing:
            self._note("TRL", self._ours)
            theirs = torch.cuda.memory_allocated() - self._before - self._ours
            timing = step()
            self._note("ours", theirs)
            self._ours = torch.cuda.memory_allocated() - self._before - theirs
            return timing

        return watched

    def _note(self, who: str, others: int) -> None:
        peak = torch.cuda.max_memory_allocated() - self._before - others
        self.peaks[who] = max(self.peaks[who], peak)
        torch.cuda.reset_peak_memory_stats()

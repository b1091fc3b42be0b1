"""Compares training speed and peak memory of `paceline align` with TRL's DistillationTrainer.

Both use the same target, draft, texts or prompts, batch size and lengths, forward KL over the whole
vocabulary, AdamW, and train all weights of the draft. TRL runs with its default settings, except
that gradient checkpointing is off because it costs time. Off-policy, both train on given text; in
TRL it replaces the generated text. On-policy, each generates text with its own draft. Steps of both
are interleaved in one process. Prints
  - completion tokens per second of each, and the ratio with its 95% interval over the steps
  - with --memory: the peak memory of each, measured in separate processes

    pip install trl==1.16.0
    python benchmarks/alignment_vs_trl.py --target MODEL --draft DRAFT --prompts FILE
"""

from __future__ import annotations

import argparse
import itertools
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.sampling import SamplingParams
from paceline.data import read_prompts
from paceline.data.collate import TokenRow
from paceline.data.sources import ExampleStream, SampledText
from paceline.models import load_model
from paceline.models.loading import load_tokenizer
from paceline.models.prepare import training_writer
from paceline.records import RunDirectory
from paceline.train import AlignConfig
from paceline.train.loss import StepPlan
from paceline.train.run import TrainingRun
from paceline.train.step import Stepper
from pairing import ratio, show, wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Texts = list[tuple[list[int], list[int]]]
Timing = tuple[float, int]  # seconds, completion tokens


class Theirs:
    """TRL's trainer; calls `every_step` with seconds and completion tokens after each step.

    `models`: target and draft, by name or as models of transformers.
    """

    def __init__(
        self,
        models: tuple[Any, Any],
        tokenizer: Any,
        options: argparse.Namespace,
        texts: Texts,
        every_step: Callable[[float, int], None],
        folder: str,
    ) -> None:
        # imported here, so that they count towards the memory of TRL only
        import datasets
        import transformers
        from trl.trainer.distillation_config import DistillationConfig
        from trl.trainer.distillation_trainer import DistillationTrainer

        class Trainer(DistillationTrainer):
            """Takes tokens from `texts`; a prompt is an index into it."""

            def _tokenize_prompts(
                self, prompts: list[Any]
            ) -> tuple[list[list[int]], None, dict[str, Any]]:
                self.numbers = [int(number) for number in prompts]
                return [texts[number][0] for number in self.numbers], None, {}

            def _generate_single_turn(self, *given: Any, **named: Any) -> list[list[int]]:
                if options.on_policy:
                    written = super()._generate_single_turn(*given, **named)
                else:
                    written = [texts[number][1] for number in self.numbers]
                self.num_tokens = sum(map(len, written))
                return written

        settings = DistillationConfig(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            max_steps=options.steps + options.warm_up,
            max_completion_length=options.completion_tokens,
            beta=0.0,
            learning_rate=1e-4,
            gradient_checkpointing=False,
            logging_steps=10**6,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=options.use_cpu,
            shuffle_dataset=False,
        )
        numbers = [{"prompt": str(number)} for number in range(len(texts))]
        self.trainer = Trainer(
            model=models[1],
            teacher_model=models[0],
            args=settings,
            train_dataset=datasets.Dataset.from_list(numbers),
            processing_class=tokenizer,
        )
        trainer = self.trainer
        trainer.remove_callback(transformers.PrinterCallback)

        class Watch(transformers.TrainerCallback):
            started = 0.0

            def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
                wait()
                self.started = time.perf_counter()

            def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
                wait()
                every_step(time.perf_counter() - self.started, trainer.num_tokens)

        trainer.add_callback(Watch())

    def run(self) -> None:
        self.trainer.train()


class Ours:
    """The training step of `paceline align`, without checkpoints and evaluation."""

    def __init__(self, stepper: Stepper, batches: Iterator[Sequence[TokenRow]]) -> None:
        self.stepper = stepper
        self.batches = batches
        self.plan = StepPlan(stepper.config.objective)

    def step(self) -> Timing:
        wait()
        started = time.perf_counter()
        figures = self.stepper.step(next(self.batches), 1e-4, self.plan)
        wait()
        return time.perf_counter() - started, figures.num_tokens


def stepper_of(options: argparse.Namespace, **settings: Any) -> Stepper:
    """Our step with models and precision as `paceline align` chooses them."""
    made = {
        "target": options.target,
        "draft": options.draft,
        "output": "unused",
        "data": {"train": "unused"},
        "batch_size": options.batch,
        "objective": "forward_kl",
        "mean": "token",
        "num_steps": options.steps,
        "optimizer": {"kind": "adamw", "learning_rate": 1e-4},
    }
    config = AlignConfig.model_validate(made | settings)
    from accelerate import Accelerator

    accelerator = Accelerator()
    with tempfile.TemporaryDirectory() as folder:
        run = TrainingRun(config, RunDirectory(Path(folder)), accelerator)
        bfloat16 = run.takes_bfloat16()
    precision = "bfloat16" if bfloat16 else "float32"
    print(f"our forward passes in {precision}")
    target = load_model(options.target, dtype=precision)
    draft = load_model(options.draft, dtype="float32")
    size = draft.vocab_size
    return Stepper(draft, target, config, accelerator, vocab_size=size, bfloat16=bfloat16)


def loaded(options: argparse.Namespace, texts: Texts) -> Ours:
    """Our step on these texts, or on texts that the draft writes after their prompts."""
    stepper = stepper_of(options)
    if not options.on_policy:
        return Ours(stepper, fixed_batches(texts, options.batch))
    draft, target = stepper.model, stepper.target
    assert target is not None, "it was loaded"
    examples = [
        TokenRow([*prompt, *rest], n := len(prompt), prompt_length=n) for prompt, rest in texts
    ]
    source = SampledText(
        ExampleStream(examples, options.batch, seed=0),
        training_writer(draft),
        "draft",
        sampling=SamplingParams(),
        max_new_tokens=options.completion_tokens,
        eos_token_ids=target.eos_token_ids,
    )
    return Ours(stepper, (source.next_batch().rows for _ in itertools.count()))


def fixed_batches(texts: Texts, size: int) -> Iterator[list[TokenRow]]:
    """Batches of the texts in their order, again and again, as TRL takes them."""
    rows = itertools.cycle(TokenRow([*prompt, *rest], len(prompt)) for prompt, rest in texts)
    while True:
        yield list(itertools.islice(rows, size))


def rates_in_turns(
    models: tuple[Any, Any],
    tokenizer: Any,
    options: argparse.Namespace,
    texts: Texts,
    our_step: Callable[[], Timing],
) -> tuple[list[float], list[float]]:
    """Completion tokens per second of TRL and of ours at each step after the warm-up.

    `models`: those of TRL.
    """
    rates: tuple[list[float], list[float]] = ([], [])

    def every_step(*theirs: Any) -> None:
        for rate, (seconds, tokens) in zip(rates, (theirs, our_step()), strict=True):
            rate.append(tokens / seconds)

    with tempfile.TemporaryDirectory() as folder:
        Theirs(models, tokenizer, options, texts, every_step, folder).run()
    theirs, ours = (rate[options.warm_up :] for rate in rates)
    return theirs, ours


def whole_texts(options: argparse.Namespace) -> Texts:
    """Texts of the full length for all steps, each split into prompt and completion."""
    length = options.prompt_tokens + options.completion_tokens
    tokens = read_prompts(options.prompts, load_tokenizer(options.target), max_tokens=length)
    whole = [text for text in tokens if len(text) == length]
    wanted = options.batch * (options.steps + options.warm_up)
    if not whole:
        raise SystemExit(f"no text in {options.prompts} has {length} tokens")
    repeated = [whole[number % len(whole)] for number in range(wanted)]
    return [(text[: options.prompt_tokens], text[options.prompt_tokens :]) for text in repeated]


def compare(options: argparse.Namespace, texts: Texts) -> None:
    """Print speeds and their ratio."""
    ours = loaded(options, texts)
    names, tokenizer = (options.target, options.draft), load_tokenizer(options.draft)
    theirs, mine = rates_in_turns(names, tokenizer, options, texts, ours.step)
    kind = "on-policy" if options.on_policy else "off-policy"
    print(
        f"{kind}, {options.batch} x ({options.prompt_tokens} + {options.completion_tokens}) "
        f"tokens, {len(mine)} steps: TRL {sum(theirs) / len(theirs):.0f} completion tokens/s, "
        f"ours {sum(mine) / len(mine):.0f}; ours / TRL {show(ratio(mine, theirs))}"
    )


def report_memory(options: argparse.Namespace) -> None:
    """Print the peak memory of both, each measured in its own process."""
    peaks: dict[str, list[int]] = {}
    for who in ("theirs", "ours"):
        command = [sys.executable, __file__, *sys.argv[1:], "--alone", who]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks[who] = [int(number) for number in done.stdout.split()[-2:]]
    theirs, ours = peaks["theirs"], peaks["ours"]
    print(
        f"peak memory: TRL {theirs[1] >> 20} MiB, ours {ours[1] >> 20} MiB, ours / TRL "
        f"{ours[1] / theirs[1]:.2f}; without Python and its libraries "
        f"({theirs[0] >> 20} and {ours[0] >> 20} MiB) "
        f"{(ours[1] - ours[0]) / (theirs[1] - theirs[0]):.2f}"
    )


def run_alone(options: argparse.Namespace, texts: Texts) -> None:
    """Run steps of one library; print its peak memory before loading the models and at the end."""
    before = _peak_bytes()
    if options.alone == "ours":
        ours = loaded(options, texts)
        for _ in range(options.steps):
            ours.step()
    else:
        names, tokenizer = (options.target, options.draft), load_tokenizer(options.draft)
        with tempfile.TemporaryDirectory() as folder:
            Theirs(names, tokenizer, options, texts, lambda *_: None, folder).run()
    print(before, _peak_bytes())


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", required=True, help="a model directory")
    parser.add_argument("--draft", required=True, help="a model directory")
    parser.add_argument("--prompts", required=True, help="JSON lines with long texts")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--completion-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--on-policy", action="store_true")
    parser.add_argument("--memory", action="store_true", help="compare memory instead of time")
    parser.add_argument("--alone", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.set_defaults(use_cpu=not torch.cuda.is_available())
    options = parser.parse_args()
    torch.manual_seed(0)
    texts = whole_texts(options)
    if options.alone:
        run_alone(options, texts)
    elif options.memory:
        report_memory(options)
    else:
        compare(options, texts)


if __name__ == "__main__":
    main()

"""Compares training speed of `paceline align` with transformers' Trainer, for encoder-decoders.

TRL has no distillation for encoder-decoders. The usual way is a `Seq2SeqTrainer` whose loss is
computed from the logits of both models, as TRL's trainers do for decoder-only models: forward KL
over the whole vocabulary, mean over target tokens. Both sides train all weights of the draft with
AdamW on the same pairs, in the same steps. Trainer runs with its defaults, in float32 or, with
--bf16, in mixed precision. Steps of both are interleaved in one process. Prints target tokens per
second of each, and the ratio with its 95% interval over the steps.

    python benchmarks/alignment_vs_trainer.py --target MODEL --draft DRAFT --pairs FILE
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import TYPE_CHECKING, Any

import datasets
import torch
import transformers
from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq, Seq2SeqTrainer
from transformers import Seq2SeqTrainingArguments as Arguments

from alignment_vs_trl import Ours, stepper_of
from paceline.data.examples import Lengths, build_examples
from paceline.data.prompts import CorpusConfig, read_records
from paceline.data.sources import rows_of
from paceline.models.loading import load_tokenizer
from pairing import ratio, show

if TYPE_CHECKING:
    from collections.abc import Callable

    Pairs = list[tuple[list[int], list[int]]]


class Distillation(Seq2SeqTrainer):
    """Forward KL from the teacher, mean over the target tokens."""

    teacher: Any

    def compute_loss(self, model: Any, inputs: Any, *_args: Any, **_named: Any) -> Any:
        labels_BT = inputs["labels"]
        with torch.no_grad():
            teacher_BTV = self.teacher(**inputs).logits.log_softmax(-1)
        student_BTV = model(**inputs).logits.log_softmax(-1)
        kl_BTV = torch.nn.functional.kl_div(
            student_BTV, teacher_BTV, reduction="none", log_target=True
        )
        mask_BT = labels_BT != -100
        self.num_tokens = int(mask_BT.sum())
        return kl_BTV.sum(-1)[mask_BT].mean()


class Theirs:
    """Calls `every_step` with seconds and target tokens after each step."""

    def __init__(
        self,
        options: argparse.Namespace,
        pairs: Pairs,
        every_step: Callable[[float, int], None],
        folder: str,
    ) -> None:
        tokenizer = load_tokenizer(options.draft)
        draft = AutoModelForSeq2SeqLM.from_pretrained(options.draft, dtype=torch.float32)
        settings = Arguments(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            max_steps=options.steps + options.warm_up,
            learning_rate=1e-4,
            logging_steps=10**6,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            bf16=options.bf16,
            use_cpu=not torch.cuda.is_available(),
            train_sampling_strategy="sequential",
        )
        rows = [{"input_ids": source, "labels": text} for source, text in pairs]
        self.trainer = trainer = Distillation(
            model=draft,
            args=settings,
            train_dataset=datasets.Dataset.from_list(rows),
            data_collator=DataCollatorForSeq2Seq(tokenizer, draft),
        )
        dtype = torch.bfloat16 if options.bf16 else torch.float32
        teacher: Any = AutoModelForSeq2SeqLM.from_pretrained(options.target, dtype=dtype)
        trainer.teacher = teacher.eval().requires_grad_(False).to(trainer.args.device)

        class Watch(transformers.TrainerCallback):
            started = 0.0

            def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
                self.started = time.perf_counter()

            def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
                every_step(time.perf_counter() - self.started, trainer.num_tokens)

        trainer.add_callback(Watch())

    def run(self) -> None:
        self.trainer.train()


def loaded(options: argparse.Namespace, pairs: Pairs) -> Ours:
    """Our step on these pairs."""
    stepper = stepper_of(options, gradient_accumulation_steps=options.parts)
    assert stepper.target is not None, "it was loaded"
    rows = rows_of(stepper.target, *zip(*pairs, strict=True))
    starts = range(0, len(rows), options.batch)
    return Ours(stepper, (rows[start : start + options.batch] for start in starts))


def pairs_of(options: argparse.Namespace) -> Pairs:
    """Sources and target texts of all steps, in the order of the file."""
    tokenizer = load_tokenizer(options.target)
    limits = Lengths(options.source_tokens, options.target_tokens)
    records = read_records(CorpusConfig(path=options.pairs))
    wanted = options.batch * (options.steps + options.warm_up)
    if len(records) < wanted:
        raise SystemExit(f"{options.pairs} has {len(records)} pairs, wanted {wanted}")
    examples = build_examples(records[:wanted], tokenizer, limits, decoder_prompt=[0])
    return [(example.prompt, list(example.tokens[1:])) for example in examples]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--target", required=True, help="a model directory")
    parser.add_argument("--draft", required=True, help="a model directory")
    parser.add_argument("--pairs", required=True, help="JSON lines with prompt and completion")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--parts", type=int, default=2, help="our gradient_accumulation_steps")
    parser.add_argument("--source-tokens", type=int, default=128)
    parser.add_argument("--target-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--bf16", action="store_true", help="Trainer's mixed precision")
    options = parser.parse_args()
    torch.manual_seed(0)
    pairs = pairs_of(options)
    ours = loaded(options, pairs)
    rates: tuple[list[float], list[float]] = ([], [])

    def every_step(their_s: float, their_tokens: int) -> None:
        our_s, our_tokens = ours.step()
        assert our_tokens == their_tokens, "both train on the same pairs"
        rates[0].append(their_tokens / their_s)
        rates[1].append(our_tokens / our_s)

    with tempfile.TemporaryDirectory() as folder:
        Theirs(options, pairs, every_step, folder).run()
    theirs, mine = (rate[options.warm_up :] for rate in rates)
    print(
        f"{options.batch} pairs a step, {len(mine)} steps: Trainer "
        f"{sum(theirs) / len(theirs):.0f} target tokens/s, ours {sum(mine) / len(mine):.0f}; "
        f"ours / Trainer {show(ratio(mine, theirs))}"
    )


if __name__ == "__main__":
    main()

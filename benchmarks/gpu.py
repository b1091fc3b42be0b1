"""Runs all benchmarks on one CUDA device, without downloads.

Each shape has a target with random weights, whose layers add little to their input, and a draft
with its first layers. They agree about as often as an aligned pair, so block lengths are realistic.
Such pairs only measure speed; acceptance comes from a pair trained on Python's documentation.
Prints for each shape
  - memory bandwidth of the device, and the time to read the weights at that bandwidth
  - tokens per second of Paceline and transformers, with and without the draft; paired ratios
  - the fraction of a block during which the device waits for the host
  - tokens per second by batch size
  - tokens per second and memory of an alignment step, with a chunked and an unchunked loss
and for the trained pair the results of `paceline measure`.

    python -u benchmarks/gpu.py
    python -u benchmarks/gpu.py --shapes 7b --no-training
    python benchmarks/gpu.py --device cpu --shapes tiny --train-seconds 5 5 5      # smoke test
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import transformers
from accelerate import Accelerator
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from paceline.core.block import DrawPlan, DrawRequest, VerifyRequest
from paceline.core.rules import Lossless
from paceline.core.sampling import SamplingParams
from paceline.core.stats import DecodeStats
from paceline.data import read_prompts
from paceline.data.collate import TokenRow
from paceline.data.python_docs import write_python_docs
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.decode.block import draw, verify
from paceline.measure.measurement import MeasureConfig, measure_models
from paceline.models import load_model, prepare_for_decoding, wrap_model
from paceline.models.prepare import with_cuda_graphs
from paceline.rng import named_generator
from paceline.train import AlignConfig, align
from paceline.train.loss import StepPlan
from paceline.train.pretrain import PretrainConfig, pretrain
from paceline.train.step import Stepper
from pairing import paired_seconds, ratio, seconds, show
from speculative_vs_assisted import fix_block_length, transformers_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from paceline.core.block import Drafted
    from paceline.decode.decoder import Decoder
    from paceline.models import CausalModel


_ROUNDS = 50  # blocks per profile


class Shape(NamedTuple):
    """Shape of a Llama model; the draft has its first `draft_layers` layers."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    vocab: int
    draft_layers: int


SHAPES = {
    "tiny": Shape(64, 128, 8, 4, 2, 512, 1),
    "1b": Shape(2048, 8192, 16, 32, 8, 128256, 1),
    "7b": Shape(4096, 14336, 32, 32, 8, 32000, 2),
}


def made_pair(shape: Shape, share: float, device: str) -> tuple[CausalModel, CausalModel]:
    """Target and draft; `share` scales the output of each layer."""
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight *= share
            if name.startswith("lm_head"):
                weight *= 8  # gives a distribution that is not nearly uniform
    draft = cut(target, shape.draft_layers)
    return wrap_model(target), wrap_model(draft)


def cut(target: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A draft with the target's first layers; it shares embeddings and head with the target."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = num_layers
    with torch.device("meta"):
        draft = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base = draft.base_model
    base.embed_tokens, base.norm = target.base_model.embed_tokens, target.base_model.norm
    base.rotary_emb = target.base_model.rotary_emb
    base.layers = torch.nn.ModuleList(copy.deepcopy(list(target.base_model.layers[:num_layers])))
    draft.lm_head = target.lm_head
    return draft.eval()


def report_bandwidth(target: CausalModel, size: int) -> None:
    """Print the bandwidth of a copy and the time to read the weights at that bandwidth."""
    source = torch.zeros(size, dtype=torch.uint8, device=target.device)
    goal = torch.empty_like(source)
    goal.copy_(source)
    rounds = 20
    spent = seconds(lambda: [goal.copy_(source) for _ in range(rounds)])
    rate = 2 * size * rounds / spent
    weights = sum(weight.nbytes for weight in target.hf.parameters())
    # A token reads only one row of the embeddings.
    weights -= target.hf.get_input_embeddings().weight.nbytes
    print(
        f"copy bandwidth {rate / 1e9:.0f} GB/s; {weights / 1e9:.2f} GB of weights: "
        f"{1e3 * weights / rate:.2f} ms per pass"
    )


def compare_decoding(
    plain: tuple[CausalModel, CausalModel],
    ready: tuple[CausalModel, CausalModel],
    sampling: SamplingParams,
    options: argparse.Namespace,
) -> None:
    """Compare Paceline and transformers at batch size 1, with and without the draft."""
    prompts = made_prompts(options.num_prompts, ready[0].vocab_size)
    length = options.new_tokens
    alone = AutoregressiveDecoder(ready[0], sampling)
    blocks = SpeculativeDecoder(*ready, gamma=options.gamma, sampling=sampling)
    counted: list[DecodeStats] = []

    def ours(number: int, decoder: Decoder) -> None:
        (text,) = decoder.generate([prompts[number]], length, number, [])
        if decoder is blocks:
            counted.append(text.stats)

    def theirs(number: int, draft: CausalModel | None) -> None:
        torch.manual_seed(number)
        transformers_tokens(plain[0], prompts[number], length, sampling, draft)

    methods = (
        functools.partial(theirs, draft=None),
        functools.partial(theirs, draft=plain[1]),
        functools.partial(ours, decoder=alone),
        functools.partial(ours, decoder=blocks),
    )
    for number in range(len(prompts)):  # warms up and captures all CUDA graphs
        for method in methods:
            method(number)
    counted.clear()
    spent = paired_seconds(methods, len(prompts))
    tau = sum(counted, DecodeStats()).block_efficiency
    rates = [f"{len(prompts) * length / sum(one):.0f}" for one in spent]
    print(f"temperature {sampling.temperature:g}, gamma {options.gamma}, tau {tau:.2f}")
    print(
        f"  tokens/s: generate {rates[0]}, assisted {rates[1]}, ours {rates[2]}, "
        f"ours with draft {rates[3]}"
    )
    print(f"  generate / ours {show(ratio(spent[0], spent[2]))}")
    print(f"  assisted / ours with draft {show(ratio(spent[1], spent[3]))}")
    print(f"  ours / ours with draft {show(ratio(spent[2], spent[3]))}")


def made_prompts(count: int, vocab_size: int, length: int = 64) -> list[list[int]]:
    """Random tokens."""
    rng = named_generator(0, "prompts")
    return [torch.randint(vocab_size, (length,), generator=rng).tolist() for _ in range(count)]


@torch.inference_mode()
def report_waiting(ready: tuple[CausalModel, CausalModel], gamma: int) -> None:
    """Print the fraction of the time, in drafting and in whole blocks, without a running kernel."""
    target, draft = (model.start_session() for model in ready)
    (prompt,) = made_prompts(1, ready[0].vocab_size)
    for session in (target, draft):
        session.prefill([prompt])
    sampling = SamplingParams(temperature=0.0)

    def drafted() -> Drafted:
        drawn = draw(draft, DrawRequest([[1]], DrawPlan(gamma, sampling)))
        draft.rollback([gamma])
        return drawn

    def block() -> None:
        verify(target, VerifyRequest([1], drafted(), [gamma], Lossless(), sampling))
        target.rollback([gamma + 1])

    for name, work in (("drafting", lambda: drafted().tokens_BG.tolist()), ("block", block)):
        repeated(work, 5)()
        spent = seconds(repeated(work, _ROUNDS))
        busy = busy_seconds(repeated(work, _ROUNDS))
        print(
            f"{name}, gamma {gamma}: {1e3 * spent / _ROUNDS:.3f} ms, "
            f"idle for {1 - busy / spent:.1%} of it"
        )


def repeated(work: Callable[[], object], count: int) -> Callable[[], None]:
    """A function that calls `work` `count` times."""

    def run() -> None:
        for _ in range(count):
            work()

    return run


def busy_seconds(work: Callable[[], object]) -> float:
    """Total time of all kernels of a call."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    busy = sum(event.self_device_time_total for event in seen.key_averages()) / 1e6
    assert busy > 0, "the profiler saw no kernel"
    return busy


def report_batches(ready: tuple[CausalModel, CausalModel], options: argparse.Namespace) -> None:
    """Print tokens per second of the whole batch for each batch size."""
    sampling = SamplingParams()
    decoders = {
        "alone": AutoregressiveDecoder(ready[0], sampling),
        "with draft": SpeculativeDecoder(*ready, gamma=options.gamma, sampling=sampling),
    }
    for name, decoder in decoders.items():
        rates: list[str] = []
        for batch in options.batches:
            prompts = made_prompts(batch, ready[0].vocab_size)

            def run(decoder: Decoder = decoder, prompts: list[list[int]] = prompts) -> None:
                decoder.generate(prompts, options.new_tokens, 0, [])

            run()  # captures CUDA graphs
            spent = seconds(run)
            rates.append(f"{batch}: {batch * options.new_tokens / spent:.0f}")
        print(f"{name}, tokens/s by batch: {', '.join(rates)}")


def report_alignment(
    pair: tuple[CausalModel, CausalModel], chunk_tokens: int | str, options: argparse.Namespace
) -> None:
    """Time a forward-KL step over the whole vocabulary, with logits of `chunk_tokens` at a time."""
    target, draft = pair
    # A copy, because the draft shares embeddings and head with the target.
    student = wrap_model(copy.deepcopy(draft.hf).float().requires_grad_(True))
    settings = {
        "target": "made here",
        "draft": "made here",
        "output": "unused",
        "data": {"train": "unused"},
        "num_steps": 1,
        "chunk_tokens": chunk_tokens,
        "optimizer": {"kind": "adamw"},
    }
    config = AlignConfig.model_validate(settings)
    accelerator = Accelerator(cpu=options.device == "cpu")
    vocab_size = target.vocab_size
    stepper = Stepper(student, target, config, accelerator, vocab_size=vocab_size, bfloat16=True)
    rows = [
        TokenRow(prompt, 1) for prompt in made_prompts(options.rows, vocab_size, options.length)
    ]
    plan = StepPlan(config.objective)
    stepper.step(rows, 1e-5, plan)
    on_gpu = torch.cuda.is_available()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    rounds = 5
    spent = seconds(repeated(lambda: stepper.step(rows, 1e-5, plan), rounds))
    tokens = rounds * options.rows * (options.length - 1)
    most = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    peak = f", peak memory of a step {most / 2**30:.1f} GiB" if on_gpu else ""
    print(f"alignment, {chunk_tokens} tokens per chunk: {tokens / spent:.0f} tokens/s{peak}")


def report_trained_pair(options: argparse.Namespace, folder: Path) -> None:
    """Pretrain both models on Python's documentation, align the draft and measure the pair."""
    docs = write_python_docs(folder)
    both = {
        "data": {"train": str(docs.train)},
        "max_prompt_tokens": 64,
        "max_completion_tokens": 192,
        "batch_size": 64,
        "device": "cpu" if options.device == "cpu" else "auto",
        "optimizer": {"kind": "adamw", "learning_rate": 6e-4, "warmup_fraction": 0.05},
    }
    large, small, aligned = options.train_seconds
    wide = {"hidden_size": 1024, "num_layers": 24, "num_heads": 16, "num_key_value_heads": 4}
    if options.device == "cpu":
        wide = {"hidden_size": 64, "num_layers": 4, "num_heads": 4}
        both["batch_size"] = 8
    target = both | {"model": wide, "output": str(folder / "target"), "max_seconds": large}
    pretrain(PretrainConfig.model_validate(target))
    model = str(folder / "target" / "model")
    narrow = {"hidden_size": wide["hidden_size"] // 2, "num_layers": 2, "num_heads": 4}
    draft = both | {"model": narrow, "tokenizer": model, "output": str(folder / "draft")}
    pretrain(PretrainConfig.model_validate(draft | {"max_seconds": small}))
    learned = both | {"target": model, "draft": str(folder / "draft" / "model")}
    learned["data"] = {"train": str(docs.train), "pack_documents": True}
    learned |= {"recipe": "supervised_kd", "output": str(folder / "align"), "max_seconds": aligned}
    align(AlignConfig.model_validate(learned))
    pair = tuple(
        prepare_for_decoding(load_model(name, device=options.device))
        for name in (model, str(folder / "align" / "draft"))
    )
    prompts = read_prompts(str(docs.held_out), pair[0].tokenizer, max_tokens=32)
    for temperature in (0.0, 1.0):
        found = measure_models(
            *pair,
            prompts,
            MeasureConfig(
                target=model,
                draft="aligned",
                prompts=str(docs.held_out),
                sampling=SamplingParams(temperature=temperature),
                max_new_tokens=options.new_tokens,
            ),
        )
        speed = found.speed
        assert speed is not None, "requests are timed by default"
        print(
            f"trained pair, temperature {temperature:g}: acceptance "
            f"{found.acceptance.expected_acceptance}, c {found.cost.cost_ratio:.3f}, "
            f"gamma {speed.gamma}, tau {speed.block_efficiency:.2f}, speedup {speed.speedup}, "
            f"{speed.engine_efficiency:.2f} x tau / (c gamma + 1)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=["1b", "7b"])
    parser.add_argument("--share", type=float, default=0.1, help="scale of the layers' output")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rows", type=int, default=16, help="rows per alignment step")
    parser.add_argument(
        "--length", type=int, default=512, help="tokens per row of an alignment step"
    )
    parser.add_argument("--train-seconds", type=float, nargs=3, default=[180, 45, 90])
    parser.add_argument("--no-training", action="store_true", help="skip the trained pair")
    options = parser.parse_args()
    on_gpu = options.device != "cpu"
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    for shape in options.shapes:
        started = time.perf_counter()
        plain = made_pair(SHAPES[shape], options.share, options.device)
        print(f"\n{shape}: {SHAPES[shape]}")
        report_bandwidth(plain[0], 2**30 if on_gpu else 2**26)
        fix_block_length(plain[1], options.gamma)
        ready = with_cuda_graphs(plain[0]), with_cuda_graphs(plain[1])
        for temperature in (0.0, 1.0):
            compare_decoding(plain, ready, SamplingParams(temperature=temperature), options)
        if on_gpu:
            report_waiting(ready, options.gamma)
        report_batches(ready, options)
        for chunk_tokens in (256, options.rows * options.length, "auto"):
            report_alignment(plain, chunk_tokens, options)
        print(f"({time.perf_counter() - started:.0f} s)", flush=True)
        del plain, ready
        gc.collect()  # frees CUDA graphs before the next ones are captured
    if options.no_training:
        return
    print()
    with tempfile.TemporaryDirectory() as folder:
        report_trained_pair(options, Path(folder))


if __name__ == "__main__":
    main()

"""Measures decoding and alignment on one CUDA device against goals, without downloads.

    python -u benchmarks/gpu.py                                # all parts
    python -u benchmarks/gpu.py --part passes decoding --shapes 8b --rows gpu.jsonl
    python -u benchmarks/gpu.py --part trl vllm --shapes 1b --vllm VENV/bin/vllm
    python benchmarks/gpu.py --device cpu --shapes tiny        # smoke test

Models have real shapes and random weights. A draft has the first layers of its target; the other
layers of the target are scaled until a block emits 2.5 tokens, as of an aligned pair. Parts:

    passes      the first call; a pass of one token against a copy of the weights; a block of
                gamma + 1 tokens and a drafted token against it
    decoding    alone and with the draft, against transformers' generate and assisted generation
    static      transformers' generate with a static cache and torch.compile
    batches     tokens per second by batch size
    alignment   tokens per second and memory of a step, by tokens per chunk
    trl         the step against that of TRL's DistillationTrainer, on the same rows
    vllm        greedy requests, alone and with the draft, against vLLM's servers of the same pair
    trained     `paceline measure` of a pair that is trained here on Python's documentation

trl needs TRL beside Paceline, and vllm a program `vllm` of any environment: beside this Python, on
the PATH, in .engines, or --vllm. Both take turns with ours, step by step and request by request.
Without the other program, one line says so. Unless --part names them, they compare the 8B only, as
two servers start for a minute or two; its pair takes 19 GB where temporary files are kept.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING

from gpu_training import fault_of_trl, report_alignment, report_trl
from gpu_vllm import fault_of_vllm, report_vllm
from paceline.core.sampling import SamplingParams
from paceline.core.stats import DecodeStats
from paceline.data import read_prompts
from paceline.data.python_docs import write_python_docs
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.measure.latency import PassTimer
from paceline.measure.measurement import MeasureConfig, measure_models
from paceline.measure.results import gamma_of, value_of
from paceline.models import load_model, prepare_for_decoding, wrap_model
from paceline.models.checkpoint_files import auto_class
from paceline.models.drafts.layers import layer_lists, subset_layers
from paceline.models.prepare import with_cuda_graphs
from paceline.results.row import Row, Source, write_rows
from paceline.train import AlignConfig, align
from paceline.train.pretrain import PretrainConfig, pretrain
from pairing import made_prompts, paired_seconds, ratio, seconds, show
from speculative_vs_assisted import fix_block_length, transformers_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.decode.decoder import Decoder
    from paceline.models import CausalModel

PARTS = ("passes", "decoding", "static", "batches", "alignment", "trl", "vllm", "trained")
OTHERS = {"trl": fault_of_trl, "vllm": fault_of_vllm}  # why they cannot be compared with
_OTHERS_SHAPES = ("tiny", "8b")  # unless --part names them
_WANTED_TAU = 2.5
_GREEDY = SamplingParams(temperature=0.0)


class Shape(NamedTuple):
    """An architecture of transformers; the draft has the first `draft_layers` layers (0: none)."""

    architecture: str
    draft_layers: int
    settings: dict[str, Any]


def _llama(width: int, inner: int, layers: int, vocabulary: int = 128256) -> dict[str, Any]:
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    return {"vocab_size": vocabulary, **sizes, **heads}


SHAPES = {
    "tiny": Shape(
        "llama", 1, {**_llama(64, 128, 6, 512), "num_attention_heads": 2, "num_key_value_heads": 1}
    ),
    "1b": Shape("llama", 1, _llama(2048, 8192, 16)),
    "8b": Shape("llama", 2, _llama(4096, 14336, 32)),
    "moe": Shape(  # Qwen3-30B-A3B with 16 of its 48 layers
        "qwen3_moe",
        1,
        {
            **_llama(2048, 6144, 16, 151936),
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "gemma": Shape(  # Gemma 3 1B
        "gemma3_text",
        0,
        {
            **_llama(1152, 6912, 26, 262144),
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
        },
    ),
    "t5": Shape(  # Flan-T5 XL
        "t5",
        0,
        {
            "vocab_size": 32128,
            "d_model": 2048,
            "d_kv": 64,
            "d_ff": 5120,
            "num_layers": 24,
            "num_heads": 32,
            "feed_forward_proj": "gated-gelu",
            "decoder_start_token_id": 0,
        },
    ),
}
GOALS = {  # quantity: shapes (None: all), bound, whether it is a lower bound
    "share of the copy rate, 1 token": ({"1b": 0.60, "8b": 0.75}, True),
    "block of gamma + 1 tokens / pass": ({None: 1.1}, False),
    "drafted token / pass": ({"8b": 0.15}, False),
    "speedup / prediction": ({None: 0.95}, True),
    "assisted / with draft": ({"1b": 6.0, "8b": 6.0}, True),
    "generate / alone": ({"moe": 2.5, "gemma": 2.5, "t5": 2.5}, True),
    "first call, s": ({None: 30.0}, False),
    "auto / best chunk": ({None: 0.95}, True),
}


class Results:
    """Prints quantities as they come, and keeps them as rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._source = Source.here("benchmarks/gpu.py")

    def add(self, shape: str, quantity: str, value: float, shown: str = "", **setting: Any) -> None:
        """A quantity of one shape; `shown` in place of the number."""
        bounds, is_lower = GOALS.get(quantity, ({}, True))
        goal = bounds.get(shape, bounds.get(None))
        verdict = ""
        if goal is not None:
            met = value >= goal if is_lower else value <= goal
            verdict = f"   goal {'>=' if is_lower else '<='} {goal:g}: {'met' if met else 'MISSED'}"
        where = "".join(f", {name} {part}" for name, part in setting.items())
        print(f"{shape:5} {quantity}{where}: {shown or f'{value:.4g}'}{verdict}", flush=True)
        self.rows.append(
            Row(
                population="random tokens",
                units=(),
                setting={"shape": shape, **setting},
                totals={quantity: value},
                source=self._source,
            )
        )


class Pair(NamedTuple):
    """A target and its draft as transformers runs them, and as Paceline does."""

    name: str
    plain: tuple[CausalModel, CausalModel | None]
    ready: tuple[CausalModel, CausalModel | None]


def made_pair(name: str, options: argparse.Namespace, results: Results) -> Pair:
    """The pair of a shape; times the target's first call."""
    shape = SHAPES[name]
    no_ends = {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None}
    config = CONFIG_MAPPING[shape.architecture](
        **shape.settings, **no_ends, pad_token_id=None, max_position_embeddings=8192
    )
    torch.manual_seed(0)
    with torch.device(options.device):
        hf = auto_class(config).from_config(config, dtype=torch.bfloat16).eval()
    hf.get_output_embeddings().weight.data *= 8  # gives a distribution that is not nearly uniform
    target = wrap_model(hf)

    def first() -> CausalModel:
        model = with_cuda_graphs(target, compiled=options.compiled)
        AutoregressiveDecoder(model, _GREEDY).generate(made_prompts(1, 500), 2, 0, [])
        return model

    begin = time.perf_counter()
    ready = first()
    results.add(name, "first call, s", time.perf_counter() - begin)
    if not shape.draft_layers:
        return Pair(name, (target, None), (ready, None))
    draft = subset_layers(target, range(shape.draft_layers))
    fix_block_length(draft, options.gamma)
    pair = ready, with_cuda_graphs(draft, compiled=options.compiled)
    make_agree(pair, shape.draft_layers, options.gamma)
    return Pair(name, (target, draft), pair)


def make_agree(pair: tuple[CausalModel, CausalModel], kept: int, gamma: int) -> None:
    """Scale what the target's further layers add until a block emits `_WANTED_TAU` tokens."""
    outputs = [
        weight
        for layer in layer_lists(pair[0].hf)["decoder"][1][kept:]
        for name, weight in layer.named_parameters()
        if "o_proj" in name or "down_proj" in name
    ]
    decoder = SpeculativeDecoder(*pair, gamma=gamma)
    low, high, share = 0.0, 2.0, 1.0
    for _ in range(7):
        middle = (low + high) / 2
        with torch.no_grad():
            for weight in outputs:
                weight *= middle / share
        share = middle
        texts = decoder.generate(made_prompts(2, 500), 64, 0, [])
        tau = sum((text.stats for text in texts), DecodeStats()).block_efficiency
        low, high = (share, high) if tau > _WANTED_TAU else (low, share)


def copy_rate(device: str) -> float:
    """Bytes per second of a copy, read and written."""
    size = 2**30 if device != "cpu" else 2**26
    source = torch.randint(255, (size,), dtype=torch.uint8, device=device)
    goal = source.clone()
    return 2 * size * 20 / seconds(lambda: [goal.copy_(source) for _ in range(20)])


def bytes_read(model: CausalModel) -> int:
    """Bytes of weights that a pass over one token reads."""
    hf, config = model.hf, model.hf.config
    experts = sum(
        weight.nbytes for name, weight in hf.named_parameters() if ".experts." in name
    )  # of which a token reads its own
    unused = 1 - getattr(config, "num_experts_per_tok", 0) / getattr(config, "num_experts", 1)
    embeddings = hf.get_input_embeddings().weight.nbytes  # of which it reads one row
    read = sum(
        weight.nbytes for name, weight in hf.named_parameters() if not name.startswith("encoder.")
    )
    return read - embeddings - int(unused * experts)


def report_passes(pair: Pair, options: argparse.Namespace, results: Results) -> None:
    """Report passes of one token, blocks and drafted tokens."""
    target, draft = pair.ready
    rate = copy_rate(options.device)
    limit = bytes_read(target) / rate
    costs = PassTimer(
        target, draft or target, made_prompts(1, 500)[0], (1, options.gamma), _GREEDY
    ).run(20)
    results.add(pair.name, "copy rate, GB/s", rate / 1e9)
    results.add(pair.name, "weights at the copy rate, ms", 1e3 * limit)
    results.add(pair.name, "pass of one token, ms", 1e3 * costs.target_pass_s)
    results.add(pair.name, "share of the copy rate, 1 token", limit / costs.target_pass_s)
    results.add(
        pair.name,
        "block of gamma + 1 tokens / pass",
        costs.block_cost_ratio(options.gamma),
        gamma=options.gamma,
    )
    if draft is not None:
        found = costs.drafting_cost_ratio(options.gamma)
        results.add(pair.name, "drafted token / pass", found, gamma=options.gamma)


def report_decoding(pair: Pair, options: argparse.Namespace, results: Results) -> None:
    """Compare Paceline and transformers at batch size 1, with and without the draft."""
    for sampling in (_GREEDY, SamplingParams()):
        compare_decoding(pair, sampling, options, results)


def compare_decoding(
    pair: Pair, sampling: SamplingParams, options: argparse.Namespace, results: Results
) -> None:
    """`report_decoding` at one temperature."""
    target, draft = pair.ready
    prompts, length = made_prompts(options.num_prompts, target.vocab_size), options.new_tokens
    counted: list[DecodeStats] = []

    def ours(number: int, decoder: Decoder) -> None:
        (text,) = decoder.generate([prompts[number]], length, number, [])
        if isinstance(decoder, SpeculativeDecoder):
            counted.append(text.stats)

    def theirs(number: int, assistant: CausalModel | None) -> None:
        torch.manual_seed(number)
        transformers_tokens(pair.plain[0], prompts[number], length, sampling, assistant)

    methods: dict[str, Callable[[int], None]] = {
        "alone": functools.partial(ours, decoder=AutoregressiveDecoder(target, sampling)),
        "generate": functools.partial(theirs, assistant=None),
    }
    if draft is not None:
        decoder = SpeculativeDecoder(target, draft, gamma=options.gamma, sampling=sampling)
        methods["with draft"] = functools.partial(ours, decoder=decoder)
        methods["assisted"] = functools.partial(theirs, assistant=pair.plain[1])
    for run in methods.values():  # warms up and records
        run(0)
    counted.clear()
    times = paired_seconds(list(methods.values()), len(prompts))
    spent = dict(zip(methods, times, strict=True))
    at = {"temperature": sampling.temperature}
    for name, times_of in spent.items():
        results.add(pair.name, f"{name}, tokens/s", len(prompts) * length / sum(times_of), **at)
    found = ratio(spent["generate"], spent["alone"])
    results.add(pair.name, "generate / alone", found.value, show(found), **at)
    if draft is None:
        return
    found = ratio(spent["assisted"], spent["with draft"])
    results.add(pair.name, "assisted / with draft", found.value, show(found), **at)
    speedup = ratio(spent["alone"], spent["with draft"])
    results.add(pair.name, "speedup", speedup.value, show(speedup), **at)
    tau = sum(counted, DecodeStats()).block_efficiency
    results.add(pair.name, "block efficiency", tau, **at)
    costs = PassTimer(target, draft, prompts[0], (options.gamma,), sampling).run(20)
    predicted = tau * costs.target_pass_s / costs.block_s(options.gamma)
    results.add(pair.name, "speedup / prediction", speedup.value / predicted, **at)


def report_static(pair: Pair, options: argparse.Namespace, results: Results) -> None:
    """Time transformers' generate with a static cache, which it compiles."""
    hf = pair.plain[0].hf
    (prompt,) = made_prompts(1, pair.plain[0].vocab_size)
    tokens = torch.tensor([prompt], device=hf.device)
    given = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": options.new_tokens}
    run = functools.partial(
        hf.generate, tokens, **given, eos_token_id=None, cache_implementation="static"
    )
    results.add(pair.name, "static cache, first call, s", seconds(run))
    run()
    rate = options.new_tokens / min(seconds(run) for _ in range(2))
    results.add(pair.name, "static cache, tokens/s", rate)
    torch._dynamo.reset()


def report_batches(pair: Pair, options: argparse.Namespace, results: Results) -> None:
    """Report tokens per second of the whole batch for each batch size."""
    target, draft = pair.ready
    decoders: dict[str, Decoder] = {"alone": AutoregressiveDecoder(target)}
    if draft is not None:
        decoders["with draft"] = SpeculativeDecoder(target, draft, gamma=options.gamma)
    for name, decoder in decoders.items():
        for batch in options.batches:
            prompts = made_prompts(batch, target.vocab_size)
            run = functools.partial(decoder.generate, prompts, options.new_tokens, 0, [])
            run()  # records
            rate = batch * options.new_tokens / seconds(run)
            results.add(pair.name, f"{name}, tokens/s", rate, batch=batch)


def report_trained(options: argparse.Namespace, results: Results, folder: Path) -> None:
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
        sampling = SamplingParams(temperature=temperature)
        config = MeasureConfig(
            target=model,
            draft="aligned",
            prompts=str(docs.held_out),
            sampling=sampling,
            max_new_tokens=options.new_tokens,
        )
        found = measure_models(*pair, prompts, config)
        at = {"temperature": temperature}
        acceptance = found.figure("expected_acceptance")
        results.add("train", "acceptance", acceptance.value, str(acceptance), **at)
        assert found.requests is not None, "requests are timed by default"
        gamma = gamma_of(found.requests)
        for name in ("cost_ratio", "block_efficiency", "speedup", "engine_efficiency"):
            value = value_of(found.requests, name)
            assert value is not None, "a row of requests has it"
            results.add("train", name, value, gamma=gamma, **at)


def report_shape(
    shape: str, parts: list[str], options: argparse.Namespace, results: Results
) -> bool:
    """Report these parts, as far as the shape has them; False if one failed."""
    pair, done = made_pair(shape, options, results), True
    for part in parts:
        other = part in OTHERS
        if pair.plain[1] is None and (other or part == "alignment"):
            continue
        if other and options.part is None and shape not in _OTHERS_SHAPES:
            continue
        try:
            REPORTS[part](pair, options, results)
        except Exception as error:  # a machine may be lent for minutes: the other parts go on
            done = False
            print(f"{shape:5} {part}: {type(error).__name__}: {error}", flush=True)
            if not other:
                traceback.print_exc()
        if options.rows:
            write_rows(options.rows, results.rows)
    return done


REPORTS = {
    "passes": report_passes,
    "decoding": report_decoding,
    "batches": report_batches,
    "alignment": report_alignment,
    "trl": report_trl,
    "vllm": report_vllm,
    # last: transformers' graphs clear workspaces that our recorded passes use
    "static": report_static,
}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=[*SHAPES][1:])
    parser.add_argument("--part", nargs="+", choices=PARTS, help="default: all")
    parser.add_argument("--rows", type=Path, help="file of result rows to write")
    parser.add_argument("--no-compile", dest="compiled", action="store_false")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--batch-rows", type=int, default=16, help="rows of an alignment step")
    parser.add_argument("--length", type=int, default=512, help="tokens of such a row")
    parser.add_argument("--vllm", metavar="PROGRAM", help="default: beside Python, PATH, .engines")
    parser.add_argument("--train-seconds", type=float, nargs=3, default=[35, 15, 25])
    return parser.parse_args()


def main() -> None:
    options = read_options()
    name = "CPU" if options.device == "cpu" else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}", flush=True)
    results, begin, done = Results(), time.perf_counter(), True
    wanted = options.part or PARTS
    parts = [part for part in REPORTS if part in wanted]
    for part in [part for part in parts if part in OTHERS]:
        if fault := OTHERS[part](options):
            print(f"{part}: {fault}", flush=True)
            parts.remove(part)
    for shape in options.shapes if parts else ():
        done &= report_shape(shape, parts, options, results)
        gc.collect()  # frees CUDA graphs before the next ones are captured
        print(f"({time.perf_counter() - begin:.0f} s)", flush=True)
    if "trained" in wanted:
        with tempfile.TemporaryDirectory() as folder:
            report_trained(options, results, Path(folder))
    if options.rows:
        write_rows(options.rows, results.rows)
    print(f"{time.perf_counter() - begin:.0f} s")
    sys.exit(int(not done))


if __name__ == "__main__":
    main()

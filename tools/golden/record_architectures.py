"""Compares texts of every text model class of transformers with those of `generate`.

    .venv/bin/python tools/golden/record_architectures.py            # writes docs/architectures.md
    .venv/bin/python tools/golden/record_architectures.py --check    # fails if a row has changed
    .venv/bin/python tools/golden/record_architectures.py llama t5   # prints the rows of these

Each class is built from its default configuration, with small sizes and random weights in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

import paceline  # noqa: F401 - before torch, whose libraries PACELINE_CPU limits

# isort: split
import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from paceline.core.sampling import SamplingParams
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.errors import UnsupportedModelError
from paceline.models import HfModel, wrap_model
from paceline.models.admission.model import EXACT, twin_of
from paceline.models.admission.trial import Comparison, plain_logits
from paceline.models.admission.twin import tiny_twin
from paceline.models.contract import Texts
from paceline.models.hf.base import evaluating

DOCUMENT = Path(__file__).parents[2] / "docs" / "architectures.md"
NUM_NEW = 24  # tokens: longer than every window and original length of a tiny model
GAMMAS = (1, 4)
PROMPT_LENGTHS = (7, 2, 12)
_SOURCE = (5, 9, 7)
NOISE = 0.1  # of a draft, in standard deviations of its weights
_TIE = 1e-4  # logits that are nearer than this may swap by rounding
_GREEDY = SamplingParams(temperature=0)

EQUAL = {
    "batch": "equal",
    "rows": "equal, one text at a time",
    "recurrent": "equal, by snapshots",
    "stateful": "equal, by snapshots, token by token",
}
WITHOUT_CACHE = "equal to generate() without a cache"
AMBIGUOUS = "transformers differs from itself"

# settings of checkpoints, where the defaults of a class do not fit each other
_OVERRIDES: dict[str, dict[str, Any]] = {
    **{name: {"head_dim": 128} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "bamba": {"attn_layer_indices": [1, 9]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 20,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": None,
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    **{name: {"layer_types": ["conv", "full_attention"] * 16} for name in ("lfm2", "lfm2_moe")},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256,
        "indexer_budget": 2048, "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip


class Row(NamedTuple):
    """One row of the table; `result` is one of EQUAL, or else says why not."""

    model_type: str
    class_name: str
    result: str

    @property
    def kind(self) -> str:
        """The result without a reason."""
        return self.result.partition(":")[0]


class Architecture(NamedTuple):
    """A class of transformers."""

    model_type: str
    encoder_decoder: bool = False

    @property
    def class_name(self) -> str:
        return _classes(self.encoder_decoder)[self.model_type]

    def in_full_size(self) -> Any:
        """The model with the settings of its class, without memory for its weights."""
        config: Any = CONFIG_MAPPING[self.model_type](**_OVERRIDES.get(self.model_type, {}))
        if not self.encoder_decoder and getattr(config, "is_decoder", None) is False:
            config.is_decoder, config.is_encoder_decoder = True, False
        kind = AutoModelForSeq2SeqLM if self.encoder_decoder else AutoModelForCausalLM
        with torch.device("meta"):
            return kind.from_config(config)

    def row(self, num_new: int = NUM_NEW, gammas: tuple[int, ...] = GAMMAS) -> Row:
        """What comes out, with other weights if a text has near ties."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for seed in (0, 2, 4, 6):
                result = self._result(seed, num_new, gammas)
                if result is not None:
                    break
            else:
                result = "no tiny configuration: its texts have near ties"
        return Row(self.model_type, self.class_name, result)

    def _result(self, seed: int, num_new: int, gammas: tuple[int, ...]) -> str | None:
        """None if a text differs at a near tie."""
        try:
            shell = self.in_full_size()
        except Exception as error:  # classes check their configurations in many ways
            return f"no tiny configuration: {_line(error)}"
        models: list[Any] = [tiny_twin(shell, seed=seed) for _ in range(2)]
        if None in models:
            return "no tiny configuration: no small sizes that fit each other were found"
        add_noise(models[1], seed)
        for hf in models:
            hf.generation_config = _plain_settings(hf)
        try:
            prompt = (2,) if shell.config.is_encoder_decoder else None
            target, draft = (wrap_model(hf, decoder_prompt=prompt) for hf in models)
        except UnsupportedModelError as error:
            reason = re.search(r"whole text \((.*)\); choose", str(error))
            return f"refused: {reason[1] if reason else error}"
        difference = _difference_of_reference(target)
        if difference is not None:
            return f"{AMBIGUOUS}: {difference}"
        return _compared(target, draft, num_new, gammas)


@torch.no_grad()
def add_noise(hf: Any, seed: int) -> None:
    """Change the matrices a little, so that the model agrees with its copy on some tokens."""
    rng = torch.Generator().manual_seed(seed)
    for weight in hf.parameters():
        if weight.is_floating_point() and weight.ndim > 1:
            weight += NOISE * weight.std() * torch.randn(weight.shape, generator=rng)


def architectures() -> list[Architecture]:
    """All decoder-only and encoder-decoder classes of this version of transformers."""
    return [
        Architecture(name, encoder_decoder)
        for encoder_decoder in (False, True)
        for name in sorted(_classes(encoder_decoder))
    ]


def _classes(encoder_decoder: bool) -> dict[str, str]:
    """Names of classes by model type. Some models are listed as both kinds: decoder-only."""
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not encoder_decoder:
        return dict(causal)
    found: Any = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    return {name: kind for name, kind in found.items() if causal.get(name) != kind}


def _plain_settings(hf: Any) -> GenerationConfig:
    return GenerationConfig(
        pad_token_id=0, decoder_start_token_id=2 if hf.config.is_encoder_decoder else None
    )


def _compared(target: HfModel, draft: HfModel, num_new: int, gammas: tuple[int, ...]) -> str | None:
    rng = torch.Generator().manual_seed(0)
    high = min(96, target.vocab_size)
    prompts = [torch.randint(4, high, (n,), generator=rng).tolist() for n in PROMPT_LENGTHS]
    # generate() of Phi drops its cache at the original length
    original = getattr(target.hf.config, "original_max_position_embeddings", None)
    limits = [limit for limit in (target.max_length, original) if limit is not None]
    room = min([num_new, *(limit - max(PROMPT_LENGTHS) - max(gammas) for limit in limits)])
    try:
        wanted = [_generated(target, prompt, room) for prompt in prompts]
    except Exception as error:  # models raise whatever they raise
        return f"no tiny configuration: generate() fails: {_line(error)}"
    result = EQUAL[target.sessions]
    if getattr(target.hf.config, "sliding_window", None):
        alone = [_generated(target, prompt, room, use_cache=False) for prompt in prompts]
        if [text for text, _ in alone] != [text for text, _ in wanted]:
            result, wanted = WITHOUT_CACHE, alone
    for name, texts in _decoded(target, draft, prompts, room, gammas):
        for prompt, (text, gaps), got in zip(prompts, wanted, texts, strict=True):
            if got == text:
                continue
            place = next(i for i, (a, b) in enumerate(zip(text, got, strict=True)) if a != b)
            if gaps[place] < _TIE:
                return None
            return f"wrong: {name} differs from generate() at token {place}, prompt {len(prompt)}"
    return result


@torch.inference_mode()
def _difference_of_reference(target: HfModel) -> str | None:
    """Where transformers gives other logits for a text that it reads in another way, in words."""
    twin: Any = twin_of(target)
    text = [*(twin.decoder_prompt or ()), *range(4, 22)][: twin.max_length]
    whole_TV = plain_logits(twin, text, _SOURCE)
    found = Comparison()
    found.add(whole_TV[:9], plain_logits(twin, text[:9], _SOURCE), "without the end of a text")
    masked_TV = _masked_logits(twin, text)
    found.add(whole_TV, masked_TV, "with an attention mask of ones, as generate() reads a text")
    placed_TV = _placed_logits(twin, text)
    found.add(whole_TV, placed_TV, "with the positions that generate() gives to a text")
    with contextlib.suppress(AttributeError, ImportError, ValueError):  # it has no other attention
        twin.hf.set_attn_implementation("eager")
        found.add(whole_TV, plain_logits(twin, text, _SOURCE), "with eager attention")
    if found.largest <= EXACT:
        return None
    return f"logits differ by {found.largest:.2g} deviations {found.where}"


def _masked_logits(model: HfModel, text: list[int]) -> torch.Tensor:
    batch = model.trial_batch(text[len(model.decoder_prompt or ()) :], _SOURCE)
    batch = Texts(batch.tokens_BT, torch.ones_like(batch.tokens_BT), batch.source)
    with evaluating(model.hf):
        return model.plain_logits(batch)[0, :, : model.vocab_size].float()


def _placed_logits(model: HfModel, text: list[int]) -> torch.Tensor:
    """RoBERTa numbers tokens from 2 on, and generate() gives it positions from 0 on."""
    hf: Any = model.hf
    takes = "position_ids" in inspect.signature(hf.forward).parameters
    if model.decoder_prompt is not None or not takes:
        return plain_logits(model, text, _SOURCE)
    tokens_1T = torch.tensor([text])
    masked = {"attention_mask": torch.ones_like(tokens_1T)}
    positions = hf._prepare_position_ids_for_generation(tokens_1T, masked)
    logits = hf(tokens_1T, **masked, position_ids=positions, use_cache=False).logits
    return logits[0, :, : model.vocab_size].float()


def _decoded(
    target: HfModel,
    draft: HfModel,
    prompts: list[list[int]],
    room: int,
    gammas: tuple[int, ...],
) -> Any:
    """Texts of each decoder: one at a time, and in a batch of rows that differ in length."""
    decoders: dict[str, Any] = {"plain decoding": AutoregressiveDecoder(target, _GREEDY)}
    for gamma in gammas:
        decoder = SpeculativeDecoder(target, draft, gamma=gamma, sampling=_GREEDY)
        decoders[f"gamma {gamma}"] = decoder
    for name, decoder in decoders.items():
        for size in (1, None):
            found = decoder.generate(prompts, room, eos_token_ids=(), batch_size=size)
            yield f"{name}, batch {size or len(prompts)}", [each.tokens for each in found]


@torch.inference_mode()
def _generated(
    target: HfModel, prompt: list[int], room: int, *, use_cache: bool = True
) -> tuple[list[int], list[float]]:
    """The text of greedy generate() for this prompt alone; gaps between its two best logits."""
    hf: Any = target.hf
    inputs = {"input_ids": torch.tensor([prompt])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if target.decoder_prompt is not None:
        inputs["decoder_input_ids"] = torch.tensor([target.decoder_prompt])
    found = hf.generate(
        **inputs,
        max_new_tokens=room,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        use_cache=use_cache,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = [logits_1V.float().topk(2).values[0] for logits_1V in found.logits]
    gaps = [float(first - second) for first, second in best]
    return found.sequences[0, -room:].tolist(), gaps


def _line(error: Exception) -> str:
    words = " ".join(str(error).split()).replace("|", "/")
    return f"{type(error).__name__}: {words if len(words) <= 120 else words[:117] + '...'}"


def recorded() -> list[Row]:
    """The rows of the document."""
    lines = DOCUMENT.read_text("utf-8").splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    return [Row(name.strip("`"), kind.strip("`"), result) for name, kind, result in cells]


def document(rows: list[Row]) -> str:
    others = _classes(True).items()
    parts = {
        "Decoder-only": [row for row in rows if row[:2] not in others],
        "Encoder-decoder, or audio": [row for row in rows if row[:2] in others],
    }
    text = _HEAD.format(transformers=transformers.__version__, torch=torch.__version__)
    kinds = [*dict.fromkeys(EQUAL.values()), WITHOUT_CACHE, AMBIGUOUS]
    kinds += ["refused", "no tiny configuration"]
    text += f"\n| result | {' | '.join(parts)} |\n|---|---|---|\n"
    for kind in kinds:
        counts = [sum(row.kind == kind for row in part) for part in parts.values()]
        text += f"| {kind} | {' | '.join(map(str, counts))} |\n"
    for title, part in parts.items():
        text += f"\n## {title}\n\n| model type | class | result |\n|---|---|---|\n"
        text += "".join(f"| `{row[0]}` | `{row[1]}` | {row[2]} |\n" for row in part)
    return text


_HEAD = """# Architectures

Greedy texts of Paceline compared with those of `generate`, for every decoder-only and
encoder-decoder class of transformers {transformers}, with torch {torch}. This page is generated:

<!-- not run: builds every class of transformers -->
```
.venv/bin/python tools/golden/record_architectures.py            # writes this page
.venv/bin/python tools/golden/record_architectures.py --check    # fails if a row has changed
.venv/bin/python tools/golden/record_architectures.py llama t5   # prints the rows of these classes
```

Each class is built from its default configuration with small sizes, short windows and random
weights in float32. Prompts have 7, 2 and 12 tokens, texts 24 new tokens. A text must equal that of
`generate` for its prompt alone: plain decoding and speculative decoding with gamma 1 and 4, for
each prompt alone and for all in one batch. The draft is the same model with noise in its weights,
so that it is right about a part of the tokens.

- **equal**: all texts are equal.
- **equal, one text at a time**: the same, but rows of a batch run one after the other.
- **equal, by snapshots**: the same, one text at a time. The model keeps a state that cannot be cut,
  so a session goes on from a copy of it after a rejection ([hybrids](guides/hybrids.md)).
- **equal, by snapshots, token by token**: the same. This class of transformers reads one token at a
  time once it has a state, so a block takes as many passes as plain decoding, and no draft pays.
- **equal to generate() without a cache**: the cache of `generate` has a window that the model's
  pass does not have, so the reference is `generate(use_cache=False)`.
- **transformers differs from itself**: it gives other logits for the beginning of a text alone,
  with the mask or the positions of `generate`, or with eager attention. Such a model can be loaded.
  Its texts are those of the pass over the whole text, without mask and positions.
- **refused**: no kind of session gives the logits of transformers' pass over the whole text, so
  loading the model is an error that says why.
- **no tiny configuration**: the class was not tested, because it reads images or audio, or because
  no small model of it could be built.

Classes for masked language models are tested as decoders (`is_decoder`).
"""


def _check(rows: list[Row]) -> int:
    """Compare with the document, without the words of a reason; the number of changed rows."""
    before = {row[:2]: row.kind for row in recorded()}
    changed = [row for row in rows if before.get(row[:2]) != row.kind]
    for row in changed:
        print(f"{row.model_type} {row.class_name}: {before.get(row[:2])} -> {row.result}")
    return len(changed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="model types; none: all, written to the document")
    parser.add_argument("--check", action="store_true", help="compare with the document")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["PACELINE_CACHE"] = tempfile.mkdtemp()  # nothing is recalled
    rows: list[Row] = []
    for each in architectures():
        if not chosen.names or each.model_type in chosen.names:
            rows.append(each.row())
            print(*rows[-1], sep=" | ", flush=True)
    if chosen.check:
        sys.exit(1 if _check(rows) else 0)
    if not chosen.names:
        DOCUMENT.write_text(document(rows), "utf-8")


if __name__ == "__main__":
    main()

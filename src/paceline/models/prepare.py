"""Chooses a faster forward pass for a model, and compares it with transformers before using it.

This is the only module that imports all implementations of models/contract.py.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from paceline.errors import UsageError
from paceline.models.admission.model import (
    EXACT,
    ROUNDED,
    faster,
    hidden_states_fault,
    tolerance_for,
)
from paceline.models.hf.base import warn_of_slower
from paceline.models.hf.causal import CausalSession
from paceline.models.hf.spreading import is_spread
from paceline.models.llama import packing
from paceline.models.llama.cpu import NativeLlama
from paceline.models.llama.cpu_session import CompiledSession
from paceline.models.llama.cpu_weights import can_copy
from paceline.models.llama.forward import LlamaDecoder
from paceline.models.llama.int8 import rounded_copy
from paceline.models.llama.packing import Packer, bfloat16_product, can_pack
from paceline.models.loading import load_model
from paceline.models.precision import (
    Choice,
    choose_precision,
    faster_of,
    fastest_of,
    overridden,
    shapes_of,
)
from paceline.models.recorded.compiling import compiles_passes
from paceline.models.recorded.fixed_pass import FixedPass, can_record
from paceline.models.recorded.session import GraphCaches, GraphSession
from paceline.models.t5 import T5Pass, T5States, is_t5_like

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.models.contract import ModelSession
    from paceline.models.hf.base import HfModel
    from paceline.models.llama.forward import MakeLinear
    from paceline.models.loading import DType

Weights = Literal["auto", "plain", "packed_fp16", "int8"]


def load(
    path: str | Path,
    dtype: DType | torch.dtype = "auto",
    device: str = "auto",
    weights: Weights = "auto",
) -> HfModel:
    """Load a model with its tokenizer, ready for decoding.

    `load_model`, then `prepare_for_decoding`; see there for the arguments and errors.
    """
    return prepare_for_decoding(load_model(path, dtype, device), weights)


def prepare_for_decoding(
    model: HfModel,
    weights: Weights = "auto",
    activations: Literal["float32", "bfloat16"] = "float32",
) -> HfModel:
    """Optimize a model for forward passes over few tokens on this machine.

    On an x86 CPU, the matrices of a float32 model are copied to float16 (see llama/packing.py). If
    bfloat16 represents them exactly, they are also copied for a compiled pass (see llama/cpu.py);
    all other values are then float32. On a CUDA device, passes of a decoder-only model over few
    tokens are compiled, recorded and replayed as CUDA graphs (see recorded/). Later changes of the
    weights do not affect the copies; `hf`, hidden states and the head do not change.

    Args:
        model: The values of its weights do not change.
        weights: "auto" packs matrices that float16 represents exactly, such as those of a 16-bit
            checkpoint; "packed_fp16" also rounds the others; "plain" changes nothing. "int8" rounds
            all linear layers to 8 bits per weight, also in the result's `hf`; use it for drafts.
        activations: "bfloat16" rounds matmul inputs of a bfloat16 model to bfloat16, as
            transformers does. This is up to twice as fast for large batches on a processor with
            native bfloat16, and has no effect elsewhere.

    Raises:
        UsageError: "packed_fp16" or "int8" is not supported for this model on this machine.
    """
    if weights == "int8":
        return _in_int8(model)
    on_cpu = _on_cpu(model)
    if weights == "packed_fp16" and not (on_cpu and model.dtype == torch.float32 and can_pack()):
        raise UsageError(
            f"packed_fp16 weights need float32 on an x86 CPU, but the model is {_dtype_of(model)} "
            f"on {model.device}; use weights=auto"
        )
    if weights == "plain":
        return model
    if model.device.type == "cuda":
        return with_cuda_graphs(model, compiled=compiles_passes())
    if on_cpu and model.dtype == torch.bfloat16:
        return _in_bfloat16(model, round_activations=activations == "bfloat16")
    if on_cpu and model.dtype == torch.float32 and can_pack():
        return _packed(model, exact=weights == "auto")
    return model


def prepare_for_training(model: HfModel, *, frozen: bool = False) -> HfModel:
    """Use faster code for the hidden states of a T5-like model on a CPU; return others unchanged.

    Args:
        model: Its weights are shared, so the result follows their changes.
        frozen: The weights do not change, as those of a target.
    """
    if not _on_cpu(model) or not is_t5_like(model.hf):
        return model
    ready = model.reading_with(T5States(model.hf, frozen=frozen))
    fault = hidden_states_fault(model, ready)
    if fault is not None:
        fault = f"the fused training pass {fault}"
        warn_of_slower(model.hf.config.model_type, fault, stacklevel=3)
        return model
    return ready


def with_cuda_graphs(model: HfModel, *, compiled: bool = False) -> HfModel:
    """Record the passes of a decoder-only model over few tokens (see recorded/).

    A model whose passes cannot be recorded is returned unchanged. Weights that are multiplied
    together become views of one tensor, also in `hf`.

    Args:
        model: On a CUDA device; elsewhere nothing is recorded, but the code is the same.
        compiled: Also compile them, by torch.compile, on first use.
    """
    if not can_record(model):
        return model

    def build(each: HfModel, *, compiled: bool = False, falls_back: bool = False) -> HfModel:
        passes = FixedPass(each, compiled=compiled)
        # a twin shows what is computed, and takes no memory for graphs
        caches = GraphCaches(passes, records=each is model, falls_back=falls_back)
        return each.decoding_with(passes, partial(_start_graphs, caches))

    # the trial compiles nothing: a compiled pass is compared with the same pass on first use
    tolerance = tolerance_for(model.dtype)
    checked = faster(model, "the recorded pass", tolerance, build, of_twin=EXACT)
    # new caches, without the recordings of the trial
    return model if checked is None else build(model, compiled=compiled, falls_back=True)


def describe_pass(model: HfModel) -> str:
    """The forward pass that a model decodes with, in words."""
    decoder: Any = model.decoder
    session = type(model.start_session())
    if issubclass(session, GraphSession):
        compiled = ", compiled by torch.compile" if decoder.modules.usable else ""
        return f"recorded CUDA graphs{compiled}"
    if session is CompiledSession:
        return "the compiled pass for few tokens (C), the fused pass for more"
    if isinstance(decoder, LlamaDecoder | T5Pass):
        return "the fused pass (PyTorch)"
    packed = "" if decoder.hf is model.hf else ", with matrices in float16"
    return f"that of transformers{packed}"


def can_read_int8(model: HfModel) -> bool:
    """True if `prepare_for_decoding` supports weights="int8" for this model on this machine."""
    possible = _on_cpu(model) and can_pack()
    return possible and LlamaDecoder.supports(model.hf) and can_copy(model.hf, int8=True)


def _packed(model: HfModel, *, exact: bool) -> HfModel:
    def build(each: HfModel) -> HfModel:
        packer = Packer(packing.EXACT if exact else packing.ROUNDED)
        if LlamaDecoder.supports(each.hf):
            prepared = _with_llama(each, LlamaDecoder(each.hf, packer, each.draft_vocabulary))
        elif is_t5_like(each.hf):
            prepared = _with_t5(each, packer)
        else:
            copy = packing.packed_copy(each.hf, packer)
            prepared = each.decoding_with(each.plain_pass(copy, each.draft_vocabulary))
        return prepared if packer.num_packed or is_t5_like(each.hf) else each

    tolerance = EXACT if exact else ROUNDED
    return faster(model, "the pass with packed weights", tolerance, build) or model


def _in_bfloat16(model: HfModel, *, round_activations: bool) -> HfModel:
    if is_t5_like(model.hf):
        return _t5_in_bfloat16(model, round_activations=round_activations)
    if not LlamaDecoder.supports(model.hf):
        return model
    chosen = choose_precision("decoding", shapes_of(model.hf.config), model.device)
    if chosen.precision == "bfloat16":
        make_linear, change = bfloat16_product, 0.05
    elif can_pack():
        make_linear, change = Packer(packing.EXACT), 0.05 if round_activations else 1e-3
    else:
        return model

    def build(each: HfModel) -> HfModel:
        decoder = LlamaDecoder(
            each.hf,
            make_linear,
            each.draft_vocabulary,
            change=change,
            round_activations=round_activations,
        )
        return _with_llama(each, decoder)

    variant = f"{chosen.precision} {round_activations}"
    return faster(model, "the fused pass", ROUNDED, build, variant) or model


def _t5_in_bfloat16(model: HfModel, *, round_activations: bool) -> HfModel:
    # rounding the inputs of small products takes longer than it saves
    in_float32 = can_pack() and not round_activations
    make_linear = Packer(packing.EXACT) if in_float32 else bfloat16_product
    build = partial(_with_t5, make_linear=make_linear)
    return faster(model, "the fused pass", ROUNDED, build, f"T5 {in_float32}") or model


def _with_t5(model: HfModel, make_linear: MakeLinear) -> HfModel:
    return model.decoding_with(T5Pass(model.hf, make_linear, model.draft_vocabulary))


def _in_int8(model: HfModel) -> HfModel:
    if can_read_int8(model):
        prepared = faster(model, "the pass with 8-bit weights", ROUNDED, _rounded_to_int8)
        if prepared is not None and prepared is not model:
            return prepared
    raise UsageError(
        f"int8 weights need a Llama-like model on an x86 CPU and a C compiler, but this is a "
        f"{model.hf.config.model_type} in {_dtype_of(model)} on {model.device}; use weights=auto"
    )


def _rounded_to_int8(model: HfModel) -> HfModel:
    """The model with 8-bit weights; unchanged if there is no compiled pass for it."""
    rounded = rounded_copy(model.hf)
    packer = Packer(packing.EXACT)
    decoder = LlamaDecoder(rounded, packer, model.draft_vocabulary, int8_of=model.hf)
    if decoder.native is None:
        return model
    prepared = _with_llama(model.rewrap(rounded, model.draft_vocabulary), decoder)
    prepared.num_parameters = model.num_parameters  # rounding unties a tied head
    return prepared


def _with_llama(model: HfModel, decoder: LlamaDecoder) -> HfModel:
    if decoder.native is None or model.banned_K is not None:  # compiled passes know no bans
        return model.decoding_with(decoder, CausalSession)
    return model.decoding_with(decoder, partial(CompiledSession, native=decoder.native))


def _start_graphs(caches: GraphCaches, model: HfModel) -> ModelSession:
    if caches.passes.listening:  # a replayed graph does not call listeners
        return model.session_kinds["batch"](model)
    return GraphSession(caches, model.vocab_size, model.max_length)


def _on_cpu(model: HfModel) -> bool:
    """Whether all of it is there; a model with hooks may be on several devices."""
    return model.device.type == "cpu" and not is_spread(model.hf)


def _dtype_of(model: HfModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def training_writer(model: HfModel, *, bfloat16: bool = True) -> HfModel:
    """A model for generation in training: a session uses the weights at the time it starts.

    A T5 is copied for its fused pass, in float32. With `bfloat16`, passes of a Llama-like model
    over few tokens use a compiled copy in bfloat16; prompts are processed by the model itself.
    Copies are released with the session, because the training step needs the memory. Other models
    are returned unchanged.
    """
    if _on_cpu(model) and model.dtype == torch.float32 and is_t5_like(model.hf):
        # no rounding: weights in training are not those of a 16-bit checkpoint
        build = partial(_with_t5, make_linear=Packer(packing.EXACT))
        name, tolerance = "the fused copy of a model in training", EXACT
    elif bfloat16 and _can_compile_copies(model):
        build, name, tolerance = _compiled_copy, "the compiled copy of a model in training", ROUNDED
    else:
        return model

    @cache
    def is_right() -> bool:
        return faster(model, name, tolerance, build) is not None

    def start(_writer: HfModel) -> ModelSession:
        return (build(model) if is_right() else model).start_session()

    return model.decoding_with(model.decoder, start)


def _can_compile_copies(model: HfModel) -> bool:
    possible = _on_cpu(model) and model.banned_K is None
    return possible and LlamaDecoder.supports(model.hf) and can_copy(model.hf, in_training=True)


def _compiled_copy(model: HfModel) -> HfModel:
    native = NativeLlama(model.hf, model.draft_vocabulary)
    plain = model.plain_pass(model.hf, model.draft_vocabulary)
    return model.decoding_with(plain, partial(CompiledSession, native=native))


def choose_writer(model: HfModel, num_rows: int) -> Choice:
    """Whether generation is faster with bfloat16 copies of the model or with the model in float32.

    Measured with one token per row, unless `PACELINE_PRECISION` is set.
    """
    override = overridden()
    if override is not None:
        return override
    if not _can_compile_copies(model):
        return Choice("float32", f"there is no compiled pass for this {model.hf.config.model_type}")
    tokens_B1 = torch.zeros(num_rows, 1, dtype=torch.int64)
    sessions = {
        "float32": model.start_session(),
        "bfloat16": training_writer(model).start_session(),
    }
    for session in sessions.values():
        session.prefill(tokens_B1.tolist())
    passes = {name: partial(session.extend, tokens_B1) for name, session in sessions.items()}
    return faster_of(fastest_of(passes), f"generating {num_rows} rows")

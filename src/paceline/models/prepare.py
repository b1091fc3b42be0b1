"""Chooses a faster forward pass for a model, and compares it with transformers before using it.

This is the only module that imports all implementations of models/contract.py.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from paceline.errors import UsageError
from paceline.models.admission.model import EXACT, ROUNDED, faster, tolerance_for
from paceline.models.hf.spreading import is_spread
from paceline.models.llama.cpu import CompiledSession, NativeLlama, PromptPass
from paceline.models.llama.cpu_weights import can_copy, is_llama_like, rounded_copy
from paceline.models.loading import load_model
from paceline.models.recorded.compiling import compiles_passes
from paceline.models.recorded.fixed_pass import FixedPass, can_record
from paceline.models.recorded.session import GraphCaches, GraphSession
from paceline.models.t5 import T5Pass, is_t5_like

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.models.contract import ModelSession
    from paceline.models.hf.base import HfModel
    from paceline.models.loading import DType

Weights = Literal["auto", "plain", "int8"]


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

    On a CPU, the weights of a Llama-like model are copied for a compiled pass (see llama/cpu.py),
    if bfloat16 represents them exactly; all other values are then float32. On a CUDA device, passes
    of a decoder-only model over few tokens are compiled, recorded and replayed as CUDA graphs (see
    recorded/). Later changes of the weights do not affect the copies; `hf`, hidden states and the
    head do not change.

    Args:
        model: The values of its weights do not change.
        weights: "plain" changes nothing. "int8" rounds all linear layers to 8 bits per weight, also
            in the result's `hf`; use it for drafts.
        activations: "bfloat16" rounds matmul inputs of a bfloat16 model to bfloat16, as
            transformers does. This is up to twice as fast for large batches on a processor with
            native bfloat16, and has no effect elsewhere.

    Raises:
        UsageError: "int8" is not supported for this model on this machine.
    """
    if weights == "int8":
        return _in_int8(model)
    if weights == "plain":
        return model
    if model.device.type == "cuda":
        return with_cuda_graphs(model, compiled=compiles_passes())
    if not _on_cpu(model) or model.dtype not in (torch.float32, torch.bfloat16):
        return model
    if is_t5_like(model.hf):
        return faster(model, "the fused pass", tolerance_for(model.dtype), _with_t5) or model
    rounds = activations == "bfloat16" and model.dtype == torch.bfloat16
    return _in_c(model, round_activations=rounds)


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
        return "the compiled pass for few tokens (C), that of transformers for more"
    if isinstance(decoder, T5Pass):
        return "the fused pass (PyTorch)"
    return "that of transformers"


def _in_c(model: HfModel, *, round_activations: bool) -> HfModel:
    if not _can_compile(model):
        return model

    def build(each: HfModel) -> HfModel:
        if not can_copy(each.hf):  # the sizes of the tiny twin may not be supported
            return each
        restricted = each.draft_vocabulary
        native = NativeLlama(each.hf, restricted, round_activations=round_activations)
        return _with_native(each, native)

    name = "the compiled pass" + " with rounded activations" * round_activations
    return faster(model, name, tolerance_for(model.dtype), build) or model


def _with_t5(model: HfModel) -> HfModel:
    return model.decoding_with(T5Pass(model.hf, model.draft_vocabulary))


def _in_int8(model: HfModel) -> HfModel:
    if _on_cpu(model) and is_llama_like(model.hf) and can_copy(model.hf, int8=True):
        prepared = faster(model, "the pass with 8-bit weights", ROUNDED, _rounded_to_int8)
        if prepared is not None and prepared is not model:
            return prepared
    raise UsageError(
        "int8 weights need a Llama-like model on a CPU whose embeddings bfloat16 holds (store it "
        "in bfloat16, or --set dtype=bfloat16), and a C compiler or paceline-kernels, but this is "
        f"a {model.hf.config.model_type} in {model.dtype} on {model.device}; use "
        "weights=auto"
    )


def _rounded_to_int8(model: HfModel) -> HfModel:
    """The model with 8-bit weights; unchanged if there is no compiled pass for it."""
    if not can_copy(model.hf, int8=True):
        return model
    prepared = model.rewrap(rounded_copy(model.hf), model.draft_vocabulary)
    prepared.num_parameters = model.num_parameters  # rounding unties a tied head
    return _with_native(prepared, NativeLlama(model.hf, model.draft_vocabulary, int8=True))


def _with_native(model: HfModel, native: NativeLlama) -> HfModel:
    if model.banned_K is not None:  # compiled passes know no bans
        return model
    decoder = PromptPass(model.hf, model.draft_vocabulary, native)
    return model.decoding_with(decoder, partial(CompiledSession, native=native))


def _start_graphs(caches: GraphCaches, model: HfModel) -> ModelSession:
    if caches.passes.listening:  # a replayed graph does not call listeners
        return model.session_kinds["batch"](model)
    return GraphSession(caches, model.vocab_size, model.max_length)


def _on_cpu(model: HfModel) -> bool:
    """Whether all of it is there; a model with hooks may be on several devices."""
    return model.device.type == "cpu" and not is_spread(model.hf)


def training_writer(model: HfModel, *, bfloat16: bool = True) -> HfModel:
    """A model for generation in training: a session uses the weights at the time it starts.

    A T5 is copied for its fused pass, in float32. With `bfloat16`, passes of a Llama-like model
    over few tokens use a compiled copy in bfloat16; prompts are processed by the model itself.
    Copies are released with the session, because the training step needs the memory. Other models
    are returned unchanged.
    """
    if _on_cpu(model) and model.dtype == torch.float32 and is_t5_like(model.hf):
        build = _with_t5
        name, tolerance = "the fused copy of a model in training", EXACT
    elif bfloat16 and _can_compile(model, in_training=True):
        build, name, tolerance = _compiled_copy, "the compiled copy of a model in training", ROUNDED
    else:
        return model

    @cache
    def is_right() -> bool:
        return faster(model, name, tolerance, build) is not None

    def start(_writer: HfModel) -> ModelSession:
        return (build(model) if is_right() else model).start_session()

    return model.decoding_with(model.decoder, start)


def _can_compile(model: HfModel, *, in_training: bool = False) -> bool:
    possible = _on_cpu(model) and model.banned_K is None and is_llama_like(model.hf)
    return possible and can_copy(model.hf, in_training=in_training)


def _compiled_copy(model: HfModel) -> HfModel:
    return _with_native(model, NativeLlama(model.hf, model.draft_vocabulary))

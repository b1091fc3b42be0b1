"""What Paceline reads in a model, and what it was compared with."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

from paceline.config import StrictModel
from paceline.data.examples import Lengths, build_examples
from paceline.data.prompts import CorpusConfig, Record, read_records
from paceline.engines.kinds import KINDS
from paceline.errors import SlowerWarning, UnsupportedModelError
from paceline.export.gguf_file import FAMILIES
from paceline.models import load_model, prepare_for_decoding
from paceline.models.admission.model import Admission, admit
from paceline.models.hf.architectures import num_decoder_layers, num_encoder_layers
from paceline.models.loading import files_of
from paceline.models.prepare import describe_pass
from paceline.models.token_text import answer_text
from paceline.native import library_in_use

if TYPE_CHECKING:
    from paceline.data.collate import TokenRow
    from paceline.models import HfModel

_CHAT = ({"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "It is 4."})
_SESSIONS = {
    "batch": "batches of texts of different lengths",
    "rows": "one text at a time",
    "recurrent": "one text at a time, rolled back by snapshots",
    "stateful": "one text at a time and token by token, rolled back by snapshots",
}


class TrainedText(StrictModel):
    """One example of the text that alignment would use.

    Attributes:
        where: Source of the row.
        given: Text without loss: prompt, or source of an encoder-decoder.
        trained: Text with loss, with the token that ends it.
        num_given: Tokens without loss.
        trained_tokens: Tokens with loss.
    """

    where: str
    given: str
    trained: str
    num_given: int
    trained_tokens: list[str]


class ModelReport(StrictModel):
    """Everything that is known of a model after loading it.

    Attributes:
        path: As given by the user.
        facts: Architecture, sizes, settings and checks, in the order of display.
        examples: Texts as alignment would use them.
        warnings: Warnings while loading.
        faults: Checks that failed; empty if the model can be used.
    """

    path: str
    facts: dict[str, str]
    examples: list[TrainedText]
    warnings: list[str]
    faults: list[str]

    @property
    def passed(self) -> bool:
        return not self.faults


def inspect(path: str, chat: CorpusConfig | None = None) -> ModelReport:
    """Load a model, compare it with its references and report what was found.

    Args:
        path: Directory, .gguf file or hub name.
        chat: Rows whose first example is shown; None for a short example of our own.

    Raises:
        ModelLoadError: There is no model, or it cannot be read.
        PromptError: A row of `chat` cannot be read or does not fit the template.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = load_model(path)
        except UnsupportedModelError as error:
            faults = [str(error)]
            return ModelReport(path=path, facts={}, examples=[], warnings=[], faults=faults)
        admission = admit(model, files_of(model, path))
        prepared = prepare_for_decoding(model)
    facts = _facts(model) | {
        "sessions": _SESSIONS[model.sessions],
        "compared with": _comparison(admission),
        "tokenizer": type(model.tokenizer).__name__,
        "chat template": "yes" if getattr(model.tokenizer, "chat_template", None) else "none",
        "exports": _exports(model),
        "pass": describe_pass(prepared),
    }
    if prepared.device.type == "cpu":
        facts["C library"] = library_in_use() or "none, PyTorch is used"
    faults = [str(each.message) for each in caught if issubclass(each.category, SlowerWarning)]
    texts = [str(each.message) for each in caught]
    return ModelReport(
        path=path,
        facts=facts,
        examples=[] if model.tokenizer is None else _examples(model, chat),
        warnings=[text for text in texts if text not in faults],
        faults=faults,
    )


def _facts(model: HfModel) -> dict[str, str]:
    hf, config = model.hf, model.hf.config
    layers = str(num_decoder_layers(config))
    if num_encoder_layers(config):
        layers = f"{num_encoder_layers(config)} encoder, {layers} decoder"
    head: Any = hf.get_output_embeddings()
    limit = "no limit" if model.max_length is None else f"{model.max_length:,} tokens"
    if model.max_source_length is not None:
        limit += f", source {model.max_source_length:,}"
    found = {
        "architecture": f"{config.model_type} ({type(hf).__name__}), {layers} layers",
        "parameters": f"{model.num_parameters:,}, run in {str(model.dtype).removeprefix('torch.')}",
        "context": limit,
        "vocabulary": f"{model.vocab_size:,} tokens, {len(head.weight):,} rows of logits",
        "stop tokens": _tokens(model, model.eos_token_ids),
    }
    if model.decoder_prompt is not None:
        found["decoder prompt"] = _tokens(model, model.decoder_prompt)
    return found


def _tokens(model: HfModel, tokens: tuple[int, ...]) -> str:
    if model.tokenizer is None:
        return ", ".join(map(str, tokens)) or "none"
    known = range(len(model.tokenizer))
    decode = model.tokenizer.decode
    named = [f"{token} {decode([token]) if token in known else None!r}" for token in tokens]
    return ", ".join(named) or "none"


def _comparison(admission: Admission) -> str:
    twin = "no tiny twin of this class can be built"
    if admission.twin is not None:
        twin = f"{admission.twin:.1e} on a tiny twin"
    return (
        f"transformers' pass over each whole text, {admission.num_positions} positions; the "
        f"largest difference is {admission.difference:.1e} standard deviations, {twin}"
    )


def _exports(model: HfModel) -> str:
    """Engines that a draft of this family is exported to."""
    if model.decoder_prompt is not None:
        return "transformers"
    in_gguf = model.hf.config.model_type in FAMILIES
    return ", ".join(name for name in KINDS if in_gguf or name != "llamacpp")


def _examples(model: HfModel, chat: CorpusConfig | None) -> list[TrainedText]:
    tokenizer: Any = model.tokenizer
    if chat is not None:
        records = read_records(chat.model_copy(update={"limit": chat.limit or 1}))
    elif tokenizer.chat_template and model.decoder_prompt is None:
        records = [Record("an example", "chat", messages=_CHAT)]
    else:
        records = [Record("an example", "prompt", "The capital of France is", " Paris.")]
    whole = Lengths(sys.maxsize // 2, sys.maxsize // 2)
    begun = {"eos_token_ids": model.eos_token_ids, "decoder_prompt": model.decoder_prompt}
    examples = build_examples(records, tokenizer, whole, **begun)
    return [_trained_text(each, tokenizer) for each in examples]


def _trained_text(example: TokenRow, tokenizer: Any) -> TrainedText:
    """An example of training text, as it is shown."""
    tokens = list(example.tokens)
    begin = example.trained_from
    given = list(example.source) if example.source is not None else tokens[:begin]
    return TrainedText(
        where=example.where,
        given=tokenizer.decode(given),
        trained=answer_text(tokenizer, tokens[begin:], tokens[:begin], skip_special_tokens=False),
        num_given=len(given),
        trained_tokens=tokenizer.convert_ids_to_tokens(tokens[begin:]),
    )

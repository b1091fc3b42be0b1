"""Measures how well a model predicts plain text: perplexity and bits per byte."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch

from paceline.config import StrictModel
from paceline.core.bootstrap import Interval, ratio_interval
from paceline.core.text_scores import nats_of
from paceline.data import CorpusConfig
from paceline.data.input_checks import InputChecks, checked
from paceline.data.prompts import corpus_fingerprint
from paceline.data.tokens import read_texts
from paceline.errors import PromptError, UsageError
from paceline.models import load_model, prepare_for_decoding
from paceline.models.admission.trial import check_finite
from paceline.models.loading import tokenizer_of
from paceline.models.token_text import answer_text
from paceline.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.models.contract import Model

_CHUNK = 256  # tokens whose logits are in memory together


class PerplexityConfig(StrictModel):
    """Configuration of `perplexity`.

    Attributes:
        model: Directory, .gguf file or hub name.
        text: Documents; of a prompt with a completion, both together.
    """

    model: str
    text: CorpusConfig
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"

    def check(self, checks: InputChecks) -> None:
        checks.device(self.device)
        checks.model("model", self.model)
        checks.text("text", self.text, skip_empty=True)


class Perplexity(StrictModel):
    """How well a model predicts documents. Intervals are over documents.

    Attributes:
        num_tokens: Predicted tokens: all but the first of each document, which has no context.
        num_bytes: UTF-8 bytes of the text of the predicted tokens.
        nats: Sum of -log probability of the predicted tokens.
        perplexity: exp(nats / tokens); comparable only between models with the same tokenizer.
        bits_per_byte: nats / ln 2 / bytes; comparable between tokenizers.
        corpus: Fingerprint of local files; None for a hub data set.
    """

    config: PerplexityConfig
    num_documents: int
    num_tokens: int
    num_bytes: int
    nats: float
    perplexity: Interval
    bits_per_byte: Interval
    corpus: str | None


def perplexity(config: PerplexityConfig, progress: Progress = silent) -> Perplexity:
    """Score every document of a corpus.

    Raises:
        UsageError: the model or the text cannot be used.
    """
    checked(config)
    progress("loading", 0, 1)
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    tokenizer = tokenizer_of(loaded, config.model)
    if loaded.decoder_prompt is not None:
        raise UsageError(
            f"{config.model} is an encoder-decoder, which does not continue documents; use a "
            "decoder-only model, or the held-out loss of paceline pretrain"
        )
    documents = read_documents(config.text, tokenizer, loaded.eos_token_ids)
    # All tokens need a probability, also those that the model does not write.
    model = prepare_for_decoding(loaded.over_all_tokens())
    progress("loading", 1, 1)
    nats: list[float] = []
    for number, tokens in enumerate(documents):
        progress("scoring", number, len(documents))
        nats.append(document_nats(model, tokens))
    progress("scoring", len(documents), len(documents))
    num_bytes = [num_bytes_of(tokens, tokenizer) for tokens in documents]
    num_tokens = [len(tokens) - 1 for tokens in documents]
    nats_N, bytes_N, tokens_N = (
        torch.tensor(part, dtype=torch.float64) for part in (nats, num_bytes, num_tokens)
    )
    nats_per_token = ratio_interval((nats_N, tokens_N))
    return Perplexity(
        config=config,
        num_documents=len(documents),
        num_tokens=sum(num_tokens),
        num_bytes=sum(num_bytes),
        nats=math.fsum(nats),
        perplexity=Interval(*(math.exp(x) if x < 700 else math.inf for x in nats_per_token)),
        bits_per_byte=ratio_interval((nats_N / math.log(2), bytes_N)),
        corpus=corpus_fingerprint(config.text) or None,
    )


@torch.inference_mode()
def document_nats(model: Model, tokens: Sequence[int]) -> float:
    """Sum of -log p(token | tokens before it) over all tokens but the first.

    A document longer than the model's context is divided into windows. Each starts with the last
    token of the one before, so that every token is predicted once. A token that begins all texts,
    such as <bos>, is in the first window alone.
    """
    longest = model.max_length or len(tokens)
    inputs, session, parts = list(tokens[:-1]), model.start_session(), list[float]()
    start = window = 0
    while start < len(inputs):
        if start == window + longest:
            session, window = model.start_session(), start
        end = min(start + _CHUNK, window + longest, len(inputs))
        logits_NV = session.extend(torch.tensor([inputs[start:end]]))[0]
        check_finite([model], [(inputs[window:end], ())], logits_NV)
        precise = torch.promote_types(logits_NV.dtype, torch.float32)
        log_probs_NV = logits_NV.to(precise).log_softmax(-1)
        parts.append(nats_of(log_probs_NV, torch.tensor(tokens[start + 1 : end + 1])))
        start = end
    return math.fsum(parts)


def read_documents(
    corpus: CorpusConfig, tokenizer: Any, eos_token_ids: Sequence[int] = ()
) -> list[list[int]]:
    """The tokens of documents with a token to predict.

    Raises:
        PromptError: the corpus cannot be read, or no document has two tokens.
    """
    texts = read_texts(corpus, tokenizer, eos_token_ids=eos_token_ids)
    if not (documents := [tokens for tokens in texts if len(tokens) > 1]):
        raise PromptError(
            f"{corpus.path} has no document of two tokens or more, so there is nothing to predict; "
            "give longer texts"
        )
    return documents


def num_bytes_of(tokens: list[int], tokenizer: Any) -> int:
    """UTF-8 bytes of the text of all tokens but the first."""
    return max(1, len(answer_text(tokenizer, tokens[1:], tokens[:1]).encode()))

"""Base class of transformers models.

Shape suffixes: B batch, N new tokens, T text, W cache width, D hidden, K tokens of a
list, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from paceline.core.sampling import BANNED_LOGIT
from paceline.errors import ModelLoadError, SlowerWarning, shorten
from paceline.models.compatibility import written_vocabulary
from paceline.models.contract import Texts
from paceline.models.hf.architectures import context_length, source_length
from paceline.models.hf.logit_map import logit_map
from paceline.models.hf.settings import banned_tokens, forced_eos
from paceline.models.hf.text_part import num_text_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.core.fused import Head
    from paceline.models.contract import Batch, ModelSession

    StartSession = Callable[[Any], ModelSession]

Sessions = Literal["batch", "rows", "recurrent", "stateful"]
"""How texts are read: together; one by one; the same with snapshots; the same token by token."""


class ForwardPass(Protocol):
    """A forward pass over new tokens."""

    def __call__(self, tokens_BN: Tensor, cache: Any, ends_B: Tensor | None, keep: int) -> Tensor:
        """Logits of the last `keep` columns (0: all); -inf outside the draft vocabulary."""
        ...

    def listen(self, listener: Callable[[Tensor], None]) -> Callable[[], None]:
        """Call `listener` with `HfModel.hidden`, [B, N, D]; returns a function to remove it."""
        ...


class HfModel(ABC):
    """A transformers model and its tokenizer.

    Attributes that are not in `contract`:
        hf: The transformers model.
        decoder: The forward pass of sessions.
        draft_vocabulary: The only tokens that sessions may sample, most likely first, [K]; None for
            all. It also makes the head of the compiled pass smaller.
        banned_K: Tokens that the generation config forbids, [K], or None. Sessions give them the
            logit -inf, `head` a probability of 0; `plain_logits` and the checks of faster
            passes do not.
        sessions: The key of `session_kinds` that gives transformers' logits; see admission/.
        files: Fingerprint of the files that the weights come from; None: not known.
    """

    files: str | None = None
    sessions: Sessions = "batch"

    plain_pass: ClassVar[Callable[..., ForwardPass]]
    """The forward pass of transformers, given a model and a draft vocabulary or None."""
    session_kinds: ClassVar[dict[Sessions, StartSession]]
    """The kinds of sessions with transformers' forward pass, the fastest first."""

    def __init__(
        self,
        hf: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        draft_vocabulary: Tensor | None = None,
        decoder_prompt: tuple[int, ...] | None = None,
    ) -> None:
        self.hf = hf
        self.tokenizer = tokenizer
        self.draft_vocabulary = draft_vocabulary
        self.decoder_prompt = decoder_prompt
        self.max_source_length = self.source_vocab_size = None
        if decoder_prompt is not None:
            embeddings: Any = hf.get_input_embeddings()  # of Marian, those of the encoder
            self.max_source_length = source_length(hf.config)
            self.source_vocab_size = named_tokens(tokenizer, len(embeddings.weight), read=True)
        self.decoder = self.plain_pass(hf, draft_vocabulary)
        self.vocab_size = named_tokens(tokenizer, self._head.weight.shape[0])
        self.max_length = context_length(hf.config)
        self.eos_token_ids = stop_tokens(hf, tokenizer)
        self.num_parameters = num_text_parameters(hf)
        self.forced_eos = forced_eos(hf.generation_config, len(self._head.weight))
        self.mask_token = mask_token(hf)
        banned = banned_tokens(hf.generation_config, self.eos_token_ids, len(self._head.weight))
        self.banned_K = torch.tensor(banned, device=hf.device) if banned else None
        self._start: StartSession | None = None  # of a faster pass; None: the model's `sessions`

    @property
    def device(self) -> torch.device:
        return self.hf.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.dtype

    def start_session(self) -> ModelSession:
        return (self._start or self.session_kinds[self.sessions])(self)

    @property
    def head_weight(self) -> Tensor:
        """Weight of `head`, [V, D], padding rows included."""
        return self.plain_head.weight_VD

    @property
    def head(self) -> Head:
        """Makes the logits of sessions from `hidden`; -1e4 for tokens that may not be emitted."""
        head = self.plain_head
        if self.banned_K is None:
            return head
        bans_V = head.weight_VD.new_zeros(len(head.weight_VD))
        return head.raised(bans_V.index_fill(0, self.banned_K, BANNED_LOGIT))

    @property
    def plain_head(self) -> Head:
        """`head` without bans. Losses on labels use it: a label may be a banned token."""
        return logit_map(self.hf).head(self._head.weight, getattr(self._head, "bias", None))

    @abstractmethod
    def hidden(self, batch: Batch) -> Tensor:
        """Final hidden states, scaled for `head`, [B, T, D]. Differentiable."""

    @abstractmethod
    def plain_logits(self, batch: Batch) -> Tensor:
        """Logits of transformers without a cache, padding columns included, [B, T, V]."""

    def rewrap(self, hf: PreTrainedModel, draft_vocabulary: Tensor | None = None) -> Self:
        """Another model of the same kind, with this tokenizer and mask token."""
        model = type(self)(hf, self.tokenizer, draft_vocabulary, self.decoder_prompt)
        model.sessions, model.mask_token = self.sessions, self.mask_token
        return model

    def decoding_with(self, decoder: ForwardPass, start: StartSession | None = None) -> Self:
        """The same model with another forward pass; `start` begins sessions that use it.

        `start`: None for those of transformers.
        """
        model = copy.copy(self)
        model.decoder, model._start = decoder, start
        model.files = None
        return model

    def without_draft_vocabulary(self) -> Self:
        """The same model without the restriction, as engines that ignore the list run it."""
        return self if self.draft_vocabulary is None else self.rewrap(self.hf)

    def trial_batch(self, tokens: Sequence[int], source: Sequence[int] = (1,)) -> Batch:
        """One text of these tokens; an encoder-decoder's begins with its decoder prompt."""
        if self.decoder_prompt is None:
            return Texts(torch.tensor([list(tokens)], device=self.device))
        text = torch.tensor([[*self.decoder_prompt, *tokens]], device=self.device)
        return Texts(text, None, Texts(torch.tensor([list(source)], device=self.device)))

    def over_all_tokens(self) -> Self:
        """The same model without restriction and bans, to score text that others wrote."""
        model = self.without_draft_vocabulary()
        if model.banned_K is not None:
            model = copy.copy(model)
            model.banned_K = None
        return model

    @property
    def _head(self) -> nn.Linear:
        head: Any = self.hf.get_output_embeddings()
        return head


def named_tokens(
    tokenizer: PreTrainedTokenizerBase | None, width: int, *, read: bool = False
) -> int:
    """The vocabulary size without padding, given the width of the logits.

    `read`: of the tokens that an encoder reads, given the number of its embeddings.
    """
    if tokenizer is None:
        return width
    return min(width, _last_token(tokenizer, len(tokenizer), read) + 1)


@functools.lru_cache(maxsize=4)  # a model is wrapped several times, and this copies the vocabulary
def _last_token(tokenizer: PreTrainedTokenizerBase, _size: int, read: bool) -> int:
    known = tokenizer.get_vocab() if read else written_vocabulary(tokenizer)
    return max(known.values())


def stop_tokens(hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Tokens that end a text: those of the first source that names any; raises ModelLoadError."""
    text_config = hf.config.get_text_config(decoder=True)
    for source in (hf.generation_config, hf.config, text_config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if isinstance(found, int):
            return (found,)
        if found:
            if not (isinstance(found, list | tuple) and all(isinstance(one, int) for one in found)):
                raise ModelLoadError(
                    f"the model has {shorten(repr(found))} as eos_token_id; wanted a token id or a "
                    "list of them"
                )
            return tuple(found)
    return ()


def mask_token(hf: PreTrainedModel) -> int | None:
    """The token of parallel drafting, by the names that vLLM reads; raises ModelLoadError."""
    embeddings: Any = hf.get_input_embeddings()
    text_config, rows = hf.config.get_text_config(), len(embeddings.weight)
    for name in ("pard_token", "ptd_token_id"):
        token = getattr(hf.config, name, getattr(text_config, name, None))
        if token is None:
            continue
        if not (isinstance(token, int) and 0 <= token < rows):
            raise ModelLoadError(
                f"config.json has {name} {token!r}, wanted the id of one of {rows:,} embeddings"
            )
        return token
    return None


def warn_of_slower(architecture: str, fault: str, stacklevel: int) -> None:
    """Warn that a faster pass of a model is not used; `fault` names the pass and what it does."""
    warnings.warn(
        f"{fault} for this {architecture}; it is not used, and the model runs more slowly: please "
        "report this, with the output of paceline env",
        SlowerWarning,
        stacklevel=stacklevel + 1,
    )


@contextlib.contextmanager
def evaluating(hf: PreTrainedModel) -> Iterator[None]:
    """Switch the model to evaluation mode, and restore its mode afterwards."""
    training = [module for module in hf.modules() if module.training] if hf.training else []
    if training:
        hf.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def recorded_hidden_states(model: HfModel) -> Iterator[list[Tensor]]:
    """Record the final hidden states of the model's sessions, one tensor [B, N, D] per pass."""
    recorded: list[Tensor] = []
    with contextlib.ExitStack() as listening:
        listening.callback(model.decoder.listen(recorded.append))
        yield recorded

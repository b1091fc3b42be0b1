"""Generates the answers to the requests of a file in batches."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from paceline.core.sampling import SamplingParams
from paceline.data.shards import Answer, ShardStore
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.errors import ContextLengthError
from paceline.models import load_model, prepare_for_decoding
from paceline.models.compatibility import check_fits
from paceline.models.loading import fingerprint, tokenizer_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from paceline.data.requests import GenerateDataConfig, Request, Shard
    from paceline.decode import Generation
    from paceline.decode.decoder import Decoder
    from paceline.models.hf.base import HfModel
    from paceline.models.loading import DType


class Answerer:
    """Answers requests with the target and an optional draft."""

    def __init__(self, config: GenerateDataConfig) -> None:
        self.config = config
        self.target = self._load(config.target, config.dtype)
        self.draft = None if config.draft is None else self._load(config.draft, self.target.dtype)
        self.tokenizer = tokenizer_of(self.target, config.target)
        self._check_lengths()
        self.dtype = str(self.target.dtype).removeprefix("torch.")
        configurable = self.target.device.type == "cpu" and self.dtype == "bfloat16"
        self.activations = config.activations if configurable else self.dtype
        self.target_fingerprint = fingerprint(config.target)
        self.draft_fingerprint = "" if config.draft is None else fingerprint(config.draft)

    def _check_lengths(self) -> None:
        config = self.config
        lengths = config.max_prompt_tokens, config.max_new_tokens
        for model in (self.target, self.draft):
            if model is not None:
                check_fits(model, *lengths, ("max_prompt_tokens", "max_new_tokens"), "the model")
        room = self._decoder(1.0).room([0])  # includes one block
        wanted = sum(lengths) if self.target.decoder_prompt is None else 1 + config.max_new_tokens
        if room is not None and wanted > room + 1:
            raise ContextLengthError(
                f"prompts and new tokens need a context of {wanted}, but these models support only "
                f"{room + 1}; lower max_prompt_tokens or max_new_tokens"
            )

    def answer(self, shard: Shard) -> list[Answer]:
        """One record per request, in order."""
        requests = shard.requests
        decoder = self._decoder(requests[0].temperature)
        generations = decoder.generate(
            [request.tokens for request in requests],
            self.config.max_new_tokens,
            [request.seed for request in requests],
            batch_size=self.config.batch_size,
        )
        pairs = zip(requests, generations, strict=True)
        return [self._record(request, generation) for request, generation in pairs]

    def _load(self, source: str, dtype: DType | torch.dtype) -> HfModel:
        model = load_model(source, dtype=dtype)
        return prepare_for_decoding(model, activations=self.config.activations)

    def _decoder(self, temperature: float) -> Decoder:
        config = self.config
        sampling = SamplingParams(temperature=temperature, top_p=config.top_p, top_k=config.top_k)
        gamma = config.num_speculative_tokens
        decoder: Decoder = (
            AutoregressiveDecoder(self.target, sampling)
            if self.draft is None
            else SpeculativeDecoder(self.target, self.draft, gamma=gamma, sampling=sampling)
        )
        decoder.forces_eos = False  # a draft would learn to stop at max_new_tokens
        return decoder

    def _record(self, request: Request, generation: Generation) -> Answer:
        config = self.config
        text = generation.tokens[:-1] if generation.stop_reason == "eos" else generation.tokens
        return Answer(
            id=request.id,
            prompt=self._text(request.tokens),
            completion=self._text(text),
            prompt_tokens=list(request.tokens),
            completion_tokens=generation.tokens,
            stop_reason=generation.stop_reason,
            temperature=request.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=request.seed,
            system_prompt=request.system_prompt,
            source=request.source,
            prompt_was_cut=request.cut,
            target=config.target,
            target_fingerprint=self.target_fingerprint,
            draft=config.draft or "",
            draft_fingerprint=self.draft_fingerprint,
            num_speculative_tokens=0 if config.draft is None else config.num_speculative_tokens,
            dtype=self.dtype,
            activations=self.activations,
            max_new_tokens=config.max_new_tokens,
            paceline=importlib.metadata.version("paceline"),
        )

    def _text(self, tokens: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
        assert isinstance(text, str), "one sequence is one text"
        return text


class ShardWriter:
    """Answers the requests of a shard and writes its file; loads the models on the first call."""

    def __init__(self, config: GenerateDataConfig, directory: Path) -> None:
        self._config = config
        self._store = ShardStore(directory)
        self._answerer: Answerer | None = None

    def __call__(self, shard: Shard) -> None:
        self._answerer = self._answerer or Answerer(self._config)
        self._store.write(shard.name, self._answerer.answer(shard))

"""Sessions that replay CUDA graphs: one graph for each half of a block, and one host sync.

Keys and values are in fixed-size buffers, each token at the column of its position. Row lengths
are a tensor on the device, so a rollback only reduces lengths. Buffers have 1, 2, 4, ... rows and
256, 512, ... columns; unused rows repeat the first row.

Shape suffixes: B buffer rows, N new tokens, W columns, H key heads, D head size. In sessions: B
texts, R buffer rows (at least B), G gamma, H G + 1, V vocabulary.
"""

from __future__ import annotations

import functools
import gc
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.block import Drafted, Uniforms, VerifiedRows, draw_ahead, verify_block
from paceline.core.rule_base import is_capturable
from paceline.core.sampling import as_list
from paceline.models.contract import ModelSession

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from paceline.core.block import DrawPlan, DrawRequest, VerifyRequest
    from paceline.core.rule_base import Rule
    from paceline.core.sampling import SamplingParams
    from paceline.models.llama.forward import LlamaDecoder

    Inputs = Sequence[Tensor]
    Work = Callable[..., Sequence[Tensor]]

_FEWEST_COLUMNS = 256
_MOST_IDLE = 8  # idle caches to keep for other sessions; their buffers take memory
_SPARE = 64  # extra columns after a prompt, so that short answers need no larger buffers
_MOST_RECORDED = 16  # tokens of a recorded pass; launch overhead is negligible for longer ones


class Recorder:
    """Records the CUDA graphs of one model on one stream, with one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.records = device.type == "cuda"
        if self.records:
            with torch.cuda.device(device):
                self._stream = torch.cuda.Stream()
                self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work, inputs: Inputs) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]:
        """Record a graph; returns it with the tensors that hold its results after each replay."""
        collects = gc.isenabled()
        gc.disable()  # freeing an old graph would break the capture
        try:
            with torch.cuda.device(self._device):
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    work(*inputs)  # warm-up: libraries initialize on their first call
                torch.cuda.current_stream().wait_stream(self._stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    return graph, work(*inputs)
        finally:
            if collects:
                gc.enable()


class Recording:
    """A function of fixed-shape tensors, replayed as a CUDA graph on a GPU, called elsewhere."""

    def __init__(self, recorder: Recorder, work: Work, inputs: Inputs) -> None:
        self._work = work
        self._inputs = [given.clone() for given in inputs]
        self._recorded = recorder.record(work, self._inputs) if recorder.records else None

    def __call__(self, inputs: Inputs) -> list[Tensor]:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        if self._recorded is None:
            return list(self._work(*self._inputs))
        graph, outputs = self._recorded
        graph.replay()
        return [output.clone() for output in outputs]  # the next replay overwrites them


class GraphCache:
    """Key-value buffers of each layer, [num_rows, H, num_columns, D], and their recorded graphs."""

    def __init__(
        self, decoder: LlamaDecoder, recorder: Recorder, num_rows: int, num_columns: int
    ) -> None:
        self.num_rows, self.num_columns = num_rows, num_columns
        self._decoder = decoder
        self._recorder = recorder
        device = decoder.device
        self._ahead = torch.arange(num_columns, device=device)
        self.columns_BN = self._ahead[None, :0]
        self.width = 0
        heads, size = decoder.layers[0].key_heads, decoder.layers[0].head_size
        shape = (num_rows, heads, num_columns, size)
        self._layers = [_Layer(self, shape, decoder.dtype) for _ in decoder.layers]
        self._recordings: dict[Hashable, Recording] = {}

    def run(self, key: Hashable, work: Work, inputs: Inputs) -> list[Tensor]:
        """Run the recording of this key; input shapes must be those of its first call."""
        recording = self._recordings.get(key)
        if recording is None:
            recording = self._recordings[key] = Recording(self._recorder, work, inputs)
        return recording(inputs)

    def logits(self, tokens_BN: Tensor, lengths_B: Tensor) -> Tensor:
        """Append tokens to rows of these lengths; logits after each token, [B, N, V]."""
        return self._decoder.logits(self._states(tokens_BN, lengths_B))

    def logits_of_prompts(self, tokens_BN: Tensor, lengths_B: Tensor) -> Tensor:
        """Process left-aligned prompts in empty rows; logits after each prompt, [B, V]."""
        states_BND = self._states(tokens_BN, torch.zeros_like(lengths_B), fresh=True)
        last_B11 = (lengths_B - 1)[:, None, None]
        last_BD = states_BND.gather(1, last_B11.expand(-1, 1, states_BND.shape[2]))[:, 0]
        return self._decoder.logits(last_BD)

    def copy_rows(
        self,
        other: GraphCache,
        rows: Sequence[int],
        width: int,
        own_rows: Sequence[int] | None = None,
    ) -> None:
        """Copy rows of a cache (may be this one) into `own_rows`, by default the first rows."""
        source = torch.tensor(rows, device=self._ahead.device)
        goal = torch.tensor(own_rows or range(len(rows)), device=self._ahead.device)
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            for buffer, old in zip(mine.buffers, theirs.buffers, strict=True):
                buffer[goal, :, :width] = old[source, :, :width]

    def layer(self, index: int) -> _Layer:
        return self._layers[index]

    def _states(self, tokens_BN: Tensor, lengths_B: Tensor, *, fresh: bool = False) -> Tensor:
        count = tokens_BN.shape[1]
        self.columns_BN = lengths_B[:, None] + self._ahead[:count]
        self.width = count if fresh else self.num_columns
        mask_of = functools.partial(self._mask, fresh)
        return self._decoder.states(tokens_BN, self.columns_BN, self, mask_of)

    def _mask(self, fresh: bool, window: int | None) -> Tensor | None:
        """Additive mask [B, 1, N, W], or None if a causal mask is sufficient."""
        reach = self.width if window is None else min(window, self.width)
        if fresh and reach == self.width:
            return None
        age_BNW = self.columns_BN[..., None] - self._ahead[: self.width]
        seen_BNW = (age_BNW >= 0) & (age_BNW < reach)
        lowest = torch.finfo(torch.float32).min
        hidden = torch.zeros(seen_BNW.shape, device=seen_BNW.device)
        return hidden.masked_fill_(~seen_BNW, lowest)[:, None]


class _Layer:
    """A layer's keys and values, [B, H, W, D]."""

    def __init__(
        self, cache: GraphCache, shape: tuple[int, int, int, int], dtype: torch.dtype
    ) -> None:
        self._cache = cache
        device = cache.columns_BN.device
        # zeros, because unused columns are masked but must be finite
        self.buffers = [torch.zeros(shape, dtype=dtype, device=device) for _ in "kv"]

    def append(self, keys_BHND: Tensor, values_BHND: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens; returns all that are visible."""
        index_BHND = self._cache.columns_BN[:, None, :, None].expand(keys_BHND.shape)
        for buffer, new in zip(self.buffers, (keys_BHND, values_BHND), strict=True):
            buffer.scatter_(2, index_BHND, new.to(buffer.dtype))
        keys, values = (buffer[:, :, : self._cache.width] for buffer in self.buffers)
        return keys, values


class GraphCaches:
    """The pool of caches of one model; a session returns its cache with the graphs."""

    def __init__(self, decoder: LlamaDecoder) -> None:
        self._decoder = decoder
        self._recorder = Recorder(decoder.device)
        self._idle: list[GraphCache] = []

    @torch.inference_mode()
    def take(self, num_rows: int, num_columns: int) -> GraphCache:
        shape = _buffer_rows(num_rows), _power_of_two(num_columns, _FEWEST_COLUMNS)
        for cache in self._idle:
            if (cache.num_rows, cache.num_columns) == shape:
                self._idle.remove(cache)
                return cache
        return GraphCache(self._decoder, self._recorder, *shape)

    def give_back(self, cache: GraphCache) -> None:
        self._idle.append(cache)
        del self._idle[:-_MOST_IDLE]


def _buffer_rows(num_texts: int) -> int:
    return _power_of_two(num_texts, 1)


def _power_of_two(wanted: int, least: int) -> int:
    while least < wanted:
        least *= 2
    return least


def can_record(config: Any) -> bool:
    """True if rotary angles do not depend on the length; else the host has to compute them."""
    rope: Any = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type", "default") not in ("dynamic", "longrope")


class GraphSession(ModelSession):
    """A session with fixed-size buffers."""

    def __init__(
        self, caches: GraphCaches, device: torch.device, vocab_size: int, max_length: int | None
    ) -> None:
        super().__init__(vocab_size, max_length)
        self._caches = caches
        self._device = device
        self._held: list[GraphCache] = []
        weakref.finalize(self, _give_all_back, caches, self._held)

    @torch.inference_mode()
    def _prefill(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        lengths = [len(row) for row in tokens]
        width = max(lengths)
        cache = self._hold(len(tokens), width + _SPARE)
        tokens_BN = torch.tensor([[*row, *[0] * (width - len(row))] for row in tokens])
        inputs = self._padded(tokens_BN), self._padded(torch.tensor(lengths))
        return cache.logits_of_prompts(*inputs)[: len(tokens)].float()

    @torch.inference_mode()
    def _extend(self, tokens_BN: Tensor) -> Tensor:
        batch, count = tokens_BN.shape
        cache = self._reserve(count)
        inputs = self._padded(tokens_BN), self._padded(torch.tensor(self.lengths))
        if count > _MOST_RECORDED:
            return cache.logits(*inputs)[:batch].float()
        (logits_RNV,) = cache.run(
            ("extend", count), lambda new, ends: (cache.logits(new, ends),), inputs
        )
        return logits_RNV[:batch].float()

    @torch.inference_mode()
    def take_draw(self, request: DrawRequest) -> Drafted | None:
        plan, uniforms, batch = request.plan, request.uniforms, len(request.unread)
        new, passes = len(request.unread[0]), plan.num_passes
        if request.seen_BV is not None or passes == 0 or new > _MOST_RECORDED:
            return None
        lengths = self._extended_lengths(batch, new + passes - 1)
        cache = self._reserve(new + passes - 1)
        inputs = [self._padded(torch.tensor(rows)) for rows in (request.unread, self.lengths)]
        if uniforms is not None:
            inputs.append(self._padded(torch.tensor(uniforms, dtype=torch.float64)))
        key = ("draw", new, plan, uniforms is None, self.vocab_size)
        drawn = cache.run(key, functools.partial(_draw, cache, plan, self.vocab_size), inputs)
        self.lengths = lengths
        tokens_RG, *rest = (part[:batch] for part in drawn)
        probs_BPV = rest.pop(0) if uniforms is not None else None
        return Drafted(tokens_RG, probs_BPV, rest.pop() if rest else None)

    @torch.inference_mode()
    def take_verify(self, request: VerifyRequest) -> VerifiedRows | None:
        drafted, uniforms, sampling = request.drafted, request.uniforms, request.sampling
        batch, gamma = drafted.tokens_BG.shape
        rule = request.applied_rule
        if request.seen_BV is not None or not is_capturable(rule) or gamma >= _MOST_RECORDED:
            return None
        lengths = self._extended_lengths(batch, gamma + 1)
        cache = self._reserve(gamma + 1)
        newest, num_drafted = torch.tensor(request.newest), torch.tensor(request.num_drafted)
        given = [newest, drafted.tokens_BG, num_drafted]
        if uniforms is not None:
            assert drafted.probs_BPV is not None, "sampled tokens come with their distributions"
            given += [*uniforms.tensors(), drafted.probs_BPV]
            given += [] if drafted.raw_BPV is None else [drafted.raw_BPV]
        inputs = [self._padded(torch.tensor(self.lengths)), *map(self._padded, given)]
        key = ("judge", rule, sampling, *(part.shape[1:] for part in given), self.vocab_size)
        work = functools.partial(_judge, cache, rule, sampling, self.vocab_size)
        (verdict_2R,) = cache.run(key, work, inputs)
        self.lengths = lengths
        num_accepted, next_tokens = as_list(verdict_2R[:, :batch])
        return VerifiedRows(num_accepted, next_tokens)

    def _rollback(self, counts: Sequence[int]) -> None:
        """Columns beyond `lengths` are masked, and the next tokens overwrite them."""

    @torch.inference_mode()
    def _refill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        fresh = GraphSession(self._caches, self._device, self.vocab_size, self.max_length)
        logits_RV = fresh._prefill(prompts)
        width = max(map(len, prompts))
        cache = self._reserve(max(0, width - max(self.lengths)))
        cache.copy_rows(fresh._held[0], range(len(rows)), width, rows)
        return logits_RV

    @torch.inference_mode()
    def _keep_rows(self, rows: Sequence[int]) -> None:
        cache = self._held[0]
        if _buffer_rows(len(rows)) < cache.num_rows:
            self._move(rows, cache.num_columns)
        else:
            cache.copy_rows(cache, rows, max(self.lengths))

    def _hold(self, num_rows: int, num_columns: int) -> GraphCache:
        self._held[:] = [self._caches.take(num_rows, num_columns)]
        return self._held[0]

    def _reserve(self, count: int) -> GraphCache:
        """The cache, with space for `count` more tokens in every row."""
        needed = max(self.lengths) + count
        if not self._held:
            return self._hold(len(self.lengths), needed + _SPARE)
        if needed > self._held[0].num_columns:
            self._move(range(len(self.lengths)), needed)
        return self._held[0]

    def _move(self, rows: Sequence[int], num_columns: int) -> None:
        old = self._held[0]
        self._hold(len(rows), num_columns).copy_rows(old, rows, max(self.lengths))
        self._caches.give_back(old)

    def _padded(self, values: Tensor) -> Tensor:
        """The values on the device, with the first row repeated for unused buffer rows."""
        values = values.to(self._device, non_blocking=True)
        spare = self._held[0].num_rows - len(values)
        return torch.cat([values, values[:1].expand(spare, *values.shape[1:])]) if spare else values


def _draw(
    cache: GraphCache,
    plan: DrawPlan,
    vocab_size: int,
    unread_RN: Tensor,
    lengths_R: Tensor,
    uniforms_RG: Tensor | None = None,
) -> list[Tensor]:
    num_read = 0

    def read(new_RN: Tensor) -> Tensor:
        nonlocal num_read
        logits_RNV = cache.logits(new_RN, lengths_R + num_read)
        num_read += new_RN.shape[1]
        return logits_RNV[:, -1, :vocab_size].float()

    drawn = draw_ahead(read, unread_RN, plan, uniforms_RG)
    return [part for part in drawn if part is not None]


def _judge(
    cache: GraphCache,
    rule: Rule,
    sampling: SamplingParams,
    vocab_size: int,
    lengths_R: Tensor,
    newest_R: Tensor,
    drafted_RG: Tensor,
    num_drafted_R: Tensor,
    accept_RG: Tensor | None = None,
    next_R: Tensor | None = None,
    probs_RGV: Tensor | None = None,
    raw_RGV: Tensor | None = None,
) -> list[Tensor]:
    read_RH = torch.cat([newest_R[:, None], drafted_RG], 1)
    logits_RHV = cache.logits(read_RH, lengths_R)[..., :vocab_size].float()
    uniforms = None if accept_RG is None or next_R is None else Uniforms(accept_RG, next_R)
    drafted = Drafted(drafted_RG, probs_RGV, raw_RGV)
    verdict = verify_block(logits_RHV, drafted, num_drafted_R, rule, sampling, uniforms)
    return [torch.stack([verdict.num_accepted_B, verdict.next_tokens_B])]


def _give_all_back(caches: GraphCaches, held: list[GraphCache]) -> None:
    for cache in held:
        caches.give_back(cache)

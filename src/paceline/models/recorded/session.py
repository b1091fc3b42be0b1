"""Sessions that replay CUDA graphs: one graph for each half of a block, and one host sync.

Row lengths are a tensor on the device, so a rollback only reduces lengths. Buffers have 1, 2, 4,
... rows and 256, 512, ... columns; unused rows repeat the first row.

Shape suffixes: N new tokens, B texts, R buffer rows (at least B), G gamma, H G + 1, V vocabulary.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.block import Drafted, Uniforms, Verified, draw_ahead, verify_block
from paceline.core.rule_base import is_capturable
from paceline.core.sampling import as_list
from paceline.models.contract import ModelSession
from paceline.models.recorded.recorder import Recorder, Recordings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.core.block import DrawPlan, DrawRequest, VerifyRequest
    from paceline.core.rule_base import Rule
    from paceline.core.sampling import SamplingParams
    from paceline.models.recorded.fixed_cache import FixedCache
    from paceline.models.recorded.fixed_pass import FixedPass

    Read = Callable[[Tensor, Tensor], Tensor]

_FEWEST_COLUMNS = 256
_MOST_IDLE = 8  # idle caches to keep for other sessions; their buffers take memory
SPARE = 64  # extra columns after a prompt, so that short answers need no larger buffers
_MOST_RECORDED = 16  # tokens of a recorded pass
_MOST_IN_PROMPTS = 1024  # tokens of a recorded pass over prompts; longer ones need the GPU longer


class GraphCaches:
    """The pool of caches of one model; a session returns its cache with the graphs.

    Attributes:
        passes: Reads tokens into these caches.
    """

    def __init__(self, passes: FixedPass, *, records: bool = True, falls_back: bool = True) -> None:
        """See `Recorder`."""
        self.passes = passes
        self._new_recorder = functools.partial(
            Recorder,
            passes.device,
            passes.hf.config.model_type,
            records=records,
            falls_back=falls_back,
        )
        self._recorder = self._new_recorder()
        self._idle: list[FixedCache] = []

    @torch.inference_mode()
    def take(self, num_rows: int, num_columns: int) -> FixedCache:
        rows, columns = _power_of_two(num_rows), _power_of_two(num_columns, _FEWEST_COLUMNS)
        for cache in self._idle:
            if (cache.num_rows, cache.num_columns) == (rows, columns):
                self._idle.remove(cache)
                return cache
        try:
            return self._new_cache(rows, columns)
        except torch.OutOfMemoryError:
            if not self._idle:
                raise
        self._drop(len(self._idle))
        self._recorder = self._new_recorder()  # a pool may not be used after its last graph
        torch.cuda.empty_cache()
        return self._new_cache(rows, columns)

    def _new_cache(self, rows: int, columns: int) -> FixedCache:
        return self.passes.new_cache(rows, columns, Recordings(self._recorder))

    def give_back(self, caches: Sequence[FixedCache]) -> None:
        self._idle += caches
        self._drop(len(self._idle) - _MOST_IDLE)

    def _drop(self, count: int) -> None:
        for _ in range(count):
            self._idle.pop(0).recordings.clear()


def _power_of_two(wanted: int, least: int = 1) -> int:
    """The smallest that is enough, from the power of two `least` on."""
    return max(least, 1 << (wanted - 1).bit_length())


class GraphSession(ModelSession):
    """A session with fixed-size buffers."""

    def __init__(self, caches: GraphCaches, vocab_size: int, max_length: int | None) -> None:
        super().__init__(vocab_size, max_length)
        self._caches = caches
        self._passes = caches.passes
        self._held: list[FixedCache] = []
        weakref.finalize(self, caches.give_back, self._held)

    @torch.inference_mode()
    def _prefill(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        lengths = [len(row) for row in tokens]
        longest = max(lengths)
        cache = self._hold(len(tokens), longest + SPARE)
        work = functools.partial(self._passes.logits_of_prompts, cache)
        width = _power_of_two(longest, _MOST_RECORDED)
        room = min(cache.num_columns, self.max_length or cache.num_columns)
        rows = cache.num_rows  # each gives logits at the end of every other one
        fits = width <= room and max(width, rows) * rows <= _MOST_IN_PROMPTS
        if fits and not self._passes.reads_counts:
            rows_R = torch.arange(rows, device=self._passes.device)
            given = self._padded(_filled(tokens, width)), self._padded(torch.tensor(lengths))
            (logits_RV,) = cache.recordings.run(
                ("prompts", width), lambda new, ends: (work(new, ends, rows_R),), given
            )
            return logits_RV[: len(tokens)].float()
        ends = sorted(set(lengths))
        places = [ends.index(length) for length in lengths]
        given = _filled(tokens, longest), torch.tensor(ends), torch.tensor(places)
        return work(*(part.to(self._passes.device) for part in given)).float()

    @torch.inference_mode()
    def _extend(self, tokens_BN: Tensor) -> Tensor:
        batch, count = tokens_BN.shape
        cache = self._reserve(count)
        inputs = self._padded(tokens_BN), self._padded(torch.tensor(self.lengths))
        if not self._are_few(count):
            return self._passes.logits(cache, *inputs, few=False)[:batch].float()
        read = self._read(cache)
        (logits_RNV,) = cache.recordings.run(
            ("extend", count), lambda new, ends: (read(new, ends),), inputs
        )
        return logits_RNV[:batch].float()

    @torch.inference_mode()
    def take_draw(self, request: DrawRequest) -> Drafted | None:
        plan, uniforms, batch = request.plan, request.uniforms, len(request.unread)
        new, passes = len(request.unread[0]), plan.num_passes
        if request.seen_BV is not None or passes == 0 or not self._are_few(new):
            return None
        lengths = self._extended_lengths(batch, new + passes - 1)
        cache = self._reserve(new + passes - 1)
        inputs = [self._padded(torch.tensor(rows)) for rows in (request.unread, self.lengths)]
        if uniforms is not None:
            inputs.append(self._padded(torch.tensor(uniforms, dtype=torch.float64)))
        key = ("draw", new, plan, uniforms is None, self.vocab_size)
        work = functools.partial(_draw, self._read(cache), plan, self.vocab_size)
        drawn = cache.recordings.run(key, work, inputs)
        self.lengths = lengths
        tokens_RG, *rest = (part[:batch] for part in drawn)
        probs_BPV = rest.pop(0) if uniforms is not None else None
        return Drafted(tokens_RG, probs_BPV, rest.pop() if rest else None)

    @torch.inference_mode()
    def take_verify(self, request: VerifyRequest) -> Verified | None:
        drafted, uniforms, sampling = request.drafted, request.uniforms, request.sampling
        batch, gamma = drafted.tokens_BG.shape
        rule = request.applied_rule
        few = is_capturable(rule) and self._are_few(gamma + 1)
        if request.seen_BV is not None or not few:
            return None
        lengths = self._extended_lengths(batch, gamma + 1)
        cache = self._reserve(gamma + 1)
        newest, num_drafted = torch.tensor(request.newest), torch.tensor(request.num_drafted)
        given = [newest, drafted.tokens_BG, num_drafted]
        if uniforms is not None:
            assert drafted.probs_BPV is not None, "sampled tokens come with their distributions"
            given += [*uniforms.to(torch.device("cpu")), drafted.probs_BPV]
            given += [] if drafted.raw_BPV is None else [drafted.raw_BPV]
        inputs = [self._padded(torch.tensor(self.lengths)), *map(self._padded, given)]
        key = ("judge", rule, sampling, *(part.shape[1:] for part in given), self.vocab_size)
        work = functools.partial(_judge, self._read(cache), rule, sampling, self.vocab_size)
        (verdict_2R,) = cache.recordings.run(key, work, inputs)
        self.lengths = lengths
        num_accepted, next_tokens = as_list(verdict_2R[:, :batch])
        return Verified(num_accepted, next_tokens)

    def _are_few(self, count: int) -> bool:
        """Whether a pass over this many tokens of each row is one that is recorded.

        Experts that are multiplied in a batch are copied for each token.
        """
        rows = _power_of_two(len(self.lengths)) if self._passes.reads_counts else 1
        return count * rows <= _MOST_RECORDED

    def _rollback(self, counts: Sequence[int]) -> None:
        """Columns beyond `lengths` are masked, and the next tokens overwrite them."""

    @torch.inference_mode()
    def _refill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        fresh = GraphSession(self._caches, self.vocab_size, self.max_length)
        logits_RV = fresh._prefill(prompts)
        width = max(map(len, prompts))
        cache = self._reserve(max(0, width - max(self.lengths)))
        cache.copy_rows(fresh._held[0], range(len(rows)), width, rows)
        return logits_RV

    @torch.inference_mode()
    def _keep_rows(self, rows: Sequence[int]) -> None:
        cache = self._held[0]
        if _power_of_two(len(rows)) < cache.num_rows:
            self._move(rows, cache.num_columns)
        else:
            cache.copy_rows(cache, rows, max(self.lengths))

    def _hold(self, num_rows: int, num_columns: int) -> FixedCache:
        self._held[:] = [self._caches.take(num_rows, num_columns)]
        return self._held[0]

    def _reserve(self, count: int) -> FixedCache:
        """The cache, with space for `count` more tokens in every row."""
        needed = max(self.lengths) + count
        if not self._held:
            return self._hold(len(self.lengths), needed + SPARE)
        if needed > self._held[0].num_columns:
            self._move(range(len(self.lengths)), needed)
        return self._held[0]

    def _move(self, rows: Sequence[int], num_columns: int) -> None:
        old = self._held[0]
        new = self._hold(len(rows), num_columns)
        new.copy_rows(old, rows, max(self.lengths))
        self._caches.give_back([old])

    def _read(self, cache: FixedCache) -> Read:
        return functools.partial(self._passes.logits, cache)

    def _padded(self, values: Tensor) -> Tensor:
        """The values on the device, with the first row repeated for unused buffer rows."""
        values = values.to(self._passes.device, non_blocking=True)
        spare = self._held[0].num_rows - len(values)
        return torch.cat([values, values[:1].expand(spare, *values.shape[1:])]) if spare else values


def _filled(tokens: Sequence[Sequence[int]], width: int) -> Tensor:
    """Left-aligned rows of this width."""
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in tokens])


def _draw(
    read: Read,
    plan: DrawPlan,
    vocab_size: int,
    unread_RN: Tensor,
    lengths_R: Tensor,
    uniforms_RG: Tensor | None = None,
) -> list[Tensor]:
    num_read = 0

    def logits_after(new_RN: Tensor) -> Tensor:
        nonlocal num_read
        logits_RNV = read(new_RN, lengths_R + num_read)
        num_read += new_RN.shape[1]
        return logits_RNV[:, -1, :vocab_size].float()

    drawn = draw_ahead(logits_after, unread_RN, plan, uniforms_RG)
    return [part for part in drawn if part is not None]


def _judge(
    read: Read,
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
    given_RH = torch.cat([newest_R[:, None], drafted_RG], 1)
    logits_RHV = read(given_RH, lengths_R)[..., :vocab_size].float()
    uniforms = None if accept_RG is None or next_R is None else Uniforms(accept_RG, next_R)
    drafted = Drafted(drafted_RG, probs_RGV, raw_RGV)
    verdict = verify_block(logits_RHV, drafted, num_drafted_R, rule, sampling, uniforms)
    return [torch.stack(list(verdict))]

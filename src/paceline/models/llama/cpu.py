"""The compiled forward pass (native/transformer.c) of a Llama-like model over few tokens; sessions.

It needs a C compiler with OpenMP or paceline-kernels, and matrices that bfloat16 represents exactly
or that are already rounded to 8 bits. Otherwise the modules of transformers are used.

Shape suffixes: B batch, N new tokens, D hidden, S head size.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.core.block import Drafted, Verified
from paceline.core.rules import Lossless
from paceline.models.hf.cache import RoomyCache, RoomyLayer
from paceline.models.hf.causal import CausalSession, HfDecoder
from paceline.models.llama.cpu_weights import NativeWeights
from paceline.native import compiled
from paceline.native.kernels import NO_MASS, check_shapes
from paceline.native.structures import Block, Draft, Pass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from paceline.core.block import DrawRequest, Uniforms, VerifyRequest
    from paceline.core.sampling import SamplingParams
    from paceline.models.hf.base import HfModel


@dataclass(eq=False)
class _Plan:
    """Reusable arguments of passes over one cache; valid until its buffers are reallocated."""

    cache: Any
    layers: list[RoomyLayer]
    this_pass: Pass
    lengths: Any
    ends: Any
    most_logits: int
    held: tuple[object, ...]  # keeps the memory alive that the pass points to

    def __post_init__(self) -> None:
        self.logits, self.probs = torch.empty(2, self.most_logits)
        self.cache = weakref.proxy(self.cache)  # the cache owns the plan: avoid a reference cycle
        self.buffers = (self.layers[0].buffers, self.layers[-1].buffers)

    def fits(self, count: int) -> bool:
        """True if buffers and threads are the same, with space for `count` more columns."""
        first, last = self.layers[0], self.layers[-1]  # all layers are reallocated together
        same = first.buffers is self.buffers[0] and last.buffers is self.buffers[1]
        same = same and self.this_pass.threads == torch.get_num_threads()
        return same and first.width + count <= self.this_pass.columns

    def prepare(
        self,
        count: int,
        lengths: Sequence[int],
        keep: int,
        tokens: int | None,
        logits: Tensor,
        states: Tensor | None = None,
    ) -> Pass:
        """Set up a pass over `count` tokens per row; row b is lengths[b] tokens long afterwards."""
        this = self.this_pass
        this.states = _data(states)
        this.count, this.width, this.keep = count, self.layers[0].width + count, keep
        this.tokens, this.logits = tokens, logits.data_ptr()
        self.lengths[:] = lengths
        self.ends[:] = [end + count for end in self.cache.ends_of(len(lengths))]
        return this

    def set_inputs(self, block: Block, probs_BPV: Tensor, uniforms: Uniforms) -> tuple[object, ...]:
        """Set the inputs of the lossless rule; returns the objects whose memory it points to."""
        probs = _for_c(probs_BPV, torch.float32)
        block.places, block.draft, block.target = probs.shape[1], _data(probs), _data(self.probs)
        check_shapes(block, probs)
        accept = _array("d", uniforms.accept, block.batch * block.gamma)
        choose = _array("d", [uniforms.next], block.batch)
        block.accept_uniforms, block.next_uniforms = _address(accept), _address(choose)
        return probs, accept, choose

    def widen(self, count: int) -> None:
        self.cache.end_at([end + count for end in self.cache.ends_of(len(self.lengths))])


class NativeLlama:
    """The compiled forward pass.

    Attributes:
        vocab_size: Width of the logits.
        most_tokens: Maximum tokens of a pass; beyond, transformers is as fast or faster.
        listeners: Called with the final hidden states of each call, [B, N, D].
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        draft_vocabulary: Tensor | None,
        *,
        int8: bool = False,
        round_activations: bool = False,
        library: ctypes.CDLL | None = None,
    ) -> None:
        """`round_activations`: products may round inputs to bfloat16, which is faster with AMX.

        `library`: the compiled sources; None for the library of this processor.
        """
        library = library or compiled()
        assert library is not None, "NativeLlama needs a compiled library; call `can_copy` first"
        self._library = library
        self.most_tokens: int = library.most_tokens(round_activations)
        self._weights = NativeWeights(
            library, hf, draft_vocabulary, int8=int8, round_activations=round_activations
        )
        self._model = self._weights.model
        self.vocab_size: int = self._model.vocab
        body: Any = hf.base_model
        self._rotary: nn.Module = body.rotary_emb
        self._rotations = (torch.zeros(0), torch.zeros(0))
        self.listeners: list[Callable[[Tensor], None]] = []

    def __call__(
        self, tokens_BN: Tensor, cache: RoomyCache, lengths: Sequence[int], keep: int
    ) -> Tensor:
        """Logits of the last `keep` columns (0: all); lengths[b] is the new length of row b."""
        batch, count = tokens_BN.shape
        keep = keep or count
        plan = self._plan(cache, batch, count)
        logits = torch.empty(batch, keep, self.vocab_size)
        tokens_BN = _for_c(tokens_BN, torch.int64)
        states = torch.empty(batch, keep, self._model.hidden) if self.listeners else None
        this_pass = plan.prepare(count, lengths, keep, tokens_BN.data_ptr(), logits, states)
        plan.widen(count)
        self._library.read_tokens(ctypes.byref(self._model), ctypes.byref(this_pass))
        for listener in self.listeners:
            assert states is not None, "a listener was added during the pass"
            listener(states)
        return logits

    def draw(
        self, request: DrawRequest, cache: RoomyCache, lengths: Sequence[int], vocab_size: int
    ) -> Drafted:
        """Serve the request; row b has lengths[b] tokens before its first token is drawn."""
        plan, uniforms = request.plan, request.uniforms
        batch, count = len(request.unread), len(request.unread[0])
        layout = self._plan(cache, batch, count + plan.num_passes - 1)
        read = _array("q", request.unread, batch * count)
        this_pass = layout.prepare(count, lengths, 1, _address(read), layout.logits)
        shape = (batch, plan.num_passes, vocab_size)
        drawn = Drafted(
            torch.empty(batch, plan.num_tokens, dtype=torch.int64),
            None if uniforms is None else torch.empty(shape),
            torch.empty(shape) if plan.raw and not plan.sampling.untempered else None,
        )
        numbers = None if uniforms is None else _array("d", uniforms, batch * plan.num_tokens)
        draft = Draft(
            plan.num_tokens,
            plan.num_passes,
            vocab_size,
            plan.sampling.temperature,
            _address(numbers),
            *map(_data, drawn),
        )
        layout.widen(count + plan.num_passes - 1)
        has_mass = self._library.draw_ahead(
            ctypes.byref(self._model), ctypes.byref(this_pass), ctypes.byref(draft)
        )
        assert has_mass, NO_MASS
        return drawn

    def verify(
        self, request: VerifyRequest, cache: RoomyCache, lengths: Sequence[int], vocab_size: int
    ) -> Verified:
        """Serve a request of the lossless rule; row b has lengths[b] tokens before any rollback."""
        drafted, sampling = request.drafted, request.sampling
        batch, gamma = drafted.tokens_BG.shape
        layout = self._plan(cache, batch, gamma + 1)
        this_pass = layout.prepare(gamma + 1, lengths, gamma + 1, None, layout.logits)
        tokens_BG = _for_c(drafted.tokens_BG, torch.int64)
        rows = (request.newest, request.num_drafted)
        last, counts = (_array("q", [row], batch) for row in rows)
        num_accepted, next_tokens = (array("q", bytes(8 * batch)) for _ in range(2))
        block = Block(batch, gamma, gamma, vocab_size, _data(tokens_BG), _address(counts))
        block.num_accepted, block.next_tokens = _address(num_accepted), _address(next_tokens)
        held = None
        if request.uniforms is not None:
            assert drafted.probs_BPV is not None, "sampled tokens come with their distributions"
            held = layout.set_inputs(block, drafted.probs_BPV, request.uniforms)
        layout.widen(gamma + 1)
        has_mass = self._library.verify_ahead(
            ctypes.byref(self._model),
            ctypes.byref(this_pass),
            _address(last),
            sampling.temperature,
            ctypes.byref(block),
        )
        del held  # the block pointed to it
        assert has_mass, NO_MASS
        return Verified(num_accepted.tolist(), next_tokens.tolist())

    def _plan(self, cache: RoomyCache, batch: int, count: int) -> _Plan:
        plan: _Plan | None = cache.plan
        if plan is None or not plan.fits(count):
            plan = cache.plan = self._new_plan(cache, batch, count)
        return plan

    def _new_plan(self, cache: RoomyCache, batch: int, count: int) -> _Plan:
        layers = [cache.layer(index) for index in range(self._model.num_layers)]
        new = torch.empty(batch, self._model.key_heads, count, self._model.head_size)
        for layer in layers:
            layer.grow(new, new)
            layer.width -= count
        columns = layers[0].buffers[0].shape[2]
        assert all(layer.buffers[0].shape[2] == columns for layer in layers), "layers grow together"
        cos, sin = rotations = self._rotations_up_to(columns)
        threads = torch.get_num_threads()
        size = self._library.workspace_size(
            ctypes.byref(self._model), self.most_tokens, columns, threads
        )
        workspace = torch.empty(size)
        array = ctypes.c_void_p * self._model.num_layers
        keys = array(*[layer.buffers[0].data_ptr() for layer in layers])
        values = array(*[layer.buffers[1].data_ptr() for layer in layers])
        lengths, ends = ((ctypes.c_int64 * batch)() for _ in range(2))
        this_pass = Pass(
            threads=threads,
            batch=batch,
            lengths=ctypes.addressof(lengths),
            ends=ctypes.addressof(ends),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            keys=ctypes.addressof(keys),
            values=ctypes.addressof(values),
            columns=columns,
            workspace=workspace.data_ptr(),
        )
        held = (rotations, workspace, keys, values)
        most_logits = self.most_tokens * self.vocab_size
        return _Plan(cache, layers, this_pass, lengths, ends, most_logits, held)

    def _rotations_up_to(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of at least `length` positions, [positions, S / 2]."""
        if len(self._rotations[0]) < length:
            positions = torch.arange(max(length, 2 * len(self._rotations[0]), 1024))
            rotations = self._rotary(torch.zeros(1), position_ids=positions[None])
            half = self._model.head_size // 2
            self._rotations = tuple(table[0, :, :half].contiguous() for table in rotations)
        return self._rotations


def _array(typecode: str, rows: Sequence[Sequence[float]], count: int) -> array[Any]:
    """The concatenated rows as int64 (q) or float64 (d); faster than building a tensor."""
    numbers: array[Any] = array(typecode)
    for row in rows:
        numbers.extend(row)
    assert len(numbers) == count, f"got {len(numbers)} numbers, wanted {count}"
    return numbers


def _address(numbers: array[Any] | None) -> int | None:
    return None if numbers is None else numbers.buffer_info()[0]


def _data(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _for_c(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to("cpu", dtype).contiguous()  # a draft may be on a GPU


class PromptPass(HfDecoder):
    """The pass of transformers for many tokens; its listeners hear the compiled pass, too."""

    def __init__(
        self, hf: PreTrainedModel, draft_vocabulary: Tensor | None, native: NativeLlama
    ) -> None:
        super().__init__(hf, draft_vocabulary)
        self.native = native

    def listen(self, listener: Callable[[Tensor], None]) -> Callable[[], None]:
        remove = super().listen(listener)
        self.native.listeners.append(listener)

        def stop() -> None:
            remove()
            self.native.listeners.remove(listener)

        return stop


class FloatLayer(RoomyLayer):
    """Keeps keys and values in float32, as the compiled pass does, also of a bfloat16 model."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states.float(), value_states.float())
        return keys.to(key_states.dtype), values.to(value_states.dtype)


class CompiledSession(CausalSession):
    """A `CausalSession` that uses the compiled pass for few tokens."""

    def __init__(self, model: HfModel, native: NativeLlama) -> None:
        super().__init__(model)
        self.cache = RoomyCache(FloatLayer)
        self._native = native

    def take_draw(self, request: DrawRequest) -> Drafted | None:
        batch, new = len(request.unread), len(request.unread[0])
        passes = request.plan.num_passes
        if not self._serves(request, request.plan.sampling, batch * new):
            return None
        if passes == 0:
            return None
        lengths = self._extended_lengths(batch, new + passes - 1)
        begins = [length - passes + 1 for length in lengths]
        drawn = self._native.draw(request, self.cache, begins, self.vocab_size)
        self.lengths = lengths
        return drawn

    def take_verify(self, request: VerifyRequest) -> Verified | None:
        batch, gamma = request.drafted.tokens_BG.shape
        served = self._serves(request, request.sampling, batch * (gamma + 1))
        if not served or type(request.applied_rule) is not Lossless:
            return None
        lengths = self._extended_lengths(batch, gamma + 1)
        verified = self._native.verify(request, self.cache, lengths, self.vocab_size)
        self.lengths = lengths
        return verified

    def _read(self, tokens_BN: Tensor, ends: Sequence[int], *, keep: int) -> Tensor:
        if tokens_BN.numel() > self._native.most_tokens:
            return super()._read(tokens_BN, ends, keep=keep)
        # listeners receive all columns
        logits = self._native(tokens_BN, self.cache, ends, 0 if self._native.listeners else keep)
        return logits[:, -keep:]

    def _fresh(self) -> CompiledSession:
        return CompiledSession(self.model, self._native)

    def _serves(
        self, request: DrawRequest | VerifyRequest, sampling: SamplingParams, num_tokens: int
    ) -> bool:
        """Whether so few tokens are read fast, and no filter or penalty changes the logits.

        Greedy tokens are the same with filters. Listeners hear of passes that PyTorch draws from.
        """
        if self._native.listeners:
            return False
        no_filter = request.uniforms is None or sampling.greedy or sampling.only_temperature
        return num_tokens <= self._native.most_tokens and request.seen_BV is None and no_filter

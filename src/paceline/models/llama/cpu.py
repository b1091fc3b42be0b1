"""A Llama-like model laid out for transformer.c, which reads a few tokens of it in one call.

Only where nothing is lost: on a CPU, matrices that bfloat16 holds exactly or that were rounded to 8
bits before, a C compiler with OpenMP. Everywhere else the models read through torch.

Shape suffixes: B batch, N new tokens, D hidden, S head size.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.core.block import Judgement
from paceline.core.drafted import Drafted
from paceline.models.llama.cpu_weights import NativeWeights
from paceline.native import compiled
from paceline.native.sampling_kernels import NO_MASS
from paceline.native.structures import Block, Draft, Pass
from paceline.native.verification_kernels import check_shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from paceline.core.block import DrawRequest, JudgeRequest, UniformRows
    from paceline.models.hf.cache import RoomyCache, RoomyLayer
    from paceline.native.structures import NativeRule


class _Plan:
    """A pass over a cache, laid out once: good while its keys and values stay where they are."""

    def __init__(
        self,
        cache: RoomyCache,
        layers: list[RoomyLayer],
        this_pass: Pass,
        lengths: Any,
        ends: Any,
        most_logits: int,
        held: tuple[object, ...],
    ) -> None:
        self.this_pass = this_pass
        self.lengths, self.ends = lengths, ends
        self.logits, self.probs, self.raw, self.room = torch.empty(4, most_logits)
        self._cache = weakref.proxy(cache)  # it holds the plan: both go as soon as nobody reads
        self._layers = layers
        self._rooms = (layers[0].rooms, layers[-1].rooms)
        self._held = held  # what the pass points to

    def holds(self, count: int) -> bool:
        """Have the rooms stayed, and is there place for so many more columns?"""
        first, last = self._layers[0], self._layers[-1]  # the others move with them
        stayed = first.rooms is self._rooms[0] and last.rooms is self._rooms[1]
        return stayed and first.width + count <= self.this_pass.room

    def prepare(
        self,
        count: int,
        lengths: Sequence[int],
        keep: int,
        tokens: int | None,
        logits: Tensor,
        states: Tensor | None = None,
    ) -> Pass:
        """The pass that reads so many tokens a row; row b is lengths[b] tokens long afterwards."""
        this = self.this_pass
        this.states = _data(states)
        this.count, this.width, this.keep = count, self._layers[0].width + count, keep
        this.tokens, this.logits = tokens, logits.data_ptr()
        self.lengths[:] = lengths
        self.ends[:] = [end + count for end in self._cache.ends_of(len(lengths))]
        return this

    def lay_out(
        self, block: Block, drafted: Drafted, uniforms: UniformRows, *, raw: bool
    ) -> tuple[object, ...]:
        """What the block's rule looks at; -> what the block points to from then on."""
        assert drafted.probs_BPV is not None, "drawn tokens come with their distributions"
        probs = _for_c(drafted.probs_BPV, torch.float32)
        raws = None if drafted.raw_BPV is None else _for_c(drafted.raw_BPV, torch.float32)
        check_shapes(block, probs, raws)
        accept = _array("d", uniforms.accept, block.batch * block.gamma)
        choose = _array("d", [uniforms.next], block.batch)
        block.places, block.draft, block.draft_raw = probs.shape[1], _data(probs), _data(raws)
        block.target, block.room = _data(self.probs), _data(self.room)
        block.target_raw = _data(self.raw if raw else None)
        block.accept_uniforms, block.next_uniforms = _address(accept), _address(choose)
        return probs, raws, accept, choose

    def widen(self, count: int) -> None:
        """Take so many more columns a row into use."""
        self._cache.end_at([end + count for end in self._cache.ends_of(len(self.lengths))])


class NativeLlama:
    """Reads a few tokens in one call.

    Attributes:
        vocab_size: Width of its logits.
        most_tokens: Of a pass; beyond, torch is as fast or faster.
        listeners: Hear of the hidden states behind the logits of every pass, [B, N, D].
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
        """`round_activations`: products may round activations to bfloat16, which tiles multiply faster.

        `library`: the compiled sources; by default those for this processor.
        """
        library = library or compiled()
        assert library is not None, "NativeLlama needs a compiled library; ask `can_copy` first"
        self._library = library
        self.most_tokens: int = library.most_tokens(round_activations)
        self._weights = NativeWeights(
            library, hf, draft_vocabulary, int8=int8, round_activations=round_activations
        )
        self._model = self._weights.model
        self.vocab_size: int = self._model.vocab
        body: Any = hf.base_model
        self._rotary: nn.Module = body.rotary_emb
        self._turns = (torch.zeros(0), torch.zeros(0))
        self.listeners: list[Callable[[Tensor], None]] = []

    def __call__(
        self, tokens_BN: Tensor, cache: RoomyCache, lengths: Sequence[int], keep: int
    ) -> Tensor:
        """Logits of the last `keep` columns (0: all); row b is lengths[b] tokens long afterwards."""
        batch, count = tokens_BN.shape
        keep = keep or count
        plan = self._plan(cache, batch, count)
        logits = torch.empty(batch, keep, self.vocab_size)
        tokens_BN = tokens_BN.contiguous()
        assert tokens_BN.dtype == torch.int64, "tokens are int64"
        assert tokens_BN.device.type == "cpu", "the compiled pass reads on the CPU"
        states = self._states(batch, keep)
        this_pass = plan.prepare(count, lengths, keep, tokens_BN.data_ptr(), logits, states)
        plan.widen(count)
        self._library.read_tokens(ctypes.byref(self._model), ctypes.byref(this_pass))
        self._tell(states)
        return logits

    def is_fast_for(self, num_tokens: int) -> bool:
        """Whether PyTorch would be slower at so many tokens."""
        return num_tokens <= self.most_tokens

    def draw(
        self, request: DrawRequest, cache: RoomyCache, lengths: Sequence[int], vocab_size: int
    ) -> Drafted:
        """Serve the request; row b is lengths[b] tokens long when it begins to draw."""
        plan, uniforms = request.plan, request.uniforms
        batch, count = len(request.unread), len(request.unread[0])
        layout = self._plan(cache, batch, count + plan.num_passes - 1)
        assert plan.num_passes == 1 or not self.listeners, "only of the last pass would be heard"
        read, states = _array("q", request.unread, batch * count), self._states(batch, 1)
        this_pass = layout.prepare(count, lengths, 1, _address(read), layout.logits, states)
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
        self._tell(states)
        return drawn

    def judge(
        self,
        request: JudgeRequest,
        rule: NativeRule,
        cache: RoomyCache,
        lengths: Sequence[int],
        vocab_size: int,
    ) -> Judgement:
        """Serve the request; row b is lengths[b] tokens long when read."""
        drafted, sampling = request.drafted, request.sampling
        batch, gamma = drafted.tokens_BG.shape
        layout = self._plan(cache, batch, gamma + 1)
        states = self._states(batch, gamma + 1)
        this_pass = layout.prepare(gamma + 1, lengths, gamma + 1, None, layout.logits, states)
        tokens_BG = _for_c(drafted.tokens_BG, torch.int64)
        last, counts = (
            _array("q", [request.newest], batch),
            _array("q", [request.num_drafted], batch),
        )
        num_accepted, next_tokens = (array("q", bytes(8 * batch)) for _ in range(2))
        block = Block(rule, batch, gamma, gamma, vocab_size, _data(tokens_BG), _address(counts))
        block.num_accepted, block.next_tokens = _address(num_accepted), _address(next_tokens)
        held = None
        if request.uniforms is not None:
            raw = request.rule.uses_confidence and not sampling.untempered
            held = layout.lay_out(block, drafted, request.uniforms, raw=raw)
        layout.widen(gamma + 1)
        has_mass = self._library.judge_ahead(
            ctypes.byref(self._model),
            ctypes.byref(this_pass),
            _address(last),
            sampling.temperature,
            ctypes.byref(block),
        )
        del held  # the block pointed to it
        assert has_mass, NO_MASS
        self._tell(states)
        return Judgement(num_accepted.tolist(), next_tokens.tolist())

    def _states(self, batch: int, keep: int) -> Tensor | None:
        """Room for hidden states, if anybody listens."""
        return torch.empty(batch, keep, self._model.hidden) if self.listeners else None

    def _tell(self, states: Tensor | None) -> None:
        for listener in self.listeners:
            assert states is not None, "whoever listens began before the pass"
            listener(states)

    def _plan(self, cache: RoomyCache, batch: int, count: int) -> _Plan:
        """The cache's plan, with room for so many more tokens a row."""
        plan: _Plan | None = cache.plan
        if plan is None or not plan.holds(count):
            plan = cache.plan = self._new_plan(cache, batch, count)
        return plan

    def _new_plan(self, cache: RoomyCache, batch: int, count: int) -> _Plan:
        """Make room for so many more tokens a row, and lay out the passes that fit in it."""
        layers = [cache.layer(index) for index in range(self._model.num_layers)]
        new = torch.empty(batch, self._model.key_heads, count, self._model.head_size)
        for layer in layers:
            layer.make_room(new, new)
            layer.width -= count
        room = layers[0].rooms[0].shape[2]
        assert all(layer.rooms[0].shape[2] == room for layer in layers), "layers grow together"
        cos, sin = turns = self._turns_up_to(room)
        threads = torch.get_num_threads()
        size = self._library.workspace_size(
            ctypes.byref(self._model), self.most_tokens, room, threads
        )
        workspace = torch.empty(size)
        array = ctypes.c_void_p * self._model.num_layers
        keys = array(*[layer.rooms[0].data_ptr() for layer in layers])
        values = array(*[layer.rooms[1].data_ptr() for layer in layers])
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
            room=room,
            workspace=workspace.data_ptr(),
        )
        held = (turns, workspace, keys, values)
        most_logits = self.most_tokens * self.vocab_size
        return _Plan(cache, layers, this_pass, lengths, ends, most_logits, held)

    def _turns_up_to(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of at least so many positions, [positions, S / 2]."""
        if len(self._turns[0]) < length:
            positions = torch.arange(max(length, 2 * len(self._turns[0]), 1024))
            turns = self._rotary(torch.zeros(1), position_ids=positions[None])
            half = self._model.head_size // 2
            self._turns = tuple(turn[0, :, :half].contiguous() for turn in turns)
        return self._turns


def _array(letter: str, rows: Sequence[Sequence[float]], count: int) -> array[Any]:
    """The rows one behind the other, int64 (q) or float64 (d): made faster than a tensor."""
    numbers: array[Any] = array(letter)
    for row in rows:
        numbers.extend(row)
    assert len(numbers) == count, f"got {len(numbers)} numbers, the rows hold {count}"
    return numbers


def _address(numbers: array[Any] | None) -> int | None:
    return None if numbers is None else numbers.buffer_info()[0]


def _data(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _for_c(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As the library reads it; nothing to do for what it wrote itself."""
    assert tensor.device.type == "cpu", "the compiled pass reads on the CPU"
    return tensor.to(dtype).contiguous()

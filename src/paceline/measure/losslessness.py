"""Proof, on the user's own pair and sampler, that speculation leaves the target's text alone.

Two claims are tested. Greedy: speculative text is the target's own greedy text, token for token.
Sampled: every token that a block gave follows the target's exact next-token distribution there.

The second is a G-test over all contexts at once (`core.goodness_of_fit`): a rule that lets the draft
through fills the cells of the tokens that the draft proposes too often.

The target that decodes and the one that it is held against round apart. So two greedy texts may part
where two logits tie, and where top-k or top-p cuts, a token at the border may be let in by one and
kept out by the other. Both are allowed for within a stated tolerance. Border tokens are left out of the
G-test, which compares the other tokens among themselves: given that a token is not at the border, it
follows the target's distribution over the tokens that are not, whichever way the border fell.
"""

# T positions, V vocabulary, K cells
from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from paceline.config import StrictModel
from paceline.core.goodness_of_fit import equal_mass_cells, g_test
from paceline.core.rules import Lossless
from paceline.core.sampling import SamplingParams, proposal_params, to_probs
from paceline.data import CorpusConfig, read_prompts
from paceline.data.batching import batches_of_like_length
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.measure.acceptance import forced_logits
from paceline.measure.top_k_borders import kept_tokens
from paceline.models import load_model, prepare_for_decoding
from paceline.models.compatibility import check_same_vocabulary
from paceline.models.loading import tokenizer_of
from paceline.progress import Progress, silent
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.rule_base import Position, Rule
    from paceline.decode import Generation
    from paceline.models.contract import Model

# Two logits closer than this are a tie that rounding may break either way. In 16 bits a logit between
# 16 and 32 is rounded to eighths.
TIE_FLOAT32 = 1e-3
TIE_16_BITS = 0.25
# Texts that the plain target writes together.
_ROWS = 20


class VerifyConfig(StrictModel):
    """What to prove, on how much. The odds that a lossless rule fails are `false_alarm`."""

    target: str
    draft: str
    prompts: CorpusConfig
    num_prompts: int = Field(default=20, ge=1)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_new_tokens: int = Field(default=64, ge=2)
    gamma: int = Field(default=4, ge=1)
    sampling: SamplingParams = SamplingParams()
    draft_sampling: SamplingParams | None = None
    """How the draft draws; None: as `sampling` says."""
    num_cells: int = Field(default=16, ge=2)
    batch_size: int = Field(default=1, ge=1)
    """Texts that are decoded together; one alone is what the fastest passes are made for."""
    draft_weights: Literal["auto", "int8"] = "auto"
    false_alarm: float = Field(default=1e-4, gt=0, lt=1)
    tolerance: float | None = Field(default=None, ge=0)
    """Two logits closer than this may change places; None: 0.001 in float32, else 0.25."""
    seed: int = 0
    self_test: bool = False
    # float32: in fewer bits a pass over a block and a pass over a token may round apart.
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    device: str = "auto"

    @model_validator(mode="after")
    def _one_penalty(self) -> VerifyConfig:
        proposal_params(self.sampling, self.draft_sampling)
        return self

    @property
    def tie(self) -> float:
        """`tolerance`, or what the dtype asks for."""
        if self.tolerance is not None:
            return self.tolerance
        return TIE_FLOAT32 if self.dtype == "float32" else TIE_16_BITS


class GreedyCheck(StrictModel):
    """Greedy speculative text against greedy target text."""

    num_prompts: int
    num_tokens: int
    num_identical: int
    num_ties: int
    """Texts that part where the target's two best logits, penalised, are closer than the tolerance."""
    first_difference: str | None

    @property
    def passed(self) -> bool:
        return self.first_difference is None


class DistributionCheck(StrictModel):
    """The G-test of sampled tokens."""

    num_tokens: int
    num_cells: int
    num_impossible: int
    """Tokens that the target gives no chance at all, such as those outside its top-k."""
    num_border: int = 0
    """Tokens within the tolerance of the border of top-k or top-p; left out of the cells."""
    cell_counts: list[int]
    g_statistic: float
    p_value: float
    false_alarm: float

    @property
    def passed(self) -> bool:
        return self.p_value >= self.false_alarm and self.num_impossible == 0


class LosslessnessReport(StrictModel):
    """Both checks, and those of the broken rule when a self-test was asked for."""

    config: VerifyConfig
    greedy: GreedyCheck
    distribution: DistributionCheck
    broken_distribution: DistributionCheck | None

    @property
    def passed(self) -> bool:
        """Both claims hold, and the self-test, if any, caught the broken rule."""
        caught = self.broken_distribution is None or not self.broken_distribution.passed
        return self.greedy.passed and self.distribution.passed and caught


class KeepsHalfOfTheRejected(Lossless):
    """The broken rule of the self-test: of the tokens it should reject it keeps every second."""

    exact = False

    def accept(self, at: Position) -> Tensor:
        return 0.5 + 0.5 * super().accept(at)


def verify_losslessness(config: VerifyConfig, progress: Progress = silent) -> LosslessnessReport:
    """Load both models and test both claims, of the pair as it is served, against the plain target.

    Raises:
        UsageError: a model, a prompt file or the pair of tokenizers cannot be used.
    """
    target = load_model(config.target, dtype=config.dtype, device=config.device)
    tokenizer = tokenizer_of(target, config.target)
    prompts = read_prompts(config.prompts, tokenizer, max_tokens=config.max_prompt_tokens)
    draft = load_model(config.draft, dtype=target.dtype, device=config.device)
    check_same_vocabulary(target, draft)
    ready = prepare_for_decoding(draft, config.draft_weights)
    served = prepare_for_decoding(target)
    return verify_models(served, ready, prompts, config, progress, reference=target)


def verify_models(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    config: VerifyConfig,
    progress: Progress = silent,
    rule: Rule | None = None,
    reference: Model | None = None,
) -> LosslessnessReport:
    """Test a rule (the lossless one) on models that are there and prompts that are tokens.

    `reference` is the target whose text and distributions are wanted, where `target` is one that was
    prepared for decoding.
    """
    prompts = prompts[: config.num_prompts]
    models = Models(target, draft, reference or target)
    rule = rule or Lossless()
    greedy = check_greedy(models, prompts, config, rule, progress)
    distribution = check_distribution(models, prompts, config, rule, progress)
    broken = None
    if config.self_test:
        broken_rule = KeepsHalfOfTheRejected()
        broken = check_distribution(models, prompts, config, broken_rule, progress)
    return LosslessnessReport(
        config=config, greedy=greedy, distribution=distribution, broken_distribution=broken
    )


class Models(NamedTuple):
    """The pair that decodes, and the target that it is held against."""

    target: Model
    draft: Model
    reference: Model


def check_greedy(
    models: Models,
    prompts: Sequence[Sequence[int]],
    config: VerifyConfig,
    rule: Rule,
    progress: Progress = silent,
) -> GreedyCheck:
    """Decode every prompt greedily with and without the draft and compare."""
    sampling = config.sampling.model_copy(update={"temperature": 0.0})
    plain = AutoregressiveDecoder(models.reference, sampling)
    speculative = SpeculativeDecoder(
        *(models.target, models.draft, rule, config.gamma, sampling),
        draft_sampling=config.draft_sampling,
    )
    written: dict[int, Generation] = {}
    for group in batches_of_like_length(list(map(len, prompts)), _ROWS):
        batch = plain.generate([prompts[row] for row in group], config.max_new_tokens)
        written |= zip(group, batch, strict=True)
        progress("greedy texts of the target", len(written), len(prompts))
    texts = [written[row] for row in range(len(prompts))]
    num_tokens = num_identical = num_ties = 0
    first_difference: str | None = None
    for start in range(0, len(prompts), config.batch_size):
        rows = slice(start, start + config.batch_size)
        batch, wanted = prompts[rows], texts[rows]
        got = speculative.generate(batch, config.max_new_tokens)
        for row, (want, have) in enumerate(zip(wanted, got, strict=True)):
            num_tokens += len(want.tokens)
            place = first_split(want.tokens, have.tokens)
            # A block needs room, so speculative text ends up to gamma tokens before the context.
            cut = place == len(have.tokens) and have.stop_reason == "context"
            if place is None or cut:
                num_identical += 1
            elif _is_tie(models, batch[row], want.tokens[:place], config):
                num_ties += 1
            else:
                first_difference = first_difference or _describe(start + row, place, want, have)
        progress("greedy texts", start + len(batch), len(prompts))
    return GreedyCheck(
        num_prompts=len(prompts),
        num_tokens=num_tokens,
        num_identical=num_identical,
        num_ties=num_ties,
        first_difference=first_difference,
    )


def first_split(wanted: Sequence[int], got: Sequence[int]) -> int | None:
    """The first position where two texts differ; None where they are one."""
    for position, (want, have) in enumerate(zip(wanted, got, strict=False)):
        if want != have:
            return position
    return None if len(wanted) == len(got) else min(len(wanted), len(got))


def _is_tie(
    models: Models, prompt: Sequence[int], tokens: Sequence[int], config: VerifyConfig
) -> bool:
    vocab_size = check_same_vocabulary(models.reference, models.draft)
    # logits before each token, the last of which is any: only those before it count
    logits_TV = forced_logits(models.reference, prompt, [*tokens, 0], config.sampling, vocab_size)
    best, second = logits_TV[-1].topk(2).values
    return float(best - second) < config.tie


def _describe(row: int, place: int, want: Generation, have: Generation) -> str:
    def token(generation: Generation) -> str:
        return str(generation.tokens[place]) if place < len(generation.tokens) else "the end"

    return f"prompt {row}, token {place}: wanted {token(want)}, got {token(have)}"


def check_distribution(
    models: Models,
    prompts: Sequence[Sequence[int]],
    config: VerifyConfig,
    rule: Rule,
    progress: Progress = silent,
) -> DistributionCheck:
    """Sample text by the rule and count the cells that its tokens fall into; see the module's text."""
    decoder = SpeculativeDecoder(
        *(models.target, models.draft, rule, config.gamma, config.sampling),
        draft_sampling=config.draft_sampling,
    )
    rng = named_generator(config.seed, "cells")
    counts_K = torch.zeros(config.num_cells, dtype=torch.int64)
    num_impossible = num_border = 0
    for start in range(0, len(prompts), config.batch_size):
        batch = prompts[start : start + config.batch_size]
        texts = decoder.generate(batch, config.max_new_tokens, seed=config.seed + start)
        for prompt, text in zip(batch, texts, strict=True):
            # A lossless rule has no say in the first token, which is the prefill's.
            places = _places(models, prompt, text.tokens, config).behind_the_first()
            cells_T, _ = equal_mass_cells(
                places.p_TV, places.q_TV, places.tokens_T, config.num_cells, rng=rng
            )
            counts_K += torch.bincount(cells_T[places.sure_T], minlength=config.num_cells)
            num_impossible += int((~places.possible_T).sum())
            num_border += int((places.possible_T & ~places.sure_T).sum())
        progress(f"sampled texts ({type(rule).__name__})", start + len(batch), len(prompts))
    g, p_value = g_test(counts_K)
    return DistributionCheck(
        num_tokens=int(counts_K.sum()) + num_impossible + num_border,
        num_cells=config.num_cells,
        num_impossible=num_impossible,
        num_border=num_border,
        cell_counts=[int(count) for count in counts_K],
        g_statistic=g,
        p_value=p_value,
        false_alarm=config.false_alarm,
    )


class _Places(NamedTuple):
    """A text against its target, token by token.

    `p`: the target's distribution over the tokens that are not at the border, `q` what the draft
    proposes. `sure`, `possible`: whether the text's token is kept in any case, or may be.
    """

    p_TV: Tensor
    q_TV: Tensor
    tokens_T: Tensor
    sure_T: Tensor
    possible_T: Tensor

    def behind_the_first(self) -> _Places:
        return _Places(*(part[1:] for part in self))


def _places(
    models: Models, prompt: Sequence[int], tokens: Sequence[int], config: VerifyConfig
) -> _Places:
    vocab_size = check_same_vocabulary(models.reference, models.draft)
    given = prompt, tokens, config.sampling, vocab_size
    target_TV = forced_logits(models.reference, *given)
    draft_TV = forced_logits(models.draft, *given)
    sure_TV, possible_TV = kept_tokens(target_TV, config.sampling, config.tie)
    core_TV = to_probs(target_TV, config.sampling) * sure_TV
    p_TV = core_TV / core_TV.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    q_TV = to_probs(draft_TV, proposal_params(config.sampling, config.draft_sampling))
    tokens_T = torch.tensor(list(tokens))
    index_T1 = tokens_T[:, None].to(sure_TV.device)
    sure_T, possible_T = (kept.gather(-1, index_T1)[:, 0].cpu() for kept in (sure_TV, possible_TV))
    return _Places(p_TV, q_TV, tokens_T, sure_T, possible_T)

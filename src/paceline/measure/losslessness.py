"""Tests that speculative decoding is lossless, for a given pair of models and sampler.

- Greedy: speculative text equals that of generate() of transformers, token by token.
- Sampled: each token of a block follows the next-token distribution of transformers' pass over the
  whole text, without a cache. A G-test over all contexts (`core.goodness_of_fit`) detects rules
  that accept too many draft tokens.

The decoding target and the reference target differ by rounding. So greedy texts may differ after a
tie of two logits, and a token at the border of top-k or top-p may be kept by one target only. A
tolerance allows for both. The G-test excludes border tokens: given that a token is not at the
border, it follows the target's distribution over the other tokens, whichever border tokens were
kept.
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
from paceline.data.input_checks import InputChecks, checked
from paceline.decode import SpeculativeDecoder
from paceline.measure.acceptance import forced_logits
from paceline.measure.lossless_reference import reference_of
from paceline.measure.pair import DraftedBy, SampledBy
from paceline.measure.prompt_checks import check_prompts
from paceline.measure.top_k_borders import kept_tokens
from paceline.models import load_model, prepare_for_decoding
from paceline.models.compatibility import check_same_vocabulary
from paceline.models.loading import tokenizer_of
from paceline.progress import Progress, silent
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.rule_base import Position, Rule
    from paceline.models.contract import Model

# Logits closer than this are a tie. In bfloat16, logits between 16 and 32 are multiples of 1/8.
TIE_FLOAT32 = 1e-3
TIE_16_BITS = 0.25


class VerifyConfig(StrictModel):
    """Configuration of `verify`. A lossless rule fails with probability `false_alarm`."""

    target: str
    draft: str
    prompts: CorpusConfig
    num_prompts: int = Field(default=20, ge=1)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_new_tokens: int = Field(default=64, ge=2)
    gamma: int = Field(default=4, ge=1)
    sampling: SampledBy = SamplingParams()
    draft_sampling: DraftedBy = None
    """Sampling parameters of the draft; None: the same as `sampling`."""
    num_cells: int = Field(default=16, ge=2, le=2**16)
    batch_size: int = Field(default=1, ge=1)
    """Number of texts in a batch; the fastest code paths need 1."""
    draft_weights: Literal["auto", "int8"] = "auto"
    false_alarm: float = Field(default=1e-4, gt=0, lt=1)
    tolerance: float | None = Field(default=None, ge=0)
    """Logits closer than this count as equal; None: 0.001 in float32, else 0.25."""
    seed: int = 0
    self_test: bool = False
    # In 16 bits, rounding differs more between passes over one and over several tokens.
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    device: str = "auto"

    @model_validator(mode="after")
    def _one_penalty(self) -> VerifyConfig:
        proposal_params(self.sampling, self.draft_sampling)
        return self

    @property
    def tie(self) -> float:
        """`tolerance`, or the default of the dtype."""
        if self.tolerance is not None:
            return self.tolerance
        return TIE_FLOAT32 if self.dtype == "float32" else TIE_16_BITS

    def check(self) -> InputChecks:
        """Check the inputs; raises UsageError."""
        checks = InputChecks()
        checks.device(self.device)
        models = checks.pair(self.target, self.draft)
        checks.drafting(self.target, self.draft)
        check_prompts(checks, self, models, new_tokens=1 + self.gamma)
        return checks


class GreedyCheck(StrictModel):
    """Comparison of greedy speculative text with the reference's greedy text."""

    num_prompts: int
    num_tokens: int
    num_identical: int
    num_ties: int
    """Texts that differ first where the target's two highest logits are within the tolerance."""
    first_difference: str | None

    @property
    def passed(self) -> bool:
        return self.first_difference is None


class DistributionCheck(StrictModel):
    """The G-test of sampled tokens."""

    num_tokens: int
    num_cells: int
    num_impossible: int
    """Tokens of probability 0 under the target, such as those outside its top-k."""
    num_border: int = 0
    """Tokens within the tolerance of the border of top-k or top-p; excluded from the cells."""
    cell_counts: list[int]
    g_statistic: float
    p_value: float
    false_alarm: float

    @property
    def passed(self) -> bool:
        return self.p_value >= self.false_alarm and self.num_impossible == 0


class LosslessnessReport(StrictModel):
    """Both checks, and the sampled check of a broken rule if `self_test` is set."""

    schema_version: Literal[1] = 1
    kind: Literal["verify"] = "verify"
    config: VerifyConfig
    greedy: GreedyCheck
    distribution: DistributionCheck
    broken_distribution: DistributionCheck | None
    reference: str = "the target's own sessions"
    """What computed the expected texts and distributions."""

    @property
    def passed(self) -> bool:
        """True if both checks pass and the broken rule, if tested, fails."""
        caught = self.broken_distribution is None or not self.broken_distribution.passed
        return self.greedy.passed and self.distribution.passed and caught


class KeepsHalfOfTheRejected(Lossless):
    """Broken rule for the self-test: accepts half of the tokens that it should reject."""

    exact = False

    def accept_at(self, at: Position) -> Tensor:
        return 0.5 + 0.5 * super().accept_at(at)


def verify_losslessness(config: VerifyConfig, progress: Progress = silent) -> LosslessnessReport:
    """Load both models, and compare the pair prepared for decoding with transformers.

    Raises:
        UsageError: a model, a prompt file or the pair of tokenizers cannot be used.
    """
    checked(config)
    target = load_model(config.target, dtype=config.dtype, device=config.device)
    tokenizer = tokenizer_of(target, config.target)
    prompts = read_prompts(
        config.prompts,
        tokenizer,
        max_tokens=config.max_prompt_tokens,
        encoder=target.decoder_prompt is not None,
    )
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
    """Test a rule (default: the lossless one) with loaded models on tokenized prompts.

    `reference`: the target that gives the expected text and distributions; None: `target`.
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
        config=config,
        greedy=greedy,
        distribution=distribution,
        broken_distribution=broken,
        reference=reference_of(models.reference).name,
    )


class Models(NamedTuple):
    """The decoding pair, and the reference target."""

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
    """Decode every prompt greedily with the draft, and compare with the reference's texts."""
    sampling = config.sampling.model_copy(update={"temperature": 0.0})
    speculative = SpeculativeDecoder(
        *(models.target, models.draft, rule, config.gamma, sampling),
        draft_sampling=config.draft_sampling,
    )
    reference = reference_of(models.reference)
    given = sampling, check_same_vocabulary(models.reference, models.draft)
    progress("greedy texts of the target", 0, len(prompts))
    written = reference.greedy(prompts, config.max_new_tokens, *given)
    progress("greedy texts of the target", len(prompts), len(prompts))
    num_tokens = num_identical = num_ties = 0
    first_difference: str | None = None
    for start in range(0, len(prompts), config.batch_size):
        batch = prompts[start : start + config.batch_size]
        got = speculative.generate(batch, config.max_new_tokens)
        for row, have in enumerate(got, start):
            want = written[row]
            if first_split(want, have.tokens) is not None and len(prompts) > 1:
                # alone: padding changes what some models write
                (want,) = reference.greedy([prompts[row]], config.max_new_tokens, *given)
            num_tokens += len(want)
            split = first_split(want, have.tokens)
            # Blocks need space, so speculative text ends up to gamma tokens before the context.
            cut = split == len(have.tokens) and have.stop_reason == "context"
            if split is None or cut:
                num_identical += 1
            elif reference.gap(prompts[row], want[:split], *given) < config.tie:
                num_ties += 1
            else:
                first_difference = first_difference or _describe(row, split, want, have.tokens)
        progress("greedy texts of the pair", start + len(batch), len(prompts))
    return GreedyCheck(
        num_prompts=len(prompts),
        num_tokens=num_tokens,
        num_identical=num_identical,
        num_ties=num_ties,
        first_difference=first_difference,
    )


def first_split(wanted: Sequence[int], got: Sequence[int]) -> int | None:
    """The first position where two texts differ; None if they are equal."""
    for position, (want, have) in enumerate(zip(wanted, got, strict=False)):
        if want != have:
            return position
    return None if len(wanted) == len(got) else min(len(wanted), len(got))


def logit_gap(
    model: Model,
    prompt: Sequence[int],
    tokens: Sequence[int],
    sampling: SamplingParams,
    vocab_size: int,
) -> float:
    """Difference of a model's two highest logits after these tokens."""
    # forced_logits gives the logits before each token, so append an arbitrary one
    logits_TV = forced_logits(model, prompt, [*tokens, 0], sampling, vocab_size)
    best, second = logits_TV[-1].topk(2).values
    return float(best - second)


def _describe(row: int, split: int, want: Sequence[int], have: Sequence[int]) -> str:
    def token(tokens: Sequence[int]) -> str:
        return str(tokens[split]) if split < len(tokens) else "the end"

    return f"prompt {row}, token {split}: wanted {token(want)}, got {token(have)}"


def check_distribution(
    models: Models,
    prompts: Sequence[Sequence[int]],
    config: VerifyConfig,
    rule: Rule,
    progress: Progress = silent,
) -> DistributionCheck:
    """Sample text with the rule, and test the distribution of its tokens."""
    decoder = SpeculativeDecoder(
        *(models.target, models.draft, rule, config.gamma, config.sampling),
        draft_sampling=config.draft_sampling,
    )
    decoder.forces_eos = False  # a forced token does not follow the target's distribution
    reference = reference_of(models.reference)
    vocab_size = check_same_vocabulary(models.reference, models.draft)
    rng = named_generator(config.seed, "cells")
    counts_K = torch.zeros(config.num_cells, dtype=torch.int64)
    num_impossible = num_border = 0
    for start in range(0, len(prompts), config.batch_size):
        batch = prompts[start : start + config.batch_size]
        texts = decoder.generate(batch, config.max_new_tokens, seed=config.seed + start)
        written = [text.tokens for text in texts]
        expected = reference.logits(batch, written, config.sampling, vocab_size)
        for prompt, tokens, target_TV in zip(batch, written, expected, strict=True):
            # without the first token, which comes from the prefill
            parts = (part[1:] for part in _tested(models, prompt, tokens, target_TV, config))
            p_TV, q_TV, tokens_T, sure_T, possible_T = parts
            cells_T, _ = equal_mass_cells(p_TV, q_TV, tokens_T, config.num_cells, rng=rng)
            counts_K += torch.bincount(cells_T[sure_T], minlength=config.num_cells)
            num_impossible += int((~possible_T).sum())
            num_border += int((possible_T & ~sure_T).sum())
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


def _tested(
    models: Models,
    prompt: Sequence[int],
    tokens: Sequence[int],
    target_TV: Tensor,
    config: VerifyConfig,
) -> tuple[Tensor, ...]:
    """p_TV without border tokens, q_TV, tokens_T; masks of tokens kept certainly, possibly [T]."""
    draft_TV = forced_logits(models.draft, prompt, tokens, config.sampling, target_TV.shape[-1])
    sure_TV, possible_TV = kept_tokens(target_TV, config.sampling, config.tie)
    core_TV = to_probs(target_TV, config.sampling) * sure_TV
    p_TV = core_TV / core_TV.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    q_TV = to_probs(draft_TV, proposal_params(config.sampling, config.draft_sampling))
    tokens_T = torch.tensor(list(tokens))
    index_T1 = tokens_T[:, None].to(sure_TV.device)
    sure_T, possible_T = (kept.gather(-1, index_T1)[:, 0].cpu() for kept in (sure_TV, possible_TV))
    return p_TV, q_TV, tokens_T, sure_T, possible_T

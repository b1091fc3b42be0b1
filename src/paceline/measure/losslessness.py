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

import math
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from paceline.config import Options, Result, StrictModel
from paceline.core.goodness_of_fit import equal_mass_cells, g_test, least_tokens
from paceline.core.rules import Lossless
from paceline.core.sampling import SamplingParams, proposal_params, to_probs
from paceline.data.input_checks import InputChecks, checked, note
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.errors import NOT_DONE, VERDICT
from paceline.measure.acceptance import forced_logits, penalised_text
from paceline.measure.pair import Pair, PairConfig, load_beside
from paceline.models import load_model, prepare_for_decoding
from paceline.models.compatibility import check_same_vocabulary
from paceline.models.contract import decoder_contexts
from paceline.models.hf.base import HfModel
from paceline.models.hf.plain_text import REFERENCE, greedy_text, plain_text_logits
from paceline.models.loading import tokenizer_of
from paceline.progress import Progress, silent
from paceline.results.row import Row, Source
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.core.rule_base import Position, Rule
    from paceline.models.contract import Model

# Logits closer than this are a tie. In bfloat16, logits between 16 and 32 are multiples of 1/8.
TIE_FLOAT32 = 1e-3
TIE_16_BITS = 0.25
_SUM_ERROR = 1e-6  # maximum error of a running sum of probabilities in float32


class VerifyConfig(PairConfig):
    """Configuration of `verify`. A lossless rule fails with probability `false_alarm`.

    Attributes:
        batch_size: Number of texts in a batch; the fastest code paths need 1.
        tolerance: Logits closer than this count as equal; None: 0.001 in float32, else 0.25.
    """

    num_prompts: Annotated[int, Options()] = Field(default=20, ge=1)
    max_new_tokens: Annotated[int, Options()] = Field(default=64, ge=2)
    batch_size: int = Field(default=1, ge=1)
    # In 16 bits, rounding differs more between passes over one and over several tokens.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    gamma: Annotated[int, Options()] = Field(default=4, ge=1)
    num_cells: int = Field(default=16, ge=2, le=2**16)
    false_alarm: float = Field(default=1e-4, gt=0, lt=1)
    tolerance: float | None = Field(default=None, ge=0)
    self_test: Annotated[bool, Options()] = False

    @property
    def tie(self) -> float:
        """`tolerance`, or the default of the dtype."""
        if self.tolerance is not None:
            return self.tolerance
        return TIE_FLOAT32 if self.dtype == "float32" else TIE_16_BITS

    def check(self, checks: InputChecks) -> None:
        checks.device(self.device)
        models = checks.pair(self.target, self.draft)
        most = self.check_prompts(checks, models[:1], new_tokens=1) * (self.max_new_tokens - 1)
        if most < 2 * (needed := least_tokens(self.num_cells)):
            note(
                f"the texts have at most {most} tokens to test, fewer if they end early, and the "
                f"test of sampled tokens needs {needed}: give more prompts, and raise num_prompts "
                "or max_new_tokens"
            )


def reference_name(model: Model) -> str:
    """What computes the expected texts and distributions of a target."""
    return REFERENCE if isinstance(model, HfModel) else "the target's own sessions"


def reference_greedy(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: SamplingParams,
    vocab_size: int,
) -> list[int]:
    """The greedy text after a prompt; only the penalty of `sampling` is used.

    A transformers model is asked by generate(), without Paceline's decoding. A model of another
    kind, such as a table, has sessions only; its own decoder is the reference then.
    """
    if not isinstance(model, HfModel):
        decoder = AutoregressiveDecoder(model, sampling.model_copy(update={"temperature": 0.0}))
        decoder.vocab_size = vocab_size
        return decoder.generate([prompt], max_new_tokens)[0].tokens
    (context,) = decoder_contexts(model, [prompt])
    limit, length = model.max_length, max_new_tokens
    if limit is not None:
        length = min(length, limit - len(context))
    return greedy_text(
        model,
        prompt,
        length,
        repetition_penalty=sampling.repetition_penalty,
        vocab_size=vocab_size,
        forces_eos=length == max_new_tokens,  # not where the context ends
    )


@torch.inference_mode()
def reference_logits(
    model: Model,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    vocab_size: int,
) -> list[Tensor]:
    """Logits before each token of each text, penalty applied, [T, V] each.

    Of a transformers model: by a pass over the whole text without a cache.
    """
    if not isinstance(model, HfModel):
        return [
            forced_logits(model, prompt, text, sampling, vocab_size)
            for prompt, text in zip(prompts, texts, strict=True)
        ]
    rows = zip(prompts, texts, plain_text_logits(model, prompts, texts), strict=True)
    return [
        penalised_text(model, prompt, text, logits_TV[:, :vocab_size], sampling)
        for prompt, text, logits_TV in rows
    ]


class GreedyCheck(StrictModel):
    """Comparison of greedy speculative text with the reference's greedy text.

    Attributes:
        row: The units are the prompts. `identical`: texts that are equal; `ties`: texts that differ
            first where the target's two highest logits are within the tolerance.
    """

    row: Row
    first_difference: str | None

    @property
    def passed(self) -> bool:
        return self.first_difference is None

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of prompts, their tokens, identical texts and ties."""
        sums = {name: int(sum(filter(None, part))) for name, part in self.row.sums.items()}
        return {"prompts": len(self.row.units)} | sums


class DistributionCheck(StrictModel):
    """The G-test of sampled tokens.

    Attributes:
        row: The units are the cells of the test; its figures are totals, and so are `impossible`:
            tokens of probability 0 under the target, such as those outside its top-k, and `border`:
            tokens within the tolerance of the border of top-k or top-p. Both are in no cell.
    """

    row: Row
    false_alarm: float

    @property
    def passed(self) -> bool:
        """False if the rule is not lossless; true also with too few tokens for the test."""
        return not (self.p_value < self.false_alarm or self.counts["impossible"])

    @property
    def p_value(self) -> float:
        """How often a lossless rule has counts at least as unequal; NaN: too few tokens."""
        return self.row.totals.get("p_value", math.nan)

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of tokens in cells, of cells, and of tokens in no cell."""
        outside = {name: int(self.row.totals[name]) for name in ("impossible", "border")}
        tokens = int(sum(filter(None, self.row.sums["tokens"])))
        return {"tokens": tokens, "cells": len(self.row.units)} | outside


class LosslessnessReport(Result):
    """Both checks, and the sampled check of a broken rule if `self_test` is set."""

    schema_version: Literal[1] = 1
    kind: Literal["verify"] = "verify"
    computed: ClassVar = ("passed", "verdict")
    config: VerifyConfig
    greedy: GreedyCheck
    distribution: DistributionCheck
    broken_distribution: DistributionCheck | None
    reference: str = "the target's own sessions"
    """What computed the expected texts and distributions."""

    @property
    def summary(self) -> str:
        """The verdict."""
        return self.word

    @property
    def passed(self) -> bool:
        """True if both checks pass and the broken rule, if tested, fails."""
        return self.word == "PASSED"

    @property
    def word(self) -> Literal["PASSED", "FAILED", "UNDECIDED"]:
        """The verdict. UNDECIDED: there are too few tokens, or the broken rule passed, too."""
        if not (self.greedy.passed and self.distribution.passed):
            return "FAILED"
        return "UNDECIDED" if self.open_question else "PASSED"

    @property
    def open_question(self) -> str:
        """Why a pair that failed no test has not passed, and what to do; empty: it has."""
        counts, broken = self.distribution.counts, self.broken_distribution
        if math.isnan(self.distribution.p_value):
            needed = least_tokens(counts["cells"])
            return f"{counts['tokens']} sampled tokens are too few, wanted {needed}; {_MORE}"
        return _BROKEN_PASSED if broken is not None and broken.passed else ""

    @property
    def exit_code(self) -> int:
        """Of the command line: 0 passed, 1 failed, 3 undecided."""
        return {"PASSED": 0, "FAILED": VERDICT, "UNDECIDED": NOT_DONE}[self.word]


_MORE = "give more prompts, and raise --num-prompts or --max-new-tokens"
_BROKEN_PASSED = (
    "the broken rule passed, too: the texts are too few, or the draft is almost equal to its "
    f"target; {_MORE}"
)


class KeepsHalfOfTheRejected(Lossless):
    """Broken rule for the self-test: accepts half of the tokens that it should reject.

    A drafted position then follows (p + q) / 2, p the target and q the draft, and a bonus token p.
    """

    exact = False

    @property
    def name(self) -> str:
        return "keeps half of the rejected"

    def accept_at(self, at: Position) -> Tensor:
        return 0.5 + 0.5 * super().accept_at(at)


def verify_losslessness(config: VerifyConfig, progress: Progress = silent) -> LosslessnessReport:
    """Load both models, and compare the pair prepared for decoding with transformers.

    Raises:
        UsageError: a model, a prompt file or the pair of tokenizers cannot be used.
    """
    checked(config)
    target = load_model(config.target, dtype=config.dtype, device=config.device)
    tokenizer_of(target, config.target)
    draft = load_beside(target, config.draft, config.device, parallel=config.parallel)
    config, prompts = Pair(target, draft).prompts(config)
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
        reference=reference_name(models.reference),
    )


class Models(NamedTuple):
    """The decoding pair, and the reference target."""

    target: Model
    draft: Model
    reference: Model

    def decoder(
        self, rule: Rule, config: VerifyConfig, sampling: SamplingParams
    ) -> SpeculativeDecoder:
        pair, drafts = (self.target, self.draft), config.draft_sampling
        return SpeculativeDecoder(*pair, rule, config.gamma, sampling, draft_sampling=drafts)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary that the reference shares with the draft."""
        return check_same_vocabulary(self.reference, self.draft)


def check_greedy(
    models: Models,
    prompts: Sequence[Sequence[int]],
    config: VerifyConfig,
    rule: Rule,
    progress: Progress = silent,
) -> GreedyCheck:
    """Decode every prompt greedily with the draft, and compare with the reference's texts."""
    sampling = config.sampling.model_copy(update={"temperature": 0.0})
    speculative = models.decoder(rule, config, sampling)
    reference, settings = models.reference, (sampling, models.vocab_size)
    sums: dict[str, list[float]] = {"tokens": [], "identical": [], "ties": []}
    first_difference: str | None = None
    for start in range(0, len(prompts), config.batch_size):
        batch = prompts[start : start + config.batch_size]
        got = speculative.generate(batch, config.max_new_tokens)
        for row, have in enumerate(got, start):
            # alone: padding changes what some models write
            want = reference_greedy(reference, prompts[row], config.max_new_tokens, *settings)
            split = first_split(want, have.tokens)
            tie = False
            if split is not None:
                # the logits are those before each token, so append an arbitrary one
                text = [[*want[:split], 0]]
                (logits_TV,) = reference_logits(reference, [prompts[row]], text, *settings)
                best, second = logits_TV[-1].topk(2).values
                tie = float(best - second) < config.tie
            if split is not None and not tie:
                first_difference = first_difference or _describe(row, split, want, have.tokens)
            for name, value in zip(sums, (len(want), split is None, tie), strict=True):
                sums[name].append(value)
        progress("greedy texts", start + len(batch), len(prompts))
    row = _row(config, f"prompts of {config.prompts.path}", sums, rule, sampling)
    return GreedyCheck(row=row, first_difference=first_difference)


def _row(
    config: VerifyConfig,
    population: str,
    sums: Mapping[str, Sequence[float]],
    rule: Rule,
    sampling: SamplingParams,
    **totals: float,
) -> Row:
    setting = {"draft": config.draft, **sampling.setting, "gamma": config.gamma}
    return Row(
        population=population,
        units=tuple(range(len(sums["tokens"]))),
        setting=setting | {"rule": rule.name},
        sums={name: tuple(map(float, values)) for name, values in sums.items()},
        totals=totals,
        source=Source.here("verify"),
    )


def first_split(text: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position where two texts differ; None if they are equal."""
    pairs = enumerate(zip_longest(text, other))
    return next((place for place, (token, other_token) in pairs if token != other_token), None)


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
    decoder = models.decoder(rule, config, config.sampling)
    decoder.forces_eos = False  # a forced token does not follow the target's distribution
    rng = named_generator(config.seed, "cells")
    counts_K = torch.zeros(config.num_cells, dtype=torch.int64)
    num_impossible = num_border = 0
    for start in range(0, len(prompts), config.batch_size):
        batch = prompts[start : start + config.batch_size]
        texts = decoder.generate(batch, config.max_new_tokens, seed=config.seed + start)
        written = [text.tokens for text in texts]
        settings = config.sampling, models.vocab_size
        expected = reference_logits(models.reference, batch, written, *settings)
        for prompt, tokens, target_TV in zip(batch, written, expected, strict=True):
            # without the first token, which comes from the prefill
            parts = (part[1:] for part in _tested(models, prompt, tokens, target_TV, config))
            p_TV, q_TV, tokens_T, sure_T, possible_T = parts
            cells_T, _ = equal_mass_cells(p_TV, q_TV, tokens_T, config.num_cells, rng=rng)
            counts_K += torch.bincount(cells_T[sure_T], minlength=config.num_cells)
            num_impossible += int((~possible_T).sum())
            num_border += int((possible_T & ~sure_T).sum())
        of = " of a broken rule" if isinstance(rule, KeepsHalfOfTheRejected) else ""
        progress(f"sampled texts{of}", start + len(batch), len(prompts))
    totals = {"impossible": num_impossible, "border": num_border}
    if int(counts_K.sum()) >= least_tokens(config.num_cells):
        totals |= dict(zip(("g_statistic", "p_value"), g_test(counts_K), strict=True))
    sums = {"tokens": [int(count) for count in counts_K]}
    row = _row(config, "cells of the G-test", sums, rule, config.sampling, **totals)
    return DistributionCheck(row=row, false_alarm=config.false_alarm)


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


def kept_tokens(
    logits_TV: Tensor, params: SamplingParams, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Tokens that the sampler certainly keeps, and tokens that it may keep.

    Logits depend slightly on the shape of the pass and on the data type, so tokens with nearly
    equal logits may swap ranks in the order that top-k and top-p cut.
    Tokens at the border are in the second set only. `tolerance`: logits closer than this may swap
    ranks, and the odds of a token may be off by a factor of exp(tolerance / temperature).

    Shapes: logits [T, V], the repetition penalty applied -> bool [T, V] each.
    """
    vocab_size = logits_TV.shape[-1]
    temperature = params.temperature or 1.0
    most = 1 if params.greedy else params.top_k or vocab_size
    scaled_TV = logits_TV.double() / temperature
    slack = tolerance / temperature
    ordered_TV = scaled_TV.sort(-1).values
    surely_ahead_TV = vocab_size - torch.searchsorted(ordered_TV, scaled_TV + slack, right=True)
    # - 1: the token itself
    maybe_ahead_TV = vocab_size - torch.searchsorted(ordered_TV, scaled_TV - slack) - 1
    sure_TV, possible_TV = maybe_ahead_TV < most, surely_ahead_TV < most
    if params.greedy or params.top_p == 1:
        return sure_TV, possible_TV
    likeliest_TV = ordered_TV.flip(-1)
    likeliest_TV[:, most:] = -torch.inf
    mass_TV = torch.nn.functional.pad(likeliest_TV.softmax(-1).cumsum(-1), (1, 0))
    odds = torch.tensor(slack, dtype=torch.float64).exp()
    least_TV = _at_odds(mass_TV.gather(-1, surely_ahead_TV), 1 / odds) - _SUM_ERROR
    most_TV = _at_odds(mass_TV.gather(-1, maybe_ahead_TV), odds) + _SUM_ERROR
    # the most likely token is always kept
    sure_TV &= (maybe_ahead_TV == 0) | (most_TV < params.top_p)
    possible_TV &= (surely_ahead_TV == 0) | (least_TV < params.top_p)
    return sure_TV, possible_TV


def _at_odds(mass: Tensor, odds: Tensor) -> Tensor:
    """The probability whose odds are `odds` times those of `mass`."""
    return mass * odds / (mass * odds + (1 - mass).clamp(min=0)).clamp(min=1e-300)

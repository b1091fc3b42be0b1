"""Configuration of training: `TrainSettings` of all kinds, `AlignConfig` and its named recipes.

Paper: Zhou et al. 2023, Table 1 and appendix B.3: `RECIPES`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field, field_validator, model_validator

from paceline.config import HomePath, Options, StrictModel
from paceline.core.divergences import Mean
from paceline.core.sampling import SamplingParams
from paceline.data.examples import Lengths
from paceline.data.input_checks import FLOAT32_BYTES, InputChecks
from paceline.data.prompts import NO_COMPLETION, ChatOrRaw, CorpusConfig
from paceline.data.replay import Rounds
from paceline.errors import PromptError
from paceline.models.compatibility import check_fits
from paceline.records import RunDirectory
from paceline.train.checkpoint import check_run_directory
from paceline.train.lora import Lora
from paceline.train.loss import LossVocabulary
from paceline.train.objectives import ForwardKL, Objective, Objectives, reads_target, reads_top
from paceline.train.optim import Adafactor, Optimizer
from paceline.train.parallel import Parallel
from paceline.train.tracking import TrackerName, check_trackers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.models.inspection import ModelFacts

RecipeName = Literal["supervised_kd", "seq_kd", "imit_kd", "f_distill", "gkd"]

_RECIPES: dict[RecipeName, tuple[str, float, float]] = {
    # Hinton et al. 2015: forward KL on fixed text
    "supervised_kd": ("forward_kl", 1.0, 0.0),
    # Kim and Rush 2016: text from the target, cross entropy with its tokens
    "seq_kd": ("cross_entropy", 0.0, 0.0),
    # Lin et al. 2020: forward KL, half on fixed text, half on text from the draft
    "imit_kd": ("forward_kl", 0.5, 1.0),
    # Wen et al. 2023: TVD, half on text from the draft, half on text from the target
    "f_distill": ("tvd", 0.0, 0.5),
    # Agarwal et al. 2023: on-policy; the objective may be changed to a JSD
    "gkd": ("forward_kl", 0.0, 1.0),
}
RECIPES: dict[RecipeName, dict[str, Any]] = {
    name: {"objective": [{"kind": kind}], "fixed_fraction": fixed, "draft_fraction": draft}
    for name, (kind, fixed, draft) in _RECIPES.items()
}
"""Defaults by name; keys in the configuration override them."""


class Checkpoints(StrictModel):
    """When to save checkpoints (whichever is due first), and how many to keep."""

    every_steps: int | None = Field(default=None, ge=1)
    every_seconds: float | None = Field(default=120.0, gt=0)
    keep: int = Field(default=2, ge=1)


class TrainSettings(StrictModel):
    """One training run.

    Attributes:
        output: Run directory.
        mean: `sequence`: mean over sequences of their means, as in the paper; `token`: over tokens.
        num_steps: Budget in optimizer steps. Without max_seconds, the run is deterministic.
        max_seconds: Budget in seconds, without set-up and the evaluations before and after. With
            both budgets, the schedule follows the one that ends first.
        max_prompt_tokens: Maximum prompt tokens; prompts keep their last ones. Documents are cut to
            max_prompt_tokens + max_completion_tokens.
        batch_size: Sequences per optimizer step, over all processes and accumulation steps.
        gradient_accumulation_steps: Split each step into N parts to save memory; the result is the
            same.
        max_gradient_norm: Clip gradients to this norm; None: no clipping.
        max_loss_ratio: End the run if the loss exceeds its running median by this factor in several
            consecutive steps.
        chunk_tokens: Number of tokens whose logits are in memory at the same time. `auto`: on a GPU
            256 to 8192, as many as half of the free memory holds; else 256. The result is the same.
        precision: Precision of forward and backward passes; weights and sums are float32. `auto`
            is bfloat16 on GPUs that have it and on processors with AMX, else float32.
        device: `auto` is the GPU if there is one, else the CPU.
        track: Experiment trackers that get the metrics: tensorboard, wandb, trackio, mlflow.
    """

    output: HomePath
    mean: Mean = "sequence"
    optimizer: Optimizer = Adafactor()
    num_steps: Annotated[int | None, Options()] = Field(default=None, ge=1)
    max_seconds: Annotated[float | None, Options()] = Field(default=None, gt=0, allow_inf_nan=False)
    max_prompt_tokens: Annotated[int, Options()] = Field(default=64, ge=1)
    max_completion_tokens: Annotated[int, Options()] = Field(default=64, ge=1)
    batch_size: Annotated[int, Options()] = Field(default=32, ge=1)
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    max_gradient_norm: float | None = Field(default=1.0, gt=0, allow_inf_nan=False)
    max_loss_ratio: float = Field(default=10.0, gt=1)
    chunk_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu"] = "auto"
    seed: Annotated[int, Options()] = 0
    checkpoints: Checkpoints = Checkpoints()
    track: tuple[TrackerName, ...] = ()

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.max_prompt_tokens, self.max_completion_tokens)

    @model_validator(mode="after")
    def _consistent(self) -> TrainSettings:
        if self.num_steps is None and self.max_seconds is None:
            raise ValueError("got no budget; set num_steps or max_seconds")
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps}; change one of them"
            )
        return self

    @abstractmethod
    def check(self, checks: InputChecks) -> None:
        """Check the inputs; raises UsageError."""

    def check_output(self, checks: InputChecks, model: ModelFacts | None) -> None:
        """Check the disk space for the checkpoints of a model, and the trackers."""
        check_trackers(self.track)
        moments = 2 if self.optimizer.kind == "adamw" else 0
        count = 0 if model is None else model.num_parameters
        copies = (self.checkpoints.keep + 1) * (1 + moments) + 1
        checks.output(self.output, FLOAT32_BYTES * count * copies)


class AlignData(StrictModel):
    """Training and held-out text.

    Attributes:
        train: Documents, prompts, or prompts with completions.
        chat: Train on texts as messages of the user with their answers; false: as they are; unset:
            prompts are messages if the target has a chat template, as in `measure`.
        held_out: Prompts for evaluation; the target completes them once.
        held_out_from_train: Instead of `held_out`, remove N documents or prompts with all
            their answers from `train`, chosen by the run's seed. No evaluation if both are None.
        pack_documents: Concatenate documents before splitting them into rows, without padding.
        pretraining: Text that the draft was pretrained on, mixed in against forgetting. It is used
            unchanged, packed and streamed; a split cannot have a slice, see `limit`.
        pretraining_fraction: Fraction of each batch's rows that are pretraining text.
        keep_states_gb: Cache the target's hidden states of `train` in the memory of each process,
            up to this many 10^9 bytes; None: compute them again each time.
        recorded_states: Train on the hidden states that `generate-data` recorded with the text
            (`writer.hidden_states`). Only the target's head is loaded.
    """

    train: CorpusConfig
    chat: ChatOrRaw = None
    held_out: CorpusConfig | None = None
    held_out_from_train: int | None = Field(default=None, ge=1)
    pack_documents: bool = False
    pretraining: CorpusConfig | None = None
    pretraining_fraction: float = Field(default=0.1, gt=0, lt=1)
    keep_states_gb: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    recorded_states: bool = False

    @model_validator(mode="after")
    def _holds_out_once(self) -> AlignData:
        if self.held_out is not None and self.held_out_from_train is not None:
            raise ValueError("got both held_out and held_out_from_train; set one of them to null")
        return self


class Evaluation(StrictModel):
    """Evaluation on held-out text that the target generates, before, during and after training.

    Attributes:
        every_steps: Steps between evaluations during training; None: only before and after.
        num_prompts: Maximum number of prompts.
        max_new_tokens: Maximum number of tokens that the target generates per prompt.
        sampling: Sampling of the target's text and of the compared distributions.
        gamma: Draft tokens per block, for the block efficiency.
    """

    every_steps: int | None = Field(default=None, ge=1)
    num_prompts: int = Field(default=32, ge=1)
    max_prompt_tokens: int = Field(default=32, ge=1)
    max_new_tokens: int = Field(default=64, ge=1)
    sampling: SamplingParams = SamplingParams()
    gamma: int = Field(default=5, ge=1)

    @field_validator("sampling")
    @classmethod
    def _no_penalty(cls, sampling: SamplingParams) -> SamplingParams:
        if sampling.repetition_penalty != 1:
            raise ValueError(
                "repetition_penalty must be 1 in evaluation; use `measure` for other values"
            )
        return sampling


class Finish(StrictModel):
    """Another objective for the last part of the run.

    Attributes:
        objective: One divergence or a weighted sum.
        begin: Fraction of the run after which this objective starts.
    """

    objective: Objectives
    begin: float = Field(default=0.7, ge=0, lt=1)


class AlignConfig(TrainSettings):
    """One alignment run (Zhou et al. 2023, Alg. A.2); see also `TrainSettings`.

    The aligned draft is saved to `output/draft`.

    Attributes:
        target: Hub id, directory or GGUF file of the target. Its tokenizer is enough if nothing
            reads the target: objectives top_k_tail and cross_entropy, on fixed text, without
            evaluation.
        draft: Hub id, directory or GGUF file of the initial draft, which is not changed.
        recipe: Named defaults for objective, fixed_fraction and draft_fraction.
        objective: One divergence or a weighted sum.
        finish: Another objective for the last part of the run.
        loss_vocabulary: Compute divergences over a part of the vocabulary; None: over all tokens.
        fixed_fraction: lambda1, the fraction of batches that are unchanged corpus text.
        draft_fraction: lambda2, the fraction of the other batches that the draft generates; the
            target generates the rest.
        sampling: Sampling of generated training text.
        target_rounds: Let the target generate many texts at once, keep their hidden states, and
            train on each text several times; None: one batch at a time, used once. Of use if
            fixed_fraction and draft_fraction leave text to it.
        parallel: Blocks that the draft learns to propose in one pass; None: token by token. The
            first token of a block has the loss of an ordinary draft.
        lora: Train an adapter of low rank in place of the weights, in `output/adapter`, by default
            with AdamW; the saved draft has it in its weights. None: train the weights.
        freeze_embeddings: Freeze the embeddings and the output head.
        freeze_layers: Freeze the draft's first N layers. The backward pass stops above them. Useful
            if they are copies of the target's first layers.
    """

    target: str = Field(min_length=1)
    draft: str = Field(min_length=1)
    data: Annotated[AlignData, Options("chat", data="train")]
    recipe: Annotated[RecipeName | None, Options()] = None
    objective: Annotated[Objectives, Options()] = (ForwardKL(),)
    finish: Finish | None = None
    loss_vocabulary: LossVocabulary | None = None
    fixed_fraction: Annotated[float, Options()] = Field(default=1.0, ge=0, le=1)
    draft_fraction: Annotated[float, Options()] = Field(default=0.0, ge=0, le=1)
    sampling: SamplingParams = SamplingParams()
    target_rounds: Rounds | None = None
    parallel: Parallel | None = None
    lora: Lora | None = None
    freeze_embeddings: Annotated[bool, Options()] = False
    freeze_layers: int = Field(default=0, ge=0)
    evaluation: Evaluation = Evaluation()

    @property
    def evaluates(self) -> bool:
        """True if there is held-out text."""
        return self.data.held_out is not None or self.data.held_out_from_train is not None

    @property
    def terms(self) -> tuple[Objective, ...]:
        """All terms of the objective and of the finish."""
        return self.objective + (() if self.finish is None else self.finish.objective)

    @property
    def target_writes(self) -> bool:
        """True if some of the text is the target's."""
        return self.fixed_fraction < 1 and self.draft_fraction < 1

    @property
    def draft_writes(self) -> bool:
        """True if some of the text is the draft's."""
        return self.fixed_fraction < 1 and self.draft_fraction > 0

    @property
    def loads_target(self) -> bool:
        """True if the target's weights are needed."""
        kept = self.data.keep_states_gb is not None
        return self.target_writes or kept or reads_target(self.terms) or self.evaluates

    @property
    def pretraining_rows(self) -> int:
        """Number of rows per step that are pretraining text."""
        if self.data.pretraining is None:
            return 0
        return round(self.data.pretraining_fraction * self.batch_size)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_recipe(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        optimizer = values.get("optimizer") or {}
        if values.get("lora") is not None and isinstance(optimizer, dict):
            # Adafactor's step goes with the weight, which is 0 at first
            values = values | {"optimizer": {"kind": "adamw"} | optimizer}
        name = values.get("recipe")
        return RECIPES[name] | values if isinstance(name, str) and name in RECIPES else values

    @model_validator(mode="after")
    def _fits_together(self) -> AlignConfig:
        own_rows = self.batch_size - self.pretraining_rows
        if self.lora is not None and (self.freeze_embeddings or self.freeze_layers):
            raise ValueError("lora trains no weight of the draft; unset freeze_...")
        weighting = None if self.parallel is None else self.parallel.weighting
        parts = (self.objective, self.objective if self.finish is None else self.finish.objective)
        if any(reads_top(part) and reads_target(part) for part in parts):
            raise ValueError(
                "top_k_tail is for unknown probabilities; use it alone or with cross_entropy"
            )
        if weighting in ("efficiency", "confidence") and not all(map(reads_target, parts)):
            raise ValueError(
                f"parallel.weighting {weighting} needs the target's probabilities, which an "
                "objective does not read; set parallel.weighting to geometric"
            )
        if self.data.pretraining is not None and not 0 < own_rows < self.batch_size:
            raise ValueError(
                f"data.pretraining_fraction {self.data.pretraining_fraction} of batch_size "
                f"{self.batch_size} is {self.pretraining_rows} rows; wanted at least 1 and fewer "
                "than batch_size"
            )
        if self.target_rounds is not None and self.target_rounds.rows % own_rows:
            raise ValueError(
                f"target_rounds.rows is {self.target_rounds.rows}, wanted a multiple of "
                f"{own_rows}, which is batch_size without pretraining rows; change one of them"
            )
        if self.loss_vocabulary is not None:
            for term in self.terms:
                if term.needs_all_tokens:
                    raise ValueError(
                        f"objective {term!r} needs all tokens, and loss_vocabulary omits some; "
                        "remove one of them"
                    )
        self._check_recorded_scores()
        self._check_recorded_states()
        return self

    def check(self, checks: InputChecks) -> None:
        check_run_directory(RunDirectory(self.output), self, resume=checks.resume)
        if self.loads_target:
            target, draft = checks.pair(self.target, self.draft)
            tokenizer = target.tokenizer
        else:
            target, tokenizer = None, checks.tokenizer("target", self.target)
            draft = checks.model("draft", self.draft)
        checks.texts(self.data, "train", "held_out", "pretraining")
        first = checks.first_prompt(tokenizer, self.data.train, self.data.chat)
        if self.fixed_fraction > 0 and not first.is_answered:
            raise PromptError(f"{first.where} {NO_COMPLETION}, or set fixed_fraction to 0")
        self.check_output(checks, draft)
        self._check_lengths([(target, "the target"), (draft, "the draft")])

    def _check_lengths(self, models: Sequence[tuple[ModelFacts | None, str]]) -> None:
        settings = self.evaluation
        longest = {("max_prompt_tokens", "max_completion_tokens"): self.lengths}
        if self.evaluates:
            names = ("evaluation.max_prompt_tokens", "max_new_tokens")
            longest[names] = Lengths(settings.max_prompt_tokens, settings.max_new_tokens)
        for model, name in models:
            for names, lengths in longest.items():
                if model is not None:
                    check_fits(cast("Any", model), *lengths, names, name)

    def _check_recorded_states(self) -> None:
        kept = self.data.keep_states_gb is not None
        others = self.fixed_fraction < 1 or self.data.pretraining is not None or kept
        if self.data.recorded_states and (others or self.evaluates):
            raise ValueError(
                "data.recorded_states loads the target's head alone, and fixed_fraction below 1, "
                "data.pretraining, data.keep_states_gb and evaluation need the whole target; "
                "remove one of them"
            )

    def _check_recorded_scores(self) -> None:
        others = self.fixed_fraction < 1 or self.data.pretraining is not None
        if reads_top(self.terms) and others:
            raise ValueError(
                "top_k_tail needs recorded log probabilities of every text: record them by "
                "generate-data with writer.top_logprobs, set fixed_fraction to 1, and unset "
                "data.pretraining"
            )

"""Everything that `align` can be told."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from paceline.config import StrictModel
from paceline.core.rules import RuleChoice
from paceline.core.sampling import SamplingParams
from paceline.data.prompts import CorpusConfig
from paceline.data.replay import Rounds
from paceline.train.objectives import ForwardKL, Objective, as_terms, reads_target
from paceline.train.recipes import RECIPES, RecipeName
from paceline.train.settings import TrainSettings
from paceline.train.vocabulary_subset_loss import LossVocabulary


class AlignData(StrictModel):
    """The texts.

    Attributes:
        train: Documents, prompts, or prompts with completions.
        held_out: Prompts that the target answers once, for evaluation.
        held_out_from_train: In the place of `held_out`, take so many texts out of `train`, chosen by
            the run's seed, and their duplicates. None and no `held_out`: no evaluation.
        train_document_prompts: Whether a document used as it is trains its first tokens too.
        pack_documents: Join documents before cutting them to size, so that no row is padded.
        pretraining: Text that the draft knows, so that it does not forget: always as it is, packed, and
            read as it is needed (a data set's split has no slice then; see `limit`).
        pretraining_fraction: The part of every batch's rows that it makes up.
        keep_states_gb: Keep what the target says of `train` in memory, each process what it has
            drawn: 10^9 bytes that this may take; None: read texts anew every time they come up.
    """

    train: CorpusConfig
    held_out: CorpusConfig | None = None
    held_out_from_train: int | None = Field(default=None, ge=1)
    train_document_prompts: bool = True
    pack_documents: bool = False
    pretraining: CorpusConfig | None = None
    pretraining_fraction: float = Field(default=0.1, gt=0, lt=1)
    keep_states_gb: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @property
    def evaluates(self) -> bool:
        """Is there text to judge the draft by?"""
        return self.held_out is not None or self.held_out_from_train is not None

    @model_validator(mode="after")
    def _holds_out_once(self) -> AlignData:
        if self.held_out is not None and self.held_out_from_train is not None:
            raise ValueError("held_out and held_out_from_train both say what to judge by; drop one")
        return self


class Evaluation(StrictModel):
    """Figures on held-out text of the target, before, during and after.

    Attributes:
        every_steps: How often during training; None: only before and after.
        num_prompts: How many prompts, of `max_prompt_tokens` at most.
        max_new_tokens: How many tokens the target adds to each, at most.
        sampling: How the target writes, and the distributions that are compared.
        gamma: Of the block efficiency.
        rule: Also judge the draft by the rule that it will be served with.
    """

    every_steps: int | None = Field(default=None, ge=1)
    num_prompts: int = Field(default=32, ge=1)
    max_prompt_tokens: int = Field(default=32, ge=1)
    max_new_tokens: int = Field(default=64, ge=1)
    sampling: SamplingParams = SamplingParams()
    gamma: int = Field(default=5, ge=1)
    rule: RuleChoice | None = None

    @field_validator("sampling")
    @classmethod
    def _no_penalty(cls, sampling: SamplingParams) -> SamplingParams:
        if sampling.repetition_penalty != 1:
            raise ValueError("repetition_penalty must be 1 here; `measure` knows penalties")
        return sampling


class Finish(StrictModel):
    """Another objective for the last part of the run.

    Attributes:
        objective: One divergence or a weighted sum.
        begin: The part of the run after which it takes over.
        end: The part after which nothing is left of the first objective: from `begin` on its
            weights fall in a straight line, and those of this one rise. None: at once.
    """

    objective: tuple[Objective, ...] = Field(min_length=1)
    begin: float = Field(default=0.7, ge=0, lt=1)
    end: float | None = Field(default=None, gt=0, le=1)

    @field_validator("objective", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return as_terms(value)

    @model_validator(mode="after")
    def _in_order(self) -> Finish:
        if self.end is not None and self.end <= self.begin:
            raise ValueError(f"finish.end {self.end} must lie behind finish.begin {self.begin}")
        return self

    def share(self, position: float) -> float:
        """Of this objective, when so much of the run is done."""
        if self.end is None:
            return float(position > self.begin)
        return min(1.0, max(0.0, (position - self.begin) / (self.end - self.begin)))


class AlignConfig(TrainSettings):
    """One run of alignment (Zhou et al. 2023, Alg. A.2); see also `TrainSettings`.

    The aligned draft becomes `output/draft`.

    Attributes:
        target: Hub id, directory or GGUF file of the target.
        draft: The same of the draft to start from; it is not changed.
        recipe: Defaults for objective, fixed_fraction and draft_fraction by name.
        objective: One divergence or a weighted sum.
        finish: Another objective for the last part of the run.
        loss_vocabulary: Divergences over part of the vocabulary; None: over all of it.
        fixed_fraction: lambda1, the part of batches that is corpus text as it is.
        draft_fraction: lambda2, the part of the others that the draft writes; the target writes
            the rest.
        sampling: How draft and target write training text.
        target_rounds: Let the target write many texts at a time, score them as it writes, and train
            on each more than once; None: a batch at a time, once.
        freeze_embeddings: Keep the embeddings and the output head as they are.
        freeze_layers: Keep the draft's first so many layers as they are: where they are the target's
            own first ones, they have little to learn, and the backward pass ends above them.
    """

    target: str = Field(min_length=1)
    draft: str = Field(min_length=1)
    data: AlignData
    recipe: RecipeName | None = None
    objective: tuple[Objective, ...] = (ForwardKL(),)
    finish: Finish | None = None
    loss_vocabulary: LossVocabulary | None = None
    fixed_fraction: float = Field(default=1.0, ge=0, le=1)
    draft_fraction: float = Field(default=0.0, ge=0, le=1)
    sampling: SamplingParams = SamplingParams()
    target_rounds: Rounds | None = None
    max_prompt_tokens: int = Field(default=64, ge=1)
    max_completion_tokens: int = Field(default=64, ge=1)
    freeze_embeddings: bool = False
    freeze_layers: int = Field(default=0, ge=0)
    evaluation: Evaluation = Evaluation()

    @property
    def pretraining_rows(self) -> int:
        """Rows of a step that are pretraining text."""
        if self.data.pretraining is None:
            return 0
        return round(self.data.pretraining_fraction * self.batch_size)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_recipe(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("recipe") in RECIPES:
            return RECIPES[values["recipe"]] | values
        return values

    @field_validator("objective", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return as_terms(value)

    @model_validator(mode="after")
    def _fits_together(self) -> AlignConfig:
        if not self.objective:
            raise ValueError("objective names no divergence; give at least one, such as forward_kl")
        own_rows = self.batch_size - self.pretraining_rows
        if self.data.pretraining is not None and not 0 < own_rows < self.batch_size:
            raise ValueError(
                f"data.pretraining_fraction {self.data.pretraining_fraction} of batch_size "
                f"{self.batch_size} is {self.pretraining_rows} rows; wanted some and not all"
            )
        if self.target_rounds is not None and self.target_rounds.rows % own_rows:
            raise ValueError(
                f"target_rounds.rows {self.target_rounds.rows} cannot be cut into batches of "
                f"{own_rows} rows, which batch_size {self.batch_size} leaves to them; make it a "
                "multiple"
            )
        finish = () if self.finish is None else self.finish.objective
        if self.loss_vocabulary is not None:
            for term in (*self.objective, *finish):
                if term.needs_all_tokens is not None:
                    raise ValueError(
                        f"{term.needs_all_tokens}, and loss_vocabulary leaves tokens out; drop one"
                    )
        self._check_shards()
        if self.data.keep_states_gb is not None and self.fixed_fraction == 0:
            raise ValueError(
                "data.keep_states_gb is for text that comes up again, and fixed_fraction is 0; drop it"
            )
        if not reads_target(self.objective) and self.fixed_fraction < 1 and self.draft_fraction > 0:
            raise ValueError(
                "cross_entropy alone teaches nothing on text that the draft wrote itself; "
                "set draft_fraction to 0, or name a divergence as objective"
            )
        return self

    def _check_shards(self) -> None:
        """Weights that are dealt out are read by all processes at once: nobody can write with them."""
        written = 1 - self.fixed_fraction
        by_draft = written * self.draft_fraction
        for name, share in (("draft", by_draft), ("target", written - by_draft)):
            if name in self.shard and share > 0:
                raise ValueError(
                    f"a {name} that is sharded writes no text; let generate-data write it and set "
                    "fixed_fraction to 1, or leave the shard out"
                )
        if "target" in self.shard and self.data.keep_states_gb is not None:
            raise ValueError(
                "a target that is sharded reads with all processes at once, so data.keep_states_gb "
                "cannot spare one of them; drop it"
            )
        if self.shard and self.data.evaluates:
            raise ValueError(
                "models that are sharded are not evaluated on the way; drop data.held_out and use "
                "trajectory on the checkpoints"
            )

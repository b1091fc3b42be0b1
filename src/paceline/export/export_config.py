"""What is exported, for which engine, and how it will be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field, ValidationInfo, field_validator, model_validator

from paceline.config import StrictModel
from paceline.engines.commands import EngineName
from paceline.engines.engine_choice import EngineChoice

Stored = Literal["auto", "float32", "bfloat16", "float16", "q8_0"]


class ExportConfig(StrictModel):
    """A model for an engine: a draft with its target, or a target alone.

    Attributes:
        model: The draft to export, or a target: directory, `.gguf` file or hub name.
        to: The engine that will load it.
        out: The directory to make.
        target: The draft's target. None: the one that the draft's run was aligned with; a model without
            a run is exported alone, as a target.
        served_target: What the engine is given as its target, for the launch command. None: `target`.
        dtype: What the weights are stored in. auto: as they are; q8_0 is for llamacpp alone.
        draft_vocabulary: What becomes of a list of tokens that the draft may propose, which no engine
            reads. keep: nothing, the engine drafts from all tokens. bake: the head's rows of the other
            tokens become the mean of the listed ones, so greedy drafting never proposes them.
        measurement: The JSON of `paceline measure`, for the launch command and the model card.
        num_speculative_tokens: Tokens drafted per block. None: the best that `measurement` found.
        draft_sample_method: How vLLM drafts. auto: as in `measurement`, else greedily, vLLM's own default.
        check_engine: Also load the export in the engine, which has to be installed here.
        engine: How the engine is started for that; None: as usual.
        overwrite: Replace an older export at `out`.
    """

    model: str
    to: EngineName
    out: Path
    target: str | None = None
    served_target: str | None = None
    dtype: Stored = "auto"
    draft_vocabulary: Literal["keep", "bake"] = "keep"
    measurement: Path | None = None
    num_speculative_tokens: int | None = Field(default=None, ge=1)
    draft_sample_method: Literal["auto", "greedy", "probabilistic"] = "auto"
    check_engine: bool = False
    engine: EngineChoice | None = None
    overwrite: bool = False

    @field_validator("engine", mode="before")
    @classmethod
    def _of_that_engine(cls, value: Any, info: ValidationInfo) -> Any:
        """Its name is that of `to`."""
        if isinstance(value, dict):
            return {"engine": info.data.get("to"), **cast("dict[str, Any]", value)}
        return cast("Any", value)

    @model_validator(mode="after")
    def _fits_the_engine(self) -> ExportConfig:
        if self.dtype == "q8_0" and self.to != "llamacpp":
            raise ValueError(
                f"dtype q8_0 is a GGUF type, which {self.to} is not given here; choose llamacpp or "
                "another dtype"
            )
        if self.draft_sample_method == "probabilistic" and self.to != "vllm":
            raise ValueError(
                f"draft_sample_method probabilistic is a setting of vllm; {self.to} has none"
            )
        if self.engine is not None and self.engine.engine != self.to:
            raise ValueError(f"engine is {self.engine.engine}, but the export is for {self.to}")
        return self

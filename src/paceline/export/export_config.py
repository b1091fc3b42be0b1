"""Configuration of an export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, ValidationInfo, field_validator, model_validator

from paceline.config import Options, StrictModel
from paceline.data.input_checks import FLOAT32_BYTES, InputChecks
from paceline.engines.commands import EngineName
from paceline.engines.engine_choice import EngineChoice
from paceline.errors import UsageError
from paceline.models.compatibility import check_block
from paceline.models.drafts.save import other_file
from paceline.models.hf.draft_vocabulary import EXPORTED

LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
"""Files that go with a model."""

Stored = Literal["auto", "float32", "bfloat16", "float16", "q8_0"]


class ExportConfig(StrictModel):
    """Export of a draft, or of a target alone, for an engine.

    Attributes:
        model: The draft or target to export: directory, `.gguf` file or hub name.
        to: The engine that loads the export.
        out: The directory to create.
        target: The draft's target. None: the target of the draft's training run; a model without a
            run is exported alone.
        served_target: Path of the target in the launch command. None: `target`.
        dtype: Stored dtype of the weights. auto: unchanged; q8_0: llamacpp only.
        draft_vocabulary: How to export a draft vocabulary, which engines ignore. keep: unchanged,
            the engine drafts from all tokens. bake: set the head's rows of other tokens to the mean
            of the listed rows, so greedy drafting never proposes them.
        measurement: JSON of `paceline measure`, for the launch command and the model card.
        num_speculative_tokens: Tokens drafted per block. None: the best in `measurement`, else 3.
        draft_sample_method: How vLLM drafts. auto: as in `measurement`, else greedily.
        check_engine: Also load the export in the engine, which must be installed.
        engine: How to start the engine for `check_engine`; None: with the defaults.
        overwrite: Replace an older export at `out`.
    """

    model: Annotated[str, Options(positional=True)]
    to: EngineName
    out: Path
    target: str | None = None
    served_target: str | None = None
    dtype: Stored = "auto"
    draft_vocabulary: Literal["keep", "bake"] = "keep"
    measurement: Path | None = None
    num_speculative_tokens: Annotated[int | None, Options(gamma="")] = Field(default=None, ge=1)
    draft_sample_method: Literal["auto", "greedy", "probabilistic"] = "auto"
    check_engine: bool = False
    engine: EngineChoice | None = None
    overwrite: bool = False

    @field_validator("engine", mode="before")
    @classmethod
    def _of_that_engine(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, dict):
            return {"engine": info.data.get("to"), **cast("dict[str, Any]", value)}
        return cast("Any", value)

    @model_validator(mode="after")
    def _fits_the_engine(self) -> ExportConfig:
        if self.dtype == "q8_0" and self.to != "llamacpp":
            raise ValueError(
                f"dtype q8_0 is for llamacpp only, not for {self.to}; choose another dtype"
            )
        if self.draft_sample_method == "probabilistic" and self.to != "vllm":
            raise ValueError(
                f"draft_sample_method probabilistic is for vllm, not for {self.to}; leave it out"
            )
        if self.engine is not None and self.engine.engine != self.to:
            raise ValueError(f"engine is {self.engine.engine}, but the export is for {self.to}")
        return self

    def check(self) -> InputChecks:
        """Check the inputs, and that `out` may be written; raises UsageError."""
        _check_place(self)
        checks = InputChecks()
        if self.check_engine:
            checks.engine(self.engine or EngineChoice(engine=self.to))
        model = checks.model("model", self.model)
        models = [model] if self.target is None else [model, checks.model("target", self.target)]
        for each in models:
            check_block(self.num_speculative_tokens or 1, each.max_length)
        checks.output(self.out, FLOAT32_BYTES * model.num_parameters)
        return checks


def _check_place(config: ExportConfig) -> None:
    """Raise UsageError unless `out` is free or an older export that may be replaced."""
    out = config.out
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / EXPORTED).exists():
        raise UsageError(f"{out} exists already and is not an export; choose another --out")
    if not config.overwrite:
        raise UsageError(
            f"{out} exists already; choose another --out, or give --overwrite to replace it"
        )
    if (other := other_file(out, EXPORTED, "README.md", "*.gguf", *LICENCES)) is not None:
        raise UsageError(f"{out} holds {other}, which is no part of an export; move it")
    for path in (config.model, config.target):
        if path is not None and Path(path).expanduser().resolve().is_relative_to(out.resolve()):
            raise UsageError(f"{out} would replace {path}, which is exported; choose another --out")

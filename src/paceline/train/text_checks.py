"""InputChecks of training texts before a run starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.data.examples import Lengths, build_examples
from paceline.data.prompts import read_records
from paceline.data.sources import ExampleStream, FixedText

if TYPE_CHECKING:
    from paceline.data.input_checks import InputChecks
    from paceline.models.inspection import ModelFacts

_TRAINED = 500  # records that are tokenised to check them


def check_texts(checks: InputChecks, data: Any, *names: str) -> None:
    """Check that the texts of these names that are set can be read; raises PromptError."""
    for name in names:
        if (text := getattr(data, name)) is not None:
            streaming = name == "train" and getattr(data, "streaming", False)
            checks.text(f"data.{name}", text, streaming=streaming, skip_empty=True)


def check_trained(
    checks: InputChecks,
    data: Any,
    tokenizer: Any,
    model: ModelFacts,
    lengths: Lengths,
    *,
    recorded: bool | None = False,
) -> None:
    """Check the first training texts as the run checks all: templates, tokens and completions.

    `recorded`: completions need recorded log probabilities; None: no text is used unchanged.

    Raises:
        PromptError: a text cannot be trained on; the message names it.
    """
    if tokenizer is None or getattr(data, "streaming", False):
        return
    examples = build_examples(
        read_records(data.train.first(_TRAINED), skip_empty=True),
        tokenizer,
        lengths,
        eos_token_ids=model.eos_token_ids,
        decoder_prompt=model.decoder_prompt,
        recorded_states=getattr(data, "recorded_states", False),
    )
    if examples and checks.example is None:
        checks.example = examples[0], tokenizer
    if recorded is not None:
        FixedText(ExampleStream(examples, 1, seed=0)).check(recorded=recorded)

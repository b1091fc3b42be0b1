"""`paceline draft`: make a draft from some of the target's layers."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import stdout
from paceline.errors import UsageError


def draft(
    target: Annotated[str, typer.Option(help="Target model: directory, .gguf file or hub name.")],
    layers: Annotated[str, typer.Option(help="Layers to keep, in order, such as 0,1,2,29.")],
    out: Annotated[Path, typer.Option(help="Directory to write the draft to.")],
    vocabulary: Annotated[
        int | None, typer.Option(help="Propose only this many tokens, the likeliest.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Text to find them by: .txt, .jsonl or a data set.")
    ] = None,
) -> None:
    """Make a draft from a subset of the target's layers, with the target's tokenizer."""
    chosen = parse_layers(layers)
    if (vocabulary is None) != (text is None):
        given, lacking = ("vocabulary", "text") if text is None else ("text", "vocabulary")
        raise UsageError(f"--{given} needs --{lacking} beside it, or leave out both")
    from paceline.data.tokens import read_texts
    from paceline.models import load_model
    from paceline.models.draft import limit_vocabulary, save_draft, subset_layers
    from paceline.models.loading import load_tokenizer, stored_dtype

    texts = [] if text is None else list(read_texts(text, load_tokenizer(target)))
    model = load_model(target)
    small = subset_layers(model, chosen)
    if vocabulary is not None:
        small = limit_vocabulary(small, model, texts, vocabulary)
    save_draft(small, target, out, stored_dtype(target))
    share = small.num_parameters / model.num_parameters
    proposes = "" if vocabulary is None else f", proposes {vocabulary:,} tokens"
    stdout.print(
        f"{out}: {len(chosen)} layers, {small.num_parameters:,} parameters ({share:.1%}){proposes}"
    )


def parse_layers(text: str) -> list[int]:
    """`0,1,2,29` to numbers."""
    try:
        return [int(layer) for layer in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--layers wants numbers with commas between, such as 0,1,2,29; got {text!r}"
        ) from None

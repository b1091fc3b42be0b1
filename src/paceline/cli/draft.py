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
) -> None:
    """Make a draft from a subset of the target's layers, with the target's tokenizer."""
    chosen = parse_layers(layers)
    from paceline.models import load_model
    from paceline.models.draft import save_draft, subset_layers
    from paceline.models.loading import stored_dtype

    model = load_model(target)
    small = subset_layers(model, chosen)
    save_draft(small, target, out, stored_dtype(target))
    share = small.num_parameters / model.num_parameters
    stdout.print(f"{out}: {len(chosen)} layers, {small.num_parameters:,} parameters ({share:.1%})")


def parse_layers(text: str) -> list[int]:
    """`0,1,2,29` to numbers."""
    try:
        return [int(layer) for layer in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--layers wants numbers with commas between, such as 0,1,2,29; got {text!r}"
        ) from None

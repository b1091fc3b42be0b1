"""`paceline draft`: create a draft model from the target."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.console import progress_bars, stdout
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.models import HfModel
    from paceline.train.layer_search import KeptLayers


def draft(
    target: options.Target = None,
    out: Annotated[
        Path | None, typer.Option(help="Output directory; new, or --set overwrite=true.")
    ] = None,
    config: options.ConfigFile = None,
    layers: Annotated[str | None, typer.Option(help="Layers to keep, such as 0,1,2,29.")] = None,
    search_layers: Annotated[
        int | None, typer.Option(help="Keep the N best layers by acceptance; needs --text.")
    ] = None,
    encoder_layers: Annotated[str | None, typer.Option(help="Encoder layers to keep.")] = None,
    params: Annotated[
        float | None, typer.Option(help="New draft: maximum fraction of the target's parameters.")
    ] = None,
    num_layers: Annotated[int | None, typer.Option(help="New draft: number of layers.")] = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="Number of tokens the draft may propose; needs --text.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Text for ranking: .txt, .jsonl, .parquet or a data set.")
    ] = None,
    time_passes: Annotated[
        bool, typer.Option("--time/--no-time", help="Time forward passes of draft and target.")
    ] = True,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
) -> None:
    """Create a draft from the target's layers, or a new one."""
    from paceline.cli.preflight import check_draft
    from paceline.models import load_model
    from paceline.models.drafts.save import save_draft
    from paceline.models.loading import stored_dtype
    from paceline.train.initial_draft import DraftConfig, make_draft

    wanted = options.build(
        DraftConfig,
        config,
        overrides,
        target=target,
        out=out,
        layers=layers and parse_layers("--layers", layers),
        encoder_layers=encoder_layers and parse_layers("--encoder-layers", encoder_layers),
        search_layers=search_layers,
        params=params,
        num_layers=num_layers,
        vocabulary=vocabulary,
        text=text,
    )
    check_draft(wanted, dry_run=dry_run)
    model = load_model(wanted.target)
    with progress_bars() as progress:
        small, kept = make_draft(wanted, model, progress=progress)
    save_draft(small, wanted.target, wanted.out, stored_dtype(wanted.target))
    stdout.print(f"{wanted.out}: {_description(small, kept, model)}")
    if time_passes:
        # loaded again, because saving may round the weights
        stdout.print(_times(model, load_model(wanted.out, dtype=model.dtype)))


def _times(target: "HfModel", draft: "HfModel") -> str:
    from paceline.measure.latency import time_draft
    from paceline.models.compatibility import UNTIMED, without_rollback

    if without_rollback(target, draft) is not None:
        return f"passes are not timed: {UNTIMED}"
    return str(time_draft(target, draft))


def _description(draft: "HfModel", kept: "KeptLayers | None", target: "HfModel") -> str:
    origin = "new" if kept is None else f"layers {','.join(map(str, kept.decoder))}"
    if kept is not None and kept.encoder is not None:
        origin += f" and encoder layers {','.join(map(str, kept.encoder))}"
    share = draft.num_parameters / target.num_parameters
    limit = draft.draft_vocabulary
    proposes = "" if limit is None else f", proposes {len(limit):,} tokens"
    return f"{origin}, {draft.num_parameters:,} parameters ({share:.1%}){proposes}"


def parse_layers(option: str, text: str) -> list[int]:
    """Parse `0,1,2,29`, the value of this option."""
    try:
        return [int(layer) for layer in text.split(",")]
    except ValueError:
        raise UsageError(
            f"{option} wants comma-separated numbers, such as 0,1,2,29; got {text!r}"
        ) from None

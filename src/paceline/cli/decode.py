"""`paceline decode`: generate text from one prompt, with or without a draft."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.cli import options
from paceline.cli.html_report import check_html
from paceline.config import read_value
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.decode.strategies import DecodingConfig


def decode(
    target: Annotated[str, typer.Option(help="Target model: directory, .gguf file or hub name.")],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the chat template.")] = False,
    draft: options.Draft = None,
    draft_weights: Annotated[
        Literal["auto", "int8"], typer.Option(help="int8: faster draft, slightly lower acceptance.")
    ] = "auto",
    gamma: Annotated[int | None, typer.Option(help="Draft tokens per block (default 4).")] = None,
    rule: options.Rule = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens.")] = 128,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    draft_temperature: options.DraftTemperature = None,
    repetition_penalty: options.Penalty = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    config: options.ConfigFile = None,
    overrides: options.Overrides = None,
    show: Annotated[bool, typer.Option("--show", help="Colour tokens by source.")] = False,
    json: options.Json = False,
    html: options.Html = None,
) -> None:
    """Generate text from one prompt; --draft is optional."""
    from paceline.cli.preflight import check_decode
    from paceline.cli.streaming import load_decoder, read_prompt, stream_text
    from paceline.decode.strategies import DecodingConfig

    check_html(html)
    _check_gamma(gamma)
    decoding = options.build(
        DecodingConfig,
        config,
        overrides,
        strategy__num_speculative_tokens=gamma,
        strategy__rule=None if rule is None else read_value(rule, f"--rule {rule!r}"),
        strategy__draft_sampling__temperature=draft_temperature,
        sampling__temperature=temperature,
        sampling__top_p=top_p,
        sampling__top_k=top_k,
        sampling__repetition_penalty=repetition_penalty,
    )
    if draft is None:
        _check_without_draft(decoding, draft_weights)
    text = read_prompt(prompt, prompt_file)
    check_decode(target, draft, decoding)
    recorded = {"target": target, "draft": draft, "max_new_tokens": max_new_tokens, "seed": seed}
    recorded["decoding"] = decoding.model_dump(mode="json")
    stream_text(
        *load_decoder(target, draft, draft_weights, decoding),
        text,
        chat=chat,
        max_new_tokens=max_new_tokens,
        seed=seed,
        show=show,
        as_json=json,
        html=html,
        recorded=recorded,
    )


def _check_gamma(gamma: int | None) -> None:
    if gamma is not None and gamma < 1:
        raise UsageError(
            f"gamma must be 1 or more, got {gamma}; without a draft, leave --gamma out"
        )


def _check_without_draft(decoding: "DecodingConfig", draft_weights: str) -> None:
    if _drafts(decoding) or draft_weights != "auto":
        raise UsageError(
            "--gamma, --rule, --draft-temperature, --draft-weights and a strategy need a draft, "
            "but there is none; name it by --draft"
        )


def _drafts(decoding: "DecodingConfig") -> bool:
    chosen = "strategy" in decoding.model_fields_set
    return chosen and decoding.strategy.strategy != "autoregressive"

"""`paceline decode`: watch a text being written, with or without a draft."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.cli import options


def decode(
    target: Annotated[str, typer.Option(help="Target model: directory, .gguf file or hub name.")],
    prompt: Annotated[str | None, typer.Option(help="The text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read it from a file instead.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put it into the chat template.")] = False,
    draft: options.Draft = None,
    draft_weights: Annotated[
        Literal["auto", "int8"],
        typer.Option(help="int8: a faster draft that agrees a little less."),
    ] = "auto",
    gamma: Annotated[int, typer.Option(help="Tokens drafted a block.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="At most so many new tokens.")] = 128,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    repetition_penalty: options.Penalty = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    show: Annotated[bool, typer.Option("--show", help="Colour tokens by their source.")] = False,
    json: options.Json = False,
) -> None:
    """Decode one prompt, streaming; prints tokens/s and tokens per target call at the end."""
    from paceline.cli.streaming import load_target, read_prompt, stream_text
    from paceline.core.sampling import SamplingParams
    from paceline.models import load_model

    sampling = options.build(
        SamplingParams,
        None,
        None,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
    )
    text = read_prompt(prompt, prompt_file)
    stream_text(
        load_target(target),
        load_model(draft).prepare_for_decoding(draft_weights) if draft else None,
        text,
        chat=chat,
        gamma=gamma,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        show=show,
        as_json=json,
    )

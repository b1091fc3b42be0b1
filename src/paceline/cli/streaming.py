"""Print text while it is generated, coloured by the source of each token."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from paceline.cli.console import echo, stderr
from paceline.decode import AutoregressiveDecoder
from paceline.decode.strategies import build_decoder
from paceline.decode.text import count_blocks
from paceline.decode.text_prompts import COLOURS
from paceline.errors import PromptError, UsageError
from paceline.models import load, load_model, prepare_for_decoding
from paceline.models.loading import tokenizer_of

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.decode import Block
    from paceline.decode.decoder import Decoder
    from paceline.decode.strategies import DecodingConfig
    from paceline.decode.text_prompts import Chat
    from paceline.models import HfModel


def read_prompt(prompt: str | None, path: Path | None) -> str:
    """Read the prompt from the option, the file or standard input."""
    if prompt is not None and path is not None:
        raise UsageError("got both --prompt and --prompt-file; remove one of them")
    source = "--prompt" if prompt is not None else f"{path or 'standard input'}"
    if prompt is None and source in ("standard input", "-") and sys.stdin.isatty():
        raise UsageError("got no prompt; give --prompt, --prompt-file or standard input")
    text = prompt or ""
    try:
        if prompt is None:
            file = None if str(path) == "-" else path
            raw = sys.stdin.buffer.read() if file is None else file.read_bytes()
            # editors and echo end a text with a line break
            text = raw.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read the prompt from {source}: {error}") from None
    if not text.strip():
        raise PromptError(f"the prompt from {source} is empty; give a text by --prompt")
    return text


def stream_text(
    target: HfModel,
    decoder: Decoder,
    text: str,
    *,
    chat: bool,
    max_new_tokens: int,
    seed: int,
    show: bool,
    as_json: bool,
    setting: str,
    recorded: dict[str, Any],
) -> None:
    """Decode `text` and print the result while it is generated.

    `setting`: how it is decoded; `recorded`: settings that JSON names.
    """
    prompt = _chat_of(text, target) if chat else text
    streamed = decoder.stream(prompt, max_new_tokens, seed)
    start = time.perf_counter()
    blocks: list[Block] = []
    texts: list[list[tuple[str, str]]] = []  # text and source of each token, by block
    for piece in streamed:
        if not blocks or piece.block is not blocks[-1]:
            blocks.append(piece.block)
            texts.append([])
        texts[-1].append((piece.text, piece.source))
        if not as_json:
            style: dict[str, Any] = {"fg": COLOURS[piece.source]} if show else {}
            echo(piece.text, nl=False, **style)
    elapsed = time.perf_counter() - start
    tokens = [token for block in blocks for token in block.tokens]
    stats, rate = count_blocks(blocks), len(tokens) / elapsed
    if as_json:
        found = {
            "kind": "decode",
            "text": "".join(piece for block in texts for piece, _ in block),
            "tokens": tokens,
            "blocks": texts,
            "stats": asdict(stats),
            "seconds": elapsed,
            "tokens_per_s": rate,
        }
        echo(json.dumps(found | recorded | {"prompt": text}))
        return
    echo()
    form = "chat template" if chat else "raw prompt"
    remark = f"{form}, {setting}, {len(tokens)} tokens, {rate:.1f} tokens/s"
    if stats.num_target_calls:
        remark += f", {stats.block_efficiency:.2f} tokens per target call"
        remark += f" ({stats.num_target_calls} calls after the prompt)"
    if stats.num_examined:
        remark += f", acceptance {stats.acceptance_rate:.3f}"
        remark += f" ({stats.num_accepted} of {stats.num_examined} examined draft tokens)"
    stderr.print(remark, style="dim")
    if show:
        sources = [source for block in blocks for source in block.sources]
        echo("tokens by source:", nl=False, err=True)
        before = " "
        for source in filter(sources.count, COLOURS):
            counted = f"{before}{sources.count(source)} {source}"
            echo(counted, nl=False, err=True, fg=COLOURS[source])
            before = ", "
        echo(err=True)


def load_decoder(
    path: str, draft: str | None, draft_weights: Literal["auto", "int8"], config: DecodingConfig
) -> tuple[HfModel, Decoder]:
    """Load the target, and a decoder for it: autoregressive without a draft."""
    target = load_model(path)
    tokenizer_of(target, path)
    target = prepare_for_decoding(target)
    if draft is None:
        return target, AutoregressiveDecoder(target, config.sampling)
    small = load(draft, target.dtype, str(target.device), draft_weights)
    return target, build_decoder(config, target, small)


def _chat_of(text: str, target: HfModel) -> Chat:
    if not (target.tokenizer and target.tokenizer.chat_template):
        raise UsageError(
            "--chat: the target's tokenizer has no chat template; give --raw, or neither"
        )
    return [{"role": "user", "content": text}]

"""Does the engine itself load an export, and draft with it?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.sampling import SamplingParams
from paceline.engines.commands import Drafting, Room
from paceline.engines.contract import Request
from paceline.engines.engine_choice import EngineChoice, Setup, check_choice
from paceline.engines.start import started
from paceline.errors import ExportError
from paceline.models import load_model

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.engines.contract import Engine, Served
    from paceline.export.export_inputs import Sources
    from paceline.progress import Progress

_NUM_TOKENS = 24
_TEXT = "The arithmetic mean of a list of numbers is"


def check_in_engine(sources: Sources, path: Path, gamma: int, progress: Progress) -> str:
    """Load the export in its engine and serve one greedy request. -> one line of what it drafted.

    Raises:
        UsageError: The engine is not installed.
        EngineError: It does not start, or does not answer.
        ExportError: It drafts nothing.
    """
    config = sources.config
    assert sources.target is not None, "asked only of drafts"
    choice = config.engine or EngineChoice(engine=config.to)
    check_choice(choice)
    target = config.served_target or sources.target.path
    prompt = sources.tokenizer(_TEXT)["input_ids"]
    request = Request(prompt, _NUM_TOKENS, SamplingParams(temperature=0.0), 0)
    if config.to == "transformers":
        from paceline.engines.assisted import Transformers

        pair = load_model(target), load_model(path)
        return _told(engine := Transformers(*pair, gamma), engine.serve(request))
    room = Room(len(prompt) + _NUM_TOKENS + gamma + 1)
    setup = Setup(target, Drafting(str(path), gamma), room)
    with started(choice, setup, progress) as engine:
        return _told(engine, engine.serve(request))


def _told(engine: Engine, answer: Served) -> str:
    blocks = answer.blocks
    if blocks is None or not blocks.num_drafted:
        raise ExportError(
            f"{engine.name} {engine.version} loaded the export and drafted nothing with it; its log says "
            "why it serves without the draft"
        )
    return (
        f"{engine.name} {engine.version} loads it: {blocks.num_accepted} of {blocks.num_drafted} drafted "
        f"tokens accepted in {len(answer.tokens)} tokens of greedy text"
    )

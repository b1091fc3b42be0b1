"""Check that the engine loads an export and drafts with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.sampling import SamplingParams
from paceline.engines.commands import Drafting, EngineChoice, Room, Setup
from paceline.engines.contract import Request
from paceline.engines.process import check_choice, started
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
    """Load the export in its engine, serve one greedy request and return a one-line summary.

    Raises ExportError if the engine does not draft, EngineError if it does not start or answer.
    """
    config = sources.config
    assert sources.target is not None, "only for drafts"
    choice = config.engine or EngineChoice(engine=config.to)
    check_choice(choice)
    target = config.served_target or sources.target.path
    prompt = sources.tokenizer(_TEXT)["input_ids"]
    request = Request(prompt, _NUM_TOKENS, SamplingParams(temperature=0.0), 0)
    if config.to == "transformers":
        from paceline.engines.assisted import Transformers

        pair = load_model(target), load_model(path)
        return _summary(engine := Transformers(*pair, gamma), engine.serve(request))
    room = Room(len(prompt) + _NUM_TOKENS + gamma + 1)
    setup = Setup(target, Drafting(str(path), gamma), room)
    with started(choice, setup, progress) as engine:
        return _summary(engine, engine.serve(request))


def _summary(engine: Engine, answer: Served) -> str:
    blocks = answer.blocks
    if blocks is None or not blocks.num_drafted:
        raise ExportError(
            f"{engine.name} {engine.version} loaded the export but drafted nothing with it; see "
            "the engine's log for the reason"
        )
    return (
        f"{engine.name} {engine.version} loads it: {blocks.num_accepted} of {blocks.num_drafted} "
        f"drafted tokens accepted in {len(answer.tokens)} tokens of greedy text"
    )

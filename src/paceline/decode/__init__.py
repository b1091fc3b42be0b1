"""Decoding: the target alone, or the target with a draft.

- `autoregressive`: one target pass per token, the baseline of every comparison
- `speculative`: the draft proposes a block, the target verifies it in one pass
- `block`: draws or verifies the tokens of a block with a session
- `draft_policies`: how many tokens a block drafts
- `cascade`: the draft generates, and defers to the target when not confident
- `text`: the state of one text, and `Generation` and `Block`, which the caller receives
- `text_prompts`: texts and chats as prompts, and the text that their new tokens add
- `strategies`: configuration of all strategies
"""

from paceline.decode.autoregressive import AutoregressiveDecoder
from paceline.decode.cascade import BigLittleDecoder, OracleCascade, SequenceCascade, TokenCascade
from paceline.decode.draft_policies import Confident, FixedLength
from paceline.decode.speculative import SpeculativeDecoder
from paceline.decode.text import Block, Generation
from paceline.decode.text_prompts import Piece, TextGeneration

__all__ = [
    "AutoregressiveDecoder",
    "BigLittleDecoder",
    "Block",
    "Confident",
    "FixedLength",
    "Generation",
    "OracleCascade",
    "Piece",
    "SequenceCascade",
    "SpeculativeDecoder",
    "TextGeneration",
    "TokenCascade",
]

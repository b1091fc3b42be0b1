"""Decoding: the target alone, or the target with a draft.

- `autoregressive`: one target pass per token, the baseline of every comparison
- `speculative`: the draft proposes a block, the target verifies it in one pass
- `block`: draws or verifies the tokens of a block with a session
- `drafting`, `draft_policies`: how many tokens a block drafts
- `cascade`, `sequence_cascade`: the draft generates, and defers to the target when not confident
- `text`: the state of one text: token budget, random streams, blocks
- `result`: `Generation` and `Block`, which the caller receives
- `strategies`: configuration of all strategies
"""

from paceline.decode.autoregressive import AutoregressiveDecoder
from paceline.decode.cascade import BigLittleDecoder, OracleCascade, TokenCascade
from paceline.decode.draft_policies import Adaptive, Confident, FixedLength
from paceline.decode.result import Block, Generation
from paceline.decode.sequence_cascade import SequenceCascade
from paceline.decode.speculative import SpeculativeDecoder

__all__ = [
    "Adaptive",
    "AutoregressiveDecoder",
    "BigLittleDecoder",
    "Block",
    "Confident",
    "FixedLength",
    "Generation",
    "OracleCascade",
    "SequenceCascade",
    "SpeculativeDecoder",
    "TokenCascade",
]

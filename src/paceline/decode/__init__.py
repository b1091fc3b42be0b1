"""Decoding: a target alone, or a target with a draft.

- `autoregressive`: one target pass a token, the baseline of every comparison
- `speculative`: the draft proposes, the target judges a block in one pass
- `block`: draw and judge with a session: the whole request if it takes that, else token by token
- `drafting`, `policies`: drafting while the draft is sure; how many tokens a block gets
- `cascade`, `sequence_cascade`: the draft writes, the target is asked where it must be
- `text`: one text under construction: its budget, its random streams, its counts
- `result`: what a caller gets: `Generation`, and `Block` events while it runs
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

"""Decoding: a target alone, or a target with a draft.

- `autoregressive`: one target pass a token, the baseline of every comparison
- `speculative`: the draft proposes, the target judges a block in one pass
- `text`: one text under construction: its budget, its random streams, its counts
- `result`: what a caller gets: `Generation`, and `Block` events while it runs
"""

from paceline.decode.autoregressive import AutoregressiveDecoder
from paceline.decode.result import Block, Generation
from paceline.decode.speculative import SpeculativeDecoder

__all__ = ["AutoregressiveDecoder", "Block", "Generation", "SpeculativeDecoder"]

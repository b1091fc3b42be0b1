"""The mathematics, on PyTorch tensors alone: no models, no files, no compiler.

`backend` offers a few operations to faster code that registers itself from above.

- `sampling`: logits to probabilities, the one place where that happens; drawing from them
- `divergences`, `reduction`, `fused`: losses per token; the one mean; head and loss in chunks
- `rule`, `rules`, `cascade_rules`: how a drafted token is kept, and the distribution that this makes
- `block`: requests to draw and to judge, and their PyTorch form
- `drafted`, `verification`: accept, recover, bonus, over a batch of blocks
- `stats`, `speed`, `bootstrap`, `goodness`: counts and rates; what speed they promise; intervals;
  the test that a text follows a distribution
- `lists`: plain numbers out of tensors
"""

"""The mathematics, on tensors alone: no models, no files, no globals.

Probabilities, drawing and judging a lossless block go through `paceline.native` on a CPU.

- `sampling`: logits to probabilities, the one place where that happens; drawing from them
- `divergences`, `reduction`, `fused`: losses per token; the one mean; head and loss in chunks
- `rules`: how a drafted token is kept, and the distribution that this makes
- `verification`: accept, recover, bonus, over a batch of blocks
- `stats`, `speed`, `bootstrap`, `goodness`: counts and rates; what speed they promise; intervals;
  the test that a text follows a distribution
- `lists`: plain numbers out of tensors
"""

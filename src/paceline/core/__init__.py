"""Sampling, verification, losses and statistics on tensors: no models, files or compiled code.

- `sampling`, `backend`: logits to probabilities to tokens; optional faster implementations
- `divergences`, `tvd_plus_plus`, `top_k_tail`: losses per token and their mean
- `fused`: LM head and loss in chunks
- `rule_base`, `rules`: acceptance rules and the distributions that they induce
- `block`: draft and verify a batch of blocks
- `stats`, `speed`, `text_scores`: counts and rates; predicted speedup; scores of text
- `bootstrap`, `goodness_of_fit`: confidence intervals; test of sampled tokens
"""

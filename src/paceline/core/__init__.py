"""Sampling, verification, losses and statistics on tensors: no models, files or compiled code.

- `sampling`, `backend`: logits to probabilities to tokens; optional faster implementations
- `divergences`, `tvd_plus_plus`, `rule_losses`: losses per token
- `reduction`, `fused`: mean over tokens or sequences; LM head and loss in chunks
- `rule_base`, `rules`, `cascade_rules`: acceptance rules and the distributions that they induce
- `block`, `drafted`, `verification`: draft and verify a batch of blocks
- `stats`, `speed`, `text_scores`: counts and rates; predicted speedup; scores of text
- `bootstrap`, `goodness_of_fit`: confidence intervals; test of sampled tokens
- `lists`, `vocabulary_subset`: tensors as lists; logits over part of the vocabulary
"""

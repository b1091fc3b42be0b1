"""Serving engines: start or connect to one, send requests, read block counters.

- `contract`: Engine, Request, Served, BlockCounts
- `vllm`, `sglang`, `llamacpp`: servers; `assisted`: transformers in this process
- `client`, `counters`, `counting`: HTTP, /metrics, block counts from cumulative counters
- `commands`, `engine_choice`, `process`, `start`: configure, start and stop a server
- `text_config`, `text_servers`, `text_answers`: texts from OpenAI-compatible servers, which
  `server_identity` and `unprocessed_scores` check
- `draft_sampling`: how each engine samples drafts; `versions`: tested versions
"""

"""Engines that serve models: start one or find one, ask it for texts, read its own counters.

- `contract`: Engine, Request, Served, BlockCounts
- `vllm`, `sglang`, `llamacpp`: servers; `assisted`: transformers in this process
- `client`, `counters`, `counting`: HTTP, /metrics, and what a request adds to counters
- `drafting`: how each engine draws drafts; `versions`: the versions that were tested
- `process`, `start`: a server of ours
- `commands`: the arguments of each server; `choice`: which engine, running or to be started
"""

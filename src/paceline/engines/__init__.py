"""Serving engines: start or connect to one, send requests, read block counters.

- `contract`: Engine, Request, Served, BlockCounts; `kinds`: the engines by name
- `vllm`, `sglang`, `llamacpp`, `assisted` (transformers): one class each; `servers`: their bases
- `client`: HTTP, with keys and errors; `answers`: what answers hold
- `commands`, `process`: configure, start, connect to and stop a server
- `texts`, `text_servers`: texts from OpenAI-compatible servers
- `vllm_plugin`, `vllm_rules`: rules inside vLLM
"""

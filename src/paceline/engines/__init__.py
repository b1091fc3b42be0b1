"""Serving engines: start or connect to one, send requests, read block counters.

- `contract`: Engine, Request, Served, BlockCounts
- `kinds`: what each engine loads, drafts and is started with; tested versions
- `client`: HTTP, with keys, limits and errors; `servers`: vLLM, SGLang, llama-server
- `assisted`: transformers in this process
- `commands`, `process`: configure, start, connect to and stop a server
- `texts`, `text_servers`: texts from OpenAI-compatible servers, which are checked first
- `vllm_plugin`, `vllm_rules`: rules inside vLLM
"""

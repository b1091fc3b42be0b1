"""vLLM's connector of hidden states on a processor, where it has no CUDA stream to copy with."""

import os
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (  # pyright: ignore[reportMissingImports]
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class OnProcessors(ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: Any) -> None:
        size = self._block_size
        slots = torch.tensor(pending.block_ids)[:, None] * size + torch.arange(size)
        states = extract_from_kv_cache(self._kv_cache, slots.flatten(), len(pending.token_ids))
        tensors = {"hidden_states": states.clone(), "token_ids": pending.token_ids.clone()}
        save_file(tensors, pending.filename)
        if (held := self._lock_fds.pop(pending.req_id, None)) is not None:
            os.close(held)
        self._req_copy_events[pending.req_id] = SimpleNamespace(query=lambda: True)

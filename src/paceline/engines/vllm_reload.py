r"""A worker extension of vLLM that loads new weights of the draft while it serves.

    VLLM_SERVER_DEV_MODE=1 vllm serve TARGET --speculative-config ... \
        --worker-extension-cls paceline.engines.vllm_reload.DraftReload

A POST of {"method": "reload_draft", "args": [DIRECTORY]} to /collective_rpc then loads the weights
in place, between two steps. Running requests keep what the old draft cached, which is still
lossless: a draft only proposes. Anyone who can reach a server in this mode can do the same, so it
must not be open to strangers.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any


class DraftReload:
    """Mixed into vLLM's worker, whose attributes it uses."""

    model_runner: Any
    vllm_config: Any

    def reload_draft(self, directory: str) -> str:
        """Load the draft's weights from a directory of the same architecture. -> the directory."""
        model = self.model_runner.get_draft_model()
        if model is None:
            raise ValueError("this vLLM serves without a draft model; set --speculative-config")
        settings = self.vllm_config.speculative_config.draft_model_config
        config = replace(self.vllm_config, model_config=settings, quant_config=None)
        reload = importlib.import_module("vllm.model_executor.model_loader.reload.inplace")
        with importlib.import_module("vllm.config").set_current_vllm_config(config):
            reload.reload_weights(config, model, None, directory, is_checkpoint_format=True)
        return directory

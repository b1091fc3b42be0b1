"""Drafts as engines load them: vLLM, SGLang, llama.cpp and transformers.

- `export`: the one call: fit, write, read back, describe
- `sources`: the model, its target, its run, its measurement, and whether they belong together
- `rows`: as many rows in embedding and head as the target has
- `directory`, `gguf_file`, `gguf_vocabulary`: the two forms
- `launch`: the command that serves it, and how the engine drafts then
- `checks`: what was written gives what was exported
- `card`: the model card
"""

from paceline.export.export import Exported, export
from paceline.export.export_config import ExportConfig

__all__ = ["ExportConfig", "Exported", "export"]

"""Export drafts for vLLM, SGLang, llama.cpp and transformers.

- `export`: adapt the model, write it, read it back, describe it
- `export_inputs`: configuration; read model, target, run and measurement, and check that they match
- `directory`, `gguf_file`: the two output formats; compare the export with the model
- `card`: the command that serves the export, how the engine drafts, and the model card
- `model_report`: what Paceline reads in a model
"""

from paceline.export.export import Exported, export
from paceline.export.export_inputs import ExportConfig

export_draft = export  # for `paceline`, where `export` is this package

__all__ = ["ExportConfig", "Exported", "export", "export_draft"]

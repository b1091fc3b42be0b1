"""Export drafts for vLLM, SGLang, llama.cpp and transformers.

- `export`: adapt the model, write it, read it back, describe it
- `export_inputs`: read the model, target, run and measurement, and check that they match
- `rows`: resize embedding and head to the target's number of rows
- `directory`, `gguf_file`, `gguf_vocabulary`: the two output formats
- `launch`: the command that serves the export, and how the engine drafts
- `checks`, `engine_check`: compare the export with the model; load it in the engine
- `card`: the model card
"""

from paceline.export.export import Exported, export
from paceline.export.export_config import ExportConfig

__all__ = ["ExportConfig", "Exported", "export"]

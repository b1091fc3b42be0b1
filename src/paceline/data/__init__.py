"""Text on its way to a model: files to prompts, prompts to batches.

prompts.py     .txt, .jsonl, directories and hub data sets -> records, errors that name the line
tokens.py      records -> tokens, chat templates included
examples.py    records -> training texts cut to size
sources.py     BatchSource: fixed text, text of the draft, text of the target, a mix of them
completions.py  completions sampled from a model, a batch at a time
collate.py     rows -> padded tensors; the shift and the masks
"""

from paceline.data.prompts import CorpusConfig, read_records
from paceline.data.sources import BatchSource
from paceline.data.tokens import read_prompts

__all__ = ["BatchSource", "CorpusConfig", "read_prompts", "read_records"]

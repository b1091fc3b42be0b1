"""Hidden states of a served target: vLLM writes those of an answer into a file, read once here.

vLLM's method `extract_hidden_states` keeps the states before the last norm, and its connector
writes them: of the prompt and of all new tokens but the last, which is what the next tokens
depended on. It locks a file until the file is whole.

Shape suffixes: T prompt and answer without its last token, N tokens of the answer, D hidden.
"""

from __future__ import annotations

import fcntl
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline.engines.answers import AnswerError
from paceline.engines.client import parsed
from paceline.errors import EngineError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

IN_REQUEST = {"kv_transfer_params": {"include_output_tokens": True}}
"""What a request says so that states of the new tokens are written, too."""
CONNECTOR = "ExampleHiddenStatesConnector"


def serve_arguments(num_layers: int, directory: str) -> list[str]:
    """Arguments of `vllm serve` for a target of `num_layers`, whose states go to a directory."""
    layers = {"eagle_aux_hidden_state_layer_ids": [num_layers]}
    method = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": layers},
    }
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": directory},
    }
    return [
        *("--no-enable-prefix-caching", "--no-enable-chunked-prefill"),
        *("--speculative-config", json.dumps(method)),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]


class _Transfer(BaseModel):
    hidden_states_path: str | None = None


class _Answer(BaseModel):
    kv_transfer_params: _Transfer | None = None


def read_states(
    answer: str, where: str, prompt: Sequence[int], tokens: Sequence[int], directory: Path
) -> Tensor:
    """The states before each token of an answer, ahead of the last norm; the file is removed.

    Args:
        answer: The server's answer.
        where: Its address, for messages.
        prompt: Tokens of the request.
        tokens: Tokens of the answer.
        directory: Where this machine has the server's files; no others are read.

    Returns:
        [N, D].

    Raises:
        UsageError: the server writes no states.
        EngineError: the file is not on this machine.
        AnswerError: the file is damaged or of other tokens.
    """
    found = parsed(answer, _Answer, where, AnswerError).kv_transfer_params
    if found is None or found.hidden_states_path is None:
        arguments = shlex.join(serve_arguments(0, "DIRECTORY"))
        raise UsageError(
            f"{where} gives no hidden states; start the server with {arguments}, with the number "
            "of the target's layers for 0, or unset writer.hidden_states"
        )
    path = directory / Path(found.hidden_states_path).name
    lock = path.with_name(f"{path.name}.lock")
    try:
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_SH)  # waits until the file is written
            try:
                written = load_file(path)
            finally:
                for file in (path, lock):
                    file.unlink(missing_ok=True)
    except FileNotFoundError:
        raise EngineError(
            f"{where} wrote hidden states to {found.hidden_states_path}, but {directory} does not "
            "have them; give the directory with the server's files as writer.states_directory"
        ) from None
    except (OSError, SafetensorError) as error:
        raise AnswerError(f"{where} wrote damaged hidden states to {path}: {error}") from None
    read = [*prompt, *tokens[:-1]]
    states, ids = written.get("hidden_states"), written.get("token_ids")
    if states is None or ids is None or ids.tolist() != read or len(states) != len(read):
        raise AnswerError(f"{where} wrote the hidden states of other tokens to {path}")
    return states.flatten(1)[len(prompt) - 1 :]

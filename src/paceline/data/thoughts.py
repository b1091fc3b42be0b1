"""Where the thoughts of a chat's answer end, by what the tokenizer's template puts around them."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import TYPE_CHECKING

from paceline.errors import PromptError
from paceline.models.answer_text import behind
from paceline.models.chat_text import REASONING, ChatRendering, Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPENING = re.compile(r"([<\[(◁])([^\s<>\[\]()◁▷/|\uff5c]+)([>\])▷])\s*$")
"""A tag at the end of a prompt, which opens thoughts."""
_THOUGHT, ANSWER = "A thought.", "An answer."  # of a chat that tells what a template renders


def thoughts_end(answer: str, prompt: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Length of the thoughts in front of an answer; both texts have their special tokens.

    The last mark counts. Thoughts that a prompt opens may not end.
    """
    opened, closed = _thought_marks(tokenizer, str(tokenizer.chat_template))
    if closed in answer:
        return answer.rindex(closed) + len(closed)
    goes_on = prompt.rstrip().endswith(opened) or answer.lstrip().startswith(opened)
    return len(answer) if goes_on else 0


@functools.lru_cache(maxsize=4)
def _thought_marks(tokenizer: PreTrainedTokenizerBase, _template: str) -> tuple[str, str]:
    """What the template puts around thoughts or opens them with, and else <think> and </think>."""
    with contextlib.suppress(PromptError):
        prompt, whole = probed_chat(tokenizer)
        before, _, after = whole.partition(_THOUGHT)
        if closed := after.partition(ANSWER)[0].strip():
            return behind(prompt, before).strip() or before.split()[-1], closed
        tag = OPENING.search(behind(before, prompt))
        if tag and tag[0] not in whole:
            return tag[0].strip(), f"{tag[1]}/{tag[2]}{tag[3]}"
    return "<think>", "</think>"


def probed_chat(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The prompt of a question, and the chat with its thoughts and answer; raises PromptError."""
    asked = {"role": "user", "content": "A question?"}
    told = {"role": "assistant", "content": ANSWER, **dict.fromkeys(REASONING, _THOUGHT)}
    chat = ChatRendering(Messages("a chat", (asked, told)), tokenizer)
    return chat.text((asked,), open_turn=True), chat.text((asked, told), open_turn=False)

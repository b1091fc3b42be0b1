"""List the keys of a configuration with defaults and descriptions, as commented YAML."""

from __future__ import annotations

import functools
import inspect
import json
import re
import textwrap
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from paceline.config import fields_of, models_in

_WIDTH = 100
_LONGEST_DEFAULT = 40
_REQUIRED = object()
_ENTRY = re.compile(r"^    (\w+): (.*)$")


def describe_defaults(cls: type[BaseModel]) -> str:
    """The keys of `cls`, each below its description; keys without a default are `(required)`."""
    return "\n".join(_lines(cls, "", (cls,))) + "\n"


def _lines(cls: type[Any], indent: str, above: tuple[type, ...]) -> list[str]:
    lines: list[str] = []
    for name, field in fields_of(cls).items():
        comment = f"{indent}# "
        meaning = meaning_of(cls, name)
        lines += textwrap.wrap(meaning, _WIDTH, initial_indent=comment, subsequent_indent=comment)
        values = literals(field.annotation)
        choices = f"  # one of {', '.join(values)}" if len(values) > 1 else ""
        lines.append(f"{indent}{name}: {_shown(_default(cls, name))}{choices}")
        for model in models_in(field.annotation):
            if model in above:
                continue
            lines.append(f"{indent}  # keys of {_tag(model) or model.__name__}:")
            inner = _lines(model, indent, (*above, model))
            lines += [f"{indent}  # {line.removeprefix(indent)}" for line in inner]
    return lines


def meaning_of(cls: type[Any], name: str) -> str:
    """The description of a key: `Attributes:` entry, or MEANINGS."""
    for owner in cls.__mro__:
        if owner is object or owner is BaseModel:
            break
        found = _meanings(owner).get(name) or MEANINGS.get(f"{owner.__name__}.{name}")
        if found:
            return found
    return "Selects this variant." if _is_tag(cls, name) else MEANINGS.get(name, "")


@functools.cache
def _meanings(cls: type) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        entry = _ENTRY.match(line)
        if entry:
            name = entry[1]
            found[name] = entry[2]
        elif name and line.startswith("     "):
            found[name] += " " + line.strip()
        else:
            name = ""
    return found


def _default(cls: type[Any], name: str) -> Any:
    field = fields_of(cls)[name]
    return _REQUIRED if field.is_required() else field.get_default(call_default_factory=True)


def _shown(default: Any) -> str:
    if default is _REQUIRED:
        return "(required)"
    text = _json(default)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]} …"


def _json(default: Any) -> str:
    return json.dumps(to_jsonable_python(default, fallback=str))


def default_text(cls: type[Any], name: str) -> str:
    """The default of a key in help; empty if there is none, or a long one."""
    default = _default(cls, name)
    if default is None or default is _REQUIRED:
        return ""
    if hasattr(default, "__pydantic_fields__"):
        return _tag(type(default)).partition(": ")[2]
    text = default if isinstance(default, str) else _json(default)
    return text if len(text) <= _LONGEST_DEFAULT else ""


def variants_of(models: list[type[Any]]) -> tuple[str, list[str]]:
    """The key that selects one of these models, and its values; "" if there is none."""
    tags = [_tag(model).partition(": ") for model in models]
    keys = {key for key, _, _ in tags}
    return (keys.pop(), [value for _, _, value in tags]) if len(keys) == 1 else ("", [])


def literals(annotation: Any) -> list[str]:
    """The texts of a `Literal`."""
    parts = get_args(annotation)
    return [
        text for part in parts for text in ([part] if isinstance(part, str) else literals(part))
    ]


def _tag(model: type[Any]) -> str:
    """The key and value that select a variant, such as `kind: jsd`."""
    tags = (f"{name}: {_default(model, name)}" for name in fields_of(model) if _is_tag(model, name))
    return next(tags, "")


def _is_tag(cls: type[Any], name: str) -> bool:
    values = literals(fields_of(cls)[name].annotation)
    return len(values) == 1 and _default(cls, name) == values[0]


_LONGEST_PROMPT = "Maximum prompt tokens; a longer prompt is an error, encoder-decoders cut it."
MEANINGS = {
    "target": "Target model: directory, .gguf file or hub name.",
    "draft": "Draft model: directory, .gguf file or hub name.",
    "prompts": "Prompts: a .txt, .jsonl or .parquet file, a directory, or a hub data set.",
    "seed": "Random seed; the same seed gives the same result.",
    "draft_weights": "auto: the draft's weights as they are; int8: quantized to 8 bits first.",
    "AnalyzeConfig.parallel": "Not used: rules are predicted for drafts that propose one by one.",
    "ModelsConfig.parallel": "Let a draft with a mask token propose a block in one pass.",
    "dtype": "Data type of the models; auto: the faster of float32 and bfloat16.",
    "device": "Device of the models: auto (a GPU if there is one), cpu, cuda or cuda:N.",
    "task": "Task to evaluate on, by name or with its settings.",
    "sampling": "Sampling parameters.",
    "batch_size": "Number of texts in a batch.",
    "num_prompts": "Use the first N prompts.",
    "max_prompt_tokens": "Maximum prompt tokens; keeps the end of prompts, the start of documents.",
    "max_new_tokens": "Maximum number of new tokens per prompt.",
    "max_completion_tokens": "Maximum number of tokens per completion; the rest is cut off.",
    "gamma": "Draft tokens per block.",
    "slices": "Columns of the prompts to give figures by; prompt_tokens: by their length.",
    "gammas": "Block lengths (draft tokens per block) to compare.",
    "num_speculative_tokens": "Draft tokens per block (gamma).",
    "rules": "Acceptance rules to compare.",
    "rule": "Acceptance rule.",
    "strategy": "Decoding strategy.",
    "policy": "When drafting stops before the full block length.",
    "grid": "Decoding settings to compare.",
    "skip_examples": "Skip the first N examples of the task.",
    "optimizer": "Optimizer, with learning rate and schedule.",
    "checkpoints": "How often to save checkpoints, and how many to keep.",
    "data": "Training and evaluation texts.",
    "evaluation": "Evaluation on held-out text before, during and after training.",
    "learning_rate": "Learning rate after warm-up.",
    "weight_decay": "Decoupled weight decay per step, relative to the learning rate.",
    "schedule": "Learning rate schedule after warm-up.",
    "final_fraction": "Final learning rate, as a fraction of the peak.",
    "most_drafted": "Maximum number of draft tokens before a target pass.",
    "pass_repeats": "Number of timings of each kind of forward pass; the median counts.",
    "BenchConfig.max_prompt_tokens": _LONGEST_PROMPT,
    "TuneConfig.max_prompt_tokens": _LONGEST_PROMPT,
    "VerifyConfig.max_new_tokens": "Maximum number of new tokens per prompt; at least 2.",
    "VerifyConfig.num_cells": "Number of cells of the G-test, of equal expected mass.",
    "VerifyConfig.draft_weights": "int8: quantize the draft to 8 bits, as when it is served.",
    "VerifyConfig.false_alarm": "Probability that a lossless rule fails the test.",
    "VerifyConfig.self_test": "Also test a broken rule, which must fail.",
    "SamplingParams.temperature": "Divides the logits; 0: greedy.",
    "SamplingParams.top_p": "Keep the smallest set of tokens with this total probability; 1: all.",
    "SamplingParams.top_k": "Keep the k most likely tokens; 0: all.",
    "SamplingParams.repetition_penalty": "Penalty on tokens that the text already has; 1: none.",
    "CoolDown.begin": "Fraction of the run after which the learning rate falls.",
    "AdamW.betas": "Decay rates of the running means of the gradient and its square.",
    "Checkpoints.every_steps": "Optimizer steps between checkpoints; null: by time only.",
    "Checkpoints.every_seconds": "Seconds between checkpoints; null: by steps only.",
    "Checkpoints.keep": "Number of newest checkpoints to keep.",
    "intermediate_size": "MLP width of a narrower draft; null: the target's.",
    "num_heads": "Attention heads of a narrower draft; null: the target's.",
    "num_key_value_heads": "Key-value heads of a narrower draft; null: the target's.",
    "AnalyzeConfig.bonus": "What bonus tokens follow: the rule, or the target, as in vLLM.",
    "JSD.beta": "Weight of the target in the mixture, strictly between 0 and 1.",
    "LossVocabulary.frequent": "Score the N most frequent tokens of the text in every step.",
    "LossVocabulary.drawn": "Score N other, randomly drawn tokens per step.",
    "alpha": "Threshold of the rule: how easily draft tokens are accepted (docs/guides/decode.md).",
    "Confident.threshold": "Stop drafting before a token with a lower draft probability.",
    "ResponseByResponse.normalise": "Compare probabilities per token instead of per response.",
    "BigLittle.fallback": "Stop drafting if the draft's highest probability is below this.",
    "BigLittle.rollback": "Roll back to a draft token whose surprisal (nats) exceeds this.",
}
"""Descriptions of keys that their class does not describe; their defaults are the fields' own.

`Class.key` is for one class; `key` is for all classes without a description of their own.
"""

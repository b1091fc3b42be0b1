"""Commands whose output people read, recorded in tests/end_to_end/outputs."""

import re
from pathlib import Path

RECORDED = Path(__file__).parents[1] / "end_to_end" / "outputs"

_QUESTIONS = "".join(
    f'{{"prompt": "What is {number} + 1?", "completion": "{number + 1}"}}\n' for number in range(16)
)
_PAIR = "target: target\ndraft: draft\noutput: OUT\nmax_new_tokens: 8\n"
_TASK = "task: {task: pairs, corpus: questions.jsonl, metric: rouge1}\n"
FILES = {
    "questions.jsonl": _QUESTIONS,
    "align.yaml": """
target: target
draft: draft
output: aligned
data: {train: questions.jsonl, held_out_from_train: 4, chat: false}
num_steps: 4
batch_size: 4
max_prompt_tokens: 16
max_completion_tokens: 16
optimizer: {kind: adamw, learning_rate: 1.0e-4}
evaluation: {max_prompt_tokens: 16, max_new_tokens: 16}
checkpoints: {every_steps: 4}
""",
    "follow.yaml": """
target: target
draft: draft
log: {path: prompts.jsonl}
output: followed
align: {num_steps: 2, batch_size: 4}
serving: {to: transformers}
num_answers: 8
requests_per_round: 8
least_requests: 8
rounds: 2
max_prompt_tokens: 32
max_new_tokens: 16
""",
    "bench.yaml": f"""{_PAIR.replace("OUT", "benched")}{_TASK}num_examples: 4
num_timed: 2
grid: {{rules: [{{rule: lossless}}], temperatures: [0], num_speculative_tokens: [2]}}
""",
    "tune.yaml": f"""{_PAIR.replace("OUT", "tuned")}{_TASK}num_examples: 4
num_confirmed: 8
num_candidates: 1
max_latency: 100
rules: [{{rule: chow, alpha: [0.5]}}]
num_speculative_tokens: [1]
""",
}
_ASKED = "--target target --draft draft --prompts prompts.jsonl --raw --set max_prompt_tokens=32"
_TIMED = f"{_ASKED} --num-prompts 16 --timed-prompts 16 --max-new-tokens 32"
COMMANDS = {
    "inspect": "inspect target",
    "draft": "draft --target target --layers 0,1 --out new",
    "measure": f"measure {_TIMED}",
    "measure-table": f"measure {_TIMED} --table",
    "measure-drafts": f"measure {_ASKED} --draft new --num-prompts 8 --timed-prompts 0",
    "measure-dry-run": f"measure {_ASKED} --num-prompts 8 --dry-run",
    "verify": f"verify {_ASKED} --num-prompts 8 --max-new-tokens 32 --self-test",
    "analyze": f"analyze {_ASKED} --num-prompts 8 --max-new-tokens 24 --set gammas=[1,2] "
    """--set 'rules=[{"rule":"lossless"},{"rule":"token_v3","alpha":0.3}]'""",
    "decode": "decode --target target --draft draft --raw --temperature 0 --max-new-tokens 24 "
    "--prompt 'Return a list of' --show",
    "generate-data": "generate-data --target target --prompts prompts.jsonl --raw --output data "
    "--set prompts.limit=6 --max-new-tokens 16 --max-prompt-tokens 32",
    "align": "align --config align.yaml",
    "tune": "tune --config tune.yaml",
    "bench": "bench --config bench.yaml",
    "report": "report benched",
    "follow": "follow --config follow.yaml",
    "perplexity": "perplexity --model target --text prompts.jsonl",
    "export": "export draft --target target --to transformers --out exported",
}
"""By the name of the file with the output, in the order in which they run in one folder."""


def write_files(folder: Path) -> None:
    """Write what the commands read, beside `target`, `draft` and prompts.jsonl."""
    for name, text in FILES.items():
        (folder / name).write_text(text)


def printed(out: str, err: str) -> list[str]:
    """The lines that stay on a terminal: those of stdout, and of stderr what is no progress."""
    said = [
        line for line in err.splitlines() if not re.match(r"paceline: .*%|Loading weights", line)
    ]
    return [line.rstrip() for line in [*out.splitlines(), *said]]

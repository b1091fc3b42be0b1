"""Rules of Paceline in vLLM itself: triples of tokens of tiny models, by enumeration.

They need a GPU: there vLLM uses its second model runner, the one that the plugin changes.
Each case writes N = 20,000 texts with vLLM, two drafts a block, and compares their first three
tokens with the exact distribution: the first from the target, the others under the rule. A right
plugin fails a case by chance with probability below 1e-4. Another rule is rejected, and one whose
confidences are those of the filtered target.
"""

import json
import os
import subprocess
import textwrap
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support.exact import (
    AIMS,
    Distribution,
    Models,
    NextToken,
    Shaping,
    aimed_vectors,
    chi_square_p_value,
    target_bonus_texts,
)

pytestmark = pytest.mark.engines

PYTHON = Path(os.environ.get("PACELINE_ENGINES", ".engines")).absolute() / "vllm/bin/python"
SOURCES = Path(__file__).parents[2] / "src"
N = 20_000
V = 8
GAMMA = 2
PROMPT = (3, 5)

WRITER = textwrap.dedent("""
    import json, sys
    from vllm import LLM, SamplingParams
    from paceline.engines import vllm_plugin

    settings = json.loads(sys.argv[1])
    vllm_plugin.register()  # as vLLM does where the package is installed
    llm = LLM(
        model=settings["target"], skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=64, max_num_seqs=256, seed=settings["seed"], enable_prefix_caching=False,
        speculative_config={
            "method": "draft_model", "model": settings["draft"], "num_speculative_tokens": 2,
            "draft_sample_method": "probabilistic",
        },
    )
    options = {"max_tokens": 7, "ignore_eos": True, "detokenize": False, **settings["options"]}
    kinds = [SamplingParams(temperature=t, **options) for t in settings["temperatures"]]
    prompts = [{"prompt_token_ids": settings["prompt"]}] * settings["count"]
    params = [kinds[index % len(kinds)] for index in range(len(prompts))]
    found = llm.generate(prompts, params, use_tqdm=False)
    texts = [list(one.outputs[0].token_ids) for one in found]
    with open(settings["out"], "w") as stream:
        json.dump({"texts": texts}, stream)
""")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft of eight tokens, with heads that vLLM's processors can compute."""
    if not (PYTHON.exists() and torch.cuda.is_available()):
        pytest.skip("needs a GPU, and vLLM in PACELINE_ENGINES/vllm")
    folder = tmp_path_factory.mktemp("tiny")
    for seed, name in enumerate(("target", "draft")):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=V,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.5,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=1,
        )
        model: Any = LlamaForCausalLM(config)
        model.lm_head.weight.data *= 0.3
        model.save_pretrained(folder / name)
    return folder


@cache
def model_at(path: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(path).double()


def next_token(path: Path, shaping: Shaping | None = None, penalty: float = 1.0) -> NextToken:
    """The model's distribution of the next token; a penalty divides logits above 0, as in vLLM."""
    model, shaping = model_at(path), shaping or Shaping()

    @cache
    def probs(text: tuple[int, ...]) -> Distribution:
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0, -1].tolist()
        for token in set(text):
            logits[token] *= 1 / penalty if logits[token] > 0 else penalty
        return shaping(logits, ())

    return probs


def expected(
    folder: Path,
    name: str,
    alpha: float,
    shaping: Shaping | None = None,
    penalty: float = 1.0,
    *,
    filtered: bool = False,
) -> dict[tuple[int, ...], float]:
    """Exact triples; drafts have the temperature alone. `filtered`: confidences of what is drawn.

    A penalty is part of the target that confidences are of.
    """
    shaping = shaping or Shaping()
    target, draft = folder / "target", folder / "draft"
    p = next_token(target, shaping, penalty)
    q = next_token(draft, Shaping(shaping.temperature))
    p_raw = p if filtered else next_token(target, None, penalty)
    aim = (lambda p, *_: p) if name == "lossless" else AIMS[name](alpha)
    models = Models(p, q, p_raw, next_token(draft))
    texts = target_bonus_texts(models, aimed_vectors(aim), gamma=GAMMA, prompt=PROMPT, length=5)
    triples: dict[tuple[int, ...], float] = defaultdict(float)
    for text, mass in texts.items():
        triples[text[:3]] += mass
    return triples


def written(folder: Path, rule: str | None, **changes: Any) -> dict[str, Any]:
    """Texts that vLLM writes under a rule."""
    settings = {
        "target": str(folder / "target"),
        "draft": str(folder / "draft"),
        "prompt": PROMPT,
        "count": N,
        "temperatures": [1.0],
        "options": {},
        "seed": 0,
        "out": str(folder / "texts.json"),
    }
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCES),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "PACELINE_RULE": rule or "",
    }
    command = [str(PYTHON), "-c", WRITER, json.dumps(settings | changes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "texts.json").read_text())


def p_value(texts: list[list[int]], exact: dict[tuple[int, ...], float]) -> float:
    return chi_square_p_value(Counter(tuple(text[:3]) for text in texts), exact)


@pytest.mark.parametrize(("name", "alpha"), [("lossless", 0.0), ("token_v3", 0.5), ("chow", 0.6)])
def test_triples_follow_the_rule(folder: Path, name: str, alpha: float):
    rule = {"rule": name} | ({} if name == "lossless" else {"alpha": alpha})
    found = written(folder, json.dumps(rule))
    assert p_value(found["texts"], expected(folder, name, alpha)) > 1e-4
    if name != "lossless":
        assert p_value(found["texts"], expected(folder, "lossless", 0.0)) < 1e-4, "another rule"


@pytest.mark.parametrize(
    ("name", "alpha", "shaping", "penalty"),
    [
        ("diff", 0.2, Shaping(top_p=0.6), 1.0),
        ("token_v1", 0.2, Shaping(top_p=0.6), 1.0),
        ("token_v2", 0.1, Shaping(0.7, top_k=4, top_p=0.8), 1.5),
    ],
)
def test_confidences_are_those_of_the_target_before_filters(
    folder: Path, name: str, alpha: float, shaping: Shaping, penalty: float
):
    options = {"top_p": shaping.top_p, "top_k": shaping.top_k, "repetition_penalty": penalty}
    rule = json.dumps({"rule": name, "alpha": alpha})
    found = written(folder, rule, temperatures=[shaping.temperature], options=options)
    given = folder, name, alpha, shaping, penalty
    assert p_value(found["texts"], expected(*given)) > 1e-4
    assert p_value(found["texts"], expected(*given, filtered=True)) < 1e-4


def test_greedy_and_sampled_requests_in_one_batch(folder: Path):
    rule = '{"rule": "token_v3", "alpha": 0.5}'
    found = written(folder, rule, temperatures=[0.0, 1.0], count=N)
    greedy, sampled = found["texts"][::2], found["texts"][1::2]
    p, text = next_token(folder / "target"), PROMPT
    for _ in range(7):
        probs = p(text)
        text = (*text, max(range(V), key=probs.__getitem__))
    assert all(tuple(each) == text[2:] for each in greedy)
    assert p_value(sampled, expected(folder, "token_v3", 0.5)) > 1e-4

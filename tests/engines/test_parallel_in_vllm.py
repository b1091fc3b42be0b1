"""A parallel draft in a real vLLM: the texts are the target's; it accepts what Paceline does."""

import json
import os
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.core.sampling import SamplingParams
from paceline.decode import SpeculativeDecoder
from paceline.models import load_model
from support.engines import ENVIRONMENT, FOLDER, skip_without

pytestmark = pytest.mark.engines

V, MASK, GAMMA, NEW = 12, 11, 3, 60
RANGE, NOISE = 0.2, 0.1
PROMPTS = [[3, first, second] for first in range(8) for second in range(4)]

_DRAFTING = textwrap.dedent("""
    import json, sys
    from vllm import LLM, SamplingParams
    settings = json.loads(sys.argv[1])
    llm = LLM(
        model=settings["target"], skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=128, disable_log_stats=False, enable_prefix_caching=False,
        speculative_config={
            "method": "draft_model", "model": settings["draft"],
            "num_speculative_tokens": settings["gamma"], "parallel_drafting": True,
        },
    )
    params = SamplingParams(
        temperature=0, max_tokens=settings["new"], ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in settings["prompts"]]
    texts = llm.generate(prompts, params, use_tqdm=False)
    named = {one.name: one for one in llm.get_metrics()}
    found = {
        "texts": [list(one.outputs[0].token_ids) for one in texts],
        "blocks": named["vllm:spec_decode_num_drafts"].value,
        "accepted": named["vllm:spec_decode_num_accepted_tokens_per_pos"].values,
    }
    json.dump(found, open(settings["out"], "w"))
""")


def models(folder: Path) -> tuple[Path, Path]:
    """A target, and a noisy copy of it that drafts in parallel."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": V}
    config = LlamaConfig(**sizes, max_position_embeddings=256, initializer_range=RANGE)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "target")
    with torch.no_grad():
        for weight in model.parameters():
            weight += NOISE * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0
    model.config.pard_token = MASK
    model.save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"


def ours(target: Path, draft: Path, *, parallel: bool) -> tuple[list[list[int]], list[float]]:
    """Greedy texts, and the shares of the blocks that accept the token at each place."""
    pair = [load_model(path, dtype="float32", device="cpu") for path in (target, draft)]
    if not parallel:
        pair[1].mask_token = None
    decoder = SpeculativeDecoder(*pair, gamma=GAMMA, sampling=SamplingParams(temperature=0))
    found = decoder.generate(PROMPTS, NEW, eos_token_ids=())
    counts = [0] * GAMMA
    for text in found:
        for accepted, number in enumerate(text.stats.accepted_histogram):
            for place in range(accepted):
                counts[place] += number
    blocks = sum(text.stats.num_blocks for text in found)
    return [text.tokens for text in found], [count / blocks for count in counts]


def test_it_accepts_at_each_place_what_paceline_accepts(tmp_path: Path):
    """Blocks at the end of a text differ, by up to 1 in 40; one by one the shares are others."""
    skip_without("vllm")
    target, draft = models(tmp_path)
    wanted, shares = ours(target, draft, parallel=True)
    _, one_by_one = ours(target, draft, parallel=False)
    assert max(abs(a - b) for a, b in zip(shares, one_by_one, strict=True)) > 0.1, "the mutant"
    values = {"target": str(target), "draft": str(draft), "out": str(tmp_path / "out")}
    settings = values | {"gamma": GAMMA, "new": NEW, "prompts": PROMPTS}
    command = [str(FOLDER / "vllm/bin/python"), "-c", _DRAFTING, json.dumps(settings)]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out").read_text())
    assert found["texts"] == wanted
    served = [count / found["blocks"] for count in found["accepted"]]
    print(f"accepted at each place {served}, wanted {shares}, one by one {one_by_one}")  # noqa: T201
    assert served == pytest.approx(shares, abs=0.03)

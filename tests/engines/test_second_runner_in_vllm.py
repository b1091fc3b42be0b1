"""The functions of vLLM's second model runner under a rule, without its kernels for GPUs.

vLLM's own `RejectionSampler._verify`, with its `Sampler` and `SamplingStates`, judges N = 20,000
blocks of one draft at temperature 1 with top-p 0.6. The first token follows the distribution that
the rule induces (chi-square; a right plugin fails a case by chance with probability below 1e-4),
and not that of confidences of the filtered target.
"""

import json
import math
import os
import subprocess
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from support.exact import AIMS, Distribution, Shaping, aimed_vectors, chi_square_p_value

pytestmark = pytest.mark.engines

PYTHON = Path(os.environ.get("PACELINE_ENGINES", ".engines")).absolute() / "vllm/bin/python"
SOURCES = Path(__file__).parents[2] / "src"
N = 20_000
TOP_P = 0.6
TARGET = [0.35, 0.25, 0.2, 0.12, 0.08]
DRAFT = [0.1, 0.3, 0.25, 0.2, 0.15]

JUDGE = textwrap.dedent("""
    import json, sys
    from types import SimpleNamespace
    import numpy as np, torch
    from paceline.engines import vllm_plugin
    vllm_plugin.register()
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.states import SamplingStates
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    count, top_p, target, draft = json.loads(sys.argv[1])
    target, draft = (torch.tensor(row).log() for row in (target, draft))
    size = len(target)
    kinds = SamplingStates, Sampler, RejectionSampler
    states, sampler, judge = (kind.__new__(kind) for kind in kinds)
    for name, value in {"temperature": 1.0, "top_p": top_p, "top_k": size, "min_p": 0.0}.items():
        row = torch.full((count,), value)
        setattr(states, name, SimpleNamespace(np=row.numpy(), gpu=row))
    states.vocab_size, states.seeds = size, SimpleNamespace(gpu=torch.arange(count) * 7919)
    sampler.logits_processors, sampler.sampling_states = [], states
    sampler.thinking_budget_state = SimpleNamespace(apply=lambda *_: None)
    sampler.needs_logits_processing = np.ones(count, dtype=bool)
    sampler.use_fp64_gumbel = judge.use_block_verification = False
    judge.sampler, judge.num_speculative_steps = sampler, 1
    judge.watermark_key = judge.synthetic_conditional_rates = None
    torch.manual_seed(1)
    drafted = torch.multinomial(draft.exp(), count, True)
    sampled = torch.stack([torch.zeros_like(drafted), drafted], 1).flatten().int()
    places, rows = torch.arange(count, dtype=torch.int32), torch.arange(2).repeat(count)
    _, tokens, _ = judge._verify(
        target.repeat(2 * count, 1), draft.expand(count, 1, size), sampled, rows + 40,
        2 * torch.arange(count + 1, dtype=torch.int32), places, places.numpy(),
        places.repeat_interleave(2), rows, None, sampled,
    )
    print(json.dumps(tokens[:, 0].tolist()))
""")


def induced(name: str, alpha: float, p_raw: Distribution) -> dict[tuple[int, ...], float]:
    p = Shaping(top_p=TOP_P)([math.log(x) for x in TARGET], ())
    accept, recover = aimed_vectors(AIMS[name](alpha))(p, DRAFT, p_raw, DRAFT)
    kept = [a * b for a, b in zip(accept, DRAFT, strict=True)]
    rejected = 1 - math.fsum(kept)
    return {(v,): a + rejected * b for v, (a, b) in enumerate(zip(kept, recover, strict=True))}


@pytest.mark.parametrize(
    ("name", "alpha"), [("diff", 0.2), ("token_v1", 0.2), ("token_v2", 0.16), ("bild", 3.0)]
)
def test_a_token_follows_the_rule_with_confidences_before_the_filter(name: str, alpha: float):
    if not PYTHON.exists():
        pytest.skip("vLLM is not here; make vllm sets it up")
    rule = {"rule": name, "threshold" if name == "bild" else "alpha": alpha}
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "PACELINE_RULE": json.dumps(rule)}
    command = [str(PYTHON), "-c", JUDGE, json.dumps([N, TOP_P, TARGET, DRAFT])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = Counter((token,) for token in json.loads(done.stdout.splitlines()[-1]))
    assert chi_square_p_value(counts, induced(name, alpha, TARGET)) > 1e-4
    filtered = Shaping(top_p=TOP_P)([math.log(x) for x in TARGET], ())
    assert chi_square_p_value(counts, induced(name, alpha, filtered)) < 1e-4

"""Finds the best draft temperature Td for a target that samples at temperature T.

Prints the expected acceptance sum_v min(p_T, q_Td) and the tokens per target call (tau) for each
Td, teacher-forced on text that the target samples at T; Td = 0 is greedy drafting. All Td are
scored on the same text, so the 95% intervals of the differences are narrower than those of the
values.

    python benchmarks/draft_temperature.py --target MODEL --draft MODEL --prompts FILE
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.core.bootstrap import difference_interval, ratio_interval
from paceline.core.sampling import SamplingParams
from paceline.core.speed import tokens_and_blocks
from paceline.decode import AutoregressiveDecoder
from paceline.measure.acceptance import PairTexts, score_texts
from pairing import pair_parser, served_pair, show

if TYPE_CHECKING:
    from argparse import Namespace

    from paceline.measure.acceptance import TextScores
    from paceline.models import CausalModel


def scores_of(
    pair: tuple[CausalModel, CausalModel],
    prompts: list[list[int]],
    temperature: float,
    options: Namespace,
) -> dict[float, TextScores]:
    """Scores for each draft temperature on text that the target samples at `temperature`."""
    sampling = SamplingParams(temperature=temperature)
    decoder = AutoregressiveDecoder(pair[0], sampling)
    found = decoder.generate(prompts, options.new_tokens, batch_size=options.batch_size)
    texts = [generation.tokens for generation in found]
    return {
        draft_temperature: score_texts(
            PairTexts(
                *pair, prompts, texts, sampling, SamplingParams(temperature=draft_temperature)
            )
        )
        for draft_temperature in options.draft_temperatures
    }


def print_table(temperature: float, scores: dict[float, TextScores], gammas: list[int]) -> None:
    """Print a row per draft temperature, with the gain in acceptance over Td = T."""
    same = scores.get(temperature)
    taus = [f"tau, gamma {gamma}" for gamma in gammas]
    print(f"\n| T={temperature:g}: Td | acceptance | gain over Td = T | {' | '.join(taus)} |")
    print("|---" * (3 + len(gammas)) + "|")
    for draft_temperature, found in scores.items():
        accepted_BT, _, mask_BT = found.drafted
        lengths_B = mask_BT.sum(-1)
        own = accepted_BT.sum(-1), lengths_B
        cells = [show(ratio_interval(own)), ""]
        if same is not None and draft_temperature != temperature:
            cells[1] = show(difference_interval([own], [(same.drafted[0].sum(-1), lengths_B)]))
        for gamma in gammas:
            tokens_B, blocks_B = tokens_and_blocks(*found.drafted, gamma)
            cells.append(f"{float(tokens_B.sum() / blocks_B.sum()):.3f}")
        print(f"| {draft_temperature:g} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = pair_parser(__doc__)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--gammas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.6])
    parser.add_argument(
        "--draft-temperatures", type=float, nargs="+", default=[0, 0.3, 0.6, 0.8, 1.0, 1.2]
    )
    options = parser.parse_args()
    target, draft, prompts = served_pair(options)
    prompts = prompts[: options.num_prompts]
    for temperature in options.temperatures:
        scores = scores_of((target, draft), prompts, temperature, options)
        print_table(temperature, scores, options.gammas)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()

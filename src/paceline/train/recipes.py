"""Named recipes of Table 1 as defaults; keys in the configuration override the recipe's.

Paper: Zhou et al. 2023, Table 1 and appendix B.3.
"""

from __future__ import annotations

from typing import Any, Literal

RecipeName = Literal["supervised_kd", "seq_kd", "imit_kd", "f_distill", "gkd"]

RECIPES: dict[RecipeName, dict[str, Any]] = {
    # Hinton et al. 2015: forward KL on fixed text
    "supervised_kd": {
        "objective": [{"kind": "forward_kl"}],
        "fixed_fraction": 1.0,
        "draft_fraction": 0.0,
    },
    # Kim and Rush 2016: text from the target, cross entropy with its tokens
    "seq_kd": {
        "objective": [{"kind": "cross_entropy"}],
        "fixed_fraction": 0.0,
        "draft_fraction": 0.0,
    },
    # Lin et al. 2020: forward KL, half on fixed text, half on text from the draft
    "imit_kd": {
        "objective": [{"kind": "forward_kl"}],
        "fixed_fraction": 0.5,
        "draft_fraction": 1.0,
    },
    # Wen et al. 2023: TVD, half on text from the draft, half on text from the target
    "f_distill": {
        "objective": [{"kind": "tvd"}],
        "fixed_fraction": 0.0,
        "draft_fraction": 0.5,
    },
    # Agarwal et al. 2023: on-policy; the objective may be changed to a JSD
    "gkd": {
        "objective": [{"kind": "forward_kl"}],
        "fixed_fraction": 0.0,
        "draft_fraction": 1.0,
    },
}

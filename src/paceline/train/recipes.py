"""The named recipes of Table 1 as defaults; a key that is written out wins over its recipe.

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
    # Kim and Rush 2016: text of the target, its labels alone
    "seq_kd": {
        "objective": [{"kind": "cross_entropy"}],
        "fixed_fraction": 0.0,
        "draft_fraction": 0.0,
    },
    # Lin et al. 2020: forward KL on fixed text and text of the draft, half each
    "imit_kd": {
        "objective": [{"kind": "forward_kl"}],
        "fixed_fraction": 0.5,
        "draft_fraction": 1.0,
    },
    # Wen et al. 2023: TVD on text of the draft and of the target, half each
    "f_distill": {
        "objective": [{"kind": "tvd"}],
        "fixed_fraction": 0.0,
        "draft_fraction": 0.5,
    },
    # Agarwal et al. 2023: on-policy; forward KL unless a JSD is named
    "gkd": {
        "objective": [{"kind": "forward_kl"}],
        "fixed_fraction": 0.0,
        "draft_fraction": 1.0,
    },
}

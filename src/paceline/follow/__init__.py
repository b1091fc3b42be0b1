"""Drafts that follow the traffic of a served target.

- `rounds`: one round: read new requests, judge, swap, train
- `config`: its configuration
- `log`: reads logged requests
- `store`: the texts to train on, bounded
- `judge`: compares drafts on the target's answers to requests that came later
- `serving`: the draft that the engine loads, and the engine's counters
"""

from paceline.follow.config import FollowConfig
from paceline.follow.rounds import Round, follow

__all__ = ["FollowConfig", "Round", "follow"]

"""Training of parallel drafts: masks behind anchors of a text, in one pass with the text.

At decoding a parallel draft reads the text up to its newest token and masks behind it; what it says
at a mask is the distribution of a later token of the block. In training, several anchors of a text
stand for newest tokens. The masks of an anchor see the text up to it and the masks before them
there, at the positions that they have at decoding:

    text     a b c d e f     anchor c, 3 masks: positions of d, e, f
    masks          m m m     they predict e, f and what follows; the anchor itself predicts d

The labels and the target's distributions are those of the text, which the target reads once.
"""

# B rows, T columns of text, M masks of a row, W T + M, N trained positions, K masks of all rows,
# X N + K, A anchors of all rows, G places of a block
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from paceline.config import StrictModel
from paceline.errors import UsageError
from paceline.models.hf.cache import takes_positions
from paceline.models.hf.causal import CausalModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.data.collate import TokenBatch
    from paceline.models.hf.base import HfModel

Weighting = Literal["constant", "geometric", "confidence", "efficiency"]


class Parallel(StrictModel):
    """Blocks that the draft learns to propose in one pass.

    Attributes:
        num_tokens: Tokens of a block, the one behind the newest token included.
        anchors: Newest tokens that are drawn in each text; fewer where it is short.
        kept: Probability that an anchor keeps its next mask, after the first: fewer masks in each
            pass, the same mean gradient (dropped places of An et al. 2025).
        weighting: Weights of the places of a block: all 1; `decay` to the power of the place; the
            target's probability of the tokens before (An et al. 2026); or `efficiency`, the
            derivative of tokens per target call, if the acceptance of a place does not depend on
            the tokens before it: the probability that a place is reached times what it opens, both
            of the compared tokens (`loss_vocabulary`). The first place keeps the weight 1.
        decay: Base of the geometric weights.
        mask_token: Token of the masks; None: that of the draft, else one without a meaning.
    """

    num_tokens: int = Field(ge=2)
    anchors: int = Field(default=16, ge=1)
    kept: float = Field(default=1.0, gt=0, le=1)
    weighting: Weighting = "efficiency"
    decay: float = Field(default=0.8, gt=0, le=1)
    mask_token: int | None = Field(default=None, ge=0)


class Places(NamedTuple):
    """Masks of a batch, the masks of an anchor side by side; padded at the end of a row.

    Attributes:
        anchors_BM: Column of the text behind which the block starts.
        places_BM: Number of the mask behind its anchor, from 1; 0: padding.
    """

    anchors_BM: Tensor
    places_BM: Tensor

    @property
    def real(self) -> Tensor:
        """Where there is a mask, [B, M]."""
        return self.places_BM > 0

    @property
    def columns(self) -> Tensor:
        """The column of the text that predicts what a mask predicts, [B, M]."""
        return self.anchors_BM + self.places_BM

    def to(self, device: torch.device) -> Places:
        return Places(self.anchors_BM.to(device), self.places_BM.to(device))


def draw_places(
    mask_BT: Tensor, settings: Parallel, rng_of_row: Callable[[int], torch.Generator], first: int
) -> Places:
    """Anchors and masks of each row; a mask predicts a trained position of `mask_BT`.

    `rng_of_row`: the generator of a row, by its number; `first`: that of the first row.
    """
    anchors: list[Tensor] = []
    places: list[Tensor] = []
    for number, trained_T in enumerate(mask_BT.cpu(), first):
        rng, length = rng_of_row(number), len(trained_T)
        follows_T = torch.zeros(length + 1, dtype=torch.int64)  # trained positions behind each
        for column in range(length - 2, -1, -1):
            follows_T[column] = (follows_T[column + 1] + 1) * int(trained_T[column + 1])
        columns_C = (trained_T & (follows_T[:length] > 0)).nonzero()[:, 0]
        chosen_A = columns_C[torch.randperm(len(columns_C), generator=rng)[: settings.anchors]]
        most_A1 = follows_T[chosen_A].clamp(max=settings.num_tokens - 1)[:, None]
        numbers_M = torch.arange(1, settings.num_tokens)
        keeps_AM = torch.rand(len(chosen_A), len(numbers_M), generator=rng) < settings.kept
        keeps_AM[:, 0] = True
        there_AM = keeps_AM.cumprod(-1).bool() & (numbers_M <= most_A1)
        anchors.append(chosen_A[:, None].expand_as(there_AM)[there_AM])
        places.append(numbers_M.expand_as(there_AM)[there_AM])
    padded = (torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in (anchors, places))
    return Places(*padded)


def packed_hidden(model: HfModel, batch: TokenBatch, places: Places) -> tuple[Tensor, Tensor]:
    """Final hidden states of the text, [B, T, D], and of the masks, [B, M, D], from one pass.

    Equal to those of a pass for each anchor over the text up to it and its masks, up to rounding.
    Differentiable. Memory: attention over T + M columns.
    """
    assert isinstance(model, CausalModel), "checked before training"
    text_BT, mask_token = batch.tokens_BT, model.mask_token
    assert mask_token is not None, "set before training"
    batch_size, width = text_BT.shape
    device = text_BT.device
    columns_BT = torch.arange(width, device=device).expand(batch_size, width)
    masks_BM = torch.full_like(places.places_BM, mask_token)
    anchors_BW = torch.cat([columns_BT, places.anchors_BM], 1)
    numbers_BW = torch.cat([torch.zeros_like(columns_BT), places.places_BM], 1)
    reads_BWT = columns_BT[:, None] <= anchors_BW[..., None]
    if batch.attention_BT is not None:
        reads_BWT = reads_BWT & batch.attention_BT.bool()[:, None]
    own_BWM = anchors_BW[..., None] == places.anchors_BM[:, None]
    before_BWM = places.places_BM[:, None] <= numbers_BW[..., None]
    sees_BWW = torch.cat([reads_BWT, own_BWM & before_BWM & places.real[:, None]], -1)
    # padding sees itself, as a row of no column has no softmax
    sees_BWW = sees_BWW | torch.eye(anchors_BW.shape[1], dtype=torch.bool, device=device)
    hidden_BWD = model.hidden_under(
        torch.cat([text_BT, masks_BM], 1), sees_BWW, anchors_BW + numbers_BW
    )
    return hidden_BWD[:, :width], hidden_BWD[:, width:]


class BlockPlaces(NamedTuple):
    """The masks of a batch among its trained positions.

    Attributes:
        places: The masks.
        weights_K: Weight of each mask, without that of its place.
        sources_K: Index of the trained position that a mask predicts, too.
        tables_AG: For each anchor the trained position and the masks of its places; -1: none.
        of_table_K: Where in `tables_AG`, flattened, a mask is.
    """

    places: Places
    weights_K: Tensor
    sources_K: Tensor
    tables_AG: Tensor
    of_table_K: Tensor

    def weighted(self, weights_X: Tensor, of_places_K: Tensor) -> Tensor:
        """The weights of positions and masks, with those of the masks' places."""
        text_N, masks_K = weights_X.split([len(weights_X) - len(of_places_K), len(of_places_K)])
        return torch.cat([text_N, masks_K * of_places_K])


def among_trained(
    places: Places, mask_BT: Tensor, weights_BT: Tensor, settings: Parallel
) -> BlockPlaces:
    """Where the masks are among the trained positions, and their weights.

    The masks of the first place have together the weight of all trained positions of their text;
    those of later places as much, but for what is behind the text's end or was not kept.
    """
    real_BM = places.real
    index_BT = mask_BT.flatten().cumsum(0).view_as(mask_BT) - 1
    sources_K = index_BT.gather(1, places.columns.clamp(max=mask_BT.shape[1] - 1))[real_BM]
    first_BM = places.places_BM == 1
    num_anchors_B1 = first_BM.sum(-1, keepdim=True).clamp(min=1)
    shares_BM = weights_BT.sum(-1, keepdim=True) / num_anchors_B1
    kept_BM = settings.kept ** (places.places_BM - 1).clamp(min=0)
    weights_K = (shares_BM / kept_BM)[real_BM]
    anchor_of_K = first_BM[real_BM].cumsum(0) - 1
    number_of_K = places.places_BM[real_BM]
    shape = int(first_BM.sum()), settings.num_tokens
    tables_AG = torch.full(shape, -1, device=mask_BT.device)
    tables_AG[:, 0] = index_BT.gather(1, places.anchors_BM)[first_BM]
    of_table_K = anchor_of_K * settings.num_tokens + number_of_K
    masks_K = int(mask_BT.sum()) + torch.arange(len(of_table_K), device=mask_BT.device)
    tables_AG.view(-1)[of_table_K] = masks_K
    return BlockPlaces(places, weights_K, sources_K, tables_AG, of_table_K)


def place_weights(
    settings: Parallel, blocks: BlockPlaces, scores: Callable[[], tuple[Tensor, Tensor, Tensor]]
) -> Tensor:
    """Weight of each mask by its place, [K]; the first place of a block has 1.

    `scores` gives, at the N trained positions and behind them at the K masks, the acceptance
    sum_v min(p, q), the survival min(1, q(y) / p(y)) of the text's token y, and p(y).

    `efficiency` is the derivative of the tokens per target call by the acceptance a_j of place j,
    along the text, with the draft's own acceptance for what comes behind:

        prod_{i<j} survival_i (1 + a_{j+1} + a_{j+1} a_{j+2} + ...)

    `confidence` is the product of p(y) before the place, as in An et al. 2026.
    Paper: ours.
    """
    if settings.weighting == "constant":
        return torch.ones_like(blocks.weights_K)
    if settings.weighting == "geometric":
        numbers_K = blocks.places.places_BM[blocks.places.real]
        return torch.full_like(blocks.weights_K, settings.decay) ** numbers_K
    acceptance_X, survival_X, confidence_X = scores()
    there_AG, table_AG = blocks.tables_AG >= 0, blocks.tables_AG.clamp(min=0)
    passes_X = survival_X if settings.weighting == "efficiency" else confidence_X
    passes_AG = (passes_X[table_AG] * there_AG).cumprod(-1)
    weights_AG = torch.nn.functional.pad(passes_AG[:, :-1], (1, 0), value=1.0)
    if settings.weighting == "efficiency":
        acceptance_AG = acceptance_X[table_AG] * there_AG
        acceptance_AG[:, 2:] /= settings.kept  # so that dropped places leave the mean as it is
        opens_A = torch.ones_like(acceptance_AG[:, 0])
        for place in range(settings.num_tokens - 1, -1, -1):
            weights_AG[:, place] *= opens_A
            opens_A = 1 + acceptance_AG[:, place] * opens_A
    return weights_AG.view(-1)[blocks.of_table_K]


def prepare_for_masks(draft: HfModel, settings: Parallel, longest: int) -> None:
    """Give the draft the token of its masks, also in its configuration, as vLLM reads it.

    `longest`: number of tokens of the longest text.

    Raises:
        UsageError: the draft cannot read masks at positions of their own, or has no token for them.
    """
    text_config: Any = draft.hf.config.get_text_config()
    window = getattr(text_config, "sliding_window", None) or longest
    fits = isinstance(draft, CausalModel) and takes_positions(draft.hf)
    fits &= draft.sessions in ("batch", "rows")  # a state cannot leave masks out
    if not fits or window < longest:
        raise UsageError(
            f"a {type(draft.hf).__name__} is not trained with masks, which need a decoder-only "
            f"model that takes positions and attends to {longest} tokens; unset parallel"
        )
    draft.mask_token = draft.hf.config.pard_token = mask_token_of(draft, settings)


def mask_token_of(draft: HfModel, settings: Parallel) -> int:
    """The token of the masks: that of the settings, of the draft, or one without a meaning.

    Raises:
        UsageError: every embedding is one of a token with a meaning.
    """
    embeddings: Any = draft.hf.get_input_embeddings()
    rows = len(embeddings.weight)
    for token in (settings.mask_token, draft.mask_token):
        if token is not None:
            if token >= rows:
                raise UsageError(
                    f"parallel.mask_token is {token}, wanted one of {rows:,} embeddings"
                )
            return token
    if rows > draft.vocab_size:
        return draft.vocab_size  # the first row of padding
    known: Any = draft.tokenizer
    stops = set(draft.eos_token_ids)
    if known is not None:
        stops |= {known.bos_token_id, known.eos_token_id, known.pad_token_id, known.unk_token_id}
        template = str(known.chat_template or "")
        added = known.get_added_vocab().items()
        unused = [token for text, token in added if token not in stops and text not in template]
        if unused:
            return max(unused)
    raise UsageError(
        "the vocabulary has no token without a meaning for masks; set parallel.mask_token to one "
        "that texts do not have"
    )

"""docs/claims.yaml: claims of the papers as statements on result rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from paceline.config import StrictModel, load_config
from paceline.studies.study_file import Label

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE = Path("docs/claims.yaml")
Paper = Literal["DistillSpec", "Faster Cascades", "Direct Alignment"]
Expected = Literal["more", "less", "same", "no_less"]
Condition = Label | tuple[Label, ...]


class IidTau(StrictModel):
    """Block efficiency that the i.i.d. formula predicts from an acceptance rate.

    (1 - a^(gamma + 1)) / (1 - a). Paper: Zhou et al. 2023, section 3.
    """

    formula: Literal["iid_block_efficiency"] = "iid_block_efficiency"
    gamma: int = Field(ge=1)


class MemoryBoundSpeedup(StrictModel):
    """Memory-bound speed-up of a block efficiency, as `core.speed.mbsu`.

    tau / (c gamma + 1), where c is `parameter_ratio` of the row.
    """

    formula: Literal["mbsu"]
    gamma: int = Field(ge=1)


class Side(StrictModel):
    """One side of a comparison: a ratio of sums over the units of the rows that match.

    Attributes:
        where: Settings that a row must have, besides those of the claim; a list: one of them.
        over: Numerator; None: that of the claim.
        under: Denominator; None: that of the claim.
        transform: A formula of the ratio, which is compared instead.
    """

    where: dict[str, Condition] = Field(default_factory=dict)
    over: str | None = None
    under: str | None = None
    transform: IidTau | MemoryBoundSpeedup | None = None


class Paired(StrictModel):
    """The figure of one side against that of the other on the same units.

    Attributes:
        rows: Settings that both sides' rows have.
        across: Settings over whose values the effect is averaged, each value paired on its own.
        each: The claim is on each of these values, not on their mean.
        over: Numerator: a sum of the rows.
        under: Denominator; None: the number of units, so that the figure is a mean.
        first, second: The sides; without a second one, the first is compared with `than`.
        compare: `ratio`: first / second - 1. `difference`: first - second.
        matters: The smallest effect that matters, of the kind of `compare`.
        expect: `more`: the effect is positive. `less`: it is negative. `no_less`: above -matters.
            `same`: within matters.
    """

    kind: Literal["paired"] = "paired"
    rows: dict[str, Condition] = Field(default_factory=dict)
    across: tuple[str, ...] = ()
    each: bool = False
    over: str
    under: str | None = None
    first: Side
    second: Side | None = None
    than: float | None = None
    compare: Literal["ratio", "difference"] = "ratio"
    matters: float = Field(gt=0)
    expect: Expected = "more"

    @model_validator(mode="after")
    def _has_something_to_compare_with(self) -> Paired:
        if (self.second is None) == (self.than is None):
            raise ValueError("a paired test needs one of second and than")
        return self


class Dominance(StrictModel):
    """First-order stochastic dominance of the units' own figures: first over second.

    D = sup_x [F_first(x) - F_second(x)] is 0 if first dominates, and E = sup_x [F_second(x) -
    F_first(x)] is how far it is above. Holds if D is below `matters` and the mean gain is positive.

    Attributes:
        matters: The largest D that counts as dominance; D and E below it are too small to matter.
    """

    kind: Literal["dominance"] = "dominance"
    rows: dict[str, Condition] = Field(default_factory=dict)
    over: str
    under: str | None = None
    first: Side
    second: Side
    matters: float = Field(gt=0, lt=1)

    @model_validator(mode="after")
    def _compares_figures_of_units(self) -> Dominance:
        if self.first.transform is not None or self.second.transform is not None:
            raise ValueError("a dominance test compares figures of units; remove transform")
        return self


class FrontierTest(StrictModel):
    """Families of decoding settings compared by their quality at equal cost.

    A family is a curve of quality / target's, linear between its settings. The effect is the mean
    difference of two curves over the costs that both reach.

    Attributes:
        rows: Settings that the rows have, such as the task; one frontier per temperature and gamma.
        at_equal: The cost: `accepted`, 1 - rejection rate, or `calls_saved`, 1 - target calls /
            tokens.
        firsts, seconds: Names of families; each of the first is compared with each of the second.
        matters: The smallest difference of quality / target's that matters.
        expect: As in a paired test.
    """

    kind: Literal["frontier"] = "frontier"
    rows: dict[str, Condition] = Field(default_factory=dict)
    at_equal: Literal["accepted", "calls_saved"]
    firsts: tuple[str, ...] = Field(min_length=1)
    seconds: tuple[str, ...] = Field(min_length=1)
    matters: float = Field(gt=0)
    expect: Literal["more", "same", "no_less"] = "more"


class SumRatio(StrictModel):
    """A figure of a row: a sum divided by another; without `under`, the mean over units."""

    over: str
    under: str | None = None


class Correlation(StrictModel):
    """Correlation over rows between two figures of each, without the errors of measuring them.

    Attributes:
        rows: Settings that the rows have; all rows that match are points.
        first, second: The figures.
        than: The correlation that it is compared with.
        matters: The smallest difference that matters.
        expect: `less`: the correlation is below `than`. `more`: it is above.
    """

    kind: Literal["correlation"] = "correlation"
    rows: dict[str, Condition] = Field(default_factory=dict)
    first: SumRatio
    second: SumRatio
    than: float = Field(gt=-1, lt=1)
    matters: float = Field(gt=0)
    expect: Literal["more", "less"] = "more"


Test = Annotated[Paired | Dominance | FrontierTest | Correlation, Field(discriminator="kind")]


class Claim(StrictModel):
    """One claim of a paper.

    Attributes:
        id: Short name.
        paper: The paper; the claims of a paper are one family for the correction of error rates.
        item: Figure, table, theorem or section.
        says: What the paper says, in a few words, with its figures.
        here: The statement that is tested, with population and setting.
        study: The study whose rows are used.
        test: How it is tested.
    """

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    paper: Paper
    item: str = Field(min_length=1)
    says: str = Field(min_length=1)
    here: str = Field(min_length=1)
    study: str = Field(min_length=1)
    test: Test


class ClaimFile(StrictModel):
    """All claims.

    Attributes:
        error_rate: Probability that any claim of a paper gets a wrong verdict.
        claims: The claims.
    """

    error_rate: float = Field(default=0.05, gt=0, lt=1)
    claims: tuple[Claim, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ids_differ(self) -> ClaimFile:
        twice = [name for name, n in Counter(claim.id for claim in self.claims).items() if n > 1]
        if twice:
            raise ValueError(f"two claims have the id {twice[0]}; rename one")
        return self

    @property
    def level(self) -> Mapping[str, float]:
        """Error rate of one claim by paper: the rate divided by the paper's number of claims."""
        count = Counter(claim.paper for claim in self.claims)
        return {paper: self.error_rate / number for paper, number in count.items()}


def read_claims(path: Path = FILE) -> ClaimFile:
    """Read and check a file of claims; raises ConfigError if it is wrong."""
    return load_config(ClaimFile, path)

"""docs/claims.yaml: claims of the papers as statements on result rows.

A claim may stand for several: `over` names settings with their values, and the claim is repeated
for each combination. `$name` in its texts and in its test is the value of a setting.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import AfterValidator, Field, model_validator

from paceline.config import StrictModel, load_config
from paceline.results.figures import FIGURES
from paceline.studies.study_file import Label

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FILE = Path("docs/claims.yaml")
Paper = Literal["DistillSpec", "Faster Cascades", "Direct Alignment"]
Expected = Literal["more", "less", "same", "no_less"]
Condition = Label | tuple[Label, ...]


def _known(name: str) -> str:
    if name not in FIGURES:
        near = difflib.get_close_matches(name, FIGURES, 1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(FIGURES)}"
        raise ValueError(f"there is no figure {name}; {hint}")
    return name


def _of_units(name: str) -> str:
    if len(FIGURES[_known(name)].ratios) != 1:
        raise ValueError(f"{name} is not one ratio of sums, so that a unit has none; use another")
    return name


FigureName = Annotated[str, AfterValidator(_known)]
"""Name of a figure in `results.figures`."""
FigureOfUnits = Annotated[str, AfterValidator(_of_units)]
"""Name of a figure that is one ratio of sums."""


class Side(StrictModel):
    """One side of a comparison.

    Attributes:
        where: Settings that a row must have, besides those of the claim; a list: one of them.
    """

    where: dict[str, Condition] = Field(default_factory=dict)


class Paired(StrictModel):
    """The figure of one side against that of the other on the same units.

    Attributes:
        rows: Settings that both sides' rows have.
        across: Settings over whose values the effect is averaged, each value paired on its own.
            With `seed` among them, the interval is for other runs of training, too.
        each, most: Settings on each of whose values, or on more than half, the claim must hold.
        some: Settings of which one value is enough: at each place, the value with the largest
            effect counts.
        spread: Settings of the rows that show how far runs of training differ; without it all do.
            Recipes whose runs are copies of each other's must be left out.
        figure: What is compared.
        first, second: The sides; without a second one, the first is compared with `than`.
        compare: `ratio`: first / second - 1. `difference`: first - second.
        matters: The smallest effect that matters, of the kind of `compare`.
        expect: `more`: the effect is positive. `less`: it is negative. `no_less`: above -matters.
            `same`: within matters.
    """

    kind: Literal["paired"] = "paired"
    rows: dict[str, Condition] = Field(default_factory=dict)
    across: tuple[str, ...] = ()
    each: tuple[str, ...] = ()
    most: tuple[str, ...] = ()
    some: tuple[str, ...] = ()
    spread: dict[str, Condition] = Field(default_factory=dict)
    figure: FigureName
    first: Side
    second: Side | None = None
    than: float | None = None
    compare: Literal["ratio", "difference"] = "ratio"
    matters: float = Field(gt=0)
    expect: Expected = "more"

    @model_validator(mode="after")
    def _is_one_comparison(self) -> Paired:
        if (self.second is None) == (self.than is None):
            raise ValueError("a paired test needs one of second and than")
        if self.each and self.most:
            raise ValueError("a paired test has one of each and most")
        if self.expect == "same" and (self.each or self.most or self.some):
            raise ValueError("a paired test with each, most or some cannot expect same")
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
    figure: FigureOfUnits
    first: Side
    second: Side
    matters: float = Field(gt=0, lt=1)


class FrontierTest(StrictModel):
    """Families of decoding settings compared by quality and cost.

    Quality is that of the target or a part of it. Best cells are chosen on one half of the examples
    and measured on the other.

    Attributes:
        rows: Settings that the rows have, such as the task; one temperature and gamma.
        statistic: `cost_at_quality`: the largest saving among the settings with at least `floor` of
            the target's quality, lossless decoding among them. `quality_at_cost`: the best quality
            among the settings that cost at most what the target alone costs, lossless decoding
            among them for families that have it as an end. `quality_at_low_cost`: among those whose
            saving is in the top quarter of all. `curve`: the mean difference of
            quality over the costs that both reach, linear between settings. `width`: the range of
            costs of the settings.
        cost: `accepted`: 1 - rejection rate. `calls`: 1 - target calls / tokens. `time`: speedup
            on the timed requests.
        floor: Least quality / target's, of `cost_at_quality`.
        firsts, seconds: Names of families; each of the first is compared with each of the second.
        itself: Each of the first is compared with itself in the rows of the second side.
        some: One pair is enough.
        first_where, second_where: Settings that only the rows of one side have, such as the draft.
        plus, minus: Further settings of the rows; with `minus` the effect there is subtracted.
        matters: The smallest difference that matters.
        expect: As in a paired test.
    """

    kind: Literal["frontier"] = "frontier"
    rows: dict[str, Condition] = Field(default_factory=dict)
    statistic: Literal[
        "cost_at_quality", "quality_at_cost", "quality_at_low_cost", "curve", "width"
    ]
    cost: Literal["accepted", "calls", "time"] = "calls"
    floor: float = Field(default=1.0, gt=0, le=1)
    firsts: tuple[str, ...] = Field(min_length=1)
    seconds: tuple[str, ...] = ()
    itself: bool = False
    some: bool = False
    first_where: dict[str, Condition] = Field(default_factory=dict)
    second_where: dict[str, Condition] = Field(default_factory=dict)
    plus: dict[str, Condition] = Field(default_factory=dict)
    minus: dict[str, Condition] = Field(default_factory=dict)
    matters: float = Field(gt=0)
    expect: Literal["more", "no_less"] = "more"

    @model_validator(mode="after")
    def _has_pairs(self) -> FrontierTest:
        if bool(self.seconds) == self.itself:
            raise ValueError("a frontier test needs one of seconds and itself")
        return self

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The families that are compared."""
        if self.itself:
            return tuple(zip(self.firsts, self.firsts, strict=True))
        return tuple(itertools.product(self.firsts, self.seconds))


class Correlation(StrictModel):
    """Correlation over rows between two figures of each.

    Attributes:
        rows: Settings that the rows have; all rows that match are points.
        first, second: The figures.
        ranks: The correlation of ranks, of the figures as measured. Otherwise that of the values
            without the errors of measuring them.
        than: The correlation that it is compared with.
        matters: The smallest difference that matters.
        expect: `less`: the correlation is below `than`. `more`: it is above. `same`: it is within
            `matters` of it.
    """

    kind: Literal["correlation"] = "correlation"
    rows: dict[str, Condition] = Field(default_factory=dict)
    first: FigureOfUnits
    second: FigureOfUnits
    ranks: bool = False
    than: float = Field(gt=-1, lt=1)
    matters: float = Field(gt=0)
    expect: Literal["more", "less", "same"] = "more"


class SumOf(Side):
    """One side of a theorem.

    Attributes:
        over: The sum that is compared; None: those of the test.
    """

    over: str | None = None


class Pointwise(StrictModel):
    """A theorem or an identity, checked at each unit: it has no error rate and no effect.

    Attributes:
        rows: Settings that the rows have.
        violations: The sum that counts violations, of all rows; or `over` of the sides is compared.
        positions: The sum that counts where these were looked for.
        first, second: Sums of units, the second at most the first.
        equal: Both figures are equal at each unit.
        empty: The second side says nothing if its mean is at most this number.
    """

    kind: Literal["pointwise"] = "pointwise"
    rows: dict[str, Condition] = Field(default_factory=dict)
    violations: str | None = None
    positions: str | None = None
    first: SumOf | None = None
    second: SumOf | None = None
    over: tuple[str, ...] = ()
    equal: bool = False
    empty: float | None = None

    @model_validator(mode="after")
    def _has_something_to_check(self) -> Pointwise:
        counts = self.violations is not None and self.positions is not None
        compares = self.first is not None and self.second is not None
        if counts == compares:
            raise ValueError(
                "a pointwise test needs either violations and positions, or first and second"
            )
        return self


Test = Annotated[
    Paired | Dominance | FrontierTest | Correlation | Pointwise, Field(discriminator="kind")
]


class Size(StrictModel):
    """What the paper reports.

    Attributes:
        text: In its words or numbers, with the unit; or that it states a direction only.
        low, high: The same as an effect of the claim's test; None if it is not comparable.
    """

    text: str = Field(min_length=1)
    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def _is_a_range(self) -> Size:
        if (self.low is None) != (self.high is None):
            raise ValueError("a size has both of low and high, or neither")
        return self


class Claim(StrictModel):
    """One claim of a paper.

    Attributes:
        id: Short name.
        sentence: The name that all claims share that `over` makes of one; empty: the id.
        place: The names of the values of `over`.
        pattern: `here` with three dots where the claims of a sentence differ; empty: `here`.
        paper: The paper; the claims of a paper are one family for the correction of error rates.
        item: Figure, table, theorem or section.
        says: The paper's sentence.
        size: What the paper reports.
        here: The statement that is tested, with population and setting.
        study: The study whose rows are used.
        fixed: Day on which the margin and the test were fixed.
        known: What was known of the rows on that day; empty: nothing.
        earlier: The margin that was fixed before any row was known, if it was another.
        elsewhere: How the models or the texts differ in kind from those of the paper's sentence;
            empty: they are of its kind. The verdict says so.
        remark: What readers must know about the verdict, such as other figures.
        algebra: Why the result was known before the run; such claims are counted apart.
        awaits: What the rows of today lack; the claim gets no verdict.
        test: How it is tested.
    """

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    sentence: str = ""
    place: dict[str, str] = Field(default_factory=dict)
    pattern: str = ""
    paper: Paper
    item: str = Field(min_length=1)
    says: str = Field(min_length=1)
    size: Size
    here: str = Field(min_length=1)
    study: str = Field(min_length=1)
    fixed: str = Field(pattern=r"^\d{4}-\d\d-\d\d$")
    known: str = ""
    earlier: float | None = Field(default=None, gt=0)
    elsewhere: str = ""
    remark: str = ""
    algebra: str = ""
    awaits: str = ""
    test: Test

    @property
    def is_check(self) -> bool:
        """True for theorems, identities and results that follow from algebra."""
        return isinstance(self.test, Pointwise) or bool(self.algebra)


class ClaimFile(StrictModel):
    """All claims.

    Attributes:
        error_rate: Probability that any claim of a paper gets a wrong verdict.
        claims: The claims, one for each combination of the values of `over`.
    """

    error_rate: float = Field(default=0.05, gt=0, lt=1)
    claims: tuple[Claim, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _repeat(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("claims"), list | tuple):
            return values
        values = cast("dict[str, Any]", values)
        return values | {"claims": [one for claim in values["claims"] for one in repeated(claim)]}

    @model_validator(mode="after")
    def _ids_differ(self) -> ClaimFile:
        twice = [name for name, n in Counter(claim.id for claim in self.claims).items() if n > 1]
        if twice:
            raise ValueError(f"two claims have the id {twice[0]}; rename one")
        return self

    @property
    def level(self) -> Mapping[str, float]:
        """Error rate of one claim by paper: the rate divided by the paper's number of claims.

        Checks are not among them: they have no error rate.
        """
        count = Counter(claim.paper for claim in self.claims if not claim.is_check)
        return {paper: self.error_rate / number for paper, number in count.items()}


def repeated(claim: Any) -> Iterator[Any]:
    """The claims that `over` makes of one, as plain values.

    `over: {task: [a, b]}` sets `$task` and the place to a and b. In `over: {task: {x: a, y: b}}`
    x and y are the names for ids and places; a and b are values, or mappings of several variables.
    With `as` among these, ids have this text instead of the name. Values may name other variables.
    """
    if not isinstance(claim, dict) or not isinstance(claim.get("over"), dict):
        yield claim
        return
    values = {key: value for key, value in cast("dict[str, Any]", claim).items() if key != "over"}
    axes = [list(_points(axis, points)) for axis, points in claim["over"].items()]
    for chosen in itertools.product(*axes):
        names = {axis: name for axis, name, _ in chosen}
        variables = {key: value for *_, given in chosen for key, value in given.items()}
        variables = {key: _filled(value, variables) for key, value in variables.items()}
        in_ids = names | {axis: str(given["as"]) for axis, _, given in chosen if "as" in given}
        yield (
            _filled(values, variables)
            | {"id": Template(str(values.get("id"))).safe_substitute(in_ids)}
            | {"sentence": str(values.get("id")).replace("$", ""), "place": names}
            | {"pattern": re.sub(r"\$\w+", "…", str(values.get("here")))}
        )


def _points(axis: str, points: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """-> axis, name and variables of each of its points."""
    named = points if isinstance(points, dict) else {str(point): point for point in points}
    for name, value in cast("dict[Any, Any]", named).items():
        variables = {axis: name} | value if isinstance(value, dict) else {axis: value}
        yield axis, str(name), variables


def _filled(value: Any, variables: Mapping[str, Any]) -> Any:
    """The value with `$name` replaced; a text that is nothing else becomes the variable itself."""
    if isinstance(value, str):
        if value.startswith("$") and value[1:] in variables:
            return variables[value[1:]]
        return Template(value).safe_substitute(variables)
    if isinstance(value, dict):
        return {key: _filled(part, variables) for key, part in value.items()}
    if isinstance(value, list):
        return [_filled(part, variables) for part in value]
    return value


def read_claims(path: Path = FILE) -> ClaimFile:
    """Read and check a file of claims; raises ConfigError if it is wrong."""
    return load_config(ClaimFile, path)

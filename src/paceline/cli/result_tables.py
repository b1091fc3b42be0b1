"""Tables and lines that print measurements and tests."""

from __future__ import annotations

import json
import math
import shlex
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table as Grid
from rich.text import Text

from paceline.cli.command import styled
from paceline.cli.tables import Details, printed
from paceline.core.sampling import proposal_params
from paceline.decode.ngram import NGRAM
from paceline.measure.engine_costs import words_of_starts
from paceline.measure.results import ACCEPTANCE, gamma_of, num_tokens
from paceline.measure.slices import SHOWN
from paceline.measure.speculators import NONE
from paceline.measure.verdict import needed_acceptance
from paceline.results.figures import FIGURES
from paceline.results.frontier import TARGET_ALONE, family_of, is_known, is_lossless, measure
from paceline.view.page import meaning_of, words_of
from paceline.view.tables import (
    before_and_after,
    evaluated,
    gamma_table,
    name_of,
    served_tables,
    speculators_table,
    steps_table,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType

    from paceline.bench.tune import Tuned
    from paceline.export.model_report import ModelReport, TrainedText
    from paceline.follow import Round
    from paceline.measure.losslessness import DistributionCheck, LosslessnessReport
    from paceline.measure.measurement import Measurement
    from paceline.measure.served import ServedMeasurement
    from paceline.measure.speculators import SpeculatorTable
    from paceline.train.config import AlignConfig, Evaluation


_EVALUATED = "expected_acceptance", "greedy_agreement", "block_efficiency"


def verdict_lines(found: Measurement) -> Iterator[RenderableType]:
    """The verdict with its speedup, acceptance with what it needs, and the next step."""
    verdict, config, requests = found.verdict, found.config, found.requests
    setting = f"temperature {config.sampling.temperature:g}, {config.prompt_words}"
    where = f"in {found.engine or 'the decoder of Paceline'} at gamma"
    if not verdict.decided and not verdict.includes_one:
        head = f"{verdict}; {setting}"
    elif requests is not None:
        measured = found.figure("speedup", requests)
        plain, drafted = (
            FIGURES[name].value(requests) for name in ("target_tokens_per_s", "tokens_per_s")
        )
        others = min(config.timed_prompts, len(found.texts.units)) - len(requests.units)
        chose = f" ({others} others chose gamma)" if others else ""
        head = (
            f"{verdict.word}  speedup {measured.text('.2f', 'x', '95%: ')} {where} "
            f"{verdict.gamma}: {plain:.1f} tokens/s without the draft, {drafted:.1f} with it, "
            f"{len(requests.units)} requests one at a time{chose}, {setting}"
        )
    else:
        expected = FIGURES["expected_speedup"].measure(found.judged)
        head = (
            f"{verdict.word}  expected speedup {expected.text('.2f', 'x', '95%: ')} {where} "
            f"{verdict.gamma}: {len(found.texts.units)} texts, {setting}"
        )
    yield styled(head, verdict.exit_code)
    tau, needed = FIGURES["block_efficiency"].value(found.judged), ""
    if "break_even_acceptance" in found.judged.totals and not found.disturbance:
        least = needed_acceptance(found.judged)
        needed = f", break-even {least if least.low < least.high else f'{least.value:.3f}'}"
    yield (
        f"acceptance {found.figure('expected_acceptance')}; at gamma {gamma_of(found.judged)} "
        f"{tau:.2f} tokens per target call{needed}"
    )
    samples = config.draft != NGRAM and not proposal_params(*config.scoring[:2]).greedy
    if not found.engine:
        line = "an engine has other costs, so a verdict of its own: --engine or --costs"
        if samples:
            greedy = found.figure("greedy_draft_acceptance")
            line += f"; vLLM drafts greedily, acceptance {greedy}: --draft-temperature 0"
        yield line
    yield from disturbed_line(found.disturbance)
    yield from _slice_lines(found)
    if verdict.next:
        yield f"next: {verdict.next}"


def _slice_lines(found: Measurement) -> Iterator[str]:
    """A line per slice: its own verdict, by expected speedups."""
    for one in found.sliced:
        acceptance, tau, speedup = (FIGURES[name].measure(one.row) for name in SHOWN)
        yield (
            f"{one.row.setting['slice']}: {one.verdict.word}, expected speedup "
            f"{speedup.text('.2f', 'x')} at gamma {one.verdict.gamma}, acceptance {acceptance}, "
            f"{tau.value:.2f} tokens per target call, {len(one.slice.units)} prompts"
        )


def measurement_table(found: Measurement) -> Group:
    """Acceptance and cost, a row per gamma, and the measured speedup."""
    summary = Grid.grid(padding=(0, 2))
    texts, sampling = found.texts, found.config.sampling
    summary.add_row(
        "text",
        f"{num_tokens(texts)} target tokens after {len(texts.units)} prompts, temperature "
        f"{sampling.temperature:g}, top-p {sampling.top_p:g}, top-k {sampling.top_k}",
    )
    notes: dict[str, str] = {}
    for name in ACCEPTANCE:
        words = words_of(name)
        summary.add_row(words, str(found.figure(name)))
        notes[words] = meaning_of(name)
    brackets = {"brackets": "95% intervals over prompts."}
    table = printed(gamma_table(found), notes=notes | brackets)
    cost = texts.totals
    ms = {name: f"{cost[name] * 1e3:.1f} ms" for name in cost if name.endswith("_s")}
    target, draft = ms["target_pass_s"], ms["draft_pass_s"]
    if found.engine:
        count = found.config.concurrency
        batch = "" if count == 1 else f" of {count} requests"
        summary.add_row(f"one step{batch} in {found.engine}", f"{target} without the draft")
        return Group(summary, table)
    ratio = f"cost ratio {cost['cost_ratio']:.3f}"
    summary.add_row("one pass", f"target {target}, draft {draft}, {ratio}")
    if (requests := found.requests) is not None:
        names = "engine_efficiency", "predicted_speedup"
        part, predicted = (FIGURES[name].value(requests) for name in names)
        summary.add_row(
            "timed requests",
            f"speedup after the first token {found.figure('decoding_speedup', requests)}, "
            f"{part:.2f} times the {predicted:.3f} predicted for these requests",
        )
    return Group(summary, table)


def disturbed_line(disturbance: str) -> list[Text]:
    """A line about disturbed timings, if they were."""
    return [Text(f"warning: {disturbance}", style="bold yellow")] if disturbance else []


_FOR_PEOPLE = ("architecture", "parameters", "context", "stop tokens", "chat template", "exports")


def model_lines(report: ModelReport, *, details: bool) -> Iterator[str]:
    """What was read in a model; `details`: with how it is run, and texts as they are trained."""
    for name, value in report.facts.items():
        if details or name in _FOR_PEOPLE:
            yield f"{name:<20} {value}"
    if details:
        yield from example_lines(report.examples)
    elif report.examples:
        yield f"{'a prompt':<20} as the model gets it:\n{report.examples[0].given}"
    if report.passed and not details:
        yield "PASSED: Paceline's logits of whole texts equal transformers'; figures: --details"
    for warning in report.warnings:
        yield f"{'warning':<20} {warning}"
    for fault in report.faults:
        yield f"{'failed':<20} {fault}"


def example_lines(examples: Iterable[TrainedText]) -> Iterator[str]:
    """Texts as alignment would use them; the trained part is in brackets."""
    for example in examples:
        yield (
            f"{'example':<20} {example.where}: {example.num_given} tokens given, "
            f"{len(example.trained_tokens)} trained [[...]]"
        )
        yield f"{example.given}[[{example.trained}]]"


def served_lines(found: ServedMeasurement) -> Iterator[RenderableType | Details]:
    """The verdict, whether the counters agree with the prediction; served and predicted figures."""
    config, speed, verdict = found.config, found.speed, found.verdict
    engine = f"{found.engine} {found.engine_version}".strip()
    yield Details(printed(*served_tables(found)))
    if found.costs is not None:
        yield Details(printed(steps_table(found.costs)))
    if verdict is not None:
        yield styled(verdict, verdict.exit_code)
    agreement = found.agreement
    before = "counters: " if verdict is not None else ""
    yield styled(f"{before}{agreement}", agreement.exit_code)
    rates = ""
    if speed is not None:
        rates = f"{speed.plain_tokens_per_s:.1f} -> {speed.speculative_tokens_per_s:.1f} tokens/s, "
    yield (
        f"{rates}{found.num_requests} requests, {found.num_tokens} tokens, served by {engine}, "
        f"gamma {config.num_speculative_tokens}, temperature {config.sampling.temperature:g}, "
        f"{config.prompt_words}"
    )
    if speed is not None or found.costs is not None:
        yield words_of_starts(found.starts)


def speculator_lines(found: SpeculatorTable) -> Iterator[RenderableType]:
    """A table of the methods, and what to serve at each number of requests."""
    yield printed(speculators_table(found))
    config, best = found.config, found.best()
    for count, name in best.items():
        requests = "1 request" if count == 1 else f"{count} requests"
        yield f"at {requests} at once: {'no method' if name == NONE else name}"
    for name in dict.fromkeys(best.values()):
        if name != NONE:
            served = shlex.quote(json.dumps(found.served(name)))
            target = shlex.quote(str(config.engine.target or config.target))
            yield f"{name}: vllm serve {target} --speculative-config {served}"
    asked = max(len(row.units) * int(row.setting["concurrency"]) for row in found.rows)
    yield (
        f"{asked} requests of {config.max_new_tokens} tokens, vllm "
        f"{found.engine_version}, temperature {config.sampling.temperature:g}, "
        f"{config.prompt_words}; {words_of_starts(config.starts)}"
    )


def alignment_table(result: dict[str, Any], evaluation: Evaluation) -> Group:
    """Held-out figures before and after alignment, from the `result` of an `align` run."""
    known = [name for name in _EVALUATED if name in result["after"]]
    gamma = f", gamma {evaluation.gamma}" if "block_efficiency" in known else ""
    remark = (
        f"On {result['after']['num_tokens']:,.0f} held-out tokens of the target, temperature "
        f"{evaluation.sampling.temperature:g}{gamma}."
    )
    table = before_and_after(result["before"], result["after"], known, remark)
    return printed(table, notes={words_of(name): meaning_of(name) for name in known})


def alignment_lines(result: dict[str, Any], config: AlignConfig) -> Iterator[str]:
    """Acceptance before and after alignment, and the next step."""
    name = "expected_acceptance"
    before, after = (evaluated(result[when] or {}, name) for when in ("before", "after"))
    first, *_ = (each.text(level="95%: ") for each in (before, after) if each is not None)
    shown = first if before is None else f"{first} -> {after}"
    yield (
        f"acceptance {shown} on {result['after']['num_tokens']:,.0f} held-out tokens, the first "
        f"{config.evaluation.max_new_tokens} of each answer of the target, temperature "
        f"{config.evaluation.sampling.temperature:g}"
    )
    at_once, alone = "parallel_block_efficiency", "block_efficiency"
    if at_once in result["after"] and at_once in (result["before"] or {}):
        yield (
            f"tokens per target call at gamma {config.evaluation.gamma}: in parallel "
            f"{result['before'][at_once]:.3f} -> {result['after'][at_once]:.3f}, token by token "
            f"{result['before'][alone]:.3f} -> {result['after'][alone]:.3f}"
        )
    models = shlex.join(["--target", config.target, "--draft", f"{config.output}/draft"])
    form = {True: " --chat", False: " --raw", None: ""}[config.data.chat]
    yield (
        "next, on prompts of your users and with your --draft-weights: "
        f"paceline measure {models}{form} --prompts PROMPTS.jsonl"
    )


def round_lines(found: Round) -> Iterator[RenderableType]:
    """The decision of a round of `follow`, what it rests on, and alarms."""
    own, *others = found.compared
    new = [f"{found.num_requests:,} requests, {found.num_answered} answered again"]
    if found.num_unreadable:
        new.append(f"{found.num_unreadable} not read, as {found.fault}")
    tau, speedup = FIGURES["block_efficiency"], FIGURES["expected_speedup"]
    words = f"{tau.value(own):.2f} tokens per target call with {own.setting['draft']}"
    if speedup.is_in(own):
        words += f", expected {speedup.measure(own).text('.2f', 'x')}"
    yield f"round {found.number}: {'; '.join(new)}; {words}"
    for one in others:
        gain = tau.gain(one, own).text(".3f", "x")
        yield f"  {one.setting['draft']}: {tau.value(one):.2f}, gain {gain}"
    evidence = (
        "" if found.evidence is None else "; evidence {:.1f} of {:.1f}".format(*found.evidence)
    )
    yield styled(
        f"  {found.decision}, serving {found.serving}{evidence}",
        0 if found.decision == "swapped" else 3,
    )
    for alarm in found.alarms:
        yield styled(f"  alarm: {alarm}", 1)


def tuned_lines(found: Tuned) -> Iterator[RenderableType]:
    """The chosen setting with what it gives, and what lossless decoding does."""
    row = found.chosen.row
    figures = {name: measure(name, row) for name in ("speedup", "relative_quality")}
    said = [
        f"{words_of(name)} {'1 by proof' if is_known(name, row) else x.text(level='95%: ')}"
        for name, x in figures.items()
        if not math.isnan(x.value)
    ]
    if family_of(row) == TARGET_ALONE:
        said[0] = "no draft, as no setting that meets the bound is faster"
    elif (speedup := figures["speedup"]).low <= 1:
        said[0] += f", {'slower' if speedup.high < 1 else 'not shown to be faster'} than no draft"
    if {"score", "target_score"} <= row.sums.keys():
        target_row = row.model_copy(update={"sums": {"score": row.sums["target_score"]}})
        own, target = (FIGURES["quality"].value(one) for one in (row, target_row))
        said.append(f"{row.setting['metric']} {own:.3f}, the target's {target:.3f}")
    setting = f"{len(row.units)} examples, temperature {found.config.sampling.temperature:g}"
    line = f"{name_of(found.chosen.decoding)}  {', '.join([*said, setting])}"
    yield styled(f"chosen: {line}", 0 if figures["speedup"].low > 1 else 3)
    lossless = [one for one in found.tried if is_lossless(one.row)]
    if lossless and not is_lossless(row):  # the last one is of the confirming examples, if any
        exact = lossless[-1].measure("speedup")
        yield f"{name_of(lossless[-1].decoding)}  speedup {exact.text(level='95%: ')}"
    lossy = [one for one in found.rows("choosing") if not is_known("relative_quality", one)]
    if lossy and is_lossless(row):
        one = max(lossy, key=lambda one: measure("speedup", one).value)
        speed, quality = (measure(name, one) for name in ("speedup", "relative_quality"))
        known = "" if math.isnan(quality.value) else f", relative quality {quality}"
        name = next(tried.decoding for tried in found.tried if tried.row is one)
        yield (
            f"the fastest of {len(lossy)} lossy settings on the first {len(one.units)} examples: "
            f"{name_of(name)}  speedup {speed}{known}"
        )


def losslessness_lines(report: LosslessnessReport) -> Iterator[RenderableType]:
    """The verdict, and a line per losslessness test: result, sample size and statistic."""
    greedy, counts = report.greedy, report.greedy.counts
    line = f"{counts['identical']} of {counts['prompts']} texts ({counts['tokens']} tokens) equal"
    if counts["ties"]:
        line += f", {counts['ties']} differ at a tie of the target's logits"
    if greedy.first_difference:
        line += f"; first difference: {greedy.first_difference}"
    config, question = report.config, report.open_question
    setting = (
        f"temperature {config.sampling.temperature:g}, gamma {config.gamma}, {config.dtype}, "
        f"{config.prompt_words}"
    )
    some = "no" if report.word == "PASSED" else "a"
    why = f"{some} difference from {report.reference} was found"
    why = question if report.word == "UNDECIDED" else why
    yield styled(f"{report.word}  {why}; {setting}", report.exit_code)
    yield f"greedy:  {'passed' if greedy.passed else 'FAILED'}  {line}"
    sampled = report.distribution
    limit = (
        f"; failed if p is below {sampled.false_alarm:g}, as once in "
        f"{1 / sampled.false_alarm:,.0f} runs of a lossless rule"
    )
    limit = "" if math.isnan(sampled.p_value) else limit
    yield f"sampled: {_described(sampled, 'passed', 'FAILED')}{limit}"
    if (broken := report.broken_distribution) is not None:
        yield f"a rule broken on purpose: {_described(broken, 'NOT CAUGHT', 'caught')}"
    if report.exit_code == 0:
        models = shlex.join([config.draft, "--target", config.target])
        yield f"next: paceline export {models} --to vllm --out DIR --measurement MEASURED.json"
        yield (
            "MEASURED.json: the output of paceline measure --json, with --draft-temperature 0 for "
            "vLLM, which drafts greedily"
        )


def _described(check: DistributionCheck, passed: str, failed: str) -> str:
    counts = check.counts
    if counts["impossible"]:
        return f"{failed}  {counts['impossible']} tokens of probability 0 under the target"
    if math.isnan(check.p_value):
        return f"not tested  {counts['tokens']} tokens for {counts['cells']} groups"
    return (
        f"{passed if check.passed else failed}  {counts['tokens']} tokens against the target's "
        f"distribution: p {check.p_value:.2g} "
        f"(G-test: {check.row.totals['g_statistic']:.1f} over {counts['cells']} groups)"
    )

"""`follow`: one round after the other. A round can be stopped at any moment, and repeated.

A round takes new requests of the log, has the target answer a sample of them, compares the served
draft on these answers with the draft that an earlier round trained, swaps or drops it, and trains
the next one. Each part of a round ends with a file that is written in one step, so that a command
that runs again goes on behind the last whole part:

    rounds/000007/prompts.jsonl, taken.json      the requests, and how far the log is read
    rounds/000007/text-HASH/                     the target's answers, a run of generate-data
    rounds/000007/judged.json                    the decision
    rounds/000007/run-HASH/                      the next draft, a run of align
    rounds/000007/round.json                     the whole round
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from paceline.config import StrictModel, read_result
from paceline.data.distillation_data import generate_data
from paceline.data.input_checks import checked
from paceline.data.prompts import record_of
from paceline.data.tokens import asked, encode_prompt
from paceline.engines.contract import BlockCounts
from paceline.engines.texts import MAY_CHANGE
from paceline.errors import PromptError
from paceline.fingerprints import files_fingerprint, short_hash
from paceline.follow.judge import Judge, Trial
from paceline.follow.log import CORPUS, Logged, read
from paceline.follow.serving import LINK, counts, serve
from paceline.follow.store import Kept, TextStore
from paceline.models.loading import fingerprint_if_there, load_tokenizer
from paceline.progress import silent
from paceline.records import (
    RunDirectory,
    atomic_directory,
    atomic_write_text,
    config_hash,
    read_lines,
)
from paceline.results.figures import FIGURES
from paceline.results.row import Row
from paceline.train.align import align

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.follow.config import FollowConfig
    from paceline.progress import Progress

INITIAL = "initial"
"""Name of the first draft."""
_FIXED = ("draft", "seed")  # keys that may not change from round to round
_PROMPTS = "prompts.jsonl"
_COMMAND = "paceline follow"
_ELSEWHERE = {name.removeprefix("writer.") for name in MAY_CHANGE}  # answers are the same there
_LEAST_DRAFTED = 1000  # tokens that an engine must have drafted, to compare its rates

Decision = Literal["first", "waiting", "swapped", "dropped", "brought back"]
"""What a round decided: `first` had nothing to compare, `waiting` cannot decide yet."""


class Round(StrictModel):
    """One round.

    Attributes:
        number: From 1 on.
        positions: How far the log is read; see `log.Read`.
        num_requests: Number of logged prompts.
        num_unreadable: Number of lines and prompts that cannot be read.
        fault: Place of the first of them, or why.
        num_answered: Number of prompts that the target answers.
        counted: The engine's counters at the beginning of the round, and at its end.
        decision: What was decided.
        serving: Name of the draft to serve.
        compared: A row of each compared draft; the one that was served is the first.
        trial: Test of the draft that may replace the served one.
        evidence: Logarithm of the capital of the test that decided, and what it needs.
        watch: Test of the draft that was replaced against the one that is served.
        acceptance_rate: Draft acceptance rate of the engine since the last round; None: not known.
        reference: What it is compared with: that of the first round of the served draft.
        rate_before: That of the draft that was replaced.
        num_tests: Number of tests so far.
        start: Name of the draft that the next one starts from.
        alarms: What a person should look at.
    """

    number: int
    positions: dict[str, int]
    num_requests: int
    num_unreadable: int
    fault: str
    num_answered: int
    counted: tuple[BlockCounts | None, BlockCounts | None] = (None, None)
    decision: Decision = "first"
    serving: str = INITIAL
    compared: tuple[Row, ...] = ()
    trial: Trial | None = None
    evidence: tuple[float, float] | None = None
    watch: Trial | None = None
    acceptance_rate: float | None = None
    reference: float | None = None
    rate_before: float | None = None
    num_tests: int = 0
    start: str = INITIAL
    alarms: tuple[str, ...] = ()


_CARRIED = ("serving", "trial", "watch", "reference", "rate_before", "num_tests", "start")


def follow(config: FollowConfig, *, progress: Progress = silent) -> list[Round]:
    """Run `config.rounds` rounds, or until the log has fewer new requests than one needs.

    Returns:
        The rounds that were finished; `output/draft` is the draft to serve.

    Raises:
        UsageError: an input cannot be used.
        EngineError: the engine or a server failed; the same command continues.
        TrainingError: training failed; the same command continues it.
        StorageError: a file could not be written; the same command continues.
    """
    checked(config)
    run = RunDirectory(config.output)
    begun = (config.output / LINK).is_symlink()
    may_change = set(type(config).model_fields) - set(_FIXED)
    run.check(config, begun=begun, resume=True, may_change=may_change)
    run.resumed = None  # templates write the date of each round, not that of the first
    done: list[Round] = []
    with run.alone():
        run.write_manifest(config)
        follower = Follower(config, progress)
        while len(done) < config.rounds and (found := follower.round()) is not None:
            done.append(found)
    return done


class Follower:
    """Runs the rounds of a configuration."""

    def __init__(self, config: FollowConfig, progress: Progress = silent) -> None:
        self.config, self.progress = config, progress
        self.store = TextStore(config.output / "store.parquet", config.store)
        files = sorted(config.output.glob("rounds/*/round.json"))
        self.last = read_result(Round, files[-1], _COMMAND) if files else None
        self._clean()  # the last round may have been stopped while it did
        number = 1 if self.last is None else self.last.number + 1
        judged = self._folder(number) / "judged.json"  # of a round that was stopped in training
        now = read_result(Round, judged, _COMMAND) if judged.exists() else self.last
        serving = INITIAL if now is None else now.serving
        serve(config, serving, self._model(serving))

    def round(self) -> Round | None:
        """Run or continue one round; None: too few new requests are logged."""
        number = 1 if self.last is None else self.last.number + 1
        folder = self._folder(number)
        taken = self._taken(folder, number)
        if taken is None:
            return None
        target = fingerprint_if_there(self.config.target)
        generate = self.config.generate_config(folder / _PROMPTS, folder / "text", number)
        asked_for = generate.model_dump(mode="json", exclude={"writer": _ELSEWHERE})
        text = folder / f"text-{short_hash([target, json.dumps(asked_for, sort_keys=True)])}"
        generate = generate.model_copy(update={"output": text})
        generate_data(generate, resume=True, progress=self.progress)
        found = self._judged(folder, taken, text / "data")
        serve(self.config, found.serving, self._model(found.serving))
        writer = self.config.writer
        origin = f"{target} {writer.hidden_states} {writer.top_logprobs}"
        rows = (json.loads(line) for line, _ in read_lines(folder / _PROMPTS))
        kept = [Kept(row["id"], row["slice"], row["time"], number, origin) for row in rows]
        self.store.add(sorted((text / "data").glob("*.parquet")), kept)
        if found.trial is None:
            found = self._trained(folder, found, target)
        ended = found.counted[0], counts(self.config)
        self.last = found.model_copy(update={"counted": ended})
        _write(folder / "round.json", self.last)
        self._clean()
        return self.last

    def _folder(self, number: int) -> Path:
        return self.config.output / "rounds" / f"{number:06d}"

    def _taken(self, folder: Path, number: int) -> Round | None:
        """The round with its requests; reads the log unless that is done."""
        file, config = folder / "taken.json", self.config
        if file.exists():
            return read_result(Round, file, _COMMAND)
        found = read(
            config.log,
            {} if self.last is None else self.last.positions,
            config.num_answers,
            key=f"{config.seed}\x1f{number}",
            now=time.time(),
            most=config.requests_per_round,
            without={one.digest for one in self.store.read()},
        )
        self.progress("reading the log", found.num_requests, found.num_requests)
        chosen = list(self._readable(found.chosen))
        unreadable = found.num_faults + len(found.chosen) - len(chosen)
        fault = "the target's chat template or tokenizer cannot read them" if unreadable else ""
        fault = found.fault or fault
        if found.num_new < config.least_requests or not chosen:
            if unreadable >= config.least_requests:
                raise PromptError(
                    f"{unreadable} requests of {config.log.path} cannot be asked: {fault}"
                )
            return None
        rows = (
            one.row | {"id": one.digest, "slice": one.slice, "time": one.time} for one in chosen
        )
        atomic_write_text(folder / _PROMPTS, "".join(json.dumps(row) + "\n" for row in rows))
        carried = {} if self.last is None else self.last.model_dump(include={*_CARRIED})
        taken = Round(
            number=number,
            positions=found.positions,
            num_requests=found.num_requests,
            num_unreadable=unreadable,
            fault=fault,
            num_answered=len(chosen),
            counted=(counts(config), None),
            **carried,
        )
        _write(file, taken)
        return taken

    def _readable(self, requests: list[Logged]) -> Iterator[Logged]:
        """Those that the target's template and tokenizer read; a template may refuse a chat."""
        tokenizer = load_tokenizer(self.config.target, alone=True)
        for one in requests:
            try:
                record = record_of(one.row, "log", CORPUS)
                encode_prompt(asked([record], tokenizer, self.config.chat)[0], tokenizer)
            except PromptError:
                continue
            yield one

    def _judged(self, folder: Path, taken: Round, texts: Path) -> Round:
        file = folder / "judged.json"
        if file.exists():
            return read_result(Round, file, _COMMAND)
        found = self._decided(taken, Judge(self.config, texts))
        _write(file, found)
        return found

    def _acceptance_rate(self, taken: Round) -> float | None:
        """Draft acceptance rate of the engine since the last round; None: not known."""
        now, before = taken.counted[0], None if self.last is None else self.last.counted[1]
        if now is None or before is None:
            return None
        since = now - before
        if min(since.num_blocks, since.num_drafted, since.num_accepted) < 0:
            since = now  # the engine was started again
        if since.num_drafted < _LEAST_DRAFTED:
            return None
        return since.num_accepted / since.num_drafted

    def _decided(self, found: Round, judge: Judge) -> Round:
        """Compare the drafts, and decide which one is served."""
        config, found = self.config.judging, self._compared(found, judge)
        serving, trial, watch = found.serving, found.trial, found.watch
        if watch is not None:
            evidence, needed = watch.evidence(config.error_rate)
            just_swapped = self.last is not None and self.last.decision == "swapped"
            fell = just_swapped and self._is_below(found.acceptance_rate, found.rate_before)
            if evidence >= needed or fell:
                if evidence >= needed:
                    found = found.model_copy(update={"evidence": (evidence, needed)})
                return _swapped(found, watch.draft, "brought back")
        if trial is not None:
            evidence, needed = trial.evidence(config.error_rate)
            found = found.model_copy(update={"evidence": (evidence, needed)})
            if evidence >= needed:
                return _next_test(_swapped(found, trial.draft, "swapped"), "watch", serving)
            if trial.rounds >= config.most_rounds and evidence < needed / 2:
                found = _dropped(found, trial.draft)
        if watch is not None and watch.rounds >= config.most_rounds:
            return _next_test(found, "watch", watch.draft)  # finds what changes sooner
        return found

    def _compared(self, found: Round, judge: Judge) -> Round:
        """The round with a row of each draft, and what the texts say in its tests."""
        tests = found.trial, found.watch
        names = [found.serving, *(one.draft for one in tests if one is not None)]
        rows = {name: self._row(judge, name, at, len(names)) for at, name in enumerate(names)}
        own, most = rows[found.serving], self.config.max_new_tokens
        trial, watch = (one and one.with_texts(rows[one.draft], own, most) for one in tests)
        rate = self._acceptance_rate(found)
        reference = found.reference or rate
        return found.model_copy(
            update={
                "compared": tuple(rows.values()),
                "trial": trial,
                "watch": watch,
                "acceptance_rate": rate,
                "reference": reference,
                "alarms": tuple(self._alarms(rate, reference, own)),
                "decision": "first" if trial is None else "waiting",
                "evidence": None,
            }
        )

    def _row(self, judge: Judge, name: str, at: int, count: int) -> Row:
        self.progress("judging", at, count)
        return judge.row(self._model(name), name)

    def _is_below(self, rate: float | None, reference: float | None) -> bool:
        if rate is None or reference is None:
            return False
        return rate < (1 - self.config.serving.most_drop) * reference

    def _alarms(self, rate: float | None, reference: float | None, own: Row) -> Iterator[str]:
        """What a person should look at, in words."""
        if self._is_below(rate, reference):
            yield f"the engine accepts {rate:.3f} of the drafted tokens, {reference:.3f} before"
        expected = FIGURES["draft_acceptance_rate"].value(own)
        if self._is_below(rate, expected):
            yield (
                f"the engine accepts {rate:.3f} of the drafted tokens, {expected:.3f} are "
                "expected: it may serve another draft, target or temperature"
            )
        speedup = FIGURES["expected_speedup"]
        if speedup.is_in(own) and (value := speedup.value(own)) < 1:
            yield f"the expected speedup is {value:.2f}: serve without a draft"

    def _trained(self, folder: Path, found: Round, target: str) -> Round:
        """Train the draft of the next test."""
        name = folder.name
        kept = self._model(name)
        if not kept.exists():
            given = self._model(found.start), self.store.path
            config = self.config.align_config(*given, folder / "run")
            store = files_fingerprint([self.store.path])
            run = folder / f"run-{short_hash([target, config_hash(config), store])}"
            align(config.model_copy(update={"output": run}), resume=True, progress=self.progress)
            with atomic_directory(kept) as scratch:
                shutil.copytree(run / "draft", scratch, dirs_exist_ok=True)
        return _next_test(found, "trial", name)

    def _model(self, name: str) -> Path:
        """Directory of a draft as it was trained."""
        return Path(self.config.draft) if name == INITIAL else self.config.output / "drafts" / name

    def _clean(self) -> None:
        """Remove prompts, answers, checkpoints, and drafts that are no longer compared."""
        if self.last is None:
            return
        folder = self._folder(self.last.number)
        for path in folder.glob(f"*{_PROMPTS}*"):  # with what a killed write left
            path.unlink()
        tests = (self.last.trial, self.last.watch)
        used = {self.last.serving, self.last.start, *(one.draft for one in tests if one)}
        old = [*folder.glob("text-*"), *folder.glob("run-*")]
        old += [
            path
            for kind in ("drafts", "served")
            for path in (self.config.output / kind).glob("*")
            if path.name.partition("-")[0] not in used
        ]
        for path in old:
            shutil.rmtree(path, ignore_errors=True)


def _swapped(found: Round, draft: str, decision: Decision) -> Round:
    """Another draft is served, from which the next one starts; no test goes on."""
    changes = {"decision": decision, "serving": draft, "start": draft, "trial": None, "watch": None}
    changes |= {"rate_before": found.acceptance_rate, "reference": None}
    return found.model_copy(update=changes)


def _dropped(found: Round, draft: str) -> Round:
    """The draft on trial is given up; the next one starts from it, unless it costs calls."""
    tau = {row.setting["draft"]: FIGURES["block_efficiency"].value(row) for row in found.compared}
    start = draft if tau[draft] >= tau[found.serving] else found.serving
    return found.model_copy(update={"decision": "dropped", "start": start, "trial": None})


def _next_test(found: Round, name: Literal["trial", "watch"], draft: str) -> Round:
    """The round with another test, of this draft, which has the next number."""
    number = found.num_tests + 1
    test = Trial(draft=draft, number=number)
    return found.model_copy(update={"num_tests": number, name: test})


def _write(path: Path, content: StrictModel) -> None:
    atomic_write_text(path, content.model_dump_json(indent=2) + "\n")

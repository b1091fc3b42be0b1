"""Tasks whose examples are rows of a data set: translation, summaries, questions; their base.

A row becomes a prompt by a template. Few-shot examples come from the training corpus and never
contain a prompt of the test corpus.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from paceline.data.prompts import CorpusConfig, Record, read_columns, template_settings
from paceline.errors import PromptError, UsageError
from paceline.tasks import scoring
from paceline.tasks.base import Task, TaskExample, check_count, exchange, numbered, pick
from paceline.tasks.corpora import corpus_version
from paceline.tasks.scoring import mean_score

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.core.bootstrap import Interval
    from paceline.tasks.base import Split


SHOT_BREAK = "\n\n"
_SOURCE = "source"
_REPORTED = ("rouge1", "rouge2", "rougeLsum")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.]*)\}")


@dataclass(frozen=True, slots=True)
class Item:
    """One row: its prompt without few-shot examples, and the texts of its references."""

    where: str
    prompt: str
    references: tuple[str, ...]


class RowTask(Task):
    """Settings that tasks on rows of a data set share.

    Attributes:
        corpus: Test rows. `prompt_field` names the column of the source text, by default `prompt`,
            and `completion_field` the column of the reference answer, by default `completion`.
        train_corpus: Training rows, also for few-shot examples; with columns of its own.
        prompt: Template of a prompt. `{source}` is the source text, and `{name}` any other column.
        separator: Text between a prompt and its answer in few-shot and training text; not in chats.
        num_shots: Number of training examples with answers before each prompt.
        chat: Send each prompt as a message of the user, for instruction-tuned models.
        stop: An answer ends before the first of these texts. Plain few-shot answers also end at a
            blank line.
    """

    version: ClassVar[int] = 2
    """Increases when examples, prompts or scores of the task change."""

    corpus: CorpusConfig
    train_corpus: CorpusConfig | None = None
    prompt: str = "{source}"
    separator: str = " "
    num_shots: int = Field(default=0, ge=0)
    chat: bool = False
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()

    @field_validator("prompt")
    @classmethod
    def _has_placeholder(cls, prompt: str) -> str:
        if not _PLACEHOLDER.search(prompt):
            raise ValueError(f"prompt {prompt!r} shows no column; put {{source}} where it belongs")
        return prompt

    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        """Rows of a corpus, each after the same few-shot examples.

        Training rows are distinct. A row that the test corpus repeats is an example each time, as
        in scores of the whole corpus by other programs.
        """
        check_count(count)
        test = list(self.items(self.corpus))
        training = self._training(test) if split == "train" or self.num_shots else []
        taken = self.num_shots + (count if split == "train" else 0)
        name = f"{self.train_corpus and self.train_corpus.path}, without the prompts of the test,"
        learnt = _pick_distinct(training, taken, seed, name) if taken else []
        shots = learnt[: self.num_shots]
        match split:
            case "train":
                chosen, corpus = learnt[self.num_shots :], self.train_corpus
            case "test":
                keys = numbered(map(_key, test))
                found = dict(zip(keys, test, strict=True))
                name, remedy = self.corpus.path, "request fewer or give more rows"
                corpus = self.corpus
                chosen = pick(found, count, seed, name, remedy, kind="examples")
        return [self._example(item, shots, corpus) for item in chosen]

    def versions(self) -> dict[str, str]:
        """Version of the task, and hashes of its local data."""
        found = {"task_version": str(self.version)} | corpus_version(self.corpus)
        if self.num_shots and self.train_corpus is not None:
            found |= {f"train_{key}": one for key, one in corpus_version(self.train_corpus).items()}
        return found

    def cut(self, answer: str) -> str:
        """The part of an answer that is scored, without white space around it."""
        answer = answer.strip()
        stops = (*self.stop, SHOT_BREAK) if self.num_shots and not self.chat else self.stop
        ends = [end for text in stops if (end := answer.find(text)) >= 0]
        return answer[: min(ends, default=len(answer))].strip()

    def read_references(self, value: Any, name: str, where: str) -> tuple[str, ...]:
        """The reference answers in a column; a task may accept other values than a text."""
        if not isinstance(value, str):
            raise PromptError(
                f"{where} has no reference answer as text in column {name}; fill it or leave the "
                "row out"
            )
        return (value,)

    def compared(self, reference: str) -> str:
        """The part of a reference that is compared with an answer."""
        return reference

    def _training(self, test: Sequence[Item]) -> list[Item]:
        if self.train_corpus is None:
            raise UsageError(f"no training text besides {self.corpus.path}; name a train_corpus")
        tested = {item.prompt for item in test}
        return [item for item in self.items(self.train_corpus) if item.prompt not in tested]

    def items(self, corpus: CorpusConfig) -> Iterator[Item]:
        """Every row of a corpus; raises PromptError for one that cannot be used."""
        source, answer = corpus.prompt_field or "prompt", corpus.completion_field or "completion"
        column_of = {
            name: source if name == _SOURCE else name for name in _PLACEHOLDER.findall(self.prompt)
        }
        for values, where in read_columns(corpus, sorted({*column_of.values(), answer})):
            texts = {key: _as_text(values[name], name, where) for key, name in column_of.items()}
            prompt = _PLACEHOLDER.sub(lambda found, texts=texts: texts[found[1]], self.prompt)
            yield Item(where, prompt, self.read_references(values[answer], answer, where))

    def _example(
        self, item: Item, shots: Sequence[Item], corpus: CorpusConfig | None
    ) -> TaskExample:
        if self.chat:
            asked = [exchange(s.where, s.prompt, s.references[0]) for s in (*shots, item)]
            turns = [message for chat in asked for message in chat.messages]
            settings = template_settings(corpus, item.where)
            record = Record(item.where, "chat", messages=tuple(turns), **settings)
        else:
            before = [f"{s.prompt}{self.separator}{s.references[0]}{SHOT_BREAK}" for s in shots]
            text = "".join(before) + item.prompt
            completion = f"{self.separator}{item.references[0]}"
            record = Record(item.where, "prompt", text=text, completion=completion)
        reference, *alternatives = map(self.compared, item.references)
        return TaskExample(record, reference, tuple(alternatives))


def _key(item: Item) -> str:
    return json.dumps([item.prompt, item.references])


def _pick_distinct(items: Sequence[Item], count: int, seed: int, name: str) -> list[Item]:
    found = {_key(item): item for item in items}
    return pick(found, count, seed, name, "request fewer or give more rows")


def _as_text(value: Any, name: str, where: str) -> str:
    if isinstance(value, str):
        return value
    kind = type(value).__name__
    raise PromptError(f"{where} has a {kind} in column {name}; wanted a text for the prompt")


class Translation(RowTask):
    """Sentences with one reference translation each, scored by sacrebleu.

    `score` is sentence chrF / 100, which quality floors need. Its mean is not corpus chrF:
    quote the corpus figures. BLEU is a figure of a corpus: of a sentence it is 0 unless four words
    in a row match, or it is mostly its smoothing. A small model with poor translations had a mean
    of 0.055 over sentences where corpus BLEU / 100 was 0.0045. chrF counts parts of words, so it
    needs no smoothing and also tells poor translations apart.

    Attributes:
        metric: Metric of `score`. Corpus figures have BLEU and chrF.
        tokenize: sacrebleu's tokenizer for BLEU.
    """

    version: ClassVar[int] = 3
    task: Literal["translation"] = "translation"
    metric: Literal["chrf"] = "chrf"
    tokenize: Literal["13a", "intl", "zh", "char", "none"] = "13a"

    def score(self, example: TaskExample, answer: str) -> float:
        """Sentence chrF, 0 to 1."""
        return scoring.score_text("chrf", example.reference, self.cut(answer))

    def corpus_scores(
        self, examples: Sequence[TaskExample], answers: Sequence[str]
    ) -> dict[str, Interval]:
        """Corpus BLEU and chrF, 0 to 100."""
        cut = [self.cut(answer) for answer in answers]
        references = [example.reference for example in examples]
        return {
            name: scoring.corpus_score(metric, cut, references)
            for name, metric in self._metrics().items()
        }

    def versions(self) -> dict[str, str]:
        """Versions of task and sacrebleu, fingerprints of the data, and sacrebleu's signatures."""
        found = super().versions() | {"sacrebleu": scoring.installed_version("sacrebleu")}
        for name, metric in self._metrics().items():
            # A signature has the number of references, which is known once something is scored.
            metric.corpus_score(["a"], [["a"]])
            found[name] = str(metric.get_signature())
        return found

    def _metrics(self) -> dict[str, Any]:
        """New ones: a signature depends on what its metric has scored."""
        metrics = scoring.optional("sacrebleu.metrics")
        return {"bleu": metrics.BLEU(tokenize=self.tokenize), "chrf": metrics.CHRF()}


class Summarization(RowTask):
    """Documents with one reference summary each, scored by rouge_score.

    Attributes:
        metric: ROUGE variant of `score`. Corpus figures have rouge1, rouge2 and rougeLsum. ROUGE-2
            is what the papers report; it is 0 for most summaries of small models, so the default,
            which intervals and quality floors use, is rougeLsum.
    """

    task: Literal["summarization"] = "summarization"
    metric: Literal["rouge1", "rouge2", "rougeL", "rougeLsum"] = "rougeLsum"

    def score(self, example: TaskExample, answer: str) -> float:
        """ROUGE F-measure of stems, 0 to 1; of rougeLsum, a sentence is a line."""
        return self._scores((self.metric,), example, answer)[self.metric]

    def corpus_scores(
        self, examples: Sequence[TaskExample], answers: Sequence[str]
    ) -> dict[str, Interval]:
        """Mean F-measures, 0 to 1."""
        found = [
            self._scores(_REPORTED, example, answer)
            for example, answer in zip(examples, answers, strict=True)
        ]
        return {name: mean_score([scores[name] for scores in found]) for name in _REPORTED}

    def versions(self) -> dict[str, str]:
        """Versions of task, rouge_score and its stemmer, fingerprints of the data, and settings."""
        signature = {"rouge": "f-measure|mean|stem:yes|sentences:lines"}
        return super().versions() | scoring.metric_versions("rouge1") | signature

    def _scores(
        self, metrics: tuple[str, ...], example: TaskExample, answer: str
    ) -> dict[str, float]:
        return scoring.rouge_scores(metrics, example.reference.strip(), self.cut(answer))


class Questions(RowTask):
    r"""Questions with one or more accepted answers; the best match counts, as in SQuAD.

    The column of the reference holds a text or a list of texts. A passage to read comes from the
    template: `prompt: "{context}\n\nQuestion: {source}\nAnswer:"`.

    Attributes:
        metric: Metric of `score`. Corpus figures have both.
        prompt: Template of a prompt.
    """

    task: Literal["questions"] = "questions"
    metric: Literal["exact_match", "f1"] = "f1"
    prompt: str = "Question: {source}\nAnswer:"

    def score(self, example: TaskExample, answer: str) -> float:
        """The best exact match or F1 over the accepted answers, 0 to 1."""
        return self._best(exact_match if self.metric == "exact_match" else f1, example, answer)

    def corpus_scores(
        self, examples: Sequence[TaskExample], answers: Sequence[str]
    ) -> dict[str, Interval]:
        """Mean exact match and F1, 0 to 100, as SQuAD's script reports them."""
        both = list(zip(examples, answers, strict=True))
        return {
            name: mean_score([self._best(metric, *each) for each in both], most=100.0)
            for name, metric in (("exact_match", exact_match), ("f1", f1))
        }

    def versions(self) -> dict[str, str]:
        """Versions and fingerprints, and how answers are compared."""
        return super().versions() | {"match": "squad:1.1|max over references"}

    def read_references(self, value: Any, name: str, where: str) -> tuple[str, ...]:
        """A text, or a list of them; raises PromptError if there is none."""
        if isinstance(value, list):
            texts = tuple(text for text in value if isinstance(text, str) and text.strip())
            if not texts or len(texts) < len(value):
                raise PromptError(
                    f"{where} has no or an empty reference answer in the list {name}; fill it or "
                    "leave the row out"
                )
            return texts
        return super().read_references(value, name, where)

    def _best(
        self, metric: Callable[[str, str], float], example: TaskExample, answer: str
    ) -> float:
        answer = self.cut(answer)
        return max(metric(text, answer) for text in (example.reference, *example.alternatives))


def normalised(answer: str) -> str:
    """The answer in lower case, without punctuation, articles and surplus white space."""
    bare = answer.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(reference: str, answer: str) -> float:
    """1 if the normalised texts are equal, else 0."""
    return float(normalised(reference) == normalised(answer))


def f1(reference: str, answer: str) -> float:
    """Harmonic mean of precision and recall of the normalised words; 0 if none is shared."""
    wanted, given = (Counter(normalised(text).split()) for text in (reference, answer))
    shared = (wanted & given).total()
    if shared == 0:
        return 0.0
    precision, recall = shared / given.total(), shared / wanted.total()
    return 2 * precision * recall / (precision + recall)

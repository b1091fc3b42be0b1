"""Configuration of `follow`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator, model_validator

from paceline.config import HomePath, Options, StrictModel
from paceline.core.sampling import SamplingParams
from paceline.data.prompts import CorpusConfig
from paceline.data.requests import GenerateDataConfig, ModelWriter, Writer
from paceline.engines.client import root_of
from paceline.engines.kinds import KINDS, EngineName
from paceline.errors import ConfigError
from paceline.follow.log import LogConfig
from paceline.measure.engine_costs import read_costs
from paceline.models.compatibility import check_fits
from paceline.permissions import PROGRAMS, allowed
from paceline.records import RunDirectory
from paceline.train.config import AlignConfig

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.data.input_checks import InputChecks

_SET_HERE = ("target", "draft", "output", "data", "max_prompt_tokens", "max_completion_tokens")


class Store(StrictModel):
    """Texts of earlier rounds to train on beside the new ones, against forgetting.

    Attributes:
        max_texts: Maximum number of earlier texts, an equal number of each slice: a uniform sample
            of the prompts that are young enough.
        max_age_h: Maximum age of a text in hours; null: any.
    """

    max_texts: int = Field(default=256, ge=0)
    max_age_h: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class Judging(StrictModel):
    """When a newly aligned draft replaces the served one.

    Attributes:
        error_rate: Probability that ever, in all rounds together, a draft is served or brought back
            by a test that saves no target calls on average, over different new prompts that are
            independent.
        num_speculative_tokens: Tokens drafted per block, as served.
        sampling: Sampling of the target's answers, as served.
        most_rounds: A draft that has less than half of the evidence that it needs after this many
            rounds is dropped; the next one starts from it unless it costs target calls.
        costs: File from `measure --engine --write-costs`, to give speedups; null: none are given.
        concurrency: Number of requests that the engine serves concurrently, for `costs`.
    """

    error_rate: float = Field(default=0.05, gt=0, lt=1)
    num_speculative_tokens: Annotated[int, Options(gamma="")] = Field(default=3, ge=1)
    sampling: SamplingParams = SamplingParams()
    most_rounds: int = Field(default=2, ge=1)
    costs: HomePath | None = None
    concurrency: int = Field(default=1, ge=1)


class Serving(StrictModel):
    """The engine that serves the draft.

    Attributes:
        to: The engine that the draft is exported for.
        metrics_url: Root URL of a vLLM or llama-server, whose counters say how much it accepts;
            null: they are not read.
        most_drop: Part of the draft acceptance rate (accepted / drafted tokens) of a draft's first
            round that may be lost without an alarm.
        reload_url: URL of a vLLM that loads the new weights when a draft is swapped; it needs
            VLLM_SERVER_DEV_MODE=1 and the worker extension of `paceline.engines.vllm_reload`.
        restart: Command, as a list of words, that restarts the engine when a draft is swapped; give
            its program with --allow-program, too.
    """

    to: EngineName = "vllm"
    metrics_url: str | None = None
    most_drop: float = Field(default=0.15, gt=0, lt=1)
    reload_url: str | None = None
    restart: tuple[str, ...] = ()

    @field_validator("metrics_url", "reload_url")
    @classmethod
    def _are_roots(cls, url: str | None) -> str | None:
        return None if url is None else root_of(url)


class FollowConfig(StrictModel):
    """Configuration of `follow`.

    Attributes:
        target: Hub id, directory or GGUF file of the served target. With a server as writer its
            weights are not loaded, except last norm and head for hidden states.
        draft: The first draft that is served; it is not changed.
        log: Logged requests.
        output: Directory with all rounds; a round that was stopped resumes. `output/draft` is the
            draft to serve.
        writer: Who answers the sampled requests again: the target, loaded here, or servers. It
            records hidden states, or else the most likely tokens.
        chat: Ask logged texts as messages of the user; by default, they are asked as they are.
        align: Settings of `align` for a round's training, by default ten minutes of it; text,
            models, lengths and output are those of the round.
        store: Earlier texts to train on.
        judging: When a draft is swapped.
        serving: The engine.
        rounds: Number of rounds, if the log has requests for them.
        num_answers: Requests per round that the target answers again, to judge and to train on.
        least_requests: A round begins when this many different new prompts are logged.
        requests_per_round: Read at most this many different prompts in a round, to replay a log;
            null: all.
        max_prompt_tokens: Maximum prompt length; prompts keep their last tokens, texts their first.
        max_new_tokens: Maximum number of tokens per answer.
        batch_size: Answers generated per batch, or asked of servers at once.
    """

    target: str = Field(min_length=1)
    draft: str = Field(min_length=1)
    log: Annotated[LogConfig, Options(log="path")]
    output: HomePath
    writer: Writer = ModelWriter(hidden_states=True)
    chat: bool = False
    align: dict[str, Any] = Field(default={"max_seconds": 600})
    store: Store = Store()
    judging: Judging = Judging()
    serving: Serving = Serving()
    rounds: Annotated[int, Options()] = Field(default=1, ge=1)
    num_answers: Annotated[int, Options()] = Field(default=256, ge=8)
    least_requests: Annotated[int, Options()] = Field(default=64, ge=8)
    requests_per_round: Annotated[int | None, Options()] = Field(default=None, ge=8)
    max_prompt_tokens: Annotated[int, Options()] = Field(default=512, ge=1)
    max_new_tokens: Annotated[int, Options()] = Field(default=128, ge=2)
    batch_size: int = Field(default=32, ge=1)
    seed: int = 0

    @model_validator(mode="after")
    def _fits_together(self) -> FollowConfig:
        if not self.writer.hidden_states and not self.writer.top_logprobs:
            raise ValueError(
                "the writer records nothing to learn from; set writer.hidden_states or "
                "writer.top_logprobs"
            )
        if not self.writer.hidden_states and self.serving.to == "transformers":
            raise ValueError(
                "transformers samples its drafts, which are judged by writer.hidden_states alone"
            )
        if self.judging.sampling.repetition_penalty != 1:
            raise ValueError("judging.sampling.repetition_penalty must be 1")
        most = self.requests_per_round
        if most is not None and most < self.least_requests:
            raise ValueError(
                f"requests_per_round {most} is below least_requests {self.least_requests}; no "
                "round would begin"
            )
        if taken := [key for key in _SET_HERE if key in self.align]:
            raise ValueError(f"align.{taken[0]} is set by the round; remove it")
        self.align_config("draft", self.output, self.output)
        return self

    def align_config(self, draft: str | Path, text: Path, output: Path) -> AlignConfig:
        """The training of a round, from this draft on this text."""
        data = {"train": str(text), "recorded_states": self.writer.hidden_states}
        values: dict[str, Any] = {"objective": [{"kind": "jsd"}]}
        if not self.writer.hidden_states:
            values = {"objective": [{"kind": "top_k_tail"}]}
        values |= {"seed": self.seed, **self.align}
        values |= {"target": self.target, "draft": str(draft), "output": output, "data": data}
        values |= {"max_prompt_tokens": self.max_prompt_tokens}
        return AlignConfig(**values, max_completion_tokens=self.max_new_tokens)

    def generate_config(self, prompts: Path, output: Path, seed: int) -> GenerateDataConfig:
        """The target's answers to a round's requests."""
        sampling = self.judging.sampling
        return GenerateDataConfig(
            target=self.target,
            writer=self.writer,
            output=output,
            prompts=CorpusConfig(path=str(prompts)),
            chat=self.chat,
            temperatures=(sampling.temperature,),
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_prompt_tokens=self.max_prompt_tokens,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            shard_size=self.batch_size,
            seed=seed,
        )

    def check(self, checks: InputChecks) -> None:
        RunDirectory(self.output).check_kind(self)
        restart = self.serving.restart
        if restart and restart[0] not in allowed(PROGRAMS):
            raise ConfigError(
                f"a file may not start {restart[0]}; if you want that, add --allow-program "
                f"{restart[0]}"
            )
        if self.judging.costs is not None:
            gammas = (self.judging.num_speculative_tokens,)
            read_costs(self.judging.costs).usable(gammas, self.judging.concurrency)
        lengths = self.max_prompt_tokens, self.max_new_tokens
        models: list[Any] = checks.pair(self.target, self.draft)
        has_masks = models[1].mask_token is not None or self.align.get("parallel")
        if has_masks and KINDS[self.serving.to].drafts_at_once and not self.writer.hidden_states:
            raise ConfigError(
                "a draft that proposes a block in one pass is judged by writer.hidden_states alone"
            )
        for model in models:
            check_fits(model, *lengths, ("max_prompt_tokens", "max_new_tokens"), str(model.path))
        checks.key(self.writer)
        found = self.log.files()
        checks.lines.append(f"log: {self.log.path}, {len(found)} files")
        if not found:
            raise ConfigError(f"no file matches {self.log.path}; check log.path")
        checks.output(self.output)

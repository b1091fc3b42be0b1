"""The engines: how each is started and asked, what it loads and drafts, and what was tested.

To add an engine, add its `EngineKind` to `KINDS`, and the class of its client: in `servers`, or as
`assisted` for an engine that runs in this process. Other modules name an engine only where it alone
has something, such as the plugin of vLLM.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from paceline.core.sampling import SamplingParams
from paceline.engines.contract import assisted_settings
from paceline.engines.servers import (
    LlamaServer,
    Properties,
    SglangServer,
    Version,
    VllmServer,
    llama_text_body,
    vllm_text_body,
)
from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pydantic import BaseModel

    from paceline.engines.client import Client
    from paceline.engines.contract import Engine, Request
    from paceline.models import HfModel

DraftSampling = Literal["greedy", "probabilistic"]
RULE_VARIABLE = "PACELINE_RULE"
"""Environment variable that gives Paceline's plugin of vLLM its rule."""
_GREEDY = SamplingParams(temperature=0.0)


class Drafting(NamedTuple):
    """Drafting configuration of a server.

    Attributes:
        draft: Path or hub name of the draft.
        gamma: Tokens drafted per block.
        sampling: How vLLM samples drafts; the other servers draft greedily.
        rule: Rule for Paceline's plugin of vLLM, as JSON; None: the server's own.
    """

    draft: str
    gamma: int
    sampling: DraftSampling = "greedy"
    rule: str | None = None


class Capacity(NamedTuple):
    """Capacity of a server.

    Attributes:
        length: Context length in tokens.
        batch_size: Concurrent requests.
    """

    length: int
    batch_size: int = 1


class TextForm(NamedTuple):
    """How a server is recognised and asked for texts, if not by OpenAI's endpoint alone.

    Attributes:
        program: Name of its program, which recorded names of servers begin with.
        version: Path and answer of the request for its version; another server has no such answer.
        tokenize: Body of the request that tokenizes a text without special tokens.
        path: Path of the request for a text.
        body: Its body, of the model's name, the request and the number of log probabilities.
    """

    program: str
    version: tuple[str, type[BaseModel]]
    tokenize: Callable[[str], dict[str, Any]]
    path: str
    body: Callable[[str, Request, int], dict[str, Any]]


@dataclass(frozen=True)
class EngineKind:
    """What Paceline knows of an engine. A server has `connect`, another engine has `load`.

    Attributes:
        connect: The client of a running server, from an HTTP client and the name of the model.
        load: The engine in this process, from target, draft (None: without) and gamma.
        environment: Environment variables of its server under a rule of the plugin, or "".
        amx_advice: An option, and the advice to use it if a server without it crashes on a
            processor with AMX.
        code: Python code that loads target and draft, for a gamma and a class of transformers.
        generation: Settings for a gamma in the draft's generation_config.json.
    """

    name: str  # as in `measure --engine` and `export --to`
    title: str  # in sentences
    connect: Callable[[Client, str | None], Engine] | None = None
    load: Callable[[HfModel, HfModel | None, int], Engine] | None = None
    program: tuple[str, ...] = ()  # starts its server
    target_flags: tuple[str, ...] = ()  # before the path of the target
    draft: Callable[[Drafting], list[str]] = lambda _: []  # arguments for speculative decoding
    capacity: Callable[[Capacity], list[str]] = lambda _: []
    dtype: Callable[[str], list[str]] = lambda dtype: ["--dtype", dtype]
    environment: Callable[[str], dict[str, str]] = lambda _: {}
    logprobs_flag: str = ""  # option for the largest number of log probabilities in an answer
    texts: TextForm | None = None
    amx_advice: tuple[str, str] | None = None
    other_methods: tuple[str, ...] = ()  # that it infers from parts of a draft's path
    runs_rules: bool = False  # which Paceline's plugin sets
    samples_drafts: bool = False  # if asked to, at the request's temperature, without top-k, top-p
    processes_twice: bool = False  # temperature and filters apply to the draft twice
    one_at_a_time: bool = False  # it drafts for one text at a time
    loads_gguf: bool = False  # and no directories
    always_ties: tuple[str, ...] = ()  # model types of which it reads no head, but the embedding
    encodes: bool = False  # it drafts for encoder-decoders
    refuses_stateful: bool = False  # models that transformers calls stateful
    code: Callable[[str, str, int, str], str] | None = None
    generation: Callable[[int], dict[str, Any]] | None = None
    tested: tuple[str, ...] = ()  # beginnings of versions
    tested_words: str = "its response format only"
    reasons: str = ""  # known ones for counts that differ from the prediction
    advice: str = ""  # if it drafts nothing
    filter_note: str = ""  # on top-k and top-p together

    @property
    def in_process(self) -> bool:
        """True if it runs in this process, not as a server."""
        return self.connect is None

    def loads(self, model: str) -> bool:
        """True if it can load the model: a GGUF file or a directory."""
        return model.endswith(".gguf") == self.loads_gguf

    def target_arguments(self, target: str) -> list[str]:
        """Arguments for the model to serve; raises UsageError for a path that is an option."""
        return [*self.target_flags, self._no_option("target", target)]

    def draft_arguments(self, drafting: Drafting) -> list[str]:
        """Arguments for speculative decoding; raises UsageError for a path that is an option."""
        self._no_option("draft", drafting.draft)
        return self.draft(drafting)

    def _no_option(self, role: str, path: str) -> str:
        if path.startswith("-"):
            raise UsageError(f"the {role} {path} would be an option of {self.name}; name a model")
        return path

    def check_draft_path(self, draft: str) -> None:
        """Raise UsageError if it would infer another drafting method from the draft's path."""
        for name in self.other_methods:
            if name in draft.lower():
                raise UsageError(
                    f"{self.title} infers another drafting method from {name!r} in the path "
                    f"{draft}; choose another path"
                )

    def proposals(self, drafting: DraftSampling, sampling: SamplingParams) -> SamplingParams:
        """Sampling parameters that it applies to the draft.

        transformers passes the target's logits processors to the draft, whose own `generate` adds
        them again: logits are divided by the temperature twice. vLLM's probabilistic drafting
        applies the temperature, but neither top-k nor top-p.

        Args:
            drafting: Its draft sampling, if it can choose.
            sampling: Sampling parameters of the request.
        """
        if self.processes_twice:
            return sampling.model_copy(update={"temperature": sampling.temperature**2})
        if drafting == "probabilistic":
            return SamplingParams(temperature=sampling.temperature)
        return _GREEDY


def _drafted_by_vllm(drafting: Drafting) -> list[str]:
    settings = {
        "method": "draft_model",
        "model": drafting.draft,
        "num_speculative_tokens": drafting.gamma,
        "draft_sample_method": drafting.sampling,
    }
    return ["--speculative-config", json.dumps(settings)]


def _environment_of_vllm(rule: str) -> dict[str, str]:
    logs = {"VLLM_LOGGING_LEVEL": "INFO"} if rule else {}  # `running` looks for the plugin's line
    return {**logs, "VLLM_NO_USAGE_STATS": "1", RULE_VARIABLE: rule}


def _drafted_by_sglang(drafting: Drafting) -> list[str]:
    # SGLang counts the root of a block as a drafted token.
    return [
        *("--speculative-algorithm", "STANDALONE"),
        *("--speculative-draft-model-path", drafting.draft),
        *("--speculative-num-steps", str(drafting.gamma), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(drafting.gamma + 1)),
    ]


def _drafted_by_llama(drafting: Drafting) -> list[str]:
    # Without --spec-type the server loads the draft and does not use it.
    return [
        *("-md", drafting.draft, "--spec-type", "draft-simple"),
        *("--spec-draft-n-max", str(drafting.gamma), "--spec-draft-p-min", "0"),
    ]


def _capacity_of_llama(wanted: Capacity) -> list[str]:
    """Also /metrics; -c is the total over all requests."""
    size = wanted.batch_size
    return ["-c", str(wanted.length * size), "-np", str(size), "--metrics"]


def _flags(length: str, size: str) -> Callable[[Capacity], list[str]]:
    """By default, every server admits one request; SGLang's limit is 48 when it drafts."""
    return lambda wanted: [
        *(length, str(wanted.length)),
        *((size, str(wanted.batch_size)) if wanted.batch_size > 1 else ()),
    ]


def _cache_of_llama(dtype: str) -> list[str]:
    """The dtype of the KV cache."""
    cache = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]
    return ["-ctk", cache, "-ctv", cache]


def _assisted(target: HfModel, draft: HfModel | None, gamma: int) -> Engine:
    from paceline.engines.assisted import Transformers

    return Transformers(target, draft, gamma)


def _code_of_transformers(target: str, draft: str, gamma: int, kind: str) -> str:
    return (
        f"from transformers import {kind}, AutoTokenizer\n"
        f"tokenizer = AutoTokenizer.from_pretrained({target!r})\n"
        f"target = {kind}.from_pretrained({target!r})\n"
        f"draft = {kind}.from_pretrained({draft!r})"
        f"  # drafts {gamma} tokens per block\n"
        'inputs = tokenizer("A prompt", return_tensors="pt")\n'
        "texts = target.generate(**inputs, assistant_model=draft, max_new_tokens=128)"
    )


_TIED = ("cohere", "cohere2", "gemma", "gemma2")  # in vLLM's and SGLang's gemma2.py, for one


_KINDS = (
    EngineKind(
        name="vllm",
        title="vLLM",
        connect=VllmServer,
        program=("vllm", "serve"),
        draft=_drafted_by_vllm,
        capacity=_flags("--max-model-len", "--max-num-seqs"),
        environment=_environment_of_vllm,
        logprobs_flag="--max-logprobs",
        texts=TextForm(
            program="vllm",
            version=("/version", Version),
            tokenize=lambda text: {"prompt": text, "add_special_tokens": False},
            path="/v1/completions",
            body=vllm_text_body,
        ),
        always_ties=_TIED,
        other_methods=("eagle-", "eagle3", "dflash", "dspark"),
        runs_rules=True,
        samples_drafts=True,
        tested=("0.32",),
        tested_words="0.32.0",
        reasons="another data type than the prediction's, or a running server with another "
        "num_speculative_tokens or draft_sample_method",
        advice="start it with --speculative-config",
    ),
    EngineKind(
        name="sglang",
        title="SGLang",
        connect=lambda client, _: SglangServer(client),
        program=("python", "-I", "-m", "sglang.launch_server"),
        target_flags=("--model-path",),
        draft=_drafted_by_sglang,
        capacity=_flags("--context-length", "--max-running-requests"),
        always_ties=_TIED,
        reasons="another data type, acceptance thresholds below 1, or another number of steps",
        advice="start it with --speculative-algorithm STANDALONE",
        filter_note="SGLang applies top-p after top-k to drafted blocks, as the prediction does, "
        "and both to the whole distribution in texts without a draft: these keep more tokens",
    ),
    EngineKind(
        name="llamacpp",
        title="llama.cpp",
        connect=lambda client, _: LlamaServer(client),
        program=("llama-server",),
        target_flags=("-m",),
        draft=_drafted_by_llama,
        capacity=_capacity_of_llama,
        dtype=_cache_of_llama,
        texts=TextForm(
            program="llama.cpp",
            version=("/props", Properties),
            tokenize=lambda text: {"content": text, "add_special": False},
            path="/completion",
            body=llama_text_body,
        ),
        amx_advice=(
            "--no-repack",
            "on a processor with AMX llama.cpp crashes on some quantised files (llama.cpp issue "
            "20824): try --set 'engine.options=[--no-repack]'",
        ),
        loads_gguf=True,
        tested=("b0-unknown",),  # reported by a build from the sources of llama-cpp-python 0.3.36
        tested_words="the one in llama-cpp-python 0.3.36",
        reasons="a quantized target or draft, --spec-draft-p-min above 0, or a running server with "
        "another --spec-draft-n-max",
        advice="start llama-server with --spec-type draft-simple, and read its log: it ignores "
        "drafts whose tokenizer it finds incompatible",
    ),
    EngineKind(
        name="transformers",
        title="transformers",
        load=_assisted,
        processes_twice=True,
        one_at_a_time=True,
        encodes=True,
        refuses_stateful=True,
        code=_code_of_transformers,
        generation=assisted_settings,
        tested=("5.23",),
        tested_words="5.23.0",
        reasons="another data type",
        advice="use longer prompts or raise max_new_tokens",
    ),
)
KINDS: Mapping[str, EngineKind] = {kind.name: kind for kind in _KINDS}
"""The engines by name."""

if TYPE_CHECKING:
    EngineName: TypeAlias = str
    RuleServer: TypeAlias = str
else:
    EngineName = Literal[tuple(KINDS)]
    """A field of a configuration: an engine."""
    RuleServer = Literal[("paceline", *(kind.name for kind in _KINDS if kind.runs_rules))]
    """A field of a configuration: Paceline's decoder, or an engine that runs its rules."""


def names_of(has: Callable[[EngineKind], bool]) -> str:
    """The engines for which this is true, such as `vllm, sglang or llamacpp`."""
    *others, last = (kind.name for kind in _KINDS if has(kind))
    return " or ".join([", ".join(others), last] if others else [last])


def text_form(server: str) -> TextForm | None:
    """The form of a server of this name and version; None: OpenAI's endpoint alone."""
    forms = (kind.texts for kind in _KINDS if kind.texts is not None)
    return next((form for form in forms if server.startswith(form.program)), None)


def untested(engine: Engine) -> str | None:
    """Return a note if Paceline was not tested with the engine's version, else None."""
    kind, version = KINDS[engine.name], engine.version or "of an unknown version"
    if engine.version.startswith(kind.tested):
        return None
    return (
        f"{engine.name} {version} was not tested with Paceline (tested: {kind.tested_words}); if "
        "the results differ, its counters may have another meaning"
    )

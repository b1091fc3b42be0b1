"""What Paceline knows of each engine is complete, and configurations accept no other engine."""

import pytest
from pydantic import TypeAdapter, ValidationError

from paceline.config import apply_override
from paceline.engines.commands import EngineChoice
from paceline.engines.contract import Engine
from paceline.engines.kinds import KINDS, EngineName, RuleServer, names_of
from paceline.engines.servers import Server

kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@kinds
def test_an_engine_is_a_server_with_a_program_or_runs_in_this_process(kind: type[Engine]):
    assert kind.in_process or (issubclass(kind, Server) and kind.program)


def test_configurations_accept_these_engines_alone():
    for name in KINDS:
        TypeAdapter(EngineName).validate_python(name)
    TypeAdapter(RuleServer).validate_python("paceline")
    with pytest.raises(ValidationError, match="'vllm', 'sglang', 'llamacpp' or 'transformers'"):
        TypeAdapter(EngineName).validate_python("paceline")
    with pytest.raises(ValidationError, match="'paceline' or 'vllm'"):
        TypeAdapter(RuleServer).validate_python("sglang")


def test_sentences_name_the_engines_with_a_property():
    assert names_of(lambda kind: not kind.in_process) == "vllm, sglang or llamacpp"
    assert names_of(lambda kind: kind.loads_gguf) == "llamacpp"


def test_an_engine_may_be_given_by_its_name():
    read = TypeAdapter(EngineChoice).validate_python
    assert read("vllm") == read({"engine": "vllm"}) == EngineChoice(engine="vllm")
    values: dict[str, object] = {"engine": "vllm"}
    apply_override(values, "engine.url=http://localhost:8000")
    assert values == {"engine": {"engine": "vllm", "url": "http://localhost:8000"}}

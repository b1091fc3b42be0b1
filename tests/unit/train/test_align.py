import itertools
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from paceline.cli.options import build
from paceline.config import load_config, to_yaml
from paceline.core.rules import Opt
from paceline.errors import (
    ConfigError,
    ContextLengthError,
    PromptError,
    TrainingError,
    UsageError,
)
from paceline.models import HfModel, load_model, wrap_model
from paceline.models.drafts.save import save_draft
from paceline.native.kernels import losses_and_slopes
from paceline.records import RunDirectory, read_jsonl
from paceline.train import AlignConfig, align, loop
from paceline.train.align import _load_target
from paceline.train.checkpoint import TrainingState, has_begun
from paceline.train.loop import TrainingLoop
from paceline.train.loss import VocabularySample
from paceline.train.objectives import (
    JSD,
    TVD,
    CrossEntropy,
    ForwardKL,
    ReverseKL,
    UnderRule,
    token_losses,
)
from paceline.train.step import Stepper
from support.data import write_lines
from support.devices import NamedDevices, device_of, halves, spread
from support.models import limit_vocabulary
from support.runs import align_config, held_out, losses, write_pair

STEADY = {"kind": "adamw", "warmup_fraction": 0, "schedule": {"kind": "constant"}}


def test_a_run_leaves_a_draft_its_figures_and_its_records(folder: Path, tmp_path: Path):
    config = align_config(
        folder, tmp_path / "run", **held_out(folder, every_steps=4), checkpoints={"every_steps": 3}
    )
    stages: list[str] = []
    run = align(config, progress=lambda stage, *_: stages.append(stage))
    assert run == tmp_path / "run"
    assert len(losses(run)) == 10
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows if "evaluation" in row] == [0, 4, 8]
    result = json.loads((run / "result.json").read_text())
    assert result["num_steps"] == 10
    assert result["num_tokens"] == sum(row.get("num_tokens", 0) for row in rows)
    assert result["before"] == rows[0]["evaluation"]
    assert result["after"]["expected_acceptance"] > result["before"]["expected_acceptance"]
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["config"] == config.model_dump(mode="json")
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["step-00000009", "step-00000010"]
    assert {"loading", "held-out text", "training", "evaluating"} <= set(stages)


def test_the_draft_is_an_ordinary_directory_with_the_tokenizer_and_number_format_it_had(
    tmp_path: Path,
):
    folder = write_pair(tmp_path)
    half = load_model(folder / "draft", dtype="bfloat16").hf
    half.save_pretrained(folder / "draft")
    run = align(align_config(folder, tmp_path / "run", num_steps=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (run / "draft" / name).read_bytes() == (folder / "target" / name).read_bytes()
    settings = json.loads((run / "draft" / "config.json").read_text())
    assert settings["dtype"] == "bfloat16"
    assert settings["num_hidden_layers"] == 2


@pytest.mark.parametrize(
    ("changes", "frozen"),
    [
        ({"freeze_embeddings": True}, ("model.embed_tokens.weight", "lm_head.weight")),
        ({"freeze_layers": 1}, ("model.layers.0.",)),
    ],
    ids=["embeddings and head", "layers"],
)
def test_what_is_frozen_stays_and_everything_else_moves(
    folder: Path, tmp_path: Path, changes: dict[str, Any], frozen: tuple[str, ...]
):
    run = align(align_config(folder, tmp_path / "run", num_steps=2, **changes))
    before = load_model(folder / "draft", dtype="float32").hf.state_dict()
    after = load_model(run / "draft", dtype="float32").hf.state_dict()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith(frozen)}


@pytest.fixture(scope="module")
def few(folder: Path) -> HfModel:
    """A draft that proposes nine tokens, in `folder/few`."""
    target, draft = (load_model(folder / name, dtype="float32") for name in ("target", "draft"))
    found = limit_vocabulary(draft, target, [[5, 6, 7]], 9)
    save_draft(found, folder / "target", folder / "few")
    return found


def test_a_draft_of_few_tokens_learns_those_and_keeps_its_vocabulary(
    folder: Path, tmp_path: Path, few: HfModel
):
    assert few.draft_vocabulary is not None
    changes = {"draft": str(folder / "few"), "loss_vocabulary": {"frequent": 4, "drawn": 2}}
    with patch.object(VocabularySample, "draw", autospec=True, side_effect=_drawn) as draw:
        run = align(align_config(folder, tmp_path / "run", num_steps=2, **changes))
    assert draw.call_count == 2
    again = load_model(run / "draft", dtype="float32")
    assert again.draft_vocabulary is not None
    assert torch.equal(again.draft_vocabulary, few.draft_vocabulary)
    sample = draw.call_args.args[0]
    assert torch.equal(torch.cat([sample.frequent_F, sample.others_O]), few.draft_vocabulary)


EVERY_LABEL = "cross_entropy with a divergence needs every label"


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": ["forward_kl", "cross_entropy"]}, EVERY_LABEL),
        ({"finish": {"objective": ["tvd", "cross_entropy"]}}, EVERY_LABEL),
        (
            {"objective": {"rule": {"rule": "opt", "alpha": 0.2}}},
            "needs the full vocabulary, but .* only 9 tokens",
        ),
    ],
    ids=["at once", "at the end", "a rule"],
)
def test_what_a_draft_of_few_tokens_cannot_learn_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], said: str
):
    with pytest.raises(ConfigError, match=said):
        align(align_config(folder, tmp_path / "run", draft=str(folder / "few"), **changes))


@pytest.mark.usefixtures("few")
def test_a_draft_of_few_tokens_is_taught_labels_behind_a_divergence(folder: Path, tmp_path: Path):
    apart = {"finish": {"objective": "cross_entropy", "begin": 0.5}, "num_steps": 2}
    align(align_config(folder, tmp_path / "run", draft=str(folder / "few"), **apart))


def _drawn(sample: VocabularySample, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([sample.frequent_F, sample.others_O[:1]]), torch.zeros(5)


@pytest.mark.parametrize("tied", [False, True])
def test_the_embedding_of_a_token_that_is_also_the_padding_is_trained_where_it_is_read(
    tmp_path: Path, tied: bool
):
    """SmolLM2 pads with the token that ends a text. Against autograd without a padding row."""
    folder = write_pair(tmp_path, pad_token_id=1, tie_word_embeddings=tied)
    rows = [{"prompt_tokens": [5, 1, 6, 7], "completion_tokens": [8, 9]}]
    data = {"train": str(write_lines(tmp_path / "pairs.jsonl", *rows))}
    update = Stepper._update

    grads: list[torch.Tensor] = []

    def spy(stepper: Any, rate: Any) -> float:
        grads.append(stepper.model.hf.get_input_embeddings().weight.grad.clone())
        return update(stepper, rate)

    with patch.object(Stepper, "_update", spy):
        changes = {"data": data, "num_steps": 1, "batch_size": 1, "optimizer": STEADY}
        changes["max_gradient_norm"] = None
        align(align_config(folder, tmp_path / "run", **changes))
    (grad_VD,) = grads
    plain = load_model(folder / "draft", dtype="float32").hf
    target = load_model(folder / "target", dtype="float32").hf
    embedding: Any = plain.get_input_embeddings()
    embedding.padding_idx = None
    tokens = torch.tensor([[5, 1, 6, 7, 8, 9, 1]])  # a text that is not cut off ends with its end
    with torch.no_grad():
        p = target(tokens).logits[0, 3:-1].log_softmax(-1)
    q = plain(tokens).logits[0, 3:-1].log_softmax(-1)
    (p.exp() * (p - q)).sum(-1).mean().backward()
    assert bool((grad_VD[1] != 0).any())
    torch.testing.assert_close(grad_VD, embedding.weight.grad, rtol=1e-3, atol=1e-6)


def test_a_loss_that_is_no_number_names_step_and_last_good_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = 0

    def poison(name: str, losses: Callable[..., torch.Tensor]) -> None:
        def poisoned(*arguments: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return losses(*arguments) * (float("nan") if calls == 6 else 1.0)

        monkeypatch.setattr(f"paceline.train.loss.{name}", poisoned)

    poison("token_losses", token_losses)
    poison("losses_and_slopes", losses_and_slopes)
    config = align_config(folder, tmp_path / "run", checkpoints={"every_steps": 2})
    with pytest.raises(TrainingError, match=r"nan at step 6; .*step-00000004/model;"):
        align(config)
    text = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert row["step"] == 6
    assert "loss" not in row


def test_weights_that_are_no_numbers_are_never_saved(folder: Path, tmp_path: Path):
    optimizer = {"kind": "adamw", "learning_rate": 1e30, "weight_decay": 1e30}
    config = align_config(
        folder, tmp_path / "run", optimizer=optimizer, checkpoints={"every_steps": 1}
    )
    with pytest.raises(TrainingError, match=r"smaller optimizer\.learning_rate"):
        align(config)
    for saved in (tmp_path / "run" / "checkpoints").glob("*"):
        weights = load_model(saved / "model").hf.parameters()
        assert all(bool(weight.isfinite().all()) for weight in weights)


LINEAR: dict[str, Any] = {"kind": "adamw", "schedule": {"kind": "linear"}, "warmup_fraction": 0.1}


def test_under_a_budget_of_seconds_the_schedule_moves_with_the_seconds_of_steps_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) / 64)
    monkeypatch.setattr(loop, "time", clock)
    run = align(
        align_config(folder, tmp_path / "run", num_steps=None, max_seconds=1.5, optimizer=LINEAR)
    )
    rows = read_jsonl(run / "metrics.jsonl")
    # the loop looks at the clock before the text, after it, before the update and after it
    assert [row["elapsed_s"] for row in rows] == [round(4 * k / 64, 3) for k in range(1, 25)]
    # by hand, in ticks: step j begins with 98 - 4 j left, has its gradient at 97 - 4 j
    # and ends at 96 - 4 j
    for step in (1, 10, 20, 24):
        left = math.prod((96 - 4 * j) / (98 - 4 * j) for j in range(1, step))
        left *= (97 - 4 * step) / (98 - 4 * step)
        wanted = 1e-3 * left * min(1, (1 - left) / LINEAR["warmup_fraction"])
        assert rows[step - 1]["learning_rate"] == pytest.approx(wanted, rel=1e-9)


def test_figures_before_the_first_step_do_not_count_as_training(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = 0.0

    def tick() -> float:
        nonlocal now
        now += 1 / 64
        return now

    def pass_time(*_: object) -> dict[str, float]:
        nonlocal now
        now += 100.0
        return {"expected_acceptance": 0.5}

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=tick))
    monkeypatch.setattr("paceline.train.evaluation.AgreementEvaluator.evaluate", pass_time)
    config = align_config(
        folder, tmp_path / "run", num_steps=1, max_seconds=500.0, **held_out(folder)
    )
    row = read_jsonl(align(config) / "metrics.jsonl")[-1]
    assert row["step"] == 1
    assert row["elapsed_s"] < 1


def test_bfloat16_autocast_trains_towards_the_same_loss(folder: Path, tmp_path: Path):
    runs = [
        losses(align(align_config(folder, tmp_path / kind, num_steps=3, precision=kind)))
        for kind in ("float32", "bfloat16")
    ]
    assert runs[1] == pytest.approx(runs[0], rel=0.05)
    assert runs[1] != runs[0]


@pytest.mark.parametrize(
    ("changes", "error", "complaint"),
    [
        ({"freeze_layers": 2}, UsageError, "freeze_layers is 2, but the draft has 2 layers"),
        ({"max_completion_tokens": 60}, ContextLengthError, "is 65, but the target's context"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    folder: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], complaint: str
):
    with pytest.raises(error, match=complaint):
        align(align_config(folder, tmp_path / "run", **changes))


def test_processes_agree_on_clock_schedule_and_stop():
    # or each would train its copy of the draft with a learning rate of its own
    def gather(mine: torch.Tensor) -> torch.Tensor:
        return torch.cat([mine, torch.tensor([[7.0, 0.25, 1.0]])])

    loop = TrainingLoop.__new__(TrainingLoop)
    accelerator = SimpleNamespace(num_processes=2, device=torch.device("cpu"), gather=gather)
    loop.run = cast("Any", SimpleNamespace(accelerator=accelerator))
    loop.state = TrainingState(elapsed_s=9.0, time_position=0.125)
    assert loop._agree(stopped=False)
    assert (loop.state.elapsed_s, loop.state.time_position) == (9.0, 0.25)


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    [
        *({"kind": "tvd_plus_plus", "estimator": name} for name in ("exact", "sampled", "uniform")),
        *({"rule": rule} for rule in ({"rule": "token_v3", "alpha": 0.2}, {"rule": "lossless"})),
    ],
    ids=lambda objective: objective.get("estimator") or objective["rule"]["rule"],
)
def test_policy_gradients_and_rules_teach(objective: dict[str, Any], folder: Path, tmp_path: Path):
    changes = {"objective": objective, "num_steps": 40, "mean": "token"}
    changes["optimizer"] = STEADY | {"learning_rate": 3e-3}
    whole = losses(align(align_config(folder, tmp_path / "run", **changes)))
    assert sum(whole[-8:]) < sum(whole[:8])


def test_a_resumed_run_draws_what_it_would_have_drawn(folder: Path, tmp_path: Path):
    """Tokens of the draft, the only draws of an objective."""
    objective = {"kind": "tvd_plus_plus", "estimator": "sampled"}
    changes = {"objective": objective, "optimizer": STEADY}
    whole = losses(align(align_config(folder, tmp_path / "whole", num_steps=6, **changes)))
    for num_steps in (3, 6):
        config = align_config(folder, tmp_path / "run", num_steps=num_steps, **changes)
        align(config, resume=True)
    assert losses(tmp_path / "run") == whole


def test_pretraining_text_makes_up_its_part_of_every_step(folder: Path, tmp_path: Path):
    known = write_lines(tmp_path / "known.jsonl", {"text": "a b c d e f g h " * 20})
    corpus = str(folder / "corpus.jsonl")
    data = {"train": corpus, "pretraining": str(known), "pretraining_fraction": 0.25}
    changes = {"data": data, "num_steps": 3, "draft_fraction": 0.0, "fixed_fraction": 0.0}
    rounds = {"rows": 6, "uses": 2}
    seen: list[list[bool]] = []
    score = Stepper.score

    def spy(stepper: Any, rows: Any, batch: Any, terms: Any) -> Any:
        seen.append([row.target_hidden_TD is not None for row in rows])
        found = score(stepper, rows, batch, terms)
        # the same as if the target had read all of it now
        torch.testing.assert_close(found, stepper._target_hidden(batch), rtol=1e-4, atol=1e-5)
        return found

    with patch.object(Stepper, "score", spy):
        align(align_config(folder, tmp_path / "run", target_rounds=rounds, **changes))
    assert seen == [[True] * 3 + [False]] * 3
    missing = data | {"pretraining": str(tmp_path / "nothing.jsonl")}
    with pytest.raises(PromptError, match=r"no file or directory at .*nothing\.jsonl"):
        align(align_config(folder, tmp_path / "missing", data=missing))
    assert not has_begun(RunDirectory(tmp_path / "missing")), "it is said before the first step"
    (tmp_path / "y" / ".draft.0").mkdir(parents=True)  # of a process that was killed
    changes["gradient_accumulation_steps"] = 2  # with one row of pretraining text
    align(align_config(folder, tmp_path / "y", **changes))
    assert not (tmp_path / "y" / ".draft.0").exists()
    with pytest.raises(ConfigError, match=r"0\.1 of batch_size 4 is 0 rows; wanted at least 1"):
        align_config(folder, tmp_path / "x", data=data | {"pretraining_fraction": 0.1})


config = partial(align_config, Path("pair"), Path("run"))


# Table 1 of the paper, by hand: who writes the text, and what is compared.
@pytest.mark.parametrize(
    ("recipe", "objective", "fixed", "draft", "target"),
    [
        ("supervised_kd", ForwardKL(), 1.0, 0.0, 0.0),
        ("seq_kd", CrossEntropy(), 0.0, 0.0, 1.0),
        ("imit_kd", ForwardKL(), 0.5, 0.5, 0.0),
        ("f_distill", TVD(), 0.0, 0.5, 0.5),
        ("gkd", ForwardKL(), 0.0, 1.0, 0.0),
    ],
)
def test_each_recipe_is_its_row_of_table_1(
    recipe: str, objective: object, fixed: float, draft: float, target: float
):
    made = config(recipe=recipe)
    assert made.objective == (objective,)
    lambda_1, lambda_2 = made.fixed_fraction, made.draft_fraction
    shares = lambda_1, (1 - lambda_1) * lambda_2, (1 - lambda_1) * (1 - lambda_2)
    assert shares == (fixed, draft, target)


def test_what_is_written_out_wins_over_the_recipe():
    made = config(recipe="gkd", objective={"kind": "jsd", "beta": 0.1}, fixed_fraction=0.25)
    assert made.objective == (JSD(beta=0.1),)
    assert (made.fixed_fraction, made.draft_fraction) == (0.25, 1.0)


def test_a_recipe_on_the_command_line_wins_over_a_file(tmp_path: Path):
    file = tmp_path / "align.yaml"
    pair = "target: t\ndraft: d\noutput: o\ndata: {train: a}\nnum_steps: 1\n"
    file.write_text(pair + "objective: jsd\nfixed_fraction: 1.0\nrecipe: seq_kd\n")
    named = build(AlignConfig, file, None, {"recipe": "gkd"})
    assert named.objective == (ForwardKL(),)
    assert (named.fixed_fraction, named.draft_fraction) == (0.0, 1.0)
    assert build(AlignConfig, file, ["objective.beta=0.3"]).objective == (JSD(beta=0.3),)


RULE: dict[str, Any] = {"rule": {"rule": "opt", "alpha": 0.2}, "loss": "forward_kl"}


def test_an_objective_can_be_written_short():
    for value in "reverse_kl", {"kind": "reverse_kl"}, ["reverse_kl"], [{"kind": "reverse_kl"}]:
        assert config(objective=value).objective == (ReverseKL(),)
    assert config(objective=RULE).objective == (UnderRule(rule=Opt(0.2), loss="forward_kl"),)


def test_a_configuration_survives_yaml_with_overrides(tmp_path: Path):
    made = config(recipe="imit_kd", objective=["tvd", {"kind": "jsd", "beta": 0.3, "weight": 2}])
    path = tmp_path / "c.yaml"
    path.write_text(to_yaml(made))
    assert load_config(AlignConfig, path) == made
    changed = load_config(AlignConfig, path, ["optimizer.learning_rate=0.5", "data.train=y.txt"])
    assert changed.optimizer.learning_rate == 0.5
    assert changed.data.train.path == "y.txt"


LENIENT = {"rule": "lenient", "epsilon": 0.5}
UNIFORM = {"kind": "tvd_plus_plus", "estimator": "uniform"}
FEW = {"loss_vocabulary": {"frequent": 8}}
BLOCKS = {"num_tokens": 4}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"objective": {"kind": "jsd", "beta": 0}}, "use forward_kl or reverse_kl"),
        ({"objective": "kl"}, "forward_kl"),
        ({"recipe": ["gkd"]}, "recipe"),
        ({"num_steps": None}, "set num_steps or max_seconds"),
        (
            {"batch_size": 6, "gradient_accumulation_steps": 4},
            "is not a multiple of gradient_accumulation_steps 4",
        ),
        ({"evaluation": {"sampling": {"repetition_penalty": 1.2}}}, "repetition_penalty must be 1"),
        ({"finish": {"objective": []}}, r"finish\.objective"),
        ({"objective": RULE | {"rule": LENIENT}}, "lenient has no target distribution"),
        ({"objective": UNIFORM, **FEW}, "needs all tokens"),
        ({"objective": RULE, **FEW}, "needs all tokens"),
        ({"finish": {"objective": RULE}, **FEW}, "needs all tokens"),
        ({"parallel": BLOCKS, "recipe": "seq_kd"}, "weighting efficiency needs the target's"),
        ({"parallel": BLOCKS, "finish": {"objective": "cross_entropy"}}, "set parallel.weighting"),
    ],
)
def test_a_wrong_setting_is_one_line_that_says_what_to_do(changes: dict[str, Any], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        config(**changes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
def test_a_draft_learns_the_same_from_a_spread_target(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain = align(align_config(folder, tmp_path / "plain", num_steps=3, **held_out(folder)))
    targets: list[HfModel] = []

    def load_spread(path: Path, **options: Any) -> HfModel:
        found = load_model(path, **options)
        hf = spread(found.hf, halves(found.hf), ("cpu", "cuda:1"))
        targets.append(wrap_model(hf, found.tokenizer))
        return targets[-1]

    monkeypatch.setitem(_load_target.__globals__, "load_model", load_spread)
    with NamedDevices():
        run = align(align_config(folder, tmp_path / "spread", num_steps=3, **held_out(folder)))
    (target,) = targets
    assert {str(device_of(weight)) for weight in target.hf.parameters()} == {"cpu", "cuda:1"}
    assert losses(run) == pytest.approx(losses(plain), rel=1e-5)


@pytest.mark.parametrize(
    ("device", "world_size", "chosen"),
    [
        ("cuda", 1, "auto"),  # the device of accelerate's single process
        ("cpu", 1, "cpu"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_a_single_process_may_spread_its_target(
    device: str,
    world_size: int,
    chosen: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    model, seen = load_model(folder / "target"), list[str]()

    def load(_path: Path, *, dtype: str, device: str) -> HfModel:
        assert dtype == "bfloat16"
        seen.append(device)
        return model

    monkeypatch.setitem(_load_target.__globals__, "load_model", load)
    run = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device(device)),
        shard=SimpleNamespace(world_size=world_size),
    )
    config = align_config(folder, tmp_path / "run")
    assert _load_target(config, cast("Any", run), bfloat16=True) is model
    assert seen == [chosen]

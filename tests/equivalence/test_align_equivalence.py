"""One trajectory of losses, by different roads: a plain loop, parts, chunks, and two processes."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.data.collate import TokenRow
from paceline.errors import ConfigError
from paceline.models import load_model
from paceline.models.drafts.save import save_draft
from paceline.native import compiled
from paceline.records import read_jsonl
from paceline.train import AlignConfig, align
from paceline.train.step import StepFigures, Stepper
from support.data import write_lines
from support.models import limit_vocabulary
from support.runs import align_config, losses, two_processes, write_pair

pytestmark = pytest.mark.filterwarnings("ignore:.*completions are longer")

RowsOfSteps = list[list[TokenRow]]


ARCHITECTURES = ("llama", "t5_v1_1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pairs of unequal lengths, so that means of means would differ from the mean."""
    # small weights: rounding must not grow until another token is drawn
    small = {"llama": {"initializer_range": 0.2}, "t5_v1_1": {"initializer_factor": 0.7}}
    words = ["the", "rain", "in", "an inn", "another man", "ran there", "a", "the thin thread"]
    rows = [
        {"prompt": word, "completion": " and ".join([word] * (1 + index))}
        for index, word in enumerate(words)
    ]
    found: dict[str, Path] = {}
    for architecture in ARCHITECTURES:
        place, own = tmp_path_factory.mktemp(architecture), small[architecture]
        write_pair(place, rounded_to=torch.float32, architecture=architecture, **own)
        write_lines(place / "corpus.jsonl", *rows)
        found[architecture] = place
    return found


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


of_llama = pytest.mark.parametrize("folder", ["llama"], indirect=True)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> RowsOfSteps:
    """The rows of every step that is made."""
    rows_of_steps: RowsOfSteps = []
    step = Stepper.step

    def spy(self: Stepper, rows: list[TokenRow], *rest: Any) -> StepFigures:
        rows_of_steps.append(rows)
        return step(self, rows, *rest)

    monkeypatch.setattr(Stepper, "step", spy)
    return rows_of_steps


def changes(**settings: Any) -> dict[str, Any]:
    return {"max_prompt_tokens": 12, "max_completion_tokens": 30, "num_steps": 4, **settings}


def logits_of(hf: Any, row: TokenRow) -> Tensor:
    """Before each token that is trained."""
    tokens = torch.tensor([list(row.tokens)])
    texts = {"input_ids": tokens}
    if row.source is not None:
        texts = {"input_ids": torch.tensor([list(row.source)]), "decoder_input_ids": tokens}
    return hf(**texts).logits[0, row.trained_from - 1 : -1]


def encodes(folder: Path) -> bool:
    return folder.name[:-1] != "llama"


def plain_losses(
    folder: Path, rows_of_steps: RowsOfSteps, loss: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> list[float]:
    """A loop as one would write it first: row by row, all logits at once, no mask, no padding.

    Constant learning rate 3e-3; the mean over rows of the mean over their completions.
    """
    target = load_model(folder / "target", dtype="float32").hf
    draft: Any = load_model(folder / "draft", dtype="float32").hf
    for module in draft.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # a token like any other, where it is read
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3, weight_decay=0.0)
    found = []
    for rows in rows_of_steps:
        total = torch.tensor(0.0)
        for row in rows:
            with torch.no_grad():
                target_logits = logits_of(target, row)
            draft_logits = logits_of(draft, row)
            labels = torch.tensor(list(row.tokens[row.trained_from :]))
            total = total + loss(target_logits, draft_logits, labels) / len(rows)
        total.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(total.detach()))
    return found


def kl(target_logits: Tensor, draft_logits: Tensor, labels: Tensor) -> Tensor:
    both = target_logits.log_softmax(-1), draft_logits.log_softmax(-1)
    return torch.nn.functional.kl_div(both[1], both[0], log_target=True, reduction="batchmean")


def cross_entropy(target_logits: Tensor, draft_logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(draft_logits, labels)


def kl_and_overlap(target_logits: Tensor, draft_logits: Tensor, labels: Tensor) -> Tensor:
    overlap = torch.minimum(target_logits.softmax(-1), draft_logits.softmax(-1)).sum(-1)
    return 2 * kl(target_logits, draft_logits, labels) + 0.5 * (1 - overlap).mean()


CONSTANT = {
    "kind": "adamw",
    "learning_rate": 3e-3,
    "warmup_fraction": 0,
    "schedule": {"kind": "constant"},
}


@pytest.mark.parametrize(
    ("folder", "settings", "loss"),
    [
        ("llama", {"recipe": "supervised_kd"}, kl),
        ("llama", {"recipe": "gkd"}, kl),
        ("t5_v1_1", {"recipe": "gkd"}, kl),
        ("t5_v1_1", {"recipe": "seq_kd"}, cross_entropy),
        (
            "llama",
            {"objective": [{"kind": "forward_kl", "weight": 2}, {"kind": "tvd", "weight": 0.5}]},
            kl_and_overlap,
        ),
    ],
    indirect=["folder"],
)
def test_align_is_the_plain_loop_that_one_would_write_first(
    folder: Path,
    tmp_path: Path,
    seen: RowsOfSteps,
    settings: dict[str, Any],
    loss: Callable[[Tensor, Tensor, Tensor], Tensor],
):
    config = align_config(folder, tmp_path / "run", **changes(**settings, optimizer=CONSTANT))
    assert losses(align(config)) == pytest.approx(plain_losses(folder, seen, loss), rel=2e-4)


@pytest.mark.parametrize(
    ("folder", "mean", "recipe"),
    [
        ("llama", "sequence", "supervised_kd"),
        ("llama", "token", "gkd"),
        ("t5_v1_1", "token", "supervised_kd"),
    ],
    indirect=["folder"],
)
def test_parts_of_a_step_and_chunks_of_a_part_do_not_show(
    folder: Path, tmp_path: Path, seen: RowsOfSteps, mean: str, recipe: str
):
    # trl#6006: each part was divided by its own tokens, not by the step's
    whole = losses(align(align_config(folder, tmp_path / "1", **changes(mean=mean, recipe=recipe))))
    lengths = [[len(row.tokens) - row.trained_from for row in rows] for rows in seen]
    assert any(sum(step[:2]) != sum(step[2:]) for step in lengths), "the parts must be unequal"
    for parts, chunk in ((4, 256), (2, 3)):
        settings = changes(
            mean=mean, recipe=recipe, gradient_accumulation_steps=parts, chunk_tokens=chunk
        )
        run = align(align_config(folder, tmp_path / f"{parts}-{chunk}", **settings))
        assert losses(run) == pytest.approx(whole, rel=1e-4)


def rounds(**settings: Any) -> dict[str, Any]:
    """All steps on text that the target writes for them."""
    return {"fixed_fraction": 0, "target_rounds": {"rows": 8, "uses": 2, **settings}}


@pytest.mark.parametrize(
    ("folder", "train_prompts"),
    [("llama", False), ("llama", True), ("t5_v1_1", False)],
    indirect=["folder"],
)
def test_text_scored_while_it_is_written_trains_like_text_scored_afterwards(
    folder: Path, tmp_path: Path, seen: RowsOfSteps, *, train_prompts: bool
):
    settings = changes(**rounds(train_prompts=train_prompts), optimizer=CONSTANT)
    run = align(align_config(folder, tmp_path / "run", **settings))
    assert losses(run) == pytest.approx(plain_losses(folder, seen, kl), rel=2e-4)
    whole = all(row.trained_from == 1 for rows in seen for row in rows)
    assert whole == (train_prompts or encodes(folder))


@pytest.mark.parametrize("folder", ["t5_v1_1"], indirect=True)
@pytest.mark.parametrize("name", ["train_prompts", "pack_documents"])
def test_settings_of_decoder_only_models_are_refused_for_others(
    folder: Path, tmp_path: Path, name: str
):
    packed = {"data": {"train": str(folder / "corpus.jsonl"), "pack_documents": True}}
    settings = rounds(train_prompts=True) if name == "train_prompts" else packed
    config = align_config(folder, tmp_path / "run", **changes(**settings))
    with pytest.raises(ConfigError, match=f"{name} is set, but it only applies to decoder-only"):
        align(config)


def test_states_that_are_kept_train_like_states_that_are_read_anew(
    folder: Path, tmp_path: Path, seen: RowsOfSteps
):
    kept = {"data": {"train": str(folder / "corpus.jsonl"), "keep_states_gb": 1}}
    config = align_config(folder, tmp_path / "run", **changes(**kept, optimizer=CONSTANT))
    assert losses(align(config)) == pytest.approx(plain_losses(folder, seen, kl), rel=2e-4)
    assert all(row.target_hidden_TD is not None for rows in seen for row in rows)


def test_a_draft_of_few_tokens_is_compared_over_what_it_may_propose(
    tmp_path: Path, seen: RowsOfSteps
):
    pair = write_pair(tmp_path / "pair", rounded_to=torch.float32)
    target, draft = (load_model(pair / name, dtype="float32") for name in ("target", "draft"))
    few = limit_vocabulary(draft, target, [[5, 6, 7]], 40)
    save_draft(few, pair / "target", pair / "draft")
    assert few.draft_vocabulary is not None
    tokens = few.draft_vocabulary.clone()

    def kl_of_these(target: Tensor, draft: Tensor, labels: Tensor) -> Tensor:
        return kl(target[:, tokens], draft[:, tokens], labels)

    run = align(align_config(pair, tmp_path / "run", **changes(optimizer=CONSTANT)))
    assert losses(run) == pytest.approx(plain_losses(pair, seen, kl_of_these), rel=2e-4)


@of_llama
def test_the_finish_takes_over_where_it_says(folder: Path, tmp_path: Path, seen: RowsOfSteps):
    finish = {"objective": "tvd", "begin": 0.5}
    config = align_config(folder, tmp_path / "run", **changes(finish=finish, optimizer=CONSTANT))
    losses_found = losses(align(config))
    plain = plain_losses(folder, seen, kl)
    assert losses_found[:2] == pytest.approx(plain[:2], rel=2e-4)
    assert all(loss < 1 for loss in losses_found[2:])  # a TVD, while KL is above 1 throughout
    assert min(plain) > 1


@cache
def rounded(directory: Path, stored: torch.dtype) -> Any:
    """The model in a directory that nobody changes any more, with weights rounded so."""
    return load_model(directory, dtype="float32").hf.to(stored).float()


def continuation(
    directory: Path, row: TokenRow, length: int, stored: torch.dtype = torch.float32
) -> list[int]:
    """What transformers writes greedily after the row's prompt, from weights rounded so."""
    hf = rounded(directory, stored)
    prompt = torch.tensor([list(row.source or row.tokens[: row.trained_from])])
    written = hf.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=length
    )
    return written[0, row.trained_from :].tolist()


GREEDY = {"sampling": {"temperature": 0}, "max_completion_tokens": 8, "num_steps": 3}


def test_seq_kd_trains_on_text_of_the_target_and_on_nothing_else(
    folder: Path, tmp_path: Path, seen: RowsOfSteps
):
    # trl#5726: text of the target was overwritten with text of the draft
    align(align_config(folder, tmp_path / "run", **changes(recipe="seq_kd", **GREEDY)))
    for row in [row for rows in seen for row in rows]:
        written = list(row.tokens[row.trained_from :])
        assert written == continuation(folder / "target", row, 8)


@pytest.mark.parametrize(
    ("folder", "precision"),
    [("llama", torch.float32), ("llama", torch.bfloat16), ("t5_v1_1", torch.bfloat16)],
    indirect=["folder"],
)
def test_gkd_trains_on_text_of_the_draft_as_the_last_step_left_it(
    folder: Path, tmp_path: Path, seen: RowsOfSteps, precision: torch.dtype
):
    """In bfloat16 it is written from a copy of the weights, if a compiled pass can read it."""
    copied = precision == torch.bfloat16 and compiled() is not None and not encodes(folder)
    stored = torch.bfloat16 if copied else torch.float32
    large_steps = {"kind": "adamw", "learning_rate": 0.1, "warmup_fraction": 0}
    settings = changes(recipe="gkd", **GREEDY, optimizer=large_steps)
    settings["checkpoints"] = {"every_steps": 1, "keep": 3}
    settings["precision"] = str(precision).removeprefix("torch.")
    run = align(align_config(folder, tmp_path / "run", **settings))
    drafts = [folder / "draft"]
    drafts += [run / "checkpoints" / f"step-{step:08d}" / "model" for step in (1, 2)]
    for draft, rows in zip(drafts, seen, strict=True):
        for row in rows:
            written = list(row.tokens[row.trained_from :])
            assert written == continuation(draft, row, 8, stored)
    # and the draft did change between the steps, or this would prove nothing
    row = seen[0][0]
    assert continuation(drafts[0], row, 8) != continuation(drafts[2], row, 8)


TVD_PLUS_PLUS = {"kind": "tvd_plus_plus", "estimator": "sampled", "num_samples": 2}
FEW_TOKENS = {"objective": TVD_PLUS_PLUS, "loss_vocabulary": {"frequent": 20, "drawn": 9}}


IN_TWO_PROCESSES: dict[str, dict[str, Any]] = {
    "imit_kd": {"recipe": "imit_kd"},
    "exact": {"objective": TVD_PLUS_PLUS | {"estimator": "exact"}},
    "sampled": {"objective": TVD_PLUS_PLUS},
    "few tokens": FEW_TOKENS,
}
# objectives read logits, whatever the architecture
PAIRED = [
    *(("llama", name) for name in IN_TWO_PROCESSES),
    ("t5_v1_1", "imit_kd"),
]


STEADY = {"learning_rate": 3e-3, "warmup_fraction": 0, "schedule": {"kind": "constant"}}
STOPPED = changes(
    mean="token",
    gradient_accumulation_steps=2,
    optimizer={"kind": "adamw"} | STEADY,
)


@pytest.fixture(scope="module")
def recorded(folders: dict[str, Path]) -> dict[str, Any]:
    """Settings of a step on recorded scores, which some positions of a batch do not have."""
    rows = [
        ([8, 9, 10], [[8, 3], [], [10, 4]]),
        ([11, 12], [[], []]),
        ([13], [[13, 5]]),
        ([8, 9, 10], [[8, 3], [], [10, 4]]),
    ]
    corpus = folders["llama"] / "recorded.jsonl"
    write_lines(
        corpus,
        *[
            {
                "prompt_tokens": [5, 6, 7],
                "completion_tokens": completion,
                "stop_reason": "length",
                "top_tokens": tops,
                "top_log_probs": [[-0.7, -1.6][: len(each)] for each in tops],
            }
            for completion, tops in rows
        ],
    )
    data = {"data": {"train": str(corpus)}, "objective": "top_k_tail"}
    return data | {"num_steps": 1, "batch_size": len(rows), "mean": "token"}


@pytest.fixture(scope="module")
def in_two(
    folders: dict[str, Path],
    recorded: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Runs on two processes: `folder/name` for each of PAIRED, `recorded` and `stopped`.

    One start of the processes makes all runs: imports take longer than training.
    """
    runs = tmp_path_factory.mktemp("two")
    plain = [
        configured(folders[kind], runs / folders[kind].name / name, name) for kind, name in PAIRED
    ]
    plain.append(align_config(folders["llama"], runs / "recorded", **recorded))
    stopped = [  # after two steps, and resumed
        align_config(folders["llama"], runs / "stopped", **STOPPED | {"num_steps": steps})
        for steps in (2, 4)
    ]
    two_processes([*plain, *stopped], runs)
    return runs


def configured(folder: Path, output: Path, name: str) -> AlignConfig:
    known = {"train": str(folder / "corpus.jsonl")}
    if not encodes(folder):
        known |= {"pretraining": str(folder / "corpus.jsonl"), "pretraining_fraction": 0.5}
    common = {"data": known, "batch_size": 8, "gradient_accumulation_steps": 2}
    settings = changes(**IN_TWO_PROCESSES[name], **common, mean="token")
    return align_config(folder, output, **settings)


# Tests that start together stay in one worker, so the fixture makes the runs once.
@pytest.mark.first
@pytest.mark.parametrize(("folder", "name"), PAIRED, indirect=["folder"])
def test_two_processes_are_one(folder: Path, name: str, in_two: Path, tmp_path: Path):
    alone = losses(align(configured(folder, tmp_path / "one", name)))
    assert losses(in_two / folder.name / name) == pytest.approx(alone, rel=1e-4)


@pytest.mark.first
@of_llama
def test_two_processes_count_the_positions_with_scores_of_both(
    folder: Path, recorded: dict[str, Any], in_two: Path, tmp_path: Path
):
    """By hand for one process: tests/unit/train/test_positions_without_scores.py."""
    alone = align(align_config(folder, tmp_path / "one", **recorded))
    (expected,), (step,) = (
        [row for row in read_jsonl(run / "metrics.jsonl") if "loss" in row]
        for run in (alone, in_two / "recorded")
    )
    assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert step["num_tokens"] == expected["num_tokens"] == 5


@pytest.mark.first
@of_llama
def test_two_processes_that_are_stopped_and_resumed_are_one(
    folder: Path, in_two: Path, tmp_path: Path
):
    """Against one process from start to end."""
    alone = align(align_config(folder, tmp_path / "one", **STOPPED))
    output = in_two / "stopped"
    assert losses(output) == pytest.approx(losses(alone), rel=1e-4)
    drafts = [load_model(run / "draft", dtype="float32") for run in (alone, output)]
    for one, two in zip(*(draft.hf.parameters() for draft in drafts), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-5)

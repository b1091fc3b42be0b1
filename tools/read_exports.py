"""Do other versions of transformers read what Paceline writes? Tiny random models of many families.

python tools/read_exports.py write FOLDER    with Paceline: drafts and exports, and their logits
python tools/read_exports.py read FOLDER     with another transformers, and without Paceline
"""

# T positions, V vocabulary
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

TEXT = "The cat sat  on 123 mats; don't ask why.\n\n  def f(x): return x ** 2"
TOLERANCE = 1e-5  # of the largest logit
LENGTH = 60  # tokens: more than the windows, and than the texts before scaling
ORIGINAL = {"original_max_position_embeddings": 32}
LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
YARN = {"factor": 4.0, "attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"rope_type": "yarn"}
LONGROPE = {"type": "longrope", "short_factor": [1.1] * 3, "long_factor": [2.0, 3.0, 4.0]}
LINEAR = {"rope_type": "linear", "factor": 8.0}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
SIZES |= {"initializer_range": 0.3, "rope_theta": 5e5, "pad_token_id": 0}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128, "initializer_range": 0.3}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_heads": 4}
T5["decoder_start_token_id"] = 0
GEMMA = {**WINDOW, "query_pre_attn_scalar": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "new": ("new", {}),
    "llama": ("llama", {"rope_scaling": LLAMA_3 | ORIGINAL}),
    "llama, head stored": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"rope_scaling": YARN}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", {**GEMMA, "rope_local_base_freq": 300.0, "rope_scaling": LINEAR}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {**WINDOW, "rope_scaling": YARN | ORIGINAL}),
    "phi3": ("phi3", {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.75, **ORIGINAL}),
    "gpt_neox": ("gpt_neox", {"rotary_emb_base": 700, "rotary_pct": 0.5}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5}),
    "gpt2": ("gpt2", GPT),
    "gptj": ("gptj", {**GPT, "rotary_dim": 4}),
    "qwen2_moe": (
        "qwen2_moe",
        {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "num_experts": 4}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "gpt_oss": ("gpt_oss", {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("granite", {"logits_scaling": 3.0}),
    "smollm3": ("smollm3", {}),
    "cohere2": ("cohere2", {"sliding_window": 8}),
    "glm4": ("glm4", {"partial_rotary_factor": 0.5}),
    "starcoder2": ("starcoder2", {"sliding_window": 8, "use_bias": True}),
    "t5": ("t5", T5),
    "t5, head stored": ("t5", {**T5, "tie_word_embeddings": False}),
}


def write(folder: Path) -> None:
    """A draft of two layers of each family, an export of it, and what they give."""
    from paceline import ExportConfig, export_draft
    from paceline.models import load_model
    from paceline.models.drafts.layers import subset_layers
    from paceline.models.drafts.save import save_draft

    for name, (kind, settings) in FAMILIES.items():
        parts = {part: folder / name / part for part in ("target", "draft", "export")}
        _write_target(kind, settings, parts["target"], stored_head=name.endswith("head stored"))
        target: Any = load_model(parts["target"], dtype="float32")
        draft = subset_layers(target, [0, 3])
        save_draft(draft, parts["target"], parts["draft"])
        paths = {name: str(path) for name, path in parts.items()}
        to = "transformers" if "d_model" in settings else "vllm"
        config = ExportConfig(
            model=paths["draft"], target=paths["target"], to=to, out=parts["export"]
        )
        export_draft(config)
        tokens_T = (torch.arange(LENGTH) * 37) % target.vocab_size
        given = {"ids": torch.tensor(target.tokenizer(TEXT)["input_ids"]), "tokens": tokens_T}
        save_file(
            given | {"logits": _logits(draft.hf, tokens_T)}, folder / name / "given.safetensors"
        )


def _write_target(kind: str, settings: dict[str, Any], folder: Path, *, stored_head: bool) -> None:
    if kind == "new":
        from paceline.models.drafts.scratch import NewModel, NewTokenizer, write_new_model

        shape = NewModel(hidden_size=32, num_layers=4, num_heads=4, max_length=128)
        write_new_model(shape, NewTokenizer(vocab_size=300), [TEXT] * 9, folder, seed=0)
        return
    tokenizer: Any = Tokenizer(BPE())
    byte_part = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_part])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(byte_part.alphabet())
    options: dict[str, Any] = {"initial_alphabet": alphabet, "special_tokens": ["<eos>"]}
    tokenizer.train_from_iterator([TEXT] * 9, trainers.BpeTrainer(vocab_size=300, **options))
    size = tokenizer.get_vocab_size()
    ends = {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": size}
    config = AutoConfig.for_model(kind, **SIZES | ends | settings)
    torch.manual_seed(0)
    _auto(config).from_config(config, dtype=torch.float32).save_pretrained(folder)
    if stored_head:
        path = folder / "model.safetensors"
        head_VD = torch.randn(size, config.hidden_size)
        save_file(load_file(path) | {"lm_head.weight": head_VD}, path, {"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    found = "GPT2Tokenizer" if kind == "starcoder2" else "PreTrainedTokenizerFast"
    named = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<eos>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": found} | named))


def _auto(config: Any) -> Any:
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


@torch.inference_mode()
def _logits(hf: Any, tokens_T: torch.Tensor) -> torch.Tensor:
    tokens_1T = tokens_T[None]
    decoded = {"decoder_input_ids": tokens_1T} if hf.config.is_encoder_decoder else {}
    return hf(input_ids=tokens_1T, use_cache=False, **decoded).logits[0].float()


def read(folder: Path) -> int:
    """The number of directories whose logits or tokens are others than those that were written."""
    faults = 0
    for path in sorted(folder.glob("*/given.safetensors")):
        for part in ("draft", "export"):
            fault = _fault(path.parent / part, load_file(path))
            faults += fault is not None
            print(f"{path.parent.name}, {part}: {fault or 'equal'}")
    return faults


def _fault(folder: Path, given: dict[str, torch.Tensor]) -> str | None:
    # transformers 4 leaves the caps of Gemma 2 out of other kinds of attention
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    try:
        auto = _auto(AutoConfig.from_pretrained(folder))
        hf, info = auto.from_pretrained(folder, output_loading_info=True, **options)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if unread := [*info["missing_keys"], *info["unexpected_keys"]]:
        return f"weights missing or unknown: {unread[:3]}"
    if tokenizer(TEXT)["input_ids"] != given["ids"].tolist():
        return "other tokens"
    difference = (_logits(hf.eval(), given["tokens"]) - given["logits"]).abs().max()
    relative = float(difference / given["logits"].abs().max())
    return None if relative <= TOLERANCE else f"logits differ by {relative:.1e} of the largest"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    command, place = sys.argv[1], Path(sys.argv[2])
    sys.exit(write(place) if command == "write" else min(read(place), 100))

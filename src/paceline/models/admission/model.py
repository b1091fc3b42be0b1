"""Admits a model: finds the kind of session whose logits are those of transformers.

Every model takes the trial, whatever its name. A tiny twin (twin.py) shows windows, RoPE scalings
and raggedness; the model itself reads two short texts with its own weights. Results are kept in the
cache by configuration, files and versions, so that the second load of a model skips the trial.
"""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import transformers

from paceline.cache import cached_text, keep_text
from paceline.errors import ModelLoadError, PacelineError, UnsupportedModelError, first_line
from paceline.fingerprints import short_hash
from paceline.models.admission.trial import (
    FAULTS,
    Comparison,
    fault_of,
    play,
    play_briefly,
)
from paceline.models.admission.twin import VOCABULARY, tiny_twin
from paceline.models.hf.architectures import is_tied, nested_configs
from paceline.models.hf.base import warn_of_slower
from paceline.models.hf.causal import CausalModel
from paceline.models.hf.seq2seq import Seq2SeqModel
from paceline.models.hf.spreading import is_spread
from paceline.native import compiled
from paceline.processor import level

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.models.hf.base import HfModel, Sessions

    Build = Callable[[HfModel], HfModel]

EXACT = 0.01
"""Tolerance for passes in float32, in standard deviations of the logits. On the tiny twin, right
passes differ by less than 0.0001, or 0.006 where rounding grows as in Gemma 3n; Doge's wrong
choices of keys change it by 0.014."""
ROUNDED = 0.5
"""Tolerance if a pass rounds to 16 bits; wrong tokens or positions change logits by more than 1."""
_CODE = ("admission/model.py", "admission/trial.py", "admission/twin.py", "contract.py", "t5.py")
_CODE += ("hf/*.py", "llama/*.py", "recorded/*.py", "prepare.py")
_known: dict[str, dict[str, Any]] = {}


class Admission(NamedTuple):
    """How a model was compared with transformers.

    Attributes:
        sessions: The kind of session that agrees.
        twin: The largest difference on the tiny twin, in standard deviations of the logits; None
            if no twin of this architecture can be built.
        difference: The largest difference on two short texts, with the model's own weights.
        num_positions: Compared positions, of both.
    """

    sessions: Sessions
    twin: float | None
    difference: float
    num_positions: int


def admit(model: HfModel, files: str | None = None) -> Admission:
    """Compare the model's sessions with transformers and choose the kind that agrees.

    Sets `model.sessions`.

    Args:
        model: A wrapped model.
        files: Fingerprint of its files; None compares its own weights anew.

    Raises:
        UnsupportedModelError: No kind of session agrees.
    """
    key = None if files is None else key_of(model, "weights", files, *_place(model))
    known = None if key is None else recall(key)
    found = Admission(**known) if known else _compared(model)
    if known is None and key is not None:
        remember(key, found._asdict())
    model.sessions = found.sessions
    return found


def _place(model: HfModel) -> tuple[str, str]:
    """Dtype and device of a model, by which results are kept."""
    name = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else ""
    return str(model.dtype), f"{model.device} {name}{' spread' * is_spread(model.hf)}"


def _compared(model: HfModel) -> Admission:
    twin = twin_admission(model) or Admission("batch", None, 0.0, 0)
    own = _first_that_agrees(model, play_briefly, tolerance_for(model.dtype), twin.sessions)
    return own._replace(twin=twin.twin, num_positions=own.num_positions + twin.num_positions)


def twin_admission(model: HfModel) -> Admission | None:
    """The result for the tiny twin, from the cache if possible; None if there is no twin."""
    key = key_of(model, "twin")
    known = recall(key)
    if known is not None:
        return Admission(**known)
    twin = twin_of(model)
    if twin is None:
        return None
    found = _first_that_agrees(twin, play, EXACT, "batch")
    found = found._replace(twin=found.difference)
    remember(key, found._asdict())
    return found


def twin_of(model: HfModel) -> HfModel | None:
    """The tiny twin of a model, wrapped, with its kind of sessions; None if it cannot be built."""
    hf = tiny_twin(model.hf, seed=1)  # Doge chooses keys, and weights 0 hide that a choice is wrong
    if hf is None:
        return None
    if model.decoder_prompt is None:
        twin: HfModel = CausalModel(hf)
    else:
        pads = model.hf.config.pad_token_id, hf.config.pad_token_id
        prompt: list[int] = []
        for token in model.decoder_prompt:
            small = token % VOCABULARY
            if pads[1] is not None and (token == pads[0]) != (small == pads[1]):
                small = pads[1] if token == pads[0] else (small + 1) % VOCABULARY
            prompt.append(small)
        twin = Seq2SeqModel(hf, decoder_prompt=tuple(prompt))
    twin.sessions = model.sessions
    return twin


def faster(
    model: HfModel,
    name: str,
    tolerance: float,
    build: Build,
    of_twin: float | None = None,
) -> HfModel | None:
    """A faster pass, if its logits are those of transformers; else None, with a warning.

    Args:
        model: The model.
        name: Of the faster pass, for the warning; results are kept by it.
        tolerance: Largest difference, in standard deviations of the logits.
        build: Makes the pass from a model. It is called with the tiny twin, too.
        of_twin: The same for the tiny twin, which is in float32; None: `tolerance`.
    """
    of_twin = of_twin or tolerance
    dtype, device = _place(model)
    facts = ("faster", name, dtype, device, str(tolerance))
    fault = _checked(
        key_of(model, *facts, str(of_twin)), lambda: _fault_of_twin(model, build, of_twin), of_twin
    )
    prepared = None
    if fault is None:
        prepared, fault = _built(model, build)
    if prepared is not None:
        limited = str(model.draft_vocabulary)
        key = None if model.files is None else key_of(model, *facts, model.files, limited)
        fault = _checked(key, lambda: _fault_of(prepared, play_briefly, tolerance), tolerance)
    if fault is not None:
        warn_of_slower(model.hf.config.model_type, f"{name} {fault}", stacklevel=3)
        return None
    return prepared


def _checked(key: str | None, check: Callable[[], str | None], tolerance: float) -> str | None:
    """The fault that a check finds. It does not run if it found none before under this key."""
    if key is not None and recall(key) is not None:
        return None
    fault = check()
    if fault is None and key is not None:
        remember(key, {"tolerance": tolerance})
    return fault


def _built(model: HfModel, build: Build) -> tuple[HfModel | None, str | None]:
    """The faster pass, or why it cannot be made."""
    try:
        return build(model), None
    except (torch.OutOfMemoryError, PacelineError):
        raise
    except FAULTS as error:
        return None, f"failed ({first_line(error)})"


def _fault_of_twin(model: HfModel, build: Build, tolerance: float) -> str | None:
    twin = twin_of(model)
    if twin is None:
        return None
    prepared, fault = _built(twin.rewrap(cast("Any", twin.hf).to(model.device)), build)
    if prepared is None:
        return fault
    return _fault_of(prepared, play, tolerance)


def _fault_of(prepared: HfModel, trial: Callable[..., Comparison], tolerance: float) -> str | None:
    return fault_of("logits", lambda: trial(prepared), tolerance)


def _first_that_agrees(
    model: HfModel, trial: Callable[..., Comparison], tolerance: float, first: Sessions
) -> Admission:
    """Try sessions from `first` on."""
    faults: list[str] = []
    kinds = list(model.session_kinds)
    for kind in kinds[kinds.index(first) :]:
        try:
            model.sessions = kind
            result = trial(model)
        except (torch.OutOfMemoryError, ModelLoadError):
            raise
        except FAULTS as error:
            faults.append(first_line(error))
            continue
        if result.largest <= tolerance:
            return Admission(kind, None, result.largest, result.num_positions)
        faults.append(f"logits differ by {result.largest:.2g} deviations {result.where}")
    raise UnsupportedModelError(
        f"{model.hf.config.model_type} cannot be decoded: its sessions do not give the logits of "
        f"transformers' pass over the whole text ({faults[-1]}); choose a causal language model, "
        f"or another version of transformers than {transformers.__version__}"
    )


def tolerance_for(dtype: torch.dtype) -> float:
    return EXACT if dtype == torch.float32 else ROUNDED


def key_of(model: HfModel, *facts: str) -> str:
    """What a comparison of this model depends on, with further facts, as one name."""
    hf: Any = model.hf
    settings = hf.config.to_dict()
    config = {name: value for name, value in settings.items() if not name.startswith("_name")}
    chosen = [
        [getattr(part, f"_{name}_implementation", None) for name in ("attn", "experts")]
        for part in nested_configs(hf.config)
    ]
    parts = [
        *(f"{type(hf).__module__}.{type(hf).__qualname__}", str(is_tied(hf)), str(chosen)),
        *(json.dumps(config, sort_keys=True, default=str), str(model.decoder_prompt)),
        *(str(model.sessions), _code(), level(), Path(getattr(compiled(), "_name", "")).name),
        *(transformers.__version__, torch.__version__, *facts),
    ]
    return short_hash(["\n".join(parts)])


@functools.cache
def _code() -> str:
    """Hash of the trials and of the passes that they compare; the C library's name has its own."""
    models = Path(__file__).parents[1]
    files = sorted(file for part in _CODE for file in models.glob(part))
    return short_hash(file.read_bytes() for file in files)


def recall(key: str) -> dict[str, Any] | None:
    if key not in _known:
        with contextlib.suppress(TypeError, ValueError):
            _known[key] = dict(json.loads(cached_text("admission", f"{key}.json") or ""))
    return _known.get(key)


def remember(key: str, result: dict[str, Any]) -> None:
    """Keep a result; a cache that cannot be written is no error."""
    _known[key] = result
    keep_text("admission", f"{key}.json", json.dumps(result) + "\n")

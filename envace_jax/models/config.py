"""The sizes and switches of a dense decoder, and their translation from and to Hugging Face's `config.json`.

Knows the JSON dialects of transformers 4 and 5 for Qwen3, Qwen2 and Llama; knows no arrays. A field that would change
the maths in a way the network does not follow is an error, never ignored.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from envace_jax.json_values import json_equal

MODEL_TYPES = ("qwen3", "qwen2", "llama")
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}

# Fields that change the maths, with the JSON values under which they change nothing. A missing field is neutral.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1.0,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "moe_intermediate_size": (None, 0),
    "quantization_config": (None,),
    "is_causal": (True,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "attention_multiplier": (None,),
}


@dataclasses.dataclass(frozen=True)
class QwenConfig:
    """A dense decoder with grouped-query attention, rotary positions, RMS norms and a SwiGLU feed-forward.

    Qwen3: `qk_norm`. Qwen2.5: `qkv_bias`. Llama layout: neither. Raises ValueError on impossible sizes.
    """

    vocab_size: int  # rows of the embedding, at least the tokenizer's length
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qk_norm: bool = True
    qkv_bias: bool = False
    max_positions: int = 40_960
    init_std: float = 0.02  # standard deviation of freshly initialised matrices
    bos_id: int | None = None
    stop_ids: tuple[int, ...] = ()  # Hugging Face's eos_token_id
    pad_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "ffn", "max_positions"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"QwenConfig.{name} is {value!r}; a positive integer is needed")
        if self.heads % self.kv_heads:
            raise ValueError(f"QwenConfig: heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"QwenConfig: head_dim ({self.head_dim}) must be even for rotary positions")
        if not (self.rope_theta > 0 and self.norm_eps > 0 and self.init_std > 0):
            raise ValueError("QwenConfig: rope_theta, norm_eps and init_std must be positive")

    @property
    def model_type(self) -> str:
        """The Hugging Face model type that holds these switches. Raises ValueError where none does."""
        if self.qk_norm and self.qkv_bias:
            raise ValueError("QwenConfig: no Hugging Face model type has both qk_norm and q/k/v bias; switch one off")
        return "qwen3" if self.qk_norm else "qwen2" if self.qkv_bias else "llama"

    @classmethod
    def from_hf(cls, config_json: Mapping[str, Any]) -> QwenConfig:
        """Reads a parsed `config.json`. Raises ValueError naming the field, its value and what is accepted."""
        model_type = config_json.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(f"config.json: model_type is {model_type!r}; accepted are {', '.join(MODEL_TYPES)}")
        _check_supported(config_json)
        width, heads = _size(config_json, "hidden_size"), _size(config_json, "num_attention_heads")
        if config_json.get("head_dim") is None and model_type != "qwen3" and width % heads:
            raise ValueError(f"config.json: head_dim is absent and hidden_size {width} is no multiple of {heads} heads")
        # transformers gives Qwen3 128 where the field is absent, and divides the width for the others.
        head_dim = 128 if model_type == "qwen3" else width // heads
        return cls(
            vocab_size=_size(config_json, "vocab_size"),
            width=width,
            layers=_size(config_json, "num_hidden_layers"),
            heads=heads,
            kv_heads=_size(config_json, "num_key_value_heads", heads),
            head_dim=_size(config_json, "head_dim", head_dim),
            ffn=_size(config_json, "intermediate_size"),
            rope_theta=_rope_theta(config_json),
            norm_eps=_number(config_json, "rms_norm_eps", 1e-6),
            tie_embeddings=_flag(config_json, "tie_word_embeddings"),
            qk_norm=model_type == "qwen3",
            qkv_bias=model_type == "qwen2",
            max_positions=_size(config_json, "max_position_embeddings", 32_768),
            init_std=_number(config_json, "initializer_range", 0.02),
            bos_id=_id(config_json, "bos_token_id"),
            stop_ids=_ids(config_json, "eos_token_id"),
            pad_id=_id(config_json, "pad_token_id"),
        )

    def to_hf(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The `config.json` that transformers 4 and 5, vLLM and SGLang read. `dtype` is that of the stored weights."""
        model_type = self.model_type
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[model_type]],
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,  # read by transformers 4, vLLM and SGLang
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},  # read by transformers 5
            "rope_scaling": None,
            "tie_word_embeddings": self.tie_embeddings,
            "attention_dropout": 0.0,
            "initializer_range": self.init_std,
            "use_cache": True,
            "torch_dtype": dtype,
            "bos_token_id": self.bos_id,
            "eos_token_id": list(self.stop_ids) if len(self.stop_ids) > 1 else next(iter(self.stop_ids), None),
            "pad_token_id": self.pad_id,
        }
        if model_type != "qwen2":  # Qwen2 has its bias built in
            config["attention_bias"] = False
        if model_type == "llama":
            config["mlp_bias"] = False
        else:
            config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": self.layers}
        return config


# Of the published models' config.json, for what needs sizes and no weights: https://huggingface.co/Qwen. All six have
# heads of 128, 8 key/value heads and an embedding of 151,936 rows, of which their tokenizer knows QWEN3_TOKENS.
QWEN3_TOKENS = 151_669
QWEN3_STOPS = (151_645, 151_643)  # <|im_end|>, <|endoftext|>
PUBLISHED: Mapping[str, QwenConfig] = {
    f"Qwen/Qwen3-{name}": QwenConfig(
        vocab_size=151_936, width=width, layers=layers, heads=heads, kv_heads=8, head_dim=128, ffn=ffn,
        tie_embeddings=tied, stop_ids=QWEN3_STOPS,
    )
    for name, width, layers, heads, ffn, tied in (
        ("0.6B", 1024, 28, 16, 3072, True),
        ("1.7B", 2048, 28, 16, 6144, True),
        ("4B", 2560, 36, 32, 9728, True),
        ("8B", 4096, 36, 32, 12288, False),
        ("14B", 5120, 40, 40, 17408, False),
        ("32B", 5120, 64, 64, 25600, False),
    )
}  # fmt: skip


def parameter_count(config: QwenConfig) -> int:
    """The number of parameters, a tied output projection counted once (as model cards do)."""
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = 2 * config.width * (query + key) + 3 * config.width * config.ffn + 2 * config.width
    if config.qk_norm:
        layer += 2 * config.head_dim
    if config.qkv_bias:
        layer += query + 2 * key
    embeddings = config.vocab_size * config.width * (1 if config.tie_embeddings else 2)
    return embeddings + config.layers * layer + config.width


def _check_supported(config_json: Mapping[str, Any]) -> None:
    for field, accepted in NEUTRAL.items():
        value = config_json.get(field, accepted[0])
        if not any(json_equal(value, choice) for choice in accepted):
            raise ValueError(
                f"config.json: {field} is {value!r}, which is not supported; accepted is "
                + " or ".join(repr(choice) for choice in accepted)
            )
    if _flag(config_json, "attention_bias") and config_json["model_type"] != "qwen2":
        raise ValueError(
            "config.json: attention_bias is True, which also puts a bias on o_proj and is not supported; accepted is "
            "False (q/k/v bias alone is model_type 'qwen2')"
        )
    layer_types = config_json.get("layer_types")
    if layer_types is not None and not isinstance(layer_types, list):
        raise ValueError(f"config.json: layer_types is {layer_types!r}; accepted is null or a list of 'full_attention'")
    other = [kind for kind in layer_types or () if kind != "full_attention"]
    if other:
        raise ValueError(f"config.json: layer_types holds {other[0]!r}; accepted is only 'full_attention'")


def _rope_theta(config_json: Mapping[str, Any]) -> float:
    theta = _number(config_json, "rope_theta", 10_000.0)  # transformers' default where the file has none
    for field in ("rope_parameters", "rope_scaling"):  # transformers 5 and 4
        value = config_json.get(field)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ValueError(f"config.json: {field} is {value!r}; accepted is null or an object of rope_type 'default'")
        kind = value.get("rope_type", value.get("type", "default"))
        if kind != "default" or not json_equal(value.get("partial_rotary_factor", 1.0), 1.0):
            raise ValueError(
                f"config.json: {field} is {dict(value)!r}, which is not supported; "
                "accepted is null or rope_type 'default' over the whole head"
            )
        nested = [key for key, entry in value.items() if isinstance(entry, Mapping)]
        if nested:
            raise ValueError(f"config.json: {field} differs by layer ({', '.join(nested)}); accepted is one for all")
        theta = _number(value, "rope_theta", theta, f"{field}.")
    return theta


def _size(config_json: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config_json.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {field} is {value!r}; a positive integer is needed")
    return value


def _number(holder: Mapping[str, Any], field: str, default: float, where: str = "") -> float:
    value = holder.get(field, default)
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"config.json: {where}{field} is {value!r}; a positive number is needed")
    return float(value)


def _flag(config_json: Mapping[str, Any], field: str) -> bool:
    value = config_json.get(field, False)
    if not isinstance(value, bool):  # the text "false" is true in Python
        raise ValueError(f"config.json: {field} is {value!r}; accepted is true or false")
    return value


def _id(config_json: Mapping[str, Any], field: str) -> int | None:
    value = config_json.get(field)
    if type(value) is int and value == -1:  # some old Llama conversions write so that there is none
        return None
    if value is not None and not _is_id(value):
        raise ValueError(f"config.json: {field} is {value!r}; accepted is null, -1 or an integer of at least 0")
    return value


def _ids(config_json: Mapping[str, Any], field: str) -> tuple[int, ...]:
    value = config_json.get(field)
    values = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(map(_is_id, values)):
        raise ValueError(f"config.json: {field} is {value!r}; accepted is null, an integer of at least 0, or a list")
    return values


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0

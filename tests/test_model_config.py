"""Reading and writing config.json: both generations of transformers, three model types, and every refused field."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from envace_jax.models.config import NEUTRAL, QwenConfig

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "attention_bias": False,
    "eos_token_id": 151645,
    "bos_token_id": 151643,
    "torch_dtype": "bfloat16",
}


def test_config_of_both_transformers_generations() -> None:
    config = QwenConfig.from_hf(QWEN3)
    assert (config.width, config.layers, config.heads, config.kv_heads, config.head_dim) == (1024, 28, 16, 8, 128)
    assert (config.rope_theta, config.qk_norm, config.qkv_bias, config.stop_ids) == (1e6, True, False, (151645,))
    newer = {key: value for key, value in QWEN3.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    newer |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "dtype": "bfloat16"}
    newer["layer_types"] = ["full_attention"] * 28
    assert QwenConfig.from_hf(newer) == config
    assert QwenConfig.from_hf(config.to_hf()) == config


def test_config_of_qwen2_and_llama() -> None:
    qwen2 = QWEN3 | {"model_type": "qwen2", "head_dim": None, "sliding_window": 131072}
    config = QwenConfig.from_hf(qwen2)
    assert (config.head_dim, config.qkv_bias, config.qk_norm) == (64, True, False)
    assert QwenConfig.from_hf(config.to_hf()) == config
    llama = QwenConfig.from_hf({k: v for k, v in QWEN3.items() if k != "num_key_value_heads"} | {"model_type": "llama"})
    assert (llama.kv_heads, llama.qkv_bias, llama.qk_norm) == (16, False, False)
    assert QwenConfig.from_hf(llama.to_hf()) == llama


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe'"),
        ({"num_experts": 128}, "num_experts is 128"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types holds 'sliding_attention'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling is {'rope_type': 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is {'type': 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_parameters is {'rope_type': 'llama3'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters differs by layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ({"hidden_size": None}, "hidden_size is None; a positive integer"),
        ({"hidden_size": 0}, "hidden_size is 0; a positive integer"),
        ({"num_key_value_heads": 3}, r"heads \(16\) must be a multiple of kv_heads \(3\)"),
        ({"head_dim": 3}, r"head_dim \(3\) must be even"),
        ({"use_mrope": True}, "use_mrope is True, which is not supported; accepted is False"),
    ],
)
def test_a_field_that_changes_the_maths_is_one_clear_error(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        QwenConfig.from_hf(QWEN3 | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rms_norm_eps": None}, "rms_norm_eps is None; a positive number is needed"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True; a positive number"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'; a positive number"),
        ({"initializer_range": None}, "initializer_range is None; a positive number"),
        ({"initializer_range": 0}, "initializer_range is 0; a positive number"),
        ({"initializer_range": 10**400}, "initializer_range is 1000"),
        ({"rope_theta": [1]}, r"rope_theta is \[1\]; a positive number"),
        ({"rope_theta": float("inf")}, "rope_theta is inf; a positive number"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_parameters.rope_theta is None; a positive number"),
        ({"rope_parameters": {"partial_rotary_factor": True}}, "rope_parameters is {'partial_rotary_factor': True}"),
        ({"rope_scaling": []}, r"rope_scaling is \[\]; accepted is null or an object"),
        ({"layer_types": 5}, "layer_types is 5; accepted is null or a list of 'full_attention'"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'; accepted is null or a list"),
        ({"layer_types": [[]]}, r"layer_types holds \[\]"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; accepted is true or false"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings is None; accepted is true or false"),
        ({"attention_bias": 0}, "attention_bias is 0; accepted is true or false"),
        ({"model_type": "qwen2", "attention_bias": "yes"}, "attention_bias is 'yes'; accepted is true or false"),
        ({"use_sliding_window": 0}, "use_sliding_window is 0, which is not supported; accepted is False"),
        ({"num_experts": False}, "num_experts is False, which is not supported; accepted is None or 0"),
        ({"eos_token_id": {}}, "eos_token_id is {}; accepted is null, an integer of at least 0, or a list"),
        ({"eos_token_id": ["a"]}, r"eos_token_id is \['a'\]; accepted is null, an integer"),
        ({"eos_token_id": 2.0}, "eos_token_id is 2.0; accepted is null, an integer"),
        ({"eos_token_id": [1, True]}, r"eos_token_id is \[1, True\]; accepted"),
        ({"bos_token_id": "1"}, "bos_token_id is '1'; accepted is null, -1 or an integer of at least 0"),
        ({"pad_token_id": -2}, "pad_token_id is -2; accepted is null, -1 or an integer of at least 0"),
        ({"max_position_embeddings": 40960.0}, "max_position_embeddings is 40960.0; a positive integer"),
    ],
)
def test_a_field_of_the_wrong_type_is_one_clear_error(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^config.json: {named}") as caught:
        QwenConfig.from_hf(QWEN3 | change)
    assert "\n" not in str(caught.value)


FIELDS = sorted({*QWEN3, *NEUTRAL, "rope_parameters", "layer_types", "pad_token_id", "initializer_range"})
JUNK = [None, True, False, 0, -1, 1.5, "", "x", [], [None], {}, {"rope_theta": "x"}, float("nan"), float("inf")]


@pytest.mark.parametrize("field", FIELDS)
def test_any_value_of_any_field_gives_a_config_or_one_line(field: str) -> None:
    kinds = typing.get_type_hints(QwenConfig)
    for value in JUNK:
        try:
            config = QwenConfig.from_hf(QWEN3 | {field: value})
        except ValueError as error:
            assert str(error).startswith(("config.json: ", "QwenConfig")) and "\n" not in str(error)
            continue
        for name, kind in kinds.items():
            found = getattr(config, name)
            allowed = typing.get_args(kind) or (kind,)
            assert isinstance(found, tuple) if name == "stop_ids" else type(found) in allowed, (name, found)


def test_a_pad_id_of_minus_one_is_none() -> None:
    assert QwenConfig.from_hf(QWEN3 | {"pad_token_id": -1}).pad_id is None


def test_a_config_that_no_model_type_holds_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="both qk_norm and q/k/v bias"):
        QwenConfig(61, 32, 3, 4, 2, 16, 48, qk_norm=True, qkv_bias=True).to_hf()

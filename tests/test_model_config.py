"""Reading and writing config.json: both generations of transformers, three model types, and every refused field."""

from __future__ import annotations

from typing import Any

import pytest

from envace_jax.models.qwen import QwenConfig

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
    ],
)
def test_a_field_that_changes_the_maths_is_one_clear_error(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        QwenConfig.from_hf(QWEN3 | change)
    assert "\n" not in str(caught.value)


def test_a_config_that_no_model_type_holds_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="both qk_norm and q/k/v bias"):
        QwenConfig(61, 32, 3, 4, 2, 16, 48, qk_norm=True, qkv_bias=True).to_hf()

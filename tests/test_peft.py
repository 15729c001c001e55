"""PEFT's files: names and layouts against torch and PEFT itself, a strict bijection, merged models in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import VOCAB, full_logits, loaded, reference_logits, reference_model

from envace_jax.lora import TARGETS, Lora, joined, split
from envace_jax.models import hf, peft
from envace_jax.models.qwen import QwenConfig, param_shapes

LORA = Lora(4, 6.0)
TOKENS = np.random.default_rng(2).integers(0, VOCAB, (2, 11))
SMALL = QwenConfig(VOCAB, 16, 2, heads=4, kv_heads=2, head_dim=8, ffn=24)


def random_adapters(config: QwenConfig, lora: Lora = LORA):
    rng = np.random.default_rng(7)
    shapes = split(param_shapes(config, lora))[1]
    return jax.tree.map(lambda leaf: jnp.asarray(0.2 * rng.standard_normal(leaf.shape, np.float32)), shapes)


def equal(one, other) -> bool:
    return jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), one, other))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    peft.save(tmp_path / "adapter", SMALL, random_adapters(SMALL), LORA, "some/base")
    return tmp_path / "adapter"


def test_what_is_saved_is_loaded_again(folder: Path) -> None:
    assert equal(peft.load(folder, SMALL, LORA), random_adapters(SMALL))
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (4, 6, list(TARGETS))
    assert settings["base_model_name_or_path"] == "some/base"
    peft.save(folder, SMALL, random_adapters(SMALL), LORA, "some/base")  # in place of the old one
    assert [path.name for path in folder.parent.iterdir()] == ["adapter"]
    with pytest.raises(FileExistsError, match="exists and is not an adapter"):
        peft.save(folder.parent, SMALL, random_adapters(SMALL), LORA, "some/base")


@pytest.mark.parametrize(("kind", "lora"), [("qwen3", LORA), ("qwen2", Lora(2, 8.0, ("k_proj", "o_proj", "up_proj")))])
def test_torch_computes_the_same_with_the_files_and_with_the_merged_model(
    kind: str, lora: Lora, tmp_path: Path
) -> None:
    """The outside reference: torch's own matrices plus alpha / rank * B A, read from the file by PEFT's names."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from safetensors.torch import load_file

    model = reference_model(kind)
    config, policy, base = loaded(model, tmp_path / "base", lora=lora)
    own = random_adapters(config, lora)
    ours = full_logits(policy, joined(base, own), TOKENS)
    plain = reference_logits(model, TOKENS)
    peft.save(tmp_path / "adapter", config, own, lora, str(tmp_path / "base"))
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    matrices = dict(model.named_modules())
    names = [f"{name}.lora_{part}.weight" for name in matrices if name.split(".")[-1] in lora.targets for part in "AB"]
    assert sorted(tensors) == sorted(f"base_model.model.{name}" for name in names)
    with torch.no_grad():
        for name in {name.rsplit(".", 2)[0] for name in tensors}:
            a, b = (tensors[f"{name}.lora_{part}.weight"] for part in "AB")
            matrices[name.removeprefix("base_model.model.")].weight += lora.alpha / lora.rank * b @ a
    np.testing.assert_allclose(ours, reference_logits(model, TOKENS), rtol=1e-4, atol=2e-4)
    assert np.abs(ours - plain).max() > 0.1
    hf.save(tmp_path / "merged", config, joined(base, own), dtype="float32", lora=lora)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    np.testing.assert_allclose(reference_logits(merged, TOKENS), ours, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_peft_loads_ours_and_we_load_peft(kind: str, tmp_path: Path) -> None:
    library = pytest.importorskip("peft")
    import torch

    model = reference_model(kind)
    config, policy, base = loaded(model, tmp_path / "base", lora=LORA)
    own = random_adapters(config)
    peft.save(tmp_path / "ours", config, own, LORA, str(tmp_path / "base"))
    with_ours = library.PeftModel.from_pretrained(model, tmp_path / "ours").eval()
    ours = full_logits(policy, joined(base, own), TOKENS)
    np.testing.assert_allclose(reference_logits(with_ours, TOKENS), ours, rtol=1e-4, atol=2e-4)

    settings = library.LoraConfig(r=4, lora_alpha=6, target_modules=list(TARGETS), init_lora_weights=False)
    torch.manual_seed(1)
    theirs = library.get_peft_model(reference_model(kind), settings).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    read = peft.load(tmp_path / "theirs", config, LORA)
    got = full_logits(policy, joined(base, read), TOKENS)
    np.testing.assert_allclose(got, reference_logits(theirs, TOKENS), rtol=1e-4, atol=2e-4)
    assert np.abs(got - ours).max() > 0.1


def rewritten(folder: Path, **changes) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 8}, r"adapter_config.json: r is 8, and lora.rank is 4; set it to that"),
        ({"lora_alpha": 4}, r"lora_alpha is 4, and lora.alpha is 6.0"),
        ({"use_dora": True}, r"use_dora is True; accepted is False: it is not followed here"),
        ({"rank_pattern": {"up_proj": 2}}, r"rank_pattern is \{'up_proj': 2\}; accepted is None"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"peft_type": "IA3"}, r"peft_type is 'IA3'; accepted is 'LORA'"),
    ],
)
def test_settings_that_do_not_fit_are_named(folder: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        peft.check(rewritten(folder, **changes), SMALL, LORA)


def test_files_that_do_not_fit_are_named(folder: Path, tmp_path: Path) -> None:
    """One line for other targets, another number of layers, other shapes, and files that are not there."""
    fewer = Lora(4, 6.0, ("q_proj", "v_proj"))
    with pytest.raises(ValueError, match="has adapters of q_proj, k_proj, .* and lora.targets is q_proj, v_proj; set"):
        peft.check(folder, SMALL, fewer)
    deeper = QwenConfig(VOCAB, 16, 3, heads=4, kv_heads=2, head_dim=8, ffn=24)
    with pytest.raises(
        ValueError, match=r"14 tensors missing, the first base_model.model.model.layers.2.mlp.down_proj"
    ):
        peft.check(folder, deeper, LORA)
    shallow = QwenConfig(VOCAB, 16, 1, heads=4, kv_heads=2, head_dim=8, ffn=24)
    with pytest.raises(ValueError, match=r"14 tensors unexpected, the first base_model.model.model.layers.1"):
        peft.check(folder, shallow, LORA)
    wider = QwenConfig(VOCAB, 16, 2, heads=4, kv_heads=2, head_dim=8, ffn=32)
    with pytest.raises(ValueError, match=r"gate_proj.lora_B.weight has shape \[24, 4\]; rank 4 .* asks for \[32, 4\]"):
        peft.check(folder, wider, LORA)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="adapter_model.safetensors: missing"):
        peft.check(folder, SMALL, LORA)
    with pytest.raises(FileNotFoundError, match="adapter_config.json: missing"):
        peft.check(tmp_path, SMALL, LORA)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list, not a JSON object"):
        peft.check(tmp_path, SMALL, LORA)


def test_a_model_with_adapters_is_not_saved_without_saying_which(tmp_path: Path) -> None:
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), param_shapes(SMALL, LORA))
    with pytest.raises(ValueError, match="have an adapter at layers/query; give its lora to merge it"):
        hf.save(tmp_path / "model", SMALL, params)
    assert not list(tmp_path.iterdir())


def test_files_load_onto_a_mesh(run_python, folder: Path) -> None:
    code = f"""
        import jax, numpy as np
        from test_peft import LORA, SMALL, random_adapters, peft
        from envace_jax.sharding import make_mesh

        params = peft.load({str(folder)!r}, SMALL, LORA, make_mesh(1, 2, 2))
        jax.tree.map(np.testing.assert_array_equal, params, random_adapters(SMALL))
        gate = params["layers"]["gate"]
        assert gate["lora_a"].sharding.spec[1] == "fsdp" and gate["lora_b"].sharding.spec[2] == "tensor"
        print("placed")
    """
    assert "placed" in run_python(code, devices=4)

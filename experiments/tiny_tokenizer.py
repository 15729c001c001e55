"""Trains the tiny model's tokenizer: byte-level BPE on the tiny world's own text, with Qwen3's control tokens.

Every token costs time on a CPU, so the boilerplate of tool schemas and of the prompts' fixed texts are tokens of their
own, words are never joined with the punctuation around them (an entity is the same tokens wherever it stands, which
makes copying easy to learn) and numbers are split into digits. Knows nothing of models or training.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from envace_jax import chat, roles

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
# Spans that occur in every prompt. They begin and end at the borders of words so that no other span is split by them.
BOILERPLATE = (
    '{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {"type": "object", "properties": {"',
    '": {"type": "string"}, "',
    '": {"type": "integer"}, "',
    '": {"type": "string"}}, "required": ["',
    '": {"type": "integer"}}, "required": ["',
    '{"name": "',
    '", "arguments": {"',
    '"}}',
    ' => {"',
    "assistant\n",
    "user\n",
    "system\n",
    '<execution_result>\n{"',
    "\n</execution_result>",
    roles.COMPACT_SYSTEM,
)
TOOL_TEXT = (chat.TOOLS_BEFORE, chat.TOOLS_AFTER[0], chat.TOOLS_AFTER[1], chat.TOOLS_AFTER[2])

CHAT_TEMPLATE_FILE = Path(__file__).with_name("qwen3_chat_template.jinja")


def train(texts: Iterable[str], vocabulary: int) -> tokenizers.Tokenizer:
    """A tokenizer of at most `vocabulary` entries whose special tokens have the first ids."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    words = Regex(r"[A-Za-z_]+|[0-9]|[^A-Za-z_0-9]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(text, normalized=False, special=False) for text in (*TAGS, *BOILERPLATE, *TOOL_TEXT)]
    special = [AddedToken(text, normalized=False, special=True) for text in SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(added),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Tags and boilerplate are taken out before training, as they will be before encoding.
    tokenizer.train_from_iterator((piece for text in texts for piece in _without(text, added)), trainer)
    tokenizer.add_tokens(added)
    return tokenizer


def _without(text: str, added: list[AddedToken]) -> list[str]:
    pieces = [text]
    for token in sorted(added, key=lambda token: -len(token.content)):
        pieces = [part for piece in pieces for part in piece.split(token.content) if part]
    return pieces

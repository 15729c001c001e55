"""The shipped base model: its size, its layout, and that transformers reads the same model and the same chat format."""

import json

import jax
import numpy as np
import pytest

from envace_jax.chat import load_tokenizer
from envace_jax.config import ASSETS
from envace_jax.envs import tiny
from envace_jax.models import hf, qwen
from envace_jax.roles import Prompts, act_prompt, message_calls

FOLDER = ASSETS / "tiny_base"


def test_size_and_architecture():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 8_000_000
    config = hf.read_config(FOLDER)
    assert qwen.parameter_count(config) <= 3_000_000
    assert json.loads((FOLDER / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert config.vocab_size >= load_tokenizer(FOLDER).vocab_size


def test_prompts_equal_the_shipped_chat_template():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    prompts = Prompts(load_tokenizer(FOLDER), style="compact", thinking=False)
    for task in tiny.tasks("heldout", 20, 0):
        messages = [{"role": "user", "content": task.user_turns[0]}]
        ids = tokenizer.apply_chat_template(
            messages, tools=list(task.tools), add_generation_prompt=True, enable_thinking=False, return_dict=False
        )
        assert act_prompt(prompts, task) == list(ids)


def test_every_gold_step_survives_the_tokenizer():
    chat = load_tokenizer(FOLDER)
    for task in tiny.tasks("train", 50, 1):
        for message in tiny.conversation(task):
            calls = message_calls(message) if message["role"] == "assistant" else []
            text = chat.decode(chat.assistant(message["content"], calls=calls))
            assert text.startswith(message["content"]) and text.endswith("<|im_end|>")
            assert all(json.dumps(dict(call.arguments)) in text for call in calls)


def test_transformers_computes_the_same_logits():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    config, params = hf.load(FOLDER)
    policy = qwen.make_policy(config)
    prompts = Prompts(load_tokenizer(FOLDER), style="compact", thinking=False)
    tokens = np.array([act_prompt(prompts, tiny.tasks("heldout", 1, 0)[0])], np.int32)
    positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
    hidden, _ = jax.jit(policy.apply)(params, tokens, positions, np.ones_like(tokens), None)
    with torch.no_grad():
        expected = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(np.asarray(policy.logits(params, hidden)), expected, atol=1e-4)

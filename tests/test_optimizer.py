"""The optimizer and its schedules: hand-worked rates, and torch's AdamW with clipping as the reference."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from envace_jax.train_step import make_optimizer, make_schedule


def test_schedules_by_hand():
    constant = make_schedule(0.4, warmup_steps=4)
    np.testing.assert_allclose([constant(n) for n in (0, 1, 3, 4, 99)], [0.1, 0.2, 0.4, 0.4, 0.4], rtol=1e-6)
    assert make_schedule(0.4)(0) == pytest.approx(0.4)
    cosine = make_schedule(0.4, schedule="cosine", warmup_steps=2, total_steps=10)
    np.testing.assert_allclose([cosine(n) for n in (0, 1, 2, 6, 10)], [0.2, 0.4, 0.4, 0.2, 0], rtol=1e-5, atol=1e-8)
    assert cosine(4) == pytest.approx(0.2 * (1 + math.cos(math.pi / 4)), rel=1e-5)
    linear = make_schedule(0.4, schedule="linear", total_steps=4)
    np.testing.assert_allclose([linear(n) for n in range(5)], [0.4, 0.3, 0.2, 0.1, 0.0], atol=1e-7)
    with pytest.raises(ValueError, match="unknown schedule 'step'"):
        make_schedule(0.1, schedule="step")
    with pytest.raises(ValueError, match="needs total_steps"):
        make_schedule(0.1, schedule="cosine", warmup_steps=5, total_steps=5)


def test_the_optimizer_equals_torch_adamw_with_gradient_clipping():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    start = rng.normal(size=(3, 4)).astype(np.float32)
    gradients = [(rng.normal(size=(3, 4)) * scale).astype(np.float32) for scale in (0.01, 5.0, 0.3, 40.0)]
    theirs = torch.nn.Parameter(torch.tensor(start))
    adamw = torch.optim.AdamW([theirs], lr=0.03, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8)
    optimizer = make_optimizer(0.03)
    ours, state = jnp.asarray(start), optimizer.init(jnp.asarray(start))
    for gradient in gradients:
        theirs.grad = torch.tensor(gradient)
        torch.nn.utils.clip_grad_norm_([theirs], 1.0)
        adamw.step()
        updates, state = optimizer.update(jnp.asarray(gradient), state, ours)
        ours = optax.apply_updates(ours, updates)
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=2e-5, atol=1e-6)

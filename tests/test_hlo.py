"""Collectives counted from a program's text: a hand-written one, and a compiled one whose traffic is known."""

from __future__ import annotations

import pytest
from conftest import run_python

from envace_jax import hlo

PROGRAM = """HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (x: bf16[64,8]) -> bf16[16,8] {
  %all-reduce.1 = bf16[64,8]{1,0:T(8,128)} all-reduce(%x), channel_id=3, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %slice = bf16[16,8]{1,0} dynamic-slice(%all-reduce.1, %start, %zero), dynamic_slice_sizes={16,8}
}

%begin (x: f32[4,8]) -> f32[16,8] {
  ROOT %all-gather.1 = f32[16,8]{1,0} all-gather(%x), channel_id=4, replica_groups=mesh['a'=2,'b'=4] {'b'}
}

%end (x: f32[4,8]) -> f32[16,8] {
  ROOT %all-gather.2 = f32[16,8]{1,0} all-gather(%x), channel_id=4, replica_groups=mesh['a'=2,'b'=4] {'b'}
}

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %kernel = f32[4,8] custom-call(%p), frontend_attributes={metadata={
"several": "lines"
}}, metadata={op_name="x"}
  %one = f32[16,8]{1,0} fusion(%kernel), kind=kCustom, calls=%begin
  %other = f32[16,8]{1,0} fusion(%kernel), kind=kCustom, calls=%end
  %scattered = bf16[16,8]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %out = (s32[], f32[4,8]) tuple(%i, %kernel)
}

%condition (p: (s32[], f32[4,8])) -> pred[] {
  %bound = s32[] constant(36)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

%dear (x: f32[2]) -> f32[2] {
  ROOT %all-reduce.2 = f32[2]{0} all-reduce(%x), channel_id=5, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
}

%cheap (x: f32[2]) -> f32[2] {
  ROOT %copy = f32[2]{0} copy(%x)
}

ENTRY %main (x: f32[4,8]) -> f32[4,8] {
  %loop = (s32[], f32[4,8]) while(%start), condition=%condition, body=%body
  %choice = f32[2]{0} conditional(%which, %x, %x), branch_computations={%cheap, %dear}
  %moved = (f32[4,8]{1,0}, f32[4,8]{1,0}, u32[], u32[]) collective-permute-start(%x), channel_id=6
}
"""


def test_every_collective_counts_as_often_as_it_runs():
    found = {one.kind: one for one in hlo.collectives(PROGRAM, 8)}
    assert {kind: (one.shape, one.group, one.times, one.sent) for kind, one in found.items()} == {
        "all-gather": ("f32[16,8]", 4, 36, 3 * 16 * 8 * 4 // 4),  # once, though written twice
        "reduce-scatter": ("bf16[64,8]", 4, 36, 3 * 64 * 8 * 2 // 4),
        "all-reduce": ("f32[2]", 2, 1, 8),
        "collective-permute": ("f32[4,8]", 8, 1, 128),
    }
    assert hlo.total_bytes(hlo.collectives(PROGRAM, 8)) == 36 * (384 + 768) + 8 + 128
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.collectives("module @jit_step {}", 8)
    assert ("bf16", (64, 8)) in set(hlo.shapes(PROGRAM)) and ("f32", ()) in set(hlo.shapes(PROGRAM))


def test_a_compiled_scan_sends_what_its_arithmetic_says():
    out = run_python(
        """
        import jax, jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec as P
        from envace_jax import hlo
        from envace_jax.sharding import make_mesh

        mesh = make_mesh(1, 8, 1)
        def product(x, weights):  # each layer's weights are gathered in turn
            def layer(x, w):
                return jnp.tanh(x @ jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))), None
            return jax.lax.scan(layer, x, weights)[0]
        rows, cut = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P(None, "fsdp"))
        arguments = (jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=rows),
                     jax.ShapeDtypeStruct((5, 64, 64), jnp.float32, sharding=cut))
        text = jax.jit(product, out_shardings=rows).lower(*arguments).compile().as_text()
        print([(one.kind, one.times, one.sent) for one in hlo.collectives(text, 8)])
        """,
        devices=8,
    )
    assert out.strip() == str([("all-gather", 5, 64 * 64 * 4 * 7 // 8)])

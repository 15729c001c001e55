"""The plan: memory by hand-worked numbers, what is resident when, exit codes, JSON, and the command's messages."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import plan_table
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from plan_helpers import CHIP, PARTS, made_plan
from train_helpers import ROOT, tiny_config

from envace_jax import advice, chips, plan, planning
from envace_jax.chips import GIB
from envace_jax.config import ConfigError
from envace_jax.planning import Bytes
from envace_jax.sharding import AXES, make_mesh

MESH = AbstractMesh((1, 4, 2), AXES)


def shaped(shape: tuple[int, ...], *axes: str | None, dtype: object = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, PartitionSpec(*axes)))


# --- memory ---


def test_bytes_on_a_chip_by_hand() -> None:
    assert planning.bytes_of(shaped((8, 6))) == Bytes(8 * 6 * 4)
    assert planning.bytes_of(shaped((8, 6), "fsdp", "tensor")) == Bytes(2 * 3 * 4)
    tree = {"a": shaped((8, 6), "fsdp", dtype=jnp.bfloat16), "b": (shaped((16,), ("fsdp", "tensor"), dtype=jnp.int8),)}
    assert planning.bytes_of(tree) == Bytes(2 * 6 * 2 + 2)


def test_what_lies_in_host_memory_takes_no_hbm() -> None:
    place = NamedSharding(make_mesh(devices=jax.devices()[:1]), PartitionSpec(), memory_kind="pinned_host")
    moved = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=place)
    assert planning.bytes_of((moved, shaped((2,)))) == Bytes(8, 64)


def test_a_compiled_program_says_what_it_takes() -> None:
    array = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    step = jax.jit(lambda kept, other: (kept + 1, kept @ other), donate_argnums=0)
    figures, executable = planning.compile_program("step", "train", step.lower(array, array))
    assert executable is not None and figures.error == "" and figures.traffic == {}
    assert figures.arguments == 2 * 256 * 256 * 4 and figures.aliased == 256 * 256 * 4
    assert figures.peak >= 3 * 256 * 256 * 4  # both arguments, and the result that takes no argument's place
    assert planning._donated(step.lower(array, array), executable) == Bytes(256 * 256 * 4)


TEXT = """HloModule jit_step

%condition (state: (s32[], f32[16])) -> pred[] {
  %constant.3 = s32[]{:T(128)} constant(3)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%i, %constant.3), direction=LT
}

%body (state: (s32[], f32[16])) -> (s32[], f32[16]) {
  %all-gather.1 = bf16[4,32]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, replica_groups=[2,4]<=[8], dimensions={1}
  %all-gather.2 = bf16[4,16]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=8, replica_groups=[4,2]<=[8], dimensions={1}
  ROOT %t = (s32[], f32[16]) tuple(%x, %y)
}

ENTRY %main (param: f32[16]) -> f32[16] {
  %loop = (s32[], f32[16]) while(%init), condition=%condition, body=%body
  ROOT %all-reduce.1 = f32[16]{0} all-reduce(%y), channel_id=9, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
}
"""


def test_traffic_counts_a_loop_as_often_as_it_runs() -> None:
    found = planning.traffic_of(TEXT, 8)
    gathered = 3 * (4 * 32 * 2 * 3 / 4 + 4 * 16 * 2 / 2)
    assert found == {
        "all-gather": planning.Traffic(6, gathered), "all-reduce": planning.Traffic(1, 2 * 16 * 4 * 3 / 4),
    }  # fmt: skip


class Refused:
    """A program that a compiler refuses, with these words."""

    def __init__(self, text: str) -> None:
        self.text = text

    def compile(self) -> None:
        raise jax.errors.JaxRuntimeError(self.text)


def test_a_program_that_the_compiler_refuses_is_a_finding() -> None:
    text = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (20.50G) exceeds available HBM (15.75G). HLO module: jit_step.\nSee the page."
    )
    figures, executable = planning.compile_program("step", "train", Refused(text))  # type: ignore[arg-type]
    assert executable is None and figures.peak == int(20.5 * GIB) and "\n" not in figures.error
    with pytest.raises(jax.errors.JaxRuntimeError):
        planning.compile_program("step", "train", Refused("INTERNAL: a fault"))  # type: ignore[arg-type]


def test_what_is_resident_in_each_phase_by_hand() -> None:
    found = {phase.program.split()[0].rstrip(","): phase for phase in made_plan().phases}
    # The caches and the parameters for decoding are gone before the train step.
    assert found["train"].beside == {} and found["train"].bytes == 8 * GIB
    assert found["reshard"].beside == {"optimizer": 2 * GIB} and found["reshard"].bytes == 4 * GIB
    assert found["decode"].beside == {"optimizer": 2 * GIB, "parameters": GIB}
    assert found["prefill"].bytes == 4 * GIB + 2 * GIB + GIB


def test_a_state_in_host_memory_is_not_resident() -> None:
    found = made_plan(parts={"optimizer": Bytes(0, 2 * GIB)}).phases
    assert all("optimizer" not in phase.beside for phase in found)
    assert [phase.bytes for phase in found if phase.name == "reshard"] == [2 * GIB]


def test_a_reference_policy_stays_throughout() -> None:
    found = made_plan(parts={"reference parameters": Bytes(GIB)}).phases
    assert all(phase.beside["reference parameters"] == GIB for phase in found)


def test_it_fits_where_every_phase_does() -> None:
    assert made_plan().fits and made_plan().over() == {}
    assert made_plan(train={"peak": 10 * GIB}).fits
    over = made_plan(train={"peak": 10 * GIB + 1})
    assert not over.fits and over.over() == {"train": 1}
    beside = made_plan(decode={"peak": 8 * GIB})  # fits alone, and not beside what stays
    assert not beside.fits and beside.over() == {"rollout": GIB}
    refused = made_plan(train={"error": "RESOURCE_EXHAUSTED", "peak": 0})
    assert not refused.fits


# --- the command ---


def run(monkeypatch: pytest.MonkeyPatch, made: planning.Plan, *arguments: str) -> int:
    monkeypatch.setattr(planning, "make", lambda *_: made)
    monkeypatch.chdir(ROOT)
    return plan.run(["plan", "--config=configs/tiny.py", "--topology=v5e:1x1", *arguments])


def test_exit_codes_and_what_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, made_plan()) == 0
    said = capsys.readouterr().out
    assert said.rstrip().endswith("fits") and "does not fit" not in said
    assert "all-gather 7 x, 2.00 GB" in said and "assumed: " in said
    assert run(monkeypatch, made_plan(train={"peak": 12 * GIB})) == 1
    said = capsys.readouterr().out
    assert "train     12.00 of 10.00 does not fit" in said and "--config.batch.micro_batch_rows=1" in said
    assert run(monkeypatch, made_plan(train={"error": "RESOURCE_EXHAUSTED: too much", "peak": 20 * GIB})) == 1
    said = capsys.readouterr().out
    assert "refused: RESOURCE_EXHAUSTED: too much" in said and "no time is estimated" in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--config=configs/tiny.py",), "--topology is missing; it is one of v5e:1x1"),
        (("--config=configs/tiny.py", "--topology=v7:2x2"), "unknown chip 'v7'; known are v5e, v5p, v6e"),
        (("--config=configs/tiny.py", "--topology=h100:8"), "GPUs are not planned"),
        (("--config=configs/tiny.py", "--topology=v5e:1x1", "--jsn=x"), "Unknown command line flag 'jsn'"),
        (("--topology=v5e:1x1",), "--config is missing"),
        (("--config=configs/tiny.py", "--topology=v5e:1x1", "--config.sampler.slot=4"), "sampler.slots"),
    ],
)
def test_bad_command_lines(
    arguments: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert plan.run(["plan", *arguments]) == 2
    said = capsys.readouterr().err
    assert expected in said and len(said.splitlines()) == 1 and said.startswith("error: ")


def test_without_libtpu_one_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert plan.run(["plan", "--config=configs/tiny.py", "--topology=v5e:1x1"]) == 2
    said = capsys.readouterr().err
    assert "libtpu" in said and "envace-jax[plan]" in said and len(said.splitlines()) == 1


def test_a_config_without_data_can_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    read = plan.read_flags(["plan", "--config=configs/qwen3_8b.py", "--topology=v5e:4x4", "--sampled_tokens=500"])
    assert read.config.model.path == "Qwen/Qwen3-8B" and read.work().sampled == 500
    given = plan.read_flags(["plan", "--config=configs/tiny.py", "--topology=v5e:4x4"])
    assert given.config.data.source == "tiny"


def test_a_mesh_that_is_not_the_topology_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envace_jax.chips.devices", lambda topology: [object()] * 16)
    with pytest.raises(ConfigError, match="fsdp=1 x tensor=1 are 1 devices, but v5e:4x4 has 16"):
        planning.mesh_of(tiny_config(), "v5e:4x4")


def test_json_holds_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert run(monkeypatch, made_plan(decode={"peak": 9 * GIB}), f"--json={file}") == 1
    found = json.loads(file.read_text())
    assert set(found) == {
        "config_file", "config", "topology", "chip", "chips", "parameters", "rows", "parts", "programs", "phases",
        "work", "flops", "time", "assumptions", "fits", "suggestions", "versions",
    }  # fmt: skip
    assert found["fits"] is False and found["config_file"] == "configs/tiny.py" and found["topology"] == "v5e:1x1"
    assert found["parts"]["optimizer"] == {"device": 2 * GIB, "host": 0}
    assert [program["name"].split()[0].rstrip(",") for program in found["programs"]] == [
        "reshard", "prefill", "decode", "train",
    ]  # fmt: skip
    assert found["programs"][-1]["traffic"] == {"all-gather": {"count": 7, "bytes": 2e9}}
    decode = next(phase for phase in found["phases"] if phase["program"].startswith("decode"))
    assert decode["bytes"] == decode["program_bytes"] + sum(decode["beside"].values())
    assert found["suggestions"] and set(found["suggestions"][0]) == {"change", "saves", "costs"}
    assert found["chip"]["hbm_bytes"] == CHIP.hbm_bytes and found["versions"]["jax"]


# --- what to change ---


def changes(made: planning.Plan) -> dict[str, int]:
    return {one.change: one.saves for one in advice.suggestions(made)}


def test_nothing_to_change_where_it_fits() -> None:
    assert advice.suggestions(made_plan()) == []


def test_suggestions_for_training_are_ranked_by_what_they_save() -> None:
    config = tiny_config(**{"batch.micro_batch_rows": 4, "batch.rows_multiple": 4})
    found = changes(made_plan(config=config, train={"peak": 11 * GIB}))
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert found["--config.batch.micro_batch_rows=1"] == pytest.approx(5 * GIB * 0.75 * 0.7, rel=1e-6)
    assert found["--config.model.remat=full"] == 3 * GIB
    assert not any("slots" in change for change in found)
    assert "a topology of 2 v5e chips in place of 1" in found


def test_suggestions_for_a_rollout() -> None:
    found = changes(made_plan(decode={"peak": 9 * GIB}))
    assert found["--config.sampler.slots=4"] == 3 * GIB // 2
    assert found["--config.sampler.cache_rows=8"] == int(3 * GIB * (128 - 8) / (128 + 8))
    assert found["--config.optimizer.offload=True"] == PARTS["optimizer"].device
    assert not any("remat" in change for change in found)
    paged = tiny_config(**{"sampler.pages": 64, "sampler.page_size": 16})
    found = changes(made_plan(config=paged, decode={"peak": 9 * GIB}))
    assert found["--config.sampler.pages=32"] == 3 * GIB // 2 and "--config.sampler.slots=4" not in found
    # 440 tokens are 28 pages, and one is for copying.
    fewest = tiny_config(**{"sampler.pages": 30, "sampler.page_size": 16})
    found = changes(made_plan(config=fewest, decode={"peak": 9 * GIB}))
    assert found["--config.sampler.pages=29"] == pytest.approx(3 * GIB / 30, abs=1)


def test_moments_are_suggested_only_in_narrower_dtypes() -> None:
    half = tiny_config(**{"optimizer.moments_dtype": "bfloat16"})
    found = changes(made_plan(config=half, train={"peak": 12 * GIB}))
    assert "--config.optimizer.moments_dtype=bfloat16" not in found
    assert found["--config.optimizer.moments_dtype=int8"] == int(2 * GIB * (1 - 1.07 / 2))


# --- with a compiler ---


def tpu_python() -> str | None:
    """An interpreter that has libtpu: ENVACE_TPU_PYTHON names it, or it is this one."""
    given = os.environ.get("ENVACE_TPU_PYTHON", sys.executable)
    check = "import importlib.util, sys; sys.exit(importlib.util.find_spec('libtpu') is None)"
    return given if subprocess.run([given, "-c", check], check=False).returncode == 0 else None


SMALL = (
    "--config.model.unroll=False", "--config.model.compute_dtype=bfloat16", "--config.sampler.prefill_lengths=(64,)",
    "--config.batch.layout=packed", "--config.batch.row_length=512",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "mesh", "collectives"), [("v5e:1x1", (), False), ("v5e:2x4", ("fsdp=4", "tensor=2"), True)]
)
def test_the_tiny_config_is_planned_for_real_chips(
    topology: str, mesh: tuple[str, ...], collectives: bool, tmp_path: Path
) -> None:
    python = tpu_python()
    if python is None:
        pytest.skip("no libtpu; pip install 'envace-jax[plan]', or name an interpreter that has it: ENVACE_TPU_PYTHON")
    command = [
        python, "-m", "envace_jax.plan", "--config=configs/tiny.py", f"--topology={topology}", *SMALL,
        *(f"--config.mesh.{axis}" for axis in mesh), f"--json={tmp_path / 'plan.json'}",
    ]  # fmt: skip
    paths = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | paths, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["fits"] and found["time"]["step"] > 0 and found["versions"]["libtpu"]
    programs = {program["name"].split()[0].rstrip(","): program for program in found["programs"]}
    assert set(programs) == {"reshard", "prefill", "decode", "train"}
    assert all(program["peak"] > 0 for program in programs.values())
    assert bool(programs["train"]["traffic"]) == collectives
    # The state is donated: new parameters and moments take the places of the old ones.
    state = found["parts"]["parameters"]["device"] + found["parts"]["optimizer"]["device"]
    assert programs["train"]["aliased"] >= 0.95 * state


# --- the table ---


def test_every_topology_that_was_promised_is_planned_by_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = {(config.stem, topology): (config, flags) for _, config, topology, flags in plan_table.entries()}
    promised = {
        "qwen3_0p6b_colab": ("v5e:1x1",), "qwen3_1p7b_lora": ("v5e:1x1",), "qwen3_1p7b": ("v5e:2x4",),
        "qwen3_4b": ("v5e:2x4",), "qwen3_8b": ("v5e:4x4", "v5p:2x2x2", "v6e:2x4", "v5e:2x4"), "qwen3_14b": ("v5e:4x8",),
        "qwen3_32b": ("v5p:2x4x4",),
    }  # fmt: skip
    assert {(name, topology) for name, all_of in promised.items() for topology in all_of} <= set(found)
    for (_, topology), (config, flags) in found.items():
        read = plan.read_flags(["plan", *plan_table.command(config, topology, flags)]).config
        _, sizes = chips.parse(topology)
        assert read.mesh.data * read.mesh.fsdp * read.mesh.tensor == math.prod(sizes), (config.stem, topology)


def test_a_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cells = plan_table.row("name", plan.to_dict(made_plan(), "configs/qwen3_8b.py"), []).split(" | ")
    assert cells[0] == "| 8b" and cells[1] == "v5e:1x1" and cells[3] == "10.00"
    assert cells[4:7] == ["8.00", "4.00", "7.00"] and cells[-1] == "yes |"
    # 2 GB over 24 rows of 640 tokens on one chip.
    assert cells[11] == f"{2e9 / (24 * 640) / 1000:.0f}" and cells[12] == "1 + 2"


def test_the_section_takes_the_place_of_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "tpu.md"
    monkeypatch.setattr(plan_table, "PAGE", page)
    text = plan_table.section(["| row |"], {"jax": "1.2"}, ["all is well"])
    assert "| row |" in text and "jax 1.2" in text and "all is well" in text
    page.write_text("# Page\n\n## What was planned\n\nold\n\n## After\n\nkept\n")
    for _ in range(2):  # the same again
        plan_table.write(text)
        assert page.read_text() == f"# Page\n\n{text}\n## After\n\nkept\n"
    page.write_text("# Page\n")
    plan_table.write(text)
    assert page.read_text() == f"# Page\n\n{text}"

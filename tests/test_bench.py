"""The benchmark's workload and arithmetic: what is measured is the same work in every mode. No time is asserted."""

from __future__ import annotations

import io
import json

import bench
import multiturn
import multiturn_modes as modes
import numpy as np
import profile_cells
import pytest
from bench_cells import Cell
from bench_limits import Limits, Work, decode_work, prefill_work, train_work
from multiturn import Ranges, build_prompt, make_script, role_of, segment_sizes

from envace_jax.models.qwen import QwenConfig, parameter_count
from envace_jax.progress import Progress
from envace_jax.types import Role

# Sharp enough logits that float rounding moves no draw, as in test_sampling.py.
CONFIG = QwenConfig(
    vocab_size=96, width=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=48, init_std=0.3, rope_theta=1e4
)
SHORT = Ranges(prompt=(12, 40), calls=(1, 3), act=(2, 9), rehearse=(2, 7), examples=(3, 6))
SETTINGS = modes.Settings(slots=4, decode_chunk=3, prefill_lengths=(16,), prefill_rows=(4,), rounding=32)


# --- the script ---


def test_the_script_stays_within_the_stated_ranges():
    script = make_script(0, vocab_size=512)
    assert [(a.task, a.attempt) for a in script] == [(task, attempt) for task in range(32) for attempt in range(4)]
    first_prompts = [segment_sizes(a)[0][0] for a in script]
    calls = [len(a.lengths) // 2 for a in script]
    acts = [length for a in script for length in a.lengths[::2]]
    rehearsals = [length for a in script for length in a.lengths[1::2]]
    for numbers, (least, most) in ((first_prompts, (300, 1500)), (acts, (16, 256)), (rehearsals, (16, 192))):
        assert least <= min(numbers) < least + 0.1 * most and 0.9 * most < max(numbers) <= most
    assert set(calls) == {2, 3, 4, 5, 6} and all(len(a.lengths) % 2 for a in script)
    parts = [token for a in script for token in (*a.tools, *a.question, *a.examples)]
    assert multiturn.FIRST_ID <= min(parts) and max(parts) < 512


def test_the_script_is_a_function_of_the_seed():
    assert make_script(3, vocab_size=96, tasks=2) == make_script(3, vocab_size=96, tasks=5)[:8]
    assert make_script(3, vocab_size=96, tasks=2) != make_script(4, vocab_size=96, tasks=2)
    one, other = make_script(3, vocab_size=96, tasks=1, attempts=2)
    assert (one.tools, one.question, one.examples) == (other.tools, other.question, other.examples)
    assert one.lengths != other.lengths
    with pytest.raises(ValueError, match="vocab_size 8, tasks 1, attempts 4; needs vocab_size > 8"):
        make_script(0, vocab_size=8, tasks=1)


def test_prompts_grow_as_the_two_roles_do():
    attempt = make_script(1, vocab_size=96, tasks=1, attempts=1)[0]
    rng = np.random.default_rng(0)
    samples = [rng.integers(0, 96, length) for length in attempt.lengths]
    prompts = [build_prompt(attempt, samples[:index]).tolist() for index in range(len(samples))]
    assert [(len(p), len(s)) for p, s in zip(prompts, samples, strict=True)] == segment_sizes(attempt)
    tools = list(attempt.tools)
    for index, (prompt, sample) in enumerate(zip(prompts[:-2], samples[:-2], strict=True)):
        later = prompts[index + 2]
        if role_of(index) is Role.ACT:  # append-only: the next ACT prompt begins with this one and its tokens
            stream = [*prompt, *sample.tolist()]
            assert later[: len(stream)] == stream
        else:  # the next REHEARSE prompt shares everything before the examples
            tail = len(attempt.examples) + attempt.lengths[index - 1] + len(multiturn.ANSWER)
            assert later[: len(prompt) - tail] == prompt[:-tail]
            assert prompt[-tail:] == [*attempt.examples, *samples[index - 1].tolist(), *multiturn.ANSWER]
        assert prompt[: len(tools)] == tools
    assert prompts[0][len(tools) : len(tools) + 2] != prompts[1][len(tools) : len(tools) + 2]


# --- the modes ---


@pytest.fixture(scope="module")
def played():
    """(setup, rollout by mode, training by mode), each mode once, on one sampler and one train step."""
    script = make_script(0, vocab_size=96, tasks=3, attempts=3, ranges=SHORT)
    setup = modes.make_setup(CONFIG, script, SETTINGS, seed=0)
    rollouts = {mode: modes.play(setup, mode) for mode in modes.MODES}
    return setup, rollouts, {mode: modes.train(setup, mode, rollouts[mode].trajectories) for mode in modes.MODES}


def sampled(rollout):
    return [[segment.tokens.tolist() for segment in t.segments] for t in rollout.trajectories]


def test_all_modes_sample_the_scripted_tokens_and_the_same(played):
    setup, rollouts, _ = played
    expected = sampled(rollouts["ours"])
    assert [tuple(map(len, segments)) for segments in expected] == [attempt.lengths for attempt in setup.script]
    assert sampled(rollouts["lockstep-reused"]) == expected
    assert sampled(rollouts["lockstep-fresh"]) == expected
    assert max(token for segments in expected for tokens in segments for token in tokens) < CONFIG.vocab_size


def test_only_the_fresh_mode_encodes_every_prompt(played):
    setup, rollouts, _ = played
    prompts = sum(prompt for attempt in setup.script for prompt, _ in segment_sizes(attempt))
    for rollout in rollouts.values():
        assert rollout.stats.prefilled_tokens + rollout.stats.reused_tokens == prompts
    assert rollouts["lockstep-fresh"].stats.prefilled_tokens == prompts
    assert rollouts["ours"].stats.prefilled_tokens < prompts


def test_all_modes_train_the_same_tokens_to_the_same_loss(played):
    setup, _, trainings = played
    tokens = sum(sum(attempt.lengths) for attempt in setup.script)
    assert [training.trained_tokens for training in trainings.values()] == [tokens] * 3
    losses = [training.loss for training in trainings.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
    ours, fresh = trainings["ours"], trainings["lockstep-fresh"]
    assert fresh.rows == sum(len(attempt.lengths) for attempt in setup.script)
    assert ours.row_tokens < fresh.row_tokens and ours.fill > fresh.fill
    assert sum(fresh.sequences) == sum(sum(size) for attempt in setup.script for size in segment_sizes(attempt))


def test_a_second_run_compiles_nothing_and_a_warm_up_trains_nothing(played):
    setup, rollouts, trainings = played
    again = modes.play(setup, "ours")
    assert again.compiled == 0 and sampled(again) == sampled(rollouts["ours"])
    warm = modes.train(setup, "ours", again.trajectories, warm_up=True)
    assert warm.compiled == 0 and warm.loss == 0.0 and warm.rows == trainings["ours"].rows


def test_figures_and_ratios(played):
    setup, rollouts, trainings = played
    rows = {
        mode: bench.mode_row(
            mode,
            [modes.figures(rollouts[mode], trainings[mode], SETTINGS.slots)] * 2,
            modes.nominal_work(setup, rollouts[mode], trainings[mode]),
            Limits(1e9, 1e9),
        )
        for mode in modes.MODES
    }
    ours, fresh = rows["ours"], rows["lockstep-fresh"]
    assert ours["total_s"] == pytest.approx(ours["rollout_s"] + ours["train_s"])
    assert 0 < ours["busy"] <= 1 and 0 < ours["fill"] <= 1 and ours["rollout_gemm_fraction"] > 0
    ratios, lines = bench.judge(rows)
    assert ratios["lockstep-fresh"]["prefilled"] == fresh["prefilled_tokens"] / ours["prefilled_tokens"]
    assert len(lines) == 5 and all(line.endswith(("met", "MISSED")) for line in lines)
    json.dumps(rows)
    assert len(bench.table(list(rows.values()), bench.MODE_COLUMNS)) == 4


def test_a_row_that_is_too_short_for_the_script_is_refused():
    script = make_script(0, vocab_size=96, tasks=1)
    with pytest.raises(ValueError, match="row_length 64 is below the longest stream of the script"):
        modes.make_setup(CONFIG, script, modes.Settings(row_length=64), seed=0)


# --- cells, rounds, command line ---


def test_rounds_leave_the_warm_up_out_and_take_turns():
    calls, programs = [], {"a": 0, "b": 0}

    def cell(name):
        def run(repetition):
            calls.append((name, repetition))
            programs[name] += repetition != 1  # compiles in the warm-up, and again in the last repetition
            return 100.0 if repetition == 0 else float(repetition)

        return Cell(name, 50, 5, Work(1e9, 2e9), run, lambda: programs[name])

    cells = [cell("a"), cell("b")]
    limits = {"gemm_size": 16, "copy_floats": 16, "tries": 1}
    measured = bench.run_rounds(cells, None, (), 2, limits, Progress(6, stream=io.StringIO()))
    assert calls == [(name, repetition) for repetition in range(3) for name in "ab"]
    row = bench.cell_row(cells[0], measured.seconds["a"], programs["a"] - measured.compiled["a"], Limits(1e9, 4e9))
    assert row["seconds"] == [1.0, 2.0] and row["median_s"] == 1.5 and row["ms_per_step"] == 300
    assert row["tokens_per_s"] == pytest.approx(100 / 3) and row["compiled"] == 1
    assert row["gemm_fraction"] == pytest.approx(2 / 3) and row["copy_fraction"] == pytest.approx(1 / 3)


def test_the_command_measures_and_writes(tmp_path, capsys):
    out = tmp_path / "bench.json"
    arguments = ["--size", "tiny", "--cells", "decode", "train", "--reps", "1", "--out", str(out)]
    assert bench.main(arguments) == 0
    result = json.loads(out.read_text())
    assert [row["cell"] for row in result["cells"]] == ["decode", "train"]
    assert all(row["compiled"] == 0 and row["gemm_fraction"] > 0 for row in result["cells"])
    printed = capsys.readouterr().out
    assert "of GEMM" in printed and "limits:" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "XL"], "size 'XL'; accepted are tiny, small, S, M or all of V,D,L,H,K,hd,F as in V=4096,D=256"),
        (["--size", "V=8,D=8,L=1,H=3,K=2,hd=8,F=8"], "heads (3) must be a multiple of kv_heads (2)"),
        (["--reps", "0"], "--reps is 0; must be at least 1"),
        (["--out", "nowhere/bench.json"], "--out: nowhere: no such folder"),
        (["--cells", "none"], "--cells none needs a --sweep"),
        (["--micro-batch-rows", "3"], "--micro-batch-rows must divide 8"),
        (["--modes", "ours"], "--modes needs lockstep-fresh too"),
        (["--cells", "sing"], "argument --cells: invalid choice"),
    ],
)
def test_a_bad_argument_gets_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.parse_arguments(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1


def test_nominal_work_is_the_peers():
    config, count = bench.parse_size("S"), 16
    parameters, head, attention = parameter_count(config), 4096 * 256, 4 * 4 * 64
    rows, length, prompt, new = 8, 512, 128, 128
    assert train_work(config, [length] * rows).flops == (
        6 * parameters * rows * length + 6 * attention * rows * length**2
    )
    read = count * sum(range(prompt + 1, prompt + new))
    work = prefill_work(config, count, prompt) + decode_work(config, count * (new - 1), new - 1, read)
    assert work.flops == (
        2 * (parameters - head) * count * prompt
        + 2 * head * count
        + 2 * attention * count * prompt**2
        + (new - 1) * 2 * parameters * count
        + 4 * attention * read
    )


def test_a_profile_counts_operations_by_kind_and_nothing_that_holds_them():
    names = {"ynn_fusion.12": 5, "wrapped_scatter": 2, "copy.1": 1, "add_exponential_fusion.3": 4, "while.2": 50}
    names |= {"$python.py:3 f": 9, "ThunkExecutor::Execute": 70, "end: copy": 1}
    events = [{"ph": "X", "name": name, "dur": 1e6 * seconds} for name, seconds in names.items()]
    found = profile_cells.total_up([*events, events[0], {"ph": "M", "name": "copy"}], profile_cells.kind_of)
    assert found == {
        "products and reductions": (10, 2),
        "elementwise": (4, 1),
        "reads and writes at an index": (2, 1),
        "copies and transpositions": (1, 1),
    }


def test_the_profile_command_prints_every_cell(capsys):
    assert profile_cells.main(["--size", "tiny", "--cells", "decode", "train", "--top", "3"]) == 0
    printed = capsys.readouterr().out
    assert "decode at tiny" in printed and "train at tiny" in printed and printed.count("products and reductions") == 2
    assert printed.count(" ms  ") == 6

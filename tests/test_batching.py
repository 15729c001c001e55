"""Layouts of training rows: arrays worked by hand, a snapshot of one trajectory, and that no layout loses a token."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax import batching
from envace_jax.batching import deal_rows, make_batch, role_tokens
from envace_jax.types import Role, Segment, TrainBatch, Trajectory

IM_END, END_OF_TEXT = 8, 9


def segment(role, prompt, tokens, logprobs=None, **kwargs):
    logprobs = -0.5 * np.arange(1, len(tokens) + 1) if logprobs is None else logprobs
    arrays = np.array(prompt, np.int32), np.array(tokens, np.int32), np.array(logprobs, np.float32)
    return Segment(role, *arrays, finish_reason="stop", policy_version=0, **kwargs)


def trajectory(*segments, status="ok", task="t", group=0, attempt=0, reward=1.0):
    return Trajectory(task, group, attempt, tuple(segments), reward, status, "done")


def two_turn_trajectory():
    """ACT [1 2] -> 3 4 8; a rehearsal [1 5] -> 6 9; ACT continues after tokens 7 7 -> 2 8."""
    return trajectory(
        segment(Role.ACT, [1, 2], [3, 4, IM_END]),
        segment(Role.REHEARSE, [1, 5], [6, END_OF_TEXT]),
        segment(Role.ACT, [1, 2, 3, 4, IM_END, 7, 7], [2, IM_END]),
    )


ADVANTAGES = [np.array([0.5, -0.25, 0.75], np.float32)]


def table(batch, row):
    """One line per token of a row: what is predicted there, from which place, whether it is trained and how."""
    lines = []
    for t in range(batch.tokens.shape[1]):
        trained = batch.loss_mask[row, t]
        numbers = f"{batch.advantages[row, t]:+.2f} {batch.old_logprobs[row, t]:+.1f}"
        tail = f" {Role(int(batch.role[row, t])).name:8} {numbers}"
        lines.append(
            f"{batch.tokens[row, t]} seq {batch.sequence_ids[row, t]} pos {batch.positions[row, t]} "
            + ("train" + tail if trained else ".")
        )
    return "\n".join(lines)


def test_snapshot_of_one_packed_trajectory():
    batch, _ = make_batch([two_turn_trajectory()], ADVANTAGES, layout="packed", row_length=14, pad_id=END_OF_TEXT)
    expected = """
1 seq 1 pos 0 .
2 seq 1 pos 1 .
3 seq 1 pos 2 train ACT      +0.50 -0.5
4 seq 1 pos 3 train ACT      +0.50 -1.0
8 seq 1 pos 4 train ACT      +0.50 -1.5
7 seq 1 pos 5 .
7 seq 1 pos 6 .
2 seq 1 pos 7 train ACT      +0.75 -0.5
8 seq 1 pos 8 train ACT      +0.75 -1.0
1 seq 2 pos 0 .
5 seq 2 pos 1 .
6 seq 2 pos 2 train REHEARSE -0.25 -0.5
9 seq 2 pos 3 train REHEARSE -0.25 -1.0
9 seq 0 pos 0 ."""
    assert table(batch, 0) == expected.strip()  # both stop ids are trained; the pad, which equals one of them, is not


def test_the_segment_layout_repeats_the_context_and_trains_each_token_once():
    batch, stats = make_batch([two_turn_trajectory()], ADVANTAGES, layout="segment", row_length=9)
    np.testing.assert_array_equal(
        batch.tokens, [[1, 2, 3, 4, 8, 0, 0, 0, 0], [1, 5, 6, 9, 0, 0, 0, 0, 0], [1, 2, 3, 4, 8, 7, 7, 2, 8]]
    )
    np.testing.assert_array_equal(
        batch.loss_mask, np.array([[0, 0, 1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0, 0], [0] * 7 + [1, 1]], bool)
    )
    np.testing.assert_array_equal(batch.sequence_ids.max(1), [1, 1, 1])
    assert stats["trained_tokens_act"] == 5 and stats["trained_tokens_rehearse"] == 2
    assert stats["rows"] == 3 and stats["tokens"] == 18 and stats["fill"] == pytest.approx(18 / 27)


def test_a_segment_that_does_not_continue_its_stream_starts_another():
    changed = trajectory(
        segment(Role.ACT, [1, 2], [3, 8]),
        segment(Role.ACT, [1, 2, 4, 8, 7], [5, 8]),  # the third token differs from what was sampled
        segment(Role.ACT, [1, 2, 4, 8, 7, 5], [8]),  # shorter than the stream before it
    )
    batch, stats = make_batch([changed], [np.ones(3, np.float32)], layout="merged", row_length=8)
    assert stats["rows"] == 3
    np.testing.assert_array_equal(batch.loss_mask.sum(1), [2, 2, 1])


def test_rehearsals_that_continue_each_other_merge_and_roles_never_do():
    mixed = trajectory(
        segment(Role.REHEARSE, [1], [2]), segment(Role.ACT, [1, 2], [3]), segment(Role.REHEARSE, [1, 2, 4], [5])
    )
    batch, _ = make_batch([mixed], [np.array([1, 2, 3], np.float32)], layout="merged", row_length=4)
    np.testing.assert_array_equal(batch.tokens, [[1, 2, 4, 5], [1, 2, 3, 0]])
    np.testing.assert_array_equal(batch.advantages, [[0, 1, 0, 3], [0, 0, 2, 0]])


def test_packing_is_first_fit_decreasing():
    lengths = [3, 6, 4, 5, 2]  # rows of 8: [6, 2], [5, 3], [4]
    each = [trajectory(segment(Role.ACT, [n], [n] * (n - 1))) for n in lengths]
    batch, stats = make_batch(each, [np.zeros(1, np.float32)] * 5, layout="packed", row_length=8, rows_multiple=2)
    np.testing.assert_array_equal(batch.tokens, [[6] * 6 + [2] * 2, [5] * 5 + [3] * 3, [4] * 4 + [0] * 4, [0] * 8])
    np.testing.assert_array_equal(batch.sequence_ids[:3, [0, 7]], [[1, 2], [1, 2], [1, 0]])
    assert stats["rows"] == 4 and stats["sequences"] == 5 and stats["fill"] == 20 / 32
    options = {"layout": "packed", "row_length": 8, "rows_multiple": 2, "row_buckets": (2, 6)}
    wider, stats = make_batch(each, [np.zeros(1, np.float32)] * 5, **options)
    assert stats["rows"] == 6 and stats["filled_rows"] == 3
    np.testing.assert_array_equal(wider.tokens, np.concatenate([batch.tokens, np.zeros((2, 8), np.int32)]))


def test_failed_trajectories_are_left_out_and_an_empty_batch_is_allowed():
    failed = trajectory(segment(Role.ACT, [1], [2]), status="failed", reward=float("nan"))
    batch, stats = make_batch([failed], [np.zeros(1, np.float32)], row_length=4, rows_multiple=2, pad_id=3)
    assert not batch.loss_mask.any() and not batch.sequence_ids.any()
    assert batch.tokens.shape == (2, 4) and (batch.tokens == 3).all()
    assert stats["tokens"] == stats["trained_tokens_act"] == stats["trained_tokens_rehearse"] == 0
    assert make_batch([], [], row_length=4)[0].tokens.shape == (1, 4)


def test_streams_without_any_advantage_are_left_out_but_counted():
    even = trajectory(segment(Role.ACT, [1], [2, 3]), segment(Role.REHEARSE, [4], [5]), segment(Role.ACT, [6], [7]))
    advantages = [np.array([0, -0.0, 0], np.float32), np.array([0, 0, 0.75], np.float32)]
    attempts = [even, two_turn_trajectory()]
    options = {"layout": "segment", "row_length": 9}
    full, full_stats = make_batch(attempts, advantages, **options)
    batch, stats = make_batch(attempts, advantages, **options, drop_zero_advantage=True)
    assert full_stats["rows"] == 6 and full_stats["dropped_tokens"] == 0
    np.testing.assert_array_equal(batch.tokens, [[1, 2, 3, 4, 8, 7, 7, 2, 8]])
    assert stats["sequences"] == 1 and stats["tokens"] == 9 and stats["dropped_tokens"] == 3 + 2 + 2 + 5 + 4
    np.testing.assert_array_equal(role_tokens(stats), np.array([8, 3], np.float32))
    np.testing.assert_array_equal(role_tokens(stats), role_tokens(full_stats))
    # Merged, the act stream of the second trajectory has an advantage in its last segment, and so stays whole.
    merged, stats = make_batch(attempts, advantages, layout="merged", row_length=9, drop_zero_advantage=True)
    np.testing.assert_array_equal(merged.loss_mask.sum(1), [5])
    np.testing.assert_array_equal(role_tokens(stats), role_tokens(full_stats))


def test_dtypes_are_those_of_the_type():
    batch, _ = make_batch([two_turn_trajectory()], ADVANTAGES, row_length=16)
    for name in ("tokens", "positions", "sequence_ids", "role"):
        assert getattr(batch, name).dtype == np.int32
    assert batch.advantages.dtype == batch.old_logprobs.dtype == np.float32 and batch.loss_mask.dtype == bool


def test_bad_input_is_named():
    good = two_turn_trajectory()
    with pytest.raises(ValueError, match=r"task 't' attempt 0 segment 2 \(ACT\) has 7 prompt \+ 2 .*row_length"):
        make_batch([good], ADVANTAGES, row_length=8)
    with pytest.raises(ValueError, match="segment 0 .* empty prompt"):
        make_batch([trajectory(segment(Role.ACT, [], [1]))], [np.zeros(1)], row_length=8)
    with pytest.raises(ValueError, match="2 tokens but 1 log-prob"):
        make_batch([trajectory(segment(Role.ACT, [1], [1, 2], [0.0]))], [np.zeros(1)], row_length=8)
    with pytest.raises(ValueError, match="3 segments but 1 advantages"):
        make_batch([good], [np.zeros(1)], row_length=16)
    with pytest.raises(
        ValueError, match="unknown layout 'padded'; choose one of 'shared', 'packed', 'merged', 'segment'"
    ):
        make_batch([good], ADVANTAGES, row_length=16, layout="padded")


token_lists = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@st.composite
def trajectories(draw):
    """Act segments that sometimes continue the stream and sometimes do not, rehearsals between them."""
    segments, stream = [], draw(token_lists)
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            segments.append(segment(Role.REHEARSE, draw(token_lists), draw(token_lists)))
        prompt = stream if draw(st.integers(0, 3)) else draw(token_lists)
        tokens = draw(token_lists)
        logprobs = draw(st.lists(st.floats(-5, 0, width=32), min_size=len(tokens), max_size=len(tokens)))
        segments.append(segment(Role.ACT, prompt, tokens, logprobs))
        stream = [*prompt, *tokens, *draw(st.lists(st.integers(0, 5), max_size=3))]
    return trajectory(*segments, status=draw(st.sampled_from(["ok", "ok", "failed"])))


@settings(max_examples=60, deadline=None)
@given(st.lists(trajectories(), max_size=5), st.data())
def test_every_layout_trains_the_same_tokens_after_the_same_context(attempts, data):
    values = [
        np.array(data.draw(st.lists(st.floats(-1, 1, width=32), min_size=n, max_size=n)), np.float32)
        for n in (len(t.segments) for t in attempts)
    ]

    def trained(layout):
        """Multiset of (context, token, advantage, log-probability, role) of the trained tokens."""
        batch, _ = make_batch(attempts, values, layout=layout, row_length=80, rows_multiple=3)
        found = Counter()
        for r, t in zip(*np.nonzero(batch.loss_mask), strict=True):
            own, ids = batch.sequence_ids[r, t], batch.sequence_ids[r, :t]
            assert ids[-1] == own  # the place that predicts the token is its own sequence's
            last = ids if batch.last_readers is None else batch.last_readers[r, :t]
            before = (ids <= own) & (own <= last)
            context = tuple(batch.tokens[r, :t][before])
            assert len(context) == batch.positions[r, t] > 0
            fields = batch.tokens, batch.advantages, batch.old_logprobs, batch.role
            found[context, *(field[r, t].item() for field in fields)] += 1
        return found

    expected = Counter()
    for one, advantages in zip(attempts, values, strict=True):
        for s, advantage in zip(one.segments if one.status == "ok" else (), advantages, strict=one.status == "ok"):
            for i, (token, logprob) in enumerate(zip(s.tokens.tolist(), s.logprobs.tolist(), strict=True)):
                context = (*s.prompt_tokens.tolist(), *s.tokens[:i].tolist())
                expected[context, token, float(advantage), logprob, int(s.role)] += 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "LEAST_SHARED", 1)
        for layout in ("segment", "merged", "packed", "shared"):
            assert trained(layout) == expected


def test_a_shared_beginning_stands_once_and_only_what_is_not_trained_is_shared():
    """Two attempts that sampled the same first token, one more task, and a row that must hold a whole bundle."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    attempts = [trajectory(segment(Role.ACT, prompt, tokens), attempt=i) for i, tokens in enumerate([[4, 5], [4, 6]])]
    attempts.append(trajectory(segment(Role.REHEARSE, [7, 7], [1])))
    values = [np.ones(1, np.float32)] * 3
    batch, stats = make_batch(attempts, values, layout="shared", row_length=18)
    assert stats["shared_tokens"] == 9 and stats["tokens"] == 9 + 3 + 3 + 3 and stats["sequences"] == 3
    assert batch.sequence_ids[0].tolist() == [1] * 12 + [2] * 3 + [3] * 3
    assert batch.last_readers[0].tolist() == [2] * 9 + [1] * 3 + [2] * 3 + [3] * 3
    assert batch.positions[0].tolist() == [*range(9), 9, 10, 11, 9, 10, 11, 0, 1, 2]
    assert batch.tokens[0].tolist() == [*prompt[:9], 3, 4, 5, 3, 4, 6, 7, 7, 1]
    assert np.flatnonzero(batch.loss_mask[0]).tolist() == [10, 11, 13, 14, 17]
    apart, stats = make_batch(attempts, values, layout="shared", row_length=14)  # the two together are one too many
    assert stats["shared_tokens"] == 0 and np.array_equal(apart.last_readers, apart.sequence_ids)


def test_streams_share_a_tree_of_beginnings():
    """One task's prompt, two histories that begin with it, and two attempts at the second: three levels."""
    task, history = [1] * 8, [2] * 8
    prompts = [[*task, 9], [*task, *history, 7], [*task, *history, 8], [*task, *history, 8], [3, 3]]
    attempts = [trajectory(segment(Role.ACT, prompt, [5]), attempt=i) for i, prompt in enumerate(prompts)]
    batch, stats = make_batch(attempts, [np.ones(1, np.float32)] * 5, layout="shared", row_length=32)
    # In order: task + history + 7, 8 twice (the last prompt token predicts, so it is each one's own), 9, and 3 3.
    assert stats["rows"] == 1 and stats["tokens"] == 18 + 2 + 2 + 2 + 3
    assert batch.sequence_ids[0].tolist() == [1] * 18 + [2] * 2 + [3] * 2 + [4] * 2 + [5] * 3 + [0] * 5
    shared = [4] * 8 + [3] * 8
    assert batch.last_readers[0].tolist() == shared + [1] * 2 + [2] * 2 + [3] * 2 + [4] * 2 + [5] * 3 + [0] * 5


def test_what_one_stream_trains_another_may_read():
    """A rehearsal whose prompt holds a call that was sampled after the same beginning."""
    prompt = list(range(8))
    act = segment(Role.ACT, prompt, [5, 6])
    rehearsal = segment(Role.REHEARSE, [*prompt, 5, 6, 9], [7])
    batch, stats = make_batch([trajectory(act, rehearsal)], [np.ones(2)], layout="shared", row_length=16)
    assert batch.tokens[0, :12].tolist() == [*prompt, 5, 6, 9, 7] and stats["tokens"] == 12
    assert np.flatnonzero(batch.loss_mask[0]).tolist() == [8, 9, 11]
    assert batch.last_readers[0].tolist() == [2] * 12 + [0] * 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=9), min_size=1, max_size=6), st.integers(10, 30))
def test_bundles_hold_the_fewest_tokens_of_all_cuts(prompts, limit):
    """Against every way to cut the sorted streams into runs, each costing the nodes of its tree of beginnings."""
    ordered = sorted([*prompt, 5] for prompt in prompts)

    def cost(run):
        nodes = {tuple(tokens[: end + 1]) for tokens in run for end in range(len(tokens) - 2)}
        whole = len(nodes) + 2 * len(run)  # the last prompt token and the sampled one are each one's own
        return whole if len(run) == 1 or whole <= limit else float("inf")

    def cheapest(streams):
        ends = range(1, len(streams) + 1)
        return min((cost(streams[:end]) + cheapest(streams[end:]) for end in ends), default=0)

    streams = [batching.Stream([(segment(Role.ACT, tokens[:-1], [5]), 1.0)], [0]) for tokens in ordered]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "LEAST_SHARED", 1)
        bundles = batching._bundle(streams, batching._shared_with_previous(streams), limit)
    assert [tokens for bundle in bundles for tokens in (s.tokens.tolist() for s in bundle.streams)] == ordered
    assert sum(map(len, bundles)) == cheapest(ordered)


def test_a_tree_is_cut_where_a_row_is_full_when_that_saves_a_row():
    """Three tasks of three attempts, 8 shared and 8 own tokens each: a bundle of 32 leaves 24 places of a row."""
    attempts = [
        trajectory(segment(Role.ACT, [task] * 8 + [attempt], [5] * 7), attempt=attempt)
        for task in (1, 2, 3)
        for attempt in range(3)
    ]
    _, stats = make_batch(attempts, [np.ones(1)] * len(attempts), layout="shared", row_length=56)
    # Whole bundles: three rows. In order: 32 + 24, then the third attempt at the second task, 16, + 32.
    assert stats["rows"] == 2 and stats["tokens"] == 32 + 24 + 16 + 32


def test_whole_trees_are_packed_longest_first_when_that_saves_a_row():
    """In order 10 + 10, 6 + 6 tokens would take three rows of 16. Seven common tokens are too few to share."""
    prompts = [[1] * 9, [2] * 9, [3] * 5, [4] * 5]
    attempts = [trajectory(segment(Role.ACT, prompt, [7])) for prompt in prompts]
    assert make_batch(attempts, [np.ones(1)] * 4, layout="shared", row_length=16)[1]["rows"] == 2
    alike = [trajectory(segment(Role.ACT, [1] * 7 + [end, end], [7])) for end in (2, 3)]
    assert make_batch(alike, [np.ones(1)] * 2, layout="shared", row_length=32)[1]["shared_tokens"] == 0


def test_rows_are_dealt_to_shards_in_turn_and_empty_ones_come_last():
    rows = np.arange(1, 9, dtype=np.int32)[:, None] * np.ones(3, np.int32)
    rows[6:] = 0  # two rows of padding
    batch = TrainBatch(*[rows] * 7)
    assert deal_rows(batch, 2).tokens[:, 0].tolist() == [1, 3, 5, 0, 2, 4, 6, 0]
    assert deal_rows(batch, 1).tokens[:, 0].tolist() == rows[:, 0].tolist()

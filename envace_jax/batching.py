"""Segments of trajectories as fixed-shape training rows, in one of four layouts.

Host numpy only, deterministic. The layout cannot change the objective: every sampled token appears once, with its
segment's advantage and log-probability, after exactly the tokens that the policy saw. Knows token ids but not what
they mean; knows no reward and no model.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from envace_jax.buckets import train_rows
from envace_jax.grpo import ROLES, check_name
from envace_jax.types import Role, Segment, TrainBatch, Trajectory

LAYOUTS = ("shared", "packed", "merged", "segment")
LEAST_SHARED = 8  # tokens; a shorter beginning is not worth a bond between two streams


@dataclasses.dataclass
class Stream:
    """One causal sequence of tokens: the prompt and completion of its last segment, which extends all before it."""

    parts: list[tuple[Segment, float]]  # segments in order, each with its advantage
    places: list[int]  # of the segments in their trajectory

    @property
    def teaches(self) -> bool:
        """Whether any segment has an advantage."""
        return any(advantage for _, advantage in self.parts)

    @property
    def tokens(self) -> np.ndarray:
        last = self.parts[-1][0]
        return np.concatenate([last.prompt_tokens, last.tokens])

    def __len__(self) -> int:
        last = self.parts[-1][0]
        return len(last.prompt_tokens) + len(last.tokens)


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Streams of one row, each of which begins with `shared` tokens of the one before it, which stand there once.

    The first shares 0. A stream trains none of the tokens that it shares; the one before it may.
    """

    streams: tuple[Stream, ...]
    shared: tuple[int, ...]

    def __len__(self) -> int:
        return sum(map(len, self.streams)) - sum(self.shared)


def make_batch(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[np.ndarray],
    *,
    layout: str = "packed",
    row_length: int,
    rows_multiple: int = 1,
    row_buckets: Sequence[int] = (),
    pad_id: int = 0,
    drop_zero_advantage: bool = False,
) -> tuple[TrainBatch, dict[str, float]]:
    """Lays the segments of all trajectories that did not fail out in rows of `row_length` tokens.

    Layouts: `"segment"` has a row per segment. `"merged"` has a row per stream: a segment whose prompt begins with
    all tokens of the trajectory's previous segment in the same role, and goes on, continues that row. `"packed"` puts
    several merged streams into one row, longest first, each into the first row with room. `"shared"` packs too, and
    streams that begin alike (attempts at one task, results rehearsed from one history) have that beginning once, in the
    first of them, and the others continue it (`last_readers`): a tree of streams. Longer rows hold more of a tree.

    Args:
      trajectories: may be empty, and all may have failed: then no token is trained.
      advantages: f32[number of segments] per trajectory, as `grpo.role_advantages` gives them.
      row_length: T, the same for every batch, so that one compiled program serves all.
      rows_multiple: the number of rows is padded with empty ones to a multiple of this, as `buckets.train_rows` says.
      row_buckets: numbers of rows (ascending) that it is padded to as long as they suffice.
      pad_id: fills unused places; the trainer never sees it (sequence id 0).
      drop_zero_advantage: leaves out the streams whose segments all have advantage 0 (groups whose attempts were
        rewarded alike): a loss without a KL term learns nothing from them. The loss must still be divided by their
        tokens, so give the train step `role_tokens` of the returned statistics.

    Returns:
      A `TrainBatch` of numpy arrays [B, row_length], and a dict of plain floats: `rows` (B), `filled_rows`,
      `sequences`, `tokens` (without padding), `fill` (their share of the batch), `shared_tokens` (that shared
      beginnings saved), `dropped_tokens` (of the streams left out), and, with what was left out, `trained_tokens_act`
      and `trained_tokens_rehearse`.

    Raises:
      ValueError: an unknown layout, a segment without prompt or of unequal array lengths, or one that is too long;
        the message names the trajectory and segment and what to set.
    """
    check_name("layout", layout, LAYOUTS)
    if row_length < 1 or rows_multiple < 1:
        raise ValueError(f"row_length {row_length} and rows_multiple {rows_multiple} must be at least 1")
    streams: list[Stream] = []
    for trajectory, values in zip(trajectories, advantages, strict=True):
        _check(trajectory, values, row_length)
        if trajectory.status == "ok":
            streams += _streams(trajectory, values, merge=layout != "segment")
    stats = {f"trained_tokens_{role.name.lower()}": float(_sampled(streams, role)) for role in ROLES}
    before = sum(map(len, streams))
    if drop_zero_advantage:
        streams = [stream for stream in streams if stream.teaches]
    kept = sum(map(len, streams))
    if layout == "shared":
        rows = _pack_shared(streams, row_length)
    else:
        bundles = [Bundle((stream,), (0,)) for stream in streams]
        rows = _pack(bundles, row_length) if layout == "packed" else [[bundle] for bundle in bundles]
    batch = _fill(rows, row_length, train_rows(len(rows), rows_multiple, row_buckets), pad_id, layout == "shared")
    tokens = sum(len(bundle) for row in rows for bundle in row)
    stats |= {
        "rows": float(batch.tokens.shape[0]),
        "filled_rows": float(len(rows)),
        "sequences": float(len(streams)),
        "tokens": float(tokens),
        "fill": tokens / batch.tokens.size,
        "shared_tokens": float(kept - tokens),
        "dropped_tokens": float(before - kept),
    }
    return batch, stats


def segments_trained(
    trajectories: Sequence[Trajectory], advantages: Sequence[np.ndarray], *, layout: str, drop_zero_advantage: bool
) -> list[np.ndarray]:
    """bool[segments] of each trajectory: whether `make_batch` has the segment's tokens in the loss mask."""
    found = [np.zeros(len(trajectory.segments), bool) for trajectory in trajectories]
    for trajectory, values, trained in zip(trajectories, advantages, found, strict=True):
        for stream in _streams(trajectory, values, merge=layout != "segment") if trajectory.status == "ok" else ():
            trained[stream.places] = stream.teaches or not drop_zero_advantage
    return found


def role_tokens(stats: Mapping[str, float]) -> np.ndarray:
    """f32[number of roles]: trained tokens of each role, dropped ones included, from the statistics of `make_batch`."""
    return np.array([stats[f"trained_tokens_{role.name.lower()}"] for role in ROLES], np.float32)


def deal_rows(batch: TrainBatch, shards: int) -> TrainBatch:
    """The same rows (numpy, a multiple of `shards`), dealt in turn to `shards` equal parts of the batch.

    Every part gets as many filled rows as any other, and the empty ones last; one part changes nothing.
    """
    return jax.tree.map(lambda x: x.reshape(-1, shards, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape), batch)


def _check(trajectory: Trajectory, values: np.ndarray, row_length: int) -> None:
    where = f"task {trajectory.task_id!r} attempt {trajectory.attempt}"
    if len(values) != len(trajectory.segments):
        raise ValueError(f"{where} has {len(trajectory.segments)} segments but {len(values)} advantages")
    if trajectory.status != "ok":
        return
    for index, segment in enumerate(trajectory.segments):
        here = f"{where} segment {index} ({Role(segment.role).name})"
        prompt, completion = len(segment.prompt_tokens), len(segment.tokens)
        if prompt == 0:
            raise ValueError(f"{here} has an empty prompt, so its first token has nothing to be predicted from")
        if len(segment.logprobs) != completion:
            raise ValueError(f"{here} has {completion} tokens but {len(segment.logprobs)} log-probabilities")
        if prompt + completion > row_length:
            raise ValueError(
                f"{here} has {prompt} prompt + {completion} sampled = {prompt + completion} tokens, more than a row of "
                f"row_length={row_length}; set batch.row_length to at least {prompt + completion}, or lower the "
                "prompt and response limits"
            )


def _streams(trajectory: Trajectory, values: np.ndarray, merge: bool) -> list[Stream]:
    """The trajectory's streams in order of their first segment; each role continues only its own last stream."""
    streams: list[Stream] = []
    last: dict[Role, Stream] = {}
    for place, (segment, value) in enumerate(zip(trajectory.segments, values, strict=True)):
        open_stream = last.get(segment.role)
        if merge and open_stream is not None and _continues(open_stream, segment):
            open_stream.parts.append((segment, float(value)))
            open_stream.places.append(place)
            continue
        stream = Stream([(segment, float(value))], [place])
        streams.append(stream)
        last[segment.role] = stream
    return streams


def _continues(stream: Stream, segment: Segment) -> bool:
    """Whether the prompt is every token of the stream and more: array comparison, nothing is decoded.

    Without the more, two segments would touch in a row, and could not be told apart there (`TrainBatch.loss_mask`).
    """
    length = len(stream)
    return len(segment.prompt_tokens) > length and np.array_equal(segment.prompt_tokens[:length], stream.tokens)


def _sampled(streams: list[Stream], role: Role) -> int:
    """Tokens that the policy sampled in a role."""
    return sum(len(segment.tokens) for stream in streams for segment, _ in stream.parts if segment.role == role)


def _pack_shared(streams: list[Stream], row_length: int) -> list[list[Bundle]]:
    """The better of two packings: whole bundles, longest first, or the streams in order, cut where a row is full.

    In lexicographic order streams that begin alike are neighbours, and what each shares with all before it, it shares
    with the one before it. Fewer rows are better, then fewer tokens.
    """
    ordered = sorted(streams, key=lambda stream: stream.tokens.astype(">i4").tobytes())  # equals keep their order
    shared = _shared_with_previous(ordered)
    whole = _pack(_bundle(ordered, shared, row_length), row_length)
    in_order = [[bundle] for bundle in _cut(ordered, shared, _full_rows(ordered, shared, row_length))]
    return min(whole, in_order, key=lambda rows: (len(rows), sum(len(bundle) for row in rows for bundle in row)))


def _full_rows(ordered: list[Stream], shared: list[int], row_length: int) -> list[int]:
    """Where each row begins when it takes the next streams in order for as long as they fit."""
    begins: list[int] = []
    room = 0
    for index, stream in enumerate(ordered):
        room -= len(stream) - shared[index]
        if room < 0 or not begins:
            begins.append(index)
            room = row_length - len(stream)
    return begins


def _cut(ordered: list[Stream], shared: list[int], begins: list[int]) -> list[Bundle]:
    """The bundles that begin at these places of the order."""
    return [
        Bundle(tuple(ordered[begin:end]), (0, *shared[begin + 1 : end]))
        for begin, end in itertools.pairwise([*begins, len(ordered)])
    ]


def _shared_with_previous(ordered: list[Stream]) -> list[int]:
    """How many tokens each stream shares with the one before it and does not train."""
    shared = [0] * len(ordered)
    for index in range(1, len(ordered)):
        # The token before the first trained one predicts it, so it must be a stream's own.
        untrained = len(ordered[index].parts[0][0].prompt_tokens) - 1
        common = min(_common(ordered[index - 1].tokens, ordered[index].tokens), untrained)
        shared[index] = common if common >= LEAST_SHARED else 0
    return shared


def _bundle(ordered: list[Stream], shared: list[int], limit: int) -> list[Bundle]:
    """The streams cut into runs of the least tokens in all, each no longer than `limit`, and of those the shortest.

    A shortest path over the places to cut: a run costs its streams' tokens less what each shares with the one before.
    """
    sizes = list(map(len, ordered))
    best, cuts = [0], [0]  # of the first n streams: tokens, and where the last run begins
    for end in range(1, len(ordered) + 1):
        cost, found = 0, (best[end - 1] + sizes[end - 1], end - 1)
        for begin in range(end - 1, -1, -1):
            cost += sizes[begin]
            if cost > limit:
                break
            if best[begin] + cost < found[0]:
                found = (best[begin] + cost, begin)
            cost -= shared[begin]
        best.append(found[0])
        cuts.append(found[1])
    begins, end = [], len(ordered)
    while end:
        end = cuts[end]
        begins.append(end)
    return _cut(ordered, shared, begins[::-1])


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens that both begin with."""
    size = min(len(one), len(other))
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size


def _pack(bundles: list[Bundle], row_length: int) -> list[list[Bundle]]:
    """First-fit decreasing; bundles of one length keep their order, so the result is deterministic."""
    rows: list[list[Bundle]] = []
    room: list[int] = []
    for bundle in sorted(bundles, key=len, reverse=True):
        length = len(bundle)
        row = next((i for i, left in enumerate(room) if left >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_length)
        rows[row].append(bundle)
        room[row] -= length
    return rows


def _fill(rows: list[list[Bundle]], row_length: int, count: int, pad_id: int, shared: bool) -> TrainBatch:
    """Writes every stream into its place of preallocated arrays [count, row_length]."""
    shape = (count, row_length)
    tokens = np.full(shape, pad_id, np.int32)
    positions, sequence_ids, role, last_readers = (np.zeros(shape, np.int32) for _ in range(4))
    loss_mask = np.zeros(shape, bool)
    advantages, old_logprobs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for r, bundles in enumerate(rows):
        start, number = 0, 0
        for bundle in bundles:
            for index, (stream, first) in enumerate(zip(bundle.streams, bundle.shared, strict=True)):
                number += 1
                here = slice(start, start + len(stream) - first)
                tokens[r, here] = stream.tokens[first:]
                positions[r, here] = np.arange(first, len(stream))
                sequence_ids[r, here] = last_readers[r, here] = number
                for later, depth in _readers(bundle.shared, index):
                    last_readers[r, start : start + depth - first] = number + later
                for segment, advantage in stream.parts:
                    at = start + len(segment.prompt_tokens) - first
                    own = slice(at, at + len(segment.tokens))
                    loss_mask[r, own] = True
                    advantages[r, own] = advantage
                    old_logprobs[r, own] = segment.logprobs
                    role[r, own] = segment.role
                start = here.stop
    # The fields are annotated as device arrays; on the host they are numpy until the caller moves them in one copy.
    arrays: list[Any] = [tokens, positions, sequence_ids, loss_mask, advantages, old_logprobs, role]
    return TrainBatch(*arrays, *([last_readers] if shared else []))


def _readers(shared: tuple[int, ...], index: int) -> Iterator[tuple[int, int]]:
    """(how many streams later, down to which position) for the streams that read what stream `index` adds."""
    depth = shared[index + 1] if index + 1 < len(shared) else 0
    for later, own in enumerate(shared[index + 1 :], start=1):
        depth = min(depth, own)
        if depth <= shared[index]:
            return
        yield later, depth

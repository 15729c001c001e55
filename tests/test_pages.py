"""Pages hold what their rows were promised, whatever is shared, cut, dropped and written in between."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envace_jax.pages import NOWHERE, Pages


class Device:
    """What a device would hold: written as `paged_attention` does, the beginning of a page copied first."""

    def __init__(self, pages: Pages, rows: int, count: int, parts: int):
        self.pages, self.size = pages, pages.page_size
        self.memory = np.full((parts, count // parts, self.size), -1)
        self.part = [row * parts // rows for row in range(rows)]

    def write(self, row: int, tokens: list[int]) -> None:
        start = self.pages.cached(row)
        memory, numbers = self.memory[self.part[row]], self.pages.numbers(row, 100)
        head, offset, index = self.pages.head(row), start % self.size, start // self.size
        begun = memory[head][:offset].tolist() if offset else []
        new = begun + tokens
        for step in range(0, len(new), self.size):
            piece = new[step : step + self.size]
            assert numbers[index + step // self.size] != NOWHERE
            memory[numbers[index + step // self.size]][:] = piece + [-1] * (self.size - len(piece))  # the rest is lost
        self.pages.written(row, start + len(tokens))

    def read(self, row: int) -> list[int]:
        memory, cached = self.memory[self.part[row]], self.pages.cached(row)
        numbers = self.pages.numbers(row, 100)
        assert (numbers >= 0).sum() * self.size >= cached
        return memory[numbers[numbers >= 0]].reshape(-1)[:cached].tolist()


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_every_row_holds_its_tokens_at_any_time(data):
    parts = data.draw(st.sampled_from([1, 2]))
    size, rows = data.draw(st.integers(1, 5)), parts * data.draw(st.integers(1, 4))
    count = parts * data.draw(st.integers(1, 12))
    pages = Pages(rows, count, parts, size)
    device = Device(pages, rows, count, parts)
    held: list[list[int]] = [[] for _ in range(rows)]
    fresh = iter(range(10**6))
    for _ in range(data.draw(st.integers(1, 25))):
        row = data.draw(st.integers(0, rows - 1))
        if data.draw(st.integers(0, 4)) == 0:
            pages.drop(row)
            held[row] = []
        else:
            others = [other for other in range(rows) if device.part[other] == device.part[row]]
            source = data.draw(st.sampled_from(others))
            wanted = data.draw(st.integers(0, len(held[source]) + 2))
            shared = pages.begin(row, source, wanted)
            assert shared == min(wanted, len(held[source]))
            held[row] = held[source][:shared]
            for piece in data.draw(st.lists(st.integers(1, 7), max_size=3)):
                tokens = [next(fresh) for _ in range(piece)]
                free, missing = pages.free(device.part[row]), pages.missing(row, len(held[row]) + piece)
                given = pages.reserve(row, len(held[row]) + piece)
                assert given == (missing <= free) and pages.free(device.part[row]) == free - (missing if given else 0)
                if given:
                    device.write(row, tokens)
                    held[row] = held[row] + tokens
            if pages._rows[row].copied >= 0:  # nothing was written: as if it waited, and lost its pages again
                pages.drop(row)
                held[row] = []
        for other in range(rows):
            assert device.read(other) == held[other]
        for part in range(parts):
            here = [other for other in range(rows) if device.part[other] == part]
            assert pages.distinct(here) + pages.free(part) == count // parts  # none is lost
    for row in range(rows):
        pages.drop(row)
    assert [pages.free(part) for part in range(parts)] == [count // parts] * parts


def test_whole_pages_are_shared_and_the_last_one_copied():
    pages = Pages(3, 20, 1, 4)
    pages.begin(0, 0, 0)
    assert pages.reserve(0, 11) and pages.free(0) == 17
    pages.written(0, 11)
    assert pages.begin(1, 0, 10) == 10
    assert pages.numbers(1, 3).tolist() == [*pages.numbers(0, 3)[:2], NOWHERE]
    assert pages.head(1) == pages.numbers(0, 3)[2]  # to be copied from
    assert pages.reserve(1, 12) and pages.free(0) == 16
    assert pages.numbers(1, 3)[2] not in pages.numbers(0, 3)
    pages.drop(0)
    assert pages.free(0) == 16  # row 1 has two of them, and the third is yet to be copied
    pages.written(1, 12)
    assert pages.free(0) == 17 and not pages.alone(0) and pages.alone(1)


def test_a_row_cut_inside_a_page_that_another_has_leaves_it_alone():
    pages = Pages(2, 20, 1, 4)
    pages.begin(0, 0, 0), pages.reserve(0, 8), pages.written(0, 8)
    pages.begin(1, 0, 8), pages.reserve(1, 9), pages.written(1, 9)
    assert pages.begin(0, 0, 6) == 6 and pages.reserve(0, 8)
    assert pages.numbers(0, 2)[0] == pages.numbers(1, 3)[0] and pages.numbers(0, 2)[1] != pages.numbers(1, 3)[1]
    assert pages.begin(1, 1, 6) == 6
    assert pages.numbers(1, 2)[1] == NOWHERE  # row 0 has not copied it yet
    pages.written(0, 8)
    assert pages.begin(0, 0, 6) == 6 and pages.numbers(0, 2)[1] != NOWHERE  # its own, and kept in place


def test_rows_of_two_parts_share_nothing():
    with pytest.raises(AssertionError, match="two parts"):
        Pages(2, 4, 2, 4).begin(0, 1, 0)

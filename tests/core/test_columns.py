from __future__ import annotations

import pytest
import torch
from torch import Tensor

from holdfast.core.columns import ALIGNED, PIECES, Columns, OneRank, current, edges_of, sharing
from holdfast.core.keys import Key
from holdfast.core.types import Uplink
from tests.thread_ranks import ThreadRanks, on_ranks

SIZES = [0, 1, 63, 64, 65, 1000, ALIGNED * PIECES, ALIGNED * PIECES + 1, 156_810]


@pytest.mark.parametrize("total", SIZES)
def test_pieces_are_aligned_few_and_the_same_for_any_number_of_ranks(total: int) -> None:
    edges = edges_of(total)
    assert edges[-1] == total and len(edges) - 1 <= PIECES and list(edges) == sorted(set(edges))
    assert all(edge % ALIGNED == 0 for edge in edges[:-1])
    for count in (1, 2, 3, 5, 70):
        parts = [Columns(total, ThreadRanks(rank, count, None, [])) for rank in range(count)]  # type: ignore[arg-type]
        own = [part.of_rank(part.ranks.rank) for part in parts]
        assert [s.start for s in own] == [0, *(s.stop for s in own[:-1])] and own[-1].stop == total
        cut = [
            (s.start + piece.start, s.start + piece.stop)
            for s, part in zip(own, parts, strict=True)
            for piece in part.pieces()
        ]
        assert cut == list(zip(edges, edges[1:], strict=False))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("d", [0, 40, 300])
def test_rows_become_columns_and_whole_again(count: int, d: int) -> None:
    x = Key(1).normal(7, d)
    owners = torch.tensor([1, 0, 0, 2, 1, 0, 2]) % count

    def work(ranks: ThreadRanks) -> tuple[Tensor, Tensor, Uplink]:
        columns = Columns(d, ranks)
        mine = columns.of_rows(x[owners == ranks.rank], owners)
        assert torch.equal(mine, columns.mine(x))
        up = Uplink(torch.arange(7), {"update": mine, "count": torch.ones(7)}, columns=columns)
        assert up.bytes_up().tolist() == [4 * d + 4] * 7
        return columns.whole(mine), columns.whole(mine[0]), up.only(torch.tensor([2, 3])).whole()

    for rows, row, up in on_ranks(count, work):
        assert torch.equal(rows, x) and torch.equal(row, x[0])
        assert torch.equal(up["update"], x[2:4]) and up.columns is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_over_pieces_has_the_same_bits_for_any_number_of_ranks(dtype: torch.dtype) -> None:
    x = Key(1).normal(5000, dtype=dtype) * torch.logspace(-8, 8, 5000).to(dtype)

    def work(columns: Columns) -> Tensor:
        mine = columns.mine(x)
        return columns.add_up(x.new_zeros(()), [mine[piece].sum() for piece in columns.pieces()])

    alone = work(Columns(5000, OneRank()))
    for count in (1, 2, 3, 64):
        assert all(torch.equal(alone, each) for each in on_ranks(count, lambda r: work(Columns(5000, r))))
    torch.testing.assert_close(alone, x.sum(), rtol=1e-5, atol=0)


def test_columns_are_shared_inside_only() -> None:
    columns = Columns(3, OneRank())
    assert current() is None
    with sharing(columns):
        assert current() is columns
        with sharing(None):
            assert current() is None
        assert current() is columns
    assert current() is None


def test_one_rank_has_everything() -> None:
    x, columns = Key(1).normal(3, 100), Columns(100, OneRank())
    assert torch.equal(columns.mine(x), x) and torch.equal(columns.whole(x), x)
    assert torch.equal(columns.of_rows(x, torch.zeros(3, dtype=torch.int64)), x)
    assert columns.ranks.agree({"a": 1}) == [{"a": 1}]


def test_a_rank_that_fails_ends_the_others() -> None:
    def work(ranks: ThreadRanks) -> None:
        if ranks.rank == 1:
            raise ValueError("rank 1 fails")
        ranks.gather(torch.ones(1))

    with pytest.raises(ValueError, match="rank 1 fails"):
        on_ranks(3, work)

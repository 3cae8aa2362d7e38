from __future__ import annotations

import hashlib
import math

import pytest
import torch

from holdfast.core.keys import Key, combine, mix, to_uniform


def splitmix64(x: int) -> int:
    """The published finaliser, on Python's own integers."""
    mask = 2**64 - 1
    x &= mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def signed(x: int) -> int:
    x %= 2**64
    return x - 2**64 if x >= 2**63 else x


@pytest.mark.parametrize("x", [0, 1, -1, 12345678901234567, -(2**63), 2**63 - 1])
def test_mix_is_splitmix64(x: int) -> None:
    assert int(mix(torch.tensor(x))) == signed(splitmix64(x))


def test_combine_by_hand() -> None:
    expected = splitmix64(7 * 3 + splitmix64(5 + 0x9E3779B97F4A7C15))
    assert int(combine(torch.tensor(7), torch.tensor(5))) == signed(expected)


def test_text_is_hashed_and_mixed_in() -> None:
    """Published results depend on these numbers: they never change."""
    a = int.from_bytes(hashlib.blake2b(b"a", digest_size=8).digest(), "little")
    assert int(Key(42).fold("a").bits) == signed(splitmix64(42 * 3 + splitmix64(a + 0x9E3779B97F4A7C15)))
    assert int(Key(42).fold("a", 3).bits) == int(Key(42).fold("a").fold(3).bits)


def test_order_of_calls_does_not_matter() -> None:
    key = Key(1)
    first = key.fold("a").uniform(4), key.fold("b").uniform(4)
    second = key.fold("b").uniform(4), key.fold("a").uniform(4)
    assert torch.equal(first[0], second[1]) and torch.equal(first[1], second[0])


def test_order_of_parts_matters() -> None:
    assert int(Key(0).fold(1, 2).bits) != int(Key(0).fold(2, 1).bits)
    assert int(Key(0).fold("a", "b").bits) != int(Key(0).fold("b", "a").bits)
    assert int(Key(0).fold("ab").bits) != int(Key(0).fold("a", "b").bits)


def test_text_and_numbers_are_different_names() -> None:
    assert int(Key(0).fold("1").bits) != int(Key(0).fold(1).bits)
    assert int(Key(0).fold("").bits) != int(Key(0).bits)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 - 1])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    assert 0 <= Key(seed).fold("x").seed() < 2**63
    assert int(Key(2**64 - 1).bits) == int(Key(-1).bits)


def test_a_row_of_a_stack_draws_what_it_draws_alone() -> None:
    ids = torch.tensor([3, 7, 1000, -1])
    stack = Key(5).fold("client").fold(ids)
    assert len(stack) == 4
    for place, client in enumerate(ids.tolist()):
        alone = Key(5).fold("client", client)
        assert int(stack.bits[place]) == int(alone.bits)
        assert torch.equal(stack.uniform(2, 3)[place], alone.uniform(2, 3))
        assert torch.equal(stack.normal(2, 3)[place], alone.normal(2, 3))
        assert torch.equal(stack[torch.tensor([place])].hash(4)[0], alone.hash(4))


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    assert torch.equal(Key(3).uniform(10)[:4], Key(3).uniform(4))


def test_a_repeated_key_draws_the_same_numbers() -> None:
    assert (
        Key(0).fold(torch.arange(3)).repeat(2).bits.tolist()
        == Key(0).fold(torch.tensor([0, 1, 2, 0, 1, 2])).bits.tolist()
    )


def test_uniform_has_the_right_moments_and_range() -> None:
    u = Key(0).fold("u").uniform(200_000, dtype=torch.float64)
    assert u.min() >= 0 and u.max() < 1
    assert abs(float(u.mean()) - 0.5) < 0.003 and abs(float(u.var()) - 1 / 12) < 0.001
    assert torch.equal(Key(0).fold("u").uniform(50).double(), u[:50])
    share = (u[:, None] < torch.linspace(0.1, 0.9, 9)).double().mean(0)
    assert (share - torch.linspace(0.1, 0.9, 9)).abs().max() < 0.005


def test_uniform_never_reaches_one() -> None:
    assert float(to_uniform(torch.tensor(-1))) == 1 - 2**-24 and float(to_uniform(torch.tensor(0))) == 0


def test_normal_has_the_right_moments() -> None:
    z = Key(0).fold("z").normal(200_000, dtype=torch.float64)
    assert abs(float(z.mean())) < 0.01 and abs(float(z.std()) - 1) < 0.01
    assert abs(float((z**4).mean()) - 3) < 0.1
    assert abs(float((z < 1).double().mean()) - 0.5 * (1 + math.erf(1 / math.sqrt(2)))) < 0.005


def test_neighbouring_keys_are_not_correlated() -> None:
    u = Key(0).fold(torch.arange(1000)).uniform(200, dtype=torch.float64) - 0.5
    assert abs(float((u[1:] * u[:-1]).mean()) * 12) < 0.01  # neighbouring rows
    assert abs(float((u[:, 1:] * u[:, :-1]).mean()) * 12) < 0.01  # neighbouring positions
    seeds = torch.stack([Key(seed).fold("x").uniform(200, dtype=torch.float64) for seed in range(200)]) - 0.5
    assert abs(float((seeds[1:] * seeds[:-1]).mean()) * 12) < 0.02


def test_hash_hardly_ever_collides() -> None:
    drawn = Key(0).fold(torch.arange(300)).hash(300).flatten()
    assert len(drawn.unique()) == 90_000


def test_numpy_generator_is_seeded_by_the_key() -> None:
    a, b = Key(3).fold("p").numpy(), Key(3).fold("p").numpy()
    assert a.permutation(10).tolist() == b.permutation(10).tolist()
    assert (
        Key(4).fold("p").numpy().permutation(10).tolist() != Key(3).fold("p").numpy().permutation(10).tolist()
    )


def test_a_number_folds_like_a_tensor_of_it():
    for number in (0, 1, -1, 7, 2**40 + 3, 2**63 - 1, -(2**63)):
        assert Key(5).fold(number).bits == Key(5).fold(torch.tensor(number)).bits

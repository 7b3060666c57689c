"""Kernels of a chunk's experts against decoding and multiplying, and that they lower for a GPU at Flash's shapes."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.model import moe, quant
from ds4jax.model.quant.kernels import grouped
from ds4jax.model.quant.kernels.blocks import Blocks, cut_into_blocks
from ds4jax.model.quant.kernels.grouped import Tile, Tiles
from tests.model.lowering import lower_for_cuda
from tests.model.test_quant import random_weight
from tests.model.tokens import check_company, check_nan

L, E, X, D, F, CLAMP = 2, 3, 2, 512, 256, 7.0
N_TOKEN = 12  # of which more choose an expert than a block holds
LAYER = np.int32([1])
PAIRINGS = [("IQ2_XXS", "Q2_K"), ("Q4_K", "Q4_K")]  # of gate and up, and of down


# ---------------------------------------------------------------- blocks
@settings(max_examples=20)
@given(choice=st.lists(st.integers(-1, 5), min_size=40, max_size=40))
def test_each_pair_is_in_one_block_of_its_expert(choice: list[int]) -> None:
    blocks = _cut(jnp.asarray(choice, jnp.int32))
    found: list[tuple[int, int]] = []
    for expert, pairs in zip(blocks.expert.tolist(), blocks.pair.tolist(), strict=True):
        if expert < 4:
            members = [p for p in pairs if p < len(choice)]
            assert members and members == sorted(members) and pairs == members + [len(choice)] * (16 - len(members))
            found += [(expert, p) for p in members]
    assert sorted(found) == sorted((e, p) for p, e in enumerate(choice) if 0 <= e < 4)
    # A block is full, unless it is its expert's last.
    assert sum(e < 4 for e in blocks.expert.tolist()) == sum(-(-choice.count(e) // 16) for e in range(4))


_cut = jax.jit(partial(cut_into_blocks, n_expert=4, rows=16))


@pytest.mark.parametrize(("n_token", "members"), [(128, 16), (256, 16), (1024, 64), (2048, 128), (4096, 128)])
def test_a_block_holds_what_an_expert_gets(n_token: int, members: int) -> None:
    assert grouped.block_members(6 * n_token, 256) == members


# ---------------------------------------------------------------- products
@cache
def weights() -> list[quant.QTensor]:
    gate_up, down = PAIRINGS[0]
    layout = [(gate_up, (L, E, F, D)), (gate_up, (L, E, F, D)), (down, (L, E, D, F))]
    return [quant.prepare(random_weight(kind, shape, seed)) for seed, (kind, shape) in enumerate(layout)]


TILES = {joined: Tiles(Tile(128, 8, 4, 1, joined[0]), Tile(256, 8, 4, 1, joined[1])) for joined in ((4, 1), (4, 2), (1, 4))}


@cache
def compiled(joined: tuple[int, int] = (4, 2)) -> Callable[..., jax.Array]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "FEW", TILES[joined])
        x, weight, expert = example(N_TOKEN)
        lowered = jax.jit(partial(grouped.apply_grouped, clamp=CLAMP)).lower(x, weight, expert, weights(), LAYER)
        return lowered.compile()


def apply(x: np.ndarray, weight: np.ndarray, expert: np.ndarray, joined: tuple[int, int] = (4, 2)) -> np.ndarray:
    return np.asarray(compiled(joined)(x, weight, expert, weights(), LAYER))


def example(m: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    expert = rng.random((m, E)).argsort(axis=1)[:, :X].astype(np.int32)
    expert[2:, 0] = 0  # of whose pairs a block is too small to hold all
    expert[:, 1] = np.where(expert[:, 1] == expert[:, 0], 1, expert[:, 1])
    return rng.normal(size=(m, D)).astype(np.float32), rng.random((m, X)).astype(np.float32), expert


@pytest.mark.parametrize("joined", TILES)
def test_each_token_adds_up_its_experts(joined: tuple[int, int]) -> None:
    x, weight, expert = example(N_TOKEN)
    expert[0, 1], expert[3] = E, -1  # nobody
    gate, up, down = (np.asarray(quant.dequantize(quant.take_layer(w, 1))) for w in weights())
    expected = np.zeros((N_TOKEN, D), np.float32)
    for token, choice in np.argwhere((expert >= 0) & (expert < E)):
        e, row = expert[token, choice], x[token]
        hidden = np.asarray(moe.swiglu(jnp.asarray(gate[e] @ row), jnp.asarray(up[e] @ row), CLAMP)) * weight[token, choice]
        expected[token] += down[e] @ hidden
    got = apply(x, weight, expert, joined)
    assert not got[3].any()
    # Inputs, hidden values and weights have 11 bits, so each product is off by some 2**-12; their sums are a few times smaller than they.
    assert (np.linalg.norm(got - expected, axis=1) <= 5e-3 * np.linalg.norm(expected, axis=1)).all()


@pytest.mark.parametrize("joined", [1, 2, 4])
def test_planes_of_q4_k_are_its_weights(joined: int) -> None:
    """Multiplied by the unit matrix, a product shows every weight in its place. (The other formats are in the products above.)"""
    w = quant.prepare(random_weight("Q4_K", (L, 1, 16, 256)))
    blocks = Blocks(jnp.zeros(1, jnp.int32), jnp.arange(256, dtype=jnp.int32)[None])
    tile = Tile(16, 8, 4, 1, joined)
    got = jax.jit(partial(grouped.down, tiles=Tiles(tile, tile)))(grouped.to_planes(jnp.eye(256), joined), w, blocks, LAYER)
    # Scale, minimum and weight round to 11 bits each.
    expected = np.asarray(quant.dequantize(quant.take_layer(w, 1))[0]).T
    np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())


@settings(max_examples=8)
@given(seed=st.integers(0, 2**31), n_chosen=st.integers(X, E))
def test_a_token_ignores_its_index_its_neighbours_and_their_choices(seed: int, n_chosen: int) -> None:
    check_company(example, apply, N_TOKEN, E, seed, n_chosen)


def test_nan_stays_with_its_token() -> None:
    check_nan(example, apply, N_TOKEN)


# ---------------------------------------------------------------- what they take
def shapes(pairing: tuple[str, str], sizes: tuple[int, int], f: int, d: int) -> list[quant.QTensor]:
    gate, down = (f"{kind}:words" for kind in pairing)
    layout = [(gate, (*sizes, f, d)), (gate, (*sizes, f, d)), (down, (*sizes, d, f))]
    return [quant.QTensor(kind, quant.field_shapes(kind, shape)) for kind, shape in layout]


def test_what_they_cannot_take_is_refused() -> None:
    gate, up, down = shapes(PAIRINGS[0], (1, 2), 2048, 4096)
    assert grouped.fits(gate, up, down)
    assert not grouped.fits(gate, shapes(PAIRINGS[1], (1, 2), 2048, 4096)[1], down)  # gate and up differ
    assert not grouped.fits(*(quant.QTensor(w.kind.removesuffix(":words"), w.fields) for w in (gate, up, down)))  # as in the file
    assert not grouped.fits(*shapes(PAIRINGS[0], (1, 2), 256, 4096))  # hidden rows too short for a step


@pytest.mark.parametrize("n_token", [256, 2048])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_they_lower_for_a_gpu(monkeypatch: pytest.MonkeyPatch, pairing: tuple[str, str], n_token: int) -> None:
    shape, w = jax.ShapeDtypeStruct, shapes(pairing, (20, 256), 2048, 4096)
    assert grouped.fits(*w)
    arguments: list[Any] = [shape((n_token, 4096), jnp.float32), shape((n_token, 6), jnp.float32), shape((n_token, 6), jnp.int32)]
    lower_for_cuda(monkeypatch, partial(grouped.apply_grouped, clamp=10.0), *arguments, w, shape((1,), jnp.int32))

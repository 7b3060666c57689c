"""Packed weights against gguf's own decoder, and the promise that a row's product depends on that row alone."""

from functools import cache

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.errors import ModelFileError
from ds4jax.model import quant
from ds4jax.model.quant import iq2
from ds4jax.model.quant.layouts import LAYOUTS

MATMUL = jax.jit(quant.matmul)
DEQUANTIZE = jax.jit(quant.dequantize)


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0, spread: float = 3.0) -> np.ndarray:
    """Random bytes, as uint8 [..., N, row bytes], whose half-precision scales are finite, of both signs and 10**+-spread around 0.01."""
    rng = np.random.default_rng(seed)
    layout = LAYOUTS[kind]
    raw = np.frombuffer(rng.bytes(int(np.prod(shape[:-1])) * quant.row_bytes(kind, shape[-1])), np.uint8).reshape(*shape[:-1], -1).copy()
    blocks = raw.view(layout.block)
    for name in sorted({"d", "dmin", "w"} & set(layout.block.names or ())):  # data that does not depend on the hash seed
        scales = 0.01 * rng.standard_normal(blocks.shape) * 10 ** rng.uniform(-spread, spread, blocks.shape)
        blocks[name] = scales.astype(layout.block[name])
    if kind == "MXFP4":
        middle = 119
        blocks["exponent"] = rng.integers(0, 252, blocks.shape) if spread > 1 else rng.integers(middle - 4, middle + 5, blocks.shape)
    return raw


def random_weight(kind: str, shape: tuple[int, ...], seed: int = 0) -> quant.QTensor:
    raw = random_blocks(kind, shape, seed, spread=0.3)
    return quant.QTensor(kind, {name: jnp.asarray(a) for name, a in quant.pack(kind, raw, shape).items()})


def gguf_values(kind: str, raw: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).astype(np.float32)


def random_rows(n: int, k: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


# ---------------------------------------------------------------- formats
@pytest.mark.parametrize("kind", quant.KINDS)
def test_values_are_those_of_gguf_bit_for_bit(kind: str) -> None:
    shape = (2, 3, 8, 512)
    raw = random_blocks(kind, shape)
    w = quant.QTensor(kind, {name: jnp.asarray(a) for name, a in quant.pack(kind, raw, shape).items()})
    want = gguf_values(kind, raw)
    for decode in (DEQUANTIZE, quant.dequantize) if kind == "Q4_K" else (DEQUANTIZE,):  # eagerly is slow
        np.testing.assert_array_equal(np.asarray(decode(w)).view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("kind", quant.KINDS)
def test_packing_permutes_bytes(kind: str) -> None:
    shape = (2, 8, 512)
    raw = random_blocks(kind, shape)
    raw.flags.writeable = False  # as a memory map is
    fields = quant.pack(kind, raw, shape)
    shapes = quant.field_shapes(kind, shape)
    assert {n: (a.shape, a.dtype) for n, a in fields.items()} == {n: (s.shape, s.dtype) for n, s in shapes.items()}
    w = quant.QTensor(kind, fields)
    assert w.shape == shape and w.nbytes == raw.nbytes
    assert sorted(b"".join(a.tobytes() for a in fields.values())) == sorted(raw.tobytes())
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert (LAYOUTS[kind].values, LAYOUTS[kind].block.itemsize) == (values, size)


@pytest.mark.parametrize("kind", quant.KINDS)
def test_the_device_splits_bytes_as_the_host_does(kind: str) -> None:
    raw = random_blocks(kind, (3, 4, 512))
    host, device = quant.pack(kind, raw, (3, 4, 512)), quant.unpack(kind, jnp.asarray(raw), (3, 4, 512))
    for name in host.keys() | device.keys():
        assert host[name].dtype == device[name].dtype
        assert host[name].tobytes() == np.asarray(device[name]).tobytes()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_floats_are_views(kind: str) -> None:
    raw = random_blocks(kind, (4, 64))
    (field,) = quant.pack(kind, raw, (4, 64)).values()
    assert np.shares_memory(field, raw)


def test_codebook_is_that_of_gguf() -> None:
    gguf.quants.IQ2_XXS.init_grid()
    np.testing.assert_array_equal(iq2.codebook(), gguf.quants.IQ2_XXS.grid.reshape(256, 8))


def test_errors_say_what_and_why() -> None:
    with pytest.raises(ModelFileError, match=r"IQ1_S .*known types are F32, .*Q4_K"):
        quant.field_shapes("IQ1_S", (2, 256))
    with pytest.raises(ModelFileError, match="Q4_K: rows of 128 values, expected a multiple of 256"):
        quant.field_shapes("Q4_K", (2, 128))
    with pytest.raises(ModelFileError, match=r"Q8_0 tensor of shape \(2, 32\): got 67 .*expected 68 bytes"):
        quant.pack("Q8_0", np.zeros(67, np.uint8), (2, 32))


# ---------------------------------------------------------------- the pytree
def test_leading_axes_stack_and_index_by_tree_map() -> None:
    layers = [random_weight("Q4_K", (4, 256), seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *layers)
    assert stacked.kind == "Q4_K" and stacked.shape == (3, 4, 256)
    second = jax.jit(quant.take_layer)(stacked, 1)
    np.testing.assert_array_equal(DEQUANTIZE(second), DEQUANTIZE(layers[1]))


def test_a_flax_parameter_can_hold_it() -> None:
    class Layer(nnx.Module):
        def __init__(self) -> None:
            self.weight = nnx.Param(random_weight("Q2_K", (4, 256)))

    layer = Layer()
    graph, state = nnx.split(layer)
    leaves, treedef = jax.tree.flatten(state)
    assert len(leaves) == 4
    merged = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
    np.testing.assert_array_equal(DEQUANTIZE(merged.weight.get_value()), DEQUANTIZE(random_weight("Q2_K", (4, 256))))


# ---------------------------------------------------------------- products
@pytest.mark.parametrize("kind", quant.KINDS)
def test_matmul_multiplies_by_the_decoded_weights(kind: str) -> None:
    w, x = random_weight(kind, (24, 256)), random_rows(6, 256).reshape(2, 3, 256)
    exact = x.astype(np.float64) @ np.asarray(DEQUANTIZE(w), np.float64).T
    for rows, want in ((x, exact), (x[:1, :1], exact[:1, :1])):
        np.testing.assert_allclose(MATMUL(rows, w), want, rtol=0, atol=3e-6 * np.abs(exact).max())


def test_bfloat16_rows_meet_bfloat16_weights_and_sum_in_float32() -> None:
    w, x = random_weight("Q4_K", (24, 256)), jnp.asarray(random_rows(6, 256), jnp.bfloat16)
    weights = np.asarray(DEQUANTIZE(w)).astype(jnp.bfloat16).astype(np.float64)
    exact = np.asarray(x, np.float64) @ weights.T
    got = jax.jit(lambda x, w: quant.matmul(x, w, out_dtype=jnp.float32))(x, w)
    np.testing.assert_allclose(got, exact, rtol=0, atol=3e-6 * np.abs(exact).max())
    assert jax.eval_shape(quant.matmul, x, w).dtype == jnp.bfloat16


def test_pieces_of_rows_are_nearly_as_right_as_float32() -> None:
    x, w = random_rows(8, 512) * np.float32([[1e-3], [1], [30], [1], [1], [1], [1], [1000]]), random_weight("F16", (48, 512))
    decoded = np.asarray(quant.dequantize(w), np.float64)
    error = np.abs(np.asarray(quant.precise_matmul(jnp.asarray(x), w), np.float64) - x.astype(np.float64) @ decoded.T)
    assert np.all(error <= 2.0**-20 * np.abs(x) @ np.abs(decoded).T)


@pytest.mark.parametrize("n_rows", [1, 2, 3, 4, 8, 16, 128])
@pytest.mark.parametrize("n, k", [(96, 64), (40, 1024), (257, 160)])
def test_a_row_ignores_its_index_and_its_neighbours(n_rows: int, n: int, k: int) -> None:
    w, x = random_weight("Q8_0", (n, k)), random_rows(n_rows, k)
    y = np.asarray(MATMUL(x, w))
    order = np.random.default_rng(2).permutation(n_rows)
    np.testing.assert_array_equal(MATMUL(x[order], w), y[order])
    alone = np.full_like(x, 1e3)
    alone[-1] = x[0]
    np.testing.assert_array_equal(MATMUL(alone, w)[-1], y[0])


N_EXPERT, WIDTH = 5, 256


@cache
def experts(kind: str, n_layer: int = 0) -> quant.QTensor:
    return random_weight(kind, (*(n_layer,) * bool(n_layer), N_EXPERT, 24, WIDTH))


@jax.jit
def route_and_multiply(x: jax.Array, w: quant.QTensor, expert: jax.Array) -> jax.Array:
    return quant.expert_matmul(x, w, quant.route(expert, N_EXPERT))


@jax.jit
def route_and_multiply_layer(x: jax.Array, w: quant.QTensor, expert: jax.Array, layer: int) -> jax.Array:
    return quant.expert_matmul(x, w, quant.route(expert, N_EXPERT), layer)


@pytest.mark.parametrize("kind", ["Q8_0", "IQ2_XXS", "Q2_K", "Q4_K"])
@pytest.mark.parametrize("n_pairs", [2, 6, 40])
def test_each_pair_meets_its_expert(kind: str, n_pairs: int) -> None:
    w, x = experts(kind), random_rows(n_pairs, WIDTH)
    expert = np.random.default_rng(n_pairs).integers(0, N_EXPERT, n_pairs).astype(np.int32)
    exact = np.einsum("pk,pnk->pn", x.astype(np.float64), np.asarray(DEQUANTIZE(w), np.float64)[expert])
    np.testing.assert_allclose(route_and_multiply(x, w, expert), exact, rtol=0, atol=3e-6 * np.abs(exact).max())


@pytest.mark.parametrize("n_pairs", [1, 2, 6, 12, 16, 24, 64, 130])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31), n_chosen=st.integers(1, N_EXPERT))
def test_a_pair_ignores_its_index_its_neighbours_and_their_choices(n_pairs: int, seed: int, n_chosen: int) -> None:
    rng = np.random.default_rng(seed)
    w, x = experts("Q8_0"), random_rows(n_pairs, WIDTH, seed)
    expert = rng.integers(0, n_chosen, n_pairs).astype(np.int32)
    y = np.asarray(route_and_multiply(x, w, expert))
    order = rng.permutation(n_pairs)
    np.testing.assert_array_equal(route_and_multiply(x[order], w, expert[order]), y[order])
    # One pair stays, at another index; all others change rows and experts, some choose nobody.
    old, new = rng.integers(0, n_pairs, 2)
    other_x, other_expert = random_rows(n_pairs, WIDTH, seed + 1), rng.integers(-1, N_EXPERT + 2, n_pairs).astype(np.int32)
    other_x[new], other_expert[new] = x[old], expert[old]
    other = np.asarray(route_and_multiply(other_x, w, other_expert))
    np.testing.assert_array_equal(other[new], y[old])
    nobody = (other_expert < 0) | (other_expert >= N_EXPERT)
    assert not other[nobody].any() and other[~nobody].any(-1).all()


@pytest.mark.parametrize("n_pairs", [6, 40])
def test_experts_of_a_layer_are_taken_from_the_stack(n_pairs: int) -> None:
    w, x = experts("Q2_K", 3), random_rows(n_pairs, WIDTH)
    expert = np.random.default_rng(0).integers(0, N_EXPERT, n_pairs).astype(np.int32)
    for layer in range(3):
        np.testing.assert_array_equal(
            route_and_multiply_layer(x, w, expert, layer), route_and_multiply(x, quant.take_layer(w, layer), expert)
        )


def test_a_traced_layer_copies_no_layer() -> None:
    """Temporary memory must not grow with the number of experts: only the chosen ones are read."""

    def temporary_bytes(n_expert: int, n_pairs: int) -> int:
        w = quant.QTensor("Q8_0", quant.field_shapes("Q8_0", (2, n_expert, 32, 64)))
        x, expert = jax.ShapeDtypeStruct((n_pairs, 64), jnp.float32), jax.ShapeDtypeStruct((n_pairs,), jnp.int32)
        step = jax.jit(lambda x, w, e, i: quant.expert_matmul(x, w, quant.route(e, n_expert), i))
        return step.lower(x, w, expert, jax.ShapeDtypeStruct((), jnp.int32)).compile().memory_analysis().temp_size_in_bytes

    one_layer = quant.row_bytes("Q8_0", 64) * 32 * 512
    for n_pairs in (4, 32):
        assert temporary_bytes(512, n_pairs) < one_layer / 2

"""Packed weights: keep them as they lie in the file, expand them on the way into a product."""

from ds4jax.model.quant.columns import suits_columns
from ds4jax.model.quant.experts import RoutingPlan, expert_apply, expert_matmul, route
from ds4jax.model.quant.formats import dequantize
from ds4jax.model.quant.joined import Joined, places, project
from ds4jax.model.quant.layouts import COLUMNS, LAYOUTS
from ds4jax.model.quant.matmul import dot, matmul, precise_matmul
from ds4jax.model.quant.qtensor import QTensor, abstract, field_shapes, pack, row_bytes, take_layer, unpack
from ds4jax.model.quant.repack import PREPARED, arrange, prepare
from ds4jax.model.quant.rows import embed, grouped_matmul

KINDS = tuple(LAYOUTS)

__all__ = [
    "COLUMNS",
    "KINDS",
    "PREPARED",
    "Joined",
    "QTensor",
    "RoutingPlan",
    "abstract",
    "arrange",
    "dequantize",
    "dot",
    "expert_apply",
    "embed",
    "expert_matmul",
    "field_shapes",
    "grouped_matmul",
    "matmul",
    "pack",
    "places",
    "precise_matmul",
    "prepare",
    "project",
    "route",
    "row_bytes",
    "suits_columns",
    "take_layer",
    "unpack",
]

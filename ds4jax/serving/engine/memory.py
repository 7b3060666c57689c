"""Plan device memory before anything is allocated: weights, cache a slot and in all, snapshots, scratch; and what would fit instead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from ds4jax.errors import MemoryPlanError
from ds4jax.model.attention import MOST_SCORES
from ds4jax.model.spec import ModelSpec, abstract_model
from ds4jax.serving.engine.buckets import PrefillShape
from ds4jax.serving.engine.programs import init_pool, init_state

HEADROOM = 0.04  # of the device, left to the allocator and the runtime


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that an engine will hold. available_bytes: what the device has for us, or None where it does not tell."""

    n_slot: int
    n_ctx: int
    weight_bytes: int
    slot_bytes: int
    scratch_bytes: int
    available_bytes: int | None
    snapshot_bytes: int = 0

    @property
    def cache_bytes(self) -> int:
        """Of all slots."""
        return self.n_slot * self.slot_bytes

    @property
    def total_bytes(self) -> int:
        """Of everything."""
        return self.cache_bytes + self._other_bytes

    @property
    def _other_bytes(self) -> int:
        """Of everything but slots."""
        return self.weight_bytes + self.snapshot_bytes + self.scratch_bytes

    @property
    def fits(self) -> bool:
        """Whether the device holds it."""
        return self.available_bytes is None or self.total_bytes <= self.available_bytes * (1 - HEADROOM)

    @property
    def most_slots(self) -> int:
        """Slots of this context that would fit."""
        if self.available_bytes is None:
            return self.n_slot
        return max(0, int((self.available_bytes * (1 - HEADROOM) - self._other_bytes) // self.slot_bytes))

    def fits_at(self, slot_bytes: int) -> bool:
        """Whether the device holds it with slots of another size."""
        return replace(self, slot_bytes=slot_bytes).fits


def plan_memory(
    spec: ModelSpec,
    n_slot: int,
    n_ctx: int,
    prefills: Sequence[PrefillShape] = (PrefillShape(1, 2048),),
    available_bytes: int | None = None,
    n_snapshot: int = 0,
) -> MemoryPlan:
    """Plan from shapes alone.

    Args:
        prefills: the shapes of prefill launches; the widest step decides the scratch.
        available_bytes: of the device; None asks it (free memory plus what this process does not hold yet).
        n_snapshot: snapshots of slots that are kept.
    """
    weights = _nbytes(abstract_model(spec).leaves)
    slot = slot_nbytes(spec, n_ctx)
    available = available_bytes if available_bytes is not None else device_bytes()
    scratch = max((_step_nbytes(spec, n_slot), *(_prefill_nbytes(spec, shape, n_ctx) for shape in prefills)))
    snapshots = _nbytes(jax.tree.leaves(jax.eval_shape(partial(init_pool, spec, n_snapshot)))) if n_snapshot else 0
    return MemoryPlan(n_slot, n_ctx, weights, slot, scratch, available, snapshots)


def require_fit(plan: MemoryPlan, spec: ModelSpec) -> None:
    """Raise MemoryPlanError that says how many slots, or how much context, would fit."""
    if plan.fits or plan.available_bytes is None:
        return
    gib = 1 << 30
    advice = "not even one slot fits; use a smaller model or device with more memory"
    if plan.most_slots:
        advice = f"--batched-session {plan.most_slots} would fit at this context"
    n_ctx = plan.n_ctx
    while n_ctx > 256 and not plan.fits_at(slot_nbytes(spec, n_ctx)):
        n_ctx //= 2
    if n_ctx < plan.n_ctx and n_ctx > 256:
        advice += f", or --ctx {n_ctx} with these slots"
    raise MemoryPlanError(
        f"{plan.n_slot} slots of {plan.n_ctx} tokens need {plan.total_bytes / gib:.2f} GiB (weights {plan.weight_bytes / gib:.2f}, cache "
        f"{plan.cache_bytes / gib:.2f}, snapshots {plan.snapshot_bytes / gib:.2f}, scratch {plan.scratch_bytes / gib:.2f}), "
        f"the device has {plan.available_bytes / gib:.2f} GiB: {advice}."
    )


def slot_nbytes(spec: ModelSpec, n_ctx: int) -> int:
    """Bytes of one slot."""
    one = jax.eval_shape(partial(init_state, spec, 1, n_ctx))
    return _nbytes(jax.tree.leaves(one))


def device_bytes() -> int | None:
    """Memory that the default device can give: its allocator's limit, or on a CPU the machine's available memory."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def _nbytes(leaves: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _prefill_nbytes(spec: ModelSpec, shape: PrefillShape, n_ctx: int) -> int:
    """Estimate the temporaries of a prefill launch. Kernels attend to a copy of each row's keys, and keep its tokens' scores for them."""
    n_token = min(shape.n_tokens, n_ctx)
    least = _step_nbytes(spec, shape.n_rows * n_token)
    if not spec.kernels or 4 not in spec.config.compress_ratios:
        return least
    n_comp = n_ctx // 4
    keys = shape.n_rows * (spec.config.n_window + n_token + n_comp) * spec.config.head_dim
    scores = min(shape.n_rows * n_token * n_comp, MOST_SCORES)
    return least + 2 * keys + 4 * scores


def _step_nbytes(spec: ModelSpec, n_token: int) -> int:
    """Estimate the temporaries of a step of so many tokens: streams, queries and expert activations, and the largest matrix decoded."""
    c = spec.config
    a_token = 3 * c.n_hc * c.n_embd + 3 * c.n_head * c.head_dim + 4 * c.n_expert_used * (c.n_ff + c.n_embd)
    widest = max(c.n_head * c.head_dim * c.q_lora_rank, c.n_out_group * c.o_lora_rank * c.n_embd, c.n_vocab * c.n_embd)
    return 4 * n_token * a_token + widest * spec.compute.itemsize + 4 * c.n_vocab * 64

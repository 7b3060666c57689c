"""The public engine: a loaded model, slots on this machine's device, and the thread that serves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ds4jax.config import EngineConfig, cache_directory
from ds4jax.model.model import Model
from ds4jax.model.spec import ModelSpec
from ds4jax.serving.engine import loop
from ds4jax.serving.engine.api import SamplingParams
from ds4jax.serving.engine.buckets import chunk_buckets, pack_buckets, row_buckets
from ds4jax.serving.engine.kvstore import KVPolicy
from ds4jax.serving.engine.memory import MemoryPlan, plan_memory, require_fit
from ds4jax.serving.engine.programs import Program, ProgramStore, Shapes
from ds4jax.serving.engine.runner import Runner
from ds4jax.serving.engine.saved import open_saved, token_texts
from ds4jax.text.dsml import ReplayMemory
from ds4jax.text.stream import Utf8Decoder


def engine_shapes(spec: ModelSpec, config: EngineConfig, *, on_disk: bool = False) -> Shapes:
    """List what an engine of this configuration compiles. on_disk: whether it keeps sessions there."""
    packs = pack_buckets(config.slots, config.ctx, config.prefill_quantum, config.mixed_prefill_quantum)
    # Plain array code takes as long as it has tokens: many rows would gain nothing, and the first of them wait for the last.
    packs = packs if spec.kernels else packs[:1]
    return Shapes(
        spec,
        config.slots,
        config.ctx,
        row_buckets(config.slots),
        chunk_buckets(config.ctx, config.prefill_quantum, config.mixed_prefill_quantum),
        config.n_snapshots,
        transfers=on_disk,
        pack_buckets=packs,
    )


def program_directory() -> Path:
    """Where compiled programs are kept."""
    return cache_directory() / "programs"


class Engine(loop.Engine):
    """Many sessions over one model, decoded together.

    Args:
        model: from `ds4jax.load_model`.
        slots: resident sessions.
        ctx: tokens a slot holds.
        coalesce_us: longest wait from the first pending row to a launch.
        config: all of the above and the rest at once, instead of them.
        early: be ready as soon as the programs that suffice are, and compile the other buckets beside the serving.
        kv_disk: a folder in which sessions are kept that lose their slot or outlive the engine; other engines may share it.
        kv_policy: what is kept there; ds4's defaults.
        memory: of the calls of tools, which is kept along.
        on_plan, on_program: called with the memory plan, and with each program as it is compiled or found on disk.

    Raises:
        MemoryPlanError: the device cannot hold it; the message says what would fit.

    Use it as a context manager, or call `close()`.
    """

    def __init__(
        self,
        model: Model,
        slots: int = 4,
        ctx: int = 4096,
        coalesce_us: int = 2000,
        *,
        config: EngineConfig | None = None,
        on_plan: Callable[[MemoryPlan], None] | None = None,
        on_program: Callable[[Program], None] | None = None,
        early: bool = False,
        kv_disk: Path | None = None,
        kv_policy: KVPolicy | None = None,
        memory: ReplayMemory | None = None,
    ) -> None:
        config = config or EngineConfig(slots=slots, ctx=ctx, coalesce_us=coalesce_us)
        shapes = engine_shapes(model.spec, config, on_disk=kv_disk is not None)
        plan = plan_memory(model.spec, shapes.n_slot, shapes.n_ctx, shapes.prefill_shapes, n_snapshot=shapes.n_snapshot)
        if on_plan:
            on_plan(plan)
        require_fit(plan, model.spec)
        self.model = model
        self.runner = Runner(model, shapes, ProgramStore(program_directory()), on_program, early=early)
        texts = token_texts(model.tokenizer)
        saved = None if kv_disk is None else open_saved(kv_disk, model, texts, config.ctx, kv_policy or KVPolicy(), memory)
        super().__init__(self.runner, config, saved=saved, texts=texts.texts)

    @property
    def compiling(self) -> bool:
        """Whether programs are still being compiled beside the serving."""
        return self.runner.compiling

    def close(self) -> None:
        """End all requests and sessions, and stop."""
        super().close()
        self.runner.close()

    def generate(
        self,
        text: str,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.05,
        seed: int | None = None,
    ) -> Iterator[str]:
        """Continue a text; yields pieces of whole characters as they come, and ends at the end-of-sentence token.

        The text is fed as it is, after a beginning-of-sentence token and without a chat template.
        """
        tokenizer = self.model.tokenizer
        prompt = [tokenizer.bos_id, *tokenizer.encode(text)]
        sampling = SamplingParams(temperature, top_k, top_p, min_p, seed)
        decoder = Utf8Decoder()
        for token in self.generate_tokens(prompt, max_tokens, sampling, frozenset({tokenizer.eos_id})):
            if piece := decoder.feed(tokenizer.token_bytes(token)):
                yield piece
        if piece := decoder.flush():
            yield piece

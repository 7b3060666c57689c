"""Say to which part of the model the time of a profile belongs.

An operation of a trace is a kernel of ours, which its name tells, or one that XLA made; of that the program's text says which
lines of which files it comes from, and files hold one idea each.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

GAPS = "gaps"  # when nothing ran
OTHER = "other"
PARTS = (
    "experts", "dense products", "attention", "indexer", "compressor", "hyper-connections", "router", "norms", "sampling", OTHER, GAPS,
)  # fmt: skip

# `extend` writes raw rows too, but what takes its time are the compressors.
KERNELS = {
    "experts_gate_up": "experts", "experts_down": "experts", "quantize": "experts", "count_pairs": "experts", "place_pairs": "experts",
    "dense": "dense products", "attend_part": "attention", "attend_sum": "attention", "flash": "attention", "query": "attention",
    "extend": "compressor", "index_query": "indexer", "index_score": "indexer", "index_select": "indexer",
    "router": "router", "sort_pairs": "router",
    "hyper_advance": "hyper-connections", "hyper_enter": "hyper-connections", "hyper_join": "hyper-connections",
    "hyper_products": "hyper-connections", "sinkhorn": "hyper-connections", "nucleus": "sampling", "top": "sampling",
}  # fmt: skip

# Source -> part, the first one that is anywhere in the stack of calls. So a product of weights is one wherever it is asked for, but
# not within the experts; and a norm is one where no other part makes it for itself.
SOURCES = (
    ("model/quant/experts.py", "experts"), ("model/quant/kernels/experts.py", "experts"), ("model/quant/kernels/grouped.py", "experts"),
    ("model/quant/kernels/blocks.py", "experts"), ("model/quant/kernels/activations.py", "experts"),
    ("model/draw.py", "sampling"), ("model/hyper.py", "hyper-connections"), ("model/kernels/hyper.py", "hyper-connections"),
    ("model/softmax.py", "attention"), ("model/moe.py:MoE.choose", "router"), ("model/kernels/router.py", "router"),
    ("model/quant/", "dense products"), ("model/indexer.py", "indexer"), ("model/kernels/index.py", "indexer"),
    ("model/compressor.py", "compressor"), ("model/kernels/extend.py", "compressor"), ("model/norm.py", "norms"),
    ("model/moe.py", "experts"), ("model/attention.py", "attention"), ("model/kernels/attend.py", "attention"),
    # Between the kernels.
    ("model/fused.py:_site", "hyper-connections"), ("model/fused.py:Streams", "hyper-connections"),
    ("model/fused.py:_experts", "experts"), ("model/fused.py:_extend", "compressor"), ("model/fused.py:_attention", "attention"),
)  # fmt: skip

_CONTAINERS = {"while", "call", "conditional"}  # on a CPU they are events beside those of what they run


@dataclass(frozen=True)
class Event:
    """One operation on a device. names: of the kernel, and of the operation in the program, as far as the profile tells them."""

    names: tuple[str, ...]
    start_us: float
    duration_us: float


@dataclass(frozen=True)
class Spent:
    """What a part took: ms, and operations launched."""

    ms: float
    launches: float


def read_events(folder: Path) -> list[Event]:
    """Read the operations of devices from what `jax.profiler.trace` left in a folder; of a CPU those of XLA."""
    from jax.profiler import ProfileData

    events = []
    for file in folder.rglob("*.xplane.pb"):
        for plane in ProfileData.from_file(str(file)).planes:
            on_device = plane.name.startswith("/device:")
            # Beside a stream with its kernels, a device has lines that group the same time by module, operation and scope.
            lines = [line for line in plane.lines if line.name.startswith("Stream") or not on_device]
            for event in (event for line in lines for event in line.events):
                op = dict(event.stats).get("hlo_op")
                names = (*([event.name] if on_device else []), *([] if op is None else [str(op)]))
                if names:
                    events.append(Event(names, event.start_ns / 1e3, event.duration_ns / 1e3))
    return events


def split_time(events: Iterable[Event], sources: Mapping[str, tuple[str, ...]]) -> dict[str, Spent]:
    """Give the time between the first event's start and the last one's end to the parts, all PARTS in order.

    Args:
        events: in any order.
        sources: "file:function" from the inmost call to the outmost, of each operation that the program knows (`read_sources`).

    What runs at the same time shares it, so that the sum is the time that passed.
    """
    edges: list[tuple[float, int, str]] = []
    launches: Counter[str] = Counter()
    for event in events:
        if not _CONTAINERS.intersection(map(_stem, event.names)):
            part = part_of(event.names, sources)
            launches[part] += 1
            edges += [(event.start_us, 1, part), (event.start_us + event.duration_us, -1, part)]
    us: defaultdict[str, float] = defaultdict(float)
    running: Counter[str] = Counter()
    edges.sort()
    last_us = edges[0][0] if edges else 0.0
    for now_us, change, part in edges:
        n = running.total()
        for other, count in running.items() if n else [(GAPS, 1)]:
            us[other] += (now_us - last_us) * count / max(n, 1)
        running[part] += change
        last_us = now_us
    return {part: Spent(us[part] / 1e3, launches[part]) for part in PARTS}


def part_of(names: Iterable[str], sources: Mapping[str, tuple[str, ...]]) -> str:
    """Tell which part an operation of these names belongs to; the first name that says anything counts."""
    for name in names:
        if part := KERNELS.get(_stem(name)):
            return part
        calls = sources.get(name, ())
        if part := next((part for source, part in SOURCES for call in calls if source in call), None):
            return part
    return OTHER


def _stem(name: str) -> str:
    """Leave out the numbers that make a name unique."""
    return re.sub(r"([._]+\d+)+$", "", name)


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*metadata=\{[^}]*stack_frame_id=(\d+)")
_ROW = re.compile(r'^(\d+) (?:"(.*)"|\{(.*)\})$')
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


def read_sources(program: str) -> dict[str, tuple[str, ...]]:
    """Read where the operations of a compiled program come from, from its text (`executable.as_text()`).

    Returns:
        "file:function" of each operation, from the inmost call to the outmost. Kernels on a GPU are named as operations are, with _ for
        what a C name cannot hold; both names are there.
    """
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    table: dict[int, str] | None = None
    frame_of: dict[str, int] = {}
    for line in program.splitlines():
        if line in tables:
            table = tables[line]
        elif table is not None and (row := _ROW.match(line)):
            table[int(row[1])] = row[2] if row[2] is not None else row[3]
        elif found := _INSTRUCTION.match(line):
            frame_of[found[1]] = int(found[2])
    callers, places = _frames(tables)
    named = {op: tuple(_outwards(frame, callers, places)) for op, frame in frame_of.items()}
    return {re.sub(r"[.\-]", "_", op): calls for op, calls in named.items()} | named


def _frames(tables: Mapping[str, Mapping[int, str]]) -> tuple[dict[int, int], dict[int, str]]:
    """Return each frame's caller, 0 for none, and its "file:function"."""
    locations = {number: _numbers(fields) for number, fields in tables["FileLocations"].items()}
    frames = {number: _numbers(fields) for number, fields in tables["StackFrames"].items()}
    callers = {number: frame.get("parent_frame_id", 0) for number, frame in frames.items()}
    if any(number == caller for number, caller in callers.items()):  # some versions of XLA print a caller's number and one, and 1 for none
        callers = {number: caller - 1 for number, caller in callers.items()}
    of = {number: locations[frame["file_location_id"]] for number, frame in frames.items()}
    names, functions = tables["FileNames"], tables["FunctionNames"]
    return callers, {number: f"{names[at['file_name_id']]}:{functions[at['function_name_id']]}" for number, at in of.items()}


def _outwards(frame: int, callers: Mapping[int, int], places: Mapping[int, str]) -> Iterator[str]:
    """Follow a frame from the inmost call to the outmost."""
    while frame in places:
        yield places[frame]
        frame = callers[frame]


def _numbers(fields: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", fields)}

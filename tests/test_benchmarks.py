"""The commands in benchmarks/: what they make of what they measure."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from benchmarks.trace import KERNELS, PARTS, SOURCES, Event, part_of, read_events, read_sources, split_time

ROOT = Path(__file__).parents[1]

# As XLA prints a program: tables of calls, then operations that name the inmost one. A caller's number is printed with one added.
PROGRAM = """HloModule jit__decode, is_scheduled=true

FileNames
1 "/somewhere/ds4jax/model/transformer.py"
2 "/somewhere/ds4jax/model/moe.py"
3 "/somewhere/ds4jax/model/quant/experts.py"
4 "/somewhere/ds4jax/model/quant/matmul.py"

FunctionNames
1 "Block.__call__"
2 "MoE.choose"
3 "MoE.__call__"
4 "expert_apply"
5 "dot"

FileLocations
1 {file_name_id=1 function_name_id=1 line=57 end_line=57 column=28 end_column=47}
2 {file_name_id=2 function_name_id=2 line=45 end_line=45 column=15 end_column=54}
3 {file_name_id=2 function_name_id=3 line=78 end_line=78 column=15 end_column=54}
4 {file_name_id=3 function_name_id=4 line=98 end_line=98 column=15 end_column=54}
5 {file_name_id=4 function_name_id=5 line=33 end_line=33 column=15 end_column=54}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=2}
4 {file_location_id=4 parent_frame_id=4}
5 {file_location_id=5 parent_frame_id=5}
6 {file_location_id=5 parent_frame_id=2}

%body (p: f32[4]) -> f32[4] {
  %top.7 = f32[4]{0} sort(%p), metadata={op_name="jit(_decode)/ffn/sort" stack_frame_id=2}
  %dot.3 = f32[4]{0} dot(%p, %p), metadata={op_name="jit(_decode)/ffn/dot_general" stack_frame_id=5}
  ROOT %loop_add_fusion.2 = f32[4]{0} fusion(%p), kind=kLoop, calls=%c, metadata={op_name="jit(_decode)/ffn/dot_general" stack_frame_id=6}
  %copy.9 = f32[4]{0} copy(%p)
}
"""


def test_the_text_of_a_program_tells_where_operations_come_from() -> None:
    sources = read_sources(PROGRAM)
    calls = [call.rsplit("/", 1)[1] for call in sources["dot.3"]]
    assert calls == ["matmul.py:dot", "experts.py:expert_apply", "moe.py:MoE.__call__", "transformer.py:Block.__call__"]
    assert "copy.9" not in sources
    # A version that prints the caller's number as it is means the same.
    plain = PROGRAM
    for frame, caller in ((1, 1), (2, 2), (3, 2), (4, 4), (5, 5), (6, 2)):
        plain = plain.replace(f"\n{frame} {{file_location_id={min(frame, 5)} parent_frame_id={caller}}}",
                              f"\n{frame} {{file_location_id={min(frame, 5)} parent_frame_id={caller - 1}}}")  # fmt: skip
    assert read_sources(plain) == sources


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (("dot.3",), "experts"),
        (("loop_add_fusion.2",), "dense products"),
        (("loop_add_fusion_2",), "dense products"),  # as the kernel on a GPU is called
        (("sm90_gemm_128x64", "dot.3"), "experts"),  # a library's kernel, of an operation that is known
        (("hyper_advance", "custom-call.4"), "hyper-connections"),
        (("attend_part_1",), "attention"),
        (("dense__2_1",), "dense products"),
        (("copy.9",), "other"),
        (("MemcpyD2H",), "other"),
    ],
)
def test_an_operation_belongs_to_a_part(names: tuple[str, ...], part: str) -> None:
    assert part_of(names, read_sources(PROGRAM)) == part


def test_time_is_split_without_a_rest() -> None:
    events = [
        Event(("while.1",), 0.0, 10_000.0),  # runs the others
        Event(("dense", "custom-call.1"), 1000.0, 2000.0),
        Event(("experts_down",), 2000.0, 3000.0),  # beside the end of the one before it
        Event(("dense",), 8000.0, 1000.0),  # after 3 ms of nothing
    ]
    spent = split_time(reversed(events), {})
    assert list(spent) == list(PARTS)
    assert {part: (s.ms, s.launches) for part, s in spent.items() if s.ms} == {
        "dense products": (2.5, 2), "experts": (2.5, 1), "gaps": (3.0, 0),
    }  # fmt: skip
    assert sum(s.ms for s in split_time([], {}).values()) == 0


def test_every_source_exists() -> None:
    """A file or function that is renamed would silently count as other."""
    for source, _ in SOURCES:
        name, _, function = source.partition(":")
        place = ROOT / "ds4jax" / name
        assert place.exists(), source
        assert not function or re.search(rf"^\s*(def|class) {function.rsplit('.', 1)[-1]}\b", place.read_text(encoding="utf-8"), re.M), (
            source
        )


def test_every_kernel_has_a_part() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "ds4jax" / "model").rglob("kernels/*.py"))
    named = set(re.findall(r'name="(\w+)"', text)) | set(re.findall(r'_multiply\(.*"(\w+)"', text))
    assert named == set(KERNELS)


def test_a_profile_is_read_back(tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp

    product = jax.jit(lambda a: jnp.sin(a @ a))
    x = jnp.ones((64, 64))
    product(x).block_until_ready()
    with jax.profiler.trace(tmp_path):
        product(x).block_until_ready()
    spent = split_time(read_events(tmp_path), {})
    assert spent["other"].launches >= 1 and spent["other"].ms > 0


def test_plots_take_the_last_of_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plot import draw_step_profile, latest_profile

    about = {"device": "a GPU", "model": "m", "quant": "q2", "dtype": "bfloat16", "layers": "3", "live": "9"}
    measured = [(1, "experts", 9.0), (1, "gaps", 9.0), (4, "experts", 5.0), (4, "gaps", 1.0), (1, "experts", 2.0), (1, "gaps", 0.5)]
    older = [about | {"device": "a CPU", "bucket": "16", "part": "experts", "ms": "7"}]
    rows = older + [about | {"bucket": str(bucket), "part": part, "ms": str(ms)} for bucket, part, ms in measured]
    assert latest_profile(rows) == {1: {"experts": 2.0, "gaps": 0.5}, 4: {"experts": 5.0, "gaps": 1.0}}
    draw_step_profile(rows, tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")


def test_where_the_time_of_a_step_goes(tmp_path: Path) -> None:
    from benchmarks import step_profile

    step_profile.main("--random tiny-q8 --layers 1 --buckets 2 --ctx 64 --live 8 --steps 2".split() + ["--csv", str(tmp_path / "p.csv")])
    with (tmp_path / "p.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["part"] for row in rows] == list(PARTS)
    ms = {row["part"]: float(row["ms"]) for row in rows}
    assert min(ms["experts"], ms["dense products"], ms["attention"], ms["hyper-connections"]) > 0
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1.0, abs=0.01)

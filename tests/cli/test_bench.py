"""`ds4jax bench`: what is measured, and what is written down about it."""

import csv
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from ds4jax.cli.bench import parse_counts
from ds4jax.cli.bench_counts import read_counts
from ds4jax.cli.bench_model import open_subject, quant_of
from ds4jax.cli.bench_report import append_csv, percentile
from ds4jax.cli.loading import Numerics
from ds4jax.cli.main import app
from ds4jax.cli.presets import shape_of
from ds4jax.errors import ConfigError
from ds4jax.model.gguf.random_leaves import random_spec
from ds4jax.model.spec import abstract_model

ONE_LAYER = ("--random", "tiny", "--layers", "1", "--kv-quant", "none")  # compiles in seconds
DECODE_COLUMNS = (
    "date,commit,device,jax,model,quant,kv_quant,dtype,layers,bucket,ctx,live,steps,ms_median,ms_p10,ms_p90,tokens_per_s,host_ms,command"
)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_decode_writes_a_row_for_each_bucket_and_appends(tmp_path: Path) -> None:
    path = tmp_path / "decode.csv"
    options = f"--batched-session 2 --buckets 2,1 --ctx 128 --live 5 --steps 10 --csv {path}".split()
    for _ in range(2):
        result = run("decode", *ONE_LAYER, *options)
        assert result.exit_code == 0, result.output
        assert "5 tokens live (fed)" in result.output
    assert path.read_text().splitlines()[0] == DECODE_COLUMNS
    rows = read(path)
    assert [row["bucket"] for row in rows] == ["1", "2", "1", "2"]
    for row in rows:
        assert (row["model"], row["quant"], row["kv_quant"], row["dtype"]) == ("ds4jax tiny, first 1 layers", "q8", "none", "float32")
        assert (row["ctx"], row["live"], row["steps"], row["layers"]) == ("128", "5", "10", "1")
        ms, low, high, host = (float(row[key]) for key in ("ms_median", "ms_p10", "ms_p90", "host_ms"))
        assert 0 < host and 0 < low <= ms <= high
        assert float(row["tokens_per_s"]) == pytest.approx(1000 * int(row["bucket"]) / ms, rel=0.01), "a row was not live"


def test_context_compares_two_capacities_at_the_same_live_context(tmp_path: Path) -> None:
    path = tmp_path / "context.csv"
    options = f"--ctx 2048,4096 --live 1500 --pairs 2 --steps 10 --csv {path}".split()
    result = run("context", *ONE_LAYER, *options)
    assert result.exit_code == 0, result.output
    small, large = read(path)
    assert [(row["ctx"], row["live"], row["steps"]) for row in (small, large)] == [("2048", "1500", "20"), ("4096", "1500", "20")]
    assert small["ratio"] == "1" and float(large["ratio"]) > 0


def test_prefill_feeds_whole_prompts_in_chunks(tmp_path: Path) -> None:
    path = tmp_path / "prefill.csv"
    result = run("prefill", *ONE_LAYER, *f"--prompt 50 --chunks 20,50,4096 --repeats 2 --csv {path}".split())
    assert result.exit_code == 0, result.output
    rows = read(path)
    assert [(row["chunk"], row["prompt"]) for row in rows] == [("20", "50"), ("50", "50")]
    for row in rows:
        assert float(row["tokens_per_s"]) == pytest.approx(1000 * 50 / float(row["ms_median"]), rel=0.01)


def test_load_counts_the_bytes_of_a_file(tmp_path: Path) -> None:
    weights, path = tmp_path / "m.gguf", tmp_path / "load.csv"
    assert CliRunner().invoke(app, ["synth", str(weights), "--quant", "q4", "--layers", "1"]).exit_code == 0
    result = run("load", str(weights), "--repeats", "2", "--csv", str(path))
    assert result.exit_code == 0, result.output
    first, second = read(path)
    assert (first["run"], second["run"], first["quant"]) == ("1", "2", "q4")
    assert float(first["gb"]) == pytest.approx(weights.stat().st_size / 1e9, rel=0.02)
    assert 0 <= float(second["host_gb"]) < 10 * float(second["gb"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("decode --buckets 1,x", "--buckets: got '1,x'"),
        ("decode --buckets 0", "whole numbers above 0"),
        ("decode --random tiny-q3", "expected one of q2, q4, q8"),
        ("decode --random huge", "expected one of tiny, flash, pro"),
        ("decode --layers 2", "--random"),
        ("decode --random tiny -m F.gguf", "F.gguf: no such file"),
        ("decode --random tiny --layers 1 --kv-quant none --buckets 32", "--batched-session 16"),
        ("decode --random tiny --layers 1 --kv-quant none --dtype float16", "--dtype"),
        ("context --ctx 4096", "expected two capacities"),
        ("prefill --prompt 100", "all longer than --prompt 100"),
        ("serve --url http://example.org", "only servers on this machine"),
        ("serve --url http://127.0.0.1:1 --model F.gguf", "leave them out with --url"),
        ("serve --url http://127.0.0.1:1 --random tiny", "leave them out with --url"),
        ("serve --random tiny --model F.gguf", "--model and --random both name weights"),
        ("serve --layers 2", "--random"),
    ],
)
def test_wrong_options_are_told(arguments: str, says: str) -> None:
    result = run(*arguments.split())
    assert result.exit_code in (1, 2), result.output
    assert says in " ".join(result.output.split())


def test_a_live_context_without_room_for_the_steps_is_refused() -> None:
    result = run("decode", *ONE_LAYER, *"--batched-session 1 --ctx 128 --live 120 --steps 10".split())
    assert result.exit_code == 2
    assert "--live 120: with 10 steps a slot needs" in result.output and "--ctx is 128" in result.output


def test_a_server_that_does_not_start_shows_why(tmp_path: Path) -> None:
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"not weights" * 10)
    result = run("serve", "--model", str(junk))
    assert result.exit_code == 1
    assert "before it served" in result.output and "not a readable GGUF file" in " ".join(result.output.split())


def test_a_server_of_random_weights_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    sizes = "--clients 1,2 --ctx 16 --prompt 4 --max-tokens 6 --requests 1".split()
    result = run("serve", "--random", "tiny-q8", "--layers", "1", *sizes, "--csv", str(path))
    assert result.exit_code == 0, result.output
    alone, both = csv.DictReader(path.read_text().splitlines())
    assert (alone["model"], alone["clients"], both["clients"]) == ("tiny-q8, 1 layer", "1", "2")
    assert [row["errors"] for row in (alone, both)] == [row["compiled"] for row in (alone, both)] == ["0", "0"]
    # The first token of an answer is drawn by the last chunk of its prompt.
    assert (alone["rows"], alone["steps"], alone["chunks"]) == ("1", "5", "1") and both["chunks"] in (
        "1",
        "2",
    )  # both prompts may go together
    assert 1 <= float(both["rows"]) <= 2 and float(both["rows"]) * int(both["steps"]) == pytest.approx(10, rel=1e-3)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are looked up in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_benchmark_that_is_stopped_stops_its_server(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "ds4jax.cli", "bench", "serve", "--random", "tiny-q8", "--layers", "1"]
    bench = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children")
    while not (server := children.read_text().split()):
        assert bench.poll() is None
        time.sleep(0.02)
    bench.send_signal(number)
    assert bench.wait(60) == 128 + number
    assert not Path(f"/proc/{server[0]}").exists()


def test_a_server_of_another_kind_has_no_counts_of_ours() -> None:
    assert read_counts("http://127.0.0.1:1") is None


@pytest.mark.parametrize("quant", ["q2", "q4", "q8"])
def test_random_weights_have_the_layout_of_a_file(quant: str) -> None:
    subject = open_subject(None, f"tiny-{quant}", 4, Numerics(kv_quant="none"))
    spec = random_spec(shape_of("tiny", 4), quant, "none", "float32")
    assert quant_of(subject.model.spec) == quant == subject.quant and subject.random
    shapes = [(leaf.shape, leaf.dtype) for leaf in abstract_model(spec).leaves]
    assert [(leaf.shape, leaf.dtype) for leaf in subject.model.flat.leaves] == shapes


def test_random_weights_give_usable_logits() -> None:
    model = open_subject(None, "tiny-q2", 1, Numerics(kv_quant="none")).model
    logits = model.logits([5, 6, 7])
    assert np.isfinite(logits).all() and (logits.std(axis=1) > 0.1).all()


class TestReport:
    def test_other_columns_are_refused_and_the_file_is_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "r.csv"
        append_csv(path, [{"a": 1, "b": 0.123456}, {"a": 2, "b": 12345.6}])
        assert path.read_text() == "a,b\n1,0.1235\n2,12346\n"
        with pytest.raises(ConfigError, match="the file has the columns a,b, these are a,c"):
            append_csv(path, [{"a": 1, "c": 2}])
        assert path.read_text().count("\n") == 3

    def test_a_file_that_cannot_be_written(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be written"):
            append_csv(tmp_path / "no" / "r.csv", [{"a": 1}])

    def test_percentiles(self) -> None:
        assert percentile([3.0, 1.0, 2.0], 50) == 2.0
        assert percentile([4.0], 99) == 4.0
        assert np.isnan(percentile([], 50))
        assert percentile(list(map(float, range(101))), 90) == 90.0

    def test_counts(self) -> None:
        assert parse_counts("--x", " 16,1, 4,1") == (1, 4, 16)
        assert parse_counts("--x", "7") == (7,)

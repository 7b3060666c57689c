"""Killed servers, full disks, folders that cannot be written, servers that share a folder: a warning at most, and nothing else is lost."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4jax.serving.engine.kvstore import KVPolicy, open_store
from tests.engine.kvstore import IDENTITY, contents, files, opened, save, session

ROOT = Path(__file__).parent.parent.parent
PROMPT = list(range(100, 150))

# Children are forked from a process that has imported everything, because importing takes longer than what is tested.
CHILDREN = """
import json, os, random, signal, sys, time
from pathlib import Path
from ds4jax.serving.engine.kvstore import KVPolicy
from ds4jax.serving.engine.kvstore.files import read_entry
from ds4jax.serving.engine.kvstore.folder import Index, locked
from tests.engine.kvstore import contents, opened, save, session, files

folder = Path(sys.argv[1])

def fork(work):
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(1)  # it is done with, or failed: either way the parent must not go on twice
    return pid
"""
KILLED = (
    CHILDREN
    + """
def write_for_ever(child, pipe):
    store = opened(folder)
    for i in range(1000):
        if save(store, [child, i] * (2 + i % 50), 20_000 + 3000 * (i % 50), text=b"text", replay=b"calls"):
            os.write(pipe, b"%d " % i)

n_litter = n_acknowledged = 0
rng = random.Random(1)
for child in range(50):
    reader, writer = os.pipe()
    pid = fork(lambda: write_for_ever(child, writer))
    os.close(writer)
    said = os.read(reader, 100)  # it has begun
    time.sleep(rng.uniform(0, 0.03))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while more := os.read(reader, 4096):
        said += more
    os.close(reader)
    n_litter += sum(path.name.startswith(".tmp.") for path in files(folder))
    store = opened(folder)
    assert not any(path.name.startswith(".tmp.") for path in files(folder)), "litter"
    for i in map(int, said.split()):
        tokens = [child, i] * (2 + i % 50)
        n_acknowledged += 1
        found = store.find([*tokens, 9])
        entry = found and store.load(found)
        assert entry and entry.tokens.tolist() == tokens, f"lost: {child} {i}"
        expected = contents(session(tokens, 20_000 + 3000 * (i % 50)))["x"]
        assert entry.arrays["x"].tobytes() == expected.tobytes() and (entry.text, entry.replay) == (b"text", b"calls")
for listed in Index(folder).scan():
    read_entry(listed.path)  # nothing that is visible is damaged
print(json.dumps({"litter": n_litter, "acknowledged": n_acknowledged, "entries": len(files(folder))}))
"""
)
TOGETHER = (
    CHILDREN
    + """
policy = KVPolicy(space_mb=1, min_tokens=4)

def write_and_read(child):
    rng, told = random.Random(child), []
    store = opened(folder, told, policy=policy)
    for i in range(15):
        tokens = [rng.randrange(5)] * rng.randrange(4, 12)  # often those of another child
        save(store, tokens, 1000 * rng.randrange(1, 300))
        found = store.find([*tokens, 1])
        entry = found and store.load(found)
        # What another server deleted is not found; what is found is right.
        if entry:
            assert entry.arrays["x"].tobytes() == contents(session(entry.tokens.tolist(), entry.arrays["x"].size))["x"].tobytes()
    store.close()
    assert all("being written" in message for message in told), told
    os._exit(0)

pids = {fork(lambda: write_and_read(child)) for child in range(4)}
n_most, failed = 0, 0
while pids:
    with locked(folder):
        sizes = {}
        for path in files(folder):
            try:
                stat = path.stat()
            except FileNotFoundError:  # renamed
                continue
            sizes[stat.st_ino] = stat.st_size
    n_most = max(n_most, sum(sizes.values()))
    time.sleep(0.002)
    for pid in list(pids):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            pids.remove(pid)
            failed += status != 0
for listed in Index(folder).scan():
    read_entry(listed.path)
print(json.dumps({"most": n_most, "failed": failed, "temporary": sum(path.name.startswith(".tmp.") for path in files(folder))}))
"""
)


def run(code: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_killed_fifty_times_while_writing(tmp_path: Path) -> None:
    seen = run(KILLED, tmp_path)
    assert seen["acknowledged"] >= 50 and seen["entries"] >= seen["acknowledged"]
    assert seen["litter"] > 0, "no kill hit a write: this test shows nothing"


def test_four_processes_in_one_folder(tmp_path: Path) -> None:
    seen = run(TOGETHER, tmp_path)
    assert seen["failed"] == seen["temporary"] == 0
    assert (1 << 20) // 2 < seen["most"] <= 1 << 20


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    store = opened(tmp_path, warnings)
    assert save(store, PROMPT[:10])
    real_write, room = os.pwrite, 500

    def write(fd: int, data: bytes, offset: int) -> int:
        if offset + len(data) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", write)
        for n in (20, 21):
            assert not save(store, PROMPT[:n], 5000)
        saving = store.save(session(PROMPT, 5000))
        assert saving
        saving.put("x", np.zeros(4000, np.uint8))
        while saving.backlog_bytes:
            time.sleep(0.001)
        assert not saving.wanted
        saving.put("x", np.zeros(1000, np.uint8))  # no use, no harm
        assert saving.finish().result(30) is False
    (warning,) = warnings
    assert str(tmp_path) in warning and "No space left on device" in warning and "lower --kv-disk-space-mb" in warning
    assert len(files(tmp_path)) == 1
    assert save(store, PROMPT[:20], 5000) and store.find(PROMPT[:11])


def test_the_disk_fails_at_the_last_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    store = opened(tmp_path, warnings)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for step in ("fsync", "replace", "ftruncate"):
        with monkeypatch.context() as patch:
            patch.setattr(f"os.{step}", fail)
            assert not save(store, PROMPT)
        assert files(tmp_path) == []
    assert len(warnings) == 1 and "Input/output error" in warnings[0]
    assert save(store, PROMPT)


def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert save(opened(tmp_path), PROMPT[:10])
    before = [(path.name, path.read_bytes()) for path in files(tmp_path)]
    real_open = os.open

    def read_only(path: str | Path, flags: int, *args: int, **options: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real_open(path, flags, *args, **options)

    warnings: list[str] = []
    monkeypatch.setattr("os.open", read_only)
    store = opened(tmp_path, warnings)
    for n in (20, 21):
        assert not save(store, PROMPT[:n])
        found = store.find(PROMPT[:n])
        assert found and store.load(found)
    (warning,) = warnings
    assert "Read-only file system" in warning and "what is there is still used" in warning
    assert [(path.name, path.read_bytes()) for path in files(tmp_path)] == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    warnings: list[str] = []
    tmp_path.chmod(0o500)
    store = opened(tmp_path, warnings)
    assert not save(store, PROMPT)
    tmp_path.chmod(0o700)
    assert len(warnings) == 1 and "Permission denied" in warnings[0]


def test_a_folder_that_cannot_be_made_or_goes_away(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    warnings: list[str] = []
    for folder in (tmp_path / "file", tmp_path / "file" / "kv"):
        assert open_store(folder, IDENTITY, 1000, warn=warnings.append) is None
        assert str(folder) in warnings[-1] and "sessions are not kept on disk" in warnings[-1]
    warnings.clear()
    store = opened(tmp_path / "kv", warnings)
    (tmp_path / "kv" / ".lock").unlink()
    (tmp_path / "kv").rmdir()
    assert store.find(PROMPT) is None and store.find(PROMPT) is None and not save(store, PROMPT)
    assert len(warnings) == 2 and "no saved session is used" in warnings[0] and "was not saved" in warnings[1]


def test_litter_is_told_from_what_others_write(tmp_path: Path) -> None:
    litter, held = tmp_path / ".tmp.1.aaaa", tmp_path / ".tmp.1.bbbb"
    for path in (litter, held):
        path.write_bytes(bytes(1000))
    with held.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        opened(tmp_path)
        assert files(tmp_path) == [held]
    opened(tmp_path)
    assert files(tmp_path) == []


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    old, new = tmp_path / ".tmp.1.aaaa", tmp_path / ".tmp.1.bbbb"
    for path, age_s in ((old, 7200), (new, 60)):
        path.write_bytes(bytes(1000))
        os.utime(path, (time.time() - age_s,) * 2)
    store = opened(tmp_path)
    assert save(store, PROMPT) and store.find([*PROMPT, 1])
    assert old not in files(tmp_path) and new in files(tmp_path)


def test_a_server_that_hangs_with_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds4jax.serving.engine.kvstore.folder.LOCK_TIMEOUT_S", 0.05)
    warnings: list[str] = []
    store = opened(tmp_path, warnings)
    with (tmp_path / ".lock").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not save(store, PROMPT)
    assert len(warnings) == 1 and "another server has held" in warnings[0]
    assert save(store, PROMPT)


def test_damage_that_appears_between_finding_and_loading(tmp_path: Path) -> None:
    warnings: list[str] = []
    store = opened(tmp_path, warnings, policy=KVPolicy(min_tokens=4))
    save(store, PROMPT)
    found = store.find([*PROMPT, 1])
    assert found
    data = found.path.read_bytes()
    found.path.write_bytes(data.replace(contents(session(PROMPT))["x"].tobytes()[:50], bytes(50)))
    assert store.load(found) is None and not found.path.exists()
    assert len(warnings) == 1 and "x has another digest" in warnings[0]

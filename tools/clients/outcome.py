"""Two questions to one agent: in a HOME and a folder made for it, within a time, and what came of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.clients.agents import Agent
from tools.clients.record import Recorder
from tools.clients.scripted import FILE, QUESTIONS, SECRET


@dataclass(frozen=True)
class Outcome:
    """What an agent did. `said` is the last line of its answer, `why` what is wrong with it, empty if nothing is."""

    agent: str
    version: str
    seconds: float
    said: str
    why: str
    errors: str

    @property
    def good(self) -> bool:
        """Whether it completed."""
        return not self.why


def ask(agent: Agent, url: str, programs: Path, recorder: Recorder | None, *, longest: int | None, limit_s: float) -> Outcome:
    """Ask an agent the questions, in one session, and judge its answers.

    It has to exit well; with a recorder, that is, where the model is ours, it has to run the tool and tell what the file says, and no
    request may have failed. longest: tokens of an answer, where the agent can be told; limit_s: seconds for each
    question.
    """
    home, work = (_empty(programs / kind / agent.name) for kind in ("home", "work"))
    (work / FILE).write_text(f"{SECRET}\n", encoding="utf-8")
    agent.configure(home, url, longest)
    # Nothing of our own environment: no keys, no proxies, no settings of another agent that may have started this.
    env = {"PATH": f"{programs / 'node_modules/.bin'}:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8", "TERM": "dumb", **agent.env}
    begin = time.monotonic()
    lines, why, errors = [""], "", ""
    for command, question in zip((agent.ask, agent.resume), QUESTIONS, strict=True):
        status, out, errors = _run([*command, question], env, work, limit_s)
        lines = out.strip().splitlines()
        if why := _complaint(status, lines, recorder):
            break
    return Outcome(agent.name, _version(programs, agent.package), time.monotonic() - begin, lines[-1] if lines else "", why, errors)


def _run(command: list[str], env: Mapping[str, str], work: Path, limit_s: float) -> tuple[int | None, str, str]:
    """Run a command; status None means that it did not end in time."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=env, cwd=work, text=True, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
    ) as process:
        try:
            out, errors = process.communicate(timeout=limit_s)
            return process.returncode, out, errors
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the servers and shells that it may have started
            out, errors = process.communicate()
            return None, out, errors


def _complaint(status: int | None, lines: list[str], recorder: Recorder | None) -> str:
    """Say what is wrong with what an agent did; empty if nothing is."""
    if status is None:
        return "it did not end in time"
    if status != 0:
        return f"exit status {status}"
    if recorder is None:
        return ""  # a small model may well think until its answer is cut
    if bad := [f"{e.method} {e.path}: {e.status} {e.reply.decode(errors='replace')}" for e in recorder.exchanges if e.status != 200]:
        return "; ".join(bad)
    return "" if lines and SECRET in lines[-1] else "it did not tell what the file says"


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _version(programs: Path, package: str) -> str:
    version: str = json.loads((programs / "node_modules" / package / "package.json").read_text(encoding="utf-8"))["version"]
    return version

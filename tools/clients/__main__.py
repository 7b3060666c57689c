"""Ask every agent two questions, and show whether it came to answers.

    python -m tools.clients --programs .clients                       a scripted model: the protocol alone
    python -m tools.clients --programs .clients --url http://…        a server that runs already: whatever its model answers

Exit status 1 if an agent failed.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

from tools.clients.agents import AGENTS
from tools.clients.outcome import Outcome, ask
from tools.clients.record import Recorder
from tools.clients.scripted import scripted_server
from tools.clients.scrub import write_fixture


def main() -> int:
    """Run the agents one after the other, each against a server of its own unless one is named."""
    options = _options()
    failed = 0
    for agent in AGENTS:
        if options.only and agent.name not in options.only:
            continue
        server = nullcontext((options.url, None)) if options.url else scripted_server()
        with server as (url, recorder):
            outcome = ask(agent, url, options.programs.resolve(), recorder, longest=options.longest, limit_s=options.limit)
        failed += not outcome.good
        _show(outcome, recorder)
        if options.fixtures and recorder is not None and outcome.good:
            write_fixture(options.fixtures / f"{agent.name}.json", recorder.exchanges)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.clients", description="Ask every agent two questions.")
    parser.add_argument("--programs", type=Path, required=True, help="folder in which npm has installed the agents")
    parser.add_argument("--url", help="a server that runs already; without it, a scripted one")
    parser.add_argument("--only", action="append", choices=[agent.name for agent in AGENTS], help="this agent; may be repeated")
    parser.add_argument("--longest", type=int, help="tokens of an answer at most; Codex cannot be told, but `ds4jax serve --tokens` can")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds an agent may take for a question")
    parser.add_argument("--fixtures", type=Path, help="write what each sent into this folder, without names, ids and prose")
    return parser.parse_args()


def _show(outcome: Outcome, recorder: Recorder | None) -> None:
    print(
        f"{outcome.agent:12} {outcome.version:10} {'ok' if outcome.good else 'FAILED':7} {outcome.seconds:6.1f} s  {outcome.said}",
        flush=True,
    )
    for exchange in recorder.exchanges if recorder is not None else ():
        print(f"    {exchange.status} {exchange.method} {exchange.path}  {len(exchange.body):,} bytes")
    if not outcome.good:
        print(f"    {outcome.why}\n{outcome.errors[-3000:]}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())

"""vllm-router in front of two servers: every API passes, streamed and whole, under every policy that spreads requests.

    python -m tools.clients.router --program .clients/router/bin/vllm-router

Exit status 1 if a request failed, or if no second server was asked where requests take turns.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tools.clients.record import Recorder
from tools.clients.scripted import TITLE, scripted_server

POLICIES = ("round_robin", "cache_aware", "power_of_two", "consistent_hash")
START_S = 60.0
HELLO = [{"role": "user", "content": "Hello!"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 100},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1000},
    "/v1/responses": {"input": "Hello!"},
}
ENDS = {  # of a stream
    "/v1/chat/completions": "data: [DONE]\n\n",
    "/v1/completions": "data: [DONE]\n\n",
    "/v1/messages": 'data: {"type":"message_stop"}\n\n',
    "/v1/responses": "}\n\n",
}


def main() -> int:
    """Try one policy after the other."""
    parser = argparse.ArgumentParser(prog="python -m tools.clients.router", description="Ask through vllm-router.")
    parser.add_argument("--program", type=Path, required=True, help="the router")
    program = parser.parse_args().program
    complaints = []
    for policy in POLICIES:
        with scripted_server() as (first, one), scripted_server() as (second, two), router(program, policy, [first, second]) as url:
            found = [f"{policy}: {complaint}" for complaint in ask_all(url)]
        shares = [sum(exchange.path in REQUESTS for exchange in recorder.exchanges) for recorder in (one, two)]
        if policy == "round_robin" and 0 in shares:
            found.append(f"{policy}: the servers got {shares} requests")
        print(f"{policy:16} {'FAILED' if found else 'ok':7} {shares[0]} + {shares[1]} requests; also asked: {others(one, two)}", flush=True)
        complaints += found
    print("\n".join(complaints), file=sys.stderr, end="\n" if complaints else "")
    return 1 if complaints else 0


@contextmanager
def router(program: Path, policy: str, workers: list[str]) -> Iterator[str]:
    """Run the router until it answers, and stop it in the end; yields its URL."""
    ports = [free_port(), free_port()]
    command = [program, "--policy", policy, "--port", str(ports[0]), "--prometheus-port", str(ports[1]), "--worker-urls", *workers]
    url = f"http://127.0.0.1:{ports[0]}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(url, process)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the router is well. Raises RuntimeError if it ends, or takes too long."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the router does not answer at {url} (exit status {process.poll()})")


def ask_all(url: str) -> list[str]:
    """Ask every API, streamed and whole; returns what went wrong."""
    complaints = []
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        for path, body in REQUESTS.items():
            for stream in (False, True):
                response = client.post(path, json={"model": "deepseek-v4-flash", "stream": stream, **body})
                # In a stream, the title comes in pieces.
                good = response.text.endswith(ENDS[path]) if stream else TITLE in response.text
                if response.status_code != 200 or not good:
                    complaints.append(f"{path} stream={stream}: {response.status_code} {response.text[-300:]}")
        loads = client.get("/get_loads").json()["workers"]
        if [worker["load"] for worker in loads] != [0, 0]:
            complaints.append(f"/get_loads: {loads}")
    return complaints


def others(*recorders: Recorder) -> str:
    """Name what the router asked on its own account."""
    asked = {(e.method, e.path, e.status) for recorder in recorders for e in recorder.exchanges if e.path not in REQUESTS}
    return ", ".join(f"{method} {path} {status}" for method, path, status in sorted(asked))


def free_port() -> int:
    """Find a port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


if __name__ == "__main__":
    raise SystemExit(main())

"""The agents: where each has its configuration, and how it is asked one question without a terminal.

A configuration is the one that the agent's page in docs/clients shows, with the address of the server at hand: what is told to
people is what is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs" / "clients"
ADDRESS = "http://127.0.0.1:8080"
"""The address that the pages show."""

LONGEST = "16384"
"""The longest answer that the pages show."""


@dataclass(frozen=True)
class Agent:
    """An agent. `name` is that of its page, `package` npm's; `config` is a path below its HOME.

    A first question is appended to `ask`, one that goes on with the same session to `resume`.
    """

    name: str
    package: str
    config: str
    ask: tuple[str, ...]
    resume: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def configure(self, home: Path, url: str, longest: int | None) -> None:
        """Write its configuration into a new HOME. longest: tokens of an answer at most, in place of those on the page."""
        path = home / self.config
        path.parent.mkdir(parents=True, exist_ok=True)
        config = self.documented_config().replace(ADDRESS, url)
        path.write_text(config.replace(LONGEST, LONGEST if longest is None else str(longest)), encoding="utf-8")

    def documented_config(self) -> str:
        """The configuration on its page: the first block in the language of the file."""
        page = (PAGES / f"{self.name}.md").read_text(encoding="utf-8")
        block = re.search(rf"^```{Path(self.config).suffix[1:]}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        assert block is not None, f"{self.name}.md shows no {self.config}"
        return block[1]


_CLAUDE = ("claude", "--allowedTools", "Bash(cat:*)")
_CODEX = ("codex", "exec", "--skip-git-repo-check", "--sandbox", "read-only")
_PI = ("pi", "--provider", "ds4jax", "--model", "deepseek-v4-flash")

AGENTS = (
    Agent("claude-code", "@anthropic-ai/claude-code", ".claude/settings.json", (*_CLAUDE, "-p"), (*_CLAUDE, "--continue", "-p")),
    Agent("codex", "@openai/codex", ".codex/config.toml", _CODEX, (*_CODEX, "resume", "--last")),
    Agent(
        "opencode",
        "opencode-ai",
        ".config/opencode/opencode.json",
        ("opencode", "run"),
        ("opencode", "run", "--continue"),
        {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
    ),
    Agent(
        "pi",
        "@earendil-works/pi-coding-agent",
        ".pi/agent/models.json",
        (*_PI, "-p"),
        (*_PI, "--continue", "-p"),
        {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
    ),
)

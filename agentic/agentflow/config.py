"""AgentFlow's own settings, read from attributes `agentflow_<field>` of the argument namespace.

Inputs: the namespace after slime applied the YAML of `--custom-config-path`. Invariants: every field is checked once,
before any model is called; an unknown `agentflow_*` attribute is an error that names the nearest field; the object is
frozen and hashable, so it can key the cache of clients. Leaves out: addresses and sampling of the roles (role file).
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, fields

from agentic.agentflow.tools import WebSettings, tool_class
from agentic.common.errors import ConfigError
from agentic.common.settings import Settings

PREFIX = "agentflow_"
SETTINGS = Settings(PREFIX)
TRAINABLE_ROLES = ("analysis", "next_step", "final")
TURN_WEIGHTINGS = ("paper", "token_mean", "uniform_turn")
BATCH_LAYOUTS = ("rollouts", "padded_turns")
JUDGES = ("rule_first", "rule_only")


@dataclass(frozen=True)
class AgentFlowConfig:
    """Settings of one run; defaults follow the paper where it states a value."""

    roles: str
    """Path of the role file (YAML): who answers where."""
    prompt_set: str = "standard"
    """Name of a set under `prompts/`, or the path of a directory with the same files."""
    train_roles: tuple[str, ...] = ("analysis", "next_step")
    """Which turns are trained. `next_step` alone is the paper; with `final` the policy also writes the answer."""
    turn_weighting: str = "paper"
    """`paper`: mean over tokens, then turns, then trajectories. `token_mean`: mean over all tokens of a trajectory.
    `uniform_turn`: every turn weighs 1, long trajectories count more."""
    batch_layout: str = "rollouts"
    """`rollouts`: the batch size counts trajectories, the turns of one share a rollout id. `padded_turns`: for slime
    0.2.2, whose loss knows no rollouts; the batch size is trajectories times the most trained turns of one, masked rows
    fill the batch, and advantages carry the weights. The KL and entropy terms then weigh every turn alike."""
    max_steps: int = 3
    """Tool steps in training (paper: 3)."""
    eval_max_steps: int = 10
    """Tool steps in evaluation (paper: 10)."""
    tools: tuple[str, ...] = ("base_generator", "python_coder")
    """Tools the planner may choose from."""
    max_calls_per_step: int = 1
    """`tool.execute` calls accepted in one command."""
    max_result_tokens: int = 1024
    """Token budget of one result in the memory."""
    max_memory_tokens: int = 8192
    """Token budget of the rendered memory; the oldest results shrink first."""
    max_context_len: int = 32768
    """Prompt plus response tokens of one policy call."""
    max_trajectory_tokens: int = 131072
    """Prompt plus response tokens of all policy calls of a trajectory; checked before each next step."""
    trajectory_timeout_s: float = 500.0
    """Wall clock of a trajectory in seconds (paper: 500); checked before each call."""
    strip_wrapper: bool = True
    """Remove the known instruction wrapper of the DAPO data set around a problem."""
    judge: str = "rule_first"
    """`rule_first`: exact rule, then the judge where it cannot tell. `rule_only`: no judge is called."""
    max_failure_rate: float = 0.5
    """A rollout with a larger share of failed trajectories stops the run."""
    sandbox_timeout_s: float = 10.0
    """Wall clock of one program of `python_coder`."""
    sandbox_memory_mb: int = 1024
    """Address space of one program of `python_coder`."""
    sandbox_preload: tuple[str, ...] = ()
    """Modules that programs find imported already, e.g. `numpy`, `sympy`; saves their import time in each call."""
    judge_cache: str = ""
    """SQLite file that keeps the judge's verdicts, shared by all processes; empty: every answer is judged anew."""
    web_search_url: str = ""
    """Address of the service behind `web_search`, with `{query}` where the query goes; it answers with JSON."""
    web_search_fields: tuple[str, ...] = ("results", "title", "url", "content")
    """Dotted paths in that JSON: the list of results, then title, address and snippet in one result."""
    wikipedia_url: str = ""
    """Address of the MediaWiki interface (`.../w/api.php`) behind `wikipedia_search`."""
    blocked_domains: tuple[str, ...] = ()
    """Domains that the search tools must not show or read, e.g. those with the solutions of a benchmark."""
    web_private_addresses: bool = False
    """Let `web_page` read addresses that are not public, such as services of the cluster."""
    web_timeout_s: float = 10.0
    """Wall clock of one fetch of a search tool."""
    web_max_bytes: int = 1_000_000
    """Bytes read of one page."""
    mcp_config: str = ""
    """YAML file with MCP servers; all their tools are added to `tools`."""

    @classmethod
    def from_args(cls, args: Namespace) -> AgentFlowConfig:
        """Read and check all `agentflow_*` attributes.

        Raises:
            ConfigError: unknown name, missing `agentflow_roles`, or a value of the wrong type or range.
        """
        defaults = {field.name: "" if field.name == "roles" else field.default for field in fields(cls)}
        given = SETTINGS.read(args, defaults)
        if not given.get("roles"):
            raise ConfigError(f"{PREFIX}roles is not set; give the path of the role file in --custom-config-path")
        return cls(**given)

    def __post_init__(self) -> None:
        SETTINGS.check_choice("turn_weighting", self.turn_weighting, TURN_WEIGHTINGS)
        SETTINGS.check_choice("batch_layout", self.batch_layout, BATCH_LAYOUTS)
        SETTINGS.check_choice("judge", self.judge, JUDGES)
        for role in self.train_roles:
            SETTINGS.check_choice("train_roles", role, TRAINABLE_ROLES)
        for tool in self.tools:
            tool_class(tool)
        SETTINGS.check("train_roles", self.train_roles, "name at least one role", self.train_roles)
        each_once = self.tools and len(set(self.tools)) == len(self.tools)
        SETTINGS.check("tools", self.tools, "name each tool once, and at least one", each_once)
        rate = self.max_failure_rate
        SETTINGS.check("max_failure_rate", rate, "must be between 0 and 1", 0 <= rate <= 1)
        for field in fields(self):
            if type(field.default) in (int, float) and field.name != "max_failure_rate":
                value = getattr(self, field.name)
                SETTINGS.check(field.name, value, "must be positive", value > 0)

    @property
    def most_trained_turns(self) -> int:
        """Of one trajectory in training."""
        return sum(self.max_steps if role == "next_step" else 1 for role in set(self.train_roles))

    @property
    def required_roles(self) -> tuple[str, ...]:
        """Roles that the role file must contain under these settings."""
        final = () if "final" in self.train_roles else ("generator",)
        judge = ("judge",) if self.judge == "rule_first" else ()
        specs = (tool_class(tool).spec for tool in self.tools)
        tools = (spec.name for spec in specs if spec.needs_role)
        return ("planner", "executor", "verifier", *tools, *final, *judge)

    @property
    def web(self) -> WebSettings:
        """What the search tools need of these settings."""
        return WebSettings(
            search_url=self.web_search_url,
            search_fields=self.web_search_fields,
            wikipedia_url=self.wikipedia_url,
            blocked_domains=self.blocked_domains,
            private_addresses=self.web_private_addresses,
            timeout_s=self.web_timeout_s,
            max_bytes=self.web_max_bytes,
        )

"""Write the reference pages of flags and settings from the code, so that they cannot lag behind it.

    python tools/make_flag_docs.py [--check]

Writes `docs/en/reference/flags.md` (the argument parser of `train.py`) and, beside it, `<method>_settings.md` (settings, role
file and prompt templates, from the docstrings under the dataclass fields). With --check nothing is written; exit code 1
and one line per page when a page differs from what would be written. A flag without help or a field without docstring is an
error: what is not described cannot be used.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agentic.agentflow.config import PREFIX, AgentFlowConfig
from agentic.agentflow.crew import ROLES
from agentic.agentflow.prompts import FIELDS
from agentic.common.roles import DEFAULT_KEYS, FROZEN_DEFAULTS, ROLE_KEYS, SERVER_KEYS, Role, ServerEntry
from agentic.memagent.config import PREFIX as MEMAGENT_PREFIX
from agentic.memagent.config import MemAgentConfig
from agentic.memagent.prompts import SLOTS
from agentic.toolorchestra.config import PREFIX as ORCHESTRA_PREFIX
from agentic.toolorchestra.config import OrchestraConfig
from agentic.toolorchestra.experts import NOT_EXPERTS, Alias
from agentic.toolorchestra.prompts import FIELDS as ORCHESTRA_FIELDS
from slime.backends.sglang_utils.arguments import add_sglang_arguments
from slime.utils.arguments import FLAG_GROUPS
from slime.utils.arguments.parser import SlimeArgumentParser

REFERENCE = ROOT / "docs" / "en" / "reference"
NOTICE = "<!-- Written by tools/make_flag_docs.py; do not edit. -->"
# What each role of AgentFlow does; a role that is missing here stops the tool.
ROLE_WORK = {
    "planner": "analysis and next step (with `final` in `agentflow_train_roles` also the answer); the policy",
    "executor": "writes the command that calls the chosen tool",
    "verifier": "decides whether to go on or to stop",
    "base_generator": "the tool that answers a query from its own knowledge",
    "python_coder": "writes the program that the sandbox runs",
    "generator": "writes the final answer, unless the policy does",
    "judge": "scores an answer where the exact rule cannot tell; not needed with `agentflow_judge: rule_only`",
}
ORCHESTRA_ROLE_WORK = {
    "orchestrator": "decides what to do next; the policy",
    "user": "plays the customer of tau2; not needed with `orchestra_user: scripted`",
    "judge": "scores answers to questions where the rule cannot tell; without it those are wrong",
    "retrieval": "address of the retrieval service (`api: service`), for the tool `search`",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a page is out of date")
    args = parser.parse_args(argv)
    wanted = pages()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if args.check:
            print(f"{path.relative_to(ROOT)} is out of date: run python tools/make_flag_docs.py", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if args.check and stale else 0


def pages() -> dict[Path, str]:
    """The text of every page, by path."""
    return {
        REFERENCE / "flags.md": flags_page(),
        REFERENCE / "agentflow_settings.md": agentflow_page(),
        REFERENCE / "memagent_settings.md": memagent_page(),
        REFERENCE / "toolorchestra_settings.md": toolorchestra_page(),
    }


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; a bar inside a cell is escaped."""
    cells = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]


# ---- flags ----


def flags_page() -> str:
    lines = [
        NOTICE,
        "",
        "# Flags of `train.py`",
        "",
        "A misspelt flag is an error that names the nearest one; abbreviations are not accepted. A default `-` means not set; the",
        "description says what then happens. Every key of the YAML file of `--custom-config-path` is set on the parsed arguments",
        "before they are checked: `lr: 1e-5` there replaces `--lr`, and `agentflow_roles: FILE` is how a method gets its settings.",
        "",
        "The flags of `tools/quickstart.py` and the other programs under `tools/` are listed by their `--help`.",
    ]
    providers = [(inspect.getmodule(group).__doc__ or "", group) for group in FLAG_GROUPS]
    providers.append(("SGLang engines and their router.", add_sglang_arguments))
    for title, provider in providers:
        name, _, rest = title.strip().splitlines()[0].removeprefix("Flags").lstrip(": ").partition(".")
        lines += ["", f"## {name[:1].upper()}{name[1:]}", ""] + ([rest.strip(), ""] if rest.strip() else [])
        lines += table(("flag", "value", "default", "description"), map(flag_row, flags_of(provider)))
    return "\n".join(lines) + "\n"


def flags_of(provider: Callable[[argparse.ArgumentParser], Any]) -> list[argparse.Action]:
    """The flags that one group registers. ValueError for one without help."""
    parser = SlimeArgumentParser(add_help=False)
    provider(parser)
    for action in parser._actions:
        if not action.help:
            raise ValueError(f"{action.option_strings[0]} has no help text")
    return parser._actions


def flag_row(action: argparse.Action) -> tuple[str, str, str, str]:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    default = "required" if action.required else shown_default(action)
    return names, value_of(action), default, action.help or ""


def value_of(action: argparse.Action) -> str:
    """What follows the flag on the command line."""
    if action.nargs == 0:
        return "switch"
    if action.choices is not None:
        kind = ", ".join(f"`{choice}`" for choice in action.choices)
    else:
        kind = {"json_object": "JSON"}.get(
            getattr(action.type, "__name__", "text"), getattr(action.type, "__name__", "text")
        )
        kind = "text" if kind == "str" else kind
    suffix = {"+": " (one or more)", "*": " (any number)"}.get(str(action.nargs), "")
    return kind + suffix + (" (repeatable)" if isinstance(action, argparse._AppendAction) else "")


def shown_default(action: argparse.Action) -> str:
    if action.default is None or action.default in ([], {}) or action.nargs == 0:
        return "-"
    return f"`{action.default}`"


# ---- settings of the methods ----


def agentflow_page() -> str:
    if set(ROLE_WORK) != set(ROLES):
        raise ValueError(f"ROLE_WORK describes {sorted(ROLE_WORK)}, the roles are {sorted(ROLES)}")
    lines = [
        *settings_section("AgentFlow", PREFIX, AgentFlowConfig),
        *role_file_section(PREFIX, AGENTFLOW_EXAMPLE, ROLE_WORK),
        *prompts_section("A prompt set is a folder with one file per role.", FIELDS),
    ]
    return "\n".join(lines) + "\n"


def memagent_page() -> str:
    lines = [
        *settings_section("MemAgent", MEMAGENT_PREFIX, MemAgentConfig),
        "",
        "## Prompt templates",
        "",
        "A prompt set is a folder with one file per turn; `{field}` is replaced by token ids. `no_memory.txt` is the memory before",
        "the first turn; `answer_prefill.txt`, where it is there, begins the answer.",
        "",
        *table(("file", "fields"), [(f"`{name}.txt`", ", ".join(f"`{f}`" for f in SLOTS[name])) for name in SLOTS]),
    ]
    return "\n".join(lines) + "\n"


def toolorchestra_page() -> str:
    if set(ORCHESTRA_ROLE_WORK) != set(NOT_EXPERTS):
        raise ValueError(f"ORCHESTRA_ROLE_WORK describes {sorted(ORCHESTRA_ROLE_WORK)}, not {sorted(NOT_EXPERTS)}")
    experts = "any other name: an expert model, called under the aliases that map to it"
    lines = [
        *settings_section("ToolOrchestra", ORCHESTRA_PREFIX, OrchestraConfig),
        *role_file_section(ORCHESTRA_PREFIX, ORCHESTRA_EXAMPLE, ORCHESTRA_ROLE_WORK),
        "",
        f"And {experts}. Prices are what the ledger charges, unless the alias or the record has its own.",
        "",
        "## Aliases",
        "",
        "The file of `orchestra_aliases` maps each alias to the name of a model, or to a mapping with these keys. The kind of an",
        "alias is its first part: `search-`, `reasoner-`, `answer-` (questions), `expert-` (tau2). Records may override both.",
        "",
        *table(("key", "default", "meaning"), [(f"`{n}`", *row) for n, row in described_fields(Alias).items()]),
        *prompts_section("A prompt set is a folder with one file per purpose.", ORCHESTRA_FIELDS),
    ]
    return "\n".join(lines) + "\n"


def settings_section(method: str, prefix: str, config: type) -> list[str]:
    """Head of a page and the table of settings."""
    return [
        NOTICE,
        "",
        f"# Settings of {method}",
        "",
        f"Keys of the YAML file of `--custom-config-path`. An unknown `{prefix}*` key, or a value of the wrong type, is an error.",
        "",
        *table(
            ("key", "default", "meaning"), [(f"`{prefix}{n}`", *row) for n, row in described_fields(config).items()]
        ),
    ]


def role_file_section(prefix: str, example: Sequence[str], work: dict[str, str]) -> list[str]:
    """The role file: an example, the roles, and the keys of roles and servers."""
    roles, servers = described_fields(Role), described_fields(ServerEntry)
    return [
        "",
        "## Role file",
        "",
        f"The YAML file of `{prefix}roles` has the sections `defaults`, `servers` and `roles`. It says who answers where; the table",
        "that follows from it is logged at start. `python scripts/serve_roles.py FILE` starts what stands under `servers`.",
        "",
        "```yaml",
        *example,
        "```",
        "",
        "### roles",
        "",
        *table(("role", "work"), [(f"`{role}`", text) for role, text in work.items()]),
        "",
        "Each role has exactly one of `server` and `url`. Keys marked * can also stand under `defaults`; `temperature`, `top_p` and",
        "`stop` there are for frozen roles only, because the policy is sampled as the training flags say.",
        "",
        *table(("key", "default", "meaning"), role_rows(roles)),
        "",
        "### servers",
        "",
        *table(("key", "default", "meaning"), [(f"`{n}`", *servers[n]) for n in servers if n in SERVER_KEYS]),
    ]


def prompts_section(what: str, fields: dict[str, tuple[str, ...]]) -> list[str]:
    return [
        "",
        "## Prompt templates",
        "",
        f"{what} `${{field}}` is replaced, `$$` is a dollar; a line `---` ends the system message.",
        "",
        *table(("file", "fields"), [(f"`{name}.txt`", ", ".join(f"`{f}`" for f in fields[name])) for name in fields]),
    ]


AGENTFLOW_EXAMPLE = (
    "defaults: {timeout_s: 60}",
    "servers:",
    "  frozen: {model: path/to/model, port: 30000, options: {max-total-tokens: 65536}}",
    "roles:",
    "  planner: {url: policy, max_new_tokens: 512}",
    "  executor: {server: frozen, max_new_tokens: 512}",
    "  judge: {url: http://127.0.0.1:8000, api: chat, model: name-of-the-model}",
)
ORCHESTRA_EXAMPLE = (
    "defaults: {timeout_s: 180, retries: 1}",
    "servers:",
    "  large: {model: path/to/Qwen3-32B, port: 30001}",
    "  small: {model: path/to/Qwen3-14B, port: 30002}",
    "roles:",
    "  orchestrator: {url: policy, price_in: 0.2, price_out: 0.2}",
    "  user: {server: large, api: chat, temperature: 1.0}",
    "  judge: {server: large}",
    "  retrieval: {url: http://127.0.0.1:8000, api: service}",
    "  qwen3-32b: {server: large, api: chat, price_in: 0.6, price_out: 1.2}",
    "  qwen3-14b: {server: small, api: chat, price_in: 0.3, price_out: 0.3}",
)


def role_rows(roles: dict[str, tuple[str, str]]) -> list[tuple[str, str, str]]:
    rows = [("`server`", "-", "Name of an entry under `servers`; gives `url`, `model` and `tokenizer`.")]
    for name, (default, text) in roles.items():
        if name in ROLE_KEYS:
            if name in FROZEN_DEFAULTS:
                default = f"frozen `{FROZEN_DEFAULTS[name]}`, policy: training flag"
            rows.append((f"`{name}`" + (" *" if name in DEFAULT_KEYS else ""), default, text))
    return rows


def described_fields(cls: type) -> dict[str, tuple[str, str]]:
    """Default and docstring of every field of a dataclass; ValueError for a field without docstring (`name`, a key, apart)."""
    body = next(node for node in ast.parse(inspect.getsource(cls)).body if isinstance(node, ast.ClassDef)).body
    texts = {
        field.target.id: " ".join(text.value.value.split())
        for field, text in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
    described = {}
    for field in dataclasses.fields(cls):
        if field.name not in texts and field.name != "name":
            raise ValueError(f"{cls.__name__}.{field.name} has no docstring under it")
        described[field.name] = (field_default(field), texts.get(field.name, ""))
    return described


def field_default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return "-"
    if field.default is dataclasses.MISSING:
        return "required"
    if field.default in (None, (), ""):
        return "-"
    value = ", ".join(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    sys.exit(main())

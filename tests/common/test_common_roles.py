"""Role files: what is read, what the policy takes from the trainer, and one clear error for each mistake."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from agentic.common.engines import engine_urls
from agentic.common.errors import ConfigError
from agentic.common.roles import RETRIEVAL, RoleTable, load_servers

KNOWN = ("planner", "executor", "judge")
GOOD = """
defaults: {temperature: 0.2, timeout_s: 30, retries: 1, max_concurrency: 8, stop: ["###"]}
servers:
  frozen: {model: models/base, port: 30000, options: {max-total-tokens: 65536}}
roles:
  planner: {url: policy, max_new_tokens: 64}
  executor: {server: frozen, max_new_tokens: 32, temperature: 0.5}
  judge: {url: "http://10.0.0.1:8000/v1/", api: chat, model: big, stop: END}
"""


def load(tmp_path: Path, text: str, required: tuple[str, ...] = ()) -> RoleTable:
    file = tmp_path / "roles.yaml"
    file.write_text(text)
    return RoleTable.load(file, "http://127.0.0.1:3000/", KNOWN, required)


def test_policy_takes_sampling_from_the_trainer_and_frozen_roles_from_the_file(tmp_path: Path) -> None:
    table = load(tmp_path, GOOD, required=KNOWN)
    planner, executor, judge = table["planner"], table["executor"], table["judge"]
    assert planner.trained and planner.url == "http://127.0.0.1:3000"
    assert (planner.temperature, planner.top_p, planner.stop, planner.max_new_tokens) == (None, None, (), 64)
    assert (planner.timeout_s, planner.retries, planner.max_concurrency) == (30, 1, 8)
    assert not executor.trained and executor.url == "http://127.0.0.1:30000"
    assert (executor.model, executor.tokenizer, executor.temperature) == ("models/base", "models/base", 0.5)
    assert (judge.api, judge.url, judge.temperature) == ("chat", "http://10.0.0.1:8000/v1", 0.2)
    assert judge.stop == ("END",) and judge.max_new_tokens == 2048 and executor.stop == ("###",)
    assert table.servers["frozen"].options == {"max-total-tokens": 65536}
    assert "judge" in table and "coder" not in table


def test_explicit_policy_sampling_wins(tmp_path: Path) -> None:
    table = load(tmp_path, "roles: {planner: {url: policy, temperature: 1.0}}")
    assert table["planner"].temperature == 1.0


def test_describe_shows_every_role_on_a_line(tmp_path: Path) -> None:
    lines = load(tmp_path, GOOD).describe().splitlines()
    assert len(lines) == 4 and lines[0].split()[:3] == ["role", "trained", "api"]
    assert lines[1].split()[:4] == ["planner", "yes", "generate", "http://127.0.0.1:3000"]
    assert "(training flag)" in lines[1] and lines[2].split()[1] == "no"


@pytest.mark.parametrize(
    "text, message",
    [
        ("roles: {plannr: {url: policy}}", "unknown role 'plannr' (did you mean 'planner'?)"),
        ("roles: {planner: {url: policy, temprature: 1}}", "unknown key 'temprature' (did you mean 'temperature'?)"),
        ("role: {}", "unknown key 'role' (did you mean 'roles'?)"),
        ("defaults: {url: x}", "defaults: unknown key 'url'"),
        ("roles: {planner: {url: policy, server: a}}", "exactly one of `url` and `server`"),
        ("roles: {planner: {max_new_tokens: 3}}", "exactly one of `url` and `server`"),
        ("roles: {executor: {server: frozn}}\nservers: {frozen: {model: m, port: 1}}", "did you mean 'frozen'?"),
        ("roles: {planner: {url: policy, api: chat, model: m}}", "the policy must use `api: generate`"),
        ("roles: {executor: {url: 'http://a:1'}}", "needs `tokenizer: PATH`"),
        ("roles: {executor: {url: 'http://a:1', api: chat}}", "needs `model: NAME`"),
        ("roles: {executor: {url: 'a:1', tokenizer: t}}", "must be `policy` or start with http://"),
        ("roles: {executor: {url: 'http://a:1', api: grpc}}", "api 'grpc' is none of generate, chat"),
        ("roles: {planner: {url: policy, retries: -1}}", "retries is -1, must be a whole number >= 0"),
        ("roles: {planner: {url: policy, max_new_tokens: 1.5}}", "max_new_tokens is 1.5"),
        ("roles: {planner: {url: policy, timeout_s: 0}}", "timeout_s is 0, must be a number > 0"),
        ("roles: {planner: 3}", "roles.planner: must be a mapping"),
        ("roles: [planner]", "`roles` must be a mapping, not list"),
        ("servers: {a: {model: m}}", "servers.a: `port` is missing"),
        ("servers: {a: {model: m, port: 99999}}", "99999 is not a port number"),
        ("servers: {a: {model: m, port: 1}, b: {model: m, port: 1}}", "is used twice"),
        ("roles: {}\n  bad: [", "line 2 is not valid YAML"),
        ("- 1", "must be a mapping with the keys"),
    ],
)
def test_mistakes_name_the_file_and_the_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value) and "roles.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_role_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing role 'judge'"):
        load(tmp_path, "roles: {planner: {url: policy}}", required=("planner", "judge"))
    with pytest.raises(ConfigError, match="no role 'executor'"):
        _ = load(tmp_path, "roles: {planner: {url: policy}}")["executor"]
    with pytest.raises(FileNotFoundError, match="nowhere.yaml does not exist"):
        load_servers(tmp_path / "nowhere.yaml")


# --------------------------------------------------------------------------------------------------------------------
# Where servers run, services, models of the run's own engines.


def test_a_server_knows_its_gpus_and_its_machine(tmp_path: Path) -> None:
    text = """
servers:
  here: {model: m, port: 1, options: {base-gpu-id: 4, tp_size: 2, dp-size: 2}}
  there: {model: m, port: 1, node: 10.0.0.2, gpus: [6, 7], options: {tp-size: 2}}
  search: {kind: retrieval, port: 2, node: "", options: {index: folder, embedder: ""}}
"""
    (tmp_path / "roles.yaml").write_text(text)
    here, there, search = load_servers(tmp_path / "roles.yaml").values()
    assert here.device_ids() == (4, 5, 6, 7) and here.host == "127.0.0.1" and here.node is None
    assert there.device_ids() == (6, 7) and there.url == "http://10.0.0.2:1"
    assert search.kind == RETRIEVAL and search.node is None and search.options == {"index": "folder"}


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("{port: 1, kind: database}", "kind 'database' is none of model, retrieval"),
        ("{port: 1}", "`model` is missing"),
        ("{port: 1, kind: retrieval}", "needs `options: {index: DIR}`"),
        ("{port: 1, model: m, gpus: [0, 1]}", "2 gpus, but tp-size x pp-size x dp-size is 1"),
        ("{port: 1, model: m, gpus: [0, 0]}", "gpus must be different numbers"),
        ("{port: 1, model: m, gpus: [0], options: {base-gpu-id: 0}}", "exclude each other"),
    ],
)
def test_servers_that_cannot_be(tmp_path: Path, server: str, message: str) -> None:
    (tmp_path / "roles.yaml").write_text(f"servers: {{one: {server}}}")
    with pytest.raises(ConfigError, match=f"servers.one: .*{message}"):
        load_servers(tmp_path / "roles.yaml")


SEARCH = """
servers:
  search: {kind: retrieval, port: 8000, options: {index: folder}}
  frozen: {model: m, port: 30000}
"""


def test_a_role_on_the_retrieval_service_needs_no_model(tmp_path: Path) -> None:
    role = load(tmp_path, SEARCH + "roles: {judge: {server: search}}")["judge"]
    assert (role.url, role.api, role.tokenizer, role.model) == ("http://127.0.0.1:8000", "service", None, None)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ("{judge: {server: search, api: chat, model: m}}", "roles.judge: servers.search is no model"),
        ("{judge: {url: 'http://127.0.0.1:30000/', api: service}}", "is also the address of servers.frozen"),
    ],
)
def test_services_and_models_do_not_share_an_address(tmp_path: Path, roles: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, SEARCH + f"roles: {roles}")


def test_a_role_on_an_engine_of_the_run_never_reaches_the_policy(tmp_path: Path) -> None:
    routers = {"actor": ("10.0.0.1", 3000), "coder": ("10.0.0.1", 3001)}
    args = Namespace(sglang_model_routers=routers, sglang_router_ip="10.0.0.1", sglang_router_port=3000)
    assert engine_urls(args) == {"coder": "http://10.0.0.1:3001"}
    text = "roles: {{planner: {{url: policy}}, executor: {{url: 'engine:{}', tokenizer: m}}}}"
    (tmp_path / "roles.yaml").write_text(text.format("coder"))
    table = RoleTable.load(tmp_path / "roles.yaml", "http://10.0.0.1:3000", KNOWN, engines=engine_urls(args))
    assert table["executor"].url == "http://10.0.0.1:3001" and not table["executor"].trained
    assert RoleTable.load(tmp_path / "roles.yaml", "http://x", KNOWN)["executor"].url == "http://coder"
    (tmp_path / "roles.yaml").write_text(text.format("actor"))
    with pytest.raises(ConfigError, match="roles.executor: url 'engine:actor': this run has no such model"):
        RoleTable.load(tmp_path / "roles.yaml", "http://x", KNOWN, engines=engine_urls(args))

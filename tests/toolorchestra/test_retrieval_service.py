"""The service over real HTTP: wire format, visibility, keys, back-pressure, errors; and the client against it."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from helpers_agentic import FakeEngine, Reply
from helpers_retrieval import PASSAGES, WordEmbedder, make_index, running

from agentic.common.errors import ConfigError, RoleBadResponse, RoleTimeout, RoleUnavailable
from agentic.common.roles import Role
from agentic.toolorchestra.retrieval.client import RetrievalClient
from agentic.toolorchestra.retrieval.service import Query, Retriever, ServiceSettings, load_eid_lists

CAPITAL = "capital of Italy"


def role(url: str, **more: Any) -> Role:
    return Role(**{"name": "retrieval", "url": url, "timeout_s": 10.0, "retries": 0, **more})


def ask(url: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{url}/retrieve", content=content, headers=headers, trust_env=False, timeout=20)


def test_one_query_gives_one_sorted_list(tmp_path: Path) -> None:
    """Fact 34: at most three hits by score; both text keys; without scores the bare documents."""
    with running(make_index(tmp_path)) as (url, _):
        body = {"queries": [CAPITAL], "topk": 3, "return_scores": True, "eid": "x____1", "new_cache_dir": None}
        answer = ask(url, body).json()
        assert len(answer) == 1 and len(answer[0]) == 3
        assert [hit["document"]["id"] for hit in answer[0]][0] == "rome"
        scores = [hit["score"] for hit in answer[0]]
        assert scores == sorted(scores, reverse=True) and all(-1 <= score <= 1 for score in scores)
        assert all(hit["document"] in PASSAGES for hit in answer[0])
        bare = ask(url, {"queries": [CAPITAL], "topk": 3}).json()
        assert bare == [[hit["document"] for hit in answer[0]]]
        assert {"content", "contents"} <= {key for document in bare[0] for key in document}


def test_an_empty_index_gives_empty_lists(tmp_path: Path) -> None:
    """Fact 34."""
    with running(make_index(tmp_path, [])) as (url, _):
        answer = ask(url, {"queries": ["anything"], "topk": 3, "return_scores": True})
        assert (answer.status_code, answer.json()) == (200, [[]])


def test_several_queries_and_defaults(tmp_path: Path) -> None:
    with running(make_index(tmp_path), ServiceSettings(topk=2)) as (url, service):
        answer = ask(url, {"queries": [CAPITAL, "light and sugar", CAPITAL]}).json()
        assert [len(hits) for hits in answer] == [2, 2, 2] and answer[0] == answer[2]
        assert answer[1][0]["id"] == 7
        assert ask(url, {"queries": [], "topk": None, "eid": ""}).json() == []
        health = httpx.get(f"{url}/health", trust_env=False).json()
        assert (health["status"], health["documents"], health["counters"]["items"]) == ("ready", 4, 3)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{nope", 400, "the body is not JSON"),
        ([1], 400, "must be an object"),
        ({}, 400, "queries must be a list"),
        ({"queries": "one"}, 400, "queries must be a list of texts, not 'one'"),
        ({"queries": ["a", " "]}, 400, "queries[1] must be a text that is not blank"),
        ({"queries": ["a", 3]}, 400, "queries[1]"),
        ({"queries": ["a" * 20_001]}, 400, "20001 characters"),
        ({"queries": ["a"] * 65}, 400, "at most 64"),
        ({"queries": ["a"], "topk": 0}, 400, "topk must be a whole number from 1 to 1000"),
        ({"queries": ["a"], "topk": True}, 400, "topk"),
        ({"queries": ["a"], "topk": "3"}, 400, "topk"),
        ({"queries": ["a"], "topk": 1001}, 400, "topk"),
        ({"queries": ["a"], "return_scores": 1}, 400, "return_scores must be true or false"),
        ({"queries": ["a"], "eid": 5}, 400, "eid must be text or null"),
        ({"queries": ["a"], "new_cache_dir": 5}, 400, "new_cache_dir"),
        ({"query": ["a"]}, 400, "unknown field 'query' (did you mean 'queries'?)"),
        (b"[" + b" " * (1 << 20) + b"]", 413, "more than 1048576 bytes"),
    ],
    ids=itertools.count(),
)
def test_bad_requests_get_one_line(served: str, body: Any, status: int, message: str) -> None:
    answer = ask(served, body)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"} and message in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with running(make_index(tmp_path_factory.mktemp("served"))) as (url, _):
        yield url


def test_other_paths_and_methods_are_refused(served: str) -> None:
    assert httpx.get(f"{served}/retrieve", trust_env=False).status_code == 405
    assert httpx.get(f"{served}/openapi.json", trust_env=False).status_code == 404


def test_an_example_sees_its_passages_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = make_index(tmp_path)
    lists = tmp_path / "examples.json"
    lists.write_text(json.dumps({"one": ["paris", 7, "gone"], "none": []}))
    with running(index, eid_lists=load_eid_lists(lists, index)) as (url, _):
        assert "1 of its passage ids are not in the index" in caplog.text
        body = {"queries": [CAPITAL], "topk": 3}
        assert [d["id"] for d in ask(url, {**body, "eid": "one"}).json()[0]] == ["paris", 7]
        assert ask(url, {**body, "eid": "none"}).json() == [[]]
        unknown, missing = ask(url, {**body, "eid": "two"}), ask(url, body)
        assert (unknown.status_code, missing.status_code) == (404, 400)
        assert "eid 'two'" in unknown.json()["error"] and "eid is missing" in missing.json()["error"]


def test_wrong_eid_lists_are_named(tmp_path: Path) -> None:
    index = make_index(tmp_path)
    (tmp_path / "l.json").write_text('{"one": "paris"}')
    with pytest.raises(ConfigError, match="expected an object with a list"):
        load_eid_lists(tmp_path / "l.json", index)
    with pytest.raises(FileNotFoundError, match="--eid-lists"):
        load_eid_lists(tmp_path / "no.json", index)


def test_scores_at_or_below_the_threshold_are_dropped(tmp_path: Path) -> None:
    index = make_index(tmp_path)
    scores = Retriever(index, WordEmbedder(), ServiceSettings()).retrieve([Query(CAPITAL, 4, None)])[0].scores
    retriever = Retriever(index, WordEmbedder(), ServiceSettings(min_score=float(scores[1])))
    assert retriever.retrieve([Query(CAPITAL, 4, None)])[0].scores.tolist() == scores[:1].tolist()


def test_equal_queries_are_embedded_once_and_prefixed(tmp_path: Path) -> None:
    embedder = WordEmbedder()
    retriever = Retriever(make_index(tmp_path), embedder, ServiceSettings(query_prefix="capital "))
    embedder.calls.clear()
    some = np.array([0, 2])
    batch = [Query("Italy", 1, None), Query("Italy", 3, None), Query("Italy", 3, some), Query("Italy", 1, some[:1])]
    found = retriever.retrieve(batch)
    assert embedder.calls == [["capital Italy"]]
    assert [len(hits.rows) for hits in found] == [1, 3, 2, 1]
    assert found[0].rows[0] == found[1].rows[0] == 3 and set(found[2].rows) == {0, 2} and found[3].rows[0] == 0


def test_another_model_is_noticed_at_start(tmp_path: Path) -> None:
    index = make_index(tmp_path)
    with pytest.raises(ConfigError, match="dimension 16, but words has 8"):
        Retriever(index, WordEmbedder(8), ServiceSettings())

    class Other(WordEmbedder):
        def _word(self, word: str) -> np.ndarray:
            return super()._word(word + "!")

    with pytest.raises(ConfigError, match="another vector"):
        Retriever(index, Other(), ServiceSettings())


def test_concurrent_requests_share_a_call(tmp_path: Path) -> None:
    embedder = WordEmbedder(delay_s=0.02)
    with running(make_index(tmp_path), embedder=embedder) as (url, service):

        async def crowd() -> list[Any]:
            client = RetrievalClient(role(url, max_concurrency=64))
            found = await asyncio.gather(*(client.search(f"capital {n}", topk=2) for n in range(64)))
            return found

        found = asyncio.run(crowd())
        assert [len(hits) for hits in found] == [2] * 64
        assert service.batcher.counters.items == 64 and service.batcher.counters.batches < 16
        assert service.batcher.counters.largest_batch > 8


def test_a_full_queue_answers_503_with_retry_after(tmp_path: Path) -> None:
    settings = ServiceSettings(max_queue=4, max_batch=2)
    with running(make_index(tmp_path), settings, WordEmbedder(delay_s=0.1)) as (url, service):

        async def crowd() -> list[httpx.Response]:
            async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
                posts = (client.post(f"{url}/retrieve", json={"queries": [f"word {n}"]}) for n in range(16))
                return list(await asyncio.gather(*posts))

        answers = asyncio.run(crowd())
        refused = [answer for answer in answers if answer.status_code == 503]
        assert {answer.status_code for answer in answers} == {200, 503}
        assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
        assert "waiting already" in refused[0].json()["error"]
        assert service.batcher.counters.refused == len(refused)


def test_a_slow_answer_is_given_up(tmp_path: Path) -> None:
    index, slow = make_index(tmp_path), WordEmbedder()
    with running(index, ServiceSettings(request_timeout_s=0.05), slow) as (url, _):
        slow.delay_s = 0.3
        answer = ask(url, {"queries": ["a"]})
        assert answer.status_code == 503 and "no answer within 0.05 s" in answer.json()["error"]


def test_a_dead_embedding_service_is_502(tmp_path: Path) -> None:
    class Dead(WordEmbedder):
        dead = False

        def encode(self, texts: Any) -> np.ndarray:
            if self.dead:
                raise RoleUnavailable("embedding", "connection refused")
            return super().encode(texts)

    embedder = Dead()
    with running(make_index(tmp_path), embedder=embedder) as (url, _):
        embedder.dead = True
        answer = ask(url, {"queries": ["a"]})
        assert answer.status_code == 502 and "connection refused" in answer.json()["error"]
        embedder.dead = False
        assert ask(url, {"queries": ["a"]}).status_code == 200


async def test_the_key_is_needed_and_the_client_sends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(make_index(tmp_path), api_key="secret") as (url, _):
        body = {"queries": [CAPITAL]}
        assert [ask(url, body).status_code, ask(url, body, Authorization="Bearer wrong").status_code] == [401, 401]
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        with pytest.raises(RoleBadResponse, match="401"):
            await RetrievalClient(role(url)).search(CAPITAL)
        monkeypatch.setenv("RETRIEVAL_KEY", "secret")
        found = await RetrievalClient(role(url, api_key_env="RETRIEVAL_KEY")).search(CAPITAL, topk=1)
        assert [passage.id for passage in found] == ["rome"]


# --------------------------------------------------------------------------------------------------------------------
# The client.


async def test_client_reads_both_text_keys_and_skips_blank_queries(served: str) -> None:
    client = RetrievalClient(role(served))
    found = await client.search_many(["capital of Germany", " ", CAPITAL + " Italy" * 5000], topk=1)
    assert [[passage.id for passage in passages] for passages in found] == [["berlin"], [], ["rome"]]
    berlin = found[0][0]
    assert berlin.text == PASSAGES[1]["contents"] and berlin.document["title"] == "Berlin" and 0 < berlin.score <= 1
    assert await client.search("  ") == []


@pytest.mark.parametrize(
    "answer",
    ["{}", "[]", "[[], []]", "[3]", '[[{"document": {"id": 1}, "score": 1}]]', '[[{"content": "x"}]]', "<html>"],
)
async def test_client_refuses_other_answers(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(self: FakeEngine, path: str, sent: Any, headers: Any) -> tuple[Reply, Any]:
        return Reply(), json.loads(answer)

    if answer == "<html>":
        with FakeEngine(lambda _: Reply(status=404)) as engine:
            monkeypatch.setattr(FakeEngine, "answer", lambda *_: (Reply("gone", status=404), {}))
            with pytest.raises(RoleBadResponse, match="404"):
                await RetrievalClient(role(engine.url)).search("x")
    else:
        monkeypatch.setattr(FakeEngine, "answer", body)
        with FakeEngine(lambda _: "") as engine, pytest.raises(RoleBadResponse):
            await RetrievalClient(role(engine.url)).search("x")


async def test_client_has_deadlines_and_bounded_retries(tmp_path: Path) -> None:
    index, slow = make_index(tmp_path), WordEmbedder()
    with running(index, embedder=slow) as (url, service):
        slow.delay_s = 0.3
        with pytest.raises(RoleTimeout):
            await RetrievalClient(role(url, timeout_s=0.05)).search("x")
    with pytest.raises(RoleUnavailable):
        await RetrievalClient(role(url, retries=1)).search("x")

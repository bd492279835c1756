"""Tests of ``/v1/decisions`` with plain requests, and with the unchanged clients of OpenAI and
Mercury.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from serving_process import Served

import dlm_runtime
from dlm_runtime import Choice, Score, YesNo

pytest.importorskip("uvicorn")

STATE = "turn on the kitchen lights"
QUESTIONS: dict[str, Any] = {
    "room": {"type": "choice", "criteria": {"kitchen": None, "hall": "between rooms"}},
    "urgent": {"type": "noul", "instructions": "Is it urgent?", "criteria": {"true": "now"}},
    "size": {"type": "score", "criteria": ["small", {"about": "large"}]},
}


ASKED: list[dict[str, Any]] = [
    {
        **{"type": "choice", "name": "room", "instructions": "Which room?"},
        "choices": [{"value": "kitchen"}, {"value": "hall", "description": "between rooms"}],
    },
    {"type": "predicate", "instructions": [{"type": "input_text", "text": "It is urgent."}]},
    {
        **{"type": "score", "name": "size", "instructions": "How large?"},
        "levels": [{"label": "small"}, {"label": "large", "description": "more than 9"}],
    },
    {
        **{"type": "choice", "name": "on", "instructions": "On?"},
        "choices": [{"value": False}, {"value": True, "description": "lit"}],
    },
]
"""The questions in OpenAI's form."""


def decide(served: Served, **fields: Any) -> Any:
    body = {"model": served.model, "state": STATE, "questions": QUESTIONS} | fields
    return served.client.post("/v1/decisions", json=body)


def test_answers_are_those_of_the_runtime(served: Served, demo_bundle: Path) -> None:
    response = decide(served, dlm={"passes": 2})
    assert response.status_code == 200, response.text
    found = response.json()
    with dlm_runtime.open(demo_bundle) as bundle:
        wanted = bundle.decide(
            {
                "room": Choice({"kitchen": None, "hall": "between rooms"}),
                "urgent": YesNo("Is it urgent?", true="now"),
                "size": Score(["small", '{"about": "large"}']),
            },
            chat=[{"role": "user", "content": STATE}],
            passes=2,
        )
    answers = found["answers"]
    room, size = wanted.answers["room"], wanted.answers["size"]
    assert answers["room"] == {
        "type": "choice",
        "choice": room.best,
        "confidence": pytest.approx(room.confidence, rel=1e-4),
        "probabilities": pytest.approx(room.probabilities, rel=1e-4),
    }
    urgent = wanted.answers["urgent"].probabilities["true"]
    assert answers["urgent"] == {"type": "noul", "noul": pytest.approx(urgent, rel=1e-4)}
    assert answers["size"] == {
        "type": "score",
        "score": pytest.approx(size.score, rel=1e-4),
        "confidence": pytest.approx(size.confidence, rel=1e-4),
        "probabilities": pytest.approx(size.probabilities, rel=1e-4),
        "legend": {"0": "small", "1": {"about": "large"}},
    }
    last = wanted.generations[-1]
    assert found["model"] == served.model
    assert found["usage"] == {
        "input_tokens": last.prompt_tokens,
        "output_tokens": last.completion_tokens,
        "denoising_passes": 2,
    }


def test_a_state_may_be_json(served: Served) -> None:
    as_text = decide(served, state='{"said": "lights"}').json()
    as_json = decide(served, state={"said": "lights"}).json()
    assert as_json == as_text
    assert decide(served, state=["lights"]).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"questions": {}}, "questions", "invalid_value"),
        ({"questions": {"a": {"type": "rank"}}}, "questions.a", "invalid_value"),
        ({"questions": {"a": {}}}, "questions.a", "invalid_value"),
        ({"questions": {"a": {"type": "choice"}}}, "questions.a.criteria", "missing_field"),
        (
            {"questions": {"a": {"type": "choice", "criteria": {}}}},
            "questions.a.criteria",
            "invalid_value",
        ),
        (
            {"questions": {"str": {"type": "score", "criteria": [1]}}},
            "questions.str.criteria[0]",
            "invalid_value",
        ),
        (
            {"questions": {"a": {"type": "noul", "more": 1}}},
            "questions.a.more",
            "unknown_field",
        ),
        (
            {"questions": {"a": {"type": "noul", "instructions": [{"type": "image_url"}]}}},
            "questions.a.instructions",
            "unsupported_value",
        ),
        ({"state": [{"type": "image_url"}]}, "state", "unsupported_value"),
        ({"state": [{"type": "image"}]}, "state", "unsupported_value"),
        ({"state": "lights " * 4000}, "state", "invalid_value"),
        ({"dlm": {"answer": "none"}}, "dlm.answer", "invalid_value"),
        ({"dlm": {"passes": 0}}, "dlm.passes", "invalid_value"),
        ({"stream": True}, "stream", "unknown_field"),
        ({"model": "gpt"}, "model", "model_not_found"),
    ],
)
def test_errors_name_the_field(
    served: Served, fields: dict[str, Any], param: str, code: str
) -> None:
    response = decide(served, **fields)
    assert response.status_code == (404 if code == "model_not_found" else 400)
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_system_one_has_mercurys_form(served: Served) -> None:
    body = {"model": served.model, "state": STATE, "questions": QUESTIONS}
    found = served.client.post("/v1/systemone", json=body)
    assert found.status_code == 200, found.text
    assert found.json() == decide(served).json()


@pytest.mark.parametrize(
    "given",
    [
        STATE,
        [{"role": "user", "content": STATE}],
        [{"role": "user", "content": [{"type": "input_text", "text": STATE}]}],
    ],
)
def test_openais_answers_are_those_of_the_runtime(
    served: Served, demo_bundle: Path, given: Any
) -> None:
    openai = pytest.importorskip("openai", "3.57")
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    made = client.decisions.create(model=served.model, input=given, questions=ASKED)
    with dlm_runtime.open(demo_bundle) as bundle:
        wanted = bundle.decide(
            {
                "room": Choice({"kitchen": None, "hall": "between rooms"}, "Which room?"),
                "question_2": YesNo("It is urgent."),
                "size": Score(["small", "large: more than 9"], "How large?"),
                "on": YesNo("On?", "lit"),
            },
            chat=[{"role": "user", "content": STATE}],
        )
    room, urgent, size, lit = made.answers
    shares = [each.probabilities for each in wanted.answers.values()]
    assert (room.type, room.name, room.choice) == ("choice", "room", wanted.answers["room"].best)
    assert {each.value: each.probability for each in room.probabilities} == pytest.approx(
        shares[0], rel=1e-4
    )
    assert (urgent.type, urgent.name) == ("predicate", None)
    assert urgent.probability == pytest.approx(shares[1]["true"], rel=1e-4)
    assert size.score == pytest.approx(wanted.answers["size"].score, rel=1e-4)
    assert [(each.value, each.label) for each in size.probabilities] == [(0, "small"), (1, "large")]
    assert [each.value for each in lit.probabilities] == [False, True]
    assert lit.confidence == pytest.approx(max(shares[3].values()), rel=1e-4)
    assert lit.choice is (shares[3]["true"] > 0.5)
    assert made.model == served.model
    assert made.usage.input_tokens == wanted.generations[-1].prompt_tokens
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens


def test_openais_input_may_contain_json(served: Served) -> None:
    data = {"said": "lights"}
    part = {"type": "input_json", "data": data}
    body = {"model": served.model, "questions": ASKED[:1]}
    as_json = body | {"input": [{"role": "user", "content": [part]}]}
    found = served.client.post("/v1/decisions", json=as_json)
    assert found.status_code == 200, found.text
    as_text = served.client.post("/v1/decisions", json=body | {"input": '{"said": "lights"}'})
    assert found.json() == as_text.json()


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", "missing_field"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [{"type": "custom_tool_call"}]}, "input[0]", "invalid_value"),
        (
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
                ]
            },
            "input[0].content[0]",
            "unsupported_value",
        ),
        ({"input": "lights " * 4000}, "input", None),
        ({"input": [{"role": "system", "content": "be brief"}]}, "input", None),
        ({"questions": []}, "questions", "invalid_value"),
        (
            {"questions": [ASKED[0] | {"choices": [{"value": 1}, {"value": 0}]}]},
            "questions[0].choices[0].value",
            "invalid_value",
        ),
        ({"questions": [ASKED[0], ASKED[0]]}, "questions[1].name", "invalid_value"),
        (
            {"questions": [{"type": "predicate"}]},
            "questions[0].instructions",
            "missing_field",
        ),
        (
            {"questions": [ASKED[0] | {"choices": [{"value": "a"}, {"value": "a"}]}]},
            "questions[0].choices",
            "unsupported_value",
        ),
        (
            {"questions": [ASKED[0] | {"choices": [{"value": "a"}, {"value": True}]}]},
            "questions[0].choices",
            "unsupported_value",
        ),
        ({"questions": [ASKED[0] | {"more": 1}]}, "questions[0].more", "unknown_field"),
        ({"stream": True}, "stream", "unknown_field"),
    ],
)
def test_errors_name_openais_fields(
    served: Served, fields: dict[str, Any], param: str, code: str | None
) -> None:
    body = {"model": served.model, "input": STATE, "questions": ASKED} | fields
    response = served.client.post("/v1/decisions", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert code in (None, error["code"])


def test_the_api_is_described(served: Served) -> None:
    described = served.client.get("/openapi.json").json()
    assert "/v1/decisions" in described["paths"]
    assert "ChoiceQuestion" in described["components"]["schemas"]


def test_the_inceptionai_client_decides(served: Served) -> None:
    module = pytest.importorskip("inceptionai")
    client = module.Inception(base_url=served.url, api_key="none", max_retries=0)
    made = client.decisions.create(model=served.model, state=STATE, questions=QUESTIONS)
    types = {name: type(answer).__name__ for name, answer in made.answers.items()}
    assert types == {"room": "ChoiceAnswer", "urgent": "NoulAnswer", "size": "ScoreAnswer"}
    room, size = made.answers["room"], made.answers["size"]
    assert room.probabilities[room.choice] == room.confidence
    assert sum(room.probabilities.values()) == pytest.approx(1)
    assert 0 <= made.answers["urgent"].noul <= 1
    assert size.score == pytest.approx(size.probabilities["1"])
    assert size.legend == {"0": "small", "1": {"about": "large"}}
    assert made.usage.input_tokens > 0
    with pytest.raises(module.BadRequestError) as caught:
        client.decisions.create(model=served.model, state=STATE, questions={})
    assert caught.value.body["error"]["param"] == "questions"

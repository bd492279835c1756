"""Creates the OpenAPI description of the server, and a page that lists the paths."""

from __future__ import annotations

import html
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from dlm_serve import decisions, fields
from dlm_serve.edits import EditBody
from dlm_serve.openai_decisions import AnyDecisionBody
from dlm_serve.response_fields import ResponsesBody

POSTS: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/chat/completions": (fields.ChatBody, "Answer the messages of a chat."),
    "/v1/completions": (fields.CompletionBody, "Continue a text, or fill it up to a suffix."),
    "/v1/responses": (ResponsesBody, "Answer a text or a list of items."),
    "/v1/fim/completions": (fields.FimBody, "Fill the text between a prompt and a suffix."),
    "/v1/edit/completions": (EditBody, "Edit a region of a file."),
    "/v1/decisions": (AnyDecisionBody, "Answer questions, with probabilities."),
    "/v1/systemone": (decisions.SystemOneBody, "Answer questions, with probabilities."),
    "/tokenize": (fields.TokenizeBody, "The token ids of a text or of a chat."),
    "/detokenize": (fields.DetokenizeBody, "The text of token ids."),
}
GETS = {
    "/v1/models": "All models.",
    "/v1/models/{name}": "One model.",
    "/v1/chat/completions/models": "The models that answer chats.",
    "/v1/fim/completions/models": "The models that fill text between two others.",
    "/v1/edit/completions/models": "The models that edit text.",
    "/health": "The process runs.",
    "/ready": "The models accept requests.",
    "/metrics": "Metrics in Prometheus's format.",
    "/": "A page to try the models in a browser.",
}


def document() -> dict[str, Any]:
    """Return the description in the format of OpenAPI 3.1."""
    kinds = {kind for kind, _ in POSTS.values()}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    references, definitions = models_json_schema(
        [(kind, "validation") for kind in ordered], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {}
    for path, (kind, said) in POSTS.items():
        body = {"application/json": {"schema": references[(kind, "validation")]}}
        paths[path] = {
            "post": {
                "summary": said,
                "requestBody": {"required": True, "content": body},
                "responses": {"200": {"description": "The answer."}},
            }
        }
    for path, said in GETS.items():
        paths[path] = {"get": {"summary": said, "responses": {"200": {"description": said}}}}
    paths["/v1/models/{name}"]["get"]["parameters"] = [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    return {
        "openapi": "3.1.0",
        "info": {"title": "dlm-export serve", "version": version("dlm-export")},
        "paths": paths,
        "components": {"schemas": definitions["$defs"]},
    }


def _page() -> str:
    """Return a page with all paths, without scripts, and with files only from this server."""
    rows = [("POST", path, said) for path, (_, said) in POSTS.items()]
    rows += [("GET", path, said) for path, said in GETS.items()]
    table = "".join(
        f"<tr><td>{method}</td><td><code>{html.escape(path)}</code></td><td>{html.escape(said)}</td></tr>"
        for method, path, said in rows
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        "<title>dlm-export serve</title><style>:root{color-scheme:light dark}body{font:16px system-ui;margin:2rem auto;"
        "max-width:60rem;padding:0 1rem}td{padding:.3rem 1rem .3rem 0;vertical-align:top}</style>"
        "<h1>dlm-export serve</h1><p>The fields of each body are in <a href='/openapi.json'>/openapi.json</a>.</p>"
        f"<table>{table}</table>"
    )


DOCS_PAGE = _page()

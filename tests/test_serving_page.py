"""Tests of the server's web page at ``/``.

The tests check the files of the page, the API fields that the page uses, and its behaviour in a
headless browser.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser as browsers
import pytest
from browser import Browser, browsing
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_process import Served, change_template, serving

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from dlm_serve import page_routes

missing = browsers.missing()
needs_browser = pytest.mark.skipif(missing is not None, reason=str(missing))

PROMPT = "remind me on friday at quarter to nine in the evening to water the kayak"
PASSES = 32
"""Passes of a block. They take long enough for the browser to draw several of them."""
SCREENS = [(1280, 800), (390, 844)]
TURNS = "{% for each in messages %}<|user|>{{ each['content'] }}{% endfor %}<|assistant|>"
GAP = (
    "<|user|>turn the kitchen lights to forty percent<|assistant|>"
    '{"name":"set_light","arguments":{"room":"hall","brightness":40}}'
)
SCHEMA = {
    "type": "object",
    "properties": {"room": {"enum": ["kitchen", "hall"]}},
    "required": ["room"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def turns_bundle(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with effort levels, and with a chat template for several messages."""
    folder = Path(shutil.copytree(demo_bundle, tmp_path_factory.mktemp("page") / "turns"))
    manifest = json.loads((folder / "manifest.json").read_text())
    loop = manifest["loop"]
    level = loop["presets"][loop["default_preset"]]
    loop["effort"] = {
        "preset": loop["default_preset"],
        "levels": {
            name: {**level, "commit": "static", "steps_per_block": count}
            for name, count in (("instant", 1), ("low", 2), ("medium", 4), ("high", 8))
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    change_template(folder, TURNS)
    return folder


@pytest.fixture(scope="module")
def served(demo_bundle: Path, turns_bundle: Path, several_bundle: Path) -> Iterator[Served]:
    with serving(demo_bundle, str(turns_bundle), str(several_bundle), "--no-log") as process:
        yield process


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def page(window: Browser, served: Served) -> Iterator[Browser]:
    """Load the page again for each test.

    After the test, the browser's console must not contain messages, except for HTTP errors.
    """
    window.show(1280, 800, "light")
    opened(window, served)
    yield window
    lines = [line for line in window.console() if "the server responded with a status" not in line]
    assert lines == []
    assert window.hosts() == {f"{served.host}:{served.port}"}


def opened(window: Browser, served: Served) -> None:
    window.driver.get("about:blank")
    window.console()
    window.hosts()
    window.driver.get(f"{served.url}/")
    window.run("sessionStorage.clear()")
    window.wait("document.getElementById('model').options.length")


def set_value(page: Browser, name: str, value: str) -> None:
    script = "const it = document.getElementById(arguments[0]); it.value = arguments[1];"
    page.run(script + "it.dispatchEvent(new Event('change'))", name, value)


def watch(page: Browser) -> None:
    """Make the page record the number of masked positions whenever the page changes."""
    page.run(
        "window.masks = [];"
        "const count = () => masks.push(document.querySelectorAll('.canvas .mask').length);"
        "new MutationObserver(count).observe(document.body, {childList: true, subtree: true})"
    )


def text_of(page: Browser, selector: str) -> str:
    found: str = page.run(
        "return [...document.querySelectorAll(arguments[0])].at(-1).textContent", selector
    )
    return found


def figures(page: Browser) -> dict[str, str]:
    """Return the statistics that the page shows below the newest answer, by name."""
    rows: list[list[str]] = page.run(
        "return [...[...document.querySelectorAll('.figures')].at(-1).children]"
        ".map((row) => [...row.children].map((each) => each.textContent))"
    )
    return dict(rows)


def wait_for_answer(page: Browser, count: int = 1) -> None:
    page.wait("document.querySelectorAll('.figures').length >= arguments[0]", count)
    page.wait("!document.querySelector('[aria-busy]')")


def ask(page: Browser, text: str, count: int = 1) -> str:
    """Send a message, wait for answer number ``count``, and return its text."""
    page.find("#message").send_keys(text + "\n")
    wait_for_answer(page, count)
    return text_of(page, ".canvas")


def mark(page: Browser, word: str) -> None:
    """Select a word in the text of the view "Fill"."""
    page.run(
        "const text = document.getElementById('text'); const at = text.value.indexOf(arguments[0]);"
        "text.focus(); text.setSelectionRange(at, at + arguments[0].length)",
        word,
    )


# ---- Files ----


def test_the_page_needs_no_key_and_has_a_strict_policy(demo_bundle: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with serving(demo_bundle, "--api-key-file", str(keys), "--no-log") as served:
        assert served.client.get("/v1/models").status_code == 401
        for path in page_routes.PATHS:
            found = served.client.get(path)
            assert found.status_code == 200
            rules = dict(
                rule.split(" ", 1) for rule in found.headers["content-security-policy"].split("; ")
            )
            assert rules.pop("default-src") == "'none'"
            assert {rules[name] for name in page_routes.SOURCES} == {"'self'"}
            assert "unsafe" not in found.headers["content-security-policy"]
            assert found.headers["x-content-type-options"] == "nosniff"
        types = {
            path: served.client.get(path).headers["content-type"] for path in page_routes.PATHS
        }
        assert types["/"].startswith("text/html")
        assert types["/page/main.js"].startswith("text/javascript")
        assert types["/page/page.css"].startswith("text/css")
        for path in ("/page/", "/page/../app.py", "/page/%2e%2e/app.py", "/page/index.html"):
            assert served.client.get(path).status_code in (401, 404)


def test_each_named_file_exists_and_no_file_names_another_host(served: Served) -> None:
    texts = {path: served.client.get(path).text for path in page_routes.PATHS}
    named = re.findall(r'(?:href|src)="(page/[^"]+)"', texts["/"])
    named += [
        "page/" + name for text in texts.values() for name in re.findall(r'from "\./(.+?)"', text)
    ]
    assert {f"/{name}" for name in named} == set(page_routes.PATHS) - {"/"}
    for path, text in texts.items():
        addresses = re.findall(r"https?://[^\s\"']+", text)
        # The only URL in the files is the name of an XML namespace. Browsers do not load it.
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|\beval\b", text), path
    assert not re.search(r"\son\w+=|\sstyle=|<script>|<style>", texts["/"])


# ---- Fields of the API ----


def chunks(served: Served, path: str, **fields: Any) -> list[Any]:
    body = {
        "model": served.model,
        "stream": True,
        "diffusing": True,
        "stream_options": {"include_usage": True},
        "dlm": {"policy": {"commit": "static", "steps_per_block": 8}},
    }
    response = served.client.post(path, json=body | fields)
    assert response.status_code == 200, response.text
    events = [line[6:] for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
        ("/v1/fim/completions", {"prompt": "turn on ", "suffix": " lights", "max_tokens": 8}),
    ],
)
def test_a_stream_has_the_fields_that_the_page_reads(
    served: Served, path: str, fields: dict[str, Any]
) -> None:
    found = chunks(served, path, **fields)
    snapshots = [chunk for chunk in found if "diffusion_meta" in chunk]
    for chunk in snapshots:
        choice = chunk["choices"][0]
        assert isinstance(choice["delta"]["content"] if "delta" in choice else choice["text"], str)
        assert 0 <= chunk["diffusion_meta"]["diffusion_progress"] <= 1
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["denoising_passes"] == len(snapshots)
    assert found[-1]["usage"]["completion_tokens"] >= 0


def test_the_tokens_of_a_gap_are_no_part_of_its_prompt(served: Served) -> None:
    body = {"model": served.model, "prompt": "turn on ", "suffix": " lights"}
    counts = [
        served.client.post("/v1/fim/completions", json=body | {"max_tokens": length}).json()[
            "usage"
        ]
        for length in (4, 8)
    ]
    for length, each in zip((4, 8), counts, strict=True):
        assert 0 <= each["completion_tokens"] <= length  # counted up to the first end token
    tokens = [
        served.client.post("/tokenize", json={"model": served.model, "prompt": text}).json()
        for text in ("turn on ", " lights", "")
    ]
    before, after, added = [each["count"] for each in tokens]
    assert {each["prompt_tokens"] for each in counts} == {before + after - added - 1}


def test_the_list_of_models_says_what_the_page_must_know(
    served: Served, turns_bundle: Path, several_bundle: Path
) -> None:
    found = {each["id"]: each for each in served.client.get("/v1/models").json()["data"]}
    demo, turns, several = (
        found[name] for name in (served.model, turns_bundle.name, several_bundle.name)
    )
    assert [each["takes_conversations"] for each in (demo, turns, several)] == [False, True, False]
    assert turns["effort_levels"] == ["instant", "low", "medium", "high"]
    assert demo["effort_levels"] == []
    assert "fim.completions" in demo["supported_endpoints"]
    assert "fim.completions" not in several["supported_endpoints"]


# ---- In a browser ----


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
def test_an_answer_denoises_on_the_page(
    page: Browser, served: Served, screen: tuple[int, int], scheme: str
) -> None:
    page.show(*screen, scheme)
    opened(page, served)
    set_value(page, "passes", str(PASSES))
    watch(page)
    shown = ask(page, PROMPT)
    masks = page.run("return masks")
    assert max(masks) > 0
    assert masks[-1] == 0
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "model": served.model,
        "dlm": {"policy": {"commit": "static", "steps_per_block": PASSES}},
    }
    expected = served.client.post("/v1/chat/completions", json=body).json()
    assert shown == expected["choices"][0]["message"]["content"]
    assert text_of(page, "#status") == f"The answer is: {shown}"
    found = figures(page)
    assert int(found["passes"]) == expected["usage"]["denoising_passes"]
    assert int(found["tokens"]) == expected["usage"]["completion_tokens"]
    assert {"tokens/s", "to the first pass", "in total"} <= found.keys()
    assert page.run("return document.documentElement.scrollWidth") == screen[0]
    # The input field for messages must be on the screen.
    assert (
        page.run("return document.getElementById('message').getBoundingClientRect().bottom")
        <= (screen[1])
    )
    for selector in ("body", ".note", ".figures dt", "nav a", "small", ".asked", ".canvas"):
        ink, ground = page.run(COLOURS, selector)
        assert contrast(ink, ground) >= 4.5, (selector, ink, ground)
        assert (luminance(ground) < luminance(ink)) == (scheme == "dark")


COLOURS = """
let element = document.querySelector(arguments[0]);
const ink = getComputedStyle(element).color;
while (element.parentElement && getComputedStyle(element).backgroundColor === 'rgba(0, 0, 0, 0)')
  element = element.parentElement;
return [ink, getComputedStyle(element).backgroundColor];
"""


def luminance(colour: str) -> float:
    """Return the relative luminance of a CSS colour, as WCAG 2 defines it."""
    shares = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
    red, green, blue = [
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in shares
    ]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def tab_to(page: Browser, selector: str) -> None:
    """Press Tab until an element has the focus. The element's outline must then be visible."""
    from selenium.webdriver.common.keys import Keys

    for _ in range(40):
        page.press(Keys.TAB)
        if page.run("return document.activeElement.matches(arguments[0])", selector):
            style = page.run("return getComputedStyle(document.activeElement).outlineStyle")
            assert style == "solid"
            return
    raise AssertionError(f"Tab does not reach {selector}")


@needs_browser
@pytest.mark.parametrize("screen", SCREENS)
def test_all_of_the_page_works_by_keyboard(
    page: Browser, served: Served, turns_bundle: Path, screen: tuple[int, int]
) -> None:
    from selenium.webdriver.common.keys import Keys

    page.show(*screen, "light")
    opened(page, served)
    if not page.run("return document.getElementById('settings').open"):
        tab_to(page, "summary")
        page.press(Keys.ENTER)
    tab_to(page, "#model")
    page.press(turns_bundle.name[0])
    tab_to(page, "#effort")
    page.press("h")
    assert text_of(page, "#summary") == f"{turns_bundle.name} · high"
    tab_to(page, "#message")
    page.press(*PROMPT, Keys.ENTER)
    wait_for_answer(page)
    shown = text_of(page, ".canvas")
    assert "░" not in shown
    assert figures(page)["passes"] == "8"
    tab_to(page, ".timeline input")
    page.press(Keys.HOME)
    assert text_of(page, ".timeline output") == "Pass 1 of 8"
    assert page.run("return document.querySelectorAll('.canvas .mask').length") > 0
    page.press(Keys.END)
    assert text_of(page, ".canvas") == shown
    tab_to(page, ".timeline button")
    page.press(Keys.SPACE)
    page.wait("document.querySelector('.timeline output').textContent === 'Pass 2 of 8'")
    page.press(Keys.SPACE)
    tab_to(page, "nav a[href='#fill']")
    page.press(Keys.ENTER)
    tab_to(page, "#text")
    page.press(*"turn on the hall lights")
    page.press(*[Keys.ARROW_LEFT] * len(" lights"))
    for _ in "hall":
        page.press_together(Keys.SHIFT, Keys.ARROW_LEFT)
    page.press_together(Keys.CONTROL, Keys.ENTER)
    page.wait("!document.getElementById('undo').hidden")
    text = page.run("return document.getElementById('text').value")
    assert text.startswith("turn on the ")
    assert text.endswith(" lights")
    tab_to(page, "#undo")
    page.press(Keys.ENTER)
    assert page.run("return document.getElementById('text').value") == "turn on the hall lights"


@needs_browser
def test_earlier_messages_are_sent_where_the_model_takes_them(
    page: Browser, served: Served, turns_bundle: Path
) -> None:
    assert "Earlier ones are not sent" in text_of(page, "#chat-note")
    page.run(
        "window.sent = []; const before = fetch;"
        "window.fetch = (path, options) => { sent.push(options.body); return before(path, options); }"
    )
    for number in (1, 2):
        ask(page, f"play song {number}", number)
    set_value(page, "model", turns_bundle.name)
    assert text_of(page, "#chat-note") == ""
    page.find("#clear").click()
    answers = [ask(page, f"play song {number}", number) for number in (1, 2)]
    sent = [json.loads(body)["messages"] for body in page.run("return sent")]
    asked = [{"role": "user", "content": f"play song {number}"} for number in (1, 2)]
    given = {"role": "assistant", "content": answers[0]}
    assert sent == [[asked[0]], [asked[1]], [asked[0]], [asked[0], given, asked[1]]]


@needs_browser
def test_a_schema_holds_and_a_wrong_one_is_reported_in_place(page: Browser) -> None:
    set_value(page, "schema", '{"type": ')
    page.find("#message").send_keys("turn on the lights\n")
    assert "not valid JSON" in text_of(page, "#schema-error")
    assert page.run("return document.activeElement.id") == "schema"
    assert page.run("return document.querySelectorAll('.answer').length") == 0
    page.find("#schema").clear()
    page.find("#schema").send_keys(json.dumps(SCHEMA))
    assert not page.find("#schema-error").is_displayed()
    page.find("#message").clear()
    assert json.loads(ask(page, "turn on the lights"))["room"] in ("kitchen", "hall")
    set_value(page, "schema", '{"type": "nonsense"}')
    ask(page, "turn on the lights", 2)
    said = text_of(page, ".answer > .error")
    assert said.startswith("response_format")
    assert "nonsense" in said


@needs_browser
def test_an_error_is_shown_as_text_and_the_message_comes_back(page: Browser) -> None:
    set_value(page, "length", "100000")
    hostile = "<img src=x onerror=alert(1)> turn on the lights"
    ask(page, hostile)
    assert "max_completion_tokens" in text_of(page, ".answer > .error")
    assert page.run("return document.getElementById('message').value") == hostile
    assert text_of(page, ".asked") == hostile
    assert page.run("return document.images.length") == 0
    set_value(page, "passes", "0")
    page.find("#message").send_keys("\n")
    assert "whole number from 1 to 4096" in text_of(page, "#chat-note")
    # The page's Content-Security-Policy forbids setting innerHTML to a string.
    refused = "try { document.body.innerHTML = '<b>'; } catch (error) { return error.name; }"
    assert page.run(refused) == "TypeError"
    assert "TrustedHTML" in page.console()[-1]


@needs_browser
def test_marked_text_is_written_again(page: Browser, served: Served) -> None:
    page.driver.get(f"{served.url}/#fill")
    page.find("#special").click()
    page.find("#fill-form [type=submit]").click()
    assert "Select a part of the text" in text_of(page, "#fill-note")
    set_value(page, "text", GAP)
    mark(page, "hall")
    watch(page)
    page.find("#fill-form [type=submit]").click()
    page.wait("!document.getElementById('undo').hidden")
    # The selected word "hall" is one token, so at most one position is masked.
    assert max(page.run("return masks")) == 1
    expected = GAP.replace("hall", "kitchen")
    assert page.run("return document.getElementById('text').value") == expected
    assert text_of(page, ".canvas") == expected
    selected = "const t = document.getElementById('text');"
    selected += "return t.value.slice(t.selectionStart, t.selectionEnd)"
    assert page.run(selected) == "kitchen"
    set_value(page, "masks", "3")
    page.find("#fill-form [type=submit]").click()
    wait_for_answer(page)
    page.wait("masks.includes(3)")
    page.wait("document.querySelector('.figures').textContent.includes('tokens/s')")
    assert figures(page)["tokens"] == "3"


@needs_browser
def test_a_model_that_cannot_fill_gaps_says_so(page: Browser, several_bundle: Path) -> None:
    page.driver.get(page.driver.current_url + "#fill")
    assert page.find("#text").is_enabled()
    set_value(page, "model", several_bundle.name)
    assert "cannot fill a gap" in text_of(page, "#fill-note")
    assert not page.find("#text").is_enabled()


@needs_browser
def test_escape_stops_an_answer_and_its_passes(page: Browser, served: Served) -> None:
    from selenium.webdriver.common.keys import Keys

    set_value(page, "passes", "4096")
    set_value(page, "length", "400")
    page.find("#message").send_keys("turn on the lights\n")
    page.wait("document.querySelectorAll('.canvas .mask').length")
    assert page.find("#chat-form .stop").is_displayed()
    page.press(Keys.ESCAPE)
    wait_for_answer(page)
    assert not page.find("#chat-form .stop").is_displayed()
    assert not page.find(".answer > .error").is_displayed()
    assert page.run("return document.querySelectorAll('.canvas .mask').length") > 0
    page.wait("document.getElementById('message').value === 'turn on the lights'")
    running = 'dlm_scheduler_running{model="demo"} 0.0'
    assert any(running in served.client.get("/metrics").text for _ in range(200))


@needs_browser
def test_a_server_with_keys_gets_one_from_the_reader(
    window: Browser, demo_bundle: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    window.show(390, 844, "light")
    with serving(demo_bundle, "--api-key-file", str(keys), "--no-log") as served:
        window.driver.get(f"{served.url}/")
        window.wait("!document.getElementById('models-error').hidden")
        assert text_of(window, "#models-error") == "This server needs an API key."
        assert window.run("return document.activeElement.id") == "key"
        window.press(*"wrong", "\n")
        window.wait("document.getElementById('models-error').textContent.includes('wrong')")
        window.find("#key").clear()
        window.find("#key").send_keys("secret\n")
        window.wait("document.getElementById('model').options.length")
        assert json.loads(ask(window, "turn on the kitchen lights"))["name"] == "set_light"
        assert window.run("return Object.keys(localStorage).length + document.cookie.length") == 0
    window.console()


@needs_browser
def test_nothing_moves_where_motion_is_reduced(page: Browser, served: Served) -> None:
    moving = """
const answer = document.getElementById('answer-template').content.firstElementChild.cloneNode(true);
answer.setAttribute('aria-busy', 'true');
for (const name of ['mask', 'fresh']) {
  const node = document.createElement('span');
  node.className = name;
  answer.querySelector('.canvas').append(node);
}
document.body.append(answer);
const names = [...answer.querySelectorAll('span')].map((node) => getComputedStyle(node).animationName);
answer.remove();
return names;
"""
    assert page.run(moving) == ["wait", "settle"]
    page.show(1280, 800, "light", is_reduced=True)
    assert page.run(moving) == ["none", "none"]


SNAPSHOT = st.text(alphabet='ab"é😀░', max_size=12)


@needs_browser
@settings(max_examples=20)
@given(pairs=st.lists(st.tuples(SNAPSHOT, SNAPSHOT), max_size=30))
def test_the_pieces_of_a_snapshot_are_the_snapshot(
    parts: Browser, pairs: list[tuple[str, str]]
) -> None:
    found = parts.driver.execute_async_script(
        "const [pairs, done] = arguments; import('./page/canvas.js').then(({ piecesOf }) =>"
        "done(pairs.map(([content, before]) => piecesOf(content, before))))",
        pairs,
    )
    for (content, before), pieces in zip(pairs, found, strict=True):
        assert "".join(piece["text"] for piece in pieces) == content
        for piece in pieces:
            assert (piece["kind"] == "masks") == ("░" in piece["text"])
            assert piece["kind"] != "old" or piece["text"] in before
        same = parts.driver.execute_async_script(
            "const [content, done] = arguments; import('./page/canvas.js').then(({ piecesOf }) =>"
            "done(piecesOf(content, content).map(({ kind }) => kind)))",
            content,
        )
        assert "new" not in same


@needs_browser
@settings(max_examples=20)
@given(
    texts=st.lists(st.text(alphabet='ab\n"é😀░', max_size=8), max_size=6),
    size=st.integers(1, 40),
    is_whole=st.booleans(),
)
def test_a_stream_may_arrive_in_any_pieces(
    parts: Browser, texts: list[str], size: int, is_whole: bool
) -> None:
    body = "".join(f"data: {json.dumps(text, ensure_ascii=False)}\n\n" for text in texts)
    found, error = parts.driver.execute_async_script(
        """
const [body, size, done] = arguments;
const bytes = new TextEncoder().encode(body);
const source = new ReadableStream({ start(to) {
  for (let at = 0; at < bytes.length; at += size) to.enqueue(bytes.slice(at, at + size));
  to.close();
} });
const before = window.fetch;
window.fetch = async () => new Response(source);
import('./page/api.js').then(async ({ stream }) => {
  const found = [];
  try {
    for await (const chunk of stream('x', {})) found.push(chunk);
    done([found, null]);
  } catch (error) { done([found, error.message]); }
}).finally(() => { window.fetch = before; });
""",
        body + ("data: [DONE]\n\n" if is_whole else ""),
        size,
    )
    assert found == texts
    assert (error is None) == is_whole


@pytest.fixture(scope="module")
def parts(window: Browser, served: Served) -> Browser:
    """An open page of the server, in which tests import the page's JavaScript modules."""
    opened(window, served)
    return window

"""Chat templates in the manner of public models, composed of parts.

Each line of tests/chat_templates/shapes.jsonl is one template: either its text, or the arguments of
``composed``.
"""

from __future__ import annotations

import json
from pathlib import Path

FIRST = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
)
# Ways to place the system message: statements before all messages, the text before all messages, the
# text before the content of a user's message, and the text of a system message among the messages.
# OPEN and CLOSE are the marks of a system message, and TEXT is its content.
PLACES = {
    "turn": ("", "", "", "OPEN{{ TEXT }}CLOSE"),
    "default": (
        "",
        "{% if messages[0].role != 'system' %}OPENYou are helpful.CLOSE{% endif %}",
        "",
        "OPEN{{ TEXT }}CLOSE",
    ),
    "once": (FIRST, "OPEN{{ system or 'Be kind.' }}CLOSE", "", "{{ raise_exception('late') }}"),
    "if given": (FIRST, "{% if system %}OPEN{{ system | trim }}CLOSE{% endif %}", "", ""),
    "in first": (FIRST, "", "{% if loop.first and system %}OPEN{{ system }}CLOSE{% endif %}", ""),
    "in last": (FIRST, "", "{% if loop.last and system %}OPEN{{ system }}CLOSE{% endif %}", ""),
    "gathered": (
        "{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}"
        "{% set ns.system = ns.system + m.content + '\\n' %}{% endfor %}",
        "OPEN{{ ns.system.rstrip() }}CLOSE",
        "",
        "",
    ),
    "refused": ("", "", "", "{{ raise_exception('System role not supported') }}"),
    "dated": (
        f"{FIRST}{{% if not date_string is defined %}}"
        "{% set date_string = strftime_now('%d %b %Y') %}{% endif %}",
        "OPENToday: {{ date_string }}\n\n{{ system | trim }}CLOSE",
        "",
        "",
    ),
}
# Lists of tools. In EACH, ITEM is the text of one tool.
EACH = "{% for tool in tools %}ITEM{% if not loop.last %}{{ ',\n' }}{% endif %}{% endfor %}"
TOOLS = {
    "": "",
    "lines": "{% if tools %}OPEN<tools>{% for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}"
    "\n</tools>CLOSE{% endif %}",
    "indented": "{% if tools is not none %}OPEN{{ tools | tojson(indent=4) }}CLOSE{% endif %}",
    "escaped": "{% if tools is iterable and tools | length > 0 %}OPEN"
    + EACH.replace("ITEM", "{{ tool.function | tojson(ensure_ascii=True) }}")
    + "CLOSE{% endif %}",
    "sorted": "{% if tools %}OPEN{{ tools | tojson(separators=(',', ':'), sort_keys=True) }}CLOSE"
    "{% endif %}",
    "names": "{% if tools %}OPEN{{ tools | map(attribute='function.name') | join(', ') }}CLOSE"
    "{% endif %}",
    "typed": "{% macro kind(s) %}{% if s.enum %}{{ s.enum | map('tojson') | join(' | ') }}"
    "{% elif s.type == 'array' %}{{ kind(s['items']) }}[]{% elif s.type == 'object' %}"
    "{ {% for k, v in (s.properties or {}) | dictsort %}{{ k }}{{ '?' if k not in (s.required or []) }}"
    ": {{ kind(v) }}, {% endfor %}}{% else %}{{ s.type or 'any' }}{% endif %}{% endmacro %}"
    "{% if tools %}OPENnamespace functions {\n"
    + EACH.replace(
        "ITEM",
        "type {{ tool.function.name }} = (_: {{ kind(tool.function.parameters or {}) }}) => any;",
    )
    + "\n}CLOSE{% endif %}",
    "fields": "{% if tools %}OPEN"
    + EACH.replace(
        "ITEM",
        "{% for k, v in tool.function.items() %}{{ k }}: {{ v if v is string else v | tojson }}; "
        "{% endfor %}",
    )
    + "CLOSE{% endif %}",
    "tags": "{% if tools %}OPEN"
    + EACH.replace(
        "ITEM",
        "<function><name>{{ tool.function.name }}</name>{% for k in tool.function.parameters.properties "
        "%}<parameter>{{ k }}</parameter>{% endfor %}</function>",
    )
    + "CLOSE{% endif %}",
}
# One call, where ``f`` is its function.
CALLS = {
    "": "",
    "tags": "\n<tool_call>\n{{ {'name': f.name, 'arguments': f.arguments} | tojson }}\n</tool_call>",
    "members": '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>',
    "list": "{{ '[' if loop.first }}{{ f | tojson }}{{ ']' if loop.last else ', ' }}",
    "keys": "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>"
    "<arg_value>{{ v | tojson if v is not string else v }}</arg_value>{% endfor %}</tool_call>",
    "python": "<|python_tag|>{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %})",
    "fenced": "<\uff5ctool▁call▁begin\uff5c>{{ call.type }}<\uff5ctool▁sep\uff5c>{{ f.name }}\n```json\n"
    "{{ f.arguments | tojson }}\n```",
    "invoked": '<invoke name="{{ f.name }}">{% for k, v in f.arguments | items %}<parameter name='
    '"{{ k }}">{{ v }}</parameter>{% endfor %}</invoke>',
    "one": "{% if not loop.first %}{{ raise_exception('one call at once') }}{% endif %}"
    "<|channel|>commentary to={{ f.name }}<|message|>{{ f.arguments | tojson }}<|call|>",
}
# What happens with the reasoning of an answer. ``text`` is the text of the answer.
THOUGHTS = {
    "": "",
    "cut": "{% if '</think>' in text %}{% set text = text.split('</think>')[-1].lstrip('\n') %}"
    "{% endif %}",
    "kept": "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content.strip('\n') }}\n</think>\n\n"
    "{% endif %}",
    "last": "{% if m.reasoning_content is defined and loop.last %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}",
    "channel": "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|channel|>final<|message|>",
}
TEXTS = {
    "": "m.content",
    "trim": "m.content | trim",
    "strip": "m['content'].strip()",
    "or": "(m.content or '')",
    "string": "(m.content if m.content is string else m.content | map(attribute='text') | join)",
}
CHECKS = {
    "": "",
    "alternate": "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}",
    "break": "{% if loop.index > 5 %}{% break %}{% endif %}",
    "continue": "{% if m.role == 'system' %}{% continue %}{% endif %}",
}


def composed(
    user: str,
    answer: str,
    system: str = "",
    place: str = "turn",
    result: str = "",
    start: str = "{{ bos_token }}",
    prompt: str | None = None,
    tools: str = "",
    calls: str = "",
    thought: str = "",
    text: str = "",
    check: str = "",
) -> str:
    """Return a template.

    Args:
        user, answer, system, result: The marks of each role. "…" stands for the content.
        start: The text before all messages.
        prompt: The text that asks for an answer. By default, the mark before an answer.
        place, tools, calls, thought, text, check: Keys of the dictionaries above.
    """
    before, head, lead, among = PLACES[place]
    opened, closed = (system or user).split("…")
    (u, u2), (a, a2), (r, r2) = (each.split("…") for each in (user, answer, result or user))
    said, of_calls = TEXTS[text], ""
    if calls:
        said = "(m.content or '')"
        of_calls = (
            "{% for call in m.tool_calls or [] %}{% set f = call.function %}CALL{% endfor %}"
        ).replace("CALL", CALLS[calls])
    return (
        (
            f"{before}{start}{head}{TOOLS[tools]}{{% for m in messages %}}{CHECKS[check]}"
            f"{{% if m.role == 'user' %}}{u}{lead}{{{{ TEXT }}}}{u2}"
            f"{{% elif m.role == 'assistant' %}}{a}{{% set text = {said} %}}{THOUGHTS[thought]}"
            f"{{{{ text }}}}{of_calls}{a2}{{% elif m.role == 'tool' %}}{r}{{{{ m.content }}}}{r2}"
            f"{{% elif m.role == 'system' %}}{among}"
            f"{{% else %}}{{{{ raise_exception('role ' + m.role) }}}}{{% endif %}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{a if prompt is None else prompt}{{% endif %}}"
        )
        .replace("OPEN", opened)
        .replace("CLOSE", closed)
        .replace("TEXT", TEXTS[text])
    )


def _template(name: str, template: str | None = None, **parts: str) -> tuple[str, str]:
    return name, template or composed(**parts)


SHAPES = dict(
    _template(**json.loads(line))
    for line in (Path(__file__).parent / "chat_templates" / "shapes.jsonl").open(encoding="utf-8")
)

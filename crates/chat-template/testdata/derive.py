"""Writes `cases.json`: conversations, and what transformers renders them to. Needs transformers."""

import json
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

HERE = Path(__file__).parent
TOKENS = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **fields):
    return {"role": "assistant", "content": content} | fields


def tool(content):
    return {"role": "tool", "content": content}


SYSTEM = {"role": "system", "content": "You count things."}
CALL = {"name": "count", "arguments": {"what": "Äpfel", "limits": [1, 2.5, None], "exact": True}}
AS_TEXT = {"type": "function", "function": CALL | {"arguments": json.dumps(CALL["arguments"])}}
AS_MAP = {"type": "function", "function": CALL}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "count",
        "description": 'Counts "things" <&> it\'s\tquick\\: é ✓ 🦀\u0007\u007f',
        "parameters": {
            "type": "object",
            "required": ["what"],
            "properties": {"what": {"type": "string"}, "exact": {"default": False}},
            "limits": [1, 1.0, 0.1, 1e-05, 1e22, 1.5e16, 123456789012, -0.0, 0.0001, 12345.678],
        },
    },
}
MANY = [SYSTEM, user("How many?"), assistant("Two.\n"), user(" And now? ")]
THOUGHT = [user("Why?"), assistant("<think>\nHm.\n</think>\n\nSo.\n"), user("é ✓ {{ x }} {% y %}")]


DOCUMENTS = {"documents": [{"title": "A", "text": "b\nc "}, {"text": "d"}]}


def called(call):
    calls = [user("Count."), assistant(None, tool_calls=[call, call]), tool("3"), tool("vier")]
    return calls + [assistant("7."), user("Thanks.")]


CASES = [
    ("deepseek.jinja", MANY, {"add_generation_prompt": True}),
    ("deepseek.jinja", [*MANY, SYSTEM], {}),
    ("deepseek.jinja", THOUGHT, {"add_generation_prompt": True}),
    ("deepseek.jinja", called(AS_TEXT), {}),
    ("deepseek.jinja", called(AS_TEXT)[:4], {"add_generation_prompt": True}),
    ("glm.jinja", MANY, {"add_generation_prompt": True}),
    ("glm.jinja", MANY, {"enable_thinking": False, "add_generation_prompt": True}),
    ("glm.jinja", THOUGHT, {"add_generation_prompt": True}),
    ("glm.jinja", THOUGHT[:2], {}),
    ("glm.jinja", called(AS_MAP), {"tools": [SCHEMA, SCHEMA]}),
    ("glm.jinja", [user([{"type": "text", "text": "part"}, {"type": "image"}])], {}),
    ("glm.jinja", [user("?"), assistant("!", reasoning_content=" deep ")], {"tools": [SCHEMA]}),
    ("thinking.jinja", MANY, {"add_generation_prompt": True, "thinking": True}),
    ("thinking.jinja", [*THOUGHT[:1], assistant("<think>a</think>b</think>c")], {}),
    ("thinking.jinja", called(AS_MAP)[:3], {"add_generation_prompt": True}),
    ("thinking.jinja", [user("Go"), assistant("on", prefix=True)], {"thinking": True}),
    ("kimi.jinja", called(AS_MAP | {"id": "count:0"})[:3], {"tools": [SCHEMA]}),
    ("kimi.jinja", [user("?") | {"name": "Bo"}], {"add_generation_prompt": True}),
    ("kimi.jinja", [SYSTEM, user([{"type": "image"}, {"type": "text", "text": "é"}])], DOCUMENTS),
    ("dialect.jinja", [*MANY, tool("x"), user("end ")], {"tools": [SCHEMA], "extra": "more"}),
    ("dialect.jinja", [user(" one ") | {"name": "Bo"}], {"tools": [SCHEMA]}),
]


def case(template, messages, options):
    source = (HERE / template).read_text(encoding="utf-8")
    (text,), _ = render_jinja_template([messages], chat_template=source, **TOKENS, **options)
    return {"template": template, "messages": messages, "options": options, "text": text}


cases = {"special_tokens": TOKENS, "cases": [case(*each) for each in CASES]}
text = json.dumps(cases, ensure_ascii=False, indent=1)
(HERE / "cases.json").write_text(text + "\n", encoding="utf-8")

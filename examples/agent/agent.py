"""An agent with a Python tool: it calls the tool as often as it likes; what it says without a call is its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron_dppo.agents.python_tool import run_python

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Runs Python; returns what it prints and the value of its last line.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]
MOST_CALLS = 4


async def episode(client: Any, row: Mapping[str, Any]) -> str:
    """One question, from `task.prompt` to the answer, which the task's own reward scores. `client` is an
    `openai.AsyncOpenAI`; the same function works with any server of chat completions."""
    messages = list(row["messages"])
    for _ in range(MOST_CALLS):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        answer = reply.choices[0].message
        if not answer.tool_calls:
            return answer.content or ""
        messages.append(answer.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": _run(call.function.arguments)}
            for call in answer.tool_calls
        ]
    return ""


def _run(arguments: str) -> str:
    """What the policy wrote may be anything."""
    try:
        code = json.loads(arguments)["code"]
    except (ValueError, KeyError, TypeError):
        code = None
    if not isinstance(code, str):
        return 'the arguments must be {"code": "..."}'
    return run_python(code, most=16)

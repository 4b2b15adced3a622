"""openai-agents plays one episode: a tool, an answer, and a second question after a history that is cut short."""

import asyncio
import json
import os

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def python(code: str) -> str:
    """Runs Python."""
    return str(len(code))


async def main() -> None:
    with open(os.environ["AGENT_ROW"]) as file:
        row = json.load(file)
    model = OpenAIChatCompletionsModel("policy", AsyncOpenAI())
    agent = Agent("adder", instructions="Add.", tools=[python], model=model, model_settings=ModelSettings())
    first = await Runner.run(agent, row["messages"][-1]["content"], max_turns=6)
    history = first.to_input_list()
    edited = [history[0], history[-1], {"role": "user", "content": "again"}]  # without the call and its result
    second = await Runner.run(agent, edited, max_turns=6)
    calls = [item for item in first.new_items if item.type == "tool_call_item"]
    report = {"reward": float(row["sample"]), "correct": bool(calls) and bool(second.final_output)}
    with open(os.environ["AGENT_REPORT"], "w") as file:
        json.dump(report, file)


asyncio.run(main())

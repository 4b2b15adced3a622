"""smolagents plays one episode: it writes the policy's calls into the history in words of its own."""

import json
import os

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

TEMPLATES = {
    "system_prompt": "Use tools.",
    "planning": dict.fromkeys(("initial_plan", "update_plan_pre_messages", "update_plan_post_messages"), ""),
    "managed_agent": {"task": "", "report": ""},
    "final_answer": {"pre_messages": "", "post_messages": ""},
}


@tool
def python(code: str) -> str:
    """Runs Python.

    Args:
        code: The program.
    """
    return str(len(code))


with open(os.environ["AGENT_ROW"]) as file:
    row = json.load(file)
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
model = OpenAIModel("policy", api_base=base, api_key=key, tool_choice="auto")
agent = ToolCallingAgent(
    [python], model, prompt_templates=TEMPLATES, max_steps=4, verbosity_level=LogLevel.OFF, add_base_tools=False
)
answer = agent.run(row["messages"][-1]["content"])
calls = [call for step in agent.memory.steps for call in getattr(step, "tool_calls", None) or []]
with open(os.environ["AGENT_REPORT"], "w") as file:
    json.dump({"reward": float(row["sample"]), "correct": len(calls) > 1 and answer is not None}, file)

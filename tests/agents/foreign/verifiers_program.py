"""A tool environment of verifiers plays one episode; before its third turn it forgets the first."""

import asyncio
import json
import os

import verifiers as vf
from datasets import Dataset

with open(os.environ["AGENT_ROW"]) as file:
    row = json.load(file)


async def python(code: str) -> str:
    """Runs Python."""
    return str(len(code))


async def asked(completion, **_) -> float:
    return float(row["sample"])


class Forgetful(vf.ToolEnv):
    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages[:1] + messages[3:] if len(state["trajectory"]) == 2 else messages


async def main() -> None:
    question = {"prompt": row["messages"], "answer": row["answer"], "example_id": row["index"]}
    environment = Forgetful(
        dataset=Dataset.from_list([question]), tools=[python], rubric=vf.Rubric(funcs=[asked]), max_turns=6
    )
    client = vf.ClientConfig(api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    results = await environment.generate(Dataset.from_list([question]), client, "policy", sampling_args={})
    (output,) = results["outputs"]
    calls = [m for m in output["completion"] if m["role"] == "assistant" and m.get("tool_calls")]
    report = {"reward": float(output["reward"]), "correct": bool(calls) and not output.get("error")}
    with open(os.environ["AGENT_REPORT"], "w") as file:
        json.dump(report, file)


asyncio.run(main())

"""LangChain's class for completions, against the HTTP address given. Runs in the clients' environment."""

import asyncio
import sys

from langchain_openai import OpenAI

PROMPTS = ["Once upon a time", "The little boat", "A lamp"]

base_url = f"http://{sys.argv[1]}/v1"
llm = OpenAI(base_url=base_url, api_key="none", model="tiny", max_tokens=20, temperature=0.7, seed=3)
alone = [llm.invoke(prompt) for prompt in PROMPTS]
assert all(alone), alone
assert ["".join(llm.stream(prompt)) for prompt in PROMPTS] == alone
together = llm.generate(PROMPTS)
assert [of_prompt[0].text for of_prompt in together.generations] == alone
assert together.llm_output["token_usage"]["completion_tokens"] == 20 * len(PROMPTS)
assert asyncio.run(llm.ainvoke(PROMPTS[0], stop=["\n"])) == alone[0].partition("\n")[0]
print(f"{len(PROMPTS)} prompts: alone, streamed and together the same texts; usage; stop strings; asynchronous")

"""An agent that may call tools: it says what it wants to know, is told, and goes on until it knows the answer.

python examples/react_agent.py [--url http://localhost:8000]
"""

import argparse
import json

import quire.lang as sgl

STOCK = {"wagon": 64, "saw": 40}
PRICES = {"wagon": 31, "saw": 9}


def schema(name, about):
    parameters = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
    return json.dumps({"type": "function", "function": {"name": name, "description": about, "parameters": parameters}})


TOOLS = {
    "get_stock": lambda item: {"stock": STOCK[item]},
    "get_price": lambda item: {"price": PRICES[item]},
}
ABOUT = [schema("get_stock", "How many are left"), schema("get_price", "Price of an item")]


@sgl.function
def agent(s, question, max_steps=4):
    s += sgl.system("\n".join(["Tools:", *ABOUT]))
    s += sgl.user(question)
    for _ in range(max_steps):
        s += sgl.assistant(sgl.gen("said", max_tokens=60))
        said = s["said"]
        if "<tool_call>" not in said:
            return said
        call = json.loads(said.split("<tool_call>")[1].split("</tool_call>")[0])
        result = TOOLS[call["name"]](**call["arguments"])
        print(f"  {call['name']}{call['arguments']} -> {result}")
        s += sgl.user(f"<tool_response>\n{json.dumps(result)}\n</tool_response>")


def main(backend):
    for question in ("Check the stock of wagons.", "Check what the saw costs."):
        print(question)
        print(agent.run(question, temperature=0, backend=backend).ret_value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a server; without it, the model runs in this process")
    url = parser.parse_args().url
    with sgl.RuntimeEndpoint(url) if url else sgl.Engine() as backend:
        main(backend)

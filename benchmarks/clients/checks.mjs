// What the programs for Node share: the questions for the embedded model, as in questions.py, and the form of results.

import { readFileSync } from "node:fs";

export const MODEL = "quire-demo";
export const QUESTION = "How much is the lamp?";
export const MORE = "And the tent?";
export const TASK = "Check what the kite costs.";
export const RESULT = '{"price": 73}'; // what the tool returns
export const PRICE = {
  name: "get_price",
  description: "Price of an item",
  parameters: { type: "object", properties: { item: { type: "string" } }, required: ["item"] },
};
export const FACTS = "Faye took 18 white ladders on Thursday.\nJSON keys: count, name";

export const user = (content) => [{ role: "user", content }];

// Throws unless what is claimed holds.
export function ensure(holds, claim) {
  if (!holds) throw new Error(claim);
}

export function isRecord(value) {
  ensure(Number.isInteger(value?.count) && typeof value?.name === "string", `no record: ${JSON.stringify(value)}`);
}

// The tool. Its `hasAnswered` throws unless it was called once, as TASK says, and the text has its result.
export function shop() {
  const asked = [];
  return {
    asked,
    getPrice({ item }) {
      asked.push(item);
      return RESULT;
    },
    hasAnswered(text) {
      ensure(asked.length === 1 && asked[0] === "kite", `the tool was called with ${JSON.stringify(asked)}`);
      ensure(String(text).includes("73"), `the answer is ${JSON.stringify(text)}`);
    },
  };
}

// Prints the versions of the packages, then one line of JSON per check: its name and null, or the error's message.
export async function main(packages, checks) {
  const [first, ...others] = packages.map((name) => {
    const about = new URL(`node_modules/${name}/package.json`, import.meta.url);
    return [name, JSON.parse(readFileSync(about, "utf8")).version];
  });
  console.log([first[1], ...others.map(([name, version]) => `${name} ${version}`)].join(", "));
  for (const [name, run] of Object.entries(checks)) {
    let message = null;
    try {
      await run();
    } catch (error) {
      message = `${error?.name}: ${String(error?.message).replaceAll(/\s+/g, " ").slice(0, 300)}`;
    }
    console.log(JSON.stringify([name, message]));
  }
}

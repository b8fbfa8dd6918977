// OpenAI's own client for JavaScript:  node openai_js.mjs URL, in a folder with its packages and checks.mjs

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

import { FACTS, MODEL, MORE, PRICE, QUESTION, TASK, ensure, isRecord, main, shop, user } from "./checks.mjs";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const { completions } = client.chat;
const greedy = { model: MODEL, temperature: 0 };
const record = z.object({ count: z.int().min(0).max(99), name: z.enum(["Faye", "Zoe"]) });
const flat = { type: "function", ...PRICE };
const runnable = (tried) => ({ type: "function", function: { ...PRICE, parse: JSON.parse, function: tried.getPrice } });

async function contentOf(stream) {
  let whole = "";
  for await (const chunk of stream) whole += chunk.choices[0].delta.content ?? "";
  return whole;
}

await main(["openai", "zod"], {
  chat: async () => {
    const made = await completions.create({ messages: user(QUESTION), ...greedy });
    ensure(made.choices[0].message.content, "the answer is empty");
  },
  stream: async () => {
    const stream = await completions.create({ messages: user(QUESTION), stream: true, ...greedy });
    ensure(await contentOf(stream), "the answer is empty");
    const helper = completions.stream({ messages: user(QUESTION), ...greedy });
    ensure(await helper.finalContent(), "the answer is empty");
  },
  "two turns": async () => {
    const { message } = (await completions.create({ messages: user(QUESTION), ...greedy })).choices[0];
    const again = await completions.create({ messages: [...user(QUESTION), message, ...user(MORE)], ...greedy });
    ensure(again.choices[0].message.content, "the answer is empty");
  },
  "structured output": async () => {
    const format = zodResponseFormat(record, "record");
    const made = await completions.parse({ messages: user(FACTS), response_format: format, ...greedy });
    isRecord(made.choices[0].message.parsed);
  },
  embeddings: async () => {
    const made = await client.embeddings.create({ model: MODEL, input: ["a", "b"] });
    ensure(made.data[1].embedding.length > 1, "the embedding is empty");
  },
  runTools: async () => {
    const tried = shop();
    const runner = completions.runTools({ messages: user(TASK), tools: [runnable(tried)], ...greedy });
    tried.hasAnswered(await runner.finalContent());
  },
  "streamed runTools": async () => {
    const tried = shop();
    const runner = completions.runTools({ messages: user(TASK), tools: [runnable(tried)], stream: true, ...greedy });
    tried.hasAnswered(await runner.finalContent());
  },
  "required call": async () => {
    const tried = shop();
    const choice = { type: "function", function: { name: PRICE.name } };
    const asked = { messages: user(QUESTION), tools: [runnable(tried)], tool_choice: choice, ...greedy };
    await completions.runTools(asked).done();
    ensure(tried.asked.length === 1 && typeof tried.asked[0] === "string", "the tool was not called");
  },
  response: async () => {
    const made = await client.responses.create({ input: QUESTION, ...greedy });
    ensure(made.output_text, "the answer is empty");
  },
  "streamed response": async () => {
    const stream = client.responses.stream({ input: QUESTION, ...greedy });
    let whole = "";
    for await (const event of stream) if (event.type === "response.output_text.delta") whole += event.delta;
    ensure(whole && whole === (await stream.finalResponse()).output_text, "the deltas are not the answer");
  },
  "structured response": async () => {
    const text = { format: zodTextFormat(record, "record") };
    const made = await client.responses.parse({ input: FACTS, text, ...greedy });
    isRecord(made.output_parsed);
  },
  "response: tool call and answer": async () => {
    const tried = shop();
    const first = await client.responses.create({ input: TASK, tools: [flat], ...greedy });
    const call = first.output.find((item) => item.type === "function_call");
    const output = tried.getPrice(JSON.parse(call.arguments));
    const input = [{ type: "function_call_output", call_id: call.call_id, output }];
    const last = await client.responses.create({ input, previous_response_id: first.id, tools: [flat], ...greedy });
    tried.hasAnswered(last.output_text);
  },
  batch: async () => {
    const endpoint = "/v1/chat/completions";
    const body = { model: MODEL, messages: user(QUESTION), max_tokens: 20 };
    const line = JSON.stringify({ custom_id: "a", method: "POST", url: endpoint, body });
    const file = await client.files.create({ file: new File([line], "in.jsonl"), purpose: "batch" });
    let made = await client.batches.create({ input_file_id: file.id, endpoint, completion_window: "24h" });
    while (!["completed", "failed", "expired", "cancelled"].includes(made.status)) {
      await new Promise((resume) => setTimeout(resume, 50));
      made = await client.batches.retrieve(made.id);
    }
    const answer = JSON.parse(await (await client.files.content(made.output_file_id)).text());
    ensure(answer.response.body.choices[0].message.content, "the answer is empty");
  },
});

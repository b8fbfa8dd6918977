// The AI SDK:  node ai_sdk.mjs URL, in a folder with its packages and checks.mjs

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embedMany, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

import { FACTS, MODEL, MORE, PRICE, QUESTION, TASK, ensure, isRecord, main, shop, user } from "./checks.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false; // they are printed
const baseURL = `${process.argv[2]}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ baseURL, name: "quire", supportsStructuredOutputs: true });
const record = z.object({ count: z.int().min(0).max(99), name: z.enum(["Faye", "Zoe"]) });

async function text(stream) {
  let whole = "";
  for await (const piece of stream.textStream) whole += piece;
  return whole;
}

function checksOf(model) {
  const asked = { model, temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
  const tools = (tried) => {
    const inputSchema = jsonSchema(PRICE.parameters);
    return { get_price: tool({ description: PRICE.description, inputSchema, execute: tried.getPrice }) };
  };
  const task = (tried) => ({ ...asked, prompt: TASK, tools: tools(tried), stopWhen: stepCountIs(4) });
  return {
    "two turns": async () => {
      const first = await generateText({ ...asked, prompt: QUESTION });
      ensure(first.text, "the answer is empty");
      const messages = [...user(QUESTION), ...first.response.messages, ...user(MORE)];
      ensure((await generateText({ ...asked, messages })).text, "the answer is empty");
    },
    stream: async () => ensure(await text(streamText({ ...asked, prompt: QUESTION })), "the answer is empty"),
    object: async () => {
      const output = Output.object({ schema: record });
      isRecord((await generateText({ ...asked, prompt: FACTS, output })).output);
    },
    tools: async () => {
      const tried = shop();
      tried.hasAnswered((await generateText(task(tried))).text);
    },
    "streamed tools": async () => {
      const tried = shop();
      tried.hasAnswered(await text(streamText(task(tried))));
    },
    "tools and object": async () => {
      const tried = shop();
      const output = Output.object({ schema: z.object({ price: z.int().min(0).max(99) }) });
      tried.hasAnswered(JSON.stringify((await generateText({ ...task(tried), output })).output));
    },
    "required call": async () => {
      for (const toolChoice of ["required", { type: "tool", toolName: PRICE.name }]) {
        const tried = shop();
        await generateText({ ...asked, prompt: QUESTION, tools: tools(tried), toolChoice });
        ensure(typeof tried.asked[0] === "string", "the tool was not called");
      }
    },
  };
}

const kinds = { response: openai(MODEL), chat: openai.chat(MODEL), compatible: compatible(MODEL) };
const each = Object.entries(kinds).flatMap(([kind, model]) =>
  Object.entries(checksOf(model)).map(([name, check]) => [`${kind}: ${name}`, check]),
);

await main(["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"], {
  ...Object.fromEntries(each),
  embeddings: async () => {
    const made = await embedMany({ model: compatible.embeddingModel(MODEL), values: ["a", "b"], maxRetries: 0 });
    ensure(made.embeddings[1].length > 1, "the embedding is empty");
  },
});

// The request that a conversation and the settings make, as JSON, curl and Python.

import { address } from '../api.js';

const OPENAI = new Set(['model', 'messages', 'stream', 'stream_options', 'temperature', 'top_p', 'max_tokens', 'seed', 'stop',
  'presence_penalty', 'frequency_penalty', 'response_format', 'tools', 'tool_choice', 'parallel_tool_calls', 'logprobs',
  'top_logprobs', 'reasoning_effort']);

function messageOf(node) {
  if (node.role === 'tool') return { role: 'tool', tool_call_id: node.tool_call_id, content: node.content };
  if (node.role !== 'assistant') return { role: node.role, content: node.content };
  const message = { role: 'assistant', content: node.content || null };
  if (node.reasoning) message.reasoning_content = node.reasoning;
  if (node.tool_calls?.length) message.tool_calls = node.tool_calls;
  else message.content ??= '';
  return message;
}

/** Whether an answer failed, or was left, before it had any text: no turn of the conversation. */
const isEmpty = (node) => node.role === 'assistant' && !node.content && !node.tool_calls?.length && (Boolean(node.error) || !node.reasoning);

/** The body of a request for the next message after `path`. */
export function requestBody({ model, system, path, settings }) {
  const messages = path.filter((node) => !isEmpty(node)).map(messageOf);
  if (system.trim()) messages.unshift({ role: 'system', content: system });
  const body = { model, messages, ...settings.sampling() };
  const schema = settings.schema();
  if (schema) body.response_format = { type: 'json_schema', json_schema: { name: 'answer', schema } };
  const tools = settings.tools();
  if (tools) Object.assign(body, { tools, tool_choice: settings.get('tool_choice') });
  if (settings.get('probabilities')) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  body.return_drafted = true;
  body.stream = true;
  body.stream_options = { include_usage: true, continuous_usage_stats: true };
  return body;
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function asCurl(body, withKey) {
  const lines = [`curl -N ${address('v1/chat/completions')}`, "-H 'Content-Type: application/json'"];
  if (withKey) lines.push('-H "Authorization: Bearer $QUIRE_API_KEY"');
  lines.push(`-d ${quoted(JSON.stringify(body, null, 2))}`);
  return lines.join(' \\\n  ');
}

/** A value of JSON as a Python expression. */
export function pythonLiteral(value, indent = '') {
  if (value === null) return 'None';
  if (value === true) return 'True';
  if (value === false) return 'False';
  if (typeof value === 'string') return JSON.stringify(value);
  if (typeof value === 'number') return String(value);
  const inner = `${indent}    `;
  const parts = Array.isArray(value)
    ? value.map((one) => pythonLiteral(one, inner))
    : Object.entries(value).map(([key, one]) => `${JSON.stringify(key)}: ${pythonLiteral(one, inner)}`);
  const [open, close] = Array.isArray(value) ? '[]' : '{}';
  const line = `${open}${parts.join(', ')}${close}`;
  if (line.length + indent.length < 100 && !line.includes('\n')) return line;
  return `${open}\n${parts.map((part) => `${inner}${part},\n`).join('')}${indent}${close}`;
}

export function asPython(body, withKey) {
  const own = Object.entries(body).filter(([name]) => OPENAI.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.has(name)));
  const lines = own.map(([name, value]) => `    ${name}=${pythonLiteral(value, '    ')},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${pythonLiteral(extra, '    ')},`);
  const key = withKey ? 'os.environ["QUIRE_API_KEY"]' : '"none"';
  return [
    ...(withKey ? ['import os', ''] : []),
    'from openai import OpenAI',
    '',
    `client = OpenAI(base_url="${address('v1')}", api_key=${key})`,
    'stream = client.chat.completions.create(',
    ...lines,
    ')',
    'for chunk in stream:',
    '    if chunk.choices:',
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
    '',
  ].join('\n');
}

// Conversations as a file: what Export wrote, Import reads. A file may come from anyone, so all of it is checked.

import { saveFile } from '../dom.js';

const ROLES = ['user', 'assistant', 'tool'];
const TEXTS = ['reasoning', 'error', 'finish', 'request', 'tool_call_id'];
const FIGURES = ['tokens', 'prompt', 'cached', 'forced', 'first', 'rate', 'drafts', 'reasoned'];
export const MAX_FILE = 20_000_000; // bytes

const isText = (value) => typeof value === 'string';
const asText = (value) => (isText(value) ? value : '');
const asTime = (value, other) => (Number.isFinite(value) ? Math.min(value, Date.now()) : other);
const isId = (value) => isText(value) && /^\w{1,64}$/.test(value);

function readCalls(calls) {
  if (!Array.isArray(calls)) return [];
  return calls.filter((call) => isText(call?.function?.name) && isText(call.function.arguments))
    .map((call) => ({ id: asText(call.id), type: 'function', function: { name: call.function.name, arguments: call.function.arguments } }));
}

function readFigures(figures) {
  if (typeof figures !== 'object' || figures === null) return undefined;
  return Object.fromEntries(FIGURES.map((name) => [name, Number.isFinite(figures[name]) ? figures[name] : null]));
}

/** A message with the fields that a page keeps, or null. `known` has the messages before it: a parent comes before its children. */
function readNode(node, known) {
  if (!isId(node?.id) || known.has(node.id) || !ROLES.includes(node.role) || !isText(node.content)) return null;
  if (node.parent !== '' && !known.has(node.parent)) return null;
  const texts = Object.fromEntries(TEXTS.filter((name) => isText(node[name])).map((name) => [name, node[name]]));
  const { id, parent, role, content } = node;
  const message = { id, parent, role, content, ...texts };
  if (role === 'assistant') Object.assign(message, { tool_calls: readCalls(node.tool_calls), figures: readFigures(node.figures) });
  if (node.partial === true) message.partial = true;
  return message;
}

function readConversation(saved) {
  if (!isId(saved?.id) || !Array.isArray(saved.nodes)) return null;
  const nodes = new Map();
  for (const one of saved.nodes) {
    const node = readNode(one, nodes);
    if (!node) return null;
    nodes.set(node.id, node);
  }
  const pairs = Array.isArray(saved.chosen) ? saved.chosen.filter(Array.isArray) : [];
  const chosen = pairs.filter(([parent, child]) => nodes.get(child)?.parent === parent);
  return {
    id: saved.id,
    title: asText(saved.title).slice(0, 200),
    titleAt: asTime(saved.titleAt, 0),
    system: asText(saved.system),
    systemAt: asTime(saved.systemAt, 0),
    imported: true,
    changed: asTime(saved.changed, Date.now()),
    nodes: [...nodes.values()],
    chosen,
  };
}

/** The conversations of a file, as `new Conversation` takes them. Throws an Error whose message is for a person. */
export function readExport(text) {
  let content = null;
  try {
    content = JSON.parse(text);
  } catch {
    throw new Error('This file is not JSON. Import reads what Export wrote.');
  }
  const found = (Array.isArray(content) ? content : [content]).map(readConversation);
  if (!found.length || found.includes(null)) throw new Error('This file has something else than conversations. Import reads what Export wrote.');
  return found;
}

export function exportConversations(conversations) {
  const [first] = conversations;
  const name = conversations.length === 1 ? first.title.replace(/[^\p{L}\p{N}]+/gu, '-').slice(0, 40) || 'conversation' : 'quire-conversations';
  saveFile(`${name}.json`, JSON.stringify(conversations, null, 1));
}

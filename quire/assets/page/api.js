// Calls of the server: where it is, the key, errors, and streams of server-sent events.

import { keptInTab } from './storage.js';

const BASE = new URL('..', import.meta.url);
const KEY = 'quire.key';

export class ServerError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const address = (path) => new URL(path, BASE).href;
export const readKey = () => keptInTab.get(KEY) || '';
export const saveKey = (key) => keptInTab.set(KEY, key);
export const forgetKey = () => keptInTab.remove(KEY);

let askForKey = null; // called with the server's message after each 401
export const onKeyRefused = (callback) => {
  askForKey = callback;
};

function headers(extra, key = readKey()) {
  if (/[^\x20-\xff]/.test(key)) throw new ServerError(0, 'This key has characters that no key has. Copy it again.', 'unreadable_key');
  return key ? { ...extra, Authorization: `Bearer ${key}` } : { ...extra };
}

/** The message of an answer that is an error: OpenAI's object, or the text as it is. */
async function errorOf(response) {
  const text = await response.text();
  let error = {};
  try {
    const body = JSON.parse(text);
    error = body.error || {};
    if (typeof error === 'string') error = { message: error };
    if (!error.message && body.detail) error = { message: String(body.detail) };
  } catch {
    error = { message: text.slice(0, 500) };
  }
  return new ServerError(response.status, error.message || `HTTP ${response.status}`, error.code);
}

async function open(path, { method = 'GET', body, signal, key } = {}) {
  const init = { method, signal, headers: headers(body ? { 'Content-Type': 'application/json' } : {}, key) };
  if (body) init.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(address(path), init);
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ServerError(0, 'The server does not answer. Is it still running?');
  }
  if (response.ok) return response;
  const error = await errorOf(response);
  if (response.status === 401 && key === undefined && askForKey) askForKey(error.message);
  throw error;
}

export const getJSON = async (path, options) => (await open(path, options)).json();

/** Splits the text of a stream into its events' data. Feed it pieces of any size; it returns the data of whole events. */
export class EventParser {
  #rest = '';
  #data = [];

  feed(text) {
    const events = [];
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line === '') {
        if (this.#data.length) events.push(this.#data.join('\n'));
        this.#data = [];
      } else if (line.startsWith('data:')) {
        this.#data.push(line.slice(line[5] === ' ' ? 6 : 5));
      }
    }
    return events;
  }
}

/** Yields lists of parsed events, those that arrived together in one list. Ends at `[DONE]` or with the stream. */
export async function* streamJSON(path, options) {
  const response = await open(path, options);
  const parser = new EventParser();
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  yield { requestId: response.headers.get('x-request-id'), events: [] };
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const data = parser.feed(decoder.decode(value, { stream: true }));
      const end = data.indexOf('[DONE]');
      const events = (end < 0 ? data : data.slice(0, end)).map((event) => JSON.parse(event));
      if (events.length) yield { events };
      if (end >= 0) return;
    }
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ServerError(0, `The stream broke: ${error.message}`);
  } finally {
    reader.cancel().catch(() => {});
  }
}

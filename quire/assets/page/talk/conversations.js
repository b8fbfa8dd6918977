// Conversations: trees of messages, kept in the browser within a bound.

import { kept } from '../storage.js';

const PREFIX = 'quire.chat.';
const DELETED = 'quire.deleted'; // has ids for a moment, so that other tabs tell a deletion from one that made room
const MAX_CHATS = 100;
const MAX_CHARACTERS = 2_000_000; // browsers allow 5 million for one origin

const newId = () => Math.random().toString(36).slice(2, 10) + Date.now().toString(36);

const isLonger = (one, other) => one.content.length + (one.reasoning || '').length > other.content.length + (other.reasoning || '').length;
export const hasText = (node) => Boolean(node.content || node.reasoning || node.tool_calls?.length);

/**
 * One conversation. Messages are nodes `{id, parent, role, content, ...}`; `chosen` has the child that is shown of each node. An answer
 * that is not whole yet is `partial`. `titleAt` and `systemAt` are the times at which a person changed the title and the system prompt;
 * `imported` tells that the system prompt came with a file.
 */
export class Conversation {
  #removed = new Set(); // ids that another tab may still have

  constructor(saved) {
    this.id = saved?.id || newId();
    this.title = saved?.title || '';
    this.titleAt = saved?.titleAt || 0;
    this.system = saved?.system || '';
    this.systemAt = saved?.systemAt || 0;
    this.imported = saved?.imported;
    this.changed = saved?.changed || Date.now();
    this.nodes = new Map((saved?.nodes || []).map((node) => [node.id, node]));
    this.chosen = new Map(saved?.chosen || []);
  }

  /** Adds a message below `parent` ('' is the root) and shows its branch. */
  add(parent, message) {
    const node = { id: newId(), parent, ...message };
    this.nodes.set(node.id, node);
    this.chosen.set(parent, node.id);
    this.changed = Date.now();
    if (!this.title && node.role === 'user') this.title = node.content.trim().replace(/\s+/g, ' ').slice(0, 60);
    return node;
  }

  rename(title) {
    Object.assign(this, { title, titleAt: Date.now() });
  }

  setSystem(system) {
    Object.assign(this, { system, systemAt: Date.now(), imported: undefined });
  }

  children(parent) {
    return [...this.nodes.values()].filter((node) => node.parent === parent);
  }

  /** The messages of the branch that is shown, from the first to the last. Where the chosen child is missing, the latest one is shown. */
  path() {
    const latest = new Map([...this.nodes.values()].map((node) => [node.parent, node]));
    const next = (id) => this.nodes.get(this.chosen.get(id)) || latest.get(id);
    const shown = [];
    for (let node = next(''); node; node = next(node.id)) shown.push(node);
    return shown;
  }

  /** The messages up to and with a node. */
  pathTo(id) {
    const path = [];
    for (let node = this.nodes.get(id); node; node = this.nodes.get(node.parent)) path.unshift(node);
    return path;
  }

  siblings(node) {
    return this.children(node.parent);
  }

  choose(node) {
    this.chosen.set(node.parent, node.id);
  }

  /**
   * Adds the branches that `other`, the same conversation in another tab, has and this one does not, and what it has more of an answer.
   * Of the titles and of the system prompts the newer one stays.
   */
  merge(other) {
    if (other.titleAt > this.titleAt) [this.title, this.titleAt] = [other.title, other.titleAt];
    if (other.systemAt > this.systemAt) [this.system, this.systemAt, this.imported] = [other.system, other.systemAt, other.imported];
    for (const [id, node] of other.nodes) {
      const mine = this.nodes.get(id);
      if (!mine && !this.#removed.has(id)) this.nodes.set(id, node);
      if (!mine?.partial || (node.partial && !isLonger(node, mine))) continue;
      delete mine.partial;
      Object.assign(mine, node);
    }
    for (const [parent, child] of other.chosen) if (!this.chosen.has(parent) && this.nodes.has(child)) this.chosen.set(parent, child);
  }

  remove(id) {
    this.#removed.add(id);
    const node = this.nodes.get(id);
    for (const child of this.children(id)) this.remove(child.id);
    this.nodes.delete(id);
    this.chosen.delete(id);
    const left = this.children(node.parent);
    if (this.chosen.get(node.parent) !== id) return;
    if (left.length) this.chosen.set(node.parent, left.at(-1).id);
    else this.chosen.delete(node.parent);
  }

  toJSON() {
    const { id, title, titleAt, system, systemAt, imported, changed } = this;
    const nodes = [...this.nodes.values()].filter((node) => !node.partial || hasText(node));
    return { id, title, titleAt, system, systemAt, imported, changed, nodes, chosen: [...this.chosen] };
  }
}

const deleted = new Set(); // ids that an answer which was still running must not bring back
const byAge = (conversations) => [...conversations].sort((one, other) => other.changed - one.changed);
const keys = () => kept.keys().filter((key) => key.startsWith(PREFIX));

function load(key) {
  try {
    return new Conversation(JSON.parse(kept.get(key)));
  } catch {
    kept.remove(key);
    return null;
  }
}

/** All kept conversations, the latest first. */
export function listConversations() {
  return byAge(keys().map(load).filter(Boolean));
}

/** A conversation as it was kept last; null if it is not kept any more. */
export function loadConversation(id) {
  if (kept.get(PREFIX + id) === null) return null;
  deleted.delete(id); // another tab has kept it again
  return load(PREFIX + id);
}

export function deleteConversations(ids) {
  for (const id of ids) {
    deleted.add(id);
    kept.remove(PREFIX + id);
  }
  kept.set(DELETED, JSON.stringify(ids));
  kept.remove(DELETED);
}

/**
 * Calls `changed()` when another tab keeps or drops conversations, and `gone(ids)` when it deletes some that `isRunning(id)` here. Those
 * are not kept again; others are, if a person writes on here.
 */
export function watchConversations({ changed, gone, isRunning }) {
  window.addEventListener('storage', ({ key, newValue }) => {
    if (key === DELETED && newValue) {
      const ids = JSON.parse(newValue).filter(isRunning);
      for (const id of ids) {
        deleted.add(id);
        kept.remove(PREFIX + id); // in case it was kept here since
      }
      if (ids.length) gone(ids);
    }
    if (key === null || key.startsWith(PREFIX)) changed();
  });
}

/**
 * Keeps conversations. What does not fit makes room by dropping the oldest ones if it `mayDrop` them, and is left out otherwise. Returns
 * `{number, note}`: how many are kept, and what a person should know, or ''.
 */
function keepMany(conversations, mayDrop) {
  const sizes = new Map(keys().map((key) => [key, kept.get(key).length]));
  let total = [...sizes.values()].reduce((sum, size) => sum + size, 0);
  const resize = (key, size) => {
    total += size - (sizes.get(key) || 0);
    if (size) sizes.set(key, size);
    else sizes.delete(key);
  };
  const isOver = () => total > MAX_CHARACTERS || sizes.size > MAX_CHATS;
  let [number, dropped, problem] = [0, 0, ''];
  for (const conversation of conversations) {
    const key = PREFIX + conversation.id;
    const saved = loadConversation(conversation.id);
    if (saved) conversation.merge(saved);
    const text = JSON.stringify(conversation);
    const before = sizes.get(key) || 0;
    resize(key, text.length);
    if (text.length > MAX_CHARACTERS || (isOver() && !mayDrop)) {
      resize(key, before);
      if (mayDrop) problem = 'This conversation is too long to be kept. Export it before you close the page.';
      continue;
    }
    const others = isOver() ? listConversations().filter(({ id }) => id !== conversation.id) : [];
    for (; isOver() && others.length; dropped += 1) {
      const oldest = PREFIX + others.pop().id;
      kept.remove(oldest);
      resize(oldest, 0);
    }
    number += 1;
    if (!kept.set(key, text)) problem = 'This browser keeps nothing. Export what you need before you close the page.';
  }
  const room = dropped && `Deleted to make room: the ${dropped === 1 ? 'oldest conversation' : `${dropped} oldest conversations`}.`;
  return { number, note: problem || room || '' };
}

/** Keeps a conversation unless it was deleted, and drops the oldest ones beyond the bound. Returns what a person should know, or ''. */
export const keepConversation = (conversation) => (deleted.has(conversation.id) ? '' : keepMany([conversation], true).note);

/** Keeps conversations that were deleted. Returns what a person should know, or ''. */
export function restoreConversations(conversations) {
  for (const { id } of conversations) deleted.delete(id);
  return keepMany(byAge(conversations).reverse(), true).note; // if there is too little room now, the oldest ones make it
}

/** Keeps the conversations of a file, the latest first, as far as they fit beside those that are kept. Returns what keepMany does. */
export function importConversations(conversations) {
  for (const { id } of conversations) deleted.delete(id);
  return keepMany(byAge(conversations), false);
}

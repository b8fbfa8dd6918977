// The list of kept conversations: search, open, rename, export, import, delete and undo.

import { button, h, icon, plural } from '../dom.js';
import { Conversation, deleteConversations, importConversations, keepConversation, listConversations, restoreConversations } from './conversations.js';
import { MAX_FILE, exportConversations, readExport } from './exchange.js';

const KEPT = 'Kept in this browser only.';
const UNDO_MS = 10_000;
const GROUPS = ['Today', 'Yesterday', 'Earlier'];

function groupOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return 'Today';
  return time >= new Date(midnight - 1).setHours(0, 0, 0, 0) ? 'Yesterday' : 'Earlier';
}

function hasWords(conversation, words) {
  const text = [conversation.title, ...[...conversation.nodes.values()].map((node) => node.content)].join('\n').toLowerCase();
  return words.every((word) => text.includes(word));
}

export class History {
  #actions;
  #current = null;
  #drawnFor = ''; // what the list shows, so that it is drawn again, and loses the focus, only if that has changed
  #menu = ''; // id of the conversation whose actions are shown
  #renamed = ''; // id of the conversation whose title is being typed
  #undoTimer = 0;
  #deleted = []; // conversations that Undo brings back
  #deletedShown = null; // the one of them that was shown
  #list = h('div', { class: 'chats' });
  #note = h('p', { class: 'note', role: 'status' }, KEPT);
  #undo = h('p', { class: 'undo', role: 'status' });
  #find = h('input', { type: 'search', placeholder: 'Search', 'aria-label': 'Search the conversations', title: 'Ctrl+K', autocomplete: 'off', oninput: () => this.#draw() });
  #file = h('input', { type: 'file', accept: '.json,application/json', hidden: true, onchange: () => this.#import() });

  /**
   * `actions.open(id)` shows a conversation; `reopen(conversation)` shows one that may not be kept; `find(id)` returns one, and `all()`
   * returns all with what the page has of them; `isRunning(id)` tells whether an answer of it arrives; `renamed(conversation)` and
   * `deleted(ids)` are called afterwards.
   */
  constructor(actions) {
    this.#actions = actions;
    this.search = h('div', { class: 'side-search', onkeydown: (event) => this.#leaveSearch(event) }, this.#find);
    this.element = h('nav', { class: 'history', 'aria-label': 'Conversations' }, this.#list);
    this.foot = h('div', { class: 'history-foot' }, this.#undo,
      button('Export all', () => exportConversations(this.#actions.all()), { class: 'quiet' }),
      button('Import', () => this.#file.click(), { class: 'quiet' }),
      button('Delete all', () => this.#deleteAll(), { class: 'quiet' }),
      this.#file, this.#note);
  }

  focusSearch() {
    this.#find.select();
    this.#find.focus();
  }

  /** Shows what a person should know of the keeping; '' for nothing of note. */
  note(text) {
    if (this.#note.textContent !== (text || KEPT)) this.#note.textContent = text || KEPT;
  }

  show(current) {
    this.#current = current;
    this.#draw();
  }

  #leaveSearch(event) {
    if (event.key !== 'Escape' || !this.#find.value) return;
    event.preventDefault();
    this.#find.value = '';
    this.#draw();
  }

  #draw() {
    if (this.#renamed && this.#list.querySelector('.rename')) return; // after the typing
    const words = this.#find.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = listConversations().filter((conversation) => hasWords(conversation, words));
    const rows = found.map(({ id, title, changed }) => ({ id, title: title || 'Untitled', changed, group: groupOf(changed), isRunning: this.#actions.isRunning(id) }));
    const shown = JSON.stringify([rows, this.#current?.id, this.#menu, this.#renamed, words]);
    if (shown === this.#drawnFor) return;
    this.#drawnFor = shown;
    const focused = this.#list.contains(document.activeElement) ? document.activeElement.dataset.control : null;
    const parts = GROUPS.map((group) => [group, rows.filter((row) => row.group === group)]).filter(([, some]) => some.length);
    this.#list.replaceChildren(...(parts.length
      ? parts.flatMap(([group, some]) => [h('h2', {}, group), h('ul', { 'aria-label': group }, some.map((row) => this.#item(row)))])
      : [h('p', { class: 'note' }, words.length ? 'No conversation has these words.' : 'Nothing yet.')]));
    if (focused) this.#list.querySelector(`[data-control="${focused}"]`)?.focus();
  }

  #item(row) {
    const isCurrent = row.id === this.#current?.id;
    const isOpen = row.id === this.#menu;
    if (row.id === this.#renamed) return h('li', {}, this.#titleField(row));
    const onkeydown = (event) => {
      if (event.key !== 'Escape' || !isOpen) return;
      event.preventDefault();
      this.#toggleMenu('');
      this.#list.querySelector(`[data-control="more-${row.id}"]`)?.focus();
    };
    return h('li', { class: isCurrent ? 'active' : null, onkeydown },
      h('button', {
        type: 'button', class: 'chat-link', 'aria-current': isCurrent ? 'true' : null, 'data-control': `open-${row.id}`,
        title: `${row.title}\n${new Date(row.changed).toLocaleString()}`, onclick: () => this.#actions.open(row.id),
      }, h('span', {}, row.title)),
      row.isRunning && h('span', { class: 'arriving', role: 'img', 'aria-label': 'An answer arrives', title: 'An answer arrives' }),
      h('button', {
        type: 'button', class: 'quiet more', 'aria-label': `Actions of ${row.title}`, 'aria-expanded': String(isOpen), 'data-control': `more-${row.id}`,
        onclick: () => this.#toggleMenu(isOpen ? '' : row.id),
      }, icon('more')),
      isOpen && h('div', { class: 'chat-actions', role: 'group', 'aria-label': `Actions of ${row.title}` },
        button('Rename', () => this.#rename(row.id), { class: 'quiet' }),
        button('Export', () => exportConversations([this.#actions.find(row.id)]), { class: 'quiet' }),
        button('Delete', () => this.#delete([row.id]), { class: 'quiet delete' })));
  }

  #toggleMenu(id) {
    this.#menu = id;
    this.#draw();
  }

  // --- rename

  #rename(id) {
    [this.#menu, this.#renamed] = ['', id];
    this.#draw();
    this.#list.querySelector('.rename')?.select();
  }

  #titleField({ id, title }) {
    const end = (isKept) => {
      if (this.#renamed !== id) return; // the field loses the focus once more when it is removed
      const conversation = this.#actions.find(id);
      this.#renamed = '';
      field.remove();
      if (isKept && conversation && field.value.trim()) {
        conversation.rename(field.value.trim().slice(0, 200));
        this.note(keepConversation(conversation));
        this.#actions.renamed(conversation);
      }
      this.#draw();
      this.#list.querySelector(`[data-control="open-${id}"]`)?.focus();
    };
    const field = h('input', { class: 'rename', value: title, maxlength: 200, 'aria-label': 'Title', onblur: () => end(true), onkeydown: (event) => {
      if (event.isComposing || (event.key !== 'Enter' && event.key !== 'Escape')) return;
      event.preventDefault();
      end(event.key === 'Enter');
    } });
    return field;
  }

  // --- delete and undo

  #deleteAll() {
    const ids = listConversations().map(({ id }) => id);
    if (ids.length && window.confirm('Delete all conversations of this browser?')) this.#delete(ids);
  }

  #delete(ids) {
    this.#deleted.push(...ids.map((id) => this.#actions.find(id)).filter(Boolean));
    if (ids.includes(this.#current?.id)) this.#deletedShown = this.#current;
    deleteConversations(ids);
    this.#menu = '';
    this.#actions.deleted(ids);
    const what = this.#deleted.length === 1 ? `“${this.#deleted[0].title || 'Untitled'}”` : plural(this.#deleted.length, 'conversation');
    const control = button('Undo', () => this.#bringBack());
    this.#undo.replaceChildren(h('span', {}, `Deleted: ${what}`), control);
    control.focus(); // its row, which had the focus, is gone
    this.#waitForUndo();
  }

  /** Ends the time for Undo, but not under the focus. */
  #waitForUndo() {
    clearTimeout(this.#undoTimer);
    this.#undoTimer = setTimeout(() => (this.#undo.contains(document.activeElement) ? this.#waitForUndo() : this.#endUndo()), UNDO_MS);
  }

  #bringBack() {
    const [deleted, shown] = [this.#deleted, this.#deletedShown];
    this.note(restoreConversations(deleted));
    this.#endUndo();
    if (shown) this.#actions.reopen(shown);
    else this.#draw();
    this.#list.querySelector(`[data-control="open-${(shown || deleted.at(-1)).id}"]`)?.focus();
  }

  #endUndo() {
    clearTimeout(this.#undoTimer);
    [this.#deleted, this.#deletedShown] = [[], null];
    this.#undo.replaceChildren();
  }

  // --- import

  async #import() {
    const [file] = this.#file.files;
    if (!file) return;
    try {
      if (file.size > MAX_FILE) throw new Error('This file is too large for what a browser keeps.');
      const found = readExport(await file.text());
      const { number, note } = importConversations(found.map((saved) => new Conversation(saved)));
      const told = number === found.length
        ? `Imported: ${plural(number, 'conversation')}.`
        : `Imported: ${number} of ${plural(found.length, 'conversation')}. The others do not fit beside those that are kept.`;
      this.note(`${told} ${note}`.trim());
    } catch (error) {
      this.note(error.message);
    }
    this.#file.value = ''; // so that the same file can be chosen again
    this.#draw();
  }
}

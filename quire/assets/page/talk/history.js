// The list of kept conversations: open, export, delete.

import { button, h, saveFile } from '../dom.js';
import { deleteAll, deleteConversation, listConversations } from './conversations.js';

const DAY = 86_400_000;
const KEPT = 'Kept in this browser only.';

function when(time) {
  const age = Date.now() - time;
  if (age < DAY) return new Date(time).toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' });
  return new Date(time).toLocaleDateString([], { day: 'numeric', month: 'short' });
}

export class History {
  #open;
  #list = h('ul', { class: 'chats' });
  #note = h('p', { class: 'note', role: 'status' }, KEPT);

  /** `open(id)` shows a kept conversation, and a new one for null. */
  constructor(open) {
    this.#open = open;
    this.element = h('nav', { class: 'history', 'aria-label': 'Conversations' }, this.#list);
    this.foot = h('div', { class: 'history-foot' },
      button('Export all', () => saveFile('quire-conversations.json', JSON.stringify(listConversations(), null, 1)), { class: 'quiet' }),
      button('Delete all', () => this.#deleteAll(), { class: 'quiet' }),
      this.#note);
  }

  #deleteAll() {
    if (!window.confirm('Delete all conversations of this browser?')) return;
    deleteAll();
    this.#open(null);
  }

  /** Shows what happened when a conversation was kept; '' for nothing of note. */
  note(text) {
    if (this.#note.textContent !== (text || KEPT)) this.#note.textContent = text || KEPT;
  }

  show(current) {
    const items = listConversations().map((conversation) => {
      const active = conversation.id === current.id;
      return h('li', { class: active ? 'active' : null },
        h('button', { type: 'button', class: 'chat-link', 'aria-current': active ? 'true' : null, onclick: () => this.#open(conversation.id) },
          h('span', {}, conversation.title || 'Untitled'), h('time', {}, when(conversation.changed))),
        button('×', () => {
          deleteConversation(conversation.id);
          if (active) this.#open(null);
          else this.show(current);
        }, { class: 'quiet delete', 'aria-label': `Delete ${conversation.title || 'conversation'}` }));
    });
    this.#list.replaceChildren(...(items.length ? items : [h('li', { class: 'note' }, 'Nothing yet.')]));
  }
}

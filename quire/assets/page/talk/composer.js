// The composer: the text of the next message, a draft for each conversation, send and stop, how full the context is.

import { button, count, h, icon } from '../dom.js';
import { keptInTab } from '../storage.js';

const DRAFT = 'quire.draft.';
const FULL = 0.9; // from this share of the context on the gauge warns
const MAX_HEIGHT = 240;
const SETTLE_MS = 250; // until the tabs of a phone are shown again: they would move the control under a tap that has not ended

export class Composer {
  #send;
  #draft = DRAFT;
  #isRunning = false;
  #touch = window.matchMedia('(pointer: coarse)');
  #input = h('textarea', { id: 'composer', rows: 1, placeholder: 'Message', 'aria-label': 'Message' });
  #hint = h('span', { class: 'note hint' });
  #gauge = h('span', { class: 'note gauge', hidden: true });
  #button = h('button', { class: 'primary round' });

  /** `send(text)` sends a message, and then calls `clear`; `stop()` stops the answer; `showCode()` shows the request. */
  constructor({ send, stop, showCode }) {
    this.#send = send;
    this.#input.addEventListener('input', () => this.#change());
    this.#input.addEventListener('keydown', (event) => {
      const composes = event.isComposing || event.keyCode === 229; // an input method takes the key, also where isComposing is late
      if (event.key !== 'Enter' || event.shiftKey || composes || this.#touch.matches) return;
      event.preventDefault();
      if (!this.#isRunning) this.#submit();
    });
    const onfocusin = () => document.body.classList.add('typing');
    const onfocusout = () => setTimeout(() => {
      if (!this.element.contains(document.activeElement)) document.body.classList.remove('typing');
    }, SETTLE_MS);
    this.element = h('form', { class: 'composer', onfocusin, onfocusout, onsubmit: (event) => {
      event.preventDefault();
      if (this.#isRunning) stop();
      else this.#submit();
    } }, this.#input, h('div', { class: 'composer-row' }, this.#hint, this.#gauge, button('As code', showCode, { class: 'quiet' }), this.#button));
    this.showRunning(false);
  }

  get text() {
    return this.#input.value.trim();
  }

  focus() {
    this.#input.focus();
  }

  /** Shows the draft of a conversation; '' is the one that has no message yet. */
  open(id) {
    this.#draft = DRAFT + id;
    this.#input.value = keptInTab.get(this.#draft) || '';
    this.#grow();
  }

  #change() {
    if (this.text) keptInTab.set(this.#draft, this.#input.value);
    else keptInTab.remove(this.#draft);
    this.#grow();
  }

  #submit() {
    if (!this.text) this.#input.focus();
    else this.#send(this.text);
  }

  /** Forgets the draft. */
  clear() {
    this.#input.value = '';
    this.#change();
  }

  showRunning(isRunning) {
    this.#isRunning = isRunning;
    this.#button.setAttribute('aria-label', isRunning ? 'Stop' : 'Send');
    this.#button.replaceChildren(icon(isRunning ? 'stop' : 'send'));
    this.#hint.textContent = isRunning ? 'Escape stops the answer' : this.#touch.matches ? '' : 'Enter sends, Shift+Enter is a new line';
  }

  /** Shows how many tokens of the context are used; nothing if one of the numbers is not known. */
  showContext(used, most) {
    this.#gauge.hidden = !used || !most;
    if (this.#gauge.hidden) return;
    const text = `${count(used)} of ${count(most)} tokens`;
    this.#gauge.classList.toggle('full', used >= FULL * most);
    this.#gauge.title = `This conversation uses ${text} of the model's context.`;
    this.#gauge.replaceChildren(
      h('span', { class: 'meter', 'aria-hidden': 'true' }, h('span', { style: { width: `${Math.min(100, (100 * used) / most)}%` } })), text);
  }

  #grow() {
    this.#input.style.height = 'auto';
    this.#input.style.height = `${Math.min(MAX_HEIGHT, this.#input.scrollHeight)}px`;
  }
}

// A request as code, in a dialog: curl, Python, JSON.

import { readKey } from '../api.js';
import { button, copyText, h, icon } from '../dom.js';
import { asCurl, asPython } from './request.js';

/** Shows the body of a request. `note` is a sentence above it. */
export function showRequest(body, note = '') {
  const withKey = Boolean(readKey());
  const forms = { curl: asCurl(body, withKey), Python: asPython(body, withKey), JSON: JSON.stringify(body, null, 2) };
  const text = h('pre', { class: 'mono', tabindex: '0' });
  const tabs = Object.keys(forms).map((name) => button(name, () => pick(name), { 'aria-pressed': 'false' }));
  const pick = (name) => {
    text.textContent = forms[name];
    tabs.forEach((tab) => tab.setAttribute('aria-pressed', String(tab.textContent === name)));
  };
  pick('curl');
  const close = h('button', { type: 'button', class: 'quiet', 'aria-label': 'Close', title: 'Close', onclick: () => dialog.close() }, icon('close'));
  const dialog = h('dialog', { class: 'request', 'aria-label': 'This request as code', onclose: () => dialog.remove() },
    h('div', { class: 'dialog-head' }, h('div', { class: 'tabs' }, tabs),
      button('Copy', (event) => copyText(text.textContent, event.currentTarget), { class: 'primary' }), close, note && h('p', { class: 'note wide' }, note)), text);
  document.body.append(dialog);
  dialog.showModal();
}

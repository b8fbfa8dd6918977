// The page: which view is shown, the key, light and dark.

import { address, forgetKey, getJSON, onKeyRefused, readKey, saveKey } from './api.js';
import { button, h, icon } from './dom.js';
import { Explanations } from './see/explain.js';
import { See } from './see/see.js';
import { kept } from './storage.js';
import { Talk } from './talk/chat.js';

const THEME = 'quire.theme';
const NAMES = { talk: 'Talk', see: 'See', replay: 'Replay' };

function applyTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  document.dispatchEvent(new Event('themechange'));
}

function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === 'dark' : window.matchMedia('(prefers-color-scheme: dark)').matches;
}

function themeButton() {
  const draw = () => {
    control.replaceChildren(icon(isDark() ? 'sun' : 'moon'));
    control.setAttribute('aria-label', isDark() ? 'Light colours' : 'Dark colours');
  };
  const control = h('button', { type: 'button', class: 'quiet', onclick: () => {
    const theme = isDark() ? 'light' : 'dark';
    kept.set(THEME, theme);
    applyTheme(theme);
    draw();
  } });
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
    applyTheme(kept.get(THEME));
    draw();
  });
  draw();
  return control;
}

/** Asks for the key until the server takes it. Resolves when it does. */
function askForKey(message) {
  if (document.querySelector('dialog.key[open]')) return Promise.resolve();
  return new Promise((resolve) => {
    const input = h('input', { type: 'password', id: 'key', autocomplete: 'off', required: true, spellcheck: 'false', 'aria-describedby': 'key-problem' });
    const problem = h('p', { class: 'problem', id: 'key-problem', role: 'alert' }, message || '');
    const submit = async (event) => {
      event.preventDefault();
      const key = input.value.trim();
      try {
        await getJSON('v1/models', { key });
      } catch (error) {
        problem.textContent = error.status === 401 ? 'The server does not know this key.' : error.message;
        input.setAttribute('aria-invalid', 'true');
        input.select();
        return;
      }
      saveKey(key);
      dialog.close();
      dialog.remove();
      document.dispatchEvent(new Event('keychange'));
      resolve();
    };
    const again = () => dialog.isConnected && dialog.showModal(); // a second Escape closes it without asking
    const dialog = h('dialog', { class: 'key', 'aria-labelledby': 'key-title', oncancel: (event) => event.preventDefault(), onclose: again },
      h('form', { onsubmit: submit }, h('h2', { id: 'key-title' }, 'API key'),
        h('p', {}, 'This server asks for a key. It stays in this tab until you close it.'),
        h('label', { for: 'key' }, 'Key'), input, problem, h('div', { class: 'row' }, h('button', { class: 'primary' }, 'Use this key'))));
    document.body.append(dialog);
    dialog.showModal();
  });
}

function keyButton() {
  const control = button('', () => {
    forgetKey();
    location.reload();
  }, { class: 'quiet' });
  control.append(icon('key'), h('span', {}, 'Forget key'));
  const draw = () => (control.hidden = !readKey());
  document.addEventListener('keychange', draw);
  draw();
  return control;
}

class Router {
  #views;
  #shown = null;

  constructor(views) {
    this.#views = views;
    this.links = Object.keys(views).map((name) =>
      h('a', { href: `#/${name}` }, icon(name === 'talk' ? 'talk' : 'see'), h('span', {}, NAMES[name])));
    window.addEventListener('hashchange', () => this.show());
  }

  /** Lets the link of a view lead to an address within it. */
  link(name, address) {
    this.links[Object.keys(this.#views).indexOf(name)].setAttribute('href', address);
  }

  show() {
    const names = Object.keys(this.#views);
    const [asked, rest = ''] = location.hash.replace(/^#\//, '').split('/');
    if (location.hash === '#main' && this.#shown) return;
    const name = names.includes(asked) ? asked : names[0];
    if (name === this.#shown) {
      this.#views[name].route?.(rest);
      return;
    }
    if (this.#shown) this.#views[this.#shown].hide();
    this.#shown = name;
    document.title = `${NAMES[name]} · quire`;
    this.links.forEach((link, index) => (names[index] === name ? link.setAttribute('aria-current', 'page') : link.removeAttribute('aria-current')));
    document.getElementById('main').replaceChildren(this.#views[name].element);
    this.#views[name].show(rest);
  }
}

async function start() {
  applyTheme(kept.get(THEME));
  document.querySelector('.top-tools').append(keyButton(), themeButton());
  let mode = await getJSON('page/mode.json');
  onKeyRefused(askForKey);
  if (mode.keys && !mode.model) {
    await askForKey(readKey() && 'The server does not know the key of this tab any more.');
    mode = await getJSON('page/mode.json');
  }
  if (!mode.model) mode.model = (await getJSON('v1/models')).data[0].id;
  document.getElementById('served').textContent = `${mode.model} · ${mode.version}`;
  const explanations = new Explanations();
  document.body.append(explanations.element);
  const see = new See(mode, explanations);
  const talk = mode.mode === 'live' && new Talk(mode, (id) => explanations.show(id));
  const router = new Router(mode.mode === 'live' ? { talk, see } : { replay: see });
  document.querySelector('nav.views').append(...router.links);
  if (talk) {
    talk.onAddress = () => router.link('talk', talk.address);
    document.querySelector('.top-tools').prepend(h('a', { href: address('docs') }, 'API'));
  }
  router.show();
}

start().catch((error) => {
  document.getElementById('main').replaceChildren(h('p', { class: 'error page-error', role: 'alert' }, `The page could not start. ${error.message}`));
});

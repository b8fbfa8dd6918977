// Talk: one conversation with the model, its branches, the composer.

import { getJSON, readKey } from '../api.js';
import { button, copyText, h, icon } from '../dom.js';
import { requestAnswer } from './answer.js';
import { BranchMap } from './branches.js';
import { Conversation, keepConversation } from './conversations.js';
import { History } from './history.js';
import { MessageView } from './message.js';
import { asCurl, asPython, requestBody } from './request.js';
import { Settings, settingsFields } from './settings.js';

const DEMO_PROMPTS = ['How much is the lantern?', 'Sum: 6 6 24 /think', 'Write a story with Zoe and the shovel.', 'Sort: carpet hammer deer'];
const PROMPTS = ['Explain what a KV cache is, in three sentences.', 'Write a haiku about paper.', 'List five uses of a brick as a table.'];
const ANNOUNCE_MS = 1500;
const MAX_ANSWERS = 200; // of which the tokens are known

export class Talk {
  #mode;
  #explain;
  #settings = new Settings();
  #conversation = new Conversation();
  #answers = new Map(); // node id -> Answer, for the tokens of this page's lifetime
  #views = new Map();
  #running = null; // {abort, node}
  #model = h('select', { id: 'model', 'aria-label': 'Model' });
  #title = h('p', { class: 'chat-title' });
  #log = h('div', { class: 'log', role: 'region', 'aria-label': 'Conversation', tabindex: '0' });
  #spoken = h('div', { class: 'offscreen', 'aria-live': 'polite' });
  #input = h('textarea', { id: 'composer', rows: 1, placeholder: 'Message', 'aria-label': 'Message' });
  #send = h('button', { class: 'primary round', 'aria-label': 'Send' }, icon('send'));
  #side = h('aside', { class: 'settings', id: 'settings', 'aria-label': 'Settings' });

  /** `explain(id)` shows the explanation of a request. */
  constructor(mode, explain) {
    this.#mode = mode;
    this.#explain = explain;
    this.history = new History((conversation) => this.#open(conversation || this.#fresh()));
    this.branches = new BranchMap((node) => this.#choose(node));
    this.#model.append(h('option', { value: mode.model }, mode.model));
    this.element = h('div', { class: 'talk' }, this.#historySide(), this.#main(), this.#side);
    this.#drawSettings();
    this.#open(this.#conversation);
  }

  show() {
    this.#loadModels();
    if (window.matchMedia('(min-width: 700px)').matches) this.#input.focus();
  }

  hide() {}

  #historySide() {
    return h('aside', { class: 'side', id: 'conversations', 'aria-label': 'History' },
      h('div', { class: 'side-head' },
        h('button', { type: 'button', class: 'wide', onclick: () => this.#open(this.#fresh()) }, icon('plus'), 'New conversation'), this.#closer('show-history')),
      this.history.element, this.branches.element, this.history.foot);
  }

  #closer(name) {
    return h('button', { type: 'button', class: 'quiet closer', 'aria-label': 'Close', onclick: () => this.element.classList.remove(name) }, icon('close'));
  }

  #main() {
    const toggle = (name, label, image, controls) => h('button', {
      type: 'button', class: 'quiet', 'aria-label': label, title: label, 'aria-controls': controls,
      onclick: () => this.element.classList.toggle(name),
    }, icon(image));
    this.#input.addEventListener('input', () => this.#grow());
    this.#input.addEventListener('keydown', (event) => {
      if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#submit();
    });
    const composer = h('form', { class: 'composer', onsubmit: (event) => {
      event.preventDefault();
      this.#submit();
    } }, this.#input, h('div', { class: 'composer-row' },
      h('span', { class: 'note hint' }, 'Enter sends, Shift+Enter is a new line'),
      button('As code', () => this.#showRequest(this.#bodyAfter(this.#pathWithDraft())), { class: 'quiet' }), this.#send));
    return h('section', { class: 'chat', 'aria-label': 'Talk' },
      h('div', { class: 'chat-head' }, toggle('show-history', 'Conversations', 'list', 'conversations'), this.#title,
        this.#model, toggle('show-settings', 'Settings', 'sliders', 'settings')),
      this.#log, this.#spoken, composer);
  }

  async #loadModels() {
    if (this.#model.dataset.loaded) return;
    try {
      const { data } = await getJSON('v1/models');
      const chosen = this.#model.value;
      this.#model.replaceChildren(...data.map(({ id }) => h('option', { value: id, selected: id === chosen }, id)));
      this.#model.dataset.loaded = 'yes';
    } catch {
      // the name of mode.json stays
    }
  }

  #drawSettings() {
    const redraw = () => {
      this.#settings.reset();
      this.#drawSettings();
    };
    this.#side.replaceChildren(h('div', { class: 'side-head' }, h('h2', {}, 'Settings'), this.#closer('show-settings')),
      h('div', { class: 'settings-body' }, settingsFields(this.#settings, {
        system: this.#conversation.system,
        onSystem: (text) => {
          this.#conversation.system = text;
          if (this.#conversation.nodes.size) this.#keep();
        },
        onReset: redraw,
      })));
  }

  #fresh() {
    const conversation = new Conversation();
    conversation.system = this.#conversation.system;
    return conversation;
  }

  #open(conversation) {
    this.#stop();
    this.#conversation = conversation;
    this.#drawSettings();
    this.#draw();
    this.history.show(conversation);
    this.element.classList.remove('show-history');
  }

  #keep() {
    this.history.note(keepConversation(this.#conversation));
    this.history.show(this.#conversation);
  }

  #say(text) {
    this.#spoken.append(h('p', {}, text));
    while (this.#spoken.childElementCount > 20) this.#spoken.firstChild.remove();
  }

  // --- the branch that is shown

  #draw() {
    const path = this.#conversation.path();
    this.#title.textContent = this.#conversation.title || 'New conversation';
    this.#views.clear();
    this.#log.replaceChildren(h('div', { class: 'column' }, path.length ? path.map((node) => this.#viewOf(node)) : this.#welcome()));
    path.forEach((node, index) => this.#finishView(node, index === path.length - 1));
    this.branches.show(this.#conversation);
    this.#log.scrollTop = this.#log.scrollHeight;
  }

  #viewOf(node) {
    const view = new MessageView(node, this.#actions());
    this.#views.set(node.id, view);
    return view.element;
  }

  #finishView(node, isLast) {
    const awaitsResults = isLast && node.role === 'assistant' && node.tool_calls?.length > 0;
    this.#views.get(node.id)?.finish({ error: node.error, answer: this.#answers.get(node.id), awaitsResults, siblings: this.#conversation.siblings(node) });
  }

  #welcome() {
    const prompts = this.#mode.model.startsWith('quire-demo') ? DEMO_PROMPTS : PROMPTS;
    const use = (text) => {
      this.#input.value = text;
      this.#submit();
    };
    return h('div', { class: 'welcome' }, h('h2', {}, `Talk to ${this.#mode.model}`),
      h('p', { class: 'note' }, this.#mode.model.startsWith('quire-demo')
        ? 'The embedded model is small: it knows the lending shop of Fernhill, and tasks like these.'
        : 'Each answer shows how many tokens of its prompt were already in memory.'),
      h('div', { class: 'prompts' }, prompts.map((text) => button(text, () => use(text)))));
  }

  #actions() {
    return {
      nameOf: (node) => ({ user: 'You', assistant: this.#model.value || this.#mode.model, tool: 'Tool' })[node.role] || node.role,
      choose: (node) => this.#choose(node),
      regenerate: (node) => this.#generate(node.parent),
      edit: (node, text) => this.#edit(node, text),
      sendResults: (node, results) => this.#sendResults(node, results),
      showRequest: (node) => this.#showRequest(this.#bodyAfter(this.#conversation.pathTo(node.parent))),
      explain: (id) => this.#explain(id),
    };
  }

  #choose(node) {
    this.#stop();
    for (const one of this.#conversation.pathTo(node.id)) this.#conversation.choose(one);
    this.#keep();
    this.#draw();
    this.#views.get(node.id).element.scrollIntoView({ block: 'nearest' });
  }

  #edit(node, text) {
    this.#stop();
    const { id, parent, figures, finish, request, ...kept } = node;
    const added = this.#conversation.add(parent, { ...kept, content: text });
    this.#keep();
    if (node.role === 'user') this.#generate(added.id);
    else this.#draw();
  }

  #sendResults(node, results) {
    let parent = node.id;
    node.tool_calls.forEach((call, index) => {
      parent = this.#conversation.add(parent, { role: 'tool', tool_call_id: call.id, content: results[index] }).id;
    });
    this.#generate(parent);
  }

  // --- requests

  #bodyAfter(path) {
    return requestBody({ model: this.#model.value || this.#mode.model, system: this.#conversation.system, path, settings: this.#settings });
  }

  #pathWithDraft() {
    const draft = this.#input.value.trim();
    return [...this.#conversation.path(), ...(draft ? [{ role: 'user', content: draft }] : [])];
  }

  #submit() {
    if (this.#running) return this.#stop();
    const text = this.#input.value.trim();
    if (!text) return this.#input.focus();
    const problem = this.#settings.problem();
    if (problem) {
      this.element.classList.add('show-settings');
      return this.#say(problem);
    }
    this.#input.value = '';
    this.#grow();
    const last = this.#conversation.path().at(-1);
    const node = this.#conversation.add(last?.id || '', { role: 'user', content: text });
    return this.#generate(node.id);
  }

  #stop() {
    this.#running?.abort.abort();
  }

  async #generate(parent) {
    this.#stop();
    const conversation = this.#conversation;
    const body = this.#bodyAfter(conversation.pathTo(parent));
    const node = conversation.add(parent, { role: 'assistant', content: '', reasoning: '' });
    const running = { abort: new AbortController() };
    this.#running = running;
    this.#draw();
    this.#showRunning(true);
    const view = this.#views.get(node.id);
    view.element.classList.add('growing');
    const draw = this.#drawWhileGrowing(view);
    const answer = await requestAnswer(body, running.abort.signal, (grown) => draw(node, grown));
    Object.assign(node, answer.message(), answer.error ? { error: answer.error } : {});
    draw.end();
    this.#answers.set(node.id, answer);
    if (this.#answers.size > MAX_ANSWERS) this.#answers.delete(this.#answers.keys().next().value);
    if (this.#running === running) {
      this.#running = null;
      this.#showRunning(false);
    }
    this.#afterAnswer(conversation, node);
  }

  #afterAnswer(conversation, node) {
    const empty = !node.content && !node.reasoning && !node.tool_calls.length;
    if (empty && node.finish === 'stopped') conversation.remove(node.id);
    if (conversation !== this.#conversation) {
      if (conversation.nodes.size) keepConversation(conversation);
      return;
    }
    this.#keep();
    if (empty && node.finish === 'stopped') {
      if (!this.#running) this.#draw();
      return;
    }
    const view = this.#views.get(node.id); // none if another branch is shown by now
    if (!view) return;
    view.element.classList.remove('growing');
    view.update(node);
    this.#finishView(node, true);
    this.branches.show(conversation);
    this.#follow();
  }

  /** A function that draws at most once a frame, and less often where text takes long to draw. */
  #drawWhileGrowing(view) {
    let waiting = 0;
    let latest = null;
    let spokenUntil = 0;
    let spokenAt = performance.now();
    const paint = () => {
      waiting = 0;
      const begin = performance.now();
      view.update(latest);
      this.#follow();
      if (begin - spokenAt > ANNOUNCE_MS && latest.content.length > spokenUntil) {
        this.#say(latest.content.slice(spokenUntil));
        [spokenUntil, spokenAt] = [latest.content.length, begin];
      }
      const cost = performance.now() - begin;
      if (cost > 8) waiting = setTimeout(paint, cost * 5);
    };
    const draw = (node, answer) => {
      latest = Object.assign(node, { content: answer.content, reasoning: answer.reasoning });
      waiting ||= requestAnimationFrame(paint);
    };
    draw.end = () => {
      cancelAnimationFrame(waiting);
      clearTimeout(waiting);
      if (latest) this.#say(latest.content.slice(spokenUntil));
    };
    return draw;
  }

  #follow() {
    const { scrollHeight, scrollTop, clientHeight } = this.#log;
    if (scrollHeight - scrollTop - clientHeight < 160) this.#log.scrollTop = scrollHeight;
  }

  #showRunning(isRunning) {
    this.#send.setAttribute('aria-label', isRunning ? 'Stop' : 'Send');
    this.#send.replaceChildren(icon(isRunning ? 'stop' : 'send'));
  }

  #grow() {
    this.#input.style.height = 'auto';
    this.#input.style.height = `${Math.min(240, this.#input.scrollHeight)}px`;
  }

  #showRequest(body) {
    const withKey = Boolean(readKey());
    const forms = { curl: asCurl(body, withKey), Python: asPython(body, withKey), JSON: JSON.stringify(body, null, 2) };
    const text = h('pre', { class: 'mono', tabindex: '0' });
    const tabs = Object.keys(forms).map((name) => button(name, () => pick(name), { 'aria-pressed': 'false' }));
    const pick = (name) => {
      text.textContent = forms[name];
      tabs.forEach((tab) => tab.setAttribute('aria-pressed', String(tab.textContent === name)));
    };
    pick('curl');
    const dialog = h('dialog', { class: 'request', 'aria-label': 'This request as code', onclose: () => dialog.remove() },
      h('div', { class: 'dialog-head' }, h('div', { class: 'tabs' }, tabs), button('Copy', (event) => copyText(text.textContent, event.currentTarget), { class: 'primary' }),
        button('Close', () => dialog.close())), text);
    document.body.append(dialog);
    dialog.showModal();
  }
}

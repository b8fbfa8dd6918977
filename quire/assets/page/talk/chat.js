// Talk: one conversation with the model, its branches, the composer.

import { getJSON, readKey } from '../api.js';
import { button, copyText, h, icon } from '../dom.js';
import { requestAnswer } from './answer.js';
import { BranchMap } from './branches.js';
import { Conversation, keepConversation, loadConversation, watchConversations } from './conversations.js';
import { History } from './history.js';
import { MessageView } from './message.js';
import { asCurl, asPython, requestBody } from './request.js';
import { Settings, settingsFields } from './settings.js';

const DEMO_PROMPTS = ['How much is the lantern?', 'Sum: 6 6 24 /think', 'Write a story with Zoe and the shovel.', 'Sort: carpet hammer deer'];
const PROMPTS = ['Explain what a KV cache is, in three sentences.', 'Write a haiku about paper.', 'List five uses of a brick as a table.'];
const ANNOUNCE_MS = 1500;
const MAX_TOKENS = 100_000; // that are known with their probabilities

export class Talk {
  #mode;
  #explain;
  #settings = new Settings();
  #conversation = new Conversation();
  #answers = new Map(); // node id -> Answer, for the tokens and requests of this page's lifetime
  #views = new Map();
  #toggles = {}; // of the sides that lie over the conversation on small screens, by the class that shows them
  #running = null; // {abort, conversation}
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
    this.history = new History((id) => this.#openKept(id));
    this.branches = new BranchMap((node) => this.#choose(node));
    this.#model.append(h('option', { value: mode.model }, mode.model));
    this.element = h('div', { class: 'talk', onkeydown: (event) => event.key === 'Escape' && this.#closePanels() }, this.#historySide(), this.#main(), this.#side);
    this.#drawSettings();
    this.#open(this.#conversation);
    watchConversations(() => this.#mergeKept());
  }

  show() {
    this.#loadModels();
    if (window.matchMedia('(min-width: 700px)').matches) this.#input.focus();
  }

  hide() {}

  #historySide() {
    return h('aside', { class: 'side', id: 'conversations', 'aria-label': 'History' },
      h('div', { class: 'side-head' },
        h('button', { type: 'button', class: 'wide', onclick: () => this.#open(this.#fresh()) }, icon('plus'), 'New conversation'), this.#closer()),
      this.history.element, this.branches.element, this.history.foot);
  }

  #panel(name, isOpen) {
    this.element.classList.toggle(name, isOpen);
    this.#toggles[name].setAttribute('aria-expanded', String(isOpen));
  }

  #closePanels() {
    for (const [name, toggle] of Object.entries(this.#toggles)) {
      if (this.element.classList.contains(name)) toggle.focus();
      this.#panel(name, false);
    }
  }

  #closer() {
    return h('button', { type: 'button', class: 'quiet closer', 'aria-label': 'Close', onclick: () => this.#closePanels() }, icon('close'));
  }

  #main() {
    const toggle = (name, label, image, controls) => (this.#toggles[name] = h('button', {
      type: 'button', class: 'quiet', 'aria-label': label, title: label, 'aria-controls': controls, 'aria-expanded': 'false',
      onclick: () => this.#panel(name, !this.element.classList.contains(name)),
    }, icon(image)));
    this.#input.addEventListener('input', () => this.#grow());
    this.#input.addEventListener('keydown', (event) => {
      const composes = event.isComposing || event.keyCode === 229; // an input method takes the key, also where isComposing is late
      if (event.key !== 'Enter' || event.shiftKey || composes) return;
      event.preventDefault();
      if (!this.#running) this.#submit();
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
    this.#side.replaceChildren(h('div', { class: 'side-head' }, h('h2', {}, 'Settings'), this.#closer()),
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
    this.#panel('show-history', false);
  }

  #openKept(id) {
    if (id === this.#conversation.id) return this.#panel('show-history', false);
    const running = this.#running?.conversation;
    const conversation = running?.id === id ? running : id && loadConversation(id);
    return this.#open(conversation || this.#fresh());
  }

  #keep() {
    this.history.note(keepConversation(this.#conversation));
    this.history.show(this.#conversation);
  }

  /** Takes what another tab has added. What is shown stays, because a person may be reading or editing it. */
  #mergeKept() {
    const kept = loadConversation(this.#conversation.id);
    if (kept) this.#conversation.merge(kept);
    this.branches.show(this.#conversation);
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
      regenerate: (node) => this.#isBlocked() || this.#generate(node.parent),
      edit: (node, text) => this.#edit(node, text),
      sendResults: (node, results) => this.#sendResults(node, results),
      showRequest: (node) => this.#showRequestOf(node),
      explain: (id) => this.#explain(id),
    };
  }

  #choose(node) {
    const focused = document.activeElement?.closest('.switch') && document.activeElement.getAttribute('aria-label');
    this.#stop();
    for (const one of this.#conversation.pathTo(node.id)) this.#conversation.choose(one);
    this.#keep();
    this.#draw();
    const view = this.#views.get(node.id);
    view.element.scrollIntoView({ block: 'nearest' });
    if (focused) view.focusSwitch(focused);
  }

  #edit(node, text) {
    if (node.role === 'user' && this.#isBlocked()) return;
    this.#stop();
    const { id, parent, figures, finish, request, error, ...kept } = node;
    const added = this.#conversation.add(parent, { ...kept, content: text });
    this.#keep();
    if (node.role === 'user') this.#generate(added.id);
    else this.#draw();
  }

  #sendResults(node, results) {
    if (this.#isBlocked()) return;
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

  /** Whether the settings make no request; then it shows them. */
  #isBlocked() {
    const problem = this.#settings.problem();
    if (!problem) return false;
    this.#panel('show-settings', true);
    this.#say(problem);
    return true;
  }

  #submit() {
    if (this.#running) return this.#stop();
    const text = this.#input.value.trim();
    if (!text) return this.#input.focus();
    if (this.#isBlocked()) return undefined;
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
    this.#keep();
    const node = conversation.add(parent, { role: 'assistant', content: '', reasoning: '' });
    const running = { abort: new AbortController(), conversation };
    this.#running = running;
    this.#draw();
    this.#showRunning(true);
    const view = this.#views.get(node.id);
    view.element.classList.add('growing');
    const draw = this.#drawWhileGrowing(view);
    const answer = await requestAnswer(body, running.abort.signal, (grown) => draw(node, grown));
    Object.assign(node, answer.message(), answer.error ? { error: answer.error } : {});
    draw.end();
    this.#remember(node, answer, body);
    if (this.#running === running) {
      this.#running = null;
      this.#showRunning(false);
    }
    this.#afterAnswer(conversation, node);
  }

  #remember(node, answer, body) {
    this.#answers.set(node.id, Object.assign(answer, { body }));
    let tokens = 0;
    for (const [id, one] of [...this.#answers].reverse()) {
      tokens += 1 + one.tokens.length;
      if (tokens > MAX_TOKENS) this.#answers.delete(id);
    }
  }

  #afterAnswer(conversation, node) {
    const empty = !node.content && !node.reasoning && !node.tool_calls.length;
    if (empty && node.finish === 'stopped') conversation.remove(node.id);
    if (conversation !== this.#conversation) {
      keepConversation(conversation);
      this.history.show(this.#conversation);
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
    let frame = 0;
    let timer = 0;
    let latest = null;
    let spokenUntil = 0;
    let spokenAt = performance.now();
    const paint = () => {
      frame = timer = 0;
      const begin = performance.now();
      view.update(latest);
      this.#follow();
      if (begin - spokenAt > ANNOUNCE_MS && latest.content.length > spokenUntil) {
        this.#say(latest.content.slice(spokenUntil));
        [spokenUntil, spokenAt] = [latest.content.length, begin];
      }
      const cost = performance.now() - begin;
      if (cost > 8) timer = setTimeout(paint, cost * 5);
    };
    const draw = (node, answer) => {
      latest = Object.assign(node, { content: answer.content, reasoning: answer.reasoning });
      if (!timer) frame ||= requestAnimationFrame(paint);
    };
    draw.end = () => {
      cancelAnimationFrame(frame);
      clearTimeout(timer);
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

  #showRequestOf(node) {
    const sent = this.#answers.get(node.id)?.body;
    if (sent) this.#showRequest(sent);
    else this.#showRequest(this.#bodyAfter(this.#conversation.pathTo(node.parent)), 'With the present settings; those of the answer are not kept.');
  }

  #showRequest(body, note = '') {
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
        button('Close', () => dialog.close())), note && h('p', { class: 'note' }, note), text);
    document.body.append(dialog);
    dialog.showModal();
  }
}

// Talk: the conversation that is shown, its branches, its requests.

import { getJSON } from '../api.js';
import { button, count, h, icon } from '../dom.js';
import { kept } from '../storage.js';
import { BranchMap } from './branches.js';
import { Composer } from './composer.js';
import { Conversation, keepConversation, listConversations, loadConversation, watchConversations } from './conversations.js';
import { History } from './history.js';
import { Log } from './log.js';
import { MessageView } from './message.js';
import { requestBody } from './request.js';
import { showRequest } from './request_dialog.js';
import { Runs } from './runs.js';
import { Settings, settingsFields } from './settings.js';

const DEMO_PROMPTS = ['How much is the lantern?', 'Sum: 6 6 24 /think', 'Write a story with Zoe and the shovel.', 'Sort: carpet hammer deer'];
const PROMPTS = ['Explain what a KV cache is, in three sentences.', 'Write a haiku about paper.', 'List five uses of a brick as a table.'];
const BESIDE = '(min-width: 700px)'; // where the conversations lie beside the one that is shown
const HIDDEN = 'quire.settings.hidden'; // set if the person has hidden the settings on a wide screen

export class Talk {
  #mode;
  #explain;
  #isShown = false;
  #settings = new Settings();
  #conversation = new Conversation();
  #runs = new Runs({
    onGrow: (run) => this.#painters.get(run.node.id)?.draw(),
    onKept: (note) => this.#noteKeeping(note),
    onEnd: (run, note) => this.#afterAnswer(run, note),
  });
  #views = new Map(); // message id -> MessageView of the branch that is shown
  #painters = new Map(); // message id -> painter of an answer that is shown while it arrives
  #toggles = {}; // of the two sides, by the class that shows them where they lie over the conversation
  #wide = window.matchMedia('(min-width: 1180px)'); // where the settings lie beside the conversation
  #contexts = new Map(); // model -> its longest context
  #model = h('select', { id: 'model', 'aria-label': 'Model', hidden: true, onchange: () => this.#showState() });
  #title = h('p', { class: 'chat-title' });
  #log = new Log();
  #side = h('aside', { class: 'settings', id: 'settings', 'aria-label': 'Settings' });
  #composer = new Composer({
    send: (text) => this.#submit(text),
    stop: () => this.#stop(),
    showCode: () => showRequest(this.#bodyAfter(this.#pathWithDraft())),
  });

  onAddress = () => {}; // called when `address`, the fragment of the shown conversation, has changed

  /** `explain(id)` shows the explanation of a request. */
  constructor(mode, explain) {
    this.#mode = mode;
    this.#explain = explain;
    this.history = new History({
      open: (id) => this.#openKept(id),
      reopen: (conversation) => this.#goTo(conversation),
      find: (id) => this.#find(id),
      all: () => this.#all(),
      isRunning: (id) => this.#runs.of(id).length > 0,
      renamed: (conversation) => conversation === this.#conversation && this.#showTitle(),
      deleted: (ids) => this.#afterDelete(ids),
    });
    this.branches = new BranchMap((node) => this.#choose(node));
    this.#model.append(h('option', { value: mode.model }, mode.model));
    this.element = h('div', { class: kept.get(HIDDEN) ? 'talk hide-settings' : 'talk' }, this.#historySide(), this.#main(), this.#side);
    this.#wide.addEventListener('change', () => this.#drawToggles());
    document.addEventListener('keydown', (event) => this.#key(event));
    this.#drawToggles();
    this.#open(this.#conversation);
    watchConversations({
      changed: () => this.#mergeKept(),
      gone: (ids) => this.#afterDeleteElsewhere(ids),
      isRunning: (id) => this.#runs.of(id).length > 0,
    });
  }

  get address() {
    return this.#conversation.nodes.size ? `#/talk/${this.#conversation.id}` : '#/talk';
  }

  show(id) {
    this.#isShown = true;
    this.#loadModels();
    this.route(id);
    this.#focusComposer();
  }

  hide() {
    this.#isShown = false;
  }

  /** Shows the conversation that the address names, or a new one for ''. */
  route(id) {
    if (this.address === (id ? `#/talk/${id}` : '#/talk')) return;
    const found = id ? this.#find(id) : null;
    if (id && !found) this.history.note('This browser does not keep that conversation.');
    this.#open(found || this.#fresh());
    if (id && !found) this.#showAddress({ replaces: true });
  }

  #historySide() {
    return h('aside', { class: 'side', id: 'conversations', 'aria-label': 'History' },
      h('div', { class: 'side-head' },
        h('button', { type: 'button', class: 'wide', title: 'Ctrl+Shift+O', onclick: () => this.#openKept(null) }, icon('plus'), 'New conversation'), this.#closer()),
      this.history.search, this.history.element, this.branches.element, this.history.foot);
  }

  #main() {
    const toggle = (name, label, image, controls) => (this.#toggles[name] = h('button', {
      type: 'button', class: 'quiet', 'aria-label': label, title: label, 'aria-controls': controls,
      onclick: () => this.#panel(name, !this.#isOpen(name)),
    }, icon(image)));
    return h('section', { class: 'chat', 'aria-label': 'Talk' },
      h('div', { class: 'chat-head' }, toggle('show-history', 'Conversations', 'list', 'conversations'), this.#title,
        this.#model, toggle('show-settings', 'Settings', 'sliders', 'settings')),
      this.#log.element, this.#composer.element);
  }

  // --- panels, keys, focus

  #isOpen(name) {
    const { classList } = this.element;
    return name === 'show-settings' && this.#wide.matches ? !classList.contains('hide-settings') : classList.contains(name);
  }

  #panel(name, isOpen) {
    if (name === 'show-settings' && this.#wide.matches) {
      this.element.classList.toggle('hide-settings', !isOpen);
      if (isOpen) kept.remove(HIDDEN);
      else kept.set(HIDDEN, 'yes');
    } else {
      this.element.classList.toggle(name, isOpen);
    }
    this.#drawToggles();
  }

  #drawToggles() {
    for (const [name, toggle] of Object.entries(this.#toggles)) toggle.setAttribute('aria-expanded', String(this.#isOpen(name)));
  }

  /** Closes what lies over the conversation. Returns whether anything did. */
  #closePanels() {
    const open = Object.keys(this.#toggles).filter((name) => this.element.classList.contains(name));
    for (const name of open) {
      this.element.classList.remove(name);
      this.#toggles[name].focus();
    }
    this.#drawToggles();
    return open.length > 0;
  }

  #closer() {
    const close = () => {
      if (this.#closePanels()) return;
      this.#panel('show-settings', false);
      this.#toggles['show-settings'].focus();
    };
    return h('button', { type: 'button', class: 'quiet closer', 'aria-label': 'Close', title: 'Close', onclick: close }, icon('close'));
  }

  #key(event) {
    if (!this.#isShown || event.defaultPrevented || event.isComposing || document.querySelector('dialog[open]')) return;
    if (event.key === 'Escape' && !this.#closePanels()) this.#stop();
    if (!(event.ctrlKey || event.metaKey) || event.altKey) return;
    const key = event.shiftKey ? `shift ${event.key.toLowerCase()}` : event.key.toLowerCase();
    const act = {
      k: () => {
        if (!window.matchMedia(BESIDE).matches) this.#panel('show-history', true);
        this.history.focusSearch();
      },
      'shift o': () => this.#openKept(null),
    }[key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  #focusComposer() {
    if (window.matchMedia(BESIDE).matches) this.#composer.focus();
  }

  // --- models and settings

  async #loadModels() {
    if (this.#contexts.size) return;
    try {
      const [{ data }, { preferred_sampling_params: defaults }] = await Promise.all([getJSON('v1/models'), getJSON('get_model_info')]);
      this.#settings.modelDefaults = defaults || {};
      if (!this.#side.contains(document.activeElement)) this.#drawSettings();
      const chosen = this.#model.value;
      this.#model.replaceChildren(...data.map(({ id }) => h('option', { value: id, selected: id === chosen }, id)));
      this.#model.hidden = data.length < 2;
      this.#contexts = new Map(data.map((model) => [model.id, model.max_model_len]));
      this.#showState();
    } catch {
      // the name of mode.json stays
    }
  }

  #drawSettings() {
    this.#side.replaceChildren(h('div', { class: 'side-head' }, h('h2', {}, 'Settings'), this.#closer()),
      h('div', { class: 'settings-body' }, settingsFields(this.#settings, {
        system: this.#conversation.system,
        onSystem: (text) => {
          this.#conversation.setSystem(text);
          if (this.#conversation.nodes.size) this.#keep();
        },
        onReset: () => {
          this.#settings.reset();
          this.#drawSettings();
        },
      })));
  }

  // --- conversations

  #fresh() {
    const { system, systemAt, imported } = this.#conversation;
    return new Conversation(imported ? null : { system, systemAt });
  }

  /** The conversation with an id: the one that is shown, one with an answer that arrives, or the kept one; or null. */
  #find(id) {
    return this.#live().find((one) => one.id === id) || loadConversation(id);
  }

  /** The conversations that the page has more of than what is kept: the one that is shown, and those with an answer that arrives. */
  #live() {
    return [...new Set([this.#conversation, ...this.#runs.conversations()])];
  }

  /** All conversations, also one that is too long to be kept. */
  #all() {
    const live = this.#live().filter((one) => one.nodes.size);
    const others = listConversations().filter((saved) => {
      const here = live.find((one) => one.id === saved.id);
      here?.merge(saved);
      return !here;
    });
    return [...live, ...others];
  }

  #open(conversation) {
    this.#conversation = conversation;
    this.#composer.open(conversation.nodes.size ? conversation.id : '');
    this.#drawSettings();
    this.#draw();
    this.history.show(conversation);
    this.onAddress();
  }

  #openKept(id) {
    this.#goTo((id && this.#find(id)) || this.#fresh());
  }

  #goTo(conversation) {
    this.#open(conversation);
    this.#panel('show-history', false);
    this.#showAddress();
    this.#focusComposer();
  }

  /** Shows the address of the conversation: as a new entry of the browser's history, or in place of the present one. */
  #showAddress({ replaces = false } = {}) {
    if (this.#isShown && location.hash !== this.address) {
      if (replaces) window.history.replaceState(null, '', this.address);
      else location.hash = this.address;
    }
    this.onAddress();
  }

  #keep() {
    this.history.note(keepConversation(this.#conversation)); // which takes what another tab has changed
    this.#showTitle();
    this.#showSystem();
    this.history.show(this.#conversation);
    this.#showAddress({ replaces: true });
  }

  /** Shows what a person should know of the keeping of an answer; what they did not ask for takes no other note away. */
  #noteKeeping(note) {
    if (note) this.history.note(note);
  }

  #afterDelete(ids) {
    for (const run of ids.flatMap((id) => this.#runs.of(id))) this.#runs.stop(run);
    if (!ids.includes(this.#conversation.id)) return this.history.show(this.#conversation);
    this.#open(this.#fresh());
    return this.#showAddress({ replaces: true });
  }

  #afterDeleteElsewhere(ids) {
    if (ids.includes(this.#conversation.id)) this.history.note('Another tab has deleted this conversation.');
    this.#afterDelete(ids);
  }

  /**
   * Takes what another tab has added. Messages below the last shown one are added, and answers that arrive in the other tab grow. All else
   * that is shown stays, because a person may be reading or editing it.
   */
  #mergeKept() {
    const arriving = this.#conversation.path().filter((node) => node.partial && !this.#runs.get(node.id));
    const saved = loadConversation(this.#conversation.id);
    if (saved) this.#conversation.merge(saved);
    for (const node of arriving) {
      this.#views.get(node.id)?.update(node);
      if (!node.partial) this.#finishView(node, true);
    }
    this.#showFollowing();
    this.#showTitle();
    this.#showSystem();
    this.#showState();
    this.#log.follow();
    this.branches.show(this.#conversation);
    this.history.show(this.#conversation);
  }

  /** Shows messages that another tab has added below the last shown one. */
  #showFollowing() {
    const [path, shown] = [this.#conversation.path(), this.#views.size];
    if (!shown || path.length <= shown || [...this.#views.keys()].some((id, index) => path[index].id !== id)) return;
    this.#log.append(path.slice(shown).map((node) => this.#viewOf(node)));
    path.slice(shown - 1).forEach((node) => this.#finishView(node, node === path.at(-1)));
  }

  // --- the branch that is shown

  #draw() {
    const path = this.#conversation.path();
    this.#showTitle();
    this.#views.clear();
    for (const painter of this.#painters.values()) painter.cancel();
    this.#painters.clear();
    this.#log.show(path.length ? path.map((node) => this.#viewOf(node)) : this.#welcome());
    path.forEach((node, index) => this.#finishView(node, index === path.length - 1));
    this.branches.show(this.#conversation);
    this.#showState();
    this.#log.toEnd();
  }

  #showTitle() {
    this.#title.textContent = this.#title.title = this.#conversation.title || 'New conversation';
  }

  #showSystem() {
    const field = this.#side.querySelector('#set-system');
    if (field.value !== this.#conversation.system) field.value = this.#conversation.system;
  }

  #viewOf(node) {
    const view = new MessageView(node, this.#actions());
    this.#views.set(node.id, view);
    const run = this.#runs.get(node.id);
    if (run) {
      this.#painters.set(node.id, this.#log.painter(view, run));
      view.grow(node, run.answer);
    }
    return view.element;
  }

  #finishView(node, isLast) {
    const siblings = this.#conversation.siblings(node);
    if (this.#runs.get(node.id)) return this.#views.get(node.id).showSwitch(siblings);
    const awaitsResults = isLast && node.role === 'assistant' && node.tool_calls?.length > 0;
    const awaitsAnswer = isLast && node.role !== 'assistant';
    return this.#views.get(node.id)?.finish({ answer: this.#runs.answerOf(node.id), awaitsResults, awaitsAnswer, siblings });
  }

  /** Shows whether an answer of the shown branch arrives, and how much of the context the branch uses. */
  #showState() {
    const path = this.#conversation.path();
    this.#composer.showRunning(path.some((node) => this.#runs.get(node.id)));
    const { figures } = path.findLast((node) => node.figures?.prompt) || {};
    this.#composer.showContext(figures && figures.prompt + figures.tokens, this.#contexts.get(this.#model.value));
  }

  #welcome() {
    const isDemo = this.#mode.model.startsWith('quire-demo');
    return h('div', { class: 'welcome' }, h('h2', {}, `Talk to ${this.#mode.model}`),
      h('p', { class: 'note' }, isDemo
        ? 'The embedded model is small: it knows the lending shop of Fernhill, and tasks like these.'
        : 'Each answer shows how many tokens of its prompt were already in memory.'),
      h('div', { class: 'prompts' }, (isDemo ? DEMO_PROMPTS : PROMPTS).map((text) => button(text, () => this.#submit(text)))));
  }

  #actions() {
    return {
      nameOf: (node) => ({ user: 'You', assistant: this.#model.value || this.#mode.model, tool: 'Tool' })[node.role] || node.role,
      choose: (node) => this.#choose(node),
      regenerate: (node) => this.#isBlocked() || this.#generate(node.parent),
      answer: (node) => this.#isBlocked() || this.#generate(node.id),
      edit: (node, text) => this.#edit(node, text),
      sendResults: (node, results) => this.#sendResults(node, results),
      showRequest: (node) => this.#showRequestOf(node),
      explain: (id) => this.#explain(id),
    };
  }

  #choose(node) {
    const focused = document.activeElement?.closest('.switch') && document.activeElement.getAttribute('aria-label');
    for (const one of this.#conversation.pathTo(node.id)) this.#conversation.choose(one);
    this.#keep();
    this.#draw();
    const view = this.#views.get(node.id);
    view.element.scrollIntoView({ block: 'nearest' });
    if (focused) view.focusSwitch(focused);
  }

  #edit(node, text) {
    if (node.role === 'user' && this.#isBlocked()) return;
    const { id, parent, figures, finish, request, error, partial, ...same } = node;
    const added = this.#conversation.add(parent, { ...same, content: text });
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
    const draft = this.#composer.text;
    return [...this.#conversation.path(), ...(draft ? [{ role: 'user', content: draft }] : [])];
  }

  /** Whether the settings make no request; then it shows them. */
  #isBlocked() {
    const problem = this.#settings.problem();
    if (!problem) return false;
    this.#panel('show-settings', true);
    this.#log.say(problem);
    return true;
  }

  #submit(text) {
    if (this.#isBlocked()) return;
    const last = this.#conversation.path().at(-1);
    const node = this.#conversation.add(last?.id || '', { role: 'user', content: text });
    this.#composer.clear(); // as the draft of a new conversation, which has an id from now on
    this.#composer.open(this.#conversation.id);
    this.#generate(node.id);
  }

  /** Stops the answer of the branch that is shown. */
  #stop() {
    for (const node of this.#conversation.path()) {
      const run = this.#runs.get(node.id);
      if (run) this.#runs.stop(run);
    }
  }

  #generate(parent) {
    const conversation = this.#conversation;
    const body = this.#bodyAfter(conversation.pathTo(parent));
    const problemOf = ({ code, error }) => (code === 'context_length_exceeded' ? this.#tooLong(body.model) : error);
    this.#runs.start(conversation, parent, body, problemOf);
    this.#keep();
    this.#draw();
  }

  #tooLong(model) {
    const most = this.#contexts.get(model);
    return `The conversation does not fit into the model's context${most ? ` of ${count(most)} tokens` : ''}. Edit the message or begin a new conversation.`;
  }

  #afterAnswer({ conversation, node }, note) {
    this.#noteKeeping(note);
    this.history.show(this.#conversation);
    const painter = this.#painters.get(node.id);
    painter?.end();
    this.#painters.delete(node.id);
    if (conversation !== this.#conversation) return;
    if (painter && !conversation.nodes.has(node.id)) return void this.#draw(); // it was stopped before it had any text
    this.branches.show(conversation);
    this.#showState();
    if (!painter) return; // another branch is shown by now
    this.#views.get(node.id).update(node);
    this.#finishView(node, true);
    this.#log.follow();
  }

  #showRequestOf(node) {
    const sent = this.#runs.answerOf(node.id)?.body;
    if (sent) showRequest(sent);
    else showRequest(this.#bodyAfter(this.#conversation.pathTo(node.parent)), 'With the present settings; those of the answer are not kept.');
  }
}

// One message of a conversation as an element: text, reasoning, calls, figures, and what can be done with it.

import { button, copyText, count, h, icon, percent, plural, seconds } from '../dom.js';
import { MarkdownView } from './markdown.js';
import { tokenView } from './tokens.js';

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function callCards(node, onResults) {
  if (!node.tool_calls?.length) return null;
  const areas = [];
  const cards = node.tool_calls.map((call, index) => {
    const card = h('div', { class: 'call' },
      h('div', { class: 'call-head' }, h('span', { class: 'tag' }, 'call'), h('b', { class: 'mono' }, call.function.name)),
      h('pre', { class: 'mono' }, pretty(call.function.arguments || '')));
    if (onResults) {
      const id = `result-${node.id}-${index}`;
      areas.push(h('textarea', { id, rows: 2, class: 'mono', placeholder: 'What the tool returns, as text or JSON' }));
      card.append(h('label', { for: id }, `Result of ${call.function.name}`), areas.at(-1));
    }
    return card;
  });
  const send = onResults && button('Send results', () => onResults(areas.map((area) => area.value)), { class: 'primary' });
  return h('div', { class: 'calls' }, cards, send);
}

function figures(node) {
  const known = node.figures;
  if (!known) return null;
  const parts = [];
  if (known.tokens) parts.push(h('span', {}, plural(known.tokens, 'token')));
  if (known.rate) parts.push(h('span', {}, `${known.rate.toFixed(known.rate < 100 ? 1 : 0)} tokens/s`));
  if (known.first !== null) parts.push(h('span', {}, `first after ${seconds(known.first)}`));
  if (known.drafts) parts.push(h('span', { title: 'Tokens that a drafter predicted and the model confirmed' }, plural(known.drafts, 'draft')));
  if (known.forced) parts.push(h('span', { title: 'Tokens that the constraint left no choice for' }, `${count(known.forced)} forced`));
  if (known.prompt !== null && known.cached !== null) {
    const text = `${count(known.cached)} of ${count(known.prompt)} prompt tokens cached`;
    parts.push(h('span', { class: 'cached', title: text },
      h('span', { class: 'meter', 'aria-hidden': 'true' }, h('span', { style: { width: known.prompt ? `${(100 * known.cached) / known.prompt}%` : '0' } })),
      `${text} (${percent(known.cached, known.prompt)})`));
  }
  const finish = node.partial ? 'not complete' : node.finish; // it arrives in another tab, or did when the page was left
  if (['length', 'stopped', 'not complete', 'error', 'abort', 'repetition'].includes(finish)) {
    parts.push(h('span', { class: 'tag' }, finish === 'length' ? 'cut at max tokens' : finish));
  }
  return h('p', { class: 'figures' }, parts);
}

/** One line for an answer that arrives. `answer` is null before the first event. */
function liveFigures(answer) {
  const { tokens, rate } = answer?.figures() || { tokens: 0 };
  if (!tokens) return 'Waiting for the first token…';
  return rate ? `${plural(tokens, 'token')} · ${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s` : plural(tokens, 'token');
}

/** Shows a message while it is generated, and afterwards. `actions` has the callbacks of the conversation. */
export class MessageView {
  #markdown = new MarkdownView();
  #reasoning = h('pre', { class: 'reasoning-text' });
  #fold = null;
  #summary = h('span', {}, 'Reasoning');
  #lastLine = h('span', { class: 'last-line' });
  #live = h('p', { class: 'figures' });
  #foot = h('div', { class: 'message-foot' });
  #body = h('div', { class: 'message-body' });

  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.element = h('article', { class: `message ${node.role}`, 'aria-label': actions.nameOf(node), 'data-node': node.id },
      h('header', {}, h('h2', {}, actions.nameOf(node)), h('span', { class: 'switch' })), this.#body, this.#foot);
    this.update(node);
  }

  /** Draws text and reasoning; cheap enough to be called while the answer grows. */
  update(node) {
    this.node = node;
    if (node.reasoning) {
      this.#fold ??= h('details', { class: 'reasoning' }, h('summary', {}, this.#summary, this.#lastLine), this.#reasoning);
      if (node.figures?.reasoned) this.#summary.textContent = `Reasoning, ${seconds(node.figures.reasoned)}`;
      this.#reasoning.textContent = node.reasoning;
      if (!this.#fold.isConnected) this.#body.prepend(this.#fold);
    }
    if (node.role === 'assistant') {
      if (!this.#markdown.element.isConnected) this.#body.append(this.#markdown.element);
      this.#markdown.show(node.content);
    } else if (!this.#body.firstChild) {
      this.#body.append(h('div', { class: node.role === 'tool' ? 'plain mono' : 'plain' }, node.content));
    }
  }

  /** Draws an answer that arrives, with its figures so far. */
  grow(node, answer) {
    this.element.classList.add('growing');
    this.update(node);
    const reasoned = answer?.figures().reasoned;
    if (reasoned) this.#summary.textContent = `Reasoning, ${seconds(reasoned)}`;
    this.#lastLine.textContent = node.content ? '' : node.reasoning.trimEnd().split('\n').at(-1);
    this.#live.textContent = liveFigures(answer);
    if (!this.#live.isConnected) this.#foot.replaceChildren(this.#live);
  }

  /** Draws what only whole messages have: calls, figures, actions, the switch between branches. */
  finish({ answer, awaitsResults, awaitsAnswer, siblings }) {
    const { node, actions } = this;
    const { error } = node;
    this.element.classList.remove('growing');
    this.#lastLine.textContent = '';
    for (const old of this.element.querySelectorAll('.calls, header .actions')) old.remove();
    const calls = callCards(node, awaitsResults && ((results) => actions.sendResults(node, results)));
    if (calls) this.#body.append(calls);
    this.showSwitch(siblings);
    const bar = h('div', { class: 'actions', role: 'toolbar', 'aria-label': 'Actions of this message' });
    const act = (label, onclick, properties) => bar.append(button(label, onclick, { class: 'quiet', ...properties }));
    act('Copy', (event) => copyText(node.content, event.currentTarget));
    if (node.role !== 'tool') act('Edit', () => this.#edit());
    if (node.role === 'assistant') {
      act('Regenerate', () => actions.regenerate(node));
      if (answer?.tokens.length) act('Tokens', (event) => this.#toggleTokens(answer, event.currentTarget), { 'aria-expanded': 'false' });
      act('Request', () => actions.showRequest(node));
      if (node.request) act('Explain', () => actions.explain(node.request));
    }
    if (node.role === 'user') this.element.querySelector('header').append(bar);
    const ask = awaitsAnswer && button('Answer', () => actions.answer(node), { title: 'Asks for the answer that this message does not have' });
    this.#foot.replaceChildren(...[error && h('p', { class: 'error', role: 'alert' }, error), figures(node), node.role !== 'user' && bar, ask].filter(Boolean));
  }

  /** Draws the switch between branches; none for a single branch. */
  showSwitch(siblings) {
    const place = siblings.indexOf(this.node);
    const move = (step, name, label) => h('button', {
      type: 'button', class: 'quiet', 'aria-label': label, disabled: !siblings[place + step], onclick: () => this.actions.choose(siblings[place + step]),
    }, icon(name));
    this.element.querySelector('.switch').replaceChildren(...(siblings.length < 2 ? [] : [
      move(-1, 'left', 'Previous branch'), h('span', {}, `${place + 1}/${siblings.length}`), move(1, 'right', 'Next branch')]));
  }

  /** Focuses the control of the switch between branches with a label, or the other one if that one is at its end. */
  focusSwitch(label) {
    const controls = [...this.element.querySelectorAll('.switch button:enabled')];
    (controls.find((control) => control.getAttribute('aria-label') === label) || controls[0])?.focus();
  }

  #toggleTokens(answer, toggle) {
    const open = this.#body.querySelector('.tokens');
    toggle.setAttribute('aria-expanded', open ? 'false' : 'true');
    this.#markdown.element.hidden = !open;
    if (open) return open.remove();
    this.#body.append(tokenView(answer));
    return this.#body.querySelector('.token-text').scrollIntoView({ block: 'nearest' }); // else the readout may lie over it
  }

  #edit() {
    if (this.element.querySelector('.edit')) return;
    const area = h('textarea', { rows: Math.min(12, this.node.content.split('\n').length + 1), value: this.node.content, 'aria-label': 'Edited message' });
    const text = this.node.role === 'user' ? 'Send as a new branch' : 'Keep as a new branch';
    const cancel = () => {
      box.remove();
      this.#body.hidden = this.#foot.hidden = false;
      [...this.element.querySelectorAll('.actions button')].find((one) => one.textContent === 'Edit')?.focus();
    };
    const onkeydown = (event) => {
      const isSent = event.key === 'Enter' && (event.ctrlKey || event.metaKey);
      if (event.isComposing || (event.key !== 'Escape' && !isSent)) return;
      event.preventDefault();
      if (isSent) box.requestSubmit();
      else cancel();
    };
    const box = h('form', { class: 'edit', onkeydown, onsubmit: (event) => {
      event.preventDefault();
      this.actions.edit(this.node, area.value);
    } }, area, h('div', { class: 'row' }, h('span', { class: 'note hint' }, 'Ctrl+Enter sends, Escape cancels'),
      h('button', { class: 'primary' }, text), button('Cancel', cancel)));
    this.#body.hidden = this.#foot.hidden = true;
    this.element.append(box);
    area.focus();
  }
}

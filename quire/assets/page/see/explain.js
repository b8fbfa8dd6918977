// The explanation of a request in words and bars: /v1/requests/{id}/explain, or what a journal's step says of it.

import { getJSON } from '../api.js';
import { button, count, h, icon, percent, plural, seconds } from '../dom.js';

const MISSES = {
  never_seen: 'no earlier request had computed these tokens',
  evicted: 'these tokens were cached, and evicted since',
  being_computed: 'another request was computing these tokens',
  other_salt: 'the tokens are cached under another cache_salt',
  other_adapter: 'the tokens are cached for another adapter, or another value of deterministic',
  last_token: 'nothing was missing: the last token is computed for its logits',
  no_state: 'keys and values matched further, but no snapshot of recurrent states was taken there',
  state_evicted: 'keys and values matched further, but the snapshot of recurrent states there was evicted',
  state_being_computed: 'keys and values matched further, and another request was about to take a snapshot of recurrent states there',
  recomputed: 'the request reports values that only computation gives',
  off: 'the server has no prefix index',
};

function facts(pairs) {
  return h('dl', { class: 'facts' }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== '')
    .map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value))));
}

/** A bar of parts `[label, amount, class]`, with their names below. */
function bar(parts, format) {
  const total = parts.reduce((sum, [, amount]) => sum + amount, 0);
  if (!total) return null;
  return h('div', { class: 'split' },
    h('div', { class: 'split-bar', 'aria-hidden': 'true' }, parts.filter(([, amount]) => amount > 0).map(([, amount, kind]) =>
      h('span', { class: kind, style: { width: `${(100 * amount) / total}%` } }))),
    h('ul', { class: 'legend' }, parts.map(([label, amount, kind]) => h('li', {}, h('span', { class: `swatch ${kind}`, 'aria-hidden': 'true' }), `${label} `, h('b', {}, format(amount))))));
}

/** The bar of a prompt of `all` tokens, of which `done` are cached or computed. */
function promptBar(all, done, cached) {
  const missing = all - Math.max(done, cached);
  return bar([['cached', cached, 'part-cached'], ['computed', Math.max(0, done - cached), 'part-computed'], ...(missing ? [['to compute', missing, 'part-missing']] : [])], count);
}

function reuse(prompt) {
  const { num_prompt_tokens: all, num_prompt_done: done, num_cached_tokens: cached, miss } = prompt;
  const lines = [promptBar(all, done, cached)];
  if (miss) {
    let text = `From token ${count(miss.position)} on it had to be computed: ${MISSES[miss.reason] || miss.reason}`;
    if (miss.evicted_at !== null && miss.evicted_at !== undefined) text += `, ${seconds(prompt.arrived - miss.evicted_at)} before it came`;
    if (miss.evicted_for) text += `, for ${miss.evicted_for}`;
    lines.push(h('p', {}, `${text}.`));
  }
  lines.push(facts([['Whole blocks shared', count(prompt.num_shared_blocks)], ['Tokens copied within a block', count(prompt.num_copied_tokens)],
    ...(prompt.num_kv_tokens > cached ? [['Tokens whose keys and values matched', count(prompt.num_kv_tokens)]] : []),
    ['Snapshot of states behind token', typeof prompt.state_position === 'number' ? count(prompt.state_position) : null],
    ['Blocks of its own', prompt.num_blocks_own === null ? null : count(prompt.num_blocks_own)],
    ['Memory saved by sharing', prompt.saved_by_sharing === null ? null : percent(prompt.saved_by_sharing, 1)]]));
  return lines;
}

function queueTime(prompt) {
  const waited = Object.entries(prompt.waited || {}).filter(([, time]) => time > 0);
  const longest = Math.max(...waited.map(([, time]) => time), 1e-9);
  const lines = [];
  if (waited.length) {
    lines.push(h('table', { class: 'waits' }, h('caption', { class: 'offscreen' }, 'Queue time by cause'), h('tbody', {}, waited.map(([cause, time]) =>
      h('tr', {}, h('th', { scope: 'row' }, cause.replaceAll('_', ' ')), h('td', { class: 'number' }, seconds(time)),
        h('td', { class: 'bars' }, h('span', { class: 'bar', style: { width: `${(100 * time) / longest}%` } })))))));
  }
  lines.push(facts([['Policy', prompt.policy], ['Place in the queue', prompt.place], ['Passed by', prompt.num_passed_by ? plural(prompt.num_passed_by, 'request') : null], ['Refused because', prompt.refusal]]));
  return lines;
}

function course(prompt) {
  const { arrived, admitted, finished } = prompt;
  const known = [admitted, finished].every((time) => time !== null && time !== undefined);
  return known && bar([['waited', admitted - arrived, 'part-waited'], ['ran', finished - admitted, 'part-ran']], seconds);
}

function events(prompt) {
  const lines = [];
  for (const one of prompt.preemptions || []) {
    lines.push(`Preempted ${seconds(one.at - prompt.arrived)} after its arrival (${String(one.reason).replaceAll('_', ' ')}): ${plural(one.num_lost_tokens || 0, 'token')} lost, ${count(one.num_recomputed_tokens || 0)} computed again.`);
  }
  if (prompt.num_evicted_blocks) lines.push(`${plural(prompt.num_evicted_blocks, 'cached block')} of others evicted for it.`);
  for (const [drafter, [chains, drafts, accepted]] of Object.entries(prompt.drafts || {})) {
    lines.push(`Speculation, ${drafter}: ${accepted} of ${plural(drafts, 'draft')} accepted, in ${plural(chains, 'chain')}.`);
  }
  for (const [why, times] of Object.entries(prompt.proposals_skipped || {})) lines.push(`Drafts left out ${times} times because of ${why}.`);
  return lines.length ? h('ul', {}, lines.map((line) => h('li', {}, line))) : h('p', { class: 'note' }, 'No preemption, no eviction, no draft.');
}

function promptSection(prompt, single) {
  return h('section', { class: 'prompt' }, !single && h('h3', { class: 'mono' }, prompt.request_id),
    facts([['State', prompt.state], ['Ended by', prompt.finish_reason], ['Tenant', prompt.tenant], ['Prompt', plural(prompt.num_prompt_tokens, 'token')]]), course(prompt),
    h('h3', {}, 'Reuse of the cache'), reuse(prompt), h('h3', {}, 'Queue'), queueTime(prompt), h('h3', {}, 'While it ran'), events(prompt));
}

/** What an update of the monitor says of a request, where there is no server to ask. */
function fromUpdate(request) {
  const { num_prompt: all, num_prompt_done: done, num_cached: cached } = request;
  return [facts([['State', request.state], ['Tenant', request.tenant], ['Prompt', plural(all, 'token')], ['Output', plural(request.num_output, 'token')],
    ['Blocks', count(request.num_blocks)], ['Priority', request.priority], ['Adapter', request.adapter], ['Waits because', request.reason]]),
  promptBar(all, done, cached)];
}

/** A drawer at the side of the page. */
export class Explanations {
  #title = h('h2', { id: 'explain-title' }, 'Request');
  #body = h('div', { class: 'drawer-body' });
  #before = null;
  #asked = 0;

  constructor() {
    this.element = h('aside', { class: 'drawer', 'aria-labelledby': 'explain-title', hidden: true, tabindex: '-1', onkeydown: (event) => {
      if (event.key !== 'Escape') return;
      event.preventDefault(); // Escape elsewhere stops an answer
      this.close();
    } },
      h('div', { class: 'drawer-head' }, this.#title, h('button', { type: 'button', class: 'quiet', 'aria-label': 'Close', onclick: () => this.close() }, icon('close'))), this.#body);
  }

  close() {
    this.element.hidden = true;
    this.#before?.focus();
  }

  #open(id) {
    if (this.element.hidden) this.#before = document.activeElement;
    this.#title.textContent = 'Request, explained';
    this.#body.replaceChildren(h('p', { class: 'mono id' }, id));
    this.element.hidden = false;
    this.element.focus();
  }

  showUpdate(request) {
    this.#open(request.id);
    this.#body.append(...fromUpdate(request).filter(Boolean));
  }

  async show(id) {
    this.#open(id);
    this.#asked += 1;
    const asked = this.#asked;
    const wait = h('p', { class: 'note', role: 'status' }, 'Asking the engine…');
    this.#body.append(wait);
    let parts = [];
    try {
      const explanation = await getJSON(`v1/requests/${encodeURIComponent(id)}/explain`);
      const { prompts } = explanation;
      parts = [...prompts.map((prompt) => promptSection(prompt, prompts.length === 1)),
        h('details', {}, h('summary', {}, 'As JSON'), h('pre', { class: 'mono', tabindex: '0' }, JSON.stringify(explanation, null, 2))),
        button('Ask again', () => this.show(id), { class: 'quiet' })];
    } catch (error) {
      parts = [h('p', { class: 'error', role: 'alert' }, error.message)];
    }
    if (asked !== this.#asked) return;
    wait.remove();
    this.#body.append(...parts);
  }
}

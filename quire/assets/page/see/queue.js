// Requests: those that run, those that wait and why, those that left.

import { count, h, percent, seconds } from '../dom.js';
import { Palette, css } from './palette.js';
import { sequenceKey } from './monitor.js';

const MAX_ROWS = 200;
const MAX_FINISHED = 20;
const NOT_ON_PHONES = 'Blocks'; // the column that a narrow table leaves out

/** An id without its kind, and without its middle. */
function shortId(id) {
  const own = id.replace(/^(chatcmpl-|cmpl-|resp_)/, '');
  return own.length > 16 ? `${own.slice(0, 6)}…${own.slice(-6)}` : own;
}

/** The tokens of a running request's prompt, after those that are done, if it is not done. */
export function promptText({ num_prompt: all, num_prompt_done: done }) {
  return done < all ? `${count(done)} / ${count(all)}` : count(all);
}

/** One row, whose cells are changed in place so that focus and selection stay. */
class Row {
  #cells;
  #id;
  #swatch = h('span', { class: 'swatch owner', 'aria-hidden': 'true' });
  #adapter = h('span', { class: 'adapter' });
  request = null;

  constructor(columns, { explain, point }) {
    const enter = () => point(this.request.owner);
    const leave = () => point(0);
    this.#id = h('button', { type: 'button', class: 'link mono', onclick: () => explain(this.request), onfocus: enter, onblur: leave });
    this.#cells = columns.map((name) => h('td', { class: name === NOT_ON_PHONES ? 'narrow-out' : null }));
    this.element = h('tr', { onmouseenter: enter, onmouseleave: leave }, h('td', {}, this.#swatch, this.#id, this.#adapter), this.#cells);
  }

  draw(request, texts, colour, isHighlighted) {
    this.request = request;
    if (this.#id.title !== request.id) {
      this.#id.title = request.id;
      this.#id.textContent = shortId(request.id);
    }
    if (this.#adapter.textContent !== request.adapter) {
      this.#adapter.title = request.adapter && `LoRA adapter ${request.adapter}`;
      this.#adapter.textContent = request.adapter;
    }
    this.#swatch.style.setProperty('background-color', colour);
    this.element.classList.toggle('highlight', isHighlighted);
    texts.forEach((text, index) => {
      if (this.#cells[index].textContent !== text) this.#cells[index].textContent = text;
    });
  }
}

class Table {
  #rows = new Map();
  #body = h('tbody');
  #columns;
  #actions;

  constructor(title, columns, actions) {
    this.#columns = columns.slice(1);
    this.#actions = actions;
    this.count = h('span', { class: 'count' });
    this.element = h('div', { class: `requests ${title.toLowerCase()}` }, h('h3', {}, title, ' ', this.count),
      h('div', { class: 'table', tabindex: '0', role: 'group', 'aria-label': title }, h('table', {}, h('thead', {}, h('tr', {}, columns.map((name) => h('th', { scope: 'col', class: name === NOT_ON_PHONES ? 'narrow-out' : null }, name)))), this.#body)));
  }

  draw(requests, total, textsOf, colourOf, highlight) {
    this.count.textContent = count(total);
    const kept = new Set(requests.map(sequenceKey));
    for (const [key, row] of this.#rows) { // first, because a row that has to move loses the focus
      if (kept.has(key)) continue;
      row.element.remove();
      this.#rows.delete(key);
    }
    requests.forEach((request, place) => {
      const key = sequenceKey(request);
      let row = this.#rows.get(key);
      if (!row) this.#rows.set(key, (row = new Row(this.#columns, this.#actions)));
      row.draw(request, textsOf(request), colourOf(request), Boolean(highlight) && request.owner === highlight);
      if (this.#body.children[place] !== row.element) this.#body.insertBefore(row.element, this.#body.children[place] || null);
    });
    this.element.classList.toggle('none', !requests.length);
  }
}

export class Queue {
  #palette = new Palette();
  #summary = h('p', { class: 'note' });
  highlight = 0;

  /** `actions.explain(request)` is called with a chosen row's request, `actions.point(owner)` with that of a row under the pointer. */
  constructor(actions, search) {
    this.running = new Table('Running', ['Request', 'Prompt', 'Cached', 'Output', 'Blocks', 'For'], actions);
    this.waiting = new Table('Waiting', ['Request', 'Prompt', 'For', 'Why it waits'], actions);
    this.finished = new Table('Ended', ['Request', 'Output', 'Cached', 'Ended'], actions);
    const empty = h('div', { class: 'empty' }, search
      ? [h('p', {}, 'No requests yet.'), h('p', {}, 'Send a message in ', h('a', { href: '#/talk' }, 'Talk'), ', or call the API.')]
      : h('p', {}, 'No requests at this step.'));
    this.element = h('section', { class: 'panel queue', 'aria-labelledby': 'queue-title' },
      h('div', { class: 'panel-head' }, h('h2', { id: 'queue-title' }, 'Requests'), this.#summary, h('span', { class: 'grow' }), search),
      h('div', { class: 'queue-body' }, empty, this.waiting.element, this.running.element, this.finished.element));
    document.addEventListener('themechange', () => (this.#palette = new Palette()));
  }

  draw(monitor) {
    const { at, requests, finished, sees, others } = monitor;
    const colour = (request) => (request.owner ? css(this.#palette.owner(request.owner)) : 'transparent');
    const running = requests.filter((request) => request.state === 'running');
    const waiting = requests.filter((request) => request.state !== 'running');
    this.running.draw(running.slice(0, MAX_ROWS), monitor.numRunning, (request) => [
      promptText(request), percent(request.num_cached, request.num_prompt), `${count(request.num_output)}${request.max_tokens ? ` / ${count(request.max_tokens)}` : ''}`,
      count(request.num_blocks), seconds(at - request.since)], colour, this.highlight);
    this.waiting.draw(waiting.slice(0, MAX_ROWS), monitor.numWaiting, (request) => [
      count(request.num_prompt), seconds(at - request.since), `${request.state === 'swapped' ? 'swapped out: ' : ''}${request.reason || '–'}`], colour, this.highlight);
    this.finished.draw(finished.slice(0, MAX_FINISHED), finished.length, (request) => [
      count(request.num_output), percent(request.num_cached, request.num_prompt), `${seconds(at - request.left)} ago`], () => 'transparent', 0);
    this.element.classList.toggle('none', !requests.length && !finished.length);
    this.#summary.textContent = sees === 'own' ? `Yours. Others, every 5 s: ${others.running} running, ${others.waiting} waiting` : '';
  }
}

// See: the memory, the tree, the queue and the steps, live or from a journal.

import { h, icon } from '../dom.js';
import { BlockMap } from './blocks.js';
import { Charts } from './charts.js';
import { Monitor } from './monitor.js';
import { Queue } from './queue.js';
import { ReplayBar } from './replay.js';
import { LiveSource } from './sources.js';
import { Timeline } from './timeline.js';
import { TreeView } from './tree.js';

const INTERVALS = [[0.1, '10 a second'], [0.25, '4 a second'], [1, '1 a second'], [5, 'every 5 s']];

/** The number of the engine that is looked at: of the page's address, or the first. */
const engineOf = (mode) => {
  const number = Number(new URLSearchParams(location.search).get('engine'));
  return Number.isInteger(number) && number >= 0 && number < mode.replicas ? number : 0;
};

export class See {
  #monitor = new Monitor();
  #frame = 0;
  #status = h('span', { class: 'status', role: 'status' });
  #source = null;
  #isShown = false;
  #isPaused = false;

  constructor(mode, explanations) {
    const explain = (request) => (mode.mode === 'live' ? explanations.show(request.id) : explanations.showUpdate(request));
    this.charts = new Charts();
    this.blocks = new BlockMap({ explain, onHighlight: (owner) => {
      this.queue.highlight = owner;
      this.queue.draw(this.#monitor);
    } });
    const point = (owner) => {
      this.blocks.highlight = owner;
      this.blocks.draw(this.#monitor);
    };
    this.queue = new Queue({ explain, point }, mode.mode === 'live' && this.#search(explanations));
    const engine = engineOf(mode);
    this.tree = new TreeView(mode, (id) => `monitor/nodes/${id}${this.replay ? `?step=${this.replay.step}` : `?engine=${engine}`}`);
    this.steps = new Timeline();
    const bar = mode.mode === 'live' ? this.#liveBar(engine, mode.replicas) : this.#replayBar();
    this.element = h('div', { class: 'see' }, bar, this.charts.element,
      h('div', { class: 'see-grid' }, this.blocks.element, this.queue.element, this.tree.element, this.steps.element));
    new ResizeObserver(() => this.#draw()).observe(this.element);
    document.addEventListener('themechange', () => this.#draw());
    document.addEventListener('visibilitychange', () => this.#isShown && this.#run());
    document.addEventListener('keychange', () => this.#isShown && this.#run());
  }

  #search(explanations) {
    const input = h('input', { type: 'search', placeholder: 'Explain an id', 'aria-label': 'Id of a request to explain' });
    return h('form', { class: 'search', onsubmit: (event) => {
      event.preventDefault();
      if (input.value.trim()) explanations.show(input.value.trim());
    } }, input);
  }

  #liveBar(engine, replicas) {
    this.#source = new LiveSource(engine, (updates) => this.#apply(updates), (status, text) => {
      this.#status.dataset.status = status;
      if (this.#status.textContent !== text) this.#status.textContent = text;
    });
    const speed = h('select', { 'aria-label': 'Updates', onchange: () => this.#run() },
      INTERVALS.map(([value, text]) => h('option', { value, selected: value === 0.25 }, text)));
    this.interval = () => Number(speed.value);
    const pause = h('button', { type: 'button', 'aria-pressed': 'false', onclick: () => {
      this.#isPaused = !this.#isPaused;
      pause.setAttribute('aria-pressed', String(this.#isPaused));
      pause.replaceChildren(icon(this.#isPaused ? 'play' : 'pause'), this.#isPaused ? 'Go on' : 'Pause');
      this.#run();
    } }, icon('pause'), 'Pause');
    const tools = [h('span', { class: 'grow' }), speed, pause];
    if (replicas > 1) {
      const choice = h('select', { 'aria-label': 'Engine', onchange: () => (location.search = `?engine=${choice.value}`) },
        Array.from({ length: replicas }, (_, number) => h('option', { value: number, selected: number === engine }, `Engine ${number}`)));
      tools.splice(1, 0, choice);
    }
    return h('div', { class: 'see-bar' }, this.#status, ...tools);
  }

  #replayBar() {
    this.replay = new ReplayBar((updates) => this.#apply(updates), () => this.#monitor.clear());
    return this.replay.element;
  }

  #run() {
    if (!this.#source) return;
    if (this.#isShown && !this.#isPaused && !document.hidden) {
      this.#source.start(this.interval());
      return;
    }
    this.#source.stop();
    this.#status.dataset.status = 'paused';
    this.#status.textContent = 'Paused';
  }

  #apply(updates) {
    for (const update of updates) this.#monitor.apply(update);
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#draw();
    });
  }

  #draw() {
    if (!this.#isShown || !this.#monitor.pools.length) return;
    this.charts.draw(this.#monitor, this.replay ? null : this.interval());
    this.blocks.draw(this.#monitor);
    this.queue.draw(this.#monitor);
    this.tree.draw(this.#monitor);
    this.steps.draw(this.#monitor);
  }

  show() {
    this.#isShown = true;
    if (this.replay) this.replay.show();
    else this.#run();
    this.#draw();
  }

  hide() {
    this.#isShown = false;
    this.#run();
  }
}

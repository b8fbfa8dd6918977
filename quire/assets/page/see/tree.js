// The radix tree as a picture that can be zoomed and moved, now and over the last minutes.

import { getJSON } from '../api.js';
import { button, count, h, hasModifier, plural, seconds } from '../dom.js';
import { Palette, css, fit } from './palette.js';
import { layoutTree } from './tree_layout.js';

const KINDS = ['reusable', 'in use', 'pinned'];
const PADDING = 8;

export class TreeView {
  #monitor = null;
  #palette = new Palette();
  #layout = { placed: [], tokens: 1, rows: 1, byId: new Map() };
  #drawnFor = null;
  #view = null; // {x, y, kx, ky}: offset in tokens and rows, pixels for each; null fits the tree
  #cursor = null;
  #at = null;
  #chosen = null;
  #reusedKey = null;
  #nodePath;
  #canvas = h('canvas', { class: 'tree-canvas', tabindex: '0', role: 'img', 'aria-label': 'Radix tree of cached prefixes', 'aria-describedby': 'tree-summary tree-keys' });
  #summary = h('p', { class: 'note', id: 'tree-summary' });
  #readout = h('p', { class: 'readout', 'aria-live': 'polite' });
  #detail = h('div', { class: 'node-detail' });
  #window = h('select', { 'aria-label': 'Recent means', onchange: () => this.draw(this.#monitor) },
    [[1, '1 s'], [3, '3 s'], [10, '10 s'], [60, '60 s']].map(([value, text]) => h('option', { value, selected: value === 3 }, `last ${text}`)));
  #colour = h('select', { 'aria-label': 'Colour by', onchange: () => this.draw(this.#monitor) },
    [['activity', 'activity'], ['hits', 'hits'], ['age', 'last use']].map(([value, text]) => h('option', { value }, text)));
  #slider = h('input', { type: 'range', min: 0, max: 0, value: 0, 'aria-label': 'Time of the tree', oninput: () => this.#slide() });
  #time = h('output', {}, 'now');

  /** `nodePath(id)` is the path of the server that describes a node. */
  constructor(mode, nodePath) {
    this.#nodePath = nodePath;
    const zoom = (factor) => () => this.#zoom(factor);
    this.element = h('section', { class: 'panel tree', 'aria-labelledby': 'tree-title' },
      h('div', { class: 'panel-head' }, h('h2', { id: 'tree-title' }, 'Radix tree'), this.#summary, h('span', { class: 'grow' }),
        h('label', {}, 'Colour ', this.#colour), this.#window,
        h('span', { class: 'group' }, button('−', zoom(1 / 1.5), { 'aria-label': 'Zoom out' }), button('+', zoom(1.5), { 'aria-label': 'Zoom in' }), button('Fit', () => this.#fit()))),
      h('ul', { class: 'legend' }, [['new', '+ new'], ['accessed', 'accessed'], ['evicted', '× evicted'], ['running', 'used by running requests'], ['kept', 'reusable'], ['pin', '▪ pinned']].map(([name, text]) =>
        h('li', {}, h('span', { class: `swatch node-${name}`, 'aria-hidden': 'true' }), text))),
      h('div', { class: 'tree-body' }, this.#canvas, this.#detail), this.#readout,
      h('div', { class: 'slider', hidden: mode.mode !== 'live' }, h('span', { class: 'note' }, 'Last minutes'), this.#slider, this.#time, button('Now', () => this.#toNow())),
      h('p', { class: 'offscreen', id: 'tree-keys' }, 'Arrow keys go from node to node: left to the parent, right to the first child. Plus and minus zoom, 0 fits, Enter shows the node.'));
    this.#listen();
    document.addEventListener('themechange', () => {
      this.#palette = new Palette();
      if (this.#monitor) this.draw(this.#monitor);
    });
  }

  #listen() {
    const canvas = this.#canvas;
    let drag = null;
    canvas.addEventListener('pointerdown', (event) => {
      drag = { x: event.offsetX, y: event.offsetY, view: this.#currentView(), moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener('pointermove', (event) => {
      if (!drag) return this.#point(this.#nodeAt(event));
      const [across, down] = [event.offsetX - drag.x, event.offsetY - drag.y];
      if (Math.abs(across) + Math.abs(down) > 4) drag.moved = true;
      if (!drag.moved) return undefined;
      this.#view = { ...drag.view, x: drag.view.x - across / drag.view.kx, y: drag.view.y - down / drag.view.ky };
      return this.draw(this.#monitor);
    });
    canvas.addEventListener('pointerup', (event) => {
      if (drag && !drag.moved) this.#choose(this.#nodeAt(event));
      drag = null;
    });
    canvas.addEventListener('pointercancel', () => (drag = null));
    canvas.addEventListener('pointerleave', () => !drag && this.#point(null));
    canvas.addEventListener('wheel', (event) => {
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return;
      event.preventDefault();
      this.#zoom(Math.exp(-event.deltaY / 400), event.offsetX, event.offsetY);
    }, { passive: false });
    canvas.addEventListener('keydown', (event) => this.#key(event));
  }

  #key(event) {
    if (hasModifier(event)) return;
    const node = this.#layout.byId.get(this.#cursor);
    const siblings = node && (this.#layout.byId.get(node.parent)?.children || this.#layout.placed.filter((one) => one.x0 === 0));
    const goes = {
      ArrowLeft: () => node && this.#layout.byId.get(node.parent),
      ArrowRight: () => (node ? node.children[0] : this.#layout.placed[0]),
      ArrowUp: () => node && siblings[siblings.indexOf(node) - 1],
      ArrowDown: () => (node ? siblings[siblings.indexOf(node) + 1] : this.#layout.placed[0]),
    };
    const acts = { '+': () => this.#zoom(1.5), '=': () => this.#zoom(1.5), '-': () => this.#zoom(1 / 1.5), 0: () => this.#fit(), Enter: () => this.#choose(node) };
    if (!(event.key in goes) && !(event.key in acts)) return;
    event.preventDefault();
    if (event.key in acts) return void acts[event.key]();
    const next = goes[event.key]();
    if (next) this.#point(next);
  }

  #currentView() {
    if (this.#view) return this.#view;
    const width = this.#canvas.clientWidth - 2 * PADDING;
    const height = this.#canvas.clientHeight - 2 * PADDING;
    const { tokens, rows } = this.#layout;
    return { x: 0, y: 0, kx: width / Math.max(1, tokens), ky: Math.min(22, height / Math.max(1, rows)) };
  }

  #zoom(factor, left = this.#canvas.clientWidth / 2, top = this.#canvas.clientHeight / 2) {
    const { x, y, kx, ky } = this.#currentView();
    const token = x + (left - PADDING) / kx;
    const row = y + (top - PADDING) / ky;
    const [nextX, nextY] = [Math.min(40, kx * factor), Math.min(60, ky * factor)];
    this.#view = { x: token - (left - PADDING) / nextX, y: row - (top - PADDING) / nextY, kx: nextX, ky: nextY };
    this.draw(this.#monitor);
  }

  #fit() {
    this.#view = null;
    this.draw(this.#monitor);
  }

  #nodeAt(event) {
    const { x, y, kx, ky } = this.#currentView();
    const token = x + (event.offsetX - PADDING) / kx;
    const row = y + (event.offsetY - PADDING) / ky;
    return this.#layout.placed.find((node) => token >= node.x0 && token < node.x1 && row >= node.y0 && row < node.y1) || null;
  }

  #point(node) {
    if ((node?.id ?? null) === this.#cursor) return;
    this.#cursor = node?.id ?? null;
    this.#readout.textContent = node ? this.#describe(node) : '';
    this.draw(this.#monitor);
  }

  #describe(node) {
    const age = Math.max(0, this.#shownTime() - node.lastUsed);
    return `${plural(node.tokens, 'token')} in ${plural(node.blocks, 'block')}, ${plural(node.hits, 'hit')}, last used ${seconds(age)} ago,${node.snapshots ? ` ${plural(node.snapshots, 'snapshot')} of states,` : ''} ${node.gone ? 'evicted' : KINDS[node.kind]}`;
  }

  #shownTime() {
    return this.#at ?? this.#monitor?.at ?? 0;
  }

  #leaveDetail() {
    this.#chosen = null;
    this.#showReused();
  }

  async #choose(node) {
    if (!node) return;
    this.#chosen = node.id;
    this.#showDetail(node);
    if (node.gone) return;
    const detail = await getJSON(this.#nodePath(node.id)).catch((error) =>
      ({ problem: error.status === 404 ? 'This node is no longer in the tree.' : error.message }));
    if (this.#chosen === node.id) this.#showDetail(node, detail); // else another one was chosen meanwhile
  }

  /** The nodes whose tokens were not computed again most often, each to be chosen. */
  #showReused() {
    const saved = (node) => node.hits * node.tokens;
    const best = [...this.#layout.placed].filter((node) => saved(node) > 0 && !node.gone).sort((one, other) => saved(other) - saved(one)).slice(0, 8);
    const items = best.map((node) => [node.id, `${count(node.tokens)} tokens × ${plural(node.hits, 'hit')} = ${count(saved(node))}`]);
    const key = JSON.stringify(items);
    if (this.#reusedKey === key) return;
    this.#reusedKey = key;
    const focused = [...this.#detail.querySelectorAll('.reused button')].indexOf(document.activeElement);
    this.#detail.replaceChildren(h('h3', {}, 'Most reused'), h('p', { class: 'note' }, 'By tokens × hits, the tokens that were not computed again.'), items.length ? h('ol', { class: 'reused' }, items.map(([id, text]) => h('li', {},
      h('button', { type: 'button', class: 'link', onclick: () => this.#choose(this.#layout.byId.get(id)) }, text)))) : h('p', { class: 'note' }, 'Nothing yet.'),
    h('p', { class: 'note' }, 'Choose a node to read it. Drag to move; zoom with the buttons, or with the wheel after a click.'));
    if (focused >= 0) this.#detail.querySelectorAll('.reused button')[focused]?.focus();
  }

  #showDetail(node, detail) {
    this.#reusedKey = null;
    const now = this.#shownTime();
    const facts = [['Tokens', count(node.tokens)], ['Path', detail?.path_tokens ? plural(detail.path_tokens, 'token') : '–'], ['Blocks', count(node.blocks)], ['Hits', count(node.hits)],
      ...(node.snapshots ? [['Snapshots of states', count(node.snapshots)]] : []), ['Users', count(node.users)], ['Created', `${seconds(Math.max(0, now - node.created))} ago`], ['Last use', `${seconds(Math.max(0, now - node.lastUsed))} ago`], ['State', node.gone ? 'evicted' : KINDS[node.kind]]];
    this.#detail.replaceChildren(h('div', { class: 'field-head' }, h('h3', {}, `Node ${node.id}`), h('span', { class: 'grow' }), button('Back', () => this.#leaveDetail(), { class: 'quiet' })), h('dl', {}, facts.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value)))),
      detail?.problem ? h('p', { class: 'note' }, detail.problem) : detail ? h('pre', { class: 'mono', tabindex: '0', 'aria-label': detail.text ? 'Text of the node' : 'Token ids of the node' }, detail.text || detail.token_ids.join(' ')) : '');
  }

  #slide() {
    const { snapshots } = this.#monitor;
    const index = Number(this.#slider.value);
    this.#at = index >= snapshots.length ? null : snapshots[index].at;
    this.draw(this.#monitor);
  }

  #toNow() {
    this.#at = null;
    this.draw(this.#monitor);
  }

  draw(monitor) {
    if (!monitor) return;
    this.#monitor = monitor;
    this.#drawSlider(monitor);
    this.#arrange(monitor);
    this.#paint();
    if (this.#chosen === null) this.#showReused();
    const used = this.#layout.placed.filter((node) => node.hits > 0).length;
    this.#summary.textContent = `${plural(monitor.numNodes, 'node')}${monitor.nodes.size < monitor.numNodes ? `, the ${count(monitor.nodes.size)} last used are shown` : ''}; ${count(used)} were reused`;
  }

  #drawSlider({ snapshots, at }) {
    this.#slider.max = snapshots.length;
    if (this.#at === null) this.#slider.value = snapshots.length;
    else this.#slider.value = Math.max(0, snapshots.findIndex((snapshot) => snapshot.at >= this.#at));
    this.#time.textContent = this.#at === null ? 'now' : `${seconds(at - this.#at)} ago`;
    this.#slider.setAttribute('aria-valuetext', this.#time.textContent);
  }

  #arrange(monitor) {
    const shown = monitor.treeAt(this.#at);
    const span = Number(this.#window.value);
    const present = new Set(shown.nodes.map((node) => node.id));
    const ghosts = shown.evicted.filter(({ node, at }) => at <= shown.at && shown.at - at < span && !present.has(node.id)).map(({ node }) => ({ ...node, gone: true }));
    const all = new Map([...ghosts, ...shown.nodes].map((node) => [node.id, node]));
    const anchored = [...all.values()].filter((node) => !node.gone || all.has(node.parent));
    this.#layout = layoutTree(anchored);
    this.#drawnFor = { at: shown.at, span };
  }

  #status(node) {
    const { at, span } = this.#drawnFor;
    if (node.gone) return 'evicted';
    if (at - node.created < span) return 'new';
    if (at - node.lastUsed < span) return 'accessed';
    return 'kept';
  }

  #fill(node, status) {
    const palette = this.#palette;
    if (status === 'evicted') return css(palette.bad, 0.25);
    const by = this.#colour.value;
    if (by === 'hits') return css(palette.accent, 0.08 + 0.8 * Math.min(1, Math.log2(1 + node.hits) / 8));
    if (by === 'age') return css(palette.accent, 0.08 + 0.8 * Math.exp(-Math.max(0, this.#drawnFor.at - node.lastUsed) / 60));
    if (status === 'new') return css(palette.good, 0.8);
    if (status === 'accessed') return css(palette.accent, 0.75);
    return node.kind === 1 ? css(palette.muted, 0.6) : css(palette.cached, 1);
  }

  #paint() {
    const { context, width, height } = fit(this.#canvas);
    const { x, y, kx, ky } = this.#currentView();
    context.font = '11px ui-monospace, monospace';
    context.textBaseline = 'middle';
    for (const node of this.#layout.placed) {
      const left = PADDING + (node.x0 - x) * kx;
      const right = PADDING + (node.x1 - x) * kx;
      const top = PADDING + (node.y0 - y) * ky;
      const bottom = PADDING + (node.y1 - y) * ky;
      if (right < 0 || left > width || bottom < 0 || top > height) continue;
      this.#paintNode(context, node, { left, top, across: Math.max(1.5, right - left - 1), down: Math.max(1, bottom - top - (ky > 4 ? 1 : 0)) }, height);
    }
    if (this.#layout.placed.length) return;
    context.fillStyle = css(this.#palette.muted);
    context.fillText('No cached prefixes yet.', 16, 24);
  }

  #paintNode(context, node, { left, top, across, down }, height) {
    const palette = this.#palette;
    const status = this.#status(node);
    context.fillStyle = this.#fill(node, status);
    context.fillRect(left, top, across, down);
    if (status === 'evicted') {
      context.strokeStyle = css(palette.bad);
      context.setLineDash([3, 2]);
      context.strokeRect(left + 0.5, top + 0.5, across - 1, Math.max(1, down - 1));
      context.setLineDash([]);
    }
    if (node.kind === 2) {
      context.fillStyle = css(palette.warn);
      context.fillRect(left, top, Math.min(4, across), down);
    }
    if (node.id === this.#cursor || node.id === this.#chosen) {
      context.strokeStyle = css(palette.text);
      context.lineWidth = 2;
      context.strokeRect(left, top, across, down);
      context.lineWidth = 1;
    }
    if (down < 11 || across < 34) return;
    const sign = { new: '+ ', evicted: '× ' }[status] || '';
    const label = `${sign}${node.tokens}${node.hits && across > 70 ? ` · ${plural(node.hits, 'hit')}` : ''}${node.snapshots ? ' ◆' : ''}`;
    const strong = this.#colour.value === 'activity' && (status === 'new' || status === 'accessed');
    context.fillStyle = css(strong ? palette.surface : palette.text);
    const from = Math.max(0, top);
    context.fillText(label, Math.max(left, 0) + 6, from + (Math.min(height, top + down) - from) / 2, across - 8);
  }
}

// KV blocks as a picture: one cell for each block, or for a few where there are more blocks than room.

import { count, h, hasModifier, percent, plural } from '../dom.js';
import { STATES, holdsTokens } from './monitor.js';
import { Palette, fit, screenRatio } from './palette.js';

const FLASH_MS = 900;
const MIN_CELL = 2; // device pixels
const MAX_CELL = 28;
const LABELS = {
  free: ['Free', 'holds nothing'],
  cached: ['Cached', 'kept for later requests with the same prefix'],
  used: ['Used', 'by one running request, in its colour'],
  shared: ['Shared', 'by several running requests'],
  pinned: ['Pinned', 'not evicted until its time is over'],
  other: ['Not yours', 'free, or of other tenants'],
  host: ['On the host', 'swapped out or kept in host memory'],
};

const STATE_LABELS = { ...LABELS, cached: ['Snapshot', 'which later requests start from'] };

/** Which device pixels of a state have the second colour: the sign that is not a colour. */
const PATTERNS = {
  shared: (x, y) => (x + y) % 6 < 2,
  pinned: (x, y) => y % 5 < 2,
  other: (x, y) => (x + y) % 6 < 1 || (x - y + 6000) % 6 < 1,
  host: (x) => x % 5 < 2,
};

const pack = ([red, green, blue]) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
const mix = (one, other, share) => one.map((channel, index) => Math.round(channel + (other[index] - channel) * share));

/**
 * Cells in rows that fill the width and height: about as large as all blocks allow, or several blocks in a cell of the least size. Few blocks
 * leave room at the bottom. Cells are `across` and `down` pixels large, which need not be whole numbers.
 */
export function layoutCells(numBlocks, width, height) {
  const most = Math.floor(width / MIN_CELL) * Math.floor(height / MIN_CELL);
  const perCell = Math.max(1, Math.ceil(numBlocks / Math.max(1, most)));
  const numCells = Math.ceil(numBlocks / perCell);
  let size = Math.min(MAX_CELL, Math.max(MIN_CELL, Math.floor(Math.sqrt((width * height) / Math.max(1, numCells)))));
  const columnsOf = (one) => Math.max(1, Math.floor(width / one));
  const rowsOf = (one) => Math.max(1, Math.ceil(numCells / columnsOf(one)));
  while (size > MIN_CELL && rowsOf(size) * size > height) size -= 1;
  const exact = (whole, parts) => Math.floor((1000 * whole) / parts) / 1000;
  const [columns, rows] = [columnsOf(size), rowsOf(size)];
  const [across, down] = [exact(width, columns), Math.min(2 * size, MAX_CELL, exact(height, rows))];
  return { perCell, numCells, across, down, columns, rows };
}

/** The state that most blocks from `first` on have, as an index of the first block that has it. */
function representative(array, first, last) {
  if (last - first === 1) return first;
  const counts = new Uint16Array(STATES.length);
  for (let block = first; block < last; block += 1) counts[array.state[block]] += 1;
  const most = counts.indexOf(Math.max(...counts));
  let block = first;
  while (array.state[block] !== most) block += 1;
  return block;
}

/** One canvas of blocks, of a device pool or of a host pool. */
class BlockCanvas {
  #array = null;
  #layout = null;
  #ratio = 1;
  cursor = -1;

  #canvas;

  constructor(label, describedBy, { onPoint, onChoose, labels = LABELS }) {
    this.onPoint = onPoint;
    this.labels = labels;
    this.#canvas = h('canvas', {
      class: 'blocks-canvas', tabindex: '0', role: 'img', 'aria-label': label, 'aria-describedby': describedBy,
      onpointermove: (event) => this.#point(this.#blockAt(event)),
      onpointerleave: () => this.#point(-1),
      onblur: () => this.#point(-1),
      onclick: () => this.cursor >= 0 && onChoose(this.#array.owner[this.cursor]),
      onkeydown: (event) => this.#key(event, onChoose),
    });
    this.element = h('div', { class: 'blocks-frame' }, this.#canvas);
  }

  #blockAt(event) {
    if (!this.#layout) return -1;
    const { across, down, columns, perCell } = this.#layout;
    const column = Math.floor((event.offsetX * this.#ratio) / across);
    const block = (Math.floor((event.offsetY * this.#ratio) / down) * columns + column) * perCell;
    return column < columns && block < this.#array.state.length ? block : -1;
  }

  #point(block) {
    if (block === this.cursor) return;
    this.cursor = block;
    this.onPoint(this);
  }

  #key(event, onChoose) {
    if (!this.#layout || hasModifier(event)) return;
    const { columns, perCell } = this.#layout;
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -1e9, End: 1e9 };
    if (event.key === 'Enter' && this.cursor >= 0) onChoose(this.#array.owner[this.cursor]);
    if (!(event.key in moves)) return;
    event.preventDefault();
    const last = this.#array.state.length - 1;
    this.#point(Math.max(0, Math.min(last, Math.max(0, this.cursor) + moves[event.key] * perCell)));
  }

  get size() {
    return this.#array ? this.#array.state.length : 0;
  }

  describe(nameOf) {
    const { state, owner } = this.#array;
    const kind = STATES[state[this.cursor]];
    const last = Math.min(this.size, this.cursor + this.#layout.perCell) - 1;
    const block = last > this.cursor ? `Blocks ${count(this.cursor)}–${count(last)}, mostly` : `Block ${count(this.cursor)}:`;
    const by = owner[this.cursor] ? ` by ${nameOf(owner[this.cursor])}` : '';
    return `${block} ${this.labels[kind][0].toLowerCase()}${by}`;
  }

  ownerAtCursor() {
    return this.cursor >= 0 && this.#array ? this.#array.owner[this.cursor] : 0;
  }

  /** Returns whether a block flashes, and so has to be drawn again. */
  draw(array, palette, highlight, moves) {
    this.#array = array;
    const { clientWidth, clientHeight } = this.element;
    if (!clientWidth || !clientHeight) return false;
    this.#ratio = screenRatio();
    this.#layout = layoutCells(array.state.length, Math.round(clientWidth * this.#ratio), Math.round(clientHeight * this.#ratio));
    this.#canvas.style.height = `${Math.ceil((this.#layout.rows * this.#layout.down) / this.#ratio)}px`;
    const { context, ratio } = fit(this.#canvas);
    const { width, height } = this.#canvas;
    const image = context.createImageData(width, height);
    const flashes = this.#paint(new Uint32Array(image.data.buffer), width, palette, highlight, moves);
    context.putImageData(image, 0, 0);
    this.#drawCursor(context, palette, ratio);
    return flashes;
  }

  #paint(pixels, width, palette, highlight, moves) {
    const array = this.#array;
    const { perCell, numCells, across, down, columns } = this.#layout;
    const colours = new Map();
    const now = performance.now();
    const gap = Math.min(across, down) >= 4 ? 1 : 0;
    let flashes = false;
    for (let cell = 0; cell < numCells; cell += 1) {
      const block = representative(array, cell * perCell, Math.min(array.state.length, (cell + 1) * perCell));
      const [state, owner] = [array.state[block], array.owner[block]];
      const age = now - array.changed[block];
      const flash = moves && age < FLASH_MS && array.changed[block] > 0 ? 1 + Math.floor((3 * (FLASH_MS - age)) / FLASH_MS) : 0;
      if (flash) flashes = true;
      const key = ((owner * 8 + state) * 4 + flash) * 2 + (highlight && owner !== highlight ? 1 : 0);
      let pair = colours.get(key);
      if (!pair) colours.set(key, (pair = this.#colours(palette, state, owner, flash, highlight)));
      const pattern = PATTERNS[STATES[state]];
      const [column, line] = [cell % columns, Math.floor(cell / columns)];
      const left = Math.floor(column * across);
      const right = Math.floor((column + 1) * across) - gap;
      const bottom = Math.floor((line + 1) * down) - gap;
      for (let y = Math.floor(line * down); y < bottom; y += 1) {
        const row = y * width;
        if (!pattern) pixels.fill(pair[0], row + left, row + right);
        else for (let x = left; x < right; x += 1) pixels[row + x] = pattern(x, y) ? pair[1] : pair[0];
      }
    }
    return flashes;
  }

  #colours(palette, state, owner, flash, highlight) {
    const name = STATES[state];
    let colour = palette[name];
    if (name === 'used' || name === 'shared') colour = palette.owner(owner);
    if (name === 'pinned') colour = palette.warn;
    if (name === 'host' && owner) colour = palette.owner(owner);
    if (flash) colour = mix(colour, palette.text, 0.13 * flash);
    if (highlight && owner !== highlight) colour = mix(colour, palette.surface, 0.75);
    return [pack(colour), pack(mix(colour, palette.surface, 0.65))];
  }

  #drawCursor(context, palette, ratio) {
    if (this.cursor < 0) return;
    const { perCell, across, down, columns } = this.#layout;
    const cell = Math.floor(this.cursor / perCell);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.strokeStyle = `rgb(${palette.text})`;
    context.lineWidth = 2 * ratio;
    context.strokeRect((cell % columns) * across - 1, Math.floor(cell / columns) * down - 1, across + 1, down + 1);
  }
}

/** The panel: pool, counts of each state, device blocks and host blocks. */
export class BlockMap {
  #pool = 0;
  #monitor = null;
  #palette = new Palette();
  #select = h('select', { 'aria-label': 'Pool of blocks', onchange: () => {
    this.#pool = Number(this.#select.value);
    this.draw(this.#monitor);
  } });
  #legend = h('ul', { class: 'legend' });
  #summary = h('p', { class: 'note', id: 'blocks-summary' });
  #statesSummary = h('p', { class: 'note', id: 'states-summary' });
  #readout = h('p', { class: 'readout', 'aria-live': 'polite' });
  #still = window.matchMedia('(prefers-reduced-motion: reduce)');
  #again = 0;
  #onHighlight;
  highlight = 0;

  /** `explain(request)` is called with the request of a chosen block, `onHighlight(owner)` while one is pointed at. */
  constructor({ explain, onHighlight }) {
    this.#onHighlight = onHighlight;
    const choose = (owner) => {
      const request = this.#monitor?.byOwner.get(owner);
      if (request) explain(request);
    };
    const point = (canvas) => {
      const owner = canvas.ownerAtCursor();
      this.#readout.textContent = canvas.cursor >= 0 ? canvas.describe((one) => this.#nameOf(one)) : '';
      this.highlight = owner;
      onHighlight(owner);
      this.draw(this.#monitor);
    };
    this.device = new BlockCanvas('KV blocks on the device', 'blocks-summary', { onPoint: point, onChoose: choose });
    this.host = new BlockCanvas('KV blocks in host memory', 'blocks-summary', { onPoint: point, onChoose: choose });
    this.host.element.classList.add('host');
    this.hostBox = h('div', { class: 'host-blocks', hidden: true }, h('h3', {}, 'Host memory'), this.host.element);
    this.states = new BlockCanvas('Blocks of recurrent states on the device', 'states-summary', { onPoint: point, onChoose: choose, labels: STATE_LABELS });
    this.states.element.classList.add('host');
    this.statesBox = h('div', { class: 'host-blocks', hidden: true }, h('h3', {}, 'Recurrent states'), this.#statesSummary, this.states.element);
    this.element = h('section', { class: 'panel blocks', 'aria-labelledby': 'blocks-title' },
      h('div', { class: 'panel-head' }, h('h2', { id: 'blocks-title' }, 'KV blocks'), this.#summary, h('span', { class: 'grow' }), this.#select),
      this.#legend, this.device.element, this.hostBox, this.statesBox, this.#readout);
    document.addEventListener('themechange', () => {
      this.#palette = new Palette();
      if (this.#monitor) this.draw(this.#monitor);
    });
  }

  #nameOf(owner) {
    const request = this.#monitor.byOwner.get(owner);
    return request ? `${request.id}${request.tenant ? ` of ${request.tenant}` : ''}, ${plural(request.num_blocks, 'block')}` : `request ${owner}`;
  }

  draw(monitor) {
    if (!monitor?.pools.length) return;
    this.#monitor = monitor;
    const pools = monitor.pools.filter(holdsTokens);
    const states = monitor.pools.find((one) => !holdsTokens(one));
    const pool = pools[this.#pool] || pools[0];
    if (this.highlight && !monitor.pools.some(({ device, host }) => device.owner.includes(this.highlight) || host.owner.includes(this.highlight))) {
      this.highlight = 0; // its request ended under the pointer
      this.#onHighlight(0);
    }
    this.#drawSelect(pools);
    this.hostBox.hidden = !pool.num_host_blocks;
    const moves = !this.#still.matches && pool.num_blocks <= 40_000;
    let flashes = this.device.draw(pool.device, this.#palette, this.highlight, moves);
    if (pool.num_host_blocks) flashes = this.host.draw(pool.host, this.#palette, this.highlight, moves) || flashes;
    this.statesBox.hidden = !states;
    if (states) flashes = this.#drawStates(states, monitor, moves) || flashes;
    this.#drawCounts(pool, monitor);
    clearTimeout(this.#again);
    if (flashes && this.element.isConnected) this.#again = setTimeout(() => this.draw(this.#monitor), FLASH_MS);
  }

  #drawSelect(pools) {
    this.#select.hidden = pools.length < 2;
    if (this.#select.options.length === pools.length) return;
    this.#select.replaceChildren(...pools.map((pool, index) => h('option', { value: index }, pool.name)));
  }

  #drawStates(states, monitor, moves) {
    const free = `${count(states.num_free)} ${monitor.sees === 'own' ? 'not yours' : 'free'}`;
    const used = states.num_blocks - states.num_free - states.num_idle;
    this.#statesSummary.textContent = `${count(states.num_blocks)} blocks: ${count(used)} of running requests, ${plural(states.num_idle, 'snapshot')}, ${free}`;
    return this.states.draw(states.device, this.#palette, this.highlight, moves);
  }

  #drawCounts(pool, monitor) {
    const counts = pool.device.counts();
    counts[STATES.indexOf('host')] = pool.num_host_used;
    const items = STATES.filter((name, index) => counts[index] || !['other', 'host', 'pinned'].includes(name) || (name === 'other' && monitor.sees === 'own') || (name === 'host' && pool.num_host_blocks));
    this.#legend.replaceChildren(...items.map((name) => h('li', { title: LABELS[name][1] },
      h('span', { class: `swatch ${name}`, 'aria-hidden': 'true' }), LABELS[name][0], ' ', h('b', {}, count(counts[STATES.indexOf(name)])))));
    const used = counts[2] + counts[3] + counts[4];
    const share = (number, what) => `${percent(number, pool.num_blocks)} ${what}`;
    const rest = monitor.sees === 'own' ? share(counts[5], 'not yours') : share(counts[0], 'free');
    this.#summary.textContent = `${count(pool.num_blocks)} blocks of ${pool.block_size} tokens: ${share(used, 'in use')}, ${share(counts[1], 'cached')}, ${rest}`;
  }
}

// Rates, latencies and hit rate: a number and a small chart each.

import { h, percent, seconds, short } from '../dom.js';
import { hitRates, quantile, rates } from './monitor.js';
import { Palette, css, fit } from './palette.js';

const SHOWN = 120; // points of a chart

class Tile {
  #value = h('p', { class: 'tile-value' });
  #note = h('p', { class: 'tile-note' });
  #canvas = h('canvas', { class: 'spark', 'aria-hidden': 'true' });

  constructor(label) {
    this.element = h('div', { class: 'tile' }, h('h2', {}, label), this.#value, this.#note, this.#canvas);
  }

  draw(palette, { value, note, points, second, top }) {
    this.#value.textContent = value;
    this.#note.textContent = note || '';
    const { context, width, height } = fit(this.#canvas);
    const highest = top || Math.max(1e-9, ...points, ...(second || [])) * 1.1;
    const line = (list, colour, filled) => {
      if (list.length < 2) return;
      const across = width / (SHOWN - 1);
      context.beginPath();
      list.forEach((one, index) => context.lineTo(width - (list.length - 1 - index) * across, height - 1 - (height - 3) * Math.min(1, one / highest)));
      context.strokeStyle = colour;
      context.lineWidth = 1.5;
      context.stroke();
      if (!filled) return;
      context.lineTo(width, height);
      context.lineTo(width - (list.length - 1) * across, height);
      context.fillStyle = css(palette.accent, 0.12);
      context.fill();
    };
    if (second) line(second.slice(-SHOWN), css(palette.muted));
    line(points.slice(-SHOWN), css(palette.accent), true);
  }
}

const last = (points) => (points.length ? points.at(-1) : 0);

/** The mean of each point and those of `span` before it: rates of single updates jump too much to be read. */
function smooth(points, span = 4) {
  return points.map((_, index) => {
    const part = points.slice(Math.max(0, index - span + 1), index + 1);
    return part.reduce((sum, one) => sum + one, 0) / part.length;
  });
}

export class Charts {
  #palette = new Palette();
  #tiles = {
    output: new Tile('Output'), prompt: new Tile('Prompts'), hits: new Tile('Prefix hit rate'), memory: new Tile('KV memory'),
    load: new Tile('Running and waiting'), step: new Tile('Step'), first: new Tile('First token'),
  };

  constructor() {
    this.element = h('section', { class: 'tiles', 'aria-label': 'Figures' }, Object.values(this.#tiles).map((tile) => tile.element));
    document.addEventListener('themechange', () => (this.#palette = new Palette()));
  }

  /** `interval` is the time between updates in seconds; null for a replay, which has one for each step. */
  draw({ samples, steps, firstTokens, numRunning, numWaiting, sees, others }, interval) {
    const [palette, tiles] = [this.#palette, this.#tiles];
    const output = smooth(rates(samples, 'output_tokens').map((point) => point.value));
    const prompt = smooth(rates(samples, 'prompt_tokens', 'cached_tokens').map((point) => point.value));
    tiles.output.draw(palette, { value: short(last(output)), note: 'tokens/s', points: output });
    tiles.prompt.draw(palette, { value: short(last(prompt)), note: 'tokens/s', points: prompt });
    const hits = hitRates(samples).map((point) => point.value);
    const totals = samples.at(-1)?.totals;
    tiles.hits.draw(palette, { value: hits.length ? percent(last(hits), 1) : '–', note: totals ? `${percent(totals.cached_tokens, totals.queried_tokens)} since start` : '', points: hits, top: 1 });
    const used = samples.map((sample) => sample.used);
    tiles.memory.draw(palette, { value: percent(last(used), 1), note: `in use, ${percent(samples.at(-1)?.cached || 0, 1)} cached`, points: used, second: samples.map((sample) => sample.used + sample.cached), top: 1 });
    const waiting = samples.map((sample) => sample.waiting);
    tiles.load.draw(palette, { value: `${numRunning} + ${numWaiting}`, note: sees === 'own' ? `and ${others.running} + ${others.waiting} of others` : 'requests', points: samples.map((sample) => sample.running), second: waiting });
    const measured = steps.map((step) => step.measured).filter((value) => value !== null);
    tiles.step.draw(palette, { value: seconds(quantile(measured, 0.5)), note: `median, p95 ${seconds(quantile(measured, 0.95))}`, points: measured });
    tiles.first.draw(palette, { value: seconds(quantile(firstTokens, 0.5)), note: `median, p95 ${seconds(quantile(firstTokens, 0.95))}${interval ? `, ±\u00a0${seconds(interval).replace(' ', '\u00a0')}` : ''}`, points: firstTokens });
  }
}

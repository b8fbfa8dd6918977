// The last steps: tokens by kind above, predicted and measured seconds below.

import { count, h, hasModifier, plural, seconds } from '../dom.js';
import { quantile } from './monitor.js';
import { Palette, css, fit } from './palette.js';

const MAX_STEPS = 256;
const LEFT = 44;
const GAP = 22;

/** Pixels of a number of tokens: by the square root, so that a decode step is seen beside a prompt. */
const rooted = (value, top, height) => (height * Math.sqrt(value)) / Math.sqrt(Math.max(1, top));

export class Timeline {
  #palette = new Palette();
  #monitor = null;
  #cursor = -1;
  #summary = h('p', { class: 'note', id: 'steps-summary' });
  #readout = h('p', { class: 'readout', 'aria-live': 'polite' });
  #canvas = h('canvas', {
    class: 'steps-canvas', tabindex: '0', role: 'img', 'aria-label': 'The last steps', 'aria-describedby': 'steps-summary',
    onpointermove: (event) => this.#point(this.#stepAt(event.offsetX)),
    onpointerleave: () => this.#point(-1),
    onkeydown: (event) => this.#key(event),
  });

  constructor() {
    const legend = [['prompt', 'prompt'], ['decode', 'decode'], ['accepted', 'accepted drafts'], ['rejected', 'rejected drafts'], ['measured', 'measured seconds'], ['predicted', 'predicted'], ['preempted', '▼ preemption']];
    this.element = h('section', { class: 'panel steps', 'aria-labelledby': 'steps-title' },
      h('div', { class: 'panel-head' }, h('h2', { id: 'steps-title' }, 'Steps'), this.#summary),
      h('ul', { class: 'legend' }, legend.map(([name, text]) => h('li', {}, h('span', { class: `swatch step-${name}`, 'aria-hidden': 'true' }), text))),
      this.#canvas, this.#readout);
    document.addEventListener('themechange', () => {
      this.#palette = new Palette();
      if (this.#monitor) this.draw(this.#monitor);
    });
  }

  #barWidth() {
    return (this.#canvas.clientWidth - LEFT) / MAX_STEPS;
  }

  #stepAt(left) {
    const steps = this.#monitor?.steps || [];
    const index = Math.floor((left - LEFT) / this.#barWidth()) - (MAX_STEPS - steps.length);
    return index >= 0 && index < steps.length ? index : -1;
  }

  #key(event) {
    const move = { ArrowRight: 1, ArrowLeft: -1, Home: -MAX_STEPS, End: MAX_STEPS }[event.key];
    const last = (this.#monitor?.steps.length || 0) - 1;
    if (move === undefined || last < 0 || hasModifier(event)) return;
    event.preventDefault();
    this.#point(Math.max(0, Math.min(last, (this.#cursor < 0 ? last + 1 : this.#cursor) + move)));
  }

  #point(index) {
    if (index === this.#cursor) return;
    this.#cursor = index;
    const step = this.#monitor.steps[index];
    this.#readout.textContent = step ? this.#describe(step) : '';
    this.draw(this.#monitor);
  }

  #describe(step) {
    const parts = [`Step ${count(step.id)}`, plural(step.sequences, 'sequence'), `${step.prompt} prompt + ${step.decode} decode tokens`];
    if (step.drafts) parts.push(`${step.accepted} of ${plural(step.drafts, 'draft')} accepted`);
    if (step.predicted !== null) parts.push(`predicted ${seconds(step.predicted)}`);
    if (step.measured !== null) parts.push(`took ${seconds(step.measured)}`);
    if (step.waiting) parts.push(`${step.waiting} waiting`);
    if (step.preemptions) parts.push(plural(step.preemptions, 'preemption'));
    if (step.evicted) parts.push(`${plural(step.evicted, 'block')} evicted`);
    return parts.join(' · ');
  }

  draw(monitor) {
    this.#monitor = monitor;
    const { steps } = monitor;
    const { context, width, height } = fit(this.#canvas);
    const half = Math.floor((height - GAP) * 0.58);
    const totals = steps.map((step) => step.prompt + step.decode + step.drafts);
    const topTokens = Math.max(16, ...totals);
    const times = steps.flatMap((step) => [step.predicted, step.measured]).filter((value) => value !== null);
    const topSeconds = Math.max(1e-6, 1.15 * (quantile(times, 0.98) || 1e-3));
    this.#axes(context, { width, half, height, topTokens, topSeconds });
    const bar = this.#barWidth();
    steps.forEach((step, index) => {
      const left = LEFT + (MAX_STEPS - steps.length + index) * bar;
      this.#bar(context, step, { left, bar, half, topTokens });
      this.#times(context, step, { left, bar, from: half + GAP, height, topSeconds });
      if (index === this.#cursor) {
        context.fillStyle = css(this.#palette.text, 0.16);
        context.fillRect(left, 0, bar, height);
      }
    });
    this.#summarize(steps);
  }

  #axes(context, { width, half, height, topTokens, topSeconds }) {
    context.font = '11px ui-monospace, monospace';
    context.fillStyle = css(this.#palette.muted);
    context.strokeStyle = css(this.#palette.line);
    context.textAlign = 'right';
    const line = (y, text) => {
      context.beginPath();
      context.moveTo(LEFT, Math.round(y) + 0.5);
      context.lineTo(width, Math.round(y) + 0.5);
      context.stroke();
      context.fillText(text, LEFT - 6, Math.min(height - 2, y + 4));
    };
    for (let tokens = 4; tokens <= topTokens; tokens *= 4) {
      if (rooted(tokens, topTokens, half) > 14) line(half - rooted(tokens, topTokens, half - 6), String(tokens));
    }
    line(half, '0');
    line(height - 1, '0');
    line(half + GAP + 6, seconds(topSeconds));
    context.textAlign = 'left';
  }

  #bar(context, step, { left, bar, half, topTokens }) {
    const palette = this.#palette;
    const total = step.prompt + step.decode + step.drafts;
    const high = rooted(total, topTokens, half - 6);
    const parts = [[step.decode, css(palette.accent)], [step.prompt, css(palette.muted)], [step.accepted, css(palette.good)], [step.drafts - step.accepted, css(palette.bad, 0.55)]];
    let bottom = half;
    for (const [tokens, colour] of parts) {
      if (tokens <= 0) continue;
      const part = (high * tokens) / total;
      context.fillStyle = colour;
      context.fillRect(left, bottom - part, Math.max(1, bar - (bar > 3 ? 1 : 0)), part);
      bottom -= part;
    }
    if (!step.preemptions) return;
    const middle = left + bar / 2;
    context.fillStyle = css(palette.bad);
    context.beginPath();
    context.moveTo(middle - 5, half + 4);
    context.lineTo(middle + 5, half + 4);
    context.lineTo(middle, half + 13);
    context.fill();
  }

  #times(context, step, { left, bar, from, height, topSeconds }) {
    const room = height - from - 6;
    const y = (value) => height - Math.min(room, (room * value) / topSeconds);
    if (step.measured !== null) {
      context.fillStyle = css(this.#palette.accent, 0.45);
      context.fillRect(left, y(step.measured), Math.max(1, bar - (bar > 3 ? 1 : 0)), height - y(step.measured));
    }
    if (step.predicted === null) return;
    context.fillStyle = css(this.#palette.text);
    context.fillRect(left, y(step.predicted) - 1, bar, 1.6);
  }

  #summarize(steps) {
    const known = steps.filter((step) => step.measured !== null && step.predicted !== null);
    const parts = [`the last ${count(steps.length)}`];
    if (known.length) {
      const errors = known.map((step) => Math.abs(step.measured - step.predicted) / Math.max(1e-9, step.measured));
      parts.push(`median ${seconds(quantile(known.map((step) => step.measured), 0.5))}, prediction off by ${(100 * quantile(errors, 0.5)).toFixed(0)} %`);
    }
    const preemptions = steps.reduce((sum, step) => sum + step.preemptions, 0);
    if (preemptions) parts.push(plural(preemptions, 'preemption'));
    this.#summary.textContent = parts.join('; ');
  }
}

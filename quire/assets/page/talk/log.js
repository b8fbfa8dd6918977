// The messages of a conversation in a part of the page that scrolls: it follows an answer that grows, and reads it out.

import { h, icon } from '../dom.js';

const ANNOUNCE_MS = 1500;
const NEAR = 80; // pixels from the end within which the log follows

export class Log {
  #scroll = h('div', { class: 'log', role: 'region', 'aria-label': 'Conversation', tabindex: '0', onscroll: () => this.#look() });
  #jump = h('button', { type: 'button', class: 'round jump', 'aria-label': 'To the latest message', title: 'To the latest message', hidden: true, onclick: () => this.toEnd() }, icon('down'));
  #spoken = h('div', { class: 'offscreen', 'aria-live': 'polite' });
  #follows = true;

  constructor() {
    this.element = h('div', { class: 'log-frame' }, this.#scroll, this.#jump, this.#spoken);
    new ResizeObserver(() => this.follow()).observe(this.#scroll);
  }

  show(elements) {
    this.#scroll.replaceChildren(h('div', { class: 'column' }, elements));
    this.toEnd();
  }

  /** Adds messages below the others. */
  append(elements) {
    this.#scroll.firstChild.append(...elements);
  }

  say(text) {
    this.#spoken.append(h('p', {}, text));
    while (this.#spoken.childElementCount > 20) this.#spoken.firstChild.remove();
  }

  toEnd() {
    this.#follows = true;
    this.follow();
  }

  /** After a change: stays at the end, unless the person has scrolled up. */
  follow() {
    if (this.#follows) this.#scroll.scrollTop = this.#scroll.scrollHeight;
    this.#look();
  }

  #look() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroll;
    this.#follows = scrollHeight - scrollTop - clientHeight < NEAR;
    this.#jump.hidden = this.#follows;
  }

  /** `draw()` draws the run of `view` at most once a frame, and less often where text takes long to draw; `end()` reads the rest. */
  painter(view, run) {
    let frame = 0;
    let timer = 0;
    let isStale = false; // whether something has arrived since the last paint
    let spokenUntil = run.node.content.length;
    let spokenAt = performance.now();
    const paint = () => {
      frame = timer = 0;
      if (!isStale) return;
      isStale = false;
      const begin = performance.now();
      const { content } = run.node;
      view.grow(run.node, run.answer);
      this.follow();
      if (begin - spokenAt > ANNOUNCE_MS && content.length > spokenUntil) {
        this.say(content.slice(spokenUntil));
        [spokenUntil, spokenAt] = [content.length, begin];
      }
      const cost = performance.now() - begin;
      if (cost > 8) timer = setTimeout(paint, cost * 5);
    };
    const cancel = () => {
      cancelAnimationFrame(frame);
      clearTimeout(timer);
    };
    return {
      cancel,
      draw: () => {
        isStale = true;
        if (!timer) frame ||= requestAnimationFrame(paint);
      },
      end: () => {
        cancel();
        if (run.node.content.length > spokenUntil) this.say(run.node.content.slice(spokenUntil));
      },
    };
  }
}

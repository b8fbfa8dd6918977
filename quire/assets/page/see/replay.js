// The steps of a journal: a slider, one step forwards or backwards, play and pause.

import { count, h, hasModifier, icon } from '../dom.js';
import { ReplaySource } from './sources.js';

const SPEEDS = [[2, '2 steps/s'], [10, '10 steps/s'], [50, '50 steps/s']];

export class ReplayBar {
  #source = new ReplaySource();
  #onUpdates;
  #onBack;
  #index = 0;
  #shown = null;
  #timer = 0;
  #isSeeking = false;
  #play = h('button', { type: 'button', onclick: () => this.#toggle() });
  #slider = h('input', { type: 'range', min: 0, max: 0, value: 0, 'aria-label': 'Step', oninput: () => this.#seek(Number(this.#slider.value)) });
  #place = h('output', { class: 'mono' });
  #problem = h('span', { class: 'problem', role: 'alert' });
  #speed = h('select', { 'aria-label': 'Speed', onchange: () => this.#timer && this.#start() }, SPEEDS.map(([value, text]) => h('option', { value, selected: value === 10 }, text)));

  /** `onUpdates(list)` gets the updates that lead to a step; `onBack()` comes before those that start anew at an earlier one. */
  constructor(onUpdates, onBack) {
    this.#onUpdates = onUpdates;
    this.#onBack = onBack;
    const move = (by, name, label) => h('button', { type: 'button', 'aria-label': label, onclick: () => this.#seek(this.#index + by) }, icon(name));
    this.element = h('div', { class: 'see-bar replay-bar', role: 'group', 'aria-label': 'Replay' }, move(-1, 'left', 'One step back'), this.#play, move(1, 'right', 'One step on'),
      this.#slider, this.#place, this.#speed, this.#problem);
    this.#drawPlay();
    document.addEventListener('keydown', (event) => this.#key(event));
  }

  /** The step that is shown. */
  get step() {
    return this.#shown ?? 0;
  }

  async show() {
    try {
      await this.#source.open();
      this.#slider.max = Math.max(0, this.#source.numSteps - 1);
      await this.#seek(this.#index);
    } catch (error) {
      this.#problem.textContent = error.message;
    }
  }

  #key(event) {
    if (!this.element.isConnected || hasModifier(event)) return;
    if (!['BODY', 'MAIN', 'A'].includes(event.target.tagName)) return; // other controls have arrow keys of their own
    const moves = { ArrowRight: 1, ArrowLeft: -1, PageDown: 64, PageUp: -64, Home: -this.#source.numSteps, End: this.#source.numSteps };
    if (event.key === ' ' && event.target.tagName !== 'A') this.#toggle();
    else if (event.key in moves) this.#seek(this.#index + moves[event.key]);
    else return;
    event.preventDefault();
  }

  #toggle() {
    if (this.#timer) this.#stop();
    else this.#start();
    this.#drawPlay();
  }

  #start() {
    this.#stop();
    if (this.#index >= this.#source.numSteps - 1) this.#index = -1;
    this.#timer = setInterval(() => {
      if (this.#isSeeking) return;
      if (this.#index + 1 < this.#source.numSteps) this.#seek(this.#index + 1);
      else this.#toggle();
    }, 1000 / Number(this.#speed.value));
  }

  #stop() {
    clearInterval(this.#timer);
    this.#timer = 0;
  }

  #drawPlay() {
    this.#play.replaceChildren(icon(this.#timer ? 'pause' : 'play'), this.#timer ? 'Pause' : 'Play');
  }

  /** Goes to a step. Of several calls while one is under way, only the last counts. */
  async #seek(index) {
    this.#index = Math.max(0, Math.min(this.#source.numSteps - 1, index));
    this.#slider.value = this.#index;
    this.#place.textContent = `step ${count(this.#index + 1)} of ${count(this.#source.numSteps)}`;
    if (this.#isSeeking) return;
    this.#isSeeking = true;
    while (this.#shown !== this.#index) {
      const target = this.#index;
      try {
        const updates = await this.#source.updatesTo(target, this.#shown);
        if (this.#shown !== null && target < this.#shown) this.#onBack();
        this.#onUpdates(updates);
        this.#shown = target;
        this.#problem.textContent = '';
      } catch (error) {
        this.#problem.textContent = error.message;
        break;
      }
    }
    this.#isSeeking = false;
  }
}

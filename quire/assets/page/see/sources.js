// Where updates come from: the live stream of a server, or the steps of a journal.

import { getJSON, streamJSON } from '../api.js';

const RETRY_SECONDS = [1, 2, 5, 10];

/** The stream of an engine of a server. `onUpdates(list)` gets what arrived together, `onStatus(status, text)` how the stream is. */
export class LiveSource {
  #abort = null;
  #engine;
  #onUpdates;
  #onStatus;

  constructor(engine, onUpdates, onStatus) {
    this.#engine = engine;
    this.#onUpdates = onUpdates;
    this.#onStatus = onStatus;
  }

  async start(interval) {
    this.stop();
    const abort = new AbortController();
    this.#abort = abort;
    for (let tries = 0; !abort.signal.aborted; tries += 1) {
      this.#onStatus('connecting', 'Connecting…');
      try {
        for await (const { events } of streamJSON(`monitor?interval=${interval}&engine=${this.#engine}`, { signal: abort.signal })) {
          if (abort.signal.aborted) return;
          if (!events.length) continue;
          const failed = events.find((event) => event.error);
          if (failed) throw new Error(failed.error.message);
          tries = 0;
          this.#onStatus('live', 'Live');
          this.#onUpdates(events);
        }
        this.#onStatus('lost', 'The stream ended. Trying again…');
      } catch (error) {
        if (abort.signal.aborted) return;
        this.#onStatus('lost', error.message);
        if ([401, 403, 404].includes(error.status)) return;
      }
      await new Promise((resolve) => setTimeout(resolve, 1000 * RETRY_SECONDS[Math.min(tries, RETRY_SECONDS.length - 1)]));
    }
  }

  stop() {
    this.#abort?.abort();
    this.#abort = null;
  }
}

const CHUNK = 64;
const MAX_CHUNKS = 16;

/** The updates of `CHUNK` steps from `first` on, or up to the last step. The server gives fewer at once if they are large. */
async function readChunk(first) {
  const steps = [];
  for (;;) {
    const answer = await getJSON(`monitor/steps?first=${first + steps.length}&count=${CHUNK - steps.length}`);
    steps.push(...answer.steps);
    if (steps.length >= CHUNK || first + steps.length >= answer.num_steps) return { num_steps: answer.num_steps, steps };
  }
}

/** The steps of a journal, read in chunks of which the first update is whole. */
export class ReplaySource {
  #chunks = new Map();
  numSteps = 0;

  async #chunk(number) {
    if (!this.#chunks.has(number)) {
      const answer = readChunk(number * CHUNK);
      this.#chunks.set(number, answer);
      answer.catch(() => this.#chunks.delete(number));
      if (this.#chunks.size > MAX_CHUNKS) this.#chunks.delete(this.#chunks.keys().next().value);
    }
    return this.#chunks.get(number);
  }

  async open() {
    this.numSteps = (await this.#chunk(0)).num_steps;
  }

  /** The updates that lead to step `index`: from a whole one, or only what follows step `shown` if that is in the same chunk. */
  async updatesTo(index, shown) {
    const number = Math.floor(index / CHUNK);
    const { steps } = await this.#chunk(number);
    const first = number * CHUNK;
    if (index % CHUNK > CHUNK / 2 && (number + 1) * CHUNK < this.numSteps) this.#chunk(number + 1).catch(() => {});
    const goesOn = shown !== null && shown < index && shown >= first;
    return steps.slice(goesOn ? shown - first + 1 : 0, index - first + 1);
  }
}

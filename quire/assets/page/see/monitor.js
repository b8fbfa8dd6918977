// What the updates of the engine add up to: blocks, tree, requests, steps, and a bounded history of each.

const MAX_STEPS = 256;
const MAX_SNAPSHOTS = 300;
const MAX_SAMPLES = 600;
const MAX_FINISHED = 100;
const MAX_EVICTED = 2000;

export const STATES = ['free', 'cached', 'used', 'shared', 'pinned', 'other', 'host'];
const LETTERS = { F: 0, C: 1, U: 2, S: 3, P: 4, O: 5, H: 6 };

/** Yields `[state, owner, count]` of runs such as `F*120,U:3*4,C*7`; `state` is an index of STATES, `owner` 0 for none. */
export function* readRuns(text) {
  if (!text) return;
  for (const run of text.split(',')) {
    const match = /^([A-Z])(?::(\d+))?(?:\*(\d+))?$/.exec(run);
    if (!match || !(match[1] in LETTERS)) throw new Error(`unreadable run of blocks: ${run}`);
    yield [LETTERS[match[1]], Number(match[2] || 0), Number(match[3] || 1)];
  }
}

/** Whether a pool has KV blocks; the others have blocks of recurrent states. */
export const holdsTokens = (pool) => pool.block_size > 0;

export const sequenceKey = (request) => `${request.id} ${request.seq}`;

class BlockArray {
  constructor(numBlocks) {
    this.state = new Uint8Array(numBlocks);
    this.owner = new Int32Array(numBlocks);
    this.changed = new Float64Array(numBlocks); // performance.now() of the last change
  }

  apply(first, runs, time) {
    let block = first;
    for (const [state, owner, count] of readRuns(runs)) {
      const end = Math.min(block + count, this.state.length);
      for (; block < end; block += 1) {
        if (this.state[block] === state && this.owner[block] === owner) continue;
        this.state[block] = state;
        this.owner[block] = owner;
        this.changed[block] = time;
      }
    }
  }

  /** Blocks of each state, as a list beside STATES. */
  counts() {
    const counts = new Array(STATES.length).fill(0);
    for (const state of this.state) counts[state] += 1;
    return counts;
  }
}

const nodeOf = ([id, parent, tokens, blocks, hits, users, lastUsed, created, kind, text, snapshots]) =>
  ({ id, parent, tokens, blocks, hits, users, lastUsed, created, kind, text, snapshots });

const stepOf = ([id, at, predicted, measured, prompt, decode, drafts, accepted, sequences, waiting, preemptions, evicted]) =>
  ({ id, at, predicted, measured, prompt, decode, drafts, accepted, sequences, waiting, preemptions, evicted });

export class Monitor {
  constructor() {
    this.pools = []; // the update's pools, each with `device` and `host`: BlockArray
    this.clear();
  }

  /** Forgets all but the blocks, which the next whole update compares with. */
  clear() {
    this.at = 0;
    this.step = 0;
    this.sees = 'all';
    this.requests = [];
    this.byOwner = new Map();
    this.finished = []; // the last ones that left, newest first
    this.firstTokens = []; // seconds from arrival to the update with the first output, of requests that were seen to start
    this.others = { running: 0, waiting: 0 };
    this.numRunning = 0;
    this.numWaiting = 0;
    this.nodes = new Map();
    this.numNodes = 0;
    this.evicted = []; // {node, at}
    this.snapshots = []; // {at, nodes, evicted}, about one a second
    this.steps = [];
    this.samples = []; // {at, totals, running, waiting, used}
    this.totals = null;
  }

  apply(update, now = performance.now()) {
    if (update.full && this.#isOlder(update)) this.clear(); // the engine was restarted, or a replay goes back
    const before = this.at;
    this.at = update.at;
    this.step = update.step;
    this.sees = update.sees;
    this.#applyPools(update, now);
    this.#applyRequests(update, before);
    if (update.tree) this.#applyTree(update.tree, update.full);
    this.#applySteps(update);
    this.totals = update.totals;
    this.#sample();
  }

  #isOlder({ at, totals }) {
    return at < this.at || Object.entries(totals).some(([name, value]) => value < this.totals?.[name]);
  }

  #applyPools(update, now) {
    const time = this.pools.length ? now : 0;
    this.pools = update.pools.map((pool, index) => {
      const old = this.pools[index];
      const kept = old && old.num_blocks === pool.num_blocks && old.num_host_blocks === pool.num_host_blocks;
      return { ...pool, device: kept ? old.device : new BlockArray(pool.num_blocks), host: kept ? old.host : new BlockArray(pool.num_host_blocks) };
    });
    for (const [pool, first, runs] of update.blocks || []) this.pools[pool].device.apply(first, runs, time);
    for (const [pool, first, runs] of update.host_blocks || []) this.pools[pool].host.apply(first, runs, time);
  }

  #applyRequests(update, lastAt) {
    const left = new Map(this.requests.map((request) => [sequenceKey(request), request]));
    for (const request of update.requests) {
      const before = left.get(sequenceKey(request));
      const hadNone = before ? !before.num_output : request.since >= lastAt;
      if (!update.full && hadNone && request.num_output) this.firstTokens.push(update.at - request.since);
      left.delete(sequenceKey(request));
    }
    for (const request of left.values()) this.finished.unshift({ ...request, owner: 0, left: update.at });
    this.finished.length = Math.min(this.finished.length, MAX_FINISHED);
    this.firstTokens.splice(0, this.firstTokens.length - MAX_STEPS);
    this.requests = update.requests;
    this.byOwner = new Map(update.requests.filter((one) => one.owner).map((one) => [one.owner, one]));
    this.others = update.others || this.others;
    this.numRunning = update.num_running;
    this.numWaiting = update.num_waiting;
  }

  #applyTree(tree, isFull) {
    const kept = new Set(isFull ? tree.nodes.map((row) => row[0]) : []);
    const gone = isFull ? [...this.nodes.keys()].filter((id) => !kept.has(id)) : tree.evicted || [];
    for (const id of gone) {
      const node = this.nodes.get(id);
      if (!node) continue;
      this.nodes.delete(id);
      if (!isFull || tree.shown === tree.num_nodes) this.evicted.push({ node, at: this.at });
    }
    for (const id of tree.hidden || []) this.nodes.delete(id);
    this.evicted.splice(0, this.evicted.length - MAX_EVICTED);
    for (const row of tree.nodes || []) this.nodes.set(row[0], nodeOf(row));
    this.numNodes = tree.num_nodes;
    const last = this.snapshots.at(-1);
    if (last && this.at - last.at < 1) return;
    this.snapshots.push({ at: this.at, nodes: [...this.nodes.values()], evicted: this.evicted.filter((one) => this.at - one.at < 60) });
    this.snapshots.splice(0, this.snapshots.length - MAX_SNAPSHOTS);
  }

  #applySteps(update) {
    const added = (update.steps || []).map(stepOf); // new ones, and earlier ones whose seconds are known now
    const byId = new Map([...(update.full ? [] : this.steps), ...added].map((step) => [step.id, step]));
    this.steps = [...byId.values()].sort((a, b) => a.id - b.id);
    this.steps.splice(0, this.steps.length - MAX_STEPS);
  }

  #sample() {
    const pools = this.pools.filter(holdsTokens);
    const used = pools.reduce((sum, pool) => sum + pool.num_blocks - pool.num_free - pool.num_idle, 0);
    const all = pools.reduce((sum, pool) => sum + pool.num_blocks, 0);
    const cached = pools.reduce((sum, pool) => sum + pool.num_idle, 0);
    const sample = { at: this.at, totals: this.totals, running: this.numRunning, waiting: this.numWaiting, used: all ? used / all : 0, cached: all ? cached / all : 0 };
    const last = this.samples.at(-1);
    if (last && this.at - last.at < 0.5) return;
    this.samples.push(sample);
    this.samples.splice(0, this.samples.length - MAX_SAMPLES);
  }

  /** The tree as it was at a time: the last snapshot before it, or now's for null. */
  treeAt(at) {
    const now = { at: this.at, nodes: [...this.nodes.values()], evicted: this.evicted };
    if (at === null) return now;
    return this.snapshots.findLast((snapshot) => snapshot.at <= at) || this.snapshots[0] || now;
  }
}

/** What a counter, without its part `part`, grew by between two samples, per second: `[{at, value}]`. */
export function rates(samples, field, part) {
  const total = ({ totals }) => totals[field] - (part ? totals[part] : 0);
  const points = [];
  for (let index = 1; index < samples.length; index += 1) {
    const [before, after] = [samples[index - 1], samples[index]];
    const time = after.at - before.at;
    if (time > 0) points.push({ at: after.at, value: Math.max(0, total(after) - total(before)) / time });
  }
  return points;
}

/** The share of queried prompt tokens that were cached, over the last `span` seconds at each sample that had any. */
export function hitRates(samples, span = 10) {
  const points = [];
  let from = 0;
  for (let index = 1; index < samples.length; index += 1) {
    while (samples[index].at - samples[from].at > span && from < index - 1) from += 1;
    const queried = samples[index].totals.queried_tokens - samples[from].totals.queried_tokens;
    if (queried > 0) points.push({ at: samples[index].at, value: (samples[index].totals.cached_tokens - samples[from].totals.cached_tokens) / queried });
  }
  return points;
}

export function quantile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((one, other) => one - other);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

// Answers that are being generated, in any conversation. Each goes on until it ends or is stopped, whatever the page shows.

import { requestAnswer } from './answer.js';
import { hasText, keepConversation } from './conversations.js';

const KEEP_MS = 3000; // between two times at which a growing answer is kept
const MAX_TOKENS = 100_000; // that are known with their probabilities

export class Runs {
  #running = new Map(); // message id -> {conversation, node, abort, answer, keptAt}
  #answers = new Map(); // message id -> Answer, for the tokens and requests of this page's lifetime
  #onGrow;
  #onKept;
  #onEnd;
  #isLeaving = false; // the browser breaks streams off then, and that is no error

  /**
   * `onGrow(run)` is called after each arrival, `onKept(note)` when a growing answer was kept, and `onEnd(run, note)` at the end, both with
   * what a person should know of the keeping.
   */
  constructor({ onGrow, onKept, onEnd }) {
    this.#onGrow = onGrow;
    this.#onKept = onKept;
    this.#onEnd = onEnd;
    window.addEventListener('beforeunload', () => {
      this.#isLeaving = true;
      setTimeout(() => (this.#isLeaving = false), 2000); // the person may stay
    });
    window.addEventListener('pagehide', () => {
      this.#isLeaving = true;
      for (const run of this.#running.values()) this.#keep(run);
    });
    window.addEventListener('pageshow', () => (this.#isLeaving = false));
  }

  /** The run of a message that is being generated, or undefined. */
  get(id) {
    return this.#running.get(id);
  }

  /** The runs of a conversation. */
  of(conversationId) {
    return [...this.#running.values()].filter((run) => run.conversation.id === conversationId);
  }

  conversations() {
    return [...this.#running.values()].map((run) => run.conversation);
  }

  /** What is known of an answer that this page has asked for, or undefined. */
  answerOf(id) {
    return this.#answers.get(id);
  }

  stop(run) {
    run.abort.abort();
  }

  /** Begins an answer below `parent`, and returns its message. `problemOf(answer)` has the words for an error. */
  start(conversation, parent, body, problemOf) {
    const node = conversation.add(parent, { role: 'assistant', content: '', reasoning: '', partial: true });
    const run = { conversation, node, abort: new AbortController(), answer: null, keptAt: Date.now() };
    this.#running.set(node.id, run);
    this.#finish(run, body, problemOf);
    return node;
  }

  async #finish(run, body, problemOf) {
    const { conversation, node } = run;
    const answer = await requestAnswer(body, run.abort.signal, (grown) => this.#grow(run, grown));
    if (answer.error && this.#isLeaving) Object.assign(answer, { error: null, finish: 'stopped' });
    Object.assign(node, answer.message(), answer.error ? { error: problemOf(answer) } : {});
    delete node.partial;
    this.#running.delete(node.id);
    this.#remember(node.id, answer, body);
    if (node.finish === 'stopped' && !hasText(node)) conversation.remove(node.id);
    this.#onEnd(run, keepConversation(conversation));
  }

  #grow(run, answer) {
    run.answer = answer;
    Object.assign(run.node, { content: answer.content, reasoning: answer.reasoning });
    if (Date.now() - run.keptAt > KEEP_MS && hasText(run.node)) this.#keep(run);
    this.#onGrow(run);
  }

  /** Keeps an answer as far as it came. */
  #keep(run) {
    run.keptAt = Date.now();
    if (run.answer) Object.assign(run.node, run.answer.message());
    this.#onKept(keepConversation(run.conversation));
  }

  #remember(id, answer, body) {
    this.#answers.set(id, Object.assign(answer, { body }));
    let tokens = 0;
    for (const [old, one] of [...this.#answers].reverse()) {
      tokens += 1 + one.tokens.length;
      if (tokens > MAX_TOKENS) this.#answers.delete(old);
    }
  }
}

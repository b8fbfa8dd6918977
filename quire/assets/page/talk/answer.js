// One answer of /v1/chat/completions, read from its stream: text, reasoning, calls, tokens, times.

import { streamJSON } from '../api.js';

function addCalls(calls, deltas) {
  for (const delta of deltas) {
    const call = (calls[delta.index ?? calls.length] ??= { id: '', type: 'function', function: { name: '', arguments: '' } });
    if (delta.id) call.id = delta.id;
    if (delta.function?.name) call.function.name += delta.function.name;
    if (delta.function?.arguments) call.function.arguments += delta.function.arguments;
  }
}

/** What is known of an answer while it arrives. Times are milliseconds of performance.now(). */
export class Answer {
  /** `hasProbabilities` tells whether the request asked for those of tokens: then each token comes with its own, once. */
  constructor(hasProbabilities = false) {
    this.hasProbabilities = hasProbabilities;
    this.content = '';
    this.reasoning = '';
    this.calls = [];
    this.tokens = []; // {text, logprob, top, forced, draft, event}, where `event` numbers the events of the stream; without logprobs one an event
    this.events = []; // tokens of each event
    this.drafts = 0; // accepted drafts among the tokens
    this.finish = null;
    this.usage = null;
    this.requestId = '';
    this.started = performance.now();
    this.first = null;
    this.last = null;
    this.reasoned = null; // the time of its last reasoning
  }

  add(chunk) {
    if (chunk.error) throw new Error(chunk.error.message || 'The stream ended with an error.');
    const before = this.usage?.completion_tokens || 0;
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { delta } = choice;
    const text = delta.content || '';
    const reasoning = delta.reasoning_content || delta.reasoning || '';
    this.content += text;
    this.reasoning += reasoning;
    if (reasoning) this.reasoned = performance.now();
    if (delta.tool_calls) addCalls(this.calls, delta.tool_calls);
    if (choice.finish_reason) this.finish = choice.finish_reason;
    const listed = choice.logprobs?.content || [];
    const counted = this.hasProbabilities ? 0 : Math.max(0, (chunk.usage?.completion_tokens || 0) - before);
    const drafted = choice.drafted || []; // of a step with several events, the last one has it
    this.drafts += drafted.length;
    const number = listed.length || counted; // where probabilities were asked for, an event without any has text of tokens that another one lists
    if (!number) {
      if (this.hasProbabilities || !this.tokens.length) return;
      const last = this.tokens.at(-1);
      last.text += reasoning + text; // the rest of an event's text
      last.draft ||= drafted.length > 0;
      return;
    }
    const event = this.events.push(number) - 1;
    for (const [place, token] of listed.entries()) {
      const top = (token.top_logprobs || []).map((one) => [one.token, one.logprob]);
      this.tokens.push({ text: token.token, logprob: token.logprob, top, forced: Boolean(token.forced), draft: drafted.includes(place), event });
    }
    if (!listed.length) this.tokens.push({ text: reasoning + text, logprob: null, top: [], forced: false, draft: drafted.length > 0, event });
    this.last = performance.now();
    this.first ??= this.last;
  }

  /** The figures so far, in tokens and seconds. */
  figures() {
    const numTokens = this.usage?.completion_tokens ?? this.events.reduce((sum, one) => sum + one, 0);
    const decode = this.first === null ? 0 : (this.last - this.first) / 1000;
    return {
      tokens: numTokens,
      prompt: this.usage?.prompt_tokens ?? null,
      cached: this.usage?.prompt_tokens_details?.cached_tokens ?? null,
      forced: this.usage?.completion_tokens_details?.forced_tokens ?? 0,
      first: this.first === null ? null : (this.first - this.started) / 1000,
      rate: decode > 0 && numTokens > this.events[0] ? (numTokens - this.events[0]) / decode : null,
      drafts: this.drafts,
      reasoned: this.reasoned ? (this.reasoned - (this.first ?? this.started)) / 1000 : null,
    };
  }

  /** What a message keeps of the answer: its text and its figures. */
  message() {
    return {
      role: 'assistant',
      content: this.content,
      reasoning: this.reasoning,
      tool_calls: this.calls.filter(Boolean),
      finish: this.finish,
      request: this.requestId,
      figures: this.figures(),
    };
  }
}

/** Sends a request and calls `onChange(answer)` after each arrival. Returns the answer; a stop by `signal` is no error. */
export async function requestAnswer(body, signal, onChange) {
  const answer = new Answer(Boolean(body.logprobs));
  try {
    for await (const { requestId, events } of streamJSON('v1/chat/completions', { method: 'POST', body, signal })) {
      if (requestId) answer.requestId = requestId;
      for (const event of events) answer.add(event);
      onChange(answer);
    }
    if (!answer.finish) answer.error = 'The stream ended early.';
  } catch (error) {
    if (error.name === 'AbortError') answer.finish = 'stopped';
    else Object.assign(answer, { error: error.message, code: error.code });
  }
  return answer;
}

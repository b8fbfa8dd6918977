// The tokens of an answer with their probabilities, and the alternatives of the one under the pointer or the cursor.

import { h, hasModifier, plural } from '../dom.js';

const probability = (logprob) => Math.exp(Math.min(0, logprob));
const shown = (text) => text.replace(/\n/g, '⏎\n').replace(/\t/g, '⇥') || '∅';
const named = (text) => (text.trim() === '' ? JSON.stringify(text) : text);
const percent = (logprob) => {
  const value = 100 * probability(logprob);
  return value < 0.01 ? '< 0.01 %' : `${value.toFixed(value < 10 ? 2 : 1)} %`;
};

/** Four classes, so that colour is not the only sign: the last two are underlined as well. */
function doubt(logprob) {
  const value = probability(logprob);
  return value > 0.9 ? 'sure' : value > 0.6 ? 'likely' : value > 0.3 ? 'open' : 'unlikely';
}

function details(token) {
  const notes = [];
  if (token.forced) notes.push('forced by the constraint, not sampled');
  if (token.draft) notes.push(token.logprob === null ? 'has accepted drafts' : 'an accepted draft');
  const rows = token.top.map(([text, logprob]) => {
    const bar = h('span', { class: 'bar', style: { width: `${Math.max(1, 100 * probability(logprob))}%` } });
    return h('tr', { class: text === token.text ? 'chosen' : null },
      h('td', { class: 'mono' }, named(text)), h('td', { class: 'number' }, percent(logprob)), h('td', { class: 'bars' }, bar));
  });
  return [
    h('p', {}, h('b', { class: 'mono' }, named(token.text)), ' ', token.logprob === null ? '' : percent(token.logprob),
      notes.length > 0 && h('span', { class: 'note' }, ` · ${notes.join(' · ')}`)),
    rows.length > 0 && h('table', {}, h('caption', { class: 'offscreen' }, 'Most likely tokens at this place'), h('tbody', {}, rows)),
  ];
}

/** The element for the tokens of an Answer; without probabilities, for the texts of its events. Arrow keys move the cursor from token to token. */
export function tokenView({ tokens }) {
  const hasProbabilities = tokens.some((token) => token.logprob !== null);
  const hint = `Point at ${hasProbabilities ? 'a token' : 'a text'}, or move with the arrow keys.`;
  const readout = h('div', { class: 'token-readout', 'aria-live': 'polite' }, h('p', { class: 'note' }, hint));
  let current = -1;
  const spans = tokens.map((token, index) => {
    const kinds = ['token', token.logprob === null ? 'plain' : doubt(token.logprob)];
    if (token.forced) kinds.push('forced');
    else if (token.draft) kinds.push('draft');
    return h('span', { class: kinds.join(' '), onmouseenter: () => select(index), onclick: () => select(index) }, shown(token.text));
  });
  function select(index) {
    spans[current]?.classList.remove('current');
    current = Math.max(0, Math.min(tokens.length - 1, index));
    spans[current]?.classList.add('current');
    if (tokens[current]) readout.replaceChildren(...details(tokens[current]).filter(Boolean));
  }
  const onkeydown = (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || hasModifier(event)) return;
    event.preventDefault();
    select(current + move);
    spans[current]?.scrollIntoView({ block: 'nearest' });
  };
  const legend = h('p', { class: 'token-legend note' },
    hasProbabilities && [h('span', { class: 'token likely' }, '60–90 %'), h('span', { class: 'token open' }, '30–60 %'), h('span', { class: 'token unlikely' }, 'below 30 %')],
    h('span', { class: 'token draft' }, hasProbabilities ? 'accepted draft' : 'has accepted drafts'), hasProbabilities && h('span', { class: 'token forced' }, 'forced'));
  const label = hasProbabilities ? `${plural(tokens.length, 'token')} with probabilities` : `Text of ${plural(tokens.length, 'event')}, without probabilities`;
  const text = h('div', { class: 'token-text', tabindex: '0', role: 'group', 'aria-label': label, onkeydown }, spans);
  return h('div', { class: 'tokens' }, legend, text, readout);
}

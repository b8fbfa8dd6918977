// Markdown as elements. Output of a model is hostile text: marked only reads it, and each element is made here from a list of known
// kinds. HTML in it stays text, links open apart, and images are links, because loading one would tell its host who reads.

import { lexer } from '../vendor/marked.js';
import { button, copyText, h } from '../dom.js';

const MAX_CHARACTERS = 200_000; // longer text is shown as it is: reading it again for each token would take too long
const MAX_COST = 16_000_000; // about 50 ms
const ENTITIES = { amp: '&', lt: '<', gt: '>', quot: '"', apos: "'", nbsp: '\u00a0', copy: '©', hellip: '…', mdash: '—', ndash: '–' };

function decode(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w{2,8}));/gi, (whole, decimal, hex, name) => {
    if (name) return ENTITIES[name] ?? whole;
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });
}

function link(href, children) {
  let url = null;
  try {
    url = new URL(decode(href));
  } catch {
    return h('span', {}, children);
  }
  if (!['http:', 'https:', 'mailto:'].includes(url.protocol)) return h('span', {}, children);
  return h('a', { href: url.href, rel: 'noopener noreferrer nofollow', target: '_blank' }, children);
}

const inlines = (tokens) => (tokens || []).map(inline);

function inline(token) {
  switch (token.type) {
    case 'strong':
    case 'em':
    case 'del':
      return h(token.type, {}, inlines(token.tokens));
    case 'codespan':
      return h('code', {}, token.text);
    case 'br':
      return h('br');
    case 'link':
      return link(token.href, inlines(token.tokens));
    case 'image':
      return link(token.href, `[image: ${token.text || token.href}]`);
    case 'escape':
      return token.text;
    case 'text':
      return token.tokens ? inlines(token.tokens) : decode(token.text);
    default:
      return token.raw;
  }
}

function codeBlock(token) {
  const copy = button('Copy', () => copyText(token.text, copy), { class: 'quiet' });
  const language = (token.lang || '').split(/\s/)[0];
  return h('div', { class: 'code' },
    h('div', { class: 'code-head' }, h('span', {}, language || 'text'), copy),
    h('pre', { tabindex: '0', 'aria-label': language ? `Code, ${language}` : 'Code' }, h('code', {}, token.text)));
}

function table(token) {
  const cells = (row, tag) => row.map((cell, index) =>
    h(tag, { class: token.align[index] && `align-${token.align[index]}` }, inlines(cell.tokens)));
  return h('div', { class: 'table', tabindex: '0', role: 'group', 'aria-label': 'Table' }, h('table', {},
    h('thead', {}, h('tr', {}, cells(token.header, 'th'))),
    h('tbody', {}, token.rows.map((row) => h('tr', {}, cells(row, 'td'))))));
}

function list(token) {
  const items = token.items.map((item) => h('li', {},
    item.task && h('span', { class: 'task' }, item.checked ? '☑ ' : '☐ '),
    item.tokens.map((inner) => (inner.type === 'text' ? inline(inner) : block(inner)))));
  return token.ordered ? h('ol', { start: token.start === 1 ? null : token.start }, items) : h('ul', {}, items);
}

function block(token) {
  switch (token.type) {
    case 'heading':
      return h(`h${Math.min(6, token.depth + 2)}`, {}, inlines(token.tokens));
    case 'paragraph':
      return h('p', {}, inlines(token.tokens));
    case 'blockquote':
      return h('blockquote', {}, token.tokens.map(block));
    case 'hr':
      return h('hr');
    case 'code':
      return codeBlock(token);
    case 'table':
      return table(token);
    case 'list':
      return list(token);
    case 'space':
    case 'def':
    case 'checkbox':
      return '';
    case 'text':
      return h('p', {}, inline(token));
    default:
      return h('p', {}, token.raw);
  }
}

/**
 * marked's time grows with the squares of the lengths of words and of runs of spaces, and of the marks of emphasis in a paragraph: a word
 * of 40,000 characters, or 20,000 marks, take seconds.
 */
function takesLong(text) {
  const runs = (text.match(/\S+|[^\S\n]+/g) || []).map((run) => run.length);
  const marks = text.split(/\n[ \t]*\n/).map((part) => 2 * (part.match(/[_*~]/g) || []).length);
  return [...runs, ...marks].reduce((sum, length) => sum + length * length, 0) > MAX_COST;
}

function read(text) {
  if (text.length > MAX_CHARACTERS || takesLong(text)) return [{ type: 'unreadable', raw: text }];
  try {
    return lexer(text, { gfm: true, breaks: true });
  } catch {
    return [{ type: 'unreadable', raw: text }];
  }
}

/** A piece of the page that shows Markdown which may grow. Blocks that did not change keep their elements. */
export class MarkdownView {
  #drawn = [];

  constructor() {
    this.element = h('div', { class: 'markdown' });
  }

  show(text) {
    const tokens = read(text).filter((token) => token.type !== 'space');
    let same = 0;
    while (same < tokens.length && same < this.#drawn.length && tokens[same].raw === this.#drawn[same].raw) same += 1;
    for (const old of this.#drawn.slice(same)) old.element.remove();
    const added = tokens.slice(same).map((token) => ({ raw: token.raw, element: block(token) || h('span') }));
    this.element.append(...added.map((one) => one.element));
    this.#drawn = [...this.#drawn.slice(0, same), ...added];
  }
}

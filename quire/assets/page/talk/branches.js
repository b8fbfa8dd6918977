// The branches of a conversation as a small tree: each message a mark, to be chosen; answers with the share of cached prompt tokens.

import { count, h, svg } from '../dom.js';

const STEP = 24;
const RADIUS = 7;

/** Columns of leaves and rows by depth: `[{node, column, row, parent}]`, where `parent` is an entry of the list. */
export function placeBranches(conversation) {
  const children = new Map();
  for (const node of conversation.nodes.values()) {
    if (children.has(node.parent)) children.get(node.parent).push(node);
    else children.set(node.parent, [node]);
  }
  const placed = [];
  const open = (children.get('') || []).reverse().map((node) => ({ node, row: 0, parent: null }));
  let column = -1;
  while (open.length) {
    const entry = open.pop();
    const isFirst = entry.parent && !entry.parent.hasChild;
    if (entry.parent) entry.parent.hasChild = true;
    entry.column = isFirst ? entry.parent.column : (column += 1);
    placed.push(entry);
    for (const child of (children.get(entry.node.id) || []).reverse()) open.push({ node: child, row: entry.row + 1, parent: entry });
  }
  return placed;
}

const x = (entry) => 14 + entry.column * STEP;
const y = (entry) => 14 + entry.row * STEP;

function labelOf({ role, content, figures }) {
  const text = content.trim().replace(/\s+/g, ' ').slice(0, 50) || (role === 'assistant' ? 'a call' : 'empty');
  const cached = figures?.prompt ? `, ${count(figures.cached)} of ${count(figures.prompt)} prompt tokens cached` : '';
  return `${{ user: 'You', assistant: 'Answer', tool: 'Result' }[role]}: ${text}${cached}`;
}

/** A mark: a square for a person, a circle for an answer, which is filled from below by the cached share of its prompt. */
function mark(entry, isShown, choose) {
  const { node } = entry;
  const [left, top] = [x(entry), y(entry)];
  const label = labelOf(node);
  const shape = node.role === 'assistant'
    ? svg('circle', { cx: left, cy: top, r: RADIUS })
    : svg('rect', { x: left - 5, y: top - 5, width: 10, height: 10, rx: 2 });
  const share = node.figures?.prompt ? node.figures.cached / node.figures.prompt : 0;
  const full = 2 * RADIUS - 3;
  const fill = node.role === 'assistant' && share > 0 && svg('rect', { class: 'share', x: left - 2, y: top + full / 2 - full * share, width: 4, height: full * share });
  const act = (event) => {
    if (event.type === 'keydown' && event.key !== 'Enter' && event.key !== ' ') return;
    event.preventDefault();
    choose(node);
  };
  return svg('g', { class: isShown ? 'branch-mark shown' : 'branch-mark', 'data-mark': node.id, role: 'button', tabindex: '0', 'aria-label': label, 'aria-pressed': String(isShown), onclick: act, onkeydown: act },
    svg('title', {}, label), svg('rect', { class: 'target', x: left - 12, y: top - 12, width: 24, height: 24 }), shape, fill);
}

export class BranchMap {
  #choose;
  #picture = h('div', { class: 'branch-picture' });
  #summary = h('p', { class: 'note' });

  /** `choose(node)` shows the branch of a message. */
  constructor(choose) {
    this.#choose = choose;
    this.element = h('section', { class: 'branches', 'aria-label': 'Branches of this conversation', hidden: true }, h('h2', {}, 'Branches'), this.#picture, this.#summary);
  }

  show(conversation) {
    const focused = document.activeElement?.dataset?.mark;
    const placed = placeBranches(conversation);
    const columns = 1 + Math.max(0, ...placed.map((entry) => entry.column));
    const rows = 1 + Math.max(0, ...placed.map((entry) => entry.row));
    this.element.hidden = columns < 2;
    if (columns < 2) return;
    const shown = new Set(conversation.path().map((node) => node.id));
    const lines = placed.filter((entry) => entry.parent).map((entry) => svg('path', {
      class: shown.has(entry.node.id) ? 'shown' : null,
      d: `M${x(entry.parent)} ${y(entry.parent)}V${y(entry.parent) + STEP / 2}H${x(entry)}V${y(entry)}`,
    }));
    const [width, height] = [28 + (columns - 1) * STEP, 28 + (rows - 1) * STEP];
    this.#picture.replaceChildren(svg('svg', { width, height, viewBox: `0 0 ${width} ${height}`, role: 'group', 'aria-label': 'Messages' },
      lines, placed.map((entry) => mark(entry, shown.has(entry.node.id), this.#choose))));
    if (focused) this.#picture.querySelector(`[data-mark="${focused}"]`)?.focus();
    const cached = placed.reduce((sum, { node }) => sum + (node.figures?.cached || 0), 0);
    const prompts = placed.reduce((sum, { node }) => sum + (node.figures?.prompt || 0), 0);
    this.#summary.textContent = prompts ? `${count(cached)} of ${count(prompts)} prompt tokens were cached, because branches share their beginnings.` : '';
  }
}

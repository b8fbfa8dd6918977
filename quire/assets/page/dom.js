// Elements, and numbers as text. No markup is ever parsed: all text enters the page as text nodes.

const SVG = 'http://www.w3.org/2000/svg';

function setProperty(element, name, value) {
  if (value === undefined || value === null || value === false) return;
  if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
  else if (name === 'class') element.setAttribute('class', value);
  else if (name === 'style') for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
  else if (name === 'value' || name === 'checked') element[name] = value;
  else element.setAttribute(name, value === true ? '' : value);
}

function build(element, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) setProperty(element, name, value);
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

export const h = (tag, properties, ...children) => build(document.createElement(tag), properties, children);
export const svg = (tag, properties, ...children) => build(document.createElementNS(SVG, tag), properties, children);
export const hasModifier = (event) => event.ctrlKey || event.metaKey || event.altKey;
export const button = (label, onclick, properties) => h('button', { type: 'button', onclick, ...properties }, label);

const ICONS = {
  talk: 'M3 4h14v9H9l-4 3.5V13H3z',
  see: 'M3 3h6v6H3zM11 3h6v6h-6zM3 11h6v6H3zM11 11h6v6h-6z',
  plus: 'M10 4v12M4 10h12',
  send: 'M10 16V4M5 9l5-5 5 5',
  stop: 'M6 6h8v8H6z',
  sliders: 'M3 6h8M15 6h2M3 14h2M9 14h8M13 4v4M7 12v4',
  list: 'M3 5h14M3 10h14M3 15h14',
  close: 'M5 5l10 10M15 5L5 15',
  moon: 'M15.5 12.5A6.5 6.5 0 0 1 7.5 4.5a6.5 6.5 0 1 0 8 8z',
  sun: 'M10 6.5a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7zM10 2v1.5M10 16.5V18M2 10h1.5M16.5 10H18M4.3 4.3l1.1 1.1M14.6 14.6l1.1 1.1M4.3 15.7l1.1-1.1M14.6 5.4l1.1-1.1',
  left: 'M12 5l-5 5 5 5',
  right: 'M8 5l5 5-5 5',
  play: 'M6 4l10 6-10 6z',
  down: 'M10 4v12M5 11l5 5 5-5',
  more: 'M4.5 10h.01M10 10h.01M15.5 10h.01',
  pause: 'M7 4v12M13 4v12',
  key: 'M8 12.5a3.5 3.5 0 1 1 2.8-5.6L17 7v3h-2v2h-2v-2h-2.2A3.5 3.5 0 0 1 8 12.5z',
};

export const icon = (name) =>
  svg('svg', { class: name === 'stop' ? 'icon filled' : 'icon', viewBox: '0 0 20 20', 'aria-hidden': 'true' }, svg('path', { d: ICONS[name] }));

const NUMBER = new Intl.NumberFormat('en');
export const count = (value) => NUMBER.format(Math.round(value));

export function short(value) {
  if (Math.abs(value) < 1000) return value < 10 && value % 1 ? value.toFixed(1) : String(Math.round(value));
  if (Math.abs(value) < 1e6) return `${(value / 1e3).toFixed(value < 1e4 ? 1 : 0)}k`;
  return `${(value / 1e6).toFixed(value < 1e7 ? 1 : 0)}M`;
}

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  if (value === 0) return '0 s';
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1e3)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(part && part < whole * 0.1 ? 1 : 0)} %` : '–');
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? '' : 's'}`;

/** The way of pages over plain HTTP, which have no navigator.clipboard. */
function copySelected(text) {
  const area = h('textarea', { class: 'offscreen', value: text });
  (document.querySelector('dialog[open]') || document.body).append(area);
  area.select();
  const copied = document.execCommand('copy');
  area.remove();
  return copied;
}

/** Copies text, and says so on the button for a moment. */
export async function copyText(text, target) {
  const label = (target.dataset.label ??= target.textContent); // once: a second click comes while it says 'Copied'
  const copied = window.isSecureContext ? await navigator.clipboard.writeText(text).then(() => true, () => false) : copySelected(text);
  target.textContent = copied ? 'Copied' : 'Copy was refused';
  setTimeout(() => (target.textContent = label), 1200);
}

/** Saves text as a file of the browser's downloads. */
export function saveFile(name, text) {
  const link = h('a', { href: URL.createObjectURL(new Blob([text], { type: 'application/json' })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

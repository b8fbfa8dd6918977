// Settings of the next request: sampling, a JSON schema, tools. Kept in the browser.

import { button, h } from '../dom.js';
import { kept } from '../storage.js';

const KEY = 'quire.settings';

// name, label, hint, least, most, step, what an empty field means if the model has no default of its own
const NUMBERS = [
  ['temperature', 'Temperature', '0 takes the most likely token each time', 0, 100, 0.1, '1'],
  ['top_p', 'Top p', 'The most likely tokens up to this total probability', 0, 1, 0.05, '1'],
  ['top_k', 'Top k', 'This many of the most likely tokens', 0, null, 1, 'all'],
  ['min_p', 'Min p', 'At least this fraction of the probability of the most likely token', 0, 1, 0.01, '0'],
  ['max_tokens', 'Max tokens', 'The longest answer', 1, null, 1, 'context'],
  ['seed', 'Seed', 'The same seed makes the same answer', 0, null, 1, 'random'],
  ['presence_penalty', 'Presence penalty', 'Above 0: fewer tokens that have occurred', -2, 2, 0.1, '0'],
  ['frequency_penalty', 'Frequency penalty', 'Above 0: fewer tokens that have occurred often', -2, 2, 0.1, '0'],
  ['repetition_penalty', 'Repetition penalty', '1 is none. Above 1: fewer tokens that have occurred', 0, 100, 0.05, '1'],
];

const EXAMPLE_SCHEMA = {
  type: 'object',
  properties: { name: { type: 'string' }, day: { type: 'string' }, count: { type: 'integer' } },
  required: ['name', 'day', 'count'],
  additionalProperties: false,
};

const EXAMPLE_TOOLS = [{
  type: 'function',
  function: {
    name: 'get_price',
    description: 'Price of an item for one day.',
    parameters: { type: 'object', properties: { item: { type: 'string' } }, required: ['item'] },
  },
}];

const DEFAULTS = { probabilities: true, tool_choice: 'auto', thinking: '', schema: '', tools: '', stop: '' };

function parsed(text, check, problem) {
  if (!text.trim()) return { value: null };
  try {
    const value = JSON.parse(text);
    return check(value) ? { value } : { error: problem };
  } catch (error) {
    return { error: `This is not JSON: ${error.message}` };
  }
}

/** What is wrong with the text of a number field, or ''. */
function numberProblem(text, [, , , min, max, step]) {
  if (text === '') return '';
  const number = Number(text);
  if (Number.isNaN(number)) return 'This is no number.';
  if (step === 1 && !Number.isInteger(number)) return 'This is no whole number.';
  if (number >= (min ?? -Infinity) && number <= (max ?? Infinity)) return '';
  return max === null ? `The least is ${min}.` : `It goes from ${min} to ${max}.`;
}

const isObject = (value) => typeof value === 'object' && value !== null && !Array.isArray(value);
const SCHEMA_PROBLEM = 'A schema is a JSON object, such as {"type": "object"}.';
const TOOLS_PROBLEM = 'Tools are a JSON list of objects with "type": "function" and a "function".';

export class Settings {
  #values;
  modelDefaults = {}; // by name, from the model's generation_config.json

  constructor() {
    try {
      this.#values = { ...DEFAULTS, ...JSON.parse(kept.get(KEY) || '{}') };
    } catch {
      this.#values = { ...DEFAULTS };
    }
  }

  get(name) {
    return this.#values[name] ?? '';
  }

  set(name, value) {
    this.#values[name] = value;
    kept.set(KEY, JSON.stringify(this.#values));
  }

  reset() {
    this.#values = { ...DEFAULTS };
    kept.remove(KEY);
  }

  #numberText([name]) {
    return String(this.get(name)).trim();
  }

  /** The sampling fields of a request; what is left empty is the model's default. */
  sampling() {
    const fields = {};
    for (const field of NUMBERS) {
      const text = this.#numberText(field);
      if (text !== '' && !numberProblem(text, field)) fields[field[0]] = Number(text);
    }
    const stop = this.get('stop').split('\n').filter(Boolean);
    if (stop.length) fields.stop = stop;
    if (this.get('thinking')) fields.enable_thinking = this.get('thinking') === 'on';
    if (this.get('no_drafts')) fields.speculation = false;
    return fields;
  }

  readSchema() {
    return parsed(this.get('schema'), isObject, SCHEMA_PROBLEM);
  }

  readTools() {
    return parsed(this.get('tools'), (value) => Array.isArray(value) && value.every((tool) => tool?.function), TOOLS_PROBLEM);
  }

  schema() {
    return this.readSchema().value;
  }

  tools() {
    return this.readTools().value;
  }

  /** Why no request can be made, or ''. */
  problem() {
    for (const field of NUMBERS) {
      const number = numberProblem(this.#numberText(field), field);
      if (number) return `${field[1]}: ${number}`;
    }
    const [schema, tools] = [this.readSchema().error, this.readTools().error];
    return schema ? `JSON schema: ${schema}` : tools ? `Tools: ${tools}` : '';
  }
}

function numberField(settings, field) {
  const [name, label, hint, min, max, step, fallback] = field;
  const id = `set-${name}`;
  const problem = h('span', { class: 'problem', id: `problem-${name}`, role: 'status' });
  const check = () => {
    const text = input.validity.badInput ? 'This is no number.' : numberProblem(input.value, field);
    problem.textContent = text;
    input.setAttribute('aria-invalid', text ? 'true' : 'false');
  };
  const input = h('input', {
    type: 'number', id, min, max, step, value: settings.get(name), placeholder: String(settings.modelDefaults[name] ?? fallback), inputmode: min < 0 ? 'text' : step === 1 ? 'numeric' : 'decimal',
    'aria-describedby': `hint-${name} problem-${name}`,
    oninput: () => {
      settings.set(name, input.value);
      check();
    },
  });
  check();
  return h('div', { class: 'field', title: hint }, h('label', { for: id }, label), input, h('span', { class: 'field-hint', id: `hint-${name}` }, hint), problem);
}

function jsonField({ settings, name, label, read, example, placeholder }) {
  const problem = h('p', { class: 'problem', id: `problem-${name}`, role: 'status' });
  const check = () => {
    settings.set(name, area.value);
    const { error } = read();
    problem.textContent = error || '';
    area.setAttribute('aria-invalid', error ? 'true' : 'false');
  };
  const area = h('textarea', {
    id: `set-${name}`, rows: 5, spellcheck: 'false', placeholder, value: settings.get(name), oninput: check,
    'aria-describedby': `problem-${name}`, class: 'mono',
  });
  const fill = (value) => {
    area.value = value;
    check();
  };
  return h('div', { class: 'json-field' },
    h('div', { class: 'field-head' }, h('label', { for: `set-${name}` }, label),
      button('Example', () => fill(JSON.stringify(example, null, 2)), { class: 'quiet' }),
      button('Clear', () => fill(''), { class: 'quiet' })),
    area, problem);
}

function choice(settings, name, label, options) {
  const select = h('select', { id: `set-${name}`, onchange: () => settings.set(name, select.value) },
    options.map(([value, text]) => h('option', { value, selected: settings.get(name) === value }, text)));
  return h('label', { class: 'field', for: `set-${name}` }, h('span', {}, label), select);
}

function checkbox(settings, name, label, checked) {
  const input = h('input', { type: 'checkbox', checked, onchange: () => settings.set(name, input.checked) });
  return h('label', { class: 'check' }, input, h('span', {}, label));
}

/** The fields of the settings, as a list of elements. `system` and `onSystem` read and change the system prompt. */
export function settingsFields(settings, { system, onSystem, onReset }) {
  const prompt = h('textarea', {
    id: 'set-system', rows: 3, value: system, placeholder: 'Instructions before the conversation', oninput: () => onSystem(prompt.value),
  });
  const stop = h('textarea', {
    id: 'set-stop', rows: 2, value: settings.get('stop'), placeholder: 'One text a line', oninput: () => settings.set('stop', stop.value),
  });
  return [
    h('div', { class: 'json-field' }, h('label', { for: 'set-system' }, 'System prompt'), prompt),
    h('fieldset', {}, h('legend', {}, 'Sampling'),
      h('div', { class: 'fields' }, NUMBERS.map((field) => numberField(settings, field))),
      h('div', { class: 'json-field' }, h('label', { for: 'set-stop' }, 'Stop texts'), stop)),
    h('fieldset', {}, h('legend', {}, 'Answer'),
      choice(settings, 'thinking', 'Reasoning', [['', 'default'], ['on', 'on'], ['off', 'off']]),
      checkbox(settings, 'probabilities', 'Ask for the probabilities of tokens', Boolean(settings.get('probabilities'))),
      checkbox(settings, 'no_drafts', 'No draft tokens (no speculation)', Boolean(settings.get('no_drafts')))),
    h('fieldset', {}, h('legend', {}, 'JSON schema and tools'),
      jsonField({ settings, name: 'schema', label: 'JSON schema of the answer', read: () => settings.readSchema(),
        example: EXAMPLE_SCHEMA, placeholder: '{"type": "object", ...}' }),
      jsonField({ settings, name: 'tools', label: 'Tools', read: () => settings.readTools(),
        example: EXAMPLE_TOOLS, placeholder: '[{"type": "function", "function": {...}}]' }),
      choice(settings, 'tool_choice', 'Tool choice', [['auto', 'auto'], ['required', 'required'], ['none', 'none']])),
    button('Reset settings', onReset, { class: 'quiet' }),
  ];
}

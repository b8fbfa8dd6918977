// The page /docs: what openapi.json says, without a framework. Text enters the document as text only.

import { getJSON, readKey, saveKey } from "./api.js";
import { copyText } from "./dom.js";

const $ = (id) => document.getElementById(id);
const METHODS = ["get", "post", "delete", "put", "patch"];
let api;

function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

const resolve = (schema) =>
  schema?.$ref ? resolve(schema.$ref.slice(2).split("/").reduce((at, part) => at[part], api)) : schema ?? {};

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  const either = schema.anyOf ?? schema.oneOf;
  if (either) return [...new Set(either.map(typeOf))].join(" | ");
  if (schema.type === "array") return `array of ${typeOf(schema.items ?? {})}`;
  return [schema.type ?? "any value"].flat().join(" | ");
}

const LIMITS = {
  minimum: "at least", exclusiveMinimum: "above", maximum: "at most", exclusiveMaximum: "below", minLength: "least characters:",
  maxLength: "most characters:", minItems: "least items:", maxItems: "most items:", pattern: "pattern", format: "format",
};

function limitsOf(schema) {
  const parts = [schema, ...(schema.anyOf ?? []), schema.items ?? {}];
  const found = parts.flatMap((part) => Object.entries(LIMITS).flatMap(([key, text]) => key in part ? [`${text} ${part[key]}`] : []));
  if (schema.default !== undefined && schema.default !== null) found.push(`default ${JSON.stringify(schema.default)}`);
  return [...new Set(found)].join(", ");
}

// The schemas with fields that a value can have: itself, members of a union, items of a list.
function objectsIn(schema) {
  const whole = resolve(schema);
  const inner = [...(whole.anyOf ?? whole.oneOf ?? []), ...(whole.items ? [whole.items] : [])];
  return [...(whole.properties ? [whole] : []), ...inner.flatMap(objectsIn)];
}

const hasNoEffect = ([, field]) => /^(Not supported yet|Accepted; it has no effect)/.test(field.description ?? "");

// Required fields first; those without an effect are folded behind the others.
function fields(schema) {
  const rank = ([name]) => (schema.required?.includes(name) ? 0 : 1);
  const all = Object.entries(schema.properties).sort((a, b) => rank(a) - rank(b));
  const list = listOf(all.filter((one) => !hasNoEffect(one)), schema);
  const idle = all.filter(hasNoEffect);
  if (idle.length) list.append(el("li", {}, folded([`${idle.length} fields without an effect`], () => [listOf(idle, schema)])));
  return list;
}

function listOf(entries, schema) {
  const list = el("ul", { class: "fields" });
  for (const [name, field] of entries) {
    const title = [el("code", {}, name), ` ${typeOf(field)}`];
    if (schema.required?.includes(name)) title.push(" ", el("span", { class: "required" }, "required"));
    const notes = [field.description, limitsOf(field)].filter(Boolean).map((text) => el("p", {}, text));
    const inner = objectsIn(field);
    list.append(el("li", {}, inner.length ? folded(title, () => [...notes, ...inner.map(fields)]) : el("div", {}, ...title), ...(inner.length ? [] : notes)));
  }
  return list;
}

// A fold whose content is made when it is first opened, so that schemas may contain themselves.
function folded(title, content, attributes = {}) {
  const made = el("details", attributes, el("summary", {}, ...title));
  made.addEventListener("toggle", () => made.open && made.children.length === 1 && made.append(...content()));
  return made;
}

function parameters(operation) {
  const schema = { properties: {}, required: [] };
  for (const one of operation.parameters ?? []) {
    schema.properties[one.name] = { ...resolve(one.schema), description: `${one.in}. ${one.description ?? ""}` };
    if (one.required) schema.required.push(one.name);
  }
  return operation.parameters?.length ? [el("h4", {}, "Parameters"), fields(schema)] : [];
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function curl(method, path, operation, body) {
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  const lines = [`curl ${method === "get" ? "" : `-X ${method.toUpperCase()} `}${quoted(base + path)}`];
  if (operation.security) lines.push("-H 'authorization: Bearer KEY'");
  if (body !== undefined) lines.push("-H 'content-type: application/json'", `-d ${quoted(JSON.stringify(body, null, 2))}`);
  const text = lines.join(" \\\n  ");
  const copy = el("button", { type: "button" }, "Copy");
  copy.addEventListener("click", () => copyText(text, copy));
  return [el("pre", { tabindex: "0", "aria-label": "Example with curl" }, el("code", {}, text)), copy];
}

function examples(method, path, operation) {
  const content = operation.requestBody?.content?.["application/json"];
  const known = Object.entries(content?.examples ?? {}).map(([name, one]) => [name, one.value]);
  const all = known.length ? known : [["", content ? {} : undefined]];
  return all.flatMap(([name, body]) => [el("h4", {}, name ? `Example: ${name}` : "Example"), ...curl(method, path, operation, body)]);
}

function body(operation) {
  return Object.entries(operation.requestBody?.content ?? {}).flatMap(([type, { schema }]) => [
    el("h4", {}, "Body ", el("span", { class: "quiet" }, type)),
    ...objectsIn(schema).map(fields),
  ]);
}

function answers(operation) {
  const rows = Object.entries(operation.responses ?? {}).map(([status, one]) =>
    el("li", {}, el("code", {}, status), ` ${one.description ?? ""} `, el("span", { class: "quiet" }, Object.keys(one.content ?? {}).join(", "))));
  return [el("h4", {}, "Answers"), el("ul", { class: "fields" }, ...rows)];
}

function route(method, path, operation) {
  const name = el("h3", {}, el("span", { class: `method ${method}` }, method.toUpperCase()), el("code", {}, path), ` ${operation.summary ?? ""}`);
  const text = (operation.description ?? "").split("\n\n").map((part) => el("p", {}, part));
  const content = () => [el("div", {}, ...text, ...parameters(operation), ...body(operation), ...examples(method, path, operation), ...answers(operation))];
  const made = folded([name], content, { class: "route", id: `${method}${path.replace(/[^\w]+/g, "-")}` });
  const schemas = Object.values(operation.requestBody?.content ?? {}).flatMap((one) => objectsIn(one.schema));
  made.words = [method, path, operation.summary, operation.description, ...schemas.flatMap((one) => Object.keys(one.properties))].join(" ").toLowerCase();
  return made;
}

const idOf = (tag) => `tag-${tag.replace(/[^\w]+/g, "-")}`;

function show() {
  $("version").textContent = api.info.version;
  const byTag = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const method of METHODS.filter((one) => one in methods)) {
      const tag = methods[method].tags?.at(-1) ?? "Other";
      byTag.set(tag, [...(byTag.get(tag) ?? []), route(method, path, methods[method])]);
    }
  }
  const sections = [...byTag].map(([tag, routes]) =>
    el("section", { "aria-labelledby": idOf(tag) }, el("h2", { id: idOf(tag) }, tag), ...routes));
  $("routes").replaceChildren(...sections);
  $("tags").replaceChildren(el("ul", {}, ...[...byTag.keys()].map((tag) => el("li", {}, el("a", { href: `#${idOf(tag)}` }, tag)))));
  filter();
  openTarget();
}

function filter() {
  const wanted = $("filter").value.trim().toLowerCase();
  let count = 0;
  for (const section of $("routes").children) {
    const routes = [...section.querySelectorAll(".route")];
    for (const one of routes) one.hidden = !one.words.includes(wanted);
    const left = routes.filter((one) => !one.hidden).length;
    section.hidden = !left;
    count += left;
  }
  $("status").textContent = `${count} route${count === 1 ? "" : "s"}`;
}

function openTarget() {
  const target = document.getElementById(location.hash.slice(1));
  if (target?.matches(".route")) target.open = true;
  target?.scrollIntoView();
}

async function load(key = readKey()) {
  try {
    api = await getJSON("openapi.json", { key });
  } catch (error) {
    const isAsked = error.status === 401 && !key;
    $("status").textContent = isAsked ? "The server asks for a key" : error.status === 401 ? "The server does not know this key" : error.message;
    $("key-form").hidden = error.status !== 401 && error.code !== "unreadable_key";
    if (!$("key-form").hidden) $("key").focus();
    return;
  }
  if (key) saveKey(key);
  $("key-form").hidden = true;
  show();
}

$("filter").addEventListener("input", filter);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  load($("key").value.trim());
});
addEventListener("hashchange", openTarget);
load();

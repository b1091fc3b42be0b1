// The page: controls from the schema of a request, a text while it is decoded, and traces.
// Texts reach the page by textContent alone.
import { RULES, choose } from "/rules.js";

const find = (id) => document.getElementById(id);
const make = (name, attributes = {}, ...children) => {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in node && key !== "list" && key !== "form") node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
};
const words = (name) => name.replaceAll("_", " ");
const decimals = (value, count = 3) => (value == null ? "–" : value.toFixed(count));

// ---- requests
const token = new URLSearchParams(location.hash.slice(1)).get("token");
const ask = async (path, body) => {
  const headers = { "Content-Type": "application/json" };
  if (token) headers.Authorization = `Bearer ${token}`;
  const answer = await fetch(path, body ? { method: "POST", headers, body: JSON.stringify(body) } : { headers });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw new Error(said.error ?? `the server answered ${answer.status}`);
};
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part.slice("data: ".length));
  }
}

// ---- controls from a JSON schema; each returns {node, value()}
let schema;
let count = 0;
const resolved = (part) => (part.$ref ? schema.$defs[part.$ref.split("/").pop()] : part);
const labelled = (name, part, input) => {
  const id = `control-${(count += 1)}`;
  input.id = id;
  const node = make("div", {}, make("label", { htmlFor: id }, words(name)), input);
  if (part.description) {
    node.append(make("small", { id: `${id}-about` }, part.description));
    input.setAttribute("aria-describedby", `${id}-about`);
  }
  return node;
};
const controlOf = (name, part, initial) => {
  const { description } = part;
  part = { ...resolved(part), ...(description && { description }) };
  if (part.discriminator) return variants(name, part, initial);
  if (part.properties) return section(name, part, initial);
  const options = part.anyOf?.map(resolved);
  if (options?.some((one) => one.type === "null")) return optional(name, part, options.find((one) => one.type !== "null"));
  if (part.enum) {
    const input = make("select", {}, ...part.enum.map((one) => make("option", { value: one }, one)));
    input.value = initial ?? part.default;
    return { node: labelled(name, part, input), value: () => input.value };
  }
  if (part.type === "boolean") {
    const input = make("input", { type: "checkbox", checked: initial ?? part.default });
    return { node: labelled(name, part, input), value: () => input.checked };
  }
  if (options) { // a number or a word, such as "tuned"
    const input = make("input", { value: initial ?? part.default });
    const numeric = () => input.value.trim() !== "" && Number.isFinite(Number(input.value));
    return { node: labelled(name, part, input), value: () => (numeric() ? Number(input.value) : input.value) };
  }
  const whole = part.type === "integer";
  const input = make("input", { type: "number", step: whole ? 1 : "any", required: true, value: initial ?? part.default });
  input.min = part.minimum ?? part.exclusiveMinimum ?? "";
  input.max = part.maximum ?? part.exclusiveMaximum ?? "";
  return { node: labelled(name, part, input), value: () => (input.value === "" ? null : Number(input.value)) };
};
const fieldsOf = (part, initial = {}, skipped = []) => {
  const controls = Object.entries(part.properties)
    .filter(([name, one]) => one.const === undefined && !skipped.includes(name))
    .map(([name, one]) => [name, controlOf(name, one, initial[name] ?? part.default?.[name])]);
  const value = () => Object.fromEntries(controls.map(([name, one]) => [name, one.value()]));
  return { nodes: controls.map(([, one]) => one.node), value };
};
const section = (name, part, initial) => {
  const fields = fieldsOf(part, initial);
  const inside = make("div", { className: "fields" }, ...fields.nodes);
  return { node: make("fieldset", {}, make("legend", {}, words(name)), inside), value: fields.value };
};
const optional = (name, part, inner) => {
  const input = make("input", { type: "checkbox" });
  const own = section(name, inner);
  own.node.hidden = true;
  input.addEventListener("change", () => { own.node.hidden = !input.checked; });
  const node = make("div", { className: "fields" }, labelled(`own ${name}`, part, input), own.node);
  return { node, value: () => (input.checked ? own.value() : null) };
};
const variants = (name, part) => {
  const { propertyName, mapping } = part.discriminator;
  const select = make("select", {}, ...Object.keys(mapping).map((one) => make("option", { value: one }, words(one))));
  const about = make("small", { id: `about-${name}` });
  const inside = make("div", { className: "fields" });
  let fields;
  const show = () => {
    const chosen = resolved({ $ref: mapping[select.value] });
    about.textContent = chosen.description;
    fields = fieldsOf(chosen, exampleOf(chosen));
    inside.replaceChildren(...fields.nodes);
  };
  select.value = part.default?.[propertyName] ?? Object.keys(mapping)[0];
  select.addEventListener("change", show);
  const node = make("fieldset", {}, make("legend", {}, words(name)), make("div", { className: "fields" }, labelled(name, {}, select), about, inside));
  select.setAttribute("aria-describedby", about.id);
  show();
  return { node, value: () => ({ [propertyName]: select.value, ...fields.value() }) };
};
// The setting in the middle of those that comparisons use.
const exampleOf = (rule) => rule.examples?.[Math.floor(rule.examples.length / 2)] ?? {};

// ---- decoding
const FIGURES = {
  tokens: ["tokens", 0], seconds: ["seconds", 2], tokens_per_s: ["tokens per second", 1],
  acceptance_rate: ["acceptance (accepted / examined)", 3],
  block_efficiency: ["tau (tokens per target call)", 2], target_calls: ["target calls", 0],
};
const REASONS = { eos: "a stop token", length: "max new tokens", context: "the end of the context", stopped: "you" };
let form;
let running = null; // the name of the run
const showFigures = (figures) => {
  const rows = Object.entries(FIGURES).map(([name, [title, places]]) =>
    make("tr", {}, make("th", { scope: "row" }, title),
      ...["draft", "plain"].map((way) => make("td", {}, decimals(figures[way]?.[name], places)))));
  const [draft, plain] = ["draft", "plain"].map((way) => figures[way]?.tokens_per_s);
  const ratio = draft && plain ? `${decimals(draft / plain, 2)} times` : "–";
  rows.push(make("tr", {}, make("th", { scope: "row" }, "tokens per second, with / without"), make("td", {}, ratio), make("td")));
  find("figures").replaceChildren(...rows);
};
const showCounts = (counts) => find("counts").replaceChildren(...Object.entries(counts).map(([source, number]) =>
  make("li", {}, make("span", { className: `token ${source}` }, source), ` ${number}`)));
const begin = (ways) => {
  find("results").hidden = false;
  find("plain").hidden = !ways.includes("plain");
  for (const way of ["draft", "plain"]) find(`text-${way}`).replaceChildren();
  find("counts").replaceChildren();
  showFigures({});
};
const decode = async () => {
  const figures = {};
  const counts = {};
  const ended = [];
  find("failure").textContent = "";
  find("status").textContent = "Decoding";
  find("start").disabled = true;
  try {
    for await (const event of eventsOf(await ask("/api/decode", { ...form.value(), prompt: find("prompt").value }))) {
      if (event.kind === "error") throw new Error(event.message);
      if (event.kind === "begin") {
        running = event.run;
        find("stop").disabled = false;
        begin(event.ways);
      } else if (event.kind === "block") {
        const box = find(`text-${event.way}`);
        const isLow = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
        box.append(make("span", { className: "block" }, ...event.pieces.map(([text, source]) =>
          make("span", { className: `token ${event.way === "plain" ? "prefill" : source}`, title: source }, text))));
        if (isLow) box.scrollTop = box.scrollHeight;
        if (event.way === "draft") for (const [, source] of event.pieces) counts[source] = (counts[source] ?? 0) + 1;
        figures[event.way] = event.figures;
        showFigures(figures);
        showCounts(counts);
      } else {
        ended.push(`${event.way === "plain" ? "without" : "with"} the draft by ${REASONS[event.reason]}`);
      }
    }
    if (!ended.length) throw new Error("the server closed the connection; is it still running?");
    find("status").textContent = `Ended ${ended.sort().join(", ")}.`;
  } catch (error) {
    find("failure").textContent = error.message;
    find("status").textContent = "";
  } finally {
    running = null;
    find("start").disabled = false;
    find("stop").disabled = true;
  }
};
const stop = async () => {
  if (!running) return;
  find("status").textContent = "Stopping after this block";
  await ask("/api/stop", { run: running }).catch((error) => { find("failure").textContent = error.message; });
};
const formNode = document.querySelector("form");
formNode.addEventListener("submit", (event) => { event.preventDefault(); if (!find("start").disabled) decode(); });
formNode.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) formNode.requestSubmit(); });
addEventListener("keydown", (event) => { if (event.key === "Escape") stop(); });
find("stop").addEventListener("click", stop);

// ---- tabs, by the pattern of the ARIA practices
const tabs = [...document.querySelectorAll('[role="tab"]')];
const open = (tab) => {
  for (const one of tabs) {
    one.setAttribute("aria-selected", one === tab);
    one.tabIndex = one === tab ? 0 : -1;
    find(one.getAttribute("aria-controls")).hidden = one !== tab;
  }
  tab.focus();
};
for (const [at, tab] of tabs.entries()) {
  tab.addEventListener("click", () => open(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) open(tabs[(at + step + tabs.length) % tabs.length]);
  });
}

// ---- replay
let trace = null; // what `decode --json --trace` wrote
let selected = 0;
let ruleControl;
const isGreedy = () => trace.decoding.sampling.temperature === 0;
const tally = (rule) => {
  const found = trace.trace.map((row) => choose(rule, row, isGreedy()));
  if (found.some((one) => one === null || one.accept === null)) return { found, known: false };
  const total = (key) => found.reduce((sum, one) => sum + Number(one[key]), 0);
  return { found, known: true, accepts: total("accepts"), accept: total("accept") / found.length, defers: found[0].defers === null ? null : total("defers") };
};
const inWords = (choice) => {
  if (!choice || choice.accept === null) return "the trace does not say";
  return `${choice.defers ? "defers, " : ""}${choice.accepts ? "accepts" : "rejects"} (${decimals(choice.accept)})`;
};
const settingOf = (rule) => [words(rule.rule), ...Object.entries(rule).filter(([name]) => name !== "rule").map(([, value]) => value)].join(" ");
const allRules = () => [
  ...new Map([trace.decoding.strategy.rule, ...Object.values(schema.properties.rule.discriminator.mapping).map((ref) => {
    const rule = resolved({ $ref: ref });
    return { rule: rule.properties.rule.const, ...exampleOf(rule) };
  })].filter((rule) => rule.rule).map((rule) => [settingOf(rule), rule])).values(),
];
const showTrace = () => {
  const rule = ruleControl.value();
  const { found, known, accepts, accept } = tally(rule);
  const number = trace.trace.length;
  find("summary").textContent = known
    ? `${settingOf(rule)} accepts ${accepts} of ${number} tokens; expected acceptance ${decimals(accept)}.`
    : `The trace does not have the numbers that ${settingOf(rule)} needs at every token.`;
  for (const [at, button] of [...find("positions").querySelectorAll("button")].entries()) {
    const choice = found[at];
    button.className = choice?.accepts == null ? "unknown" : choice.accepts ? "accepts" : "rejects";
    button.classList.toggle("defers", Boolean(choice?.defers));
    button.title = inWords(choice);
    button.setAttribute("aria-pressed", at === selected);
  }
  find("chosen").textContent = `All rules, on ${number} examined tokens; selected: ${JSON.stringify(trace.trace[selected].text)}`;
  find("choices").replaceChildren(...allRules().map((one) => {
    const all = tally(one);
    const cells = all.known ? [`${all.accepts} of ${number}`, decimals(all.accept), all.defers ?? "–"] : ["–", "–", "–"];
    return make("tr", {}, make("th", { scope: "row" }, settingOf(one)),
      ...[...cells, inWords(all.found[selected])].map((text) => make("td", {}, String(text))));
  }));
};
const layOut = () => {
  const rows = new Map(trace.trace.map((row, at) => [`${row.block} ${row.index}`, [row, at]]));
  find("positions").replaceChildren(...trace.blocks.map((block, number) => make("span", { className: "block" },
    ...block.flatMap(([text, source], index) => {
      const [row, at] = rows.get(`${number} ${index}`) ?? [];
      if (!row) return [make("span", { className: `token ${source}`, title: source }, text)];
      const button = make("button", { type: "button" }, row.text || "·");
      button.addEventListener("click", () => { selected = at; showTrace(); });
      return row.accepted ? [button] : [button, make("span", { className: `token ${source}`, title: source }, text)];
    }))));
};
const readTrace = async (file) => {
  find("read").hidden = true;
  try {
    const found = JSON.parse(await file.text());
    if (!Array.isArray(found?.trace) || !Array.isArray(found.blocks) || !found.decoding) throw new Error("it has no trace; write it with paceline decode --draft DRAFT --json --trace");
    if (!found.trace.length) throw new Error("no drafted token was examined; decode a longer text");
    [trace, selected] = [found, 0];
    layOut();
    showTrace();
    find("said").textContent = `Read ${found.trace.length} examined tokens.`;
    find("read").hidden = false;
  } catch (error) {
    trace = null;
    find("said").textContent = `${file.name} is not a trace: ${error.message}`;
  }
};
find("file").addEventListener("change", (event) => { if (event.target.files[0]) readTrace(event.target.files[0]); });
for (const kind of ["change", "input"]) find("rule").addEventListener(kind, () => { if (trace) showTrace(); });

// ---- start
try {
  const settings = await (await ask("/api/settings")).json();
  schema = settings.request;
  find("models").textContent = `target ${settings.target}, draft ${settings.draft}`;
  form = fieldsOf(schema, {}, ["prompt"]);
  find("controls").replaceChildren(...form.nodes);
  ruleControl = controlOf("rule", schema.properties.rule);
  find("rule").replaceChildren(ruleControl.node);
  const missing = Object.keys(schema.properties.rule.discriminator.mapping).filter((name) => !(name in RULES));
  if (missing.length) throw new Error(`rules.js lacks ${missing.join(", ")}`);
  find("start").disabled = false;
} catch (error) {
  find("failure").textContent = error.message;
}

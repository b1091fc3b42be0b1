// The page: sends what the form says and draws the answer. Texts reach it by textContent alone.
const find = (selector) => document.querySelector(selector);
const make = (name, properties, ...children) => {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
};
const form = find("form");
let leave = null; // ends the text that is being decoded

async function* eventsOf(body) {
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch("/decode", { method: "POST", headers, body: JSON.stringify(body), signal: leave.signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    const lines = (rest + (done ? "\n" : value)).split("\n");
    rest = lines.pop();
    yield* lines.filter(Boolean).map((line) => JSON.parse(line));
    if (done) throw new Error("the server closed the connection; is it still running?");
  }
}
// a setting that is no number is a word, such as "tuned"
const settingOf = ({ name, value }) => [name, value.trim() === "" || Number.isNaN(Number(value)) ? value : Number(value)];
const valuesIn = (selector) => Object.fromEntries([...form.querySelectorAll(selector)].map(settingOf));
const request = ({ prompt, chat, rule }) => ({
  prompt: prompt.value, chat: chat.checked, ...valuesIn("[type=number]"), rule: { rule: rule.value, ...valuesIn("#settings input") },
});
const spanOf = ({ id, text, source, ...probabilities }) => {
  const said = Object.entries(probabilities).map(([name, value]) => `, ${name} ${value.toFixed(4)}`);
  return make("span", { className: `token ${source}`, title: `${JSON.stringify(text)} (token ${id}): ${source}${said.join("")}` }, text || "·");
};
const draw = async (way, body) => {
  const counts = {};
  for await (const { tokens, figures, error, end } of eventsOf({ ...body, plain: way === "plain" })) {
    if (error) throw new Error(error);
    if (end) return;
    find(`#${way}`).append(...(way === "plain" ? tokens.map(({ text }) => text) : [make("span", { className: "block" }, ...tokens.map(spanOf))]));
    find(`#figures-${way}`).textContent = figures;
    for (const { source } of tokens) counts[source] = (counts[source] ?? 0) + 1;
    if (way === "draft") find("#counts").replaceChildren(...Object.entries(counts).map(([source, number]) =>
      make("li", {}, make("span", { className: `token ${source}` }, source), ` ${number}`)));
  }
};
const show = (status, failure = "") => {
  find("#status").textContent = status;
  find("#failure").textContent = failure;
  find("#stop").disabled = !leave;
  find("#start").disabled = Boolean(leave);
};
const decode = async () => {
  const body = request(form.elements);
  leave = new AbortController();
  show("Decoding");
  for (const id of ["#draft", "#plain", "#counts", "#figures-draft", "#figures-plain"]) find(id).replaceChildren();
  const said = await draw("draft", body).then(() => form.elements.compare.checked && draw("plain", body))
    .then(() => ["Ended."], (error) => (leave.signal.aborted ? ["Stopped."] : ["", error.message]));
  leave = null;
  show(...said);
};
form.addEventListener("submit", (event) => { event.preventDefault(); if (!leave) decode(); });
addEventListener("keydown", ({ key, ctrlKey, metaKey }) => {
  if (key === "Escape") leave?.abort();
  if (key === "Enter" && (ctrlKey || metaKey) && !find("#start").disabled) form.requestSubmit();
});
find("#stop").addEventListener("click", () => leave?.abort());
find("#draft").addEventListener("pointerover", ({ target }) => { if (target.title) find("#token").textContent = target.title; });

const { models, rules } = await (await fetch("/settings")).json();
const choose = () => {
  const { about, settings } = rules[form.elements.rule.selectedIndex];
  find("#about").textContent = about;
  find("#settings").replaceChildren(...Object.entries(settings).map(([name, value]) =>
    make("label", {}, `${name} `, make("input", { name, value, required: true }))));
};
find("#models").textContent = models;
form.elements.rule.append(...rules.map(({ rule }) => make("option", { value: rule }, rule.replaceAll("_", " "))));
form.elements.rule.addEventListener("change", choose);
choose();
show("");

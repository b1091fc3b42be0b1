// The page: sends what the form says and draws the answer. Texts reach it by textContent alone.
const find = (selector) => document.querySelector(selector);
const make = (name, properties, ...children) => {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
};
const decimals = (value, count) => value?.toFixed(count) ?? "–";
const form = find("form");
const fail = (error) => { find("#failure").textContent = error.message; };
const ask = async (path, options) => {
  const answer = await fetch(path, options);
  if (answer.ok) return answer;
  throw new Error((await answer.json()).error);
};

// a setting that is no number is a word, such as "tuned"
const valueOf = ({ type, value, checked }) =>
  type === "checkbox" ? checked : type === "textarea" || value.trim() === "" || Number.isNaN(Number(value)) ? value : Number(value);
const valuesOf = (inputs) => Object.fromEntries([...inputs].map((input) => [input.name, valueOf(input)]));
const request = () => ({
  ...valuesOf(form.querySelectorAll("[name]:not(#settings *)")),
  rule: { rule: find("#rule").value, ...valuesOf(find("#settings").querySelectorAll("input")) },
});

const FIGURES = {
  tokens: ["tokens", 0], seconds: ["seconds", 2], tokens_per_s: ["tokens per second", 1],
  acceptance_rate: ["acceptance (accepted / examined)", 3], block_efficiency: ["tokens per target call", 2],
};
const row = (title, ...cells) =>
  make("tr", {}, make("th", { scope: "row" }, title), ...cells.map((text) => make("td", {}, text)));
const draw = ({ way, tokens, figures }, text) => {
  text.figures[way] = figures;
  const spans = tokens.map(({ id, text: written, source, target, draft }) => {
    if (way === "draft") text.counts[source] = (text.counts[source] ?? 0) + 1;
    const probabilities = target === undefined ? "" : `, target ${decimals(target, 4)}, draft ${decimals(draft, 4)}`;
    const title = `${JSON.stringify(written)} (${id}): ${source}${probabilities}`;
    return make("span", { className: `token ${way === "draft" ? source : "prefill"}`, title }, written);
  });
  find(`#${way}`).append(make("span", { className: "block" }, ...spans));
  const { draft = {}, plain = {} } = text.figures;
  find("#figures").replaceChildren(
    ...Object.entries(FIGURES).map(([name, [title, places]]) => row(title, decimals(draft[name], places), decimals(plain[name], places))),
    row("tokens per second, with / without", decimals(draft.tokens_per_s / plain.tokens_per_s || undefined, 2), ""),
  );
  find("#counts").replaceChildren(...Object.entries(text.counts).map(([source, number]) =>
    make("li", {}, make("span", { className: `token ${source}` }, source), ` ${number}`)));
};

let leave = null; // ends the text that is being decoded
const decode = async () => {
  leave = new AbortController();
  find("#start").disabled = !(find("#stop").disabled = false);
  find("main").hidden = false;
  for (const id of ["#failure", "#draft", "#plain", "#counts", "#figures"]) find(id).replaceChildren();
  find("#status").textContent = "Decoding";
  const text = { figures: {}, counts: {} };
  let ended = "The server closed the connection.";
  try {
    const headers = { "Content-Type": "application/json" };
    const answer = await ask("/decode", { method: "POST", headers, body: JSON.stringify(request()), signal: leave.signal });
    let rest = "";
    for await (const part of answer.body.pipeThrough(new TextDecoderStream())) {
      const lines = (rest + part).split("\n");
      rest = lines.pop();
      for (const event of lines.map((line) => JSON.parse(line))) {
        if (event.error) throw new Error(event.error);
        if (event.way) draw(event, text);
        else ended = "Ended.";
      }
    }
  } catch (error) {
    ended = error.name === "AbortError" ? "Stopped." : "";
    if (!ended) fail(error);
  }
  find("#status").textContent = ended;
  leave = null;
  find("#stop").disabled = !(find("#start").disabled = false);
};
form.addEventListener("submit", (event) => { event.preventDefault(); if (!leave) decode(); });
addEventListener("keydown", (event) => {
  if (event.key === "Escape") leave?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !find("#start").disabled) form.requestSubmit();
});
find("#stop").addEventListener("click", () => leave?.abort());
find("#draft").addEventListener("pointerover", ({ target }) => { if (target.title) find("#token").textContent = target.title; });

try {
  const { models, rules } = await (await ask("/settings")).json();
  find("#models").textContent = models;
  find("#rule").append(...rules.map(({ rule }) => make("option", { value: rule }, rule.replaceAll("_", " "))));
  const show = () => {
    const { about, settings } = rules[find("#rule").selectedIndex];
    find("#about").textContent = about;
    find("#settings").replaceChildren(...Object.entries(settings).map(([name, value]) =>
      make("label", {}, `${name} `, make("input", { name, value, required: true }))));
  };
  find("#rule").addEventListener("change", show);
  show();
  find("#start").disabled = false;
} catch (error) {
  fail(error);
}

"use strict";
(() => {
  // The charts take their colours from CSS variables, so a change of theme draws nothing again.
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const order = ["auto", "light", "dark"];
  const stored = () => {
    try { return localStorage.getItem("paceline-theme"); } catch { return null; }
  };
  let theme = order.includes(stored()) ? stored() : "auto";
  const apply = () => {
    if (theme === "auto") root.removeAttribute("data-theme");
    else root.setAttribute("data-theme", theme);
    button.textContent = `Theme: ${theme}`;
    const name = theme === "auto" ? "as the system" : theme;
    button.setAttribute("aria-label", `Theme: ${name}. Change the theme`);
  };
  button.addEventListener("click", () => {
    theme = order[(order.indexOf(theme) + 1) % order.length];
    try { localStorage.setItem("paceline-theme", theme); } catch { /* a file without storage */ }
    apply();
  });
  apply();

  // Arrow keys read one mark after the other, in the order of drawing.
  const readByKeys = (chart, readout) => {
    let at = -1;
    const marks = () => [...chart.querySelectorAll('[role="graphics-symbol"][aria-label]')]
      .filter((mark) => !mark.closest('[aria-roledescription="legend"]'));
    const leave = () => {
      chart.querySelectorAll(".here").forEach((mark) => mark.classList.remove("here"));
      readout.textContent = "";
    };
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") { leave(); at = -1; return; }
      if (step === undefined && event.key !== "Home" && event.key !== "End") return;
      const all = marks();
      if (!all.length) return;
      event.preventDefault();
      leave();
      if (event.key === "Home") at = 0;
      else if (event.key === "End") at = all.length - 1;
      else at = at < 0 && step < 0 ? all.length - 1 : (at + step + all.length) % all.length;
      all[at].classList.add("here");
      readout.textContent = all[at].getAttribute("aria-label");
    });
    chart.addEventListener("blur", leave);
  };

  // The widest entry of the legend decides how many columns fit.
  const longestName = (spec) => Math.max(8, ...spec.layer
    .flatMap((layer) => layer.encoding?.color?.scale?.domain ?? [])
    .map((name) => String(name).length));

  // A long name as two lines, divided after a comma or where a word ends, near to its middle.
  const inTwo = (name) => {
    const ends = [...name.matchAll(name.includes(", ") ? /, /g : /[ /_]/g)]
      .map((found) => found.index + found[0].length);
    if (name.length <= 18 || !ends.length) return [name];
    const off = (end) => Math.abs(end - name.length / 2);
    const end = ends.reduce((best, one) => (off(one) < off(best) ? one : best));
    return [name.slice(0, end).trimEnd(), name.slice(end)];
  };
  const narrow = (spec) => {
    spec.config.axis.labelLimit = 110;
    spec.layer.map((layer) => layer.encoding?.y)
      .filter((y) => y?.axis?.labelLimit)
      .forEach((y) => {
        const lines = Object.fromEntries(y.scale.domain.map((name) => [name, inTwo(name)]));
        Object.assign(y.axis, {
          labelExpr: `(${JSON.stringify(lines)})[datum.label]`,
          labelLimit: 150,
          labelFontSize: 11,
          labelLineHeight: 12,
        });
      });
  };

  const draw = async (panel) => {
    const chart = panel.querySelector(".chart");
    const spec = JSON.parse(panel.querySelector("script").textContent);
    const width = chart.clientWidth;
    spec.config.legend.columns = Math.max(1, Math.floor(width / (44 + 7.4 * longestName(spec))));
    spec.config.legend.labelLimit = Math.max(120, width - 90);
    if (width < 420) narrow(spec);
    await vegaEmbed(chart, spec, { actions: false, renderer: "svg", ast: true });
    readByKeys(chart, panel.querySelector(".readout"));
    chart.dataset.drawn = "yes";
  };
  // A link to a configuration opens it.
  const reveal = () => {
    const part = location.hash.startsWith("#source-") && document.getElementById(location.hash.slice(1));
    const first = part && part.querySelector("details");
    if (first) first.open = true;
  };
  addEventListener("hashchange", reveal);
  reveal();

  // Definitions are beside the text on wide screens and folded below the heading on narrow ones.
  const asides = [...document.querySelectorAll("aside details")];
  const wide = matchMedia("print, (min-width: 1060px)"); // paper has them all
  const fold = () => asides.forEach((one) => { one.open = wide.matches; });
  wide.addEventListener("change", fold);
  addEventListener("beforeprint", () => asides.forEach((one) => { one.open = true; }));
  addEventListener("afterprint", fold);
  fold();

  const panels = [...document.querySelectorAll(".panel")];
  Promise.all(panels.map(draw)).then(() => { root.dataset.ready = "yes"; });
})();

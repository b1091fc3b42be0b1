"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const themes = ["auto", "light", "dark"];
  // The charts take their colours from CSS variables, so a change of theme draws nothing again.
  const apply = (theme) => {
    root.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    try { localStorage.setItem("paceline-theme", theme); } catch { /* a file without storage */ }
  };
  let stored = "auto";
  try { stored = localStorage.getItem("paceline-theme") ?? stored; } catch { /* likewise */ }
  apply(themes.includes(stored) ? stored : "auto");
  button.addEventListener("click", () => {
    apply(themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length]);
  });

  // A link to a configuration opens it.
  const reveal = () => {
    document.querySelector("article:target details")?.setAttribute("open", "");
  };
  addEventListener("hashchange", reveal);
  reveal();

  const draw = (panel) => vegaEmbed(
    panel.querySelector(".chart"),
    JSON.parse(panel.querySelector("script").textContent),
    { actions: false, renderer: "svg", ast: true },
  );
  Promise.all([...document.querySelectorAll(".panel")].map(draw))
    .then(() => { root.dataset.ready = "yes"; });
})();

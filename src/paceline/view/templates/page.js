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

  const unpacked = (id) => {
    const letters = atob(document.getElementById(id).textContent);
    const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).text();
  };
  // The link is made when it is used: the text is in the page once.
  const offer = (link, kind, text) => link.addEventListener("click", () => {
    link.href = `data:${kind};charset=utf-8,${encodeURIComponent(text)}`;
  });
  const all = (selector) => [...document.querySelectorAll(selector)];
  const draw = async () => {
    const data = JSON.parse(await unpacked("data"));
    all("a.csv").forEach((link, at) => offer(link, "text/csv", data.csv[at]));
    all("a.yaml").forEach((link, at) => offer(link, "application/yaml", data.yaml[at]));
    all("article pre code").forEach((code, at) => { code.textContent = data.yaml[at]; });
    if (data.charts.length) {
      const library = document.createElement("script");
      library.textContent = await unpacked("library");
      document.head.append(library);
    }
    await Promise.all(all(".chart").map((chart, at) => {
      return vegaEmbed(
        chart, data.charts[at], { config: data.config, actions: false, renderer: "svg", ast: true },
      );
    }));
    root.dataset.ready = "yes";
  };
  draw();
})();

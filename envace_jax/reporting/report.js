// The report's page: unpacks the data, fills every part, draws again when a choice, the width or the data change.
// A live page asks its server for what is new and keeps what the reader has opened, chosen and scrolled to.
"use strict";
(() => {
  const {element} = EnvaceCharts;
  const LIVE_MS = 3000;  // between two questions to the server
  const MANY_STEPS = 60;  // from so many on, curves are smoothed until the reader chooses otherwise
  const OTHER = {
    id: "other", title: "Any other metric", text: "What stands in metrics.jsonl and on no chart above.", unit: "value",
    metrics: [], pattern: "", scale: "zero",
  };
  const $ = id => document.getElementById(id);
  const state = {
    data: null, axis: "step", smooth: 1, hidden: new Set(), version: "", viewing: false, figures: new Map(),
  };

  async function unpack(id) {
    const bytes = Uint8Array.from(atob($(id).textContent), character => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  // --- charts ---

  function figureOf(panel) {
    const region = {class: "wide tall", tabindex: "0", role: "region", "aria-label": `${panel.title}: numbers`};
    const parts = {
      panel, text: element("p"), legend: element("ul", {class: "legend"}), plot: element("div", {class: "plot"}),
      details: element("details", {}, element("summary", {}, "Numbers")), table: element("div", region),
    };
    const title = element("h3", {id: `chart-${panel.id}`}, panel.title);
    const caption = element("figcaption", {}, title, parts.text);
    parts.figure = element("figure", {"aria-labelledby": title.id, "data-panel": panel.id}, caption);
    parts.details.append(parts.table);
    parts.details.addEventListener("toggle", () => fillTable(parts));
    if (panel === OTHER) parts.figure.append(otherChoice(parts));
    parts.figure.append(parts.legend, parts.plot, parts.details);
    $("charts").append(parts.figure);
    state.figures.set(panel.id, parts);
    return parts;
  }

  function otherChoice(parts) {
    parts.choice = element("select");
    parts.choice.addEventListener("change", () => { chooseOther(parts); drawFigure(parts); });
    return element("label", {class: "soft"}, "Metric ", parts.choice);
  }
  function fillOther(parts) {
    const taken = new Set(state.data.panels.flatMap(panel => panel.metrics.map(([name]) => name)));
    const patterns = state.data.panels.filter(panel => panel.pattern).map(panel => new RegExp(panel.pattern, "u"));
    const names = [...new Set(state.data.runs.flatMap(run => Object.keys(run.metrics)))]
      .filter(name => !taken.has(name) && !patterns.some(pattern => pattern.test(name))).sort();
    const chosen = parts.choice.value;
    parts.choice.replaceChildren(...names.map(name => element("option", {value: name}, name)));
    if (names.includes(chosen)) parts.choice.value = chosen;
    else if (names.includes("grad_norm")) parts.choice.value = "grad_norm";
    chooseOther(parts);
  }
  function chooseOther(parts) {
    parts.panel = {...OTHER, metrics: parts.choice.value ? [[parts.choice.value, parts.choice.value]] : []};
  }

  function drawFigure(parts) {
    const {panel} = parts, {runs} = state.data, several = runs.length > 1;
    const shown = runs.map(run => !state.hidden.has(run.name));
    const series = parts.series = EnvaceCharts.seriesOf(panel, runs, shown, state.axis, state.smooth);
    const {left} = EnvaceCharts.metricsOf(panel, runs);
    parts.text.textContent = panel.text + (left ? ` The most frequent are drawn, ${left} more left out.` : "");
    parts.figure.classList.toggle("empty", !series.length);
    parts.details.hidden = !series.length;
    parts.legend.replaceChildren(...EnvaceCharts.legend(series, several));
    if (!series.length) {
      parts.plot.replaceChildren(state.hidden.size ? "Not recorded by a run that is shown." : "Not recorded.");
      return;
    }
    const width = Math.max(240, Math.floor(parts.plot.clientWidth));
    const svg = EnvaceCharts.draw(panel, series, {axis: state.axis, smooth: state.smooth, several, width});
    // The whole has one label; its parts may have none.
    for (const part of svg.querySelectorAll("[aria-label]")) part.removeAttribute("aria-label");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", EnvaceCharts.described(panel, series, state.axis));
    parts.plot.replaceChildren(svg);
    parts.width = width;
    fillTable(parts);
  }
  // Only where it is looked at: it is long.
  function fillTable(parts) {
    const place = parts.table.scrollTop;
    const wanted = parts.details.open && parts.series.length;
    parts.table.replaceChildren(...(wanted ? [EnvaceCharts.table(parts.series)] : []));
    parts.table.scrollTop = place;
  }

  function drawAll() {
    for (const parts of state.figures.values()) drawFigure(parts);
  }
  const resized = new ResizeObserver(() => {
    for (const parts of state.figures.values()) {
      if (parts.width && Math.abs(parts.plot.clientWidth - parts.width) > 1) drawFigure(parts);
    }
  });

  // --- the other parts ---

  function fillRuns() {
    const {runs} = state.data, alone = runs.length === 1;
    $("runs").replaceChildren(...runs.map((run, i) => EnvaceTables.tile(run, EnvaceCharts.styleOf(i, 0, true), alone)));
    const notes = runs.flatMap(run => run.notes.map(note => alone ? note : `${run.name}: ${note}`));
    $("notes").hidden = !notes.length;
    $("notes").replaceChildren(...notes.map(note => element("li", {}, note)));
    $("made").textContent = `made ${new Date(state.data.made).toLocaleString()}, envace_jax ${state.data.version}`;
    document.title = `${runs.map(run => run.name).join(", ")} – EnvACE report`;
    if (alone || $("shown").querySelectorAll("input").length === runs.length) return;
    $("shown").append(...runs.map((run, i) => {
      const box = element("input", {type: "checkbox"});
      box.checked = true;
      box.addEventListener("change", () => {
        if (box.checked) state.hidden.delete(run.name); else state.hidden.add(run.name);
        drawAll();
      });
      return element("label", {}, box, EnvaceCharts.swatch(EnvaceCharts.styleOf(i, 0, true), true), run.name);
    }));
  }
  function fillSettings() {
    const {count, shown} = EnvaceTables.settings(state.data, $("which").value, $("setting-filter").value.trim());
    $("setting-table").replaceChildren(shown);
    $("setting-count").textContent = `${count} settings`;
  }
  function fillViewer(viewer) {
    if (!window.EnvaceViewer || !viewer.runs.length) return;
    if (state.viewing) {
      EnvaceViewer.update(viewer);
    } else {
      $("viewer-root").replaceChildren();
      EnvaceViewer.start($("viewer-root"), viewer);
      state.viewing = true;
    }
  }

  function show(data, viewer) {
    // A metric may have the name of what every object inherits: "constructor", "__proto__".
    for (const run of data.runs)
      for (const named of [run.metrics, run.summary]) if (named) Object.setPrototypeOf(named, null);
    state.data = data;
    fillRuns();
    for (const panel of [...data.panels, OTHER]) {
      const parts = state.figures.get(panel.id) ?? figureOf(panel);
      if (panel.id === OTHER.id) fillOther(parts);
    }
    drawAll();
    fillSettings();
    $("environment-table").replaceChildren(EnvaceTables.environments(data));
    $("summary-table").replaceChildren(EnvaceTables.summaries(data));
    fillViewer(viewer);
  }

  // --- live ---

  async function ask() {
    let words = "live";
    try {
      const response = await fetch(`data?have=${encodeURIComponent(state.version)}`, {cache: "no-store"});
      if (response.status === 200) {
        const {version, data, viewer} = await response.json();
        state.version = version;
        show(data, viewer);
      } else if (response.status !== 204) {
        words = `not up to date: ${await response.text()}`;
      }
    } catch {
      words = `not up to date: the server does not answer`;
    }
    if ($("live").textContent !== words) $("live").textContent = words;
  }
  async function follow() {
    $("live").hidden = false;
    for (;;) {
      if (!document.hidden) await ask();
      await new Promise(done => setTimeout(done, LIVE_MS));
    }
  }

  // --- start ---

  function setTheme(name) {
    if (name) document.documentElement.dataset.theme = name; else delete document.documentElement.dataset.theme;
  }
  function listen() {
    $("axis").addEventListener("change", () => { state.axis = $("axis").value; drawAll(); });
    $("smooth").addEventListener("change", () => { state.smooth = Number($("smooth").value); drawAll(); });
    $("which").addEventListener("change", fillSettings);
    $("setting-filter").addEventListener("input", fillSettings);
    for (const form of document.querySelectorAll("form")) {
      form.addEventListener("submit", event => event.preventDefault());
    }
    for (const radio of document.querySelectorAll("input[name=theme]")) {
      radio.addEventListener("change", () => setTheme(radio.value));
    }
    resized.observe($("charts"));
  }
  async function start() {
    listen();
    if (!window.DecompressionStream) throw new Error("this browser is too old to unpack it (no DecompressionStream)");
    const [data, viewer] = [await unpack("report-data"), await unpack("viewer-data")];
    if (data.runs.length === 1) {
      $("which").querySelector("[value=differ]").remove();
    }
    if (data.runs.some(run => run.steps.length >= MANY_STEPS)) $("smooth").value = "10";
    state.smooth = Number($("smooth").value);
    state.version = data.at ?? "";
    show(data, viewer);
    document.documentElement.dataset.ready = "true";
    if (data.live) follow();
  }
  start().catch(error => {
    $("problem").textContent = `The report cannot be shown: ${error.message}`;
    $("problem").hidden = false;
    throw error;
  });
})();

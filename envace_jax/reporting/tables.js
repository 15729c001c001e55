// The report's tables: settings and what differs in them, environments, summaries; and a tile for each run.
"use strict";
window.EnvaceTables = (() => {
  const {element, short} = EnvaceCharts;

  // A nested object as a flat one, with dotted names.
  function flat(value, prefix = "") {
    const isGroup = entry => entry && typeof entry === "object" && !Array.isArray(entry);
    return Object.entries(value ?? {}).flatMap(([key, entry]) =>
      isGroup(entry) ? flat(entry, `${prefix}${key}.`) : [[prefix + key, entry]]);
  }
  const text = value => value === undefined ? "–" : typeof value === "string" ? value || '""' : JSON.stringify(value);

  function grid(corner, columns, rows) {
    const head = [corner, ...columns].map(name => element("th", {scope: "col"}, name));
    return element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
  }
  function row(name, cells, mark = "") {
    return element("tr", {class: mark}, element("th", {scope: "row"}, name), ...cells);
  }
  const cell = (value, kind = "") => element("td", {class: kind}, value);
  const nothing = words => element("p", {class: "soft", style: "padding: .5rem .8rem"}, words);

  function settings(data, which, filter) {
    const runs = data.runs.filter(run => run.config);
    const columns = runs.map(run => new Map(flat(run.config)));
    const defaults = new Map(flat(data.defaults));
    const names = [...new Set(columns.flatMap(column => [...column.keys()]))];
    const differs = name => new Set(columns.map(column => JSON.stringify(column.get(name)))).size > 1;
    const changed = (column, name) => JSON.stringify(column.get(name)) !== JSON.stringify(defaults.get(name));
    const wanted = names.filter(name => name.toLowerCase().includes(filter.toLowerCase()) && (which === "all"
      || (which === "differ" ? differs(name) : columns.some(column => changed(column, name)))));
    if (!wanted.length) return {count: 0, shown: nothing(runs.length ? "None." : "No run's settings could be read.")};
    const cells = name => columns.map(column => cell(text(column.get(name)), changed(column, name) ? "changed" : ""));
    const rows = wanted.map(name =>
      row(name, [...cells(name), cell(text(defaults.get(name)))], differs(name) ? "differs" : ""));
    return {count: wanted.length, shown: grid("setting", [...runs.map(run => run.name), "default"], rows)};
  }

  // The newest start of each run, and what another start of it had otherwise.
  function environments(data) {
    const runs = data.runs.filter(run => run.starts.length);
    if (!runs.length) return nothing("No run says where it ran: this version's runs do, in environment.json.");
    const columns = runs.map(run => run.starts.map(start => new Map(flat(start))));
    const names = [...new Set(columns.flat().flatMap(start => [...start.keys()]))];
    const rows = [row("starts", runs.map(run => cell(String(run.starts.length))))];
    for (const name of names) {
      const values = columns.map(starts => [...new Set(starts.map(start => text(start.get(name))))]);
      const newest = columns.map(starts => text(starts.at(-1).get(name)));
      const often = ["time", "step"].includes(name);
      rows.push(row(name, newest.map((value, i) => {
        const before = often ? [] : values[i].filter(other => other !== value);
        return cell(before.length ? `${value} (before: ${before.join("; ")})` : value);
      }), !often && name !== "command" && new Set(newest).size > 1 ? "differs" : ""));
    }
    return grid("newest start", runs.map(run => run.name), rows);
  }

  function summaries(data) {
    const runs = data.runs.filter(run => run.summary);
    if (!runs.length) return nothing("No summary.json yet: a run writes it when it is finished.");
    const names = [...new Set(runs.flatMap(run => Object.keys(run.summary)))];
    const shown = value => typeof value === "number" ? short(value) : text(value ?? undefined);
    return grid("result", runs.map(run => run.name), names.map(name =>
      row(name, runs.map(run => cell(shown(run.summary[name]), "number")))));
  }

  function duration(seconds) {
    const minutes = Math.round(seconds / 60);
    if (seconds < 60) return `${Math.round(seconds)} s`;
    return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }
  // What a tile says of a run's beginning and end.
  const ENDS = {
    reward: "reward", eval_real_success: "real success", eval_real_success_greedy: "real success, greedy",
    eval_unseen_domain: "unseen domain", eval_fidelity: "fidelity",
  };
  const ends = (run, name) => {
    const values = (run.metrics[name] ?? []).filter(value => value !== null);
    return values.length ? [values[0], values.at(-1)] : null;
  };

  function tile(run, style, alone) {
    const facts = [], add = (name, value) => facts.push(element("dt", {}, name), element("dd", {}, value));
    const last = run.steps.at(-1) ?? 0, wanted = run.config?.steps;
    add("steps", `${short(last)}${wanted ? ` of ${short(wanted)}` : ""}${run.summary ? ", finished" : ""}`);
    for (const [name, label] of Object.entries(ENDS)) {
      const found = ends(run, name);
      if (found) add(label, found[0] === found[1] ? short(found[1]) : `${short(found[0])} → ${short(found[1])}`);
    }
    const sum = name => d3.sum(run.metrics[name] ?? []);
    if (run.metrics.masked) add("masked", `${short(sum("masked"))} trajectories in all`);
    if (run.metrics.seconds) add("time in steps", duration(sum("seconds")));
    if (run.metrics.tokens_per_second) add("tokens/s", `${short(d3.median(run.metrics.tokens_per_second))} (median)`);
    if (run.written) add("last written", new Date(run.written * 1000).toLocaleString());
    add("folder", run.folder);
    const title = element("h3", {}, ...(alone ? [] : [EnvaceCharts.swatch(style, true)]), run.name);
    return element("article", {class: "tile"}, title, element("dl", {}, ...facts));
  }

  return {settings, environments, summaries, tile};
})();

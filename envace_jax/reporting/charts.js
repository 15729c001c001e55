// Curves over a run's steps: from columns of numbers to a picture, a legend, a description and a table.
// Uses Plot and d3, which stand in the page before it. Text from data is only ever put in as text.
"use strict";
window.EnvaceCharts = (() => {
  const COLOURS = 8;
  const DASHES = ["", "7 3", "2 2.5", "10 3 2 3", "4 2 1 2 1 2", "14 4", "1 4", "8 2 2 2 2 2"];
  const SYMBOLS = ["circle", "square", "triangle", "diamond", "star", "cross", "wye", "plus"];
  const MOST_LINES = 8;  // metrics on one chart of one run, half as many on one of several; a pattern may find more
  const MARKS = 8;  // on a line, where marks tell runs apart
  const HEIGHT = 230;

  const element = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "class") made.className = value; else made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  };

  const plain = d3.format(",");
  function short(value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
    if (Number.isInteger(value)) return plain(value);
    return size >= 1000 ? plain(Math.round(value)) : String(Number(value.toPrecision(4)));
  }

  // What the x axis may be: each gives a run's places, one for each of its steps.
  const AXES = {
    step: {label: "step", of: run => run.steps},
    hours: {label: "hours of steps", of: run => summed(run.metrics.seconds, run.steps.length, 3600)},
    tokens: {label: "sampled tokens", of: run => summed(run.metrics.sampled_tokens, run.steps.length, 1)},
  };
  function summed(values, length, unit) {
    const places = [];
    let sum = 0;
    for (let i = 0; i < length; i++) places.push(sum += (values?.[i] ?? 0) / unit);
    return places;
  }

  // The metrics of a panel that any run has, most used first where a pattern finds too many.
  function metricsOf(panel, runs) {
    const has = name => runs.some(run => run.metrics[name]?.some(value => value !== null));
    const found = panel.metrics.filter(([name]) => has(name)).map(([name, label]) => ({name, label}));
    if (!panel.pattern) return {shown: found, left: 0};
    const pattern = new RegExp(panel.pattern, "u");
    const total = name => d3.sum(runs, run => d3.sum(run.metrics[name] ?? []));
    const all = new Set(runs.flatMap(run => Object.keys(run.metrics)));
    const names = [...all].filter(name => pattern.test(name) && has(name));
    names.sort((one, other) => total(other) - total(one) || d3.ascending(one, other));
    found.push(...names.map(name => ({name, label: name.match(pattern)[1].replaceAll("_", " ")})));
    const most = runs.length > 1 ? MOST_LINES / 2 : MOST_LINES;
    return {shown: found.slice(0, most), left: Math.max(0, found.length - most)};
  }

  // A line for each run and metric. Alone, a run's metrics have colours; beside others each run has its own, and the
  // dashes are the metrics'.
  function seriesOf(panel, runs, shown, axis, smooth) {
    const several = runs.length > 1;
    return runs.flatMap((run, r) => !shown[r] ? [] : metricsOf(panel, runs).shown.flatMap((metric, m) => {
      if (!run.metrics[metric.name]) return [];
      const values = panel.pattern ? counted(run, metric.name) : run.metrics[metric.name];
      const places = AXES[axis].of(run);
      const points = [];
      for (let i = 0; i < values.length; i++) {
        if (values[i] !== null) points.push({x: places[i], y: values[i], step: run.steps[i]});
      }
      if (!points.length) return [];
      const rare = metric.name.startsWith("eval_") || points.length < 3;
      return [{
        run: run.name, place: r, metric: metric.label, label: several ? `${run.name}: ${metric.label}` : metric.label,
        style: styleOf(several ? r : m, m, several), points, rare,
        line: rare || smooth < 2 ? points : smoothed(points, smooth),
      }];
    }));
  }
  // What a pattern finds are counts, which a step that counted nothing leaves out.
  function counted(run, name) {
    const trained = run.metrics.reward ?? run.metrics[name];
    return run.metrics[name].map((value, i) => value ?? (trained[i] === null ? null : 0));
  }
  function styleOf(colour, dash, several) {
    return {
      colour: `var(--series-${colour % COLOURS + 1})`, dash: DASHES[dash % DASHES.length],
      symbol: SYMBOLS[(several ? colour + Math.floor(colour / COLOURS) : dash) % SYMBOLS.length],
    };
  }
  function smoothed(points, count) {
    let sum = 0;
    return points.map((point, i) => {
      sum += point.y - (i >= count ? points[i - count].y : 0);
      return {...point, y: sum / Math.min(i + 1, count)};
    });
  }

  function swatch(style, marked) {
    const svg = d3.create("svg").attr("class", "swatch").attr("width", 34).attr("height", 12)
      .attr("aria-hidden", "true");
    svg.append("line").attr("x1", 1).attr("x2", 33).attr("y1", 6).attr("y2", 6).attr("stroke-width", 2)
      .attr("stroke", style.colour).attr("stroke-dasharray", style.dash || null);
    if (marked) {
      svg.append("path").attr("transform", "translate(17 6)").attr("fill", style.colour)
        .attr("d", d3.symbol(symbolType(style.symbol), 42)());
    }
    return svg.node();
  }
  const symbolType = name => d3[`symbol${name[0].toUpperCase()}${name.slice(1)}`];

  // What lines look like: alone each one's name; of several runs the dashes' meaning, and the runs' colours and marks.
  function legend(series, several) {
    const entry = (style, mark, name) => element("li", {}, swatch(style, mark), name);
    if (!several) return series.length > 1 ? series.map(one => entry(one.style, one.rare, one.metric)) : [];
    const metrics = [...new Map(series.map(one => [one.metric, one])).values()];
    const runs = [...new Map(series.map(one => [one.run, one])).values()];
    const dashes = metrics.map(one => entry({...one.style, colour: "var(--muted)"}, false, one.metric));
    return [...(metrics.length > 1 ? dashes : []), ...runs.map(one => entry({...one.style, dash: ""}, true, one.run))];
  }

  // Points of a line that get a mark: all of a rare one, and a few of another, elsewhere on each run's.
  function marked(series, several) {
    if (series.rare) return series.line;
    if (!several) return [];
    const every = Math.max(1, Math.floor(series.line.length / MARKS));
    const from = Math.floor(every * ((series.place * 0.382 + 0.3) % 1));
    return series.line.filter((_, i) => i % every === from);
  }

  function draw(panel, series, {axis, width, several, smooth}) {
    const log = panel.scale === "log" && series.some(one => one.points.some(point => point.y > 0));
    const usable = points => log ? points.filter(point => point.y > 0) : points;
    const marks = [Plot.gridY({stroke: "var(--line)", strokeOpacity: 1})];
    for (const one of series) {
      const stroke = one.style.colour, at = {x: "x", y: "y"}, faint = several ? .15 : .25;
      if (!one.rare && smooth > 1) {
        marks.push(Plot.lineY(usable(one.points), {...at, stroke, strokeOpacity: faint, strokeWidth: 1}));
      }
      const dash = one.style.dash || undefined;
      marks.push(Plot.lineY(usable(one.line), {...at, stroke, strokeWidth: 2, strokeDasharray: dash}));
      marks.push(Plot.dot(usable(marked(one, several)), {...at, fill: stroke, symbol: one.style.symbol, r: 4}));
    }
    const all = series.flatMap(one => usable(one.line).map(point => ({...point, label: one.label})));
    const font = {fontSize: "12px", fontFamily: "inherit"};
    return Plot.plot({
      width, height: HEIGHT, marginLeft: 54, marginRight: 14, marginBottom: 34,
      marks: [...marks, ...told(all, axis, smooth)],
      style: {background: "transparent", color: "var(--text)", overflow: "visible", ...font},
      x: {...acrossOf(all, axis), ticks: Math.max(2, Math.round(width / 90))}, y: upOf(panel, series, log),
    });
  }
  function acrossOf(all, axis) {
    const [low, high] = d3.extent(all, point => point.x);
    const tickFormat = axis === "step" ? value => Number.isInteger(value) ? plain(value) : "" : "~s";
    const domain = low === high ? [low - 1, high + 1] : [low, high];
    return {label: AXES[axis].label, labelArrow: "none", domain, tickFormat};
  }
  function upOf(panel, series, log) {
    const common = {label: panel.unit, labelArrow: "none", ticks: 5};
    if (log) return {...common, type: "log", nice: true, tickFormat: ".0e"};
    const [bottom, top] = d3.extent(series.flatMap(one => one.points), point => point.y);
    const share = panel.scale === "share";
    const domain = [Math.min(0, bottom), Math.max(share ? 1 : 0, top) || 1];
    return {...common, domain, nice: !share, tickFormat: axisNumber};
  }
  const axisNumber = value => Math.abs(value) >= 10000 ? d3.format("~s")(value) : String(Number(value.toPrecision(6)));

  // What the pointer tells: all lines at one step, or the nearest point where lines have no places in common.
  function told(all, axis, smooth) {
    const mean = smooth > 1 ? ` (mean of ${smooth})` : "";
    const paint = {fill: "var(--panel)", stroke: "var(--field)", fontSize: 12, textPadding: 8, pointerSize: 8};
    if (axis !== "step") {
      const title = point => `${point.label}\nstep ${point.step}${mean}: ${short(point.y)}`;
      return [Plot.tip(all, Plot.pointer({x: "x", y: "y", title, ...paint}))];
    }
    const rows = [...d3.group(all, point => point.x)].map(([x, points]) => ({
      x, y: d3.mean(points, point => point.y),
      title: [`step ${plain(x)}${mean}`, ...points.map(point => `${point.label}: ${short(point.y)}`)].join("\n"),
    }));
    return [
      Plot.ruleX(rows, Plot.pointerX({x: "x", stroke: "var(--muted)"})),
      Plot.tip(rows, Plot.pointerX({x: "x", y: "y", title: "title", ...paint})),
    ];
  }

  function described(panel, series, axis) {
    const parts = series.map(one => {
      const first = one.points[0], last = one.points.at(-1);
      const [low, high] = d3.extent(one.points, point => point.y);
      return `${one.label}: from ${short(first.y)} at step ${first.step} to ${short(last.y)} at step ${last.step}, `
        + `between ${short(low)} and ${short(high)}.`;
    });
    return `${panel.title}, ${panel.unit} over ${AXES[axis].label}. ${parts.join(" ")}`;
  }

  function table(series) {
    const steps = [...new Set(series.flatMap(one => one.points.map(point => point.step)))].sort(d3.ascending);
    const columns = series.map(one => new Map(one.points.map(point => [point.step, point.y])));
    const names = ["step", ...series.map(one => one.label)];
    const head = element("tr", {}, ...names.map(name => element("th", {scope: "col"}, name)));
    const rows = steps.map(step => element("tr", {}, element("th", {scope: "row"}, plain(step)),
      ...columns.map(column => element("td", {class: "number"}, short(column.get(step))))));
    return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
  }

  return {COLOURS, AXES, element, short, metricsOf, seriesOf, styleOf, swatch, legend, draw, described, table};
})();

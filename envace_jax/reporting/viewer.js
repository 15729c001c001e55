// The trajectory viewer: what there is, what of it is listed, which one is shown. `EnvaceViewer.start(root, {runs})` takes
// what trajectories.py gives, and `EnvaceViewer.update({runs})` newer data of them. It fetches nothing and keeps nothing.
"use strict";
(() => {

const {element, plain, inline} = window.EnvaceText;
const {conversation, summary, taskPart, lacking, number, count, LEVELS} = window.EnvaceTrajectory;
const FORMAT = 1;      // of the data
const ROW = 52;        // height of a row of the list, in pixels; viewer.css has it too
const AROUND = 6;      // rows built above and below those that are seen
const KEPT = 40;       // decoded trajectories
const SLICE = 10;      // milliseconds of work before the page may draw again
const SHOWN = {
  all: ["all", () => true],
  failed: ["failed (masked: an outside fault)", row => row.failed],
  untrained: ["not trained (loss mask empty)", row => row.trained === "none" || row.failed],
  differing: ["a rehearsed result differs from the recorded", row => row.differing > 0],
  unequal: ["attempts of unequal reward", (row, run) => run.spread(row) > 1e-6],
};
const rewardOf = (row, worst) => row.reward ?? worst;
const ORDERS = {
  run: ["as the run went", null],
  highest: ["highest reward first", (one, other) => rewardOf(other, -1) - rewardOf(one, -1)],
  lowest: ["lowest reward first", (one, other) => rewardOf(one, 2) - rewardOf(other, 2)],
  differing: ["most differing results first", (one, other) => other.differing - one.differing],
};
const SHADES = {none: "none", logprob: "log-probability", advantage: "advantage"};
const KEYS = [["j, k", "next and previous trajectory of the list"], ["]  [", "next and previous step"],
  [".  ,", "next and previous attempt"], ["s", "next shading"], ["g", "attempts side by side, or one alone"], ["/", "search"]];

// A run's data with what is asked of it again and again.
function prepare({name, data}) {
  const {columns, tasks = [], bodies = []} = data ?? {};
  const readable = data?.format === FORMAT;
  const rows = !readable ? [] : bodies.map((_, place) =>
    Object.fromEntries(Object.entries(columns).map(([key, values]) => [key, values[place]])));
  const groups = new Map();
  rows.forEach((row, place) => {
    Object.assign(row, {place, name: tasks[row.task].task_id, key: `${row.step} ${row.group ?? `task ${row.task}`}`});
    if (!groups.has(row.key)) groups.set(row.key, []);
    groups.get(row.key).push(place);
  });
  const decoded = new Map(), texts = [];
  const run = {
    name, rows, groups, data, readable,
    steps: [...new Set(rows.map(row => row.step))],
    spread(row) {
      const rewards = groups.get(row.key).map(place => rows[place].reward).filter(reward => reward !== null);
      return rewards.length ? Math.max(...rewards) - Math.min(...rewards) : 0;
    },
    view(place) {
      let view = decoded.get(place);
      if (!view) {
        view = JSON.parse(bodies[place]);
        for (const step of view.steps) {
          if (typeof step.message === "number") step.message = data.messages[step.message];
          const {content} = step.message;  // a list of parts, say
          if (content !== null && typeof content === "object") step.message.content = JSON.stringify(content);
        }
        Object.assign(view, {row: rows[place], task: tasks[rows[place].task]});
        decoded.set(place, view);
        if (decoded.size > KEPT) decoded.delete(decoded.keys().next().value);
      }
      return view;
    },
    // What a search looks through: everything that was said or judged, in small letters.
    text(place) {
      if (texts[place] === undefined) {
        const {steps, turns, task, row} = run.view(place);
        texts[place] = [row.name, row.reason, ...steps.flatMap(({message}) => [message.content, message.reasoning_content, message.name,
          ...(message.calls ?? []).flat()]), ...turns.flatMap(turn => turn.words ?? []),
        ...(task.checklist ?? []).flat().map(item => item.question)].filter(Boolean).join("\n").toLowerCase();
      }
      return texts[place];
    },
  };
  return run;
}

function start(root, {runs: given}) {
  let runs = given.map(prepare), run = runs[0];
  let chosen = null;                        // the place of what is shown, in `run`
  let listed = [];                          // places, in the order of the list
  let shade = "none", together = false, search = 0;

  // --- the parts of the page ---

  const option = ([value, text]) => element("option", {value}, plain(text));
  const labelled = (text, control, ...more) => element("div", {class: "tv-field"}, element("label", {for: control.id}, text),
    element("div", {class: "tv-control"}, more[0], control, more[1]));
  const button = (text, label, onclick) => element("button", {type: "button", "aria-label": label, title: label, onclick}, text);
  const select = (id, onchange, options = []) => element("select", {id: `tv-${id}`, onchange}, options.map(option));
  const runField = select("run", () => chooseRun(runs[Number(runField.value)]));
  const stepField = select("step", () => goStep(Number(stepField.value)));
  const taskField = select("task", () => show(run.groups.get(taskField.value)[0]));
  const attemptField = select("attempt", () => show(Number(attemptField.value)));
  const around = (field, what) => [button("‹", `previous ${what}`, () => move(field, -1)), button("›", `next ${what}`, () => move(field, 1))];
  const picks = element("div", {class: "tv-picks"}, labelled("Run", runField),
    labelled("Step", stepField, ...around(stepField, "step")), labelled("Task", taskField, ...around(taskField, "task")),
    labelled("Attempt", attemptField, ...around(attemptField, "attempt")));
  const shownField = select("shown", filter, Object.entries(SHOWN).map(([key, [text]]) => [key, text]));
  const endedField = select("ended", filter);
  const orderField = select("order", filter, Object.entries(ORDERS).map(([key, [text]]) => [key, text]));
  let typing = 0;
  const searchField = element("input", {id: "tv-search", type: "search", autocomplete: "off", spellcheck: "false", oninput: () => {
    clearTimeout(typing);
    typing = setTimeout(filter, 150);
  }});
  const status = element("p", {class: "tv-status", role: "status"});
  const filters = element("div", {class: "tv-filters"}, labelled("Show", shownField), labelled("Ended by", endedField),
    labelled("Order", orderField), labelled("Text", searchField));
  const space = element("div", {class: "tv-space", role: "none"});
  const list = element("div", {class: "tv-list", role: "listbox", tabindex: "0", "aria-label": "Trajectories", onscroll: () =>
    requestAnimationFrame(drawList), onkeydown: listKey}, space);
  const detail = element("div", {class: "tv-detail"});
  const notes = element("div", {class: "tv-notes"});
  const help = element("details", {class: "tv-fold"}, element("summary", {}, "Keys"),
    element("dl", {class: "tv-keys"}, KEYS.flatMap(([keys, text]) => [element("dt", {}, element("kbd", {}, keys)), element("dd", {}, text)])),
    element("p", {class: "tv-note"}, "They work while the focus is within the viewer, and not in a field."));
  root.classList.add("tv");
  root.replaceChildren(picks, filters, status, notes, element("div", {class: "tv-both"}, element("div", {class: "tv-left"}, list, help), detail));
  root.onkeydown = rootKey;
  new ResizeObserver(drawList).observe(list);

  // --- what is shown ---

  function chooseRun(next, wanted, unchanged = false) {
    run = next;
    runField.replaceChildren(...runs.map(({name}, place) => option([place, name])));
    runField.value = runs.indexOf(run);
    const reasons = new Map();
    for (const {reason} of run.rows) reasons.set(reason.split(":")[0], (reasons.get(reason.split(":")[0]) ?? 0) + 1);
    const ended = endedField.value;
    endedField.replaceChildren(...[["", "anything"], ...[...reasons].map(([reason, many]) => [reason, `${reason} (${many})`])].map(option));
    endedField.value = reasons.has(ended) ? ended : "";
    const told = run.readable ? [run.data.left_out.text, ...run.data.notes] :
      [run.data ? "These trajectories are of another version of the program: they cannot be shown." : "This run has no trajectories."];
    notes.replaceChildren(...told.filter(Boolean).map(text => element("p", {class: "tv-note"}, inline(text))));
    for (const field of [picks, filters, root.querySelector(".tv-both")]) field.classList.toggle("tv-none", !run.rows.length);
    picks.classList.toggle("tv-none", !run.rows.length && runs.length < 2);
    if (run.readable && !run.rows.length) notes.append(element("p", {class: "tv-note"}, "This run has no trajectories to show."));
    chosen = null;
    filter();
    if (wanted) show(wanted.place, unchanged);
    else if (run.rows.length) show(run.groups.get(run.rows.at(-1).key)[0]);
    else detail.replaceChildren();
  }

  function show(place, drawn = false) {
    chosen = place;
    const row = run.rows[place];
    fill(stepField, run.steps.map(step => [step, String(step)]), row.step);
    const tasks = [...run.groups].filter(([key, places]) => run.rows[places[0]].step === row.step);
    fill(taskField, tasks.map(([key, places]) => [key, run.rows[places[0]].name]), row.key);
    fill(attemptField, run.groups.get(row.key).map(other =>
      [other, `${run.rows[other].attempt} (${run.rows[other].failed ? "failed" : `reward ${number(run.rows[other].reward)}`})`]), place);
    if (!drawn || together) drawDetail();
    reveal();
  }

  function fill(field, options, value) {
    field.replaceChildren(...options.map(option));
    field.value = value;
    const [previous, , next] = field.parentNode.children;
    previous.setAttribute("aria-disabled", field.selectedIndex === 0);
    next.setAttribute("aria-disabled", field.selectedIndex === options.length - 1);
  }

  function move(field, by) {
    const option = field.options[field.selectedIndex + by];
    if (!option) return;
    field.value = option.value;
    field.onchange ? field.onchange() : field.dispatchEvent(new Event("change"));
  }

  function goStep(step) {
    const now = run.rows[chosen], there = run.rows.filter(row => row.step === step);
    show((there.find(row => row.task === now.task && row.attempt === now.attempt) ?? there[0]).place);
  }

  function drawDetail() {
    try {
      detail.replaceChildren(...detailParts());
    } catch (error) {  // of one record: the others can still be looked at
      detail.replaceChildren(element("p", {class: "tv-note", role: "alert"}, inline(`This trajectory cannot be shown: ${error.message}`)));
    }
  }

  function detailParts() {
    const view = run.view(chosen), {row} = view;
    const group = run.groups.get(row.key);
    const beside = together && group.length > 1;
    const views = beside ? group.map(place => run.view(place)) : [view];
    const strongest = Math.max(0, ...views.flatMap(({segments}) => segments.map(({advantage}) => Math.abs(advantage ?? 0))));
    const title = element("h3", {class: "tv-title"}, `Step ${row.step} · `, inline(row.name), beside ? "" : ` · attempt ${row.attempt}`);
    const side = element("button", {type: "button", class: "tv-together", "aria-pressed": String(beside), onclick: toggle},
      "Attempts side by side");
    const tools = element("div", {class: "tv-tools"}, shadeChoice(), group.length > 1 && side);
    const lacks = lacking(view);
    const note = lacks.length ? element("p", {class: "tv-note"}, `This record does not have: ${lacks.join("; ")}.`) : null;
    const shown = beside ? besides(views, strongest) :
      [summary(view), taskPart(view), conversation(view, shade, strongest)];
    return [title, tools, legend(), note, ...shown].filter(Boolean);
  }

  function toggle() {
    together = !together;
    drawDetail();
    detail.querySelector(".tv-together")?.focus();
  }

  function shadeChoice() {
    const choose = event => { shade = event.target.value; drawDetail(); detail.querySelector("input:checked").focus(); };
    return element("fieldset", {class: "tv-shades"}, element("legend", {}, "Shade tokens by"),
      Object.entries(SHADES).map(([value, text]) => {
        const made = element("input", {type: "radio", name: "tv-shade", value, id: `tv-shade-${value}`, onchange: choose});
        made.checked = value === shade;
        return element("label", {}, made, text);
      }));
  }

  function legend() {
    if (shade === "none") return null;
    const entries = shade === "logprob" ? LEVELS.map(([, text], level) => [`tv-level-${level}`, text]) :
      [["tv-gained", "raised (positive advantage)"], ["tv-lost", "lowered (negative)"], ["", "no advantage, or not trained"]];
    return element("p", {class: "tv-legend"}, shade === "logprob" ? "Probability at which a token was sampled: " : "What training did to a segment's tokens: ",
      entries.flatMap(([kind, text]) => [element("span", {class: `tv-swatch ${kind}`}, text), " "]));
  }

  // The attempts of a group, each in a column; what all have in common at the start comes once.
  function besides(views, strongest) {
    let common = 0;
    const texts = views.map(({steps}) => steps.map(({message}) => JSON.stringify(message)));
    while (texts.every(steps => common < steps.length && steps[common] === texts[0][common])) common++;
    const rewards = views.map(({row}) => row.reward).filter(reward => reward !== null);
    const least = Math.min(...rewards), most = Math.max(...rewards);
    const told = most - least > 1e-6 ? `Rewards from ${number(least)} to ${number(most)}.` :
      "All rewards are alike: the group says nothing of what to change.";
    const columns = views.map(view => {
      const {reward, attempt, place} = view.row;
      const mark = most - least <= 1e-6 || reward === null ? "" : reward === most ? " (highest)" : reward === least ? " (lowest)" : "";
      return element("section", {class: `tv-column${place === chosen ? " tv-chosen" : ""}`, "aria-label": `attempt ${attempt}`},
        element("h4", {}, `Attempt ${attempt}: ${reward === null ? "masked" : `reward ${number(reward)}${mark}`}`),
        summary(view, true), conversation(view, shade, strongest, common));
    });
    const before = common ? element("details", {class: "tv-fold", open: true}, element("summary", {},
      `${count(common, "message")} that all attempts begin with (tokens and advantage are of attempt ${views[0].row.attempt})`), conversation(views[0], shade, strongest, 0, common)) : null;
    return [element("p", {}, told), before, element("div", {class: "tv-columns", tabindex: "0", role: "region",
      "aria-label": "attempts side by side"}, columns)];
  }

  // --- the list: only rows that are seen, and a few around them, are in the page ---

  function filter() {
    const mine = ++search;
    const keep = SHOWN[shownField.value][1], ended = endedField.value, compare = ORDERS[orderField.value][1];
    const found = run.rows.filter(row => keep(row, run) && (!ended || row.reason.split(":")[0] === ended));
    if (compare) found.sort(compare);  // stable: alike ones stay in the order of the run
    const wanted = searchField.value.trim().toLowerCase();
    if (!wanted) return listRows(found);
    const hits = [];
    let next = 0;
    const work = () => {
      if (mine !== search) return;
      for (const end = performance.now() + SLICE; next < found.length && performance.now() < end; next++) {
        if (run.text(found[next].place).includes(wanted)) hits.push(found[next]);
      }
      if (next === found.length) return listRows(hits);
      status.textContent = `Searching: ${Math.round(100 * next / found.length)}%`;
      setTimeout(work);
    };
    work();
  }

  function listRows(found) {
    listed = found.map(row => row.place);
    const total = run.rows.length;
    status.textContent = !total ? "" : listed.length === total ? count(total, "trajectory", "trajectories") :
      `${listed.length.toLocaleString("en")} of ${total.toLocaleString("en")} trajectories${listed.length ? "" : ": none fits the filters"}`;
    list.classList.toggle("tv-none", !listed.length);
    list.scrollTop = 0;
    drawList();
  }

  function reveal() {
    const at = listed.indexOf(chosen);
    if (at >= 0 && (at * ROW < list.scrollTop || (at + 1) * ROW > list.scrollTop + list.clientHeight)) {
      list.scrollTop = Math.max(0, at * ROW - list.clientHeight / 2);
    }
    drawList();
  }

  function drawList() {
    space.style.height = `${listed.length * ROW}px`;
    const from = Math.max(0, Math.floor(list.scrollTop / ROW) - AROUND);
    const to = Math.min(listed.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + AROUND);
    const at = listed.indexOf(chosen);
    const wanted = new Set(Array.from({length: to - from}, (_, offset) => from + offset));
    if (at >= 0) wanted.add(at);  // the active one is always in the page, for those who hear it
    space.replaceChildren(...[...wanted].sort((one, other) => one - other).map(entry => listRow(entry, entry === at)));
    if (at >= 0) list.setAttribute("aria-activedescendant", `tv-row-${listed[at]}`);
    else list.removeAttribute("aria-activedescendant");
  }

  function listRow(at, selected) {
    const row = run.rows[listed[at]];
    const marks = [row.failed ? "failed" : row.trained === "none" ? "not trained" : "", row.differing ? `≠ ${row.differing}` : ""].filter(Boolean);
    const bar = element("span", {class: "tv-bar", "aria-hidden": "true"}, element("span", {}));
    bar.firstChild.style.width = `${100 * (row.reward ?? 0)}%`;
    const made = element("div", {class: "tv-row", role: "option", id: `tv-row-${row.place}`, "aria-selected": String(selected),
      "aria-setsize": listed.length, "aria-posinset": at + 1, onclick: () => show(row.place)},
    element("span", {class: "tv-row-name"}, inline(row.name)),
    element("span", {class: "tv-row-reward"}, row.failed ? "masked" : number(row.reward)),
    element("span", {class: "tv-row-where"}, `step ${row.step}, attempt ${row.attempt}`, marks.length ? ` · ${marks.join(" · ")}` : ""), bar);
    made.style.top = `${at * ROW}px`;
    return made;
  }

  function walk(by) {
    if (!listed.length) return;
    const at = listed.indexOf(chosen);
    show(listed[at < 0 ? 0 : Math.min(listed.length - 1, Math.max(0, at + by))]);
  }

  // --- keys ---

  function listKey(event) {
    const page = Math.max(1, Math.floor(list.clientHeight / ROW) - 1);
    const by = {ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -listed.length, End: listed.length}[event.key];
    if (!by || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    walk(by);
  }

  function rootKey(event) {
    if (event.ctrlKey || event.altKey || event.metaKey || !run.rows.length) return;
    if (event.target.closest("select, textarea, input:not([type=radio])")) return;
    const act = {
      j: () => walk(1), k: () => walk(-1), "]": () => move(stepField, 1), "[": () => move(stepField, -1),
      ".": () => move(attemptField, 1), ",": () => move(attemptField, -1), g: toggle,
      s: () => { const names = Object.keys(SHADES); shade = names[(names.indexOf(shade) + 1) % names.length]; drawDetail(); },
      "/": () => searchField.focus(),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    const within = detail.contains(document.activeElement);
    act();
    if (within && !detail.contains(document.activeElement) && event.key !== "/") list.focus({preventScroll: true});
  }

  // Newer data: what is being read stays as it is, with all that was unfolded in it.
  window.EnvaceViewer.update = ({runs: newer}) => {
    const read = chosen === null ? null : run.rows[chosen], body = read && run.data.bodies[chosen];
    const runOf = run?.name, place = list.scrollTop;
    runs = newer.map(prepare);
    const next = runs.find(({name}) => name === runOf) ?? runs[0];
    const same = read && next?.rows.find(row => row.step === read.step && row.name === read.name && row.attempt === read.attempt);
    if (next) chooseRun(next, same, same && next.data.bodies[same.place] === body);
    list.scrollTop = place;
  };

  if (runs.length) chooseRun(run);
  else notes.append(element("p", {class: "tv-note"}, "There are no runs to show."));
}

window.EnvaceViewer = {start};
})();

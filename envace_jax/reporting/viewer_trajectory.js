// One trajectory as a conversation: who wrote what in which role, the recorded results beside the rehearsed ones, what the
// judge said, and each token's log-probability or advantage. Knows a decoded trajectory; no list, filter or navigation.
"use strict";
(() => {

const {element, visible, inline, block, folded, jsonText, difference} = window.EnvaceText;
const MANY_TOKENS = 1500;  // that are shown at once
const LEVELS = [[-10, "0.9 and more"], [-69, "0.5 to 0.9"], [-161, "0.2 to 0.5"], [-300, "0.05 to 0.2"], [-Infinity, "less than 0.05"]];
const REASONS = {
  done: "the last user turn was judged", malformed_call: "an assistant message whose calls cannot be read",
  too_many_calls: "more parallel calls than the limit",
  rehearsal_error: "a rehearsed result is unreadable, or says that the call cannot be executed",
  tool_error: "a result from outside says that the call cannot be executed",
  refused_call: "a call that its tool's schema does not allow", length: "what the policy wrote reached a limit of length",
  required_item: "a checklist item that the next turn requires was not met",
  assistant_limit: "as many assistant messages as allowed", user_limit: "as many user turns as allowed",
  generation_limit: "as many generations as allowed", fault: "something outside the policy failed: masked, not scored",
  fidelity: "a held-out reference result was rehearsed",
};

const number = (value, digits = 2) => value === null || value === undefined ? "–" : Number(value).toFixed(digits).replace("-", "−");
const signed = value => (value > 0 ? "+" : "") + number(value, 3);
const count = (many, one, more = `${one}s`) => `${many.toLocaleString("en")} ${many === 1 ? one : more}`;
const probability = hundredths => Math.exp(hundredths / 100);

// What the record does not hold, in words; [] for one that holds all.
function lacking({segments, turns, task}) {
  const lacks = [];
  if (!segments.some(segment => "advantage" in segment)) lacks.push("advantages");
  if (!segments.some(segment => "trained" in segment)) lacks.push("the loss mask");
  if (!segments.some(segment => "text" in segment)) lacks.push("the texts of tokens (their ids are shown)");
  if (!task.checklist) lacks.push("the questions of the checklist");
  if (!task.reference) lacks.push("recorded results to compare with");
  if (turns.length && !turns.some(turn => "words" in turn)) lacks.push("the judge's words");
  return segments.length ? lacks : [];
}

// --- tokens ---

function levelOf(logprob) {
  return LEVELS.findIndex(([least]) => logprob >= least);
}

// The segment as it was generated, token by token.
function tokens(segment, shade, strongest) {
  const pieces = [];
  let end = 0;
  if ("text" in segment) for (const length of segment.lengths) pieces.push(segment.text.slice(end, end += length));
  else for (const id of segment.tokens) pieces.push(`${id} `);
  const made = element("div", {class: "tv-tokens"});
  const known = shade === "advantage" && typeof segment.advantage === "number" && segment.trained !== false;
  if (known && segment.advantage !== 0) {
    made.classList.add(segment.advantage > 0 ? "tv-gained" : "tv-lost");
    made.style.setProperty("--tv-strength", `${Math.round(8 + 32 * Math.abs(segment.advantage) / (strongest || 1))}%`);
  }
  const add = (from, to) => pieces.slice(from, to).map((piece, offset) => {
    const logprob = segment.logprobs[from + offset];
    const told = logprob === undefined || logprob === null ? "no log-probability" :
      `log-probability ${number(logprob / 100)}, probability ${number(probability(logprob), 3)}`;
    const shaded = shade === "logprob" && typeof logprob === "number" ? ` tv-level-${levelOf(logprob)}` : "";
    return element("span", {class: `tv-token${shaded}`, title: `token ${from + offset + 1}: ${told}`}, visible(piece));
  });
  made.append(...add(0, MANY_TOKENS));
  if (pieces.length > MANY_TOKENS) {
    const more = element("button", {type: "button", class: "tv-more", onclick: () => {
      const rest = element("span", {tabindex: "-1"}, add(MANY_TOKENS));
      more.replaceWith(rest);
      rest.focus({preventScroll: true});
    }}, `Show the other ${count(pieces.length - MANY_TOKENS, "token")}`);
    made.append(more);
  }
  made.dir = "auto";
  return [made, unlikely(segment, pieces)];
}

// The mean and the least likely tokens in words: what the shades say to those who do not see them.
function unlikely(segment, pieces) {
  const known = segment.logprobs.map((logprob, place) => [logprob, pieces[place]]).filter(([logprob]) => typeof logprob === "number");
  if (!known.length) return element("p", {class: "tv-note"}, "No log-probabilities were recorded.");
  const mean = known.reduce((sum, [logprob]) => sum + logprob, 0) / known.length / 100;
  const least = known.filter(([logprob]) => logprob < -10).sort((one, other) => one[0] - other[0]).slice(0, 4);
  const told = least.flatMap(([logprob, piece], place) => [place ? ", " : "; least likely: ",
    element("code", {dir: "auto"}, visible((piece ?? "").trim() || JSON.stringify(piece ?? ""))), ` ${number(logprob / 100)}`]);
  return element("p", {class: "tv-note"}, `Mean log-probability ${number(mean)}`, told, ".");
}

// --- parts of the conversation ---

function facts(segment) {
  const size = (segment.lengths ?? segment.tokens ?? []).length;
  const cut = segment.finish_reason === "length" ? "cut off at the limit" : null;
  const advantage = typeof segment.advantage === "number" ? `advantage ${signed(segment.advantage)}` :
    "advantage" in segment ? "no advantage" : null;
  const mask = segment.trained === true ? "trained" : segment.trained === false ? "not trained" : "loss mask unknown";
  return element("span", {class: "tv-facts"}, [count(size, "token"), cut, advantage].filter(Boolean).join(" · "), " ",
    element("span", {class: `tv-mask tv-mask-${segment.trained ?? "unknown"}`, title: maskTitle(segment.trained)}, mask));
}

function maskTitle(trained) {
  return trained === true ? "all of its tokens are in the loss mask" :
    trained === false ? "none of its tokens is in the loss mask" : "the record does not say whether it was trained";
}

// What a segment says, formatted, and as it was generated: the latter first where tokens are shaded.
function segmentBody(segment, formatted, shade, strongest) {
  const generated = () => tokens(segment, shade, strongest);
  if (shade === "none") return [formatted(), folded("As generated, token by token", generated)].flat();
  return [...generated(), folded("Formatted", formatted, false)];
}

function part(kind, tag, title, segment, body) {
  const mask = segment ? ` tv-trained-${segment.trained ?? "unknown"}` : "";
  return element("li", {class: `tv-part tv-${kind}${mask}`},
    element("div", {class: "tv-head"}, element("span", {class: "tv-tag"}, tag), title && element("span", {}, title),
      segment && facts(segment)), body);
}

function assistantText(message) {
  const thoughts = message.reasoning_content;
  return [
    thoughts && folded(`Thoughts (${count(thoughts.length, "character")})`, () => block(thoughts)),
    message.content && block(message.content),
    (message.calls ?? []).map(([name, text]) => element("div", {class: "tv-call"},
      element("div", {class: "tv-name"}, "calls ", element("code", {}, inline(name))), jsonText(text))),
    !message.content && !message.calls?.length && element("p", {class: "tv-note"}, "(an empty message)"),
  ].flat().filter(Boolean);
}

function resultText(step, view) {
  const content = step.message.content ?? "";
  const recorded = view.task.reference?.[step.reference];
  if (!recorded) {
    const why = step.message.rehearsed !== true ? null : !view.task.reference ? null :
      "The reference conversation does not make this call: there is no recorded result to compare with.";
    return [jsonText(content), why && element("p", {class: "tv-note"}, why)].filter(Boolean);
  }
  const {left, right, names} = difference(content, recorded[2]);
  if (!step.differs && !names.length) {
    return [jsonText(content), element("p", {class: "tv-verdict"}, element("span", {"aria-hidden": "true"}, "= "), "Equal to the recorded (real) result.")];
  }
  const few = names.slice(0, 6).flatMap((name, place) => [place ? ", " : ": ", element("code", {}, inline(name))]);
  return [
    element("div", {class: "tv-beside"},
      element("div", {}, element("div", {class: "tv-side"}, "rehearsed"), left),
      element("div", {}, element("div", {class: "tv-side"}, "recorded (real)"), right)),
    element("p", {class: "tv-verdict"}, element("span", {"aria-hidden": "true"}, "≠ "), "Differs from the recorded (real) result", few,
      names.length > 6 ? ` and ${names.length - 6} more` : "", "."),
  ];
}

function stepPart(step, view, shade, strongest) {
  const {message} = step;
  const segment = view.segments[step.segment];
  const text = message.content ?? "";
  if (message.role === "system") {
    return part("given", "System", null, null, folded(count(text.length, "character"), () => block(text)));
  }
  if (message.role === "user") return part("given", "User", null, null, block(text));
  if (message.role === "assistant") {
    if (!segment) return part("given", "Assistant", "given by the task", null, assistantText(message));
    return part("act", "Act", "assistant", segment, segmentBody(segment, () => assistantText(message), shade, strongest));
  }
  const title = element("span", {}, "result of ", element("code", {}, inline(message.name ?? `call ${(step.call ?? 0) + 1}`)));
  const body = () => resultText(step, view);
  if (segment) return part("rehearse", "Rehearse", title, segment, segmentBody(segment, body, shade, strongest));
  return part("given", "Result", [title, message.rehearsed === undefined ? ", given by the task" : ", from outside"].flat(), null, body());
}

// Segments of which no message came.
function loosePart(segment, shade, strongest) {
  const [kind, tag] = segment.role === "act" ? ["act", "Act"] : ["rehearse", "Rehearse"];
  return part(kind, tag, "no message came of it", segment, tokens(segment, shade, strongest));
}

function judged(view, turn) {
  const score = view.turns[turn], items = view.task.checklist?.[turn] ?? [];
  const title = view.turns.length > 1 || (view.task.user_turns?.length ?? 0) > 1 ? `Turn ${turn + 1}` : "The turn";
  const last = turn + 1 === view.task.user_turns?.length;
  if (!score) return element("li", {class: "tv-part tv-judged"}, element("p", {}, `${title} was not judged.`));
  const rows = score.verdicts.map((held, place) => {
    const item = items[place], words = score.words?.[place];
    return element("li", {class: held ? "tv-held" : "tv-missed"},
      element("span", {class: "tv-badge"}, held ? "✓ held" : "✗ not held"), " ",
      item ? inline(item.question) : `item ${place + 1}`,
      item && element("span", {class: "tv-weight"}, ` weight ${number(item.weight)}`),
      item?.check && folded("program check", () => jsonText(JSON.stringify(item.check))),
      words ? element("blockquote", {}, element("span", {class: "tv-side"}, "the judge: "), inline(words)) : null);
  });
  return element("li", {class: "tv-part tv-judged"},
    element("div", {class: "tv-head"}, element("span", {class: "tv-tag"}, "Checklist"),
      element("span", {}, `${title}: reward ${number(score.reward)}${score.proceed || last ? "" : ", the next turn may not begin"}`)),
    rows.length ? element("ul", {class: "tv-items"}, rows) : element("p", {class: "tv-note"}, "There are no items."));
}

// The conversation's messages from one place to another, with what was judged in between.
function conversation(view, shade, strongest, from = 0, to = Infinity) {
  const list = element("ol", {class: "tv-steps"});
  const turnOf = place => {  // the turn of the next segment that a message has
    for (let next = place; next < view.steps.length; next++) {
      const segment = view.segments[view.steps[next].segment];
      if (segment?.role === "act") return segment.turn;
    }
    return Infinity;
  };
  let turn = 0;
  view.steps.slice(0, to).forEach((step, place) => {
    if (step.message.role === "user") {
      for (const next = turnOf(place); turn < next && turn < view.turns.length; turn++) {
        if (place >= from) list.append(judged(view, turn));
      }
    }
    if (place >= from) list.append(stepPart(step, view, shade, strongest));
  });
  if (to < view.steps.length) return list;
  const told = new Set(view.steps.map(step => step.segment));
  for (const segment of view.segments.filter((_, place) => !told.has(place))) list.append(loosePart(segment, shade, strongest));
  const turns = Math.max(view.turns.length, view.steps.length ? Math.min(view.task.user_turns?.length ?? 0, turn + 1) : 0);
  for (; turn < turns; turn++) list.append(judged(view, turn));
  return list;
}

function taskPart(view) {
  const {user_turns: said, checklist, reference} = view.task;
  if (!said && !checklist && !reference) return null;
  return folded("The task: user turns, checklist and recorded calls", () => [
    said && element("ol", {class: "tv-turns"}, said.map(text => element("li", {}, block(text)))),
    checklist && element("ul", {class: "tv-items"}, checklist.flatMap((items, turn) => items.map(item =>
      element("li", {}, `turn ${turn + 1}: `, inline(item.question), element("span", {class: "tv-weight"}, ` weight ${number(item.weight)}`))))),
    reference?.length ? element("ul", {class: "tv-members"}, reference.map(([name, given, result]) =>
      element("li", {}, element("code", {}, inline(name)), " ", jsonText(given), " → ", jsonText(result)))) : null,
  ].filter(Boolean));
}

// Badges that say how it ended; where it is one of several in brief.
function summary(view, brief = false) {
  const {row} = view;
  const [reason, ...rest] = row.reason.split(":");
  const badge = (kind, ...text) => element("span", {class: `tv-badge ${kind}`}, ...text);
  return element("p", {class: "tv-summary"},
    row.failed ? badge("tv-warn", "failed, masked") : !brief && badge("", `reward ${number(row.reward)}`), " ",
    badge("", `ended: ${reason}`), " ",
    row.trained === "none" && badge("tv-warn", "not trained"), row.trained === "some" && badge("", "trained in part"), " ",
    row.compared > 0 && badge(row.differing ? "tv-warn" : "", `${row.differing} of ${row.compared} rehearsed results differ`), " ",
    element("span", {class: "tv-facts"}, `${count(row.act_tokens, "token")} act, ${row.rehearse_tokens.toLocaleString("en")} rehearse`),
    !brief && element("span", {class: "tv-why"}, `It ended so: ${REASONS[reason] ?? reason}`, rest.length ? [" (", inline(rest.join(":").trim()), ")"] : "", "."));
}

window.EnvaceTrajectory = {conversation, summary, taskPart, lacking, number, signed, count, LEVELS};
})();

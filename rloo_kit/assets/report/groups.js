/* Groups of completions: which are shown, and leave-one-out at work in one. */

/* --- groups: what is known of one --- */

const knownOf = (values) => values.filter((value) => value != null);

function summary(group) {
  if (group.summary) return group.summary;
  const advantages = knownOf(group.completions.map((completion) => completion.advantage));
  const scores = knownOf(group.completions.map((completion) => completion.score));
  const texts = [...group.prompt.map((message) => message.text),
    ...group.completions.flatMap((one) => [one.thought, one.answer])];
  group.summary = {
    highest: Math.max(...advantages, -Infinity), lowest: Math.min(...advantages, Infinity),
    best: Math.max(...scores, -Infinity), worst: Math.min(...scores, Infinity),
    signal: scores.length > 1 && Math.max(...scores) - Math.min(...scores) > 1e-6,
    truncated: group.completions.some((completion) => completion.truncated),
    different: new Set(group.completions.map((one) => JSON.stringify([one.thought, one.answer]))).size,
    text: texts.map(wholeText).join("\n").toLowerCase(),
  };
  return group.summary;
}

/** "score 1.00 - mean of the 7 others 0.43 = +0.57", with the price of the KL where there is one. */
function sumOf(group, completion, beta) {
  const { score, kl, baseline, advantage } = completion;
  if (score == null) return "no score: it does not count in its group";
  if (baseline == null) return "no other completion of the group has a score";
  const others = group.completions.filter((one) => one !== completion && one.score != null).length;
  const price = beta && kl ? beta * kl : 0;
  const paid = isZero(price) ? "" : ` ${MINUS} KL ${fixed(kl)} \u00d7 ${format(beta)}`;
  const sum = score - price - baseline;
  const whose = others === 1 ? "the other" : `the ${others} others`;
  const terms = `score ${fixed(score)}${paid} ${MINUS} mean of ${whose} ${fixed(baseline)} = ${signed(sum)}`;
  const same = advantage == null || Math.abs(sum - advantage) < 2e-3 * Math.max(1, Math.abs(sum));
  return same ? terms : `${terms}; trained with ${signed(advantage)} (normalised, masked, or by token)`;
}

/* --- groups: filters --- */

const browser = { run: 0, found: [], current: -1 };
const form = byId("filters");

const within = (value, least, most) => value != null && value >= least && value <= most;

function matches(group, wanted) {
  const about = summary(group);
  const { least, most } = wanted;
  const paid = (one) => within(wanted.reward ? one.rewards[wanted.reward] : one.score, least, most);
  const anyPay = least === -Infinity && most === Infinity;
  return within(group.step, wanted.from, wanted.to)
    && (!wanted.signal || about.signal === (wanted.signal === "yes"))
    && (!wanted.truncated || about.truncated === (wanted.truncated === "yes"))
    && (anyPay || group.completions.some(paid))
    && about.text.includes(wanted.text);
}

function wantedGroups() {
  const value = (name) => form.elements[name].value;
  const bound = (name, open) => (value(name) === "" ? open : Number(value(name)));
  return {
    text: value("text").trim().toLowerCase(),
    from: bound("from", -Infinity),
    to: bound("to", Infinity),
    signal: value("signal"),
    truncated: value("truncated"),
    reward: value("reward"),
    least: bound("least", -Infinity),
    most: bound("most", Infinity),
    order: value("order"),
  };
}

const ORDERS = {
  step: () => 0,
  latest: (a, b) => b.step - a.step || a.group - b.group,
  highest: (a, b) => summary(b).highest - summary(a).highest,
  lowest: (a, b) => summary(a).lowest - summary(b).lowest,
  best: (a, b) => summary(b).best - summary(a).best,
  worst: (a, b) => summary(a).worst - summary(b).worst,
};

/** How many groups are shown, and how many the page has of how many there were. */
function keptText(run) {
  const shown = `${plural(browser.found.length, "group")} shown`;
  const recorded = `${plural(run.num_groups, "group")} (${plural(run.num_completions, "completion")})`;
  if (run.groups.length === run.num_groups) return `${shown}, of all ${recorded} that were recorded.`;
  const kept = run.groups.length.toLocaleString("en");
  return `${shown}. This page keeps ${kept} of ${recorded}: spread over the run.`;
}

function applyFilters() {
  const run = runs[browser.run];
  const wanted = wantedGroups();
  browser.query = wanted.text;
  browser.found = run.groups.filter((group) => matches(group, wanted)).sort(ORDERS[wanted.order]);
  byId("kept").textContent = keptText(run);
  byId("group-list").replaceChildren(...browser.found.map(listItem));
  const first = wanted.order === "step" ? browser.found.findIndex((group) => summary(group).signal) : 0;
  showGroup(browser.found.length ? Math.max(0, first) : -1);
}

function listItem(group, place) {
  const bars = group.completions.slice(0, 40).map((completion, number) => {
    const side = sideOf(completion.advantage);
    const [y, height] = { up: [1, 7], down: [8, 7], zero: [7, 2] }[side];
    return draw("rect", { x: 6 * number, y, width: 4, height, fill: "currentColor", class: side });
  });
  const prompt = visible(wholeText(group.prompt[group.prompt.length - 1]?.text).slice(0, 90));
  const width = 6 * bars.length;
  const strip = { class: "strip", viewBox: `0 0 ${width || 1} 16`, width, "aria-hidden": "true" };
  const onclick = () => showGroup(place, true);
  return make("li", {}, make("button", { type: "button", tabindex: -1, onclick },
    make("span", {}, `step ${group.step} \u00b7 ${group.group}`),
    draw("svg", strip, ...bars),
    make("span", { class: "snippet" }, prompt || "(no prompt)")));
}

/* --- groups: one of them --- */

const PICTURE_HINT = "Bar: score minus KL penalty. Dashed line: mean of the others. Arrow: advantage. "
  + "Point at a column, or reach it with Tab, to see the calculation.";
const PICTURE_LABEL = "Score of every completion, the mean of the others as a dashed line, the advantage as "
  + "an arrow between them";

const hashOf = (group) => `#group=${group.step}-${group.group}${several ? `&run=${browser.run + 1}` : ""}`;

function showGroup(place, linked = false) {
  const buttons = byId("group-list").querySelectorAll("button");
  for (const [at, button] of buttons.entries()) {
    button.tabIndex = at === Math.max(0, place) ? 0 : -1;
    if (at === place) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
  browser.current = place;
  const group = browser.found[place];
  byId("group").replaceChildren(group ? groupNode(group)
    : make("p", { class: "calm" }, "No group matches: clear the filters."));
  if (group) scrollWithin(byId("group-list"), buttons[place]);
  if (group && linked) {
    try { history.replaceState(null, "", hashOf(group)); } catch { /* a frame may not have an address */ }
  }
}

/** Scroll a list, and never the page, so that one of its items is seen. */
function scrollWithin(list, item) {
  const [outer, inner] = [list.getBoundingClientRect(), item.getBoundingClientRect()];
  list.scrollTop += Math.min(0, inner.top - outer.top) + Math.max(0, inner.bottom - outer.bottom);
}

function step(by) {
  const place = browser.current + by;
  if (place >= 0 && place < browser.found.length) showGroup(place, true);
}

function inWords(group) {
  const { different, signal } = summary(group);
  const size = group.completions.length;
  const texts = different === size ? "" : `, ${different === 1 ? "one text" : `${different} different texts`}`;
  const moved = group.completions.some((completion) => completion.advantage);
  const equal = moved ? "scores are equal: only the KL penalty acts" : "scores are equal: no signal";
  return `${plural(size, "completion")}${texts}; ${signal ? "scores differ" : equal}`;
}

function moveButton(label, by) {
  const onclick = () => {
    step(by);
    const again = [...byId("group").querySelectorAll(".moves button")].find((one) => one.textContent === label);
    again.focus();
  };
  const disabled = !browser.found[browser.current + by];
  return make("button", { type: "button", class: "control", disabled, onclick }, label);
}

function groupNode(group) {
  const beta = runs[browser.run].beta;
  const sum = make("p", { class: "sum", "aria-live": "polite" }, PICTURE_HINT);
  const cards = group.completions.map((completion, place) => card(group, completion, place, beta));
  return make("article", { "aria-labelledby": "group-title" },
    make("div", { class: "group-head" },
      make("h3", { id: "group-title" }, `Step ${group.step}, prompt ${group.group}`),
      make("span", { class: "soft" }, inWords(group)),
      make("div", { class: "moves" }, moveButton("Previous", -1), moveButton("Next", 1))),
    putPrompt(make("div", { class: "prompt", tabindex: 0, role: "region", "aria-label": "Prompt" }),
      group.prompt, browser.query),
    picture(group, beta, cards, sum), sum,
    make("div", { class: "cards" }, cards));
}

function card(group, completion, place, beta) {
  const side = sideOf(completion.advantage);
  const tag = (name, value) => make("span", {}, `${name} `, make("b", {}, format(value)));
  const tags = Object.entries(completion.rewards).map(([name, value]) => tag(name, value));
  if (completion.kl != null) tags.push(tag("KL", completion.kl));
  if (completion.tokens != null) {
    const thought = completion.thought_tokens == null ? "" : `, ${completion.thought_tokens} of thought`;
    tags.push(make("span", {}, make("b", {}, String(completion.tokens)), ` tokens${thought}`));
  }
  if (completion.truncated) tags.push(make("span", { class: "cut" }, "cut off"));
  return make("article", { class: `card ${side}-card`, id: `completion-${place + 1}` },
    make("header", {}, make("h4", {}, `Completion ${place + 1}`),
      make("span", { class: `advantage ${side}`, title: "advantage" }, signed(completion.advantage))),
    make("p", { class: "card-sum" }, sumOf(group, completion, beta)),
    completionText(completion, browser.query),
    make("div", { class: "tags" }, tags));
}

/* --- groups: leave-one-out at work --- */

/** The score less the price of the KL. */
function paidOf({ score, kl }, beta) {
  if (score == null) return null;
  return score - (beta && kl ? beta * kl : 0);
}

/** A bar for every score, a dashed line for the mean of the others, an arrow for the advantage. */
function picture(group, beta, cards, sum) {
  const rows = group.completions.map((one) => ({ paid: paidOf(one, beta), base: one.baseline }));
  const values = knownOf(rows.flatMap((row) => [row.paid, row.base]));
  if (!values.length) return null;
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const equal = isZero(most - least);
  const spread = equal ? 1 : most - least;
  const nearZero = least >= 0 ? least < 3 * spread : -most < 3 * spread;
  const low = least >= 0 && nearZero ? 0 : least - spread * 0.2;
  const high = most <= 0 && nearZero ? 0 : most + (equal ? 0.2 : 0);
  const [top, bottom, pitch] = [24, 116, 58];
  const y = (value) => bottom - ((bottom - top) * (value - low)) / (high - low || 1);
  const floor = y(Math.min(high, Math.max(low, 0)));
  const columns = rows.map((row, place) => column(group.completions[place], row, { place, pitch, y, floor }));
  columns.forEach((node, place) => {
    const label = `Completion ${place + 1}: ${sumOf(group, group.completions[place], beta)}`;
    const show = (lit) => {
      cards[place].classList.toggle("lit", lit);
      sum.textContent = lit ? label : PICTURE_HINT;
    };
    for (const event of ["mouseenter", "focus"]) node.addEventListener(event, () => show(true));
    for (const event of ["mouseleave", "blur"]) node.addEventListener(event, () => show(false));
    node.addEventListener("click", () => cards[place].scrollIntoView({ block: "nearest" }));
  });
  const width = 36 + pitch * rows.length;
  const axis = [least, most].map((value) => draw("text", { x: 0, y: y(value) + 4 }, format(value)));
  const frame = { width, height: 142, viewBox: `0 0 ${width} 142`, role: "group", "aria-label": PICTURE_LABEL };
  return make("div", { class: "picture" },
    draw("svg", frame, ...(equal ? axis.slice(0, 1) : axis), ...columns));
}

function column(completion, row, { place, pitch, y, floor }) {
  const x = 44 + pitch * place;
  const centre = x + 22;
  const side = sideOf(completion.advantage);
  const node = draw("g", { class: "column", tabindex: 0, role: "img",
    "aria-label": `Completion ${place + 1}: advantage ${signed(completion.advantage)}` });
  node.append(draw("rect", { x: x - 6, y: 0, width: pitch - 2, height: 142, fill: "transparent" }));
  if (row.paid != null) {
    const [top, height] = [Math.min(floor, y(row.paid)) - 1, Math.abs(y(row.paid) - floor) + 2];
    node.append(draw("rect", { class: "bar", x: x + 8, y: top, width: 28, height }));
  }
  if (row.paid != null && row.base != null) {
    const [from, to] = [y(row.base), y(row.paid)];
    const head = to < from ? 5 : -5;
    node.append(draw("line", { class: "mean", x1: x, x2: x + 44, y1: from, y2: from }));
    if (Math.abs(to - from) > 6) {
      const d = `M${centre} ${from}V${to}m-4 ${head}l4 ${-head}l4 ${head}`;
      node.append(draw("path", { class: side, d, fill: "none", stroke: "currentColor", "stroke-width": 2.25 }));
    }
  }
  node.append(draw("text", { class: side, x: centre, y: 12, "text-anchor": "middle", "font-weight": 600 },
    signed(completion.advantage)));
  node.append(draw("text", { x: centre, y: 136, "text-anchor": "middle" },
    `${place + 1}${completion.truncated ? " cut" : ""}`));
  return node;
}

/* --- groups: the section --- */

function chooseRun(place) {
  browser.run = place;
  form.elements.run.value = String(place);
  const completions = runs[place].groups.flatMap((group) => group.completions);
  const names = [...new Set(completions.flatMap((one) => Object.keys(one.rewards)))];
  fillSelect(form.elements.reward, [["", "score"], ...names.map((name) => [name, name])]);
  applyFilters();
}

function followHash() {
  const match = /^#group=(\d+)-(\d+)(?:&run=(\d+))?$/.exec(location.hash);
  if (!match) return;
  const [at, number, run] = [match[1], match[2], match[3] || 1].map(Number);
  form.reset();
  chooseRun(Math.max(0, Math.min(runs.length, run) - 1));
  const place = browser.found.findIndex((group) => group.step === at && group.group === number);
  if (place < 0) return;
  showGroup(place);
  byId("groups").scrollIntoView();
}

function onGroupKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select")) return;
  const inList = event.target.closest("#group-list");
  const moves = { n: 1, p: -1, ...(inList ? { ArrowDown: 1, ArrowUp: -1 } : {}) };
  if (!moves[event.key]) return;
  event.preventDefault();
  step(moves[event.key]);
  if (inList) byId("group-list").querySelector("[aria-current]").focus();
}

function showGroups() {
  const first = runs.findIndex((run) => run.groups.length);
  byId("no-groups").hidden = first >= 0;
  byId("groups-part").hidden = first < 0;
  if (first < 0) return;
  fillSelect(form.elements.run, runs.map((run, place) => [place, run.name]));
  form.addEventListener("input", ({ target }) => {
    if (target.name === "run") chooseRun(Number(target.value));
    else applyFilters();
  });
  byId("clear").addEventListener("click", () => {
    form.reset();
    chooseRun(browser.run);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("groups").addEventListener("keydown", onGroupKey);
  addEventListener("hashchange", followHash);
  chooseRun(first);
  followHash();
}
